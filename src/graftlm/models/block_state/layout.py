"""Views and copies of tensors by heads, windows and chunks.

Shape suffixes: B rows, G slots of the grid, I windows of the grid, w slots of a window, H heads, K width of a head,
d = H K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split features (..., slots, d) into H = `num_heads` heads (..., H, slots, K)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(-2, -3)


def merge_heads(x: Tensor) -> Tensor:
    """Concatenate heads (..., H, slots, K) into features (..., slots, d)."""
    return x.transpose(-2, -3).flatten(-2)


def split_windows(x_BG: Tensor, width: int) -> Tensor:
    """Split slots (B, G, ...) into windows (B, I, w, ...) of w = `width` slots, a divisor of G."""
    return x_BG.unflatten(1, (-1, width))


def overlapping_windows(
    x_BS: Tensor,
    width: int,
    before: int,
    after: int = 0,
) -> Tensor:
    """Return a view of each window with the slots around it.

    Args:
        x_BS: values (B, before + G + after, ...).
        width: slots w of a window.
        before: number of slots before each window.
        after: number of slots after each window.

    Returns:
        Windows (B, I, before + w + after, ...).
    """
    return x_BS.unfold(1, before + width + after, width).movedim(-1, 2)


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor (B, I, w, d) in chunks, which are copied only once, to their final place.

    Args:
        chunks: consecutive parts of the tensor.
        dim: dimension of the chunks: 1 for chunks of windows, 2 for chunks within windows.
    """

    chunks: list[Tensor]
    dim: int = 1

    def concatenate(self) -> Tensor:
        """Return the whole tensor (B, G, d)."""
        if len(self.chunks) == 1:
            return self.chunks[0].flatten(1, 2)
        return torch.cat(self.chunks, dim=self.dim).flatten(1, 2)

    def copy_into(self, out_BGd: Tensor) -> None:
        """Copy all chunks into `out_BGd` (B, G, d)."""
        width = self.chunks[0].shape[2]
        if self.dim == 2:
            width = sum(chunk.shape[2] for chunk in self.chunks)
        sizes = [chunk.shape[self.dim] for chunk in self.chunks]
        windows = split_windows(out_BGd, width)
        targets = windows.split(sizes, dim=self.dim)
        for target, chunk in zip(targets, self.chunks, strict=True):
            target.copy_(chunk)


def concat_features(*tensors: ChunkedTensor) -> Tensor:
    """Concatenate n chunked tensors along their features to (B, G, n d), with a single copy if gradients are off."""
    if len(tensors) == 1:
        return tensors[0].concatenate()
    if torch.is_grad_enabled():
        joined = [tensor.concatenate() for tensor in tensors]
        return torch.cat(joined, dim=-1)
    count = len(tensors)
    chunks = tensors[0].chunks
    rows, _, _, width = chunks[0].shape
    slots = sum(chunk.shape[1] * chunk.shape[2] for chunk in chunks)
    out = chunks[0].new_empty(rows, slots, count * width)
    targets = out.chunk(count, dim=-1)
    for tensor, target in zip(tensors, targets, strict=True):
        tensor.copy_into(target)
    return out
