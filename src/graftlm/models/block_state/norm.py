"""The normalisation of block-state models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graftlm.models.block_state.config import BlockStateConfig


class RMSNorm(nn.RMSNorm):
    """Root-mean-square normalisation, in the dtype of its weights.

    PyTorch has no fused kernel for it on the CPU and reads the input five times; this implementation reads it three
    times.

    Args:
        width: size of the last dimension.
        config: config of the model.
    """

    def __init__(self, width: int, config: BlockStateConfig) -> None:
        super().__init__(width, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise vectors (..., width)."""
        x = x.to(self.weight.dtype)
        if x.device.type != "cpu":
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        mean_square = length.square() / x.shape[-1]
        normed = (x * torch.rsqrt(mean_square + self.eps)).to(x.dtype)
        if torch.is_grad_enabled():
            return normed * self.weight
        return normed.mul_(self.weight)
