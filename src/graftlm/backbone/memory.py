"""Check that weights fit into memory."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch

from graftlm.errors import BackboneError

# transformers' models take seconds to import, so functions import them.


def check_memory(sizes: Mapping[str, int], device: str | torch.device, *, quantized: bool = False) -> None:
    """Raise `BackboneError` if weights of these bytes, by model, do not fit into a device's free memory together.

    Of quantised ones the largest counts whole, and the others by an eighth: nothing that might fit is refused.
    """
    free = psutil.virtual_memory().available
    if str(device).startswith("cuda") and torch.cuda.is_available():
        free = torch.cuda.mem_get_info(device)[0]
    largest, total = max(sizes.values()), sum(sizes.values())
    if (largest + (total - largest) / 8 if quantized else total) > free:
        each = " + ".join(f"{name} {size / 1e9:,.1f}" for name, size in sizes.items())
        raise BackboneError(
            f"The weights take {total / 1e9:,.1f} GB ({each}), and {device} has {free / 1e9:,.1f} GB free: name fewer "
            "or smaller models, or a smaller dtype."
        )
