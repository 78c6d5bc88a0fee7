"""Fingerprints identify a backbone by its architecture and sampled weights."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graftlm.backbone.modules import architecture

# transformers' models take seconds to import, so functions import them.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLED_TENSORS = 24
_SAMPLES_PER_TENSOR = 4
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a backbone by a hash of its config and by sampled weights.

    `samples` are base64 of bfloat16, so one checkpoint has the same fingerprint in float32, bfloat16 and float16.
    Weights that a quantiser packed are NaN and don't count.
    """

    architecture: str
    samples: str

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, for messages."""
        return hashlib.sha256((self.architecture + self.samples).encode()).hexdigest()[:12]

    def difference(self, other: Fingerprint) -> str | None:
        """The difference to `other` in words; None when both identify the same backbone."""
        if self.architecture != other.architecture:
            return "its architecture differs"
        own, others = _decode_samples(self.samples), _decode_samples(other.samples)
        if own.shape != others.shape:
            return "it has other weights"
        known = ~(own.isnan() | others.isnan())
        gap = (own - others).abs() - _TOLERANCE * torch.maximum(own.abs(), others.abs())
        return "its weights differ" if bool((gap[known] > 1e-6).any()) else None


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Compute a model's fingerprint; reads about a hundred weights of a model of any size."""
    digest = hashlib.sha256(architecture(model.config).encode()).hexdigest()
    parameters = _checkpoint_parameters(model)
    count = min(_SAMPLED_TENSORS, len(parameters))
    flat = torch.cat([torch.zeros(0), *(_sample(parameters[i * len(parameters) // count]) for i in range(count))])
    samples = base64.b64encode(flat.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).decode()
    return Fingerprint(digest, samples)


def _checkpoint_parameters(model: PreTrainedModel) -> list[Tensor]:
    """The checkpoint's parameters, sorted by name.

    Excluded are PEFT's parameters, and the second name of tied weights, which a quantiser unties.
    """
    wrapped = {
        f"{name}.": f"{inner}."
        for name, module in model.named_modules()
        for inner in ("base_layer", "original_module")
        if hasattr(module, inner)
    }
    named = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        within = [(outer, inner) for outer, inner in wrapped.items() if name.startswith(outer)]
        if all(name.startswith(outer + inner) for outer, inner in within):
            for outer, inner in sorted(within, reverse=True):
                name = outer + name.removeprefix(outer + inner)
            named[name] = tensor
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return [named[name] for name in sorted(named) if name not in tied]


def _sample(tensor: Tensor) -> Tensor:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point()
    if not plain or tensor.numel() == 0 or tensor.is_meta:
        return torch.full((_SAMPLES_PER_TENSOR,), float("nan"))
    flat = tensor.detach().reshape(-1)
    last = flat.numel() - 1  # int64: float32 can't index 2^24 numbers exactly
    index = torch.arange(_SAMPLES_PER_TENSOR, device=flat.device) * last // (_SAMPLES_PER_TENSOR - 1)
    return flat[index].float().cpu()


def _decode_samples(samples: str) -> Tensor:
    raw = bytearray(base64.b64decode(samples))
    return torch.frombuffer(raw, dtype=torch.bfloat16).float() if raw else torch.zeros(0)
