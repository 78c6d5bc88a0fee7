"""Grafts on tiny backbones, and passes, gradients and generations of grafted models.

Shape suffixes: B rows, T tokens, V the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import HasHeads, build_graft, graft_config
from graftlm.testing.tiny import ENCODERS, WINDOW, tiny_ids, tiny_model, tiny_tokenizer

DOMAIN = torch.tensor([0, 1])
"""The domains of a batch of two rows: one old, one new."""
NEW_TOKENS = 5
"""Number of tokens that tests generate."""


def is_encoder(family: str) -> bool:
    """Return whether every token of a family attends to all tokens."""
    name, _, _ = family.partition("+")
    return name in ENCODERS


@functools.cache
def tiny_backbone_of(family: str) -> Backbone:
    """Return the tiny backbone of a family, which a whole session shares, since no law may change it.

    Args:
        family: name of the family, with a dtype as in `llama+bfloat16`; float32 without one.
    """
    name, _, dtype = family.partition("+")
    model = tiny_model(name)
    if dtype:
        model = model.to(getattr(torch, dtype))
    return Backbone.wrap(model, tiny_tokenizer(), family)


def attach_graft(backbone: Backbone, config: Mapping[str, object]) -> GraftedModel:
    """Attach a fresh, untrained graft to a backbone. Its random values are always the same.

    Args:
        backbone: the backbone.
        config: the graft's config as a recipe writes it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        graft = build_graft(graft_config(dict(config)), backbone)
        return GraftedModel(backbone, {"graft": graft})


@torch.no_grad()
def randomise(model: GraftedModel, spread: float, seed: int = 1) -> GraftedModel:
    """Add noise to every trainable tensor in place, instead of training.

    Args:
        model: the grafted model.
        spread: standard deviation of the noise.
        seed: seed of the noise.

    Returns:
        The same model.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.trainable_parameters().values():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise * spread)
    return model


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **inputs: object) -> Tensor:
    """Return the logits (B, T, V) of one pass without a cache.

    Args:
        model: a transformers model or a grafted model.
        ids: (B, T) token ids.
        inputs: further arguments of the model.
    """
    return model(input_ids=ids, use_cache=False, **inputs).logits


def seeded_logits(model: GraftedModel, ids: Tensor, seed: int = 0) -> Tensor:
    """Return the logits (B, T, V) of one pass in the model's mode.

    Args:
        model: the grafted model.
        ids: (2, T) token ids.
        seed: seed of the dropout of grafts that train with it.
    """
    torch.manual_seed(seed)
    return model(ids, domain=DOMAIN).logits.detach()


def losses_of(model: GraftedModel, ids: Tensor) -> Iterator[Tensor]:
    """Yield the training loss of one batch, and for each task of a graft with heads the sum of squared predictions.

    Args:
        model: the grafted model.
        ids: (2, T) token ids.
    """
    yield model(ids, labels=ids, domain=DOMAIN).loss
    for graft in model.grafts.values():
        if not isinstance(graft, HasHeads):
            continue
        for number in range(len(graft.tasks())):
            predictions = model.predict(ids, extras={"task": torch.full((len(ids),), number)})
            yield torch.stack([prediction.square().sum() for prediction in predictions]).sum()


def gradients(model: GraftedModel, **inputs: object) -> dict[str, Tensor]:
    """Return the gradients of the training loss of one pass, by the name of the parameter.

    Parameters that the loss does not reach are omitted. The model's own gradients are None afterwards.

    Args:
        model: the grafted model.
        inputs: arguments of the model, with `labels`.
    """
    model.zero_grad(set_to_none=True)
    model(**inputs).loss.backward()
    result = {}
    for name, parameter in model.trainable_parameters().items():
        if parameter.grad is not None:
            result[name] = parameter.grad.clone()
    model.zero_grad(set_to_none=True)
    return result


def rows_of(*lengths: int) -> list[Tensor]:
    """Return a random row of token ids for each length, which depends on the length alone."""
    return [tiny_ids(1, length, seed=length)[0] for length in lengths]


def pad_rows(rows: Iterable[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Make a batch of rows of several lengths.

    Args:
        rows: (tokens,) token ids of each row.
        side: `left` or `right`, where the padding is.

    Returns:
        (B, T) token ids, with arbitrary tokens as padding, and (B, T) their mask, 1 for tokens of the rows.
    """
    rows = list(rows)
    length = max(len(row) for row in rows)
    ids = tiny_ids(len(rows), length, seed=99)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        columns = slice(length - len(row), None) if side == "left" else slice(None, len(row))
        ids[number, columns] = row
        mask[number, columns] = 1
    return ids, mask


def prompts(longest: int = 2 * WINDOW) -> tuple[Tensor, Tensor]:
    """Return two prompts padded on the left, and their mask: one fills sliding windows, one is mostly padding."""
    return pad_rows(rows_of(longest, 5), "left")


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions (B, T) of real tokens, counted from 0 in each row, as `generate` computes them.

    Args:
        mask: (B, T), 1 for real tokens and 0 for padding, whose position is 0.
    """
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def generate(model: Any, ids: Tensor, mask: Tensor | None, **decoding: Any) -> Any:
    """Generate exactly `NEW_TOKENS` tokens for each row, with the logits from which they were chosen.

    Args:
        model: the model.
        ids: (B, T) prompts.
        mask: (B, T) mask of the prompts; None without padding.
        decoding: further arguments of the model's `generate`.

    Returns:
        The output of `generate`, with `sequences` and `logits`. Sampling always uses the same seed.
    """
    torch.manual_seed(7)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        **decoding,
    )


def recompute(model: nn.Module, sequences: Tensor, mask: Tensor) -> Tensor:
    """Compute the logits of generated tokens again, in one pass over full sequences.

    Args:
        model: the model.
        sequences: (rows, T + NEW_TOKENS) prompts with their new tokens; several rows may continue one prompt.
        mask: (B, T) mask of the prompts.

    Returns:
        (rows, NEW_TOKENS, V) logits from which each new token was chosen.
    """
    rows_per_prompt = len(sequences) // len(mask)
    new = torch.ones(len(sequences), NEW_TOKENS, dtype=mask.dtype)
    full_mask = torch.cat([mask.repeat_interleave(rows_per_prompt, 0), new], 1)
    output = logits(model, sequences, attention_mask=full_mask, position_ids=positions_of(full_mask))
    return output[:, -NEW_TOKENS - 1 : -1]
