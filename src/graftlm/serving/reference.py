"""The reference engine: one request at a time, by a plain loop of forward passes.

Tests compare `BatchingEngine` with it, and the benchmark takes it as "one request at a time".
"""

from __future__ import annotations

import queue
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from graftlm.backbone import Backbone
from graftlm.grafts import Graft, GraftedModel
from graftlm.grafts.graft_set import newest_values
from graftlm.serving.protocol import (
    EngineError,
    EngineFinishReason,
    EngineLimits,
    EngineStats,
    Finish,
    GenerationRequest,
    ModelRegistry,
    QueueFullError,
    RequestStream,
    ServingError,
    ShuttingDownError,
    TokenOutput,
    end_token_ids,
)
from graftlm.serving.sampling import SampledToken


@dataclass(frozen=True)
class SerialRequest:
    """An accepted request with its grafts, its stream, its index there, and the time of its arrival."""

    request: GenerationRequest
    grafts: dict[str, Graft]
    stream: RequestStream
    index: int
    arrival: float


class SerialEngine:
    """An `Engine` of `protocol.py` that answers in the order of arrival.

    Args:
        backbone: a causal language model with its tokenizer.
        grafts: grafts for this backbone, by name.
        name: name of the backbone in requests.
        limits: of the engine; `batch_size` counts as 1.
    """

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        self._registry = ModelRegistry(backbone, grafts or {}, name, limits)
        self._backbone, self._end_ids = backbone, end_token_ids(backbone)
        self._queue: queue.Queue[SerialRequest | None] = queue.Queue()
        self._lock = threading.Lock()
        self._open, self._stop = True, threading.Event()
        self._waiting = self._running = self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="serial-engine", daemon=True)
        self._thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        return self._registry.names

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        grafts = [self._registry.check(request) for request in requests]
        stream, now = RequestStream(len(requests)), time.monotonic()
        with self._lock:
            if not self._open:
                raise ShuttingDownError("The server is shutting down: ask again in a moment.")
            if self._waiting + self._running + len(requests) > self._registry.limits.queue + 1:
                raise QueueFullError(f"{self._waiting} requests are waiting already: ask again in a moment.")
            self._waiting += len(requests)
            for index, (request, chosen) in enumerate(zip(requests, grafts, strict=True)):
                self._queue.put(SerialRequest(request, chosen, stream, index, now))
        return stream

    def replace(self, name: str, graft: object | None) -> None:
        self._registry.replace(name, graft)

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(self._running, self._waiting, self._tokens, dict(self._finished))

    def close(self, grace: float) -> bool:
        with self._lock:
            if self._open:
                self._open = False
                self._queue.put(None)
        self._thread.join(grace)
        if not self._thread.is_alive():
            return not self._stop.is_set()
        self._stop.set()
        self._thread.join()
        return False

    def _work(self) -> None:
        while (accepted := self._queue.get()) is not None:
            with self._lock:
                self._waiting, self._running = self._waiting - 1, 1
            try:
                last = self._generate(accepted)
            except Exception as error:  # a graft's exception fails this request only
                last = error if isinstance(error, ServingError) else EngineError(f"The request failed: {error}")
            with self._lock:
                self._running = 0
                self._finished[last.reason if isinstance(last, Finish) else "error"] += 1
            self._put(accepted, last)

    def _put(self, accepted: SerialRequest, item: TokenOutput | Finish | ServingError) -> None:
        accepted.stream.put(item)
        RequestStream.wake_readers([accepted.stream])

    def _generate(self, accepted: SerialRequest) -> Finish:
        model = GraftedModel(self._backbone, accepted.grafts).eval()
        try:
            return self._generate_with(model, accepted)
        finally:
            model.detach()

    def _generate_with(self, model: GraftedModel, accepted: SerialRequest) -> Finish:
        request, index, tokens, shown = accepted.request, accepted.index, [], ""
        reason: EngineFinishReason = "length"
        for sampled, trace in self._sampled_tokens(request, model):
            if overdue := self._overdue(accepted):
                reason = overdue
                break
            if sampled.token in self._end_ids:
                reason = "stop"
                break
            tokens.append(sampled.token)
            text = full_text(self._backbone, request.prompt, tokens)
            stopped = text_before_stop(text.rstrip("\ufffd"), request.stop)
            final = stopped if stopped is not None else final_text(text, request.stop)
            new = final[len(shown) :]
            self._put(accepted, TokenOutput(sampled.token, new, sampled.logprob, sampled.top, trace, index))
            shown = final if len(final) > len(shown) else shown
            with self._lock:
                self._tokens += 1
            if stopped is not None:
                return Finish("stop", len(request.prompt), len(tokens), index=index)
            if len(tokens) == request.max_tokens:
                break
        text = full_text(self._backbone, request.prompt, tokens)
        return Finish(reason, len(request.prompt), len(tokens), text[len(shown) :], index)

    def _overdue(self, accepted: SerialRequest) -> EngineFinishReason | None:
        if accepted.stream.cancelled or self._stop.is_set():
            return "cancelled"
        return "time" if time.monotonic() - accepted.arrival > self._registry.limits.seconds else None

    @torch.inference_mode()
    def _sampled_tokens(
        self, request: GenerationRequest, model: GraftedModel
    ) -> Iterator[tuple[SampledToken, dict[str, float]]]:
        """Each token with its trace, without end."""
        generator = random.Random(secrets.randbits(64) if request.seed is None else request.seed)
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([request.prompt], device=model.device)
        while True:
            output, traces = model.forward_traces(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            logits = output.logits[0, -1].float()
            token = sample_row(logits, request, generator)
            sampled = SampledToken(token)
            if request.logprobs is not None:
                logprobs = logits.log_softmax(-1)
                sampled = SampledToken(token, float(logprobs[token]), most_likely(logprobs, request.logprobs))
            yield sampled, newest_values(traces, 0) if request.trace else {}
            ids = torch.tensor([[token]], device=model.device)


def sample_row(logits_V: Tensor, request: GenerationRequest, generator: random.Random) -> int:
    """The most likely token, or with a temperature a random token.

    A random number u in [0, 1) selects the first token at which the cumulative probability, in the vocabulary's order,
    exceeds u times the total. Tokens outside of top_p have probability 0: the most likely tokens are inside until their
    total reaches top_p.
    """
    if request.temperature == 0:
        return int(logits_V.argmax())
    p_V = (logits_V.double() / request.temperature).softmax(-1)
    if request.top_p < 1:
        sorted_V, order_V = p_V.sort(descending=True, stable=True)
        outside_V = sorted_V.cumsum(-1) - sorted_V >= request.top_p
        outside_V[0] = False
        p_V[order_V[outside_V]] = 0
    cumulative_V = p_V.cumsum(-1)
    token = torch.searchsorted(cumulative_V, generator.random() * cumulative_V[-1], right=True)
    return int(token.clamp(max=int(p_V.nonzero().max())))


def most_likely(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The tokens of the highest log p, with their log p."""
    values, tokens = logprobs_V.topk(min(count, len(logprobs_V)))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def full_text(backbone: Backbone, prompt: tuple[int, ...], tokens: list[int]) -> str:
    """The text of the tokens after the prompt; an incomplete character is U+FFFD."""
    decode = backbone.need_tokenizer().decode
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, both = (str(decode(list(ids), **options)) for ids in (prompt, (*prompt, *tokens)))
    # The prompt may end within a character, so that the two texts differ before the prompt's end.
    common = next((n for n, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), len(before))
    return both[common:]


def text_before_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string; None if there is no stop string."""
    starts = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(starts)] if starts else None


def final_text(text: str, stops: tuple[str, ...]) -> str:
    """The text without an incomplete character at its end, and without what may begin a stop string."""
    text = text.rstrip("\ufffd")
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(begun, default=0)]
