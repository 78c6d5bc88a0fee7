"""The precision of training: bfloat16 where the hardware multiplies it, else float32."""

from __future__ import annotations

from typing import Literal

import torch

from graftlm.backbone import default_device

Precision = Literal["bf16", "fp32"]


def training_precision(device: torch.device | str | None) -> Precision:
    """Return `bf16` on a GPU or a CPU with instructions for products in bfloat16, else `fp32`.

    Other CPUs emulate such products, and are slower with them. Only x86 processors are asked for their instructions.

    Args:
        device: the device of the training; without it, the one that is chosen by itself.
    """
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if device.type == "cpu" and _cpu_multiplies_bfloat16():
        return "bf16"
    return "fp32"


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
