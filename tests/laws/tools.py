"""What the tests of the laws share: digests, noise, and slow but plain ways to compute what must come out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone
from graftlm.grafts import GraftedModel, build_graft, graft_config
from laws.examples import Example, backbone
from tiny import tiny_ids


def graft_onto(host: Backbone, example: Example) -> GraftedModel:
    """A fresh, untrained graft on a backbone."""
    return GraftedModel(host, {"graft": build_graft(graft_config(example.values()), host)})


@torch.no_grad()
def randomise(model: GraftedModel, spread: float, seed: int = 1) -> GraftedModel:
    """Add noise to every tensor that the grafts train, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.trainable_parameters().values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """(B, T, V) of one pass without a cache."""
    return model(input_ids=ids, use_cache=False, **inputs).logits


@functools.cache
def bare_logits(name: str) -> Tensor:
    """What a bare backbone says to `tiny_ids()`, computed before any graft met it."""
    return logits(backbone(name).model, tiny_ids())


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, the live objects."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def hooks_of(module: nn.Module) -> list[Any]:
    """Every forward hook of one module."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bytes."""
    hasher = hashlib.sha256()
    for name, tensor in tensors.items():
        for part in _plain_parts(tensor.detach()):
            hasher.update(f"{name}{tuple(part.shape)}{part.dtype}".encode())
            hasher.update(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """A packed tensor's own tensors; any other tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(tensor, attribute))
    else:
        yield tensor.data


def positions(mask: Tensor) -> Tensor:
    """(B, T) positions that count real tokens, as `generate` gives them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def padded(rows: Iterable[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows of several lengths as one batch, and its mask; arbitrary tokens stand where the mask is 0."""
    rows = list(rows)
    length = max(len(row) for row in rows)
    ids = tiny_ids(len(rows), length, seed=99)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(length - len(row), None) if side == "left" else slice(None, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def gradients(model: GraftedModel, **inputs: Any) -> dict[str, Tensor]:
    """The gradients of the training loss of one pass; parameters that it does not reach are left out."""
    model.zero_grad(set_to_none=True)
    model(**inputs).loss.backward()
    found = {name: p.grad.clone() for name, p in model.trainable_parameters().items() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
