"""Where the factors of an expert come from: a PEFT folder, the tensors of a saved graft, or an initialization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.grafts.token_routing.adapters import read_adapter
from graftlm.grafts.token_routing.config import ExpertConfig, TokenRoutingConfig
from graftlm.grafts.token_routing.experts import Factors, new_factors


def read_expert(
    name: str,
    expert: ExpertConfig,
    backbone: Backbone,
    *,
    is_bundled: bool,
) -> tuple[dict[str, Factors], str | None]:
    """Return the factors of an expert by module path, and the hash of its tensor file; None for others."""
    if expert.bare:
        return {}, None
    if expert.path is None:
        return new_factors(name, expert, backbone), None
    is_absent = not Path(expert.path).expanduser().exists()
    if is_bundled and expert.sha256 is not None and is_absent:
        return {}, expert.sha256  # `load_tensors` restores its factors
    return read_adapter(name, expert, backbone)


def saved_factors(
    config: TokenRoutingConfig,
    factors_of: Callable[[str], Mapping[str, Factors]],
) -> dict[str, Tensor]:
    """Return the factors of new or bundled experts as an artifact has them, by name; the scales are copies.

    Args:
        config: configuration of the routing.
        factors_of: returns the factors of an expert by module path.
    """
    tensors = {}
    for name, expert in config.experts.items():
        if expert.path is not None and not config.bundle:
            continue
        for path, factors in factors_of(name).items():
            tensors[f"{name}.{path}.a"] = factors.a.detach()
            tensors[f"{name}.{path}.b"] = factors.b.detach()
            tensors[f"{name}.{path}.scale"] = torch.tensor(float(factors.scale))
    return tensors


def restore_factors(factors: Mapping[str, dict[str, Factors]], tensors: Mapping[str, Tensor]) -> bool:
    """Add the saved factors of experts that have none, since their folders no longer exist.

    Args:
        factors: factors by expert and module path, which are completed.
        tensors: the tensors of `saved_factors`.

    Returns:
        Whether there were such experts.
    """
    absent = [name for name, own in factors.items() if not own]
    for key in tensors:
        name, _, path = key.removesuffix(".a").partition(".")
        if name in absent and key.endswith(".a"):
            factors[name][path] = _saved_expert(tensors, f"{name}.{path}")
    return bool(absent)


def _saved_expert(tensors: Mapping[str, Tensor], prefix: str) -> Factors:
    """Return saved factors. A missing tensor becomes an empty one, which `check_tensors` refuses."""
    missing = torch.zeros(0)
    scale = tensors.get(f"{prefix}.scale", missing)
    return Factors(
        a=tensors.get(f"{prefix}.a", missing),
        b=tensors.get(f"{prefix}.b", missing),
        scale=float(scale) if scale.numel() == 1 else 1.0,
    )


def placed(factors: Factors, backbone: Backbone) -> Factors:
    """Return factors on the backbone's device; in float32 on a backbone in half precision, as in PEFT."""
    dtype = torch.promote_types(backbone.model.dtype, torch.float32)
    return Factors(
        a=factors.a.detach().to(backbone.device, dtype),
        b=factors.b.detach().to(backbone.device, dtype),
        scale=factors.scale,
    )
