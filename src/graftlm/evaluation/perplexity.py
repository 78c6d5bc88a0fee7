"""How well a model predicts text: nats per token, and bits per byte, which compare across tokenizers.

A document's tokens t_0 … t_{n-1} are cut into windows of at most `length` tokens that never cross documents. A window
begins with the last token of the one before it, which is context there, so each token but the first is scored once:

    nats = - Σ_i log p(t_i | window before t_i)
    nats per token = nats / tokens
    bits per byte = nats / (ln 2 · bytes)

When the tokenizer itself begins a text with a BOS token, every window begins with it as well (such models predict badly
without it), and the document's first token is scored too. Other special tokens are left out. A document's prompt is
context: its tokens are not scored.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.results import Interval
from graftlm.evaluation.windows import Window, cut_windows, limited
from graftlm.grafts import GraftedModel

MetricName = Literal["nats_per_token", "bits_per_byte"]
Precision = Literal["fp32", "bf16"]

_IGNORED = -100
# Values of one float32 chunk of logits: 64 MiB.
_CHUNK_VALUES = 2**24
# Windows are sorted by length within so many batches, so a stream of documents is never held whole.
_BATCHES_AHEAD = 64
# More windows than these are first summed in runs of neighbours, which keeps the bootstrap fast and no less wide.
_MAX_UNITS = 2048


@dataclass(frozen=True)
class Scores:
    """Sums per window, in the order of the documents; arrays of shape (windows,)."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    document: np.ndarray

    @property
    def nats_per_token(self) -> float:
        """Log-perplexity."""
        return self.value("nats_per_token")

    @property
    def bits_per_byte(self) -> float:
        """Bits spent on each UTF-8 byte of the scored text."""
        return self.value("bits_per_byte")

    def value(self, metric: MetricName) -> float:
        """One metric over all windows."""
        nats, units = self.fraction(metric)
        return float(nats.sum() / units.sum())

    def fraction(self, metric: MetricName) -> tuple[np.ndarray, np.ndarray]:
        """Numerator and denominator of a metric per window.

        Raises:
            EvaluationError: the metric has another name, or no byte was scored.
        """
        if metric == "nats_per_token":
            return self.nats, self.tokens
        if metric != "bits_per_byte":
            raise EvaluationError(f"There is no metric {metric!r}: nats_per_token and bits_per_byte are known.")
        if not self.bytes.sum():
            raise EvaluationError(
                "The scored tokens cover no byte of text, so there are no bits per byte: score more text."
            )
        return self.nats, self.bytes * math.log(2)

    def interval(
        self, metric: MetricName = "nats_per_token", *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> Interval:
        """Percentile bootstrap over windows: how the metric would vary over other text of the same kind."""
        (samples,) = _resampled([self.fraction(metric)], resamples, seed)
        return _interval(self.value(metric), samples, confidence)


def paired_difference(
    a: Scores,
    b: Scores,
    metric: MetricName = "nats_per_token",
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """`a`'s metric minus `b`'s, each bootstrap sample drawing the same windows of both.

    Raises:
        EvaluationError: the two did not score the same windows.
    """
    same = a.tokens.shape == b.tokens.shape and (a.tokens == b.tokens).all() and (a.bytes == b.bytes).all()
    if not same:
        raise EvaluationError(
            f"The two scores hold {_size(a)} and {_size(b)}, but a paired difference needs the same windows: "
            "score the same documents with the same tokenizer and length."
        )
    of_a, of_b = _resampled([a.fraction(metric), b.fraction(metric)], resamples, seed)
    return _interval(a.value(metric) - b.value(metric), of_a - of_b, confidence)


def score(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Any],
    *,
    length: int = 256,
    batch_size: int = 16,
    precision: Precision = "fp32",
    limit_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Score every token of `documents` (strings, or objects with `.text` and `.prompt`) in windows of `length` tokens.

    Args:
        tokenizer: gives the ids, and whether a BOS belongs before a text.
        documents: read once, and never all held in memory.
        length: of a window, in tokens, with its context token and BOS.
        batch_size: windows per call of the model; it changes nothing but speed and memory.
        model: called as `model(input_ids=, attention_mask=, use_cache=False).logits`, (B, T) -> (B, T, V); a
            `GraftedModel` is also told which tokens are prompts.
        precision: "bf16" computes under autocast; "fp32" leaves the model in its own dtype. Losses are float32 always.
        limit_tokens: stop after so many scored tokens.
        progress: called after each batch with the number of tokens it scored.

    Raises:
        EvaluationError: the model predicts NaN or infinity, or `length` does not fit the model.
        DataError: there is nothing to score.
    """
    _check_length(model, length)
    windows = limited(cut_windows(tokenizer, documents, length), limit_tokens)
    return score_windows(model, tokenizer, windows, batch_size=batch_size, precision=precision, progress=progress)


def score_windows(
    model: Any,
    tokenizer: Any,
    windows: Iterable[Window],
    *,
    batch_size: int = 16,
    precision: Precision = "fp32",
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """As `score`, of windows that are cut already."""
    windows = iter(windows)
    parts: list[list[tuple[float, Window]]] = []
    with evaluating(model), torch.inference_mode(), _autocast(model, precision):
        while ahead := list(islice(windows, batch_size * _BATCHES_AHEAD)):
            parts.append(_score_windows(model, tokenizer, ahead, batch_size, progress))
    scored = [pair for part in parts for pair in part]
    if not scored:
        raise DataError("The documents hold no token to score: give at least one document of two tokens or more.")
    return _collect(scored)


def _score_windows(
    model: Any, tokenizer: Any, windows: list[Window], batch_size: int, progress: Callable[[int], None] | None
) -> list[tuple[float, Window]]:
    order = sorted(range(len(windows)), key=lambda i: len(windows[i].ids), reverse=True)
    nats = np.zeros(len(windows))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = [windows[i] for i in rows]
        nats[rows] = _score_batch(model, tokenizer, batch)
        if progress is not None:
            progress(sum(window.tokens for window in batch))
    return [(float(value), window) for value, window in zip(nats, windows, strict=True)]


def _score_batch(model: Any, tokenizer: Any, batch: list[Window]) -> np.ndarray:
    """Summed losses (B,) of the scored tokens of each window."""
    shape = (len(batch), max(len(window.ids) for window in batch))
    ids = torch.full(shape, getattr(tokenizer, "pad_token_id", None) or 0)
    mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, _IGNORED)
    prompt = torch.zeros(shape, dtype=torch.bool)
    for row, window in enumerate(batch):
        size = len(window.ids)
        ids[row, :size] = torch.from_numpy(window.ids)
        mask[row, :size] = 1
        prompt[row, : window.prompt] = True
        labels[row, window.first - 1 : size - 1] = ids[row, window.first : size]
    device = device_of(model)
    said = {"prompt": prompt.to(device)} if prompt.any() and isinstance(model, GraftedModel) else {}
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False, **said).logits
    nats = _token_losses(logits, labels.to(logits.device)).sum(dim=1).cpu().numpy()
    if not np.isfinite(nats).all():
        raise EvaluationError(
            "The model predicts NaN or infinity on this text: its weights are broken or overflow in this precision "
            '(try precision="fp32", or train with a lower learning rate).'
        )
    return nats


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses (B, T) in float64, of float32 logits; `labels` are already shifted to the position that predicts them."""
    flat, targets = logits.flatten(0, 1), labels.flatten()
    step = max(1, _CHUNK_VALUES // flat.shape[-1])
    chunks = [
        F.cross_entropy(flat[i : i + step].float(), targets[i : i + step], reduction="none", ignore_index=_IGNORED)
        for i in range(0, len(flat), step)
    ]
    return torch.cat(chunks).view_as(labels).to("cpu", torch.float64)


def _collect(scored: list[tuple[float, Window]]) -> Scores:
    windows = [window for _, window in scored]
    return Scores(
        nats=np.array([nats for nats, _ in scored]),
        tokens=np.array([window.tokens for window in windows]),
        bytes=np.array([int(window.bytes.sum()) for window in windows]),
        document=np.array([window.document for window in windows]),
    )


def _check_length(model: Any, length: int) -> None:
    if length < 3:
        raise EvaluationError(f"Windows of {length} tokens are too short to score: pass a length of 3 or more.")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length:
        raise EvaluationError(
            f"Windows of {length} tokens do not fit the model, which has {limit} positions: "
            f"pass length={limit} or less."
        )


def device_of(model: Any) -> torch.device:
    """Where a model takes its inputs."""
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) else next(model.parameters()).device


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model without dropout; its mode is given back."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _autocast(model: Any, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    if precision == "fp32":
        return contextlib.nullcontext()
    if precision != "bf16":
        raise EvaluationError(f"There is no precision {precision!r}: fp32 and bf16 are known.")
    return torch.autocast(device_of(model).type, dtype=torch.bfloat16)


def _resampled(fractions: list[tuple[np.ndarray, np.ndarray]], resamples: int, seed: int) -> list[np.ndarray]:
    """Bootstrap samples (resamples,) of each ratio of sums, all drawn with the same windows."""
    columns = _grouped(np.stack([column for fraction in fractions for column in fraction], axis=1).astype(np.float64))
    units = len(columns)
    drawn = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=resamples)
    sums = drawn @ columns  # (resamples, 2 · ratios)
    # A sample may hold only windows without bytes, and then it says nothing.
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = [sums[:, i] / sums[:, i + 1] for i in range(0, sums.shape[1], 2)]
    return [np.where(np.isfinite(ratio), ratio, np.nan) for ratio in ratios]


def _grouped(columns: np.ndarray) -> np.ndarray:
    if len(columns) <= _MAX_UNITS:
        return columns
    starts = np.linspace(0, len(columns), _MAX_UNITS, endpoint=False).astype(np.int64)
    return np.add.reduceat(columns, starts, axis=0)


def _interval(mean: float, samples: np.ndarray, confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(samples, [tail, 1 - tail])
    return Interval(mean=mean, low=float(low), high=float(high))


def _size(scores: Scores) -> str:
    return f"{len(scores.tokens)} windows of {int(scores.tokens.sum())} tokens and {int(scores.bytes.sum())} bytes"
