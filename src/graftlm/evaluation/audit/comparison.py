"""What two models of one tokenizer predict at each token of a text.

    KL = Σ_v p_base(v | before) (log p_base(v | before) - log p_tuned(v | before))        nats

Models may have logits beyond the vocabulary, or tokens that were added to the tuned model only. The base does not
predict those: the sum runs over the tokens that both models have, and the probability that the tuned model gives to
other tokens counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.inference import LanguageModel, evaluation_mode
from graftlm.evaluation.results import Interval
from graftlm.evaluation.scores import Scores, longest_first
from graftlm.evaluation.windows import Window, scored_logits

CHOICES = 3
_CHUNK_POSITIONS = 256


@dataclass(frozen=True)
class TokenComparison:
    """Both models at the n scored tokens of a window.

    Attributes:
        window: the window.
        kl: KL(base || tuned), in nats, (n,).
        nats: the losses of base and tuned, in nats, (n, 2).
        choices: the ids of the likeliest tokens of base and tuned, in order, (n, 2, 3).
        probabilities: the probabilities of these tokens, (n, 2, 3).
    """

    window: Window
    kl: np.ndarray
    nats: np.ndarray
    choices: np.ndarray
    probabilities: np.ndarray

    @property
    def changed(self) -> np.ndarray:
        """Whether the likeliest token changed, (n,)."""
        return self.choices[:, 0, 0] != self.choices[:, 1, 0]


class _Positions(NamedTuple):
    """Both models at scored positions; the fields are those of `TokenComparison`."""

    kl: np.ndarray
    nats: np.ndarray
    choices: np.ndarray
    probabilities: np.ndarray


@torch.inference_mode()
def compare_windows(
    base: LanguageModel,
    tuned: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: Iterable[Window],
    *,
    batch_size: int = 8,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> list[TokenComparison]:
    """Run both models on the same batches of windows.

    Args:
        base: called as `model(input_ids=, attention_mask=, use_cache=False).logits`.
        tuned: likewise, with the same tokenizer; tokens may have been added to it.
        tokenizer: the base's tokenizer.
        windows: the windows.
        batch_size: windows per batch.
        on_batch: called with the number of scored tokens after each batch.

    Returns:
        The comparisons in the order of the windows.

    Raises:
        DataError: there is nothing to score.
        EvaluationError: a model predicts NaN or infinity.
    """
    windows = list(windows)
    if not windows:
        raise DataError("The texts have no token to score: pass at least one text of two tokens or more.")
    order = longest_first(windows)
    compared: dict[int, TokenComparison] = {}
    with evaluation_mode(base), evaluation_mode(tuned):
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            batch = [windows[number] for number in numbers]
            compared.update(zip(numbers, _compare_batch(base, tuned, tokenizer, batch), strict=True))
            on_batch(sum(window.tokens for window in batch))
    return [compared[number] for number in range(len(windows))]


def _compare_batch(
    base: LanguageModel, tuned: LanguageModel, tokenizer: PreTrainedTokenizerBase, batch: list[Window]
) -> list[TokenComparison]:
    base_logits, targets = scored_logits(base, tokenizer, batch)
    tuned_logits, _ = scored_logits(tuned, tokenizer, batch)
    tuned_logits = tuned_logits.to(base_logits.device)
    width = min(base_logits.shape[-1], tuned_logits.shape[-1])
    largest = int(targets.max())
    if width <= largest:
        raise EvaluationError(
            f"A model predicts {width} tokens, but the text contains the token {largest}: audit models with one "
            "vocabulary."
        )
    parts = []
    for start in range(0, len(targets), _CHUNK_POSITIONS):
        chunk = slice(start, start + _CHUNK_POSITIONS)
        parts.append(_compare_logits(base_logits[chunk, :width], tuned_logits[chunk], targets[chunk]))
    positions = _Positions(*(np.concatenate(values) for values in zip(*parts, strict=True)))
    if not (np.isfinite(positions.kl).all() and np.isfinite(positions.nats).all()):
        raise EvaluationError(
            "A model predicts NaN or infinity on this text: its weights are broken, or overflow in this precision "
            "(--dtype float32)."
        )
    return _split_by_window(positions, batch)


def _compare_logits(base_logits: Tensor, tuned_logits: Tensor, targets: Tensor) -> _Positions:
    """Compare both models at n positions.

    Args:
        base_logits: (n, V).
        tuned_logits: (n, at least V).
        targets: the ids of the text, (n,).
    """
    width = base_logits.shape[-1]
    log_p = base_logits.float().log_softmax(-1)
    log_q = tuned_logits.float().log_softmax(-1)[:, :width]
    p = log_p.exp()  # 0 where the base masks a token with -inf
    kl = torch.where(p > 0, p * (log_p - log_q), 0).sum(-1, dtype=torch.float64)
    index = targets[:, None]
    nats = -torch.cat([log_p.gather(1, index), log_q.gather(1, index)], dim=1)
    count = min(CHOICES, width)
    base_top = log_p.topk(count, dim=-1)
    tuned_top = log_q.topk(count, dim=-1)
    choices = torch.stack([base_top.indices, tuned_top.indices], dim=1)
    probabilities = torch.stack([base_top.values.exp(), tuned_top.values.exp()], dim=1)
    return _Positions(
        kl=kl.cpu().numpy(),
        nats=nats.double().cpu().numpy(),
        choices=choices.cpu().numpy(),
        probabilities=probabilities.cpu().numpy(),
    )


def _split_by_window(positions: _Positions, batch: list[Window]) -> list[TokenComparison]:
    compared = []
    start = 0
    for window in batch:
        rows = slice(start, start + window.tokens)
        comparison = TokenComparison(
            window=window,
            kl=positions.kl[rows],
            nats=positions.nats[rows],
            choices=positions.choices[rows],
            probabilities=positions.probabilities[rows],
        )
        compared.append(comparison)
        start += window.tokens
    return compared


def scores_of(compared: Sequence[TokenComparison], side: int) -> Scores:
    """Return the sums per window of one model, with the divergence.

    Args:
        compared: the comparisons.
        side: 0 for the base, 1 for the tuned model.
    """
    return Scores.of_windows(
        windows=[each.window for each in compared],
        nats=np.array([each.nats[:, side].sum() for each in compared]),
        kl=np.array([each.kl.sum() for each in compared]),
    )


def changed_tokens(compared: Sequence[TokenComparison], *, by_document: bool = False) -> Interval:
    """Return the share of scored tokens whose likeliest choice changed.

    Args:
        compared: the comparisons.
        by_document: whether the interval is over sampled texts rather than windows.
    """
    counts = Scores.of_windows(
        windows=[each.window for each in compared],
        nats=np.array([each.changed.sum() for each in compared], dtype=np.float64),
        kl=None,
    )
    if by_document:
        counts = counts.by_document()
    return counts.interval("nats_per_token")
