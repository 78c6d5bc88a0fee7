"""What two models of one tokenizer predict at each token of a text.

    KL = Σ_v p_base(v | before) (log p_base(v | before) - log p_tuned(v | before))        nats

Models may have logits beyond the vocabulary, or tokens that were added to the tuned one. The base has no say on those:
the sum runs over the tokens that both have, and the tuned model loses what it gives to others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import token_texts
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.metrics import Scores, Window, evaluation_mode, window_batch

CHOICES = 3
_CHUNK_POSITIONS = 256


@dataclass(frozen=True)
class TokenComparison:
    """Both models at the n scored tokens of a window.

    Attributes:
        kl: (n,), nats.
        nats: (n, 2), the losses of base and tuned.
        choices: (n, 2, 3), the ids that each finds likeliest, in order.
        probabilities: (n, 2, 3), theirs.
    """

    window: Window
    kl: np.ndarray
    nats: np.ndarray
    choices: np.ndarray
    probabilities: np.ndarray

    @property
    def changed(self) -> np.ndarray:
        """(n,), whether the likeliest token changed."""
        return self.choices[:, 0, 0] != self.choices[:, 1, 0]


@torch.inference_mode()
def compare_windows(
    base: Any,
    tuned: Any,
    tokenizer: Any,
    windows: Iterable[Window],
    *,
    batch_size: int = 8,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> list[TokenComparison]:
    """Run both models on the same batches of windows; the comparisons are in the order of the windows.

    Args:
        base: called as `model(input_ids=, attention_mask=, use_cache=False).logits`.
        tuned: likewise, of the same tokenizer; tokens may have been added to it.
        on_batch: called with the number of scored tokens after each batch.

    Raises DataError if there is nothing to score, and EvaluationError if a model predicts NaN or infinity.
    """
    windows = list(windows)
    if not windows:
        raise DataError("The texts hold no token to score: give at least one text of two tokens or more.")
    order = sorted(range(len(windows)), key=lambda i: len(windows[i].ids), reverse=True)
    compared: dict[int, TokenComparison] = {}
    with evaluation_mode(base), evaluation_mode(tuned):
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = [windows[i] for i in rows]
            compared |= zip(rows, _compare_batch(base, tuned, tokenizer, batch), strict=True)
            on_batch(sum(window.tokens for window in batch))
    return [compared[i] for i in range(len(windows))]


def _compare_batch(base: Any, tuned: Any, tokenizer: Any, batch: list[Window]) -> Iterator[TokenComparison]:
    inputs, for_base, labels = window_batch(base, tokenizer, batch)
    scored = labels != -100
    targets = labels[scored]
    own = base(**inputs, **for_base).logits[scored]
    inputs, for_tuned, _ = window_batch(tuned, tokenizer, batch)
    other = tuned(**inputs, **for_tuned).logits[scored.to(inputs["input_ids"].device)].to(own.device)
    width = min(own.shape[-1], other.shape[-1])
    if width <= int(targets.max()):
        raise EvaluationError(
            f"A model predicts {width} tokens, but the text holds the token {int(targets.max())}: audit models of one "
            "vocabulary."
        )
    parts = [
        _compare_logits(own[at : at + _CHUNK_POSITIONS, :width], other[at : at + _CHUNK_POSITIONS], targets[at:])
        for at in range(0, len(targets), _CHUNK_POSITIONS)
    ]
    kl, nats, choices, probabilities = (np.concatenate(values) for values in zip(*parts, strict=True))
    if not (np.isfinite(kl).all() and np.isfinite(nats).all()):
        raise EvaluationError(
            "A model predicts NaN or infinity on this text: its weights are broken, or overflow in this precision "
            "(--dtype float32)."
        )
    start = 0
    for window in batch:
        rows = slice(start, start := start + window.tokens)
        yield TokenComparison(window, kl[rows], nats[rows], choices[rows], probabilities[rows])


def _compare_logits(own: Tensor, other: Tensor, targets: Tensor) -> tuple[np.ndarray, ...]:
    """Divergence, losses, choices and their probabilities at positions with logits (n, V) and (n, at least V)."""
    log_p, log_q = own.float().log_softmax(-1), other.float().log_softmax(-1)[:, : own.shape[-1]]
    p = log_p.exp()  # 0 where the base masks a token with -inf
    kl = torch.where(p > 0, p * (log_p - log_q), 0).sum(-1, dtype=torch.float64)
    picked = targets[: len(own), None]
    nats = -torch.cat([log_p.gather(1, picked), log_q.gather(1, picked)], dim=1)
    tops = [log.topk(min(CHOICES, log.shape[-1]), dim=-1) for log in (log_p, log_q)]
    choices = torch.stack([top.indices for top in tops], dim=1)
    probabilities = torch.stack([top.values.exp() for top in tops], dim=1)
    return kl.cpu().numpy(), nats.double().cpu().numpy(), choices.cpu().numpy(), probabilities.cpu().numpy()


def scores_of(compared: Sequence[TokenComparison], side: int) -> Scores:
    """The sums per window of the base (side 0) or the tuned model (side 1), with the divergence."""
    nats = np.array([each.nats[:, side].sum() for each in compared])
    return Scores.of_windows([each.window for each in compared], nats, np.array([each.kl.sum() for each in compared]))


@dataclass(frozen=True)
class Passage:
    """Neighbouring tokens at which the models differ.

    Attributes:
        source: the text that it is from.
        kl: the mean over its scored tokens, nats per token.
        before: what precedes it, as text.
        tokens: one for each scored token.
    """

    source: str
    kl: float
    before: str
    tokens: list[PassageToken]


@dataclass(frozen=True)
class PassageToken:
    """A token's text, divergence in nats, and the likeliest (text, probability) of base and tuned."""

    text: str
    kl: float
    base: list[tuple[str, float]]
    tuned: list[tuple[str, float]]


def widest_passages(
    compared: Iterable[tuple[str, TokenComparison]], tokenizer: Any, *, count: int = 20, length: int = 48
) -> list[Passage]:
    """The passages of at most `length` tokens with the largest divergence, that one first; none overlaps another.

    `compared` has the name of the text with each comparison. There are `count` at most; none where nothing differs.
    """
    spans = []
    for name, each in compared:
        for start in range(0, max(1, len(each.kl) - length // 2), length // 2):
            part = each.kl[start : start + length]
            spans.append((float(part.sum()), name, each, start))
    chosen: list[tuple[str, TokenComparison, int]] = []
    for mass, name, each, start in sorted(spans, key=lambda span: -span[0]):
        overlaps = any(other is each and abs(other_start - start) < length for _, other, other_start in chosen)
        if mass > 0 and not overlaps and len(chosen) < count:
            chosen.append((name, each, start))
    return [_passage(name, each, start, length, tokenizer) for name, each, start in chosen]


def _passage(name: str, each: TokenComparison, start: int, length: int, tokenizer: Any) -> Passage:
    first, stop = each.window.first + start, min(each.window.first + start + length, len(each.window.ids))
    ids = each.window.ids.tolist()
    texts = token_texts(tokenizer, ids[first:stop])
    tokens = []
    for text, row in zip(texts, range(start, start + stop - first), strict=True):
        sides = [
            [(tokenizer.decode([int(token)]), float(share)) for token, share in zip(*side, strict=True)]
            for side in zip(each.choices[row], each.probabilities[row], strict=True)
        ]
        tokens.append(PassageToken(text, float(each.kl[row]), *sides))
    kl = float(each.kl[start : start + length].mean())
    return Passage(name, kl, tokenizer.decode(ids[max(0, first - length) : first]), tokens)
