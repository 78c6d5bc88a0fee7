"""The normalization of block-state models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graftlm.models.block_state.config import BlockStateConfig


class RMSNorm(nn.RMSNorm):
    """RMS normalization.

    Input and output have the dtype of the weights; the mean square is computed in at least float32.

    Args:
        width: size of the last dimension.
        config: config of the model.
    """

    def __init__(self, width: int, config: BlockStateConfig) -> None:
        super().__init__(width, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize vectors (..., width)."""
        x = x.to(self.weight.dtype)
        if x.device.type != "cpu":
            return super().forward(x)
        # PyTorch has no fused kernel on the CPU and reads the input five times. This code reads it three times.
        dtype = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        mean_square = length.square() / x.shape[-1]
        normed = (x * torch.rsqrt(mean_square + self.eps)).to(x.dtype)
        if torch.is_grad_enabled():
            return normed * self.weight
        return normed.mul_(self.weight)
