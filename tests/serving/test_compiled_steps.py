"""Compiled decode steps of the engine: the tokens and logits of eager steps, from few graphs, whoever comes or leaves.

Most tests run the step in static memory without torch.compile, which takes seconds for each graph.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.backbone.step_buffers import Bucket, StepBuffers, bucket_of
from graftlm.errors import GraftError
from graftlm.grafted import compiled_steps
from graftlm.grafted.compiled_steps import CompiledSteps
from graftlm.grafted.graft_set import GraftSet, MultiGraftModel, RowGroupError, supports_row_groups
from graftlm.grafted.row_groups import MixedBatch
from graftlm.grafts import Graft
from graftlm.models.block_state.cache import LayerCache
from graftlm.serving import batching
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.prediction import PredictionEngine
from graftlm.serving.protocol import EngineError, EngineLimits, GenerationRequest
from graftlm.testing import accelerator, randomise
from laws.examples import EXAMPLES, Example, examples
from laws.tools import graft_onto
from serving.engines import Completion, Gate, backbone, complete, grafts, prompt, read
from tiny import DECODERS, tiny_model, tiny_tokenizer

GATED = EXAMPLES["neutral-residues"][0]
BARE = GraftSet()
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # padded columns change the order of the sums


class Served:
    """A model in float32 whose steps run in static memory, and its graft sets."""

    def __init__(self, chosen: Sequence[Example] = (GATED,), family: str = "llama") -> None:
        host = Backbone.wrap(tiny_model(family), tiny_tokenizer(), family)
        self.sets = [BARE]
        for example in chosen:
            attached = randomise(graft_onto(host, example), example.spread)
            attached.detach()
            graft = attached.grafts["graft"]
            assert isinstance(graft, Graft)
            self.sets.append(GraftSet(((str(example), graft),)))
        self.model = MultiGraftModel(host)
        self.model.compile_steps(rows=6, columns=1024)

    @property
    def steps(self) -> CompiledSteps:
        assert self.model.steps is not None
        return self.model.steps

    def close(self) -> None:
        self.model.detach()


@pytest.fixture
def static(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run in static memory, but are not compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are traced as one graph, which raises at a break, but not compiled to machine code."""
    monkeypatch.setattr(compiled_steps, "BACKEND", "eager")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def served(static: None) -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


class Pair:
    """The same rows in two batches: one with compiled steps and one with eager steps."""

    def __init__(self, served: Served, graft_set: GraftSet, prompts: Sequence[Sequence[int]]) -> None:
        self.served = served
        self.batches: list[MixedBatch] = []
        tags = [tuple(one) for one in prompts]
        for _ in range(2):
            batch, logits = served.model.prefill(GraftSet(graft_set.grafts), prompts, tags)
            self.batches.append(batch)
            self.newest = logits.argmax(-1).tolist()

    def join(self, other: Pair) -> None:
        for batch, joining in zip(self.batches, other.batches, strict=True):
            assert batch.join(joining)
        self.newest += other.newest

    def keep(self, rows: list[int]) -> None:
        for batch in self.batches:
            batch.keep(rows)
        self.newest = [self.newest[row] for row in rows]

    def decode(self, steps: int = 1, *, compiled: bool = True) -> None:
        """Decode, and compare logits and batches."""
        model = self.served.model
        for _ in range(steps):
            before = len(ran)
            logits = model.decode(self.batches[0], self.newest)
            assert (len(ran) > before) == compiled
            expected = model.decode(self.batches[1], self.newest, traced=True)
            torch.testing.assert_close(logits, expected, **CLOSE)
            self.newest = expected.argmax(-1).tolist()
        one, other = self.batches
        assert one.tags == other.tags
        assert one.lengths == other.lengths
        assert torch.equal(one.mask, other.mask)
        for row in range(len(one)):
            for (layer, index), (like, place) in zip(one.layers_of(row), other.layers_of(row), strict=True):
                if isinstance(layer, LayerCache):
                    for name, states in layer.tensors.items():
                        torch.testing.assert_close(states[index], like.tensors[name][place], **CLOSE)
                    continue
                for states, expected in ((layer.keys, like.keys), (layer.values, like.values)):
                    known = min(states.shape[-2], expected.shape[-2])  # an eager step may leave tokens to a later one
                    torch.testing.assert_close(states[index, ..., :known, :], expected[place, ..., :known, :], **CLOSE)


ran: list[Bucket] = []
"""The buckets of all compiled steps that have run in this test."""

newest: list[Tensor] = []
"""Their logits, with those of rows that are padding."""


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    newest.clear()
    run = CompiledSteps._step

    def step(self: CompiledSteps, owner: Any, bucket: Bucket, inputs: Any) -> Tensor:
        logits = run(self, owner, bucket, inputs)
        ran.append(bucket)
        newest.append(logits)
        return logits

    monkeypatch.setattr(CompiledSteps, "_step", step)


def play(served: Served, graft_set: GraftSet) -> None:
    """Let rows come and leave, until they have used many buckets."""
    pair = Pair(served, graft_set, [prompt(7), prompt(3)])
    pair.decode(2)
    pair.join(Pair(served, graft_set, [prompt(12)]))
    pair.decode(2)
    pair.keep([1, 2])
    pair.decode(2)
    pair.keep([1])  # its columns of padding are dropped
    pair.decode(2)
    pair.join(Pair(served, graft_set, [prompt(251), prompt(250), prompt(2), prompt(9)]))
    pair.decode(7)
    pair.keep([0, 3])
    pair.decode(2)
    assert len(set(ran)) >= 5
    assert {bucket.columns for bucket in ran} == {256, 512}
    has_own_layers = len(pair.batches[0].layers_of(0)) > len(pair.batches[0].cache.layers)
    assert {bucket.rows for bucket in ran} == ({1, 2, 3, 5} if has_own_layers else {1, 2, 4, 6})


@pytest.mark.parametrize(
    ("rows", "columns", "bucket"),
    [
        (1, 1, (1, 256)),
        (3, 256, (4, 256)),
        (5, 257, (6, 512)),
        (6, 700, (6, 1000)),
        (7, 5, None),
        (1, 1001, None),
    ],
)
def test_buckets_double_up_to_the_largest(rows: int, columns: int, bucket: tuple[int, int] | None) -> None:
    assert bucket_of(rows, columns, Bucket(6, 1000)) == bucket


def test_few_buckets_serve_all_sizes() -> None:
    most = Bucket(64, 8192)
    assert len({bucket_of(rows, columns, most) for rows in range(1, 65) for columns in range(1, 8193, 99)}) == 7 * 6


def test_rows_come_and_leave(served: Served) -> None:
    for graft_set in served.sets:
        play(served, graft_set)
        ran.clear()


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_rows_of_every_family_come_and_leave(static: None, family: str) -> None:
    try:
        served = Served([], family)
    except GraftError:
        pytest.skip("its layers have windows or a state")
    play(served, BARE)
    served.close()


def test_nothing_of_earlier_rows_reaches_later_ones(served: Served) -> None:
    """A value that is not finite would, even in a column that is masked."""
    pair = Pair(served, BARE, [prompt(300), prompt(5), prompt(4)])
    pair.decode()
    with torch.inference_mode():
        for memory in served.steps._buffers._states.values():
            assert memory._flat is not None
            memory._flat.fill_(torch.nan)
    pair.batches[0].keep([])
    Pair(served, BARE, [prompt(length) for length in (5, 8, 3, 2, 4)]).decode(3)
    assert torch.isfinite(newest[-1]).all(), "those of the sixth row, which is padding, too"
    assert len(newest[-1]) == 6


def test_memory_is_moved_for_larger_buckets_only(served: Served) -> None:
    buffers = served.steps._buffers
    for length, moved in ((5, True), (9, False), (300, True), (20, False)):
        moves = buffers.moves
        pair = Pair(served, BARE, [prompt(length)])
        pair.decode()
        assert (buffers.moves > moves) == moved
        pair.keep([])


def test_a_second_batch_leaves_the_memory_to_the_first(served: Served) -> None:
    first = Pair(served, BARE, [prompt(5)])
    second = Pair(served, BARE, [prompt(6)])
    first.decode()
    second.decode(compiled=False)
    first.decode()
    first.keep([])
    second.decode()


def test_rows_of_different_grafts_are_eager_until_one_is_left(served: Served) -> None:
    pair = Pair(served, BARE, [prompt(5)])
    pair.decode()
    pair.join(Pair(served, served.sets[1], [prompt(9)]))
    pair.decode(2, compiled=False)
    pair.keep([1])
    pair.decode(2)


def with_layers() -> list[Example]:
    """Grafts with layers of their own, whose decode step is one graph."""
    chosen = [example for kind in ("composition", "token-routing", "memory") for example in EXAMPLES[kind]]
    return [example for example in chosen if str(example) not in ("two-tokenizers", "recomputing")]


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, id=str(example), marks=[] if str(example) in EXAMPLES else pytest.mark.slow)
        for example in with_layers()
    ],
)
def test_rows_of_grafts_with_layers_of_their_own_come_and_leave(
    static: None, recorded: list[int], example: Example
) -> None:
    served = Served([example])
    play(served, served.sets[1])
    assert not recorded, "a recorded step would read the layers of the step before"
    served.close()


def play_states(served: Served, graft_set: GraftSet) -> None:
    """Two batches take turns, which can't become one, and a row leaves."""
    pair = Pair(served, graft_set, [prompt(7), prompt(3)])
    other = Pair(served, graft_set, [prompt(12)])
    for _ in range(3):
        pair.decode(4)
        other.decode(4)
    pair.keep([1])
    pair.decode(4)
    assert {bucket.rows for bucket in ran} == {1, 2}


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["bare", "gated"])
def test_rows_of_a_backbone_with_states_come_and_leave(static: None, recorded: list[int], number: int) -> None:
    served = Served(family="block-state")
    play_states(served, served.sets[number])
    assert not recorded
    served.close()


def test_a_backbone_with_states_is_as_before_after_a_step_that_failed(
    static: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served([], family="block-state")
    pair = Pair(served, BARE, [prompt(5)])
    pair.decode()
    run = MultiGraftModel._static_pass

    def failing(self: MultiGraftModel, owner: Any, inputs: Any) -> Tensor:
        run(self, owner, inputs)
        raise ValueError("broken, when the states have the token")

    monkeypatch.setattr(served.steps, "_forward", functools.partial(failing, served.model))
    pair.decode(2, compiled=False)
    served.close()


def test_grafts_that_are_not_one_graph_are_eager(static: None) -> None:
    (recomputing,) = [example for example in EXAMPLES["token-routing"] if str(example) == "recomputing"]
    served = Served([recomputing])
    Pair(served, served.sets[1], [prompt(5), prompt(3)]).decode(2, compiled=False)
    served.close()


def test_columns_end_where_a_graft_is_no_longer_one_graph(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, graft) = served.sets[1].grafts[0]
    monkeypatch.setattr(type(graft), "max_static_columns", 300)
    pair = Pair(served, served.sets[1], [prompt(298)])
    pair.decode(2)
    assert {bucket.columns for bucket in ran} == {300}
    pair.decode(2, compiled=False)


def test_layers_of_grafts_are_as_before_after_a_step_that_failed(
    static: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served([EXAMPLES["composition"][0]])
    pair = Pair(served, served.sets[1], [prompt(5), prompt(3)])
    pair.decode()
    run = MultiGraftModel._static_pass

    def failing(self: MultiGraftModel, owner: Any, inputs: Any) -> Tensor:
        run(self, owner, inputs)
        raise ValueError("broken, when the second model has read the token")

    monkeypatch.setattr(served.steps, "_forward", functools.partial(failing, served.model))
    pair.decode(2, compiled=False)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    served.close()


def test_a_graft_that_promises_nothing_is_eager(served: Served) -> None:
    Pair(served, GraftSet((("fuse", Fuse(whole=False)),)), [prompt(5), prompt(3)]).decode(2, compiled=False)


def test_why_a_step_is_eager_is_said_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    pair = Pair(served, BARE, [prompt(length) for length in range(1, 9)])
    pair.decode(3, compiled=False)
    assert len([record for record in caplog.records if "not compiled" in record.message]) == 1


@pytest.mark.parametrize("lacking", [False, True], ids=["broken", "memory"])
@pytest.mark.parametrize("place", ["load", "step"])
def test_a_step_that_fails_is_repeated_eagerly(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    lacking: bool,
) -> None:
    pair = Pair(served, BARE, [prompt(5), prompt(3)])
    pair.decode()
    pair.join(Pair(served, BARE, [prompt(4)]))
    error = torch.OutOfMemoryError("none is left") if lacking else ValueError("broken")
    after = iter([True] if place == "load" else [False, False, True])  # in the middle

    def failing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if next(after, False):
            raise error
        return result

    owner, name = (StepBuffers, "_load_layer") if place == "load" else (torch.nn.Linear, "forward")
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: failing(original, *args, **kwargs))
    pair.decode(3, compiled=False)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    pair.keep([0])
    pair.decode(compiled=lacking)  # a smaller bucket may have enough memory
    Pair(served, served.sets[1], [prompt(3)]).decode(compiled=not lacking)


def test_a_failed_step_gives_its_memory_to_nobody_while_it_is_read(served: Served) -> None:
    """The batch stays in the memory if the eager pass fails too."""
    fused = GraftSet((("fuse", Fuse(whole=True)),))
    batch, _ = served.model.prefill(fused, [prompt(5)], ["fused"])
    like, _ = served.model.prefill(fused, [prompt(5)], ["like"])
    served.model.decode(batch, [7])
    served.model.decode(like, [7], traced=True)
    with pytest.raises(RowGroupError):
        served.model.decode(batch, [9])
    Pair(served, BARE, [prompt(6)]).decode(compiled=False)
    found, expected = (served.model.decode(one, [8], traced=True) for one in (batch, like))
    torch.testing.assert_close(found, expected, **CLOSE)


class Fuse(Graft):
    """Says whether its step is one graph; fails at the token 9."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole

    @property
    def decodes_in_one_graph(self) -> bool:
        return self.whole

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", 1), "after", "add", self._add)]

    def _add(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        assert call.input_ids is not None
        if (call.input_ids == 9).any():
            raise ZeroDivisionError
        return inputs * 0.5


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of all steps that are recorded as CUDA graphs are, which write their results to the same memory."""
    rows: list[int] = []

    def record(self: CompiledSteps, step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        step()  # which may run more often than it is asked to
        result = step()
        rows.append(len(result))

        def replay() -> Tensor:
            return result.copy_(step())

        return replay

    monkeypatch.setattr(compiled_steps, "RECORDING_DEVICES", ("cpu",))
    monkeypatch.setattr(CompiledSteps, "_record", record)
    return rows


def test_recorded_steps_are_replayed_by_bucket(served: Served, recorded: list[int]) -> None:
    play(served, served.sets[1])
    assert len(recorded) < len(ran)
    again = len(recorded)
    pair = Pair(served, GraftSet(served.sets[1].grafts), [prompt(5), prompt(7)])
    first = served.model.decode(pair.batches[0], pair.newest)
    kept = first.clone()
    served.model.decode(pair.batches[1], pair.newest, traced=True)
    pair.decode(2)
    assert torch.equal(first, kept), "the next step has overwritten the logits"
    assert len(recorded) == again
    pair.keep([])
    served.model.wire(served.sets)
    Pair(served, served.sets[1], [prompt(5), prompt(7)]).decode()
    assert len(recorded) == again + 1, "its hooks have changed"


def test_steps_are_recorded_again_after_memory_lacked_while_it_moved(
    served: Served, recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would read memory that is no longer used."""
    pair = Pair(served, BARE, [prompt(5)])
    pair.decode()
    pair.keep([])
    load = StepBuffers._load_layer

    def failing(*args: Any) -> Any:
        load(*args)
        raise torch.OutOfMemoryError("none is left")

    with monkeypatch.context() as patch:
        patch.setattr(StepBuffers, "_load_layer", failing)
        pair = Pair(served, BARE, [prompt(300)])
        pair.decode(compiled=False)
        pair.keep([])
    Pair(served, BARE, [prompt(5)]).decode()
    assert recorded == [1, 1]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["", "memory"], ids=["bare", "memory"])
def test_a_step_does_not_wait_for_an_accelerator(
    static: None, monkeypatch: pytest.MonkeyPatch, compiled: bool, kind: str
) -> None:
    monkeypatch.setattr(compiled_steps, "RECORDING_DEVICES", ())
    served = Served([EXAMPLES[kind][0]] if kind else [])
    model = served.model
    batch, _ = model.prefill(served.sets[-1], [prompt(5), prompt(3)], [0, 1])
    modules = torch.nn.ModuleList([model._model, *(graft for _, graft in served.sets[-1].grafts)])
    layers = [layer for layer, _ in batch.layers_of(0)]
    with accelerator.pretended_accelerator(modules, Cache(layers=layers)) as move, torch.inference_mode():
        batch.mask = move(batch.mask)
        model._device = accelerator.DEVICE
        step = functools.partial(model.decode, batch, [5, 6], traced=not compiled)
        step()
        assert accelerator.waits(step) == []
    assert bool(ran) == compiled


# The engine


REQUESTS = [
    GenerationRequest(prompt(5), "a", max_tokens=9, logprobs=2),
    GenerationRequest(prompt(11), "a", max_tokens=4, temperature=1.0, seed=3),
    GenerationRequest(prompt(40), "a", max_tokens=12, top_k=7, temperature=0.7, seed=1),
    GenerationRequest((*prompt(40), 7, 8), "a", max_tokens=6, repetition_penalty=1.3),
    GenerationRequest(prompt(2), "a", max_tokens=30),
    GenerationRequest(prompt(250), "a", max_tokens=12, temperature=1.0, seed=5),
    GenerationRequest((*prompt(250), 9), "a", max_tokens=5),
]


def answers(engine: BatchingEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """The completions of requests that arrive at different times, one of which is cancelled."""

    async def ask(number: int, request: GenerationRequest) -> Completion:
        await asyncio.sleep(0.01 * number)
        return await read(engine.submit([request]))

    async def ask_all() -> list[Completion]:
        cancelled = engine.submit([GenerationRequest(prompt(6), "a", max_tokens=90)])
        done = asyncio.gather(*(ask(number, request) for number, request in enumerate(requests)))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        return await done

    found = asyncio.run(ask_all())
    return [*found, *complete(engine, requests)]  # the second time with a prefix cache


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [output.token for output in one.outputs] == [output.token for output in other.outputs]
        assert one.text == other.text
        for output, like in zip(one.outputs, other.outputs, strict=True):
            assert output.trace == pytest.approx(like.trace, abs=1e-5)
            assert [p for _, p in output.top] == pytest.approx([p for _, p in like.top], abs=1e-5)


def engine_of(served: dict[str, Graft], family: str = "llama", **limits: Any) -> BatchingEngine:
    return BatchingEngine(backbone(family), served, "llama", EngineLimits(batch_size=6, **limits))


def steps_of(engine: BatchingEngine) -> CompiledSteps:
    assert engine._model.steps is not None
    return engine._model.steps


def both(served: dict[str, Graft], requests: Sequence[GenerationRequest]) -> CompiledSteps:
    """Compare the answers of engines with and without compiled steps, and return the steps."""
    eager = engine_of(served)
    expected = answers(eager, requests)
    assert eager.close(10)
    engine = engine_of(served, compile=True)
    steps = steps_of(engine)
    ran.clear()
    found = answers(engine, requests)
    assert engine.close(10)
    assert_same(found, expected)
    assert found[-1].finish.cached_tokens
    return steps


def test_answers_are_those_of_eager_steps(static: None) -> None:
    both({"a": grafts("llama")["a"]}, REQUESTS)
    assert {bucket.columns for bucket in ran} == {256, 512}
    assert len({bucket.rows for bucket in ran}) > 2


def test_answers_of_a_backbone_with_states_are_those_of_eager_steps(static: None) -> None:
    served = {"a": grafts("block-state")["a"]}
    found = []
    for compiled in (False, True):
        engine = engine_of(served, "block-state", compile=compiled)
        found.append(answers(engine, REQUESTS[:5]))
        assert engine.close(10)
    assert_same(found[1], found[0])
    assert ran


def test_answers_of_several_models_are_those_of_eager_steps(static: None) -> None:
    served = {name: grafts("llama")[name] for name in ("a", "b")}
    others = [
        GenerationRequest(prompt(9), "llama", max_tokens=8),
        GenerationRequest(prompt(4), "b", max_tokens=20),
        GenerationRequest(prompt(5), "a", max_tokens=9, trace=True),
    ]
    both(served, [*others, *REQUESTS])


@pytest.mark.parametrize("trace", [False, True])
def test_a_request_for_traces_has_them(static: None, trace: bool) -> None:
    engine = engine_of({"a": grafts("llama")["a"]}, compile=True)
    ran.clear()
    (done,) = complete(engine, [GenerationRequest(prompt(5), "a", max_tokens=4, trace=trace)])
    engine.close(10)
    assert all(bool(output.trace) == trace for output in done.outputs)
    assert bool(ran) != trace


def test_a_failing_row_leaves_alone(static: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Gate.opened.set()
    monkeypatch.setattr(Gate, "decodes_in_one_graph", True)
    engine = engine_of({"gate": Gate()}, compile=True)
    sane, doomed = (GenerationRequest(prompt(length), "gate", max_tokens=6) for length in (4, 9))
    before = complete(engine, [sane, doomed])
    assert ran
    tokens = [{output.token for output in answer.outputs} for answer in before]
    fuse = next(token for token in tokens[1] - tokens[0] - {*sane.prompt, *doomed.prompt})
    monkeypatch.setattr(Gate, "fuse", fuse)

    async def submit_all() -> list[Completion | BaseException]:
        requests = [sane, doomed, sane]
        return await asyncio.gather(*(read(engine.submit([request])) for request in requests), return_exceptions=True)

    first, failed, last = asyncio.run(submit_all())
    engine.close(10)
    assert isinstance(failed, EngineError)
    assert isinstance(first, Completion)
    assert isinstance(last, Completion)
    assert_same([first, last], [before[0]] * 2)


def test_a_closed_engine_keeps_no_memory(static: None) -> None:
    engine = engine_of({}, compile=True)
    complete(engine, [GenerationRequest(prompt(5), "llama", max_tokens=3)])
    memory = [weakref.ref(piece._flat) for piece in steps_of(engine)._buffers._states.values()]
    assert memory
    assert all(reference() is not None for reference in memory)
    engine.submit([GenerationRequest(prompt(5), "llama", max_tokens=400)])
    assert not engine.close(0.05)  # while a row is decoded
    gc.collect()
    assert not engine._batches, "their layers are views of the memory"
    assert all(reference() is None for reference in memory)


def test_a_cpu_compiles_only_if_it_is_asked_to(static: None) -> None:
    for wanted in (None, False, True):
        engine = engine_of({}, compile=wanted)
        assert (engine._model.steps is not None) == bool(wanted)
        engine.close(0)


def test_an_accelerator_compiles_unless_it_is_asked_not_to(static: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "COMPILING_DEVICES", ("cpu",))
    for wanted in (None, False, True):
        engine = engine_of({}, compile=wanted)
        assert (engine._model.steps is not None) == (wanted is not False)
        engine.close(0)
    engine = BatchingEngine(backbone("gemma3"))  # whose layers have windows
    assert engine._model.steps is None
    engine.close(0)


def test_what_can_not_be_compiled_is_refused() -> None:
    with pytest.raises(GraftError):
        BatchingEngine(backbone("gemma3"), limits=EngineLimits(compile=True))
    BatchingEngine(backbone("gemma3")).close(0)  # the backbone is free again
    with pytest.raises(GraftError):
        PredictionEngine(backbone("bert"), limits=EngineLimits(compile=True))


# Whole graphs


def servable() -> list[Example]:
    return [example for example in examples() if example.kind in ("neutral-residues", "adapter")]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([], id="bare", marks=pytest.mark.slow),
        *(
            pytest.param([example], id=str(example), marks=[] if example is GATED else pytest.mark.slow)
            for example in servable()
        ),
    ],
)
def test_steps_are_one_graph_for_all_buckets(traced: None, chosen: list[Example]) -> None:
    served = Served(chosen)
    graft_set = served.sets[-1]
    played = 0
    for _ in range(2):
        play(served, graft_set)
        played += len(ran)
        assert served.steps.graphs <= 2, "one for a single row, and one for several"
        ran.clear()
    assert played > 30
    served.close()


@pytest.mark.slow
@pytest.mark.parametrize("example", [example for example in with_layers() if str(example) in EXAMPLES], ids=str)
def test_steps_of_grafts_with_layers_of_their_own_are_one_graph(traced: None, example: Example) -> None:
    """Rows and columns of their layers are those of the batch, not those of a bucket."""
    served = Served([example])
    served.model.warm_up(served.sets[1])
    warm = served.steps.graphs
    play(served, served.sets[1])
    assert warm <= served.steps.graphs <= 6, "for one row and several, which were there or have just come"
    assert served.steps.graphs <= warm + 1
    graphs = served.steps.graphs
    ran.clear()
    play(served, served.sets[1])
    assert served.steps.graphs == graphs
    served.close()


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [[], [GATED]], ids=["bare", "gated"])
def test_steps_of_a_backbone_with_states_are_one_graph(traced: None, chosen: list[Example]) -> None:
    served = Served(chosen, "block-state")
    play_states(served, served.sets[-1])
    graphs = served.steps.graphs
    assert graphs <= 4, "for one row and several, in the first step and in later ones"
    play_states(served, served.sets[-1])
    assert served.steps.graphs == graphs
    served.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3", "bloom"])
def test_steps_of_other_families_are_one_graph(traced: None, family: str) -> None:
    served = Served([GATED], family)
    play(served, served.sets[1])
    assert served.steps.graphs <= 2
    served.close()


@pytest.mark.slow
def test_an_engine_with_traced_steps_gives_the_answers_of_eager_steps(traced: None) -> None:
    steps = both({"a": grafts("llama")["a"]}, REQUESTS)
    assert ran
    assert steps.graphs <= 4, "two for each of the backbone and the graft"


@pytest.mark.slow
def test_steps_compile_to_machine_code() -> None:
    torch.compiler.reset()
    served = Served()
    play(served, served.sets[1])
    assert served.steps.graphs == 2
    served.close()
    torch.compiler.reset()


def test_servable_grafts_are_those_that_act_by_taps() -> None:
    """A graft that gains the ability must be added to `servable`."""
    kinds = set()
    host = Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    for example in [chosen for chosen in examples() if not chosen.hosts]:
        attached = graft_onto(host, example)
        graft = attached.grafts["graft"]
        attached.detach()
        assert isinstance(graft, Graft)
        if supports_row_groups(graft) and graft.decodes_in_one_graph and not graft.has_decode_state:
            kinds.add(example.kind)
    assert kinds == {example.kind for example in servable()}
