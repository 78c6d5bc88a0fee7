"""The engine: one thread that generates for many requests in one batch, which rows join and leave at any token.

Each step drops cancelled and overdue requests, admits waiting requests and reads their prompts, joins their rows to the
running batches, and generates one token of each row. The rest of a long prompt is read in later steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from torch import Tensor, nn
from transformers.cache_utils import Cache

from graftlm.backbone import end_ids
from graftlm.backbone.cache import slots_of
from graftlm.backbone.prefix_blocks import BLOCK_TOKENS, PrefixBlocks, as_cache
from graftlm.backbone.prepack import pack_weights, unpack_weights
from graftlm.errors import GraftError
from graftlm.grafted.graft_set import GraftSet, MultiGraftModel, RowGroupError, keeps_columns, latest_traces
from graftlm.grafted.row_groups import MixedBatch
from graftlm.grafts import Graft
from graftlm.serving.protocol import (
    EngineError,
    EngineFinishReason,
    EngineStats,
    Finish,
    GenerationRequest,
    ModelRegistry,
    QueueFullError,
    RequestStream,
    ServingError,
    ShuttingDownError,
    TokenOutput,
)
from graftlm.serving.sampling import RowSampling, sample
from graftlm.serving.tokenization import IncrementalDetokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPT_TOKENS = 1024  # maximum prompt tokens of one step, so that running rows do not wait long
_PASS_TOKENS = 64  # of padding, which cost about as much as another pass on a CPU
_GATHERING_SECONDS = 0.005  # from one request to the next of those that begin together
_PART_TOKENS = 256  # of a long prompt, which is read in parts
_log = logging.getLogger(__name__)


class ScheduledRequest:
    """The state of an accepted request, from its arrival to its end, which comes after `seconds` at the latest."""

    def __init__(
        self, sampling: RowSampling, graft_set: GraftSet, stream: RequestStream, index: int, seconds: float
    ) -> None:
        self.request, self.graft_set, self.stream, self.index = sampling.request, graft_set, stream, index
        self.sampling = sampling
        self.answer: list[int] = []
        self.cached_tokens = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        self._deadline = time.monotonic() + seconds

    @property
    def overdue(self) -> Literal["time", "cancelled"] | None:
        """The reason to end the request now, if there is one."""
        if self.stream.cancelled:
            return "cancelled"
        return "time" if time.monotonic() > self._deadline else None

    def add(
        self, sampled: TokenOutput, trace: dict[str, float], tokenizer: PreTrainedTokenizerBase
    ) -> tuple[TokenOutput, Finish | None]:
        """The output of a sampled token, and the end at a stop string, the grammar's end or the maximum length."""
        if self._detokenizer is None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, self.request.prompt, self.request.stop)
        text, stopped = self._detokenizer.add(sampled.token, goes_on=self.sampling.is_too_short)
        complete = self.sampling.add(sampled.token)
        self.answer.append(sampled.token)
        output = replace(sampled, text=text, trace=trace, index=self.index)
        if stopped:
            return output, replace(self.finish("stop"), text="")
        if complete:
            return output, self.finish("stop")
        return output, self.finish("length") if len(self.answer) == self.request.max_tokens else None

    def finish(self, reason: EngineFinishReason) -> Finish:
        """The end, with the text that was held back."""
        rest = self._detokenizer.rest() if self._detokenizer is not None else ""
        return Finish(reason, len(self.request.prompt), len(self.answer), rest, self.index, self.cached_tokens)


class RequestQueue:
    """Waiting requests; users take turns. Not thread-safe."""

    def __init__(self) -> None:
        self._by_user: dict[str, deque[ScheduledRequest]] = {}

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._by_user.values())

    def add(self, request: ScheduledRequest) -> None:
        """Append a request to those of its user."""
        self._by_user.setdefault(request.request.user, deque()).append(request)

    def take(self, count: int, tokens: int) -> list[ScheduledRequest]:
        """Remove at most `count` requests, one user after another, while their prompts have `tokens` tokens or fewer.

        A first request with more tokens is removed alone.
        """
        taken: list[ScheduledRequest] = []
        while self._by_user and len(taken) < count:
            user, requests = next(iter(self._by_user.items()))
            tokens -= len(requests[0].request.prompt)
            if taken and tokens < 0:
                break
            taken.append(requests.popleft())
            del self._by_user[user]
            if requests:
                self._by_user[user] = requests  # after the other users
        return taken

    def drop(self, condition: Callable[[ScheduledRequest], object]) -> list[ScheduledRequest]:
        """Remove the requests for which the condition is true."""
        dropped = [request for requests in self._by_user.values() for request in requests if condition(request)]
        for request in dropped:
            self._by_user[request.request.user].remove(request)
        self._by_user = {user: requests for user, requests in self._by_user.items() if requests}
        return dropped


class ThreadedEngine(ModelRegistry):
    """The common part of engines: the queue, the thread, and the streams. A subclass generates in `_step`.

    The engine owns the backbone until `close`: nothing else may attach grafts to it. Arguments and errors are those of
    `ModelRegistry`; the backbone needs a tokenizer, and carries no grafts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokenizer = self._backbone.need_tokenizer()
        self._end_ids = frozenset(end_ids(self._backbone.model, self._tokenizer))
        self._queue = RequestQueue()
        self._running: set[ScheduledRequest] = set()
        self._updated: set[RequestStream] = set()
        self._changed = threading.Condition()
        self._closing = self._stopping = False
        self._tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="graftlm-engine", daemon=True)

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        graft_sets = [GraftSet(tuple(self.check(request).items())) for request in requests]
        stream = RequestStream(len(requests))
        with self._changed:
            if self._closing:
                raise ShuttingDownError("The server is shutting down: ask again in a moment.")
            free = self.limits.batch_size + self.limits.queue - len(self._running) - len(self._queue)
            if len(requests) > free:
                raise QueueFullError(f"{len(self._queue)} requests are waiting already: ask again in a moment.")
            for index, (request, graft_set) in enumerate(zip(requests, graft_sets, strict=True)):
                sampling = RowSampling(request, self._end_ids)
                self._queue.add(ScheduledRequest(sampling, graft_set, stream, index, self.limits.seconds))
            self._changed.notify()
        return stream

    def stats(self) -> EngineStats:
        with self._changed:
            return EngineStats(len(self._running), len(self._queue), self._tokens, dict(self._finished))

    def close(self, grace: float) -> bool:
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
                except Exception as error:  # the failure belongs to no single row
                    for request in list(self._running):
                        self._finish(request, error)
                self._wake_readers()
        finally:
            self._end_all()

    def _wait(self) -> bool:
        """Wait for requests; False once the engine is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._running or self._closing)
            waiting = 0
            while not self._running and waiting < len(self._queue) < self.limits.batch_size and not self._closing:
                waiting = len(self._queue)  # requests that come together begin together
                self._changed.wait(_GATHERING_SECONDS)
            return not self._stopping and bool(self._queue or self._running)

    def _wake_readers(self) -> None:
        RequestStream.wake_readers(self._updated)
        self._updated.clear()

    def _drop_waiting(self) -> None:
        """End cancelled and overdue requests of the queue."""
        with self._changed:
            dropped = self._queue.drop(lambda request: request.overdue)
        for request in dropped:
            self._finish(request, request.finish(request.overdue or "cancelled"))

    def _admit(self, count: int) -> list[ScheduledRequest]:
        """Start as many waiting requests as `count` running ones allow."""
        with self._changed:
            free = count - len(self._running)
            admitted = self._queue.take(free, _PROMPT_TOKENS) if free > 0 else []
            self._running.update(admitted)
        return admitted

    def _put(self, request: ScheduledRequest, item: TokenOutput | Finish | ServingError) -> None:
        self._tokens += isinstance(item, TokenOutput)
        request.stream.put(item)
        self._updated.add(request.stream)

    def _finish(self, request: ScheduledRequest, end: Finish | BaseException) -> None:
        """End a request; an exception becomes an error of its stream."""
        self._running.discard(request)
        self._finished[end.reason if isinstance(end, Finish) else "error"] += 1
        self._put(request, end if isinstance(end, Finish) else _as_serving_error(end))

    def _end_all(self) -> None:
        """Reject waiting requests and cancel running ones when the thread ends."""
        with self._changed:
            self._closing = True
            waiting = self._queue.drop(lambda request: True)
        for request in waiting:
            self._finish(request, ShuttingDownError("The server is shutting down: ask again in a moment."))
        for request in list(self._running):
            self._finish(request, request.finish("cancelled"))
        self._wake_readers()


class BatchingEngine(ThreadedEngine):
    """An `Engine` of `protocol.py` with continuous batching; arguments as those of `ThreadedEngine`."""

    shares_batches = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._has_replaced, self._packed = False, None
        super().__init__(*args, **kwargs)
        self._model = MultiGraftModel(self._backbone)
        self._packed: WeakSet[nn.Module] | None = WeakSet()  # for as long as the engine runs
        for module in (self._backbone.model, *self._grafts.values()):
            self._pack(module)
        self._batches: list[MixedBatch] = []
        self._unread: list[ScheduledRequest] = []  # admitted requests
        self._begun: MixedBatch | None = None  # one row, whose prompt is read in part
        self._prefixes = PrefixBlocks(self.limits.prefix_tokens)
        self._readable_in_parts: dict[GraftSet, dict[str, range]] = {}  # and the layers of their own
        self._thread.start()

    def replace(self, name: str, graft: object | None) -> None:
        super().replace(name, graft)
        if isinstance(graft, Graft):
            self._pack(graft)
        self._has_replaced = True

    def _pack(self, module: nn.Module) -> None:
        packed = self._packed
        if self.limits.pack and packed is not None:
            packed.add(module)
            if not pack_weights(module):
                _log.warning("%s: weights are not packed, as free memory is too small; steps take longer", self.name)

    def _end_all(self) -> None:
        super()._end_all()
        self._model.detach()
        packed, self._packed = self._packed or (), None
        for module in list(packed):  # a thread may still replace a graft
            unpack_weights(module)

    def _step(self) -> None:
        if not self._running:
            self._batches, self._begun, self._unread = [], None, []  # a step that failed leaves rows
        self._drop_waiting()
        self._drop_overdue_rows()
        self._unwire_replaced()
        self._unread += self._admit(self.limits.batch_size)
        self._embed([request for request in self._unread if request.request.embed])
        self._read_prompts(list(self._unread))
        self._read_on()
        for batch in list(self._batches):
            self._decode(batch)
        self._batches = [batch for batch in self._batches if len(batch)]

    def _drop_overdue_rows(self) -> None:
        """End cancelled and overdue running requests."""
        for batch in self._all_batches():
            late = {row: why for row, request in enumerate(batch.tags) if (why := request.overdue)}
            for row, why in late.items():
                self._finish(batch.tags[row], batch.tags[row].finish(why))
            batch.keep([row for row in range(len(batch)) if row not in late])
        for request in [request for request in self._unread if request.overdue]:
            self._unread.remove(request)
            self._finish(request, request.finish(request.overdue or "cancelled"))
        self._begun = self._begun or None

    def _all_batches(self) -> list[MixedBatch]:
        return [*self._batches, *([self._begun] if self._begun else [])]

    def _unwire_replaced(self) -> None:
        """Disconnect graft sets that no request can name any longer, once their last row has left."""
        if self._has_replaced:
            self._has_replaced = False
            busy = {group.owner for batch in self._all_batches() for group in batch.groups}
            busy |= {request.graft_set for request in self._unread}
            wired = self._model.wired
            known = [graft_set for graft_set in wired if self.holds(graft_set.grafts)]
            self._model.wire([graft_set for graft_set in wired if graft_set in known or graft_set in busy])
            self._has_replaced = len(known) < len(self._model.wired)
            self._prefixes.keep(known.__contains__)
            self._readable_in_parts = {key: own for key, own in self._readable_in_parts.items() if key in known}

    def _embed(self, requests: list[ScheduledRequest]) -> None:
        """Answer requests for embeddings."""
        self._unread = [request for request in self._unread if request not in requests]
        for request in requests:
            try:
                (vector,) = self._model.embed(request.graft_set, [request.request.prompt]).tolist()
            except (RowGroupError, GraftError) as error:
                self._finish(request, error)
            else:
                self._finish(request, replace(request.finish("stop"), embedding=tuple(vector)))

    def _read_prompts(self, requests: list[ScheduledRequest]) -> None:
        """Read the prompts of admitted requests, in passes of those that can be read together."""
        while requests:
            prompts, owners = zip(*((request.request.prompt, request.graft_set) for request in requests), strict=True)
            forms = [self._readable_in_parts.get(owner) for owner in owners]
            blocks = [
                [] if form is None else self._prefixes.longest(owner, prompt)
                for owner, prompt, form in zip(owners, prompts, forms, strict=True)
            ]
            known = [None if form is None else BLOCK_TOKENS * len(own) for form, own in zip(forms, blocks, strict=True)]
            rows, count = next_pass(prompts, known, owners, apart=self._prefixes.limit > 0)
            if count > _PART_TOKENS and self._begun is not None:
                return  # the next long prompt may begin as this one
            config, behind = self._backbone.model.config, [row for row in rows if count and known[row]]
            pasts = [as_cache(blocks[n], len(prompts[n]) - count, config, forms[n] or {}) for n in behind]
            together = [requests[row] for row in rows]
            requests = [request for request in requests if request not in together]
            self._unread = [request for request in self._unread if request not in together]
            self._prefill(together, pasts, count)

    def _prefill(self, requests: list[ScheduledRequest], pasts: Sequence[Cache], new: int) -> None:
        """Read prompts behind `pasts`, `new` tokens of each or all; of more than fit in a step the first ones."""
        prompts = [request.request.prompt[-new:] for request in requests]
        if new > _PART_TOKENS:
            prompts = [prompt[:_PART_TOKENS] for prompt in prompts]
        try:
            batch, logits = self._model.prefill([request.graft_set for request in requests], prompts, requests, pasts)
        except (RowGroupError, GraftError) as error:
            if len(requests) == 1:
                self._finish(requests[0], error)
            else:  # single requests show which of them fails
                for request in requests:
                    self._prefill([request], [], 0)
            return
        for request, past in zip(requests, pasts, strict=False):
            request.cached_tokens = past.get_seq_length()
        for group in batch.groups:
            assert isinstance(group.owner, GraftSet)
            self._readable_in_parts.pop(group.owner, None)
            if keeps_columns(batch, group):
                self._readable_in_parts[group.owner] = slots_of(group.cache)
        if new > _PART_TOKENS:
            self._begun = batch
        else:
            self._start(batch, logits)

    def _read_on(self) -> None:
        """Read the next part of a prompt that is read in part."""
        if (batch := self._begun) is None:
            return
        (request,), start = batch.tags, batch.mask.shape[1]
        try:
            logits = self._model.extend(batch, [request.request.prompt[start : start + _PART_TOKENS]])
        except RowGroupError as error:
            self._begun = None
            self._finish(request, error)
        else:
            if batch.mask.shape[1] == len(request.request.prompt):
                self._begun = None
                self._start(batch, logits)

    def _start(self, batch: MixedBatch, logits_BV: Tensor) -> None:
        """Generate the first tokens of prompts that were read, and join the rows to a running batch."""
        self._emit(batch, logits_BV)
        if len(batch) and not any(other.join(batch) for other in self._batches):
            self._batches.append(batch)

    def _keep_prefix(self, batch: MixedBatch, row: int) -> None:
        """Keep what a row has read and written for prompts that begin with it."""
        request: ScheduledRequest = batch.tags[row]
        if request.graft_set in self._readable_in_parts:
            text = (*request.request.prompt, *request.answer)[: int(batch.mask[row].sum())]
            self._prefixes.add(request.graft_set, text, batch.layers_of(row))

    def _decode(self, batch: MixedBatch) -> None:
        """Generate one token of each row; a row whose grafts fail leaves, and the pass is repeated without it."""
        while len(batch):
            try:
                logits = self._model.decode(batch, [request.answer[-1] for request in batch.tags])
            except RowGroupError as error:
                self._remove_failed(batch, error)
            else:
                self._emit(batch, logits)
                return

    def _remove_failed(self, batch: MixedBatch, error: RowGroupError) -> None:
        """Remove the row that made a pass fail; a group of several rows is split, so that its rows run one by one."""
        failed = range(len(batch))
        if error.group is not None:
            group = batch.groups[error.group]
            if group.size > 1:
                return batch.split(error.group)
            failed = failed[group.span.rows]
        for row in failed:
            self._finish(batch.tags[row], error)
        return batch.keep([row for row in range(len(batch)) if row not in failed])

    def _emit(self, batch: MixedBatch, logits_BV: Tensor) -> None:
        """Sample each row's next token and put it into its stream; rows that have finished leave."""
        scheduled: list[ScheduledRequest] = batch.tags
        sampled = sample(logits_BV, [request.sampling for request in scheduled])
        traces = latest_traces(batch, [row for row, request in enumerate(scheduled) if request.request.trace])
        kept = []
        for row, (request, token) in enumerate(zip(scheduled, sampled, strict=True)):
            if token is None:
                error: ServingError = EngineError("The answer is no number: ask another model.")
                if problem := request.sampling.problem:
                    why = problem.splitlines()[0][:200]
                    error = ServingError(f"The answer can't follow its grammar ({why}): simplify it.")
                self._finish(request, error)
                continue
            is_first, finish = not request.answer, None
            if token.token in request.sampling.ends:
                finish = request.finish("stop")
            else:
                output, finish = request.add(token, traces.get(row, {}), self._tokenizer)
                self._put(request, output)
            if is_first or finish is not None:
                self._keep_prefix(batch, row)
            if finish is None:
                kept.append(row)
            else:
                self._finish(request, finish)
        batch.keep(kept)


def next_pass(
    prompts: Sequence[Sequence[int]], known: Sequence[int | None], owners: Sequence[object], *, apart: bool
) -> tuple[list[int], int]:
    """Which prompts are read next, in one pass, and how many of their last tokens; 0 if all of each.

    Prompts of one owner with `known` first tokens share a pass: each row reads as many tokens as the one with the most
    new ones. With `apart`, prompts with the same owner and first block do not, as the second can use what the first
    leaves. Prompts of which nothing is known share a pass where their padding is cheaper than another; None stands for
    those that can't be read in parts. Rows of one owner follow each other.
    """
    new = [len(prompt) - (count or 0) for prompt, count in zip(prompts, known, strict=True)]
    short = [index for index in range(len(prompts)) if known[index] is None or new[index] <= _PART_TOKENS]
    if started := [index for index in short if known[index]]:
        started = [index for index in started if owners[index] == owners[started[0]]]
        most = max(new[index] for index in started)
        return [index for index in started if len(prompts[index]) > most], most
    together, blocks, padding = [], set(), 0
    for index in sorted(short, key=lambda index: -new[index]):
        shares = apart and known[index] is not None and new[index] > BLOCK_TOKENS
        block = (owners[index], tuple(prompts[index][:BLOCK_TOKENS])) if shares else index
        padding += new[together[0]] - new[index] if together else 0
        if block not in blocks and padding <= _PASS_TOKENS:
            blocks.add(block)
            together.append(index)
    return (sorted(together, key=lambda index: (owners.index(owners[index]), index)), 0) if short else ([0], new[0])


def _as_serving_error(error: BaseException) -> ServingError:
    cause = error.__cause__ if isinstance(error, RowGroupError) and error.__cause__ is not None else error
    if isinstance(cause, ServingError):
        return cause
    if isinstance(cause, GraftError):
        return ServingError(str(cause))
    _log.error("a request failed", exc_info=cause)
    return EngineError(f"Something broke while this was being written ({type(cause).__name__}): ask again.")
