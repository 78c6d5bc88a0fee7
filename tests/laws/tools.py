"""What the tests of the laws share: digests, noise, and slow but plain ways to compute what must come out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafts import Graft, GraftedModel, build_graft, graft_config
from laws.examples import Example, backbone
from tiny import WINDOW, tiny_ids

NEW = 6  # tokens that are generated
LENGTHS = (2 * WINDOW, 5)  # of the prompts: one that fills the sliding windows twice, one that is mostly padding


def graft_onto(host: Backbone, example: Example) -> GraftedModel:
    """A fresh, untrained graft on a backbone; always the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        graft = build_graft(graft_config(example.values()), host)
        return GraftedModel(host, {"graft": graft})


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


def calls_under_way(model: GraftedModel) -> list[Call]:
    """The forward passes that this thread has not ended."""
    return model._tap_hooks._stack.calls


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


def prompts() -> tuple[Tensor, Tensor]:
    """A batch of two prompts, padded on the left, and its mask."""
    return padded([tiny_ids(1, length, seed=length)[0] for length in LENGTHS], "left")


def generate(model: Any, ids: Tensor, mask: Tensor | None, **how: Any) -> Any:
    """Exactly `NEW` tokens a row, with the logits that they were chosen by."""
    torch.manual_seed(7)
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=mask, **fixed, **how)


def recomputed(model: Any, sequences: Tensor, mask: Tensor) -> Tensor:
    """(rows, NEW, V): the logits that each new token was chosen by, from one pass over whole sequences."""
    rows = len(sequences) // len(mask)
    whole = torch.cat([mask.repeat_interleave(rows, 0), torch.ones(len(sequences), NEW, dtype=mask.dtype)], 1)
    found = logits(model, sequences, attention_mask=whole, position_ids=positions(whole))
    return found[:, -NEW - 1 : -1]


class Bomb(Graft):
    """Raises in one tap of one pass."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.passes_left = passes

    def prepare(self, call: Call) -> None:
        self.passes_left -= 1

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", 1), "after", "add", self._explode)]

    def _explode(self, call: Call, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if self.passes_left == 0:
            raise ZeroDivisionError
