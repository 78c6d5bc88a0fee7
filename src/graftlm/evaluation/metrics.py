"""How well a model predicts text, and what running it costs.

A document's tokens t_0 … t_{n-1} are cut into windows that never cross documents. A window begins with the last token
of the window before, as context, so each token but the first is scored once:

    nats = - Σ_i log p(t_i | window before t_i)
    nats per token = nats / tokens
    bits per byte = nats / (ln 2 · bytes), which compares models with different tokenizers

A tokenizer that puts a BOS token before texts puts one before every window, and then the first token is scored too.
Other special tokens are left out. The tokens of a document's prompt are context and are not scored.

Beside a reference, the bare backbone, each scored token also gives the divergence of the two predictions:

    KL = Σ_v p_reference(v | before) (log p_reference(v | before) - log p(v | before))

On texts that the reference sampled itself, its mean over tokens estimates the divergence of the two models'
distributions over such texts, per token. It is biased where many texts
are left out, such as conversations whose first turn does not end.

Cost is decoding speed in tokens per second and peak memory in bytes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Literal, Self

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from graftlm.backbone import leading_bos, max_sequence_length, padding_id
from graftlm.data.boundaries import window_bounds
from graftlm.data.chats import ChatExample, chat_tokens, render_chat
from graftlm.data.own_text import OwnText
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.results import Interval

MetricName = Literal["nats_per_token", "bits_per_byte", "kl_per_token"]
Precision = Literal["fp32", "bf16"]

_CHUNK_VALUES = 2**24  # logits are reduced in float32 chunks of this many values: 64 MiB
# Windows are sorted by length within this many batches, so that a stream of documents never has to fit in memory.
_SORTED_BATCHES = 64
# Beyond this many windows the bootstrap resamples runs of neighbouring windows: faster, and no narrower.
_MAX_UNITS = 2048
_RESAMPLES = 1000


@dataclass(frozen=True)
class Scores:
    """Sums per window, in the order of the documents; arrays of shape (windows,). `kl` needs a reference."""

    nats: np.ndarray
    tokens: np.ndarray
    bytes: np.ndarray
    document: np.ndarray
    kl: np.ndarray | None = None

    @classmethod
    def of_windows(cls, windows: Sequence[Window], nats: np.ndarray, kl: np.ndarray | None) -> Self:
        """The sums of these windows."""
        counts = [(window.tokens, window.bytes.sum(), window.document) for window in windows]
        tokens, sizes, document = np.array(counts).T
        return cls(nats, tokens, sizes, document, kl)

    def value(self, metric: MetricName) -> float:
        """One metric over all windows: the log-perplexity, or the bits spent on each UTF-8 byte, or the divergence."""
        nats, units = self.fraction(metric)
        return float(nats.sum() / units.sum())

    def fraction(self, metric: MetricName) -> tuple[np.ndarray, np.ndarray]:
        """A metric's numerator and denominator per window; EvaluationError if it is unknown or was not measured."""
        if metric == "nats_per_token":
            return self.nats, self.tokens
        if metric == "kl_per_token" and self.kl is not None:
            return self.kl, self.tokens
        if metric == "kl_per_token":
            raise EvaluationError("These scores have no divergence: score with a reference.")
        if metric != "bits_per_byte":
            raise EvaluationError(f"There is no metric {metric!r}: give nats_per_token, bits_per_byte or kl_per_token.")
        if not self.bytes.sum():
            raise EvaluationError("The scored tokens have no byte of text, so no bits per byte exist: score more text.")
        return self.nats, self.bytes * math.log(2)

    def subset(self, chosen: np.ndarray) -> Scores:
        """The windows where `chosen` (windows,) is True."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[chosen] for name, value in values.items() if value is not None})

    def by_document(self) -> Scores:
        """The sums of each document as one window, for intervals over documents: turns of a conversation are alike."""
        _, first, group = np.unique(self.document, return_index=True, return_inverse=True)
        sums = {
            name: None if value is None else np.bincount(group, weights=value).astype(value.dtype)
            for name, value in (("nats", self.nats), ("tokens", self.tokens), ("bytes", self.bytes), ("kl", self.kl))
        }
        return replace(self, document=self.document[first], **sums)

    def interval(
        self, metric: MetricName = "nats_per_token", *, resamples: int = _RESAMPLES, seed: int = 0
    ) -> Interval:
        """95% percentile bootstrap over windows: how the metric varies over other text of the same kind."""
        (samples,) = _resample([self.fraction(metric)], resamples, seed)
        return percentile_interval(self.value(metric), samples)


@dataclass(frozen=True)
class Window:
    """One row for the model.

    Attributes:
        ids: (T,), the tokens, with a leading BOS if the tokenizer has one.
        first: the index of the first scored token.
        bytes: (T - first,), the UTF-8 bytes of each scored token.
        prompt: the number of leading tokens that belong to the document's prompt, BOS included.
    """

    ids: np.ndarray
    first: int
    bytes: np.ndarray
    document: int
    prompt: int = 0

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return len(self.bytes)


def cut_windows(tokenizer: Any, documents: Iterable[Any], length: int) -> Iterator[Window]:
    """Windows of at most `length` tokens, BOS included, of documents with `.text` and `.prompt`, or of strings."""
    bos = leading_bos(tokenizer)
    prefix = [] if bos is None else [bos]
    for index, document in enumerate(documents):
        if getattr(document, "chat", None) is not None:
            yield from _chat_windows(tokenizer, document.chat, length, index)
            continue
        text_ids, text_bytes = encode_with_bytes(tokenizer, document if isinstance(document, str) else document.text)
        prompt_ids, _ = encode_with_bytes(tokenizer, getattr(document, "prompt", ""))
        ids = np.concatenate([prompt_ids, text_ids])
        sizes = np.concatenate([np.zeros_like(prompt_ids), text_bytes])
        for start, stop in window_bounds(len(ids), length - len(prefix), overlap=1):
            context = 0 if prefix and start == 0 else 1  # a document's first token is scored only behind a BOS
            first = max(start + context, len(prompt_ids))
            if first < stop:
                row = np.concatenate([np.asarray(prefix, dtype=np.int64), ids[start:stop]])
                prompt = len(prefix) + len(prompt_ids) - start if start < len(prompt_ids) else 0
                yield Window(row, len(prefix) + first - start, sizes[first:stop], index, prompt)


def _chat_windows(tokenizer: Any, chat: ChatExample, length: int, document: int) -> Iterator[Window]:
    """Windows of a conversation: one for each assistant's turn, behind what precedes it; a long turn has several."""
    ids, predicted, ends = chat_tokens(tokenizer, chat)
    before = _bytes_before(render_chat(chat, tokenizer).text)
    sizes = np.diff(before[np.maximum.accumulate(ends)], prepend=0)
    edges = np.flatnonzero(np.diff(predicted.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    lead = int(predicted.argmax())
    for start, stop in edges.tolist():
        step = length - 1 if stop - start < length else length // 2
        for first in range(max(start, 1), stop, step):
            last = min(first + step, stop)
            begin = max(0, last - length)
            prompt = max(0, min(lead, last) - begin)
            yield Window(ids[begin:last], first - begin, sizes[first:last], document, prompt)


def own_windows(samples: Iterable[OwnText]) -> Iterator[Window]:
    """Windows of texts that a model sampled: one for each sampled part, which is scored behind all that precedes it."""
    for number, sample in enumerate(samples):
        for start, stop in sample.turns:
            ids = np.array(sample.ids[:stop], dtype=np.int64)
            yield Window(ids, start, np.zeros(stop - start, dtype=np.int64), number, start if start > 1 else 0)


def encode_with_bytes(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (n,) of a text without special tokens, and the number of UTF-8 bytes (n,) of each token.

    The numbers sum to the text's bytes. Bytes that the tokenizer drops count for the next token. A character that is
    split over tokens counts for the first of them.
    """
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not len(ids):
        return ids, ids
    if not fast:
        return ids, np.diff(_ends_from_decoding(tokenizer, ids, text), prepend=0)
    ends = np.maximum.accumulate(np.asarray(encoded["offset_mapping"], dtype=np.int64)[:, 1])
    ends[-1] = len(text)
    return ids, np.diff(_bytes_before(text)[ends], prepend=0)


def _bytes_before(text: str) -> np.ndarray:
    """The UTF-8 bytes (characters + 1,) before each character of a text, and of all of it."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([[0], np.cumsum(widths)])


def _ends_from_decoding(tokenizer: Any, ids: np.ndarray, text: str) -> np.ndarray:
    """The byte positions (n,) at which tokens end, from decoded lengths that are scaled to the text's bytes."""
    # A token that is part of a character decodes to a replacement mark, which counts as one byte.
    texts = [tokenizer.decode([int(token)]).replace("\ufffd", "?") for token in ids]
    ends = np.cumsum([len(text.encode()) for text in texts])
    total = len(text.encode())
    return np.rint(ends * (total / ends[-1])).astype(np.int64) if ends[-1] else np.full(len(ids), total)


def limit_scored(windows: Iterator[Window], limit: int | None) -> Iterator[Window]:
    """Windows until `limit` tokens are scored; the last window is shortened."""
    left = sys.maxsize if limit is None else limit
    for window in windows:
        if left <= 0:
            return
        yield replace(window, ids=window.ids[: window.first + left], bytes=window.bytes[:left])
        left -= window.tokens


def paired_difference(a: Scores, b: Scores, metric: MetricName = "nats_per_token") -> Interval:
    """`a`'s metric minus `b`'s, by samples of the same windows; EvaluationError if theirs differ."""
    if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.bytes, b.bytes)):
        sizes = [f"{len(s.tokens)} windows of {s.tokens.sum()} tokens and {s.bytes.sum()} bytes" for s in (a, b)]
        raise EvaluationError(
            f"The two scores hold {' and '.join(sizes)}, but a paired difference needs the same windows: "
            "score the same documents with the same tokenizer and length."
        )
    samples_a, samples_b = _resample([a.fraction(metric), b.fraction(metric)], _RESAMPLES, seed=0)
    return percentile_interval(a.value(metric) - b.value(metric), samples_a - samples_b)


def learning_and_forgetting(backbone: Mapping[str, Scores], method: Mapping[str, Scores]) -> dict[str, Interval]:
    """A method's metrics relative to its backbone, from scores per evaluation set ("old", "new" and others).

        learned   = backbone's new - method's new      forgotten = method's old - backbone's old      (nats per token)

    Returns `<set>` and `<set>_bpb` for each set of `method`, `<set>_kl` where it was scored with a reference, `learned`
    where both have "new", and `forgotten` where both have "old". The differences are paired bootstrap intervals over
    the same windows.

    Raises EvaluationError if the two were scored on different windows.
    """
    metrics: dict[str, Interval] = {}
    for name, scores in method.items():
        metrics |= {name: scores.interval("nats_per_token"), f"{name}_bpb": scores.interval("bits_per_byte")}
        if scores.kl is not None:
            metrics[f"{name}_kl"] = scores.interval("kl_per_token")
    if "new" in backbone and "new" in method:
        metrics["learned"] = paired_difference(backbone["new"], method["new"])
    if "old" in backbone and "old" in method:
        metrics["forgotten"] = paired_difference(method["old"], backbone["old"])
    return metrics


def score(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Any],
    *,
    length: int = 256,
    batch_size: int = 16,
    precision: Precision = "fp32",
    limit_tokens: int | None = None,
    reference: Any = None,
) -> Scores:
    """Score every token of `documents` (strings, or objects with `.text` and `.prompt`) in windows of `length` tokens.

    Args:
        model: called as `model(input_ids=, attention_mask=, use_cache=False).logits`, (B, T) -> (B, T, V). A
            `GraftedModel` also receives the mask of prompt tokens.
        tokenizer: gives the ids, and says whether a BOS belongs before a text.
        documents: read once; a stream never has to fit in memory.
        length: tokens of a window, its context token and BOS included.
        batch_size: windows per call of the model; it affects speed and memory only.
        precision: "bf16" computes under autocast; "fp32" leaves the model in its own dtype. Losses are always float32.
        limit_tokens: stop after this many scored tokens.
        reference: a model of the same tokenizer, called like `model`, from which the divergence is measured.

    Raises EvaluationError if the model predicts NaN or infinity, or `length` does not fit the model, and DataError if
    there is nothing to score.
    """
    if length < 3:
        raise EvaluationError(f"Windows of {length} tokens are too short to score: pass a length of 3 or more.")
    if (limit := max_sequence_length(model)) < length:
        raise EvaluationError(
            f"Windows of {length} tokens do not fit the model, which has {limit} positions: "
            f"set length (--length, or data.length of a recipe) to {limit} or less."
        )
    windows = limit_scored(cut_windows(tokenizer, documents, length), limit_tokens)
    return score_windows(model, tokenizer, windows, batch_size=batch_size, precision=precision, reference=reference)


def score_windows(
    model: Any,
    tokenizer: Any,
    windows: Iterable[Window],
    *,
    batch_size: int = 16,
    precision: Precision = "fp32",
    reference: Any = None,
) -> Scores:
    """Score windows that are cut already; see `score`."""
    windows = iter(windows)
    scored: list[Window] = []
    sums: list[np.ndarray] = []
    with evaluation_mode(model), torch.inference_mode(), _autocast(model, precision):
        while chunk := list(islice(windows, batch_size * _SORTED_BATCHES)):
            values = np.zeros((len(chunk), 2))
            order = sorted(range(len(chunk)), key=lambda i: len(chunk[i].ids), reverse=True)
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                values[rows] = _score_batch(model, tokenizer, [chunk[i] for i in rows], reference)
            scored += chunk
            sums.append(values)
    if not scored:
        raise DataError("The documents hold no token to score: give at least one document of two tokens or more.")
    nats, kl = np.concatenate(sums).T
    return Scores.of_windows(scored, nats, None if reference is None else kl)


def _score_batch(model: Any, tokenizer: Any, batch: list[Window], reference: Any) -> np.ndarray:
    """(B, 2): the summed losses of the scored tokens of each window, and their divergences, 0 without a reference."""
    inputs, extra, labels = window_batch(model, tokenizer, batch)
    logits = model(**inputs, **extra).logits
    sums = torch.zeros(len(batch), 2, dtype=torch.float64)
    sums[:, 0] = _token_losses(logits, labels).sum(dim=1)
    if reference is not None:
        sums[:, 1] = _token_divergences(reference(**inputs).logits, logits, labels).sum(dim=1)
    if not sums.isfinite().all():
        raise EvaluationError(
            "The model predicts NaN or infinity on this text: its weights are broken or overflow in this precision "
            '(try precision="fp32", or train with a lower learning rate).'
        )
    return sums.numpy()


def window_batch(
    model: Any, tokenizer: Any, batch: Sequence[Window]
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Windows as a model's inputs (B, T), a `GraftedModel`'s further inputs, and labels (B, T), -100 where none is.

    A label stands at the position that predicts it.
    """
    from graftlm.grafted.model import GraftedModel

    shape = (len(batch), max(len(window.ids) for window in batch))
    ids = torch.full(shape, padding_id(tokenizer))
    mask, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    prompt = torch.zeros(shape, dtype=torch.bool)
    for row, window in enumerate(batch):
        size = len(window.ids)
        ids[row, :size] = torch.from_numpy(window.ids)
        mask[row, :size] = 1
        prompt[row, : window.prompt] = True
        labels[row, window.first - 1 : size - 1] = ids[row, window.first : size]
    device = device_of(model)
    inputs: dict[str, Any] = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": False}
    extra = {"prompt": prompt.to(device)} if prompt.any() and isinstance(model, GraftedModel) else {}
    return inputs, extra, labels.to(device)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses (B, T) in float64, from float32 logits; `labels` stand at the position that predicts them."""
    size = max(1, _CHUNK_VALUES // logits.shape[-1])
    chunks = zip(logits.flatten(0, 1).split(size), labels.flatten().split(size), strict=True)
    losses = [F.cross_entropy(part.float(), targets, reduction="none") for part, targets in chunks]
    return torch.cat(losses).view_as(labels).to("cpu", torch.float64)


def _token_divergences(reference: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """KL(reference || model) (B, T) in float64, from float32 logits (B, T, V); 0 where there is no label."""
    size = max(1, _CHUNK_VALUES // logits.shape[-1])
    pairs = zip(reference.flatten(0, 1).split(size), logits.flatten(0, 1).split(size), strict=True)
    values = []
    for own, other in pairs:
        log_p, log_q = own.float().log_softmax(-1), other.float().log_softmax(-1)
        values.append(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
    return torch.cat(values).view_as(labels).where(labels != -100, 0).to("cpu", torch.float64)


def decode_speed(
    model: Any, tokenizer: Any, prompts: Sequence[str], new_tokens: int = 64, *, prompt_tokens: int = 32
) -> float:
    """Tokens per second of greedy decoding with a cache, one sequence at a time, after a warm-up.

    Each prompt is cut to its first `prompt_tokens` tokens; the time of its prefill counts. An end-of-text token does
    not end the decoding, so every prompt yields `new_tokens` tokens.

    Raises DataError if no prompt has text.
    """
    device = device_of(model)
    encoded = [tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :prompt_tokens] for text in prompts]
    rows = [ids.to(device) for ids in encoded if ids.numel()]
    if not rows:
        raise DataError("There is no prompt to decode from: give at least one text that is not empty.")
    settings = {"do_sample": False, "num_beams": 1, "use_cache": True, "pad_token_id": padding_id(tokenizer)}

    def decode(ids: Tensor, count: int) -> None:
        mask = torch.ones_like(ids)
        model.generate(input_ids=ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, **settings)

    with evaluation_mode(model), torch.inference_mode():
        decode(rows[0], min(new_tokens, 8))
        start = _synchronised_time(device)
        for ids in rows:
            decode(ids, new_tokens)
        return new_tokens * len(rows) / (_synchronised_time(device) - start)


def _synchronised_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class MemoryWatch:
    """Measures the peak memory of a `with` block, in bytes.

    With CUDA, `peak` is that of allocated device memory. Without, it is that of the process's resident set, sampled
    every few milliseconds; that includes what the process held before the block.
    """

    def __init__(self, every: float = 0.02) -> None:
        self.peak = 0
        self._every, self._done = every, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self._done.set()
            self._thread.join()

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self.peak = max(self.peak, process.memory_info().rss)
            if self._done.wait(self._every):
                return


def device_of(model: Any) -> torch.device:
    """The device of a model's inputs."""
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) else next(model.parameters()).device


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode for a `with` block, and restore its mode afterwards."""
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


def _resample(fractions: list[tuple[np.ndarray, np.ndarray]], resamples: int, seed: int) -> list[np.ndarray]:
    """Bootstrap samples (resamples,) of each ratio of sums; one sample draws the same windows for all ratios."""
    columns = np.stack([column for fraction in fractions for column in fraction], axis=1).astype(np.float64)
    if len(columns) > _MAX_UNITS:
        starts = np.linspace(0, len(columns), _MAX_UNITS, endpoint=False).astype(np.int64)
        columns = np.add.reduceat(columns, starts, axis=0)
    units = len(columns)
    draws = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=resamples)
    sums = draws @ columns  # (resamples, 2 · ratios)
    # A sample may hold only windows without bytes; it is left out of the quantiles.
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = [sums[:, i] / sums[:, i + 1] for i in range(0, sums.shape[1], 2)]
    return [np.where(np.isfinite(ratio), ratio, np.nan) for ratio in ratios]


def bootstrap(values: Sequence[float] | np.ndarray) -> Interval:
    """The mean of values with its 95% percentile bootstrap interval, as rouge-score's aggregator computes it."""
    array = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(array), size=(_RESAMPLES, len(array)))
    interval = percentile_interval(float(array.mean()), array[draws].mean(axis=1))
    return Interval(mean=interval.mean, low=min(interval.low, interval.mean), high=max(interval.high, interval.mean))


def share_interval(count: int, total: int) -> Interval:
    """The share of `count` in `total` with Wilson's 95% score interval, which holds at 0% and 100% too."""
    from scipy.stats import binomtest  # takes a second to import

    mean, ends = count / total, binomtest(count, total).proportion_ci(method="wilson")
    return Interval(mean=mean, low=min(ends.low, mean), high=max(ends.high, mean))


def percentile_interval(mean: float, samples: np.ndarray | Sequence[float]) -> Interval:
    """The 95% percentile bootstrap interval of a value from its bootstrap samples; NaN samples are left out."""
    tail = (1 - 0.95) / 2
    low, high = np.nanquantile(samples, [tail, 1 - tail])
    return Interval(mean=mean, low=float(low), high=float(high))
