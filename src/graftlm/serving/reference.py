"""The slow truth: one request at a time, by the plain loop of forward passes.

Tests compare the engine with it, and it is the benchmark's "one request at a time".
"""

from __future__ import annotations

import queue
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from graftlm.backbone import Backbone
from graftlm.grafts import Graft, GraftedModel
from graftlm.grafts.mixed import newest
from graftlm.serving.engine.catalogue import Catalogue, Chosen, ends_of
from graftlm.serving.engine.tickets import LiveTicket, Mail
from graftlm.serving.protocol import Ask, BusyError, ClosingError, End, EngineError, Limits, Piece, ServingError, Stats


@dataclass
class _Job:
    """A request that was taken on."""

    ask: Ask
    chosen: Chosen
    begun: float
    ticket: LiveTicket = field(default_factory=LiveTicket)


class SerialEngine:
    """An `Engine` of `protocol.py` that answers in the order of arrival.

    Args:
        backbone: a causal language model with its tokenizer.
        grafts: built for it, by name.
        name: what the backbone is called.
        limits: of one request; `batch_size` is 1 whatever it says.
    """

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._catalogue = Catalogue(backbone, grafts or {}, name, limits)
        self._backbone, self._ends = backbone, ends_of(backbone)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._mail = Mail()
        self._lock = threading.Lock()
        self._open, self._stop = True, threading.Event()
        self._waiting = self._running = self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="serial-engine", daemon=True)
        self._thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        return self._catalogue.names

    def submit(self, ask: Ask) -> LiveTicket:
        job = _Job(ask, self._catalogue.check(ask), time.monotonic())
        with self._lock:
            if not self._open:
                raise ClosingError("The server is shutting down: ask again in a moment.")
            if self._waiting + self._running > self._catalogue.limits.queue:
                raise BusyError(f"{self._waiting} requests are waiting already: ask again in a moment.")
            self._waiting += 1
            self._jobs.put(job)
        return job.ticket

    def replace(self, name: str, graft: object | None) -> None:
        self._catalogue.replace(name, graft)

    def stats(self) -> Stats:
        with self._lock:
            return Stats(self._running, self._waiting, self._tokens, dict(self._finished))

    def close(self, grace: float) -> bool:
        with self._lock:
            if self._open:
                self._open = False
                self._jobs.put(None)
        self._thread.join(grace)
        if not self._thread.is_alive():
            return not self._stop.is_set()
        self._stop.set()
        self._thread.join()
        return False

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._waiting, self._running = self._waiting - 1, 1
            try:
                last = self._answer(job)
            except Exception as error:  # whatever a graft does wrong is this request's failure alone
                last = error if isinstance(error, ServingError) else EngineError(f"The request failed: {error}")
            with self._lock:
                self._running = 0
                self._finished[last.reason if isinstance(last, End) else "error"] += 1
            self._mail.put(job.ticket, last)
            self._mail.send()

    def _answer(self, job: _Job) -> End:
        model = GraftedModel(self._backbone, job.chosen).eval()
        try:
            return self._write(job, model)
        finally:
            model.detach()

    def _write(self, job: _Job, model: GraftedModel) -> End:
        ask, tokens, shown = job.ask, [], ""
        reason: Literal["stop", "length", "time", "cancelled"] = "length"
        for piece_of in self._tokens_of(ask, model):
            if early := self._why_stop(job):
                reason = early
                break
            if piece_of.token in self._ends:
                reason = "stop"
                break
            tokens.append(piece_of.token)
            text = whole(self._backbone, ask.prompt, tokens)
            stopped = cut(text.rstrip("\ufffd"), ask.stop)
            safe = stopped if stopped is not None else held(text, ask.stop)
            piece = Piece(piece_of.token, safe[len(shown) :], piece_of.logprob, piece_of.top, piece_of.trace)
            self._mail.put(job.ticket, piece)
            self._mail.send()
            shown = safe if len(safe) > len(shown) else shown
            with self._lock:
                self._tokens += 1
            if stopped is not None:
                return End("stop", len(ask.prompt), len(tokens))
            if len(tokens) == ask.max_tokens:
                break
        text = whole(self._backbone, ask.prompt, tokens)
        return End(reason, len(ask.prompt), len(tokens), text[len(shown) :])

    def _why_stop(self, job: _Job) -> Literal["time", "cancelled"] | None:
        if job.ticket.cancelled or self._stop.is_set():
            return "cancelled"
        late = time.monotonic() - job.begun > self._catalogue.limits.seconds
        return "time" if late else None

    @torch.inference_mode()
    def _tokens_of(self, ask: Ask, model: GraftedModel) -> Iterator[Piece]:
        """Each token that is written, with what is told of it, its text apart."""
        draw = random.Random(secrets.randbits(64) if ask.seed is None else ask.seed)
        cache = DynamicCache(config=model.config)
        ids = torch.tensor([ask.prompt], device=model.device)
        while True:
            output, traces = model.forward_traces(
                input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            logits = output.logits[0, -1].float()
            token = choose(logits, ask, draw)
            logprobs = logits.log_softmax(-1) if ask.logprobs is not None else None
            yield Piece(
                token,
                "",
                None if logprobs is None else float(logprobs[token]),
                () if logprobs is None else likeliest(logprobs, ask.logprobs or 0),
                newest(traces, 0) if ask.trace else {},
            )
            ids = torch.tensor([[token]], device=model.device)


def choose(logits_V: Tensor, ask: Ask, draw: random.Random) -> int:
    """The likeliest token; with a temperature, one at random.

    The random choice takes one number u in [0, 1) and the first token at which the running sum of probabilities, in
    the vocabulary's order, exceeds u times their sum; those outside of top_p have none. The likeliest tokens are taken
    into top_p until their probability reaches it.
    """
    if ask.temperature == 0:
        return int(logits_V.argmax())
    p_V = (logits_V.double() / ask.temperature).softmax(-1)
    if ask.top_p < 1:
        sorted_V, order_V = p_V.sort(descending=True, stable=True)
        outside_V = sorted_V.cumsum(-1) - sorted_V >= ask.top_p
        outside_V[0] = False
        p_V[order_V[outside_V]] = 0
    sums_V = p_V.cumsum(-1)
    found = torch.searchsorted(sums_V, draw.random() * sums_V[-1], right=True)
    return int(found.clamp(max=int(p_V.nonzero().max())))


def likeliest(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The tokens of the highest log p, with it."""
    values, tokens = logprobs_V.topk(min(count, len(logprobs_V)))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))


def whole(backbone: Backbone, prompt: tuple[int, ...], tokens: list[int]) -> str:
    """What the tokens say behind the prompt; a character that is not whole yet is U+FFFD."""
    decode = backbone.need_tokenizer().decode
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    before, both = (str(decode(list(ids), **options)) for ids in (prompt, (*prompt, *tokens)))
    same = next((n for n, (one, other) in enumerate(zip(before, both, strict=False)) if one != other), len(before))
    return both[same:]  # the prompt may end within a character


def cut(text: str, stops: tuple[str, ...]) -> str | None:
    """What stands before the first stop string; None where there is none."""
    places = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(places)] if places else None


def held(text: str, stops: tuple[str, ...]) -> str:
    """What can be shown: not a character that is not whole yet, nor what may begin a stop string."""
    text = text.rstrip("\ufffd")
    starts = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(starts, default=0)]
