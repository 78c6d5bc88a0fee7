"""Fingerprints identify a backbone by its architecture and sampled weights."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graftlm.backbone.modules import architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLED_TENSORS = 24
_SAMPLES_PER_TENSOR = 4
_RELATIVE_TOLERANCE = 0.02
_ABSOLUTE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a backbone by a hash of its config and by sampled weights.

    Samples are rounded to bfloat16, so a checkpoint has the same fingerprint in float32, bfloat16 and float16. Weights
    that a quantizer packed are NaN and are not compared.

    Attributes:
        architecture: SHA-256 of the config in hexadecimal.
        samples: sampled weights as bfloat16 in base64.
    """

    architecture: str
    samples: str

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, for messages."""
        text = self.architecture + self.samples
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def difference(self, other: Fingerprint) -> str | None:
        """Describe the difference from another fingerprint as a clause; None if both identify the same backbone."""
        if self.architecture != other.architecture:
            return "its architecture differs"
        own = _decode_samples(self.samples)
        others = _decode_samples(other.samples)
        if own.shape != others.shape:
            return "it has other weights"
        comparable = ~(own.isnan() | others.isnan())
        allowed = _RELATIVE_TOLERANCE * torch.maximum(own.abs(), others.abs()) + _ABSOLUTE_TOLERANCE
        differs = (own - others).abs() > allowed
        return "its weights differ" if bool(differs[comparable].any()) else None


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Compute a model's fingerprint. About a hundred weights are read, whatever the size of the model."""
    parameters = checkpoint_parameters(model)
    count = min(_SAMPLED_TENSORS, len(parameters))
    samples = [torch.zeros(0)]
    for i in range(count):
        parameter = parameters[i * len(parameters) // count]
        samples.append(_sample(parameter))
    rounded = torch.cat(samples).to(torch.bfloat16)
    raw = rounded.view(torch.int16).numpy().tobytes()
    return Fingerprint(
        architecture=hashlib.sha256(architecture(model.config).encode()).hexdigest(),
        samples=base64.b64encode(raw).decode(),
    )


def checkpoint_parameters(model: PreTrainedModel) -> list[Tensor]:
    """Return the parameters of the checkpoint, sorted by name.

    PEFT's own parameters are excluded, and so is the second name of tied weights, which a quantizer unties.
    """
    wrapped = _wrapped_by_peft(model)
    named: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        checkpoint_name = _name_without_wrappers(name, wrapped)
        if checkpoint_name is not None:
            named[checkpoint_name] = tensor
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return [named[name] for name in sorted(named) if name not in tied]


def _wrapped_by_peft(model: nn.Module) -> dict[str, str]:
    """Return the prefixes of modules that PEFT wrapped, with the name of the original module in each."""
    wrapped = {}
    for name, module in model.named_modules():
        for inner in ("base_layer", "original_module"):
            if hasattr(module, inner):
                wrapped[f"{name}."] = f"{inner}."
    return wrapped


def _name_without_wrappers(name: str, wrapped: dict[str, str]) -> str | None:
    """Return a parameter's name in the checkpoint; None for a parameter of an adapter."""
    prefixes = [prefix for prefix in wrapped if name.startswith(prefix)]
    if not all(name.startswith(prefix + wrapped[prefix]) for prefix in prefixes):
        return None
    for prefix in sorted(prefixes, reverse=True):  # the innermost first
        name = prefix + name.removeprefix(prefix + wrapped[prefix])
    return name


def _sample(tensor: Tensor) -> Tensor:
    """Return evenly spaced elements of a tensor; NaN where it has no plain floating-point values."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point()
    if not is_plain or tensor.numel() == 0 or tensor.is_meta:
        return torch.full((_SAMPLES_PER_TENSOR,), float("nan"))
    flat = tensor.detach().reshape(-1)
    last = flat.numel() - 1
    # Integers, since float32 can't index more than 2^24 elements exactly.
    index = torch.arange(_SAMPLES_PER_TENSOR, device=flat.device) * last // (_SAMPLES_PER_TENSOR - 1)
    return flat[index].float().cpu()


def _decode_samples(samples: str) -> Tensor:
    raw = bytearray(base64.b64decode(samples))
    if not raw:
        return torch.zeros(0)
    return torch.frombuffer(raw, dtype=torch.bfloat16).float()
