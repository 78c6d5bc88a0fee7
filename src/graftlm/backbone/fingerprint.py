"""The fingerprint of a backbone: a hash over its config, and sampled weights.

The samples are kept as bfloat16 values, so that one checkpoint loaded in float32, bfloat16 or float16 is recognised as
the same backbone; weights that a quantiser packed are left out of the comparison.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

_TENSORS = 24
_PER_TENSOR = 4
_TOLERANCE = 0.02
# What says how a model is run rather than what it is.
_TRANSIENT = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation", "name_or_path",
    "_attn_implementation_autoset", "output_attentions", "output_hidden_states", "return_dict", "quantization_config",
    "architectures", "experts_implementation",
}  # fmt: skip


@dataclass(frozen=True)
class Fingerprint:
    """What a graft remembers of its backbone.

    Args:
        architecture: SHA-256 of the config.
        samples: base64 of some weights as bfloat16, NaN where a quantiser packed the weight.
    """

    architecture: str
    samples: str

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, for people."""
        return hashlib.sha256((self.architecture + self.samples).encode()).hexdigest()[:12]

    def difference(self, other: Fingerprint) -> str | None:
        """What sets `other` apart, in words; None when both are the same backbone."""
        if self.architecture != other.architecture:
            return "its architecture differs"
        mine, theirs = _values(self.samples), _values(other.samples)
        if mine.shape != theirs.shape:
            return "it has other weights"
        known = ~(mine.isnan() | theirs.isnan())
        gap = (mine - theirs).abs() - _TOLERANCE * torch.maximum(mine.abs(), theirs.abs())
        return "its weights differ" if bool((gap[known] > 1e-6).any()) else None


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Read a model's fingerprint; touches a few hundred weights whatever the model's size."""
    return Fingerprint(_hash_config(model), _sample(model))


def _hash_config(model: PreTrainedModel) -> str:
    values = {key: value for key, value in model.config.to_dict().items() if key not in _TRANSIENT}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _sample(model: PreTrainedModel) -> str:
    named = _own_parameters(model)
    count = min(_TENSORS, len(named))
    values = [_pick(named[i * len(named) // count]) for i in range(count)]
    flat = torch.cat(values) if values else torch.zeros(0)
    return base64.b64encode(flat.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).decode()


def _own_parameters(model: PreTrainedModel) -> list[Tensor]:
    """The checkpoint's own weights, by name.

    What PEFT put around and beside them does not count, nor does the second name of tied weights, which a quantiser
    unties.
    """
    wrapped = {
        f"{name}.": f"{inner}."
        for name, module in model.named_modules()
        for inner in ("base_layer", "original_module")
        if hasattr(module, inner)
    }
    named: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        within = [(outer, inner) for outer, inner in wrapped.items() if name.startswith(outer)]
        if all(name.startswith(outer + inner) for outer, inner in within):
            for outer, inner in sorted(within, reverse=True):
                name = outer + name.removeprefix(outer + inner)
            named[name] = tensor
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return [named[name] for name in sorted(named) if name not in tied]


def _pick(tensor: Tensor) -> Tensor:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point()
    if not plain or tensor.numel() == 0 or tensor.is_meta:
        return torch.full((_PER_TENSOR,), float("nan"))
    flat = tensor.detach().reshape(-1)
    last = flat.numel() - 1  # integers: a float32 can't tell the places of an embedding of 2^24 numbers apart
    index = torch.arange(_PER_TENSOR, device=flat.device) * last // (_PER_TENSOR - 1)
    return flat[index].float().cpu()


def _values(samples: str) -> Tensor:
    raw = bytearray(base64.b64decode(samples))
    return torch.frombuffer(raw, dtype=torch.bfloat16).float() if raw else torch.zeros(0)
