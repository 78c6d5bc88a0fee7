"""How well a model predicts text.

Texts t_0 … t_{n-1} are scored in windows, see `graftlm.evaluation.windows`:

    nats = - Σ_i log p(t_i | window before t_i)
    nats per token = nats / tokens
    bits per byte = nats / (ln 2 · bytes), which compares models with different tokenizers

With a reference, the bare backbone, each scored token also gives the divergence of the two predictions:

    KL = Σ_v p_reference(v | before) (log p_reference(v | before) - log p(v | before))

On texts that the reference sampled itself, its mean over tokens estimates the divergence of the two models'
distributions over such texts, per token. The estimate is biased where many texts are left out, such as conversations
whose first turn does not end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import max_sequence_length
from graftlm.data import Document
from graftlm.data.text_sets import ONE_SET, TextSets
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.inference import LanguageModel, Precision, autocast, evaluation_mode
from graftlm.evaluation.intervals import RESAMPLES, percentile_interval, resample_ratios
from graftlm.evaluation.results import Interval
from graftlm.evaluation.windows import Window, limited_windows, scored_logits

MetricName = Literal["nats_per_token", "bits_per_byte", "kl_per_token"]

_CHUNK_VALUES = 2**24  # Logits are reduced in float32 chunks of this many values, 64 MiB.
# Windows are sorted by length within this many batches, so that a stream of documents never has to fit in memory.
_SORTED_BATCHES = 64


@dataclass(frozen=True)
class Scores:
    """Sums over the scored tokens of each window, in the order of the documents; arrays of shape (windows,).

    Attributes:
        nats: the summed losses, float64.
        tokens: the numbers of scored tokens, int64.
        bytes: the numbers of UTF-8 bytes of the scored tokens, int64.
        document: the number of the document of each window, counted from 0.
        kl: the sums of KL(reference || model) in nats, float64; None without a reference.
    """

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    document: np.ndarray
    kl: np.ndarray | None = None

    @classmethod
    def of_windows(cls, windows: Sequence[Window], nats: np.ndarray, kl: np.ndarray | None) -> Self:
        """Make the scores of windows.

        Args:
            windows: the scored windows.
            nats: (windows,), their summed losses.
            kl: (windows,), their sums of KL(reference || model) in nats; None without a reference.
        """
        return cls(
            nats=nats,
            tokens=np.array([window.tokens for window in windows]),
            bytes=np.array([window.bytes.sum() for window in windows]),
            document=np.array([window.document for window in windows]),
            kl=kl,
        )

    def value(self, metric: MetricName) -> float:
        """Return a metric over all windows.

        Args:
            metric: `nats_per_token` is the log-perplexity, `bits_per_byte` the bits spent on each UTF-8 byte, and
                `kl_per_token` the divergence from the reference.

        Raises:
            EvaluationError: see `fraction`.
        """
        numerators, denominators = self.fraction(metric)
        return float(numerators.sum() / denominators.sum())

    def fraction(self, metric: MetricName) -> tuple[np.ndarray, np.ndarray]:
        """Return the numerator and the denominator of a metric in each window, (windows,).

        Args:
            metric: the metric, see `value`.

        Raises:
            EvaluationError: the metric is unknown, is `kl_per_token` without a reference, or is `bits_per_byte` of
                tokens without bytes.
        """
        if metric == "nats_per_token":
            return self.nats, self.tokens
        if metric == "kl_per_token":
            if self.kl is None:
                raise EvaluationError(
                    "kl_per_token was not measured, because the text was scored without a reference: pass one to "
                    "`score` as reference."
                )
            return self.kl, self.tokens
        if metric != "bits_per_byte":
            raise EvaluationError(
                f"There is no metric {metric!r}: choose nats_per_token, bits_per_byte or kl_per_token."
            )
        if not self.bytes.sum():
            raise EvaluationError(
                "The scored tokens contain no bytes of text, so bits_per_byte is undefined: score documents that "
                "contain text."
            )
        return self.nats, self.bytes * math.log(2)

    def subset(self, chosen: np.ndarray) -> Scores:
        """Return the scores of some windows.

        Args:
            chosen: (windows,) bool, True at the windows to keep.
        """
        return Scores(
            nats=self.nats[chosen],
            tokens=self.tokens[chosen],
            bytes=self.bytes[chosen],
            document=self.document[chosen],
            kl=None if self.kl is None else self.kl[chosen],
        )

    def by_document(self) -> Scores:
        """Sum the scores over the windows of each document.

        Intervals of the result are over documents: turns of one conversation are correlated, so intervals over windows
        would be too narrow.
        """
        _, first, groups = np.unique(self.document, return_index=True, return_inverse=True)

        def grouped(values: np.ndarray) -> np.ndarray:
            return np.bincount(groups, weights=values).astype(values.dtype)

        return Scores(
            nats=grouped(self.nats),
            tokens=grouped(self.tokens),
            bytes=grouped(self.bytes),
            document=self.document[first],
            kl=None if self.kl is None else grouped(self.kl),
        )

    def interval(self, metric: MetricName = "nats_per_token", *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
        """Return a metric with its 95% percentile bootstrap interval over windows.

        The interval describes how the metric varies over other text of the same kind.

        Args:
            metric: the metric, see `value`.
            resamples: number of bootstrap samples.
            seed: seed of the resampling.

        Raises:
            EvaluationError: see `fraction`.
        """
        (samples,) = resample_ratios([self.fraction(metric)], resamples, seed)
        return percentile_interval(self.value(metric), samples)


def paired_difference(a: Scores, b: Scores, metric: MetricName = "nats_per_token") -> Interval:
    """Return `a`'s metric minus `b`'s with a paired bootstrap interval: both are resampled at the same windows.

    Args:
        a: the scores from whose metric the other is subtracted.
        b: the scores of another model on the same windows.
        metric: the metric, see `Scores.value`.

    Raises:
        EvaluationError: the windows have different numbers of tokens or bytes, or the metric is not defined, see
            `Scores.fraction`.
    """
    if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.bytes, b.bytes)):
        raise EvaluationError(
            f"The scores come from different windows ({_size(a)}; {_size(b)}), but a paired difference needs the same "
            "ones: score the same documents with the same tokenizer and length."
        )
    samples_a, samples_b = resample_ratios([a.fraction(metric), b.fraction(metric)], RESAMPLES, seed=0)
    return percentile_interval(a.value(metric) - b.value(metric), samples_a - samples_b)


def _size(scores: Scores) -> str:
    return f"windows: {len(scores.tokens)}, tokens: {scores.tokens.sum()}, bytes: {scores.bytes.sum()}"


def with_equal_shares(
    fractions: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return one fraction whose value is the mean of those of several sets.

    Args:
        fractions: the numerators and the denominators in each window of a set, (windows,) each.

    Returns:
        The numerators and the denominators of all windows, over the sum of their set's denominators, and the number of
        windows of each set, which are resampled by themselves.
    """
    numerators = np.concatenate([numerator / denominator.sum() for numerator, denominator in fractions])
    denominators = np.concatenate([denominator / denominator.sum() for _, denominator in fractions])
    return numerators, denominators, tuple(len(numerator) for numerator, _ in fractions)


def mean_of_sets(sets: Sequence[Scores], metric: MetricName = "nats_per_token") -> Interval:
    """Return the mean of a metric over sets of texts, with its 95% bootstrap interval over the windows of each set.

    Args:
        sets: the scores of each set.
        metric: the metric, see `Scores.value`.
    """
    numerators, denominators, windows = with_equal_shares([scores.fraction(metric) for scores in sets])
    (samples,) = resample_ratios([(numerators, denominators)], RESAMPLES, 0, windows)
    return percentile_interval(float(numerators.sum() / denominators.sum()), samples)


def mean_difference(a: Sequence[Scores], b: Sequence[Scores]) -> Interval:
    """Return the mean over sets of `a`'s nats per token minus `b`'s, with a paired interval.

    Args:
        a: the scores of each set from which the others are subtracted.
        b: the scores of another model on the same windows.
    """
    numerators_a, denominators, windows = with_equal_shares([scores.fraction("nats_per_token") for scores in a])
    numerators_b, _, _ = with_equal_shares([scores.fraction("nats_per_token") for scores in b])
    pair = [(numerators_a, denominators), (numerators_b, denominators)]
    samples_a, samples_b = resample_ratios(pair, RESAMPLES, 0, windows)
    mean = (numerators_a.sum() - numerators_b.sum()) / denominators.sum()
    return percentile_interval(float(mean), samples_a - samples_b)


def learning_and_forgetting(
    backbone: Mapping[str, Scores], method: Mapping[str, Scores], sets: TextSets = ONE_SET
) -> dict[str, Interval]:
    """Return a method's metrics relative to its backbone.

        learned       = backbone's new - method's new
        forgotten     = method's old - backbone's old
        learned_<set> = backbone's <set> - method's <set>, for sets of other names      (nats per token)

    Of named sets, `new`, `old`, `learned` and `forgotten` are means over those of each, with equal shares of the sets:

        forgotten_<set> = method's <set> - backbone's <set>, for sets of old text

    Args:
        backbone: the backbone's scores by evaluation set: "old", "new" and others.
        method: the method's scores by evaluation set.
        sets: the names of the sets of new and old text.

    Returns:
        `<set>` and `<set>_bpb` for each set of `method`, `<set>_kl` where it was scored with a reference, and the
        difference for each set that both have, with a paired bootstrap interval over the same windows.

    Raises:
        EvaluationError: the two were scored on different windows, or a set has no bytes of text.
    """
    metrics: dict[str, Interval] = {}
    for name, scores in method.items():
        metrics[name] = scores.interval("nats_per_token")
        metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")
        if scores.kl is not None:
            metrics[f"{name}_kl"] = scores.interval("kl_per_token")
    for name in [name for name in method if name in backbone]:
        if sets.is_old(name):
            metrics[difference_name(name, sets)] = paired_difference(method[name], backbone[name])
        else:
            metrics[difference_name(name, sets)] = paired_difference(backbone[name], method[name])
    if sets.new:
        metrics.update(_means("new", sets.of_domain("new", method), backbone, method))
    if sets.old:
        metrics.update(_means("old", sets.of_domain("old", method), backbone, method))
    return metrics


def _means(
    domain: str, names: Sequence[str], backbone: Mapping[str, Scores], method: Mapping[str, Scores]
) -> dict[str, Interval]:
    """Return the means over the sets of a domain, `new` or `old`; empty without sets."""
    if not names:
        return {}
    scores = [method[name] for name in names]
    metrics = {domain: mean_of_sets(scores), f"{domain}_bpb": mean_of_sets(scores, "bits_per_byte")}
    if all(each.kl is not None for each in scores):
        metrics[f"{domain}_kl"] = mean_of_sets(scores, "kl_per_token")
    if not all(name in backbone for name in names):
        return metrics
    before = [backbone[name] for name in names]
    if domain == "old":
        metrics["forgotten"] = mean_difference(scores, before)
    else:
        metrics["learned"] = mean_difference(before, scores)
    return metrics


def difference_name(text_set: str, sets: TextSets) -> str:
    """Return the name of the metric that compares a method's loss on a test set with the backbone's."""
    if not sets.is_old(text_set):
        return learned_name(text_set)
    return f"forgotten_{text_set}" if sets.old else "forgotten"


def learned_name(text_set: str) -> str:
    """Return the name of the metric that compares the backbone's loss on an evaluation set with a method's."""
    return "learned" if text_set == "new" else f"learned_{text_set}"


def score(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str | Document],
    *,
    length: int = 256,
    batch_size: int = 16,
    precision: Precision = "fp32",
    limit_tokens: int | None = None,
    reference: LanguageModel | None = None,
) -> Scores:
    """Score every token of documents in windows of at most `length` tokens.

    Args:
        model: called as `model(input_ids=, attention_mask=, use_cache=False).logits`, (B, T) -> (B, T, V). A
            `GraftedModel` also receives the mask of prompt tokens.
        tokenizer: turns text into ids; it also decides whether a text begins with a BOS token.
        documents: strings or `Document`s, of whose conversations only the answers are scored. They are read once, and
            a stream never has to fit in memory.
        length: maximum number of tokens of a window, its context token and BOS included; at least 3.
        batch_size: windows per call of the model; it affects speed and memory only.
        precision: `bf16` computes under autocast; `fp32` leaves the model in its own dtype. Losses are always float32.
        limit_tokens: number of tokens to score, the same number of each source of a sequence of documents; None scores
            all.
        reference: a model with the same tokenizer, called like `model`, from which the divergence is measured.

    Raises:
        EvaluationError: `length` is below 3 or exceeds the model's positions, the precision is unknown, or the model
            predicts NaN or infinity.
        DataError: there is no token to score.
    """
    check_length(model, length)
    windows = limited_windows(tokenizer, documents, length, limit_tokens)
    return score_windows(
        model,
        tokenizer,
        windows,
        batch_size=batch_size,
        precision=precision,
        reference=reference,
    )


def check_length(model: LanguageModel, length: int) -> None:
    """Check the number of tokens of a window.

    Raises:
        EvaluationError: it is below 3, or exceeds the model's positions.
    """
    if length < 3:
        raise EvaluationError(
            f"The length of a window is {length}, but at least 3 tokens are needed: set length (--length, or "
            "evaluation.length or data.length of a recipe) to 3 or more."
        )
    limit = max_sequence_length(model)
    if limit < length:
        raise EvaluationError(
            f"Windows of {length} tokens do not fit the model, which has {limit} positions: "
            f"set length (--length, or evaluation.length or data.length of a recipe) to {limit} or less."
        )


def score_windows(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: Iterable[Window],
    *,
    batch_size: int = 16,
    precision: Precision = "fp32",
    reference: LanguageModel | None = None,
    on_batch: Callable[[int], None] = lambda tokens: None,
) -> Scores:
    """Score the tokens of windows that were cut before.

    Args:
        model: see `score`.
        tokenizer: the model's tokenizer, for padding.
        windows: the windows, which must fit the model's positions.
        batch_size: windows per call of the model; it affects speed and memory only.
        precision: see `score`.
        reference: see `score`.
        on_batch: called with the number of scored tokens after each batch.

    Returns:
        The scores in the order of the windows.

    Raises:
        EvaluationError: the precision is unknown, or the model predicts NaN or infinity.
        DataError: there are no windows.
    """
    windows = iter(windows)
    scored: list[Window] = []
    sums: list[np.ndarray] = []
    with evaluation_mode(model), torch.inference_mode(), autocast(model, precision):
        while True:
            chunk = list(islice(windows, batch_size * _SORTED_BATCHES))
            if not chunk:
                break
            sums.append(_score_chunk(model, tokenizer, chunk, batch_size, reference, on_batch))
            scored += chunk
    if not scored:
        raise DataError("The documents have no token to score: pass at least one document of two tokens or more.")
    nats, kl = np.concatenate(sums).T
    return Scores.of_windows(scored, nats, None if reference is None else kl)


def _score_chunk(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    chunk: Sequence[Window],
    batch_size: int,
    reference: LanguageModel | None,
    on_batch: Callable[[int], None],
) -> np.ndarray:
    """Score windows in batches of similar length.

    Returns:
        The summed losses and divergences of each window, in the order of the windows, (windows, 2).
    """
    sums = np.zeros((len(chunk), 2))
    order = longest_first(chunk)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = [chunk[row] for row in rows]
        sums[rows] = _score_batch(model, tokenizer, batch, reference)
        on_batch(sum(window.tokens for window in batch))
    return sums


def longest_first(windows: Sequence[Window]) -> list[int]:
    """Return the positions of windows in the order of their lengths, the longest first."""
    return sorted(range(len(windows)), key=lambda number: len(windows[number].ids), reverse=True)


def _score_batch(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[Window],
    reference: LanguageModel | None,
) -> np.ndarray:
    """Return the summed losses of the scored tokens of each window, and their divergences, (B, 2).

    Divergences are 0 without a reference.
    """
    logits, targets = scored_logits(model, tokenizer, batch)
    sums = torch.zeros(len(batch), 2, dtype=torch.float64)
    sums[:, 0] = _sum_by_window(_token_losses(logits, targets), batch)
    if reference is not None:
        reference_logits, _ = scored_logits(reference, tokenizer, batch)
        sums[:, 1] = _sum_by_window(_token_divergences(reference_logits, logits), batch)
    if not sums.isfinite().all():
        value = "divergence from the reference" if sums[:, 0].isfinite().all() else "loss"
        raise EvaluationError(
            f"The {value} on this text is NaN or infinite, because weights are damaged or activations overflow: load "
            "the model in float32 or bfloat16 (dtype), restore its weights, or train with a lower learning rate."
        )
    return sums.numpy()


def _sum_by_window(values: Tensor, batch: list[Window]) -> Tensor:
    """Return the sum of the values (N,) of each window's scored tokens, (B,)."""
    parts = values.split([window.tokens for window in batch])
    return torch.stack([part.sum() for part in parts])


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (N,) in float64, from float32 logits.

    Args:
        logits: (N, V).
        targets: (N,) the ids that they predict.
    """
    size = max(1, _CHUNK_VALUES // logits.shape[-1])
    losses = []
    for chunk, chunk_targets in zip(logits.split(size), targets.split(size), strict=True):
        losses.append(F.cross_entropy(chunk.float(), chunk_targets, reduction="none"))
    return torch.cat(losses).to("cpu", torch.float64)


def _token_divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """Return KL(reference || model) at each of N positions in float64, from float32 logits.

    Args:
        reference: the reference's logits, (N, V).
        logits: the model's logits, (N, V). They may have further ones, of tokens that were added.
    """
    size = max(1, _CHUNK_VALUES // logits.shape[-1])
    chunks = zip(reference.split(size), logits.split(size), strict=True)
    divergences = []
    for reference_chunk, chunk in chunks:
        log_p = reference_chunk.float().log_softmax(-1)
        log_q = chunk.float().log_softmax(-1)[..., : log_p.shape[-1]]
        divergences.append(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
    return torch.cat(divergences).to("cpu", torch.float64)
