"""The engine with continuous batching: rows join and leave the running batches at any token.

Each step drops cancelled and overdue requests, admits waiting requests and reads their prompts, joins their rows to the
running batches, and generates one token of each row. Long prompts are read in parts, one in each step.

A row is one continuation of one prompt. Shape suffixes: B rows of a batch, V tokens of the vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakSet

from torch import Tensor, nn
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone
from graftlm.backbone.cache import slots_of
from graftlm.backbone.decode_steps import COMPILING_DEVICES
from graftlm.backbone.prefix_blocks import BLOCK_TOKENS, Block, PrefixBlocks, as_cache
from graftlm.backbone.prepack import pack_weights, unpack_weights
from graftlm.errors import GraftError, first_line
from graftlm.grafted.graft_set import GraftSet, MultiGraftModel, RowGroupError, keeps_columns, latest_traces
from graftlm.grafted.row_groups import MixedBatch
from graftlm.grafts import Graft
from graftlm.serving.engine import ThreadedEngine
from graftlm.serving.protocol import EngineError, EngineLimits, Finish, ServingError, TokenOutput
from graftlm.serving.sampling import sample
from graftlm.serving.scheduler import ScheduledRequest, next_pass

_WARM_UP_SECONDS = 120  # steps that are not compiled by then are compiled at their first use
_PART_TOKENS = 256  # maximum tokens of a long prompt that are read in one step
_log = logging.getLogger(__name__)


class BatchingEngine(ThreadedEngine):
    """An `Engine` with continuous batching, a prefix cache, and rows of several grafts in one batch.

    Args:
        backbone: a causal language model with a tokenizer and without attached grafts.
        grafts: grafts for this backbone, by name.
        name: name of the backbone in requests; None uses `backbone.name`.
        limits: the limits of the engine; None uses the defaults of `EngineLimits`.

    Raises:
        BackboneError: the backbone is not a causal language model, or has no tokenizer.
        GraftError: a name can't be used, a graft can't share a batch, or `limits.compile` is true for a backbone whose
            decode steps can't be compiled.
    """

    shares_batches = True

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        self._has_replaced = False
        self._packed: WeakSet[nn.Module] | None = None  # set while the engine runs
        super().__init__(backbone, grafts, name, limits)
        self._model = MultiGraftModel(backbone)
        try:
            self._compile()
        except BaseException:
            self._model.detach()
            raise
        self._packed = WeakSet()
        for module in (backbone.model, *self._grafts.values()):
            self._pack(module)
        self._batches: list[MixedBatch] = []
        self._unread: list[ScheduledRequest] = []  # admitted requests whose prompts are not read yet
        self._begun: MixedBatch | None = None  # the row of a long prompt that is read in parts
        self._prefixes = PrefixBlocks(self.limits.prefix_tokens)
        # The unweighted graft sets whose prompts can be read in parts, with the cache layers of each graft.
        self._readable_in_parts: dict[GraftSet, dict[str, range]] = {}
        self._warm_up()
        self._thread.start()

    def _compile(self) -> None:
        """Compile decode steps if that is wanted, or if it is worthwhile and possible."""
        wanted = self.limits.compile
        if wanted is None:
            is_accelerator = self._backbone.model.device.type in COMPILING_DEVICES
            wanted = is_accelerator and self._model.can_compile_steps
        if wanted:
            self._model.compile_steps(self.limits.batch_size, self._context)

    def _warm_up(self) -> None:
        """Compile the first steps of the backbone and its grafts, so that the first requests do not wait."""
        if self._model.steps is None:
            return
        _log.info("%s: compiling decode steps", self.name)
        started = time.monotonic()
        graft_sets = [GraftSet(), *(GraftSet(((name, graft),)) for name, graft in self._grafts.items())]
        try:
            self._model.wire(graft_sets)  # together, because code is forgotten when grafts are connected
            for graft_set in graft_sets:
                if time.monotonic() - started < _WARM_UP_SECONDS:
                    self._model.warm_up(graft_set)
        except Exception as error:  # a request for this graft gets the error
            _log.warning("%s: decode steps are compiled at their first use (%s)", self.name, first_line(error))
        _log.info("%s: compiled decode steps in %.0f seconds", self.name, time.monotonic() - started)

    def replace(self, name: str, graft: object | None) -> None:
        """Use a graft for new requests, or remove its name if `graft` is None. Running requests keep their graft.

        Raises:
            GraftError: the name can't be used, the object is not a graft, or the graft can't share a batch.
        """
        super().replace(name, graft)
        if graft is not None:
            self._pack(self._grafts[name])
        self._has_replaced = True

    def _pack(self, module: nn.Module) -> None:
        packed = self._packed
        if not self.limits.pack or packed is None:
            return
        packed.add(module)
        if not pack_weights(module):
            _log.warning("%s: weights are not packed for lack of memory; inference is slower", self.name)

    # The methods below run on the engine's thread.

    def _end_all(self) -> None:
        super()._end_all()
        self._forget_rows()
        self._model.detach()
        packed = self._packed or ()
        self._packed = None
        for module in list(packed):  # copied, because another thread may still replace a graft
            unpack_weights(module)

    def _step(self) -> None:
        if not self._running:
            self._forget_rows()
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

    def _forget_rows(self) -> None:
        """Remove the rows that a failed step left behind."""
        self._batches = []
        self._begun = None
        self._unread = []

    def _drop_overdue_rows(self) -> None:
        """End cancelled and overdue running requests."""
        for batch in self._all_batches():
            kept = []
            for row, request in enumerate(batch.tags):
                reason = request.reason_to_end
                if reason is None:
                    kept.append(row)
                else:
                    self._finish(request, request.finish(reason))
            batch.keep(kept)
        if self._begun is not None and len(self._begun) == 0:
            self._begun = None
        unread = []
        for request in self._unread:
            reason = request.reason_to_end
            if reason is None:
                unread.append(request)
            else:
                self._finish(request, request.finish(reason))
        self._unread = unread

    def _all_batches(self) -> list[MixedBatch]:
        if self._begun is None:
            return list(self._batches)
        return [*self._batches, self._begun]

    def _unwire_replaced(self) -> None:
        """Disconnect graft sets that are no longer served, once their last row has left."""
        if not self._has_replaced:
            return
        self._has_replaced = False
        owners = [group.owner for batch in self._all_batches() for group in batch.groups]
        owners += [request.graft_set for request in self._unread]
        busy = {owner.unweighted for owner in owners if isinstance(owner, GraftSet)}
        wired = self._model.wired
        known = [graft_set for graft_set in wired if self.holds(graft_set.grafts)]
        self._model.wire([graft_set for graft_set in wired if graft_set in known or graft_set in busy])
        self._has_replaced = len(known) < len(self._model.wired)
        self._prefixes.keep(lambda owner: isinstance(owner, GraftSet) and owner.unweighted in known)
        self._readable_in_parts = {
            graft_set: layers for graft_set, layers in self._readable_in_parts.items() if graft_set in known
        }

    def _embed(self, requests: list[ScheduledRequest]) -> None:
        """Answer requests for embeddings."""
        self._unread = [request for request in self._unread if request not in requests]
        for request in requests:
            try:
                vectors = self._model.embed(request.graft_set, [request.request.prompt])
            except (RowGroupError, GraftError) as error:
                self._finish(request, error)
            else:
                embedding = tuple(vectors[0].tolist())
                self._finish(request, replace(request.finish("stop"), embedding=embedding))

    def _read_prompts(self, requests: list[ScheduledRequest]) -> None:
        """Read the prompts of admitted requests, in passes of those that can be read together."""
        while requests:
            blocks = [self._known_blocks(request) for request in requests]
            rows, new_tokens = next_pass(
                prompts=[request.request.prompt for request in requests],
                known=[None if known is None else BLOCK_TOKENS * len(known) for known in blocks],
                owners=[request.graft_set for request in requests],
                part_tokens=_PART_TOKENS,
                share_prefixes=self._prefixes.limit > 0,
            )
            if new_tokens > _PART_TOKENS and self._begun is not None:
                return  # one long prompt at a time; the next one may find its beginning in the prefix cache
            pasts = []
            for row in rows:
                known = blocks[row]
                if new_tokens and known:
                    pasts.append(self._past(requests[row], known, new_tokens))
            read = [requests[row] for row in rows]
            requests = [request for request in requests if request not in read]
            self._unread = [request for request in self._unread if request not in read]
            self._prefill(read, pasts, new_tokens)

    def _known_blocks(self, request: ScheduledRequest) -> list[Block] | None:
        """Return the blocks at the start of a prompt in the prefix cache; None if it can't be read in parts."""
        if request.graft_set.unweighted not in self._readable_in_parts:
            return None
        return self._prefixes.longest(request.graft_set, request.request.prompt)

    def _past(self, request: ScheduledRequest, blocks: list[Block], new_tokens: int) -> Cache:
        """Return a cache with all but the last `new_tokens` tokens of a prompt."""
        return as_cache(
            blocks,
            len(request.request.prompt) - new_tokens,
            self._backbone.model.config,
            self._readable_in_parts[request.graft_set.unweighted],
        )

    def _prefill(self, requests: list[ScheduledRequest], pasts: Sequence[Cache], new_tokens: int) -> None:
        """Read prompts in one pass.

        Args:
            requests: their prompts are read.
            pasts: for each request a cache with the tokens before the new ones; empty if all tokens are new.
            new_tokens: number of trailing tokens to read; 0 reads whole prompts. If it exceeds one part, only the
                first part is read.
        """
        prompts = [request.request.prompt[-new_tokens:] for request in requests]
        if new_tokens > _PART_TOKENS:
            prompts = [prompt[:_PART_TOKENS] for prompt in prompts]
        graft_sets = [request.graft_set for request in requests]
        try:
            batch, logits = self._model.prefill(graft_sets, prompts, requests, pasts)
        except (RowGroupError, GraftError) as error:
            self._handle_failed_prefill(requests, error)
            return
        for request, past in zip(requests, pasts, strict=False):
            request.cached_tokens = past.get_seq_length()
        self._note_readable_in_parts(batch)
        if new_tokens > _PART_TOKENS:
            self._begun = batch
        else:
            self._start(batch, logits)

    def _handle_failed_prefill(self, requests: list[ScheduledRequest], error: Exception) -> None:
        """End a single request, or read several requests again one at a time to find those that fail."""
        if len(requests) == 1:
            self._finish(requests[0], error)
            return
        for request in requests:
            self._prefill([request], pasts=[], new_tokens=0)

    def _note_readable_in_parts(self, batch: MixedBatch) -> None:
        for group in batch.groups:
            assert isinstance(group.owner, GraftSet)
            owner = group.owner.unweighted
            self._readable_in_parts.pop(owner, None)
            if keeps_columns(batch, group):
                self._readable_in_parts[owner] = slots_of(group.cache)

    def _read_on(self) -> None:
        """Read the next part of the long prompt that is being read."""
        batch = self._begun
        if batch is None:
            return
        request: ScheduledRequest = batch.tags[0]
        prompt = request.request.prompt
        start = batch.mask.shape[1]
        try:
            logits = self._model.extend(batch, [prompt[start : start + _PART_TOKENS]])
        except RowGroupError as error:
            self._begun = None
            self._finish(request, error)
            return
        if batch.mask.shape[1] == len(prompt):
            self._begun = None
            self._start(batch, logits)

    def _start(self, batch: MixedBatch, logits_BV: Tensor) -> None:
        """Generate the first tokens after prompts, and join the rows to a running batch."""
        self._emit(batch, logits_BV)
        if len(batch) == 0:
            return
        if not any(running.join(batch) for running in self._batches):
            self._batches.append(batch)

    def _keep_prefix(self, batch: MixedBatch, row: int) -> None:
        """Store the keys and values of a row for prompts with the same beginning."""
        request: ScheduledRequest = batch.tags[row]
        if request.graft_set.unweighted in self._readable_in_parts:
            text = (*request.request.prompt, *request.answer)[: batch.lengths[row]]
            self._prefixes.add(request.graft_set, text, batch.layers_of(row))

    def _decode(self, batch: MixedBatch) -> None:
        """Generate one token of each row; a row whose grafts fail leaves, and the pass is repeated without it."""
        while len(batch):
            tokens = [request.answer[-1] for request in batch.tags]
            traced = any(request.request.trace for request in batch.tags)
            try:
                logits = self._model.decode(batch, tokens, traced=traced)
            except RowGroupError as error:
                self._remove_failed(batch, error)
            else:
                self._emit(batch, logits)
                return

    def _remove_failed(self, batch: MixedBatch, error: RowGroupError) -> None:
        """Remove the row that made a pass fail, or split its group into single rows, to find the row."""
        failed = range(len(batch))
        if error.group is not None:
            group = batch.groups[error.group]
            if group.size > 1:
                batch.split(error.group)
                return
            failed = failed[group.span.rows]
        for row in failed:
            self._finish(batch.tags[row], error)
        batch.keep([row for row in range(len(batch)) if row not in failed])

    def _emit(self, batch: MixedBatch, logits_BV: Tensor) -> None:
        """Sample each row's next token and put it into its stream; rows that have finished leave."""
        scheduled: list[ScheduledRequest] = batch.tags
        sampled = sample(logits_BV, [request.sampling for request in scheduled])
        traced = [row for row, request in enumerate(scheduled) if request.request.trace]
        traces = latest_traces(batch, traced)
        kept = []
        for row, request in enumerate(scheduled):
            token = sampled[row]
            if token is None:
                self._finish(request, _sampling_error(request))
                continue
            is_first = not request.answer
            finish = self._put_token(request, token, traces.get(row, {}))
            if is_first or finish is not None:
                self._keep_prefix(batch, row)
            if finish is None:
                kept.append(row)
            else:
                self._finish(request, finish)
        batch.keep(kept)

    def _put_token(self, request: ScheduledRequest, sampled: TokenOutput, trace: dict[str, float]) -> Finish | None:
        """Put a sampled token into its stream, unless it is an end token. Return the end of the request, if any."""
        if sampled.token in request.sampling.ends:
            return request.finish("stop")
        output, finish = request.add(sampled, trace, self._tokenizer)
        self._put(request, output)
        return finish


def _sampling_error(request: ScheduledRequest) -> ServingError:
    """Return the error of a request without a possible next token."""
    problem = request.sampling.problem
    if problem:
        reason = problem.splitlines()[0][:200]
        return ServingError(f"The answer can't be continued within its grammar ({reason}): simplify the grammar.")
    return EngineError("The model produced NaN or infinite logits: use another model or graft.")
