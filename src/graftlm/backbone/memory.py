"""Check that weights fit into memory."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch

from graftlm.errors import BackboneError


def check_memory(sizes: Mapping[str, int], device: str | torch.device, *, quantized: bool = False) -> None:
    """Check that the weights of all models together fit into a device's free memory.

    Args:
        sizes: bytes of the weights of each model as they are loaded, by the model's name; at least one.
        device: where they are put; other devices than CUDA count as main memory.
        quantized: whether the weights are quantized after loading. The largest model then counts in full, and the
            others by an eighth, so that nothing is refused that might fit.

    Raises:
        BackboneError: the weights do not fit.
    """
    if str(device).startswith("cuda") and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    total = sum(sizes.values())
    needed: float = total
    if quantized:
        largest = max(sizes.values())
        needed = largest + (total - largest) / 8
    if needed <= free:
        return
    parts = " + ".join(f"{name} {size / 1e9:,.1f}" for name, size in sizes.items())
    raise BackboneError(
        f"The weights take {total / 1e9:,.1f} GB ({parts}), but {device} has {free / 1e9:,.1f} GB free: name fewer or "
        "smaller models, or a smaller dtype."
    )
