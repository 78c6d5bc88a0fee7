"""The engine: one thread that answers many requests in one batch, which they join and leave at any token.

Each turn drops the requests that nobody waits for, admits waiting ones and reads their prompts, joins them to the rows
under way, and writes one token of each row.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.grafts import Graft
from graftlm.grafts.lanes import Batch
from graftlm.grafts.mixed import MixedModel, RowsError, Team, newest_traces
from graftlm.serving.engine.catalogue import Catalogue, ends_of
from graftlm.serving.engine.choice import choose
from graftlm.serving.engine.line import Line, Request
from graftlm.serving.engine.tickets import LiveTicket, Mail
from graftlm.serving.protocol import Ask, BusyError, ClosingError, End, EngineError, Limits, ServingError, Stats

_PROMPT_TOKENS = 2048  # that a turn reads at most, so that rows under way do not wait long
_log = logging.getLogger(__name__)


class BatchingEngine:
    """An `Engine` of `protocol.py` with continuous batching, on a thread of its own.

    The backbone is the engine's until `close`: nothing else may attach grafts to it.

    Args:
        backbone: a causal language model with its tokenizer.
        grafts: built for it, by name.
        name: what the backbone is called; by default its own name.
        limits: what it takes on.

    Raises:
        BackboneError: the backbone writes no text, or has no tokenizer.
        GraftError: a name can't be asked for, or a graft can't act on some rows of a batch alone.
        TapConflictError: the backbone carries grafts already.
    """

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._tokenizer, self._ends = backbone.need_tokenizer(), ends_of(backbone)
        self._catalogue = Catalogue(backbone, grafts or {}, name, limits, together=True)
        self._limits = self._catalogue.limits
        self._model = MixedModel(backbone)
        self._line, self._mail = Line(), Mail()
        self._batches: list[Batch] = []
        self._begun: set[Request] = set()
        self._changed = threading.Condition()
        self._closing = self._stopping = self._stale = False
        self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="batching-engine", daemon=True)
        self._thread.start()

    @property
    def names(self) -> tuple[str, ...]:
        return self._catalogue.names

    def submit(self, ask: Ask) -> LiveTicket:
        team = Team(tuple(self._catalogue.check(ask).items()))
        request = Request(ask, team, self._tokenizer, self._ends, self._limits.seconds)
        with self._changed:
            if self._closing:
                raise ClosingError("The server is shutting down: ask again in a moment.")
            if len(self._begun) + len(self._line) >= self._limits.batch_size + self._limits.queue:
                raise BusyError(f"{len(self._line)} requests are waiting already: ask again in a moment.")
            self._line.add(request)
            self._changed.notify()
        return request.ticket

    def replace(self, name: str, graft: object | None) -> None:
        self._catalogue.replace(name, graft)
        self._stale = True

    def stats(self) -> Stats:
        with self._changed:
            return Stats(len(self._begun), len(self._line), self._tokens, dict(self._finished))

    def close(self, grace: float) -> bool:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(grace)
        if self._thread.is_alive():
            self._stopping = True
            self._thread.join()
        return not self._stopping

    # The thread

    def _work(self) -> None:
        try:
            while self._wait():
                try:
                    self._turn()
                except Exception as error:  # what is no one row's failure is that of all that are under way
                    self._batches = []
                    for request in list(self._begun):
                        self._fail(request, error)
                self._mail.send()
        finally:
            self._end_all()
            self._model.detach()

    def _wait(self) -> bool:
        """Wait for something to do; whether there is."""
        with self._changed:
            while not self._line and not self._begun and not self._closing:
                self._changed.wait()
            return not self._stopping and bool(self._line or self._begun)

    def _turn(self) -> None:
        self._drop()
        self._forget_replaced()
        for team, requests in self._admit().items():
            self._start(team, requests)
        for batch in list(self._batches):
            self._step(batch)
        self._batches = [batch for batch in self._batches if len(batch)]

    def _drop(self) -> None:
        """End the requests that nobody waits for, or whose time is over."""
        with self._changed:
            dropped = self._line.drop(lambda request: request.overdue)
        for request in dropped:
            self._end(request, request.end(request.overdue or "cancelled"))
        for batch in self._batches:
            late = {row: why for row, request in enumerate(batch.tags) if (why := request.overdue)}
            for row, why in late.items():
                self._end(batch.tags[row], batch.tags[row].end(why))
            batch.keep([row for row in range(len(batch)) if row not in late])

    def _forget_replaced(self) -> None:
        """Disconnect teams that can't be asked for any longer, once their last row has left."""
        if self._stale:
            self._stale = False
            busy = {lane.owner for batch in self._batches for lane in batch.lanes}
            known = [team for team in self._model.wired if self._catalogue.holds(team.grafts)]
            self._model.wire([team for team in self._model.wired if team in known or team in busy])
            self._stale = len(known) < len(self._model.wired)

    def _admit(self) -> dict[Team, list[Request]]:
        """The requests that are to be begun now, those of the same grafts together."""
        with self._changed:
            free = self._limits.batch_size - len(self._begun)
            taken = self._line.take(free, _PROMPT_TOKENS) if free > 0 else []
            self._begun.update(taken)
        teams: dict[Team, list[Request]] = {}
        for request in taken:
            teams.setdefault(request.team, []).append(request)
        return teams

    def _start(self, team: Team, requests: list[Request]) -> None:
        """Read the prompts of some requests, write their first tokens, and join them to those under way."""
        try:
            batch, logits = self._model.start(team, [request.ask.prompt for request in requests], requests)
        except (RowsError, GraftError) as error:
            if len(requests) == 1:
                self._fail(requests[0], error)
            else:  # which of them it is shows when each is begun alone
                for request in requests:
                    self._start(team, [request])
            return
        self._write(batch, logits)
        if len(batch) and not any(other.join(batch) for other in self._batches):
            self._batches.append(batch)

    def _step(self, batch: Batch) -> None:
        """Write one token of each row; a row whose grafts fail leaves, and the others go on."""
        while len(batch):
            try:
                logits = self._model.step(batch, [request.newest for request in batch.tags])
            except RowsError as error:
                self._part_with(batch, error)
            else:
                self._write(batch, logits)
                return

    def _part_with(self, batch: Batch, error: RowsError) -> None:
        """Let the row leave that made a pass fail; where it may be one of several, try them one by one."""
        lane = None if error.lane is None else batch.lanes[error.lane]
        if lane is not None and lane.size > 1:
            batch.split(batch.lanes.index(lane))
            return
        failed = range(len(batch)) if lane is None else range(lane.view.rows.start, lane.view.rows.stop)
        for row in failed:
            self._fail(batch.tags[row], error)
        batch.keep([row for row in range(len(batch)) if row not in failed])

    def _write(self, batch: Batch, logits_BV: Tensor) -> None:
        """Choose each row's next token and hand it on; rows that are done leave."""
        requests: list[Request] = batch.tags
        choices = choose(logits_BV, [request.ask for request in requests], [request.draw for request in requests])
        traces = newest_traces(batch, [row for row, request in enumerate(requests) if request.ask.trace])
        kept = []
        for row, (request, choice) in enumerate(zip(requests, choices, strict=True)):
            if choice is None:
                self._fail(request, EngineError("The model's answer is no number: ask another model."))
                continue
            piece, end = request.take(choice, traces.get(row, {}))
            if piece is not None:
                self._tokens += 1
                self._mail.put(request.ticket, piece)
            if end is None:
                kept.append(row)
            else:
                self._end(request, end)
        batch.keep(kept)

    def _end(self, request: Request, end: End) -> None:
        self._begun.discard(request)
        self._finished[end.reason] += 1
        self._mail.put(request.ticket, end)

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request with what went wrong."""
        self._begun.discard(request)
        self._finished["error"] += 1
        self._mail.put(request.ticket, _as_serving_error(error))

    def _end_all(self) -> None:
        """What is left when the thread ends: the rest is cancelled, and what waits is turned away."""
        with self._changed:
            self._closing = True
            waiting = self._line.drop(lambda request: True)
        self._batches = []
        for request in waiting:
            self._fail(request, ClosingError("The server is shutting down: ask again in a moment."))
        for request in list(self._begun):
            self._end(request, request.end("cancelled"))
        self._mail.send()


def _as_serving_error(error: BaseException) -> ServingError:
    cause = error.__cause__ if isinstance(error, RowsError) and error.__cause__ is not None else error
    if isinstance(cause, ServingError):
        return cause
    if isinstance(cause, GraftError):
        return ServingError(str(cause))
    _log.error("a request failed", exc_info=cause)
    return EngineError(f"Something broke while this was being written ({type(cause).__name__}): ask again.")
