"""Where the factors of an expert come from: a PEFT folder, the tensors of a saved graft, or an initialization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.grafts.token_routing.adapters import read_adapter
from graftlm.grafts.token_routing.config import ExpertConfig
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


def saved_expert(tensors: Mapping[str, Tensor], prefix: str) -> Factors:
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
