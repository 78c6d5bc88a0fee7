"""How far the published combination, factors summed before they are multiplied, is from the sum of the updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from safetensors.torch import load_file
from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"


def update_error(adapters: Mapping[str, Path]) -> float:
    """The mean over modules of |(sum of B_e) (sum of A_e) - sum of B_e A_e| / |sum of B_e A_e|, Frobenius norms.

    That is what equal weights give, in both combinations, for experts of one rank and scale.
    """
    experts = [load_file(folder / "adapter_model.safetensors") for folder in adapters.values()]
    modules = [key.removesuffix(A) for key in experts[0] if key.endswith(A)]
    return mean(_error([(one[path + A], one[path + B]) for one in experts]) for path in modules)


def _error(factors: list[tuple[Tensor, Tensor]]) -> float:
    exact = sum(b @ a for a, b in factors[1:]) + factors[0][1] @ factors[0][0]
    a, b = (sum(one[place] for one in factors[1:]) + factors[0][place] for place in (0, 1))
    return float((b @ a - exact).norm() / exact.norm())
