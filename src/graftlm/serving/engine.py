"""The common part of engines: a thread, the queue of requests, and the streams of outputs."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from graftlm.backbone import Backbone, end_ids
from graftlm.errors import GraftError
from graftlm.grafted.graft_set import RowGroupError
from graftlm.grafts import Graft
from graftlm.serving.protocol import (
    EngineError,
    EngineLimits,
    EngineStats,
    Finish,
    GenerationRequest,
    QueueFullError,
    RequestStream,
    ServingError,
    ShuttingDownError,
    TokenOutput,
)
from graftlm.serving.registry import ModelRegistry
from graftlm.serving.sampling import RowSampling
from graftlm.serving.scheduler import RequestQueue, ScheduledRequest

_PROMPT_TOKENS = 1024  # maximum prompt tokens of one step, so that running rows do not wait long
_GATHERING_SECONDS = 0.005  # maximum interval between requests that begin together
_log = logging.getLogger(__name__)


class ThreadedEngine(ModelRegistry):
    """The common part of engines. A subclass generates in `_step` and starts the thread.

    The engine owns the backbone until `close`: nothing else may attach grafts to it. The public methods are
    thread-safe.

    Args:
        backbone: a backbone with a tokenizer and without attached grafts.
        grafts: grafts for this backbone, by name.
        name: name of the backbone in requests; None uses `backbone.name`.
        limits: the limits of the engine; None uses the defaults of `EngineLimits`.

    Raises:
        BackboneError: the backbone is of another kind, or has no tokenizer.
        GraftError: a name can't be used.
    """

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        super().__init__(backbone, grafts, name, limits)
        self._tokenizer = backbone.need_tokenizer()
        self._end_ids = frozenset(end_ids(backbone.model, self._tokenizer))
        self._queue = RequestQueue()
        self._running: set[ScheduledRequest] = set()
        self._updated: set[RequestStream] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._stopping = False
        self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="graftlm-engine", daemon=True)

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        """Queue all requests, or none if one of them is refused, and return their stream.

        Raises:
            ServingError: a request does not fit the models or the limits.
            QueueFullError: more requests would be open than the limits allow.
            ShuttingDownError: `close` was called.
        """
        graft_sets = [self.graft_set(request) for request in requests]
        stream = RequestStream(len(requests))
        with self._changed:
            if self._closing:
                raise ShuttingDownError
            capacity = self.limits.batch_size + self.limits.queue
            open_requests = len(self._running) + len(self._queue)
            if open_requests + len(requests) > capacity:
                raise QueueFullError(
                    f"The number of running and waiting continuations is {open_requests}, and the request asks for "
                    f"{len(requests)} more, but the limit is {capacity}: try again in a moment."
                )
            for index, (request, graft_set) in enumerate(zip(requests, graft_sets, strict=True)):
                scheduled = ScheduledRequest(
                    sampling=RowSampling(request, self._end_ids),
                    graft_set=graft_set,
                    stream=stream,
                    index=index,
                    seconds=self.limits.seconds,
                )
                self._queue.add(scheduled)
            self._changed.notify()
        return stream

    def stats(self) -> EngineStats:
        """Return the present numbers of running and waiting requests, and the totals since the start."""
        with self._changed:
            return EngineStats(
                running=len(self._running),
                waiting=len(self._queue),
                tokens=self._tokens,
                finished=dict(self._finished),
            )

    def close(self, grace: float) -> bool:
        """Refuse new requests, wait until all others have finished, and cancel those that remain.

        Args:
            grace: maximum number of seconds to wait.

        Returns:
            True if all requests finished in time.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(grace)
        if self._thread.is_alive():
            self._stopping = True
            self._thread.join()
        return not self._stopping

    # The methods below run on the engine's thread.

    def _step(self) -> None:
        """Generate at least one token, if a request is waiting or running."""
        raise NotImplementedError

    def _work(self) -> None:
        try:
            while self._wait():
                try:
                    self._step()
                except Exception as error:  # a failure that no single row caused
                    for request in list(self._running):
                        self._finish(request, error)
                self._wake_readers()
        finally:
            self._end_all()

    def _wait(self) -> bool:
        """Wait for requests. Return False if the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._running or self._closing)
            if not self._running:
                self._gather_requests()
            has_requests = bool(self._queue or self._running)
            return has_requests and not self._stopping

    def _gather_requests(self) -> None:
        """Wait while further requests arrive, so that requests that arrive together begin together."""
        waiting = 0
        while waiting < len(self._queue) < self.limits.batch_size and not self._closing:
            waiting = len(self._queue)
            self._changed.wait(_GATHERING_SECONDS)

    def _wake_readers(self) -> None:
        RequestStream.wake_readers(self._updated)
        self._updated.clear()

    def _drop_waiting(self) -> None:
        """End cancelled and overdue requests in the queue."""
        with self._changed:
            dropped = self._queue.drop(lambda request: request.reason_to_end)
        for request in dropped:
            self._finish(request, request.finish(request.reason_to_end or "cancelled"))

    def _admit(self, count: int) -> list[ScheduledRequest]:
        """Start waiting requests until `count` requests are running."""
        with self._changed:
            free = count - len(self._running)
            if free <= 0:
                return []
            admitted = self._queue.take(free, _PROMPT_TOKENS)
            self._running.update(admitted)
        return admitted

    def _put(self, request: ScheduledRequest, item: TokenOutput | Finish | ServingError) -> None:
        if isinstance(item, TokenOutput):
            self._tokens += 1
        request.stream.put(item)
        self._updated.add(request.stream)

    def _finish(self, request: ScheduledRequest, end: Finish | BaseException) -> None:
        """End a request; an exception becomes an error of its stream."""
        self._running.discard(request)
        if isinstance(end, Finish):
            self._finished[end.reason] += 1
            self._put(request, end)
        else:
            self._finished["error"] += 1
            self._put(request, _as_serving_error(end))

    def _end_all(self) -> None:
        """Reject waiting requests and cancel running ones when the thread ends."""
        with self._changed:
            self._closing = True
            waiting = self._queue.drop(lambda request: True)
        for request in waiting:
            self._finish(request, ShuttingDownError())
        for request in list(self._running):
            self._finish(request, request.finish("cancelled"))
        self._wake_readers()


def _as_serving_error(error: BaseException) -> ServingError:
    cause = error
    if isinstance(error, RowGroupError) and error.__cause__ is not None:
        cause = error.__cause__
    if isinstance(cause, ServingError):
        return cause
    if isinstance(cause, GraftError):
        return ServingError(str(cause))
    _log.error("a request failed", exc_info=cause)
    return EngineError(f"Generation failed (internal {type(cause).__name__}): try again.")
