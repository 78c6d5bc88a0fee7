"""The passages of text at which two models differ most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import token_texts
from graftlm.evaluation.audit.comparison import TokenComparison

Choices = list[tuple[str, float]]
"""The likeliest tokens as (text, probability)."""


@dataclass(frozen=True)
class PassageToken:
    """A token of a passage.

    Attributes:
        text: the text that the token adds.
        kl: KL(base || tuned) of the models' distributions of this token, in nats.
        base: the base model's likeliest tokens here, the likeliest first.
        tuned: the tuned model's likeliest tokens here, the likeliest first.
    """

    text: str
    kl: float
    base: Choices
    tuned: Choices


@dataclass(frozen=True)
class Passage:
    """Neighbouring tokens at which the models differ.

    Attributes:
        source: the name of the text.
        kl: the mean of KL(base || tuned) over its scored tokens, in nats per token.
        before: the preceding text.
        tokens: its scored tokens.
    """

    source: str
    kl: float
    before: str
    tokens: list[PassageToken]


class _Span(NamedTuple):
    """Part of a compared window; `mass` is its summed divergence in nats."""

    source: str
    compared: TokenComparison
    start: int
    mass: float


def widest_passages(
    compared: Iterable[tuple[str, TokenComparison]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 20,
    length: int = 48,
) -> list[Passage]:
    """Return the passages with the largest divergence, the largest first; none overlaps another.

    Args:
        compared: comparisons with the names of their texts.
        tokenizer: the tokenizer of both models.
        count: maximum number of passages. There are fewer where fewer differ.
        length: maximum number of tokens of a passage.
    """
    spans = []
    for source, each in compared:
        step = length // 2
        for start in range(0, max(1, len(each.kl) - step), step):
            mass = float(each.kl[start : start + length].sum())
            spans.append(_Span(source, each, start, mass))
    spans.sort(key=lambda span: span.mass, reverse=True)
    chosen: list[_Span] = []
    for span in spans:
        if len(chosen) == count or span.mass <= 0:
            break
        if not any(_overlap(span, other, length) for other in chosen):
            chosen.append(span)
    return [_passage(span, length, tokenizer) for span in chosen]


def _overlap(span: _Span, other: _Span, length: int) -> bool:
    return span.compared is other.compared and abs(span.start - other.start) < length


def _passage(span: _Span, length: int, tokenizer: PreTrainedTokenizerBase) -> Passage:
    each = span.compared
    ids = each.window.ids.tolist()
    first = each.window.first + span.start
    stop = min(first + length, len(ids))
    tokens = []
    for row, text in enumerate(token_texts(tokenizer, ids[first:stop], ids[:first]), start=span.start):
        choices = each.choices[row]
        probabilities = each.probabilities[row]
        token = PassageToken(
            text=text,
            kl=float(each.kl[row]),
            base=_named_choices(choices[0], probabilities[0], tokenizer),
            tuned=_named_choices(choices[1], probabilities[1], tokenizer),
        )
        tokens.append(token)
    return Passage(
        source=span.source,
        kl=float(each.kl[span.start : span.start + length].mean()),
        before=str(tokenizer.decode(ids[max(0, first - length) : first])),
        tokens=tokens,
    )


def _named_choices(choices: np.ndarray, probabilities: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Choices:
    named = []
    for token, probability in zip(choices, probabilities, strict=True):
        named.append((tokenizer.decode([int(token)]), float(probability)))
    return named
