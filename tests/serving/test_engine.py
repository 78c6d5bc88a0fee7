"""The engine answers as the slow truth does, whoever else requests, and whatever goes wrong beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serial_engine import SerialEngine
from graftlm.backbone import Backbone, Call
from graftlm.backbone.prepack import PackedLinear, can_pack
from graftlm.errors import BackboneError, GraftError
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.grammars import GrammarCompiler
from graftlm.serving.protocol import EngineError, EngineLimits, GenerationRequest, ServingError, UnknownModelError
from laws.examples import EXAMPLES
from laws.tools import graft_onto
from serving.engines import Completion, Gate, backbone, batching, complete, grafts, prompt, read
from tiny import tiny_model, tiny_tokenizer

FAMILIES = ("llama", "gpt2", "gemma3")
MODELS = ("llama", "a", "b", "a+b", "two")


@pytest.fixture
def engine() -> Iterator[BatchingEngine]:
    with batching() as engine:
        yield engine


COMPILER = GrammarCompiler(tiny_tokenizer(), 300, [1])
GRAMMARS = [COMPILER.json({"type": "array", "items": {"type": "integer"}}, ""), COMPILER.regex("[a-e]{2,5}", "")]
ASKS = st.lists(
    st.builds(
        GenerationRequest,
        st.integers(1, 15).map(prompt),
        st.sampled_from(MODELS),
        max_tokens=st.integers(1, 12),
        stop_tokens=st.sampled_from([(), (), tuple(range(40, 90))]),
        ignore_eos=st.booleans(),
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 0, 1, 7]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
        logit_bias=st.sampled_from([(), (), ((40, 3.0), (41, -100.0))]),
        grammar=st.sampled_from([None, None, *GRAMMARS]),
        seed=st.integers(0, 9),
        stop=st.sampled_from([(), ("e",), ("a", "\ufffd\ufffd", "on")]),
        logprobs=st.sampled_from([None, 0, 3]),
        trace=st.booleans(),
        user=st.sampled_from(["", "x"]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])]
)
def test_answers_are_those_of_one_request_at_a_time(family: str) -> None:
    served = grafts(family)

    @settings(max_examples=4)
    @given(ASKS)
    def law(requests: list[GenerationRequest]) -> None:
        slow = SerialEngine(backbone(family), served, "llama")
        expected = [complete(slow, [request])[0] for request in requests]
        assert slow.close(10)
        engine = BatchingEngine(backbone(family), served, "llama", EngineLimits(batch_size=3))
        found = complete(engine, requests)
        assert engine.close(10)
        for request, one, other in zip(requests, found, expected, strict=True):
            assert one.content == other.content, request
            assert not {output.token for output in one.outputs} & {*request.stop_tokens}
            for output, like in zip(one.outputs, other.outputs, strict=True):
                assert output.trace == pytest.approx(like.trace, abs=1e-5)
                assert [p for _, p in output.top] == pytest.approx([p for _, p in like.top], abs=1e-5)
                assert output.logprob == pytest.approx(like.logprob, abs=1e-5)

    law()


def test_a_seeded_answer_does_not_depend_on_its_neighbours(engine: BatchingEngine) -> None:
    request = GenerationRequest(prompt(5), "a", max_tokens=10, temperature=1.0, seed=3)
    (alone,) = complete(engine, [request])
    crowd = [GenerationRequest(prompt(n), model, max_tokens=n, temperature=1.0) for n, model in enumerate(MODELS, 3)]
    assert complete(engine, [*crowd, request])[-1].content == alone.content
    assert complete(engine, [request, replace(request, seed=4)])[1].text != alone.text


def test_a_failing_request_fails_alone_and_the_engine_goes_on(
    engine: BatchingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gate.opened.set()
    sane, doomed = (GenerationRequest(prompt(n), "gate", max_tokens=6) for n in (4, 9))
    before = complete(engine, [sane, doomed])
    tokens = [{output.token for output in answer.outputs} for answer in before]
    fuse = next(token for token in tokens[1] - tokens[0] - {*sane.prompt, *doomed.prompt})
    monkeypatch.setattr(Gate, "fuse", fuse)

    async def submit_all() -> list[Completion | BaseException]:
        requests = [sane, doomed, GenerationRequest(prompt(3), "b", max_tokens=6), sane]
        return await asyncio.gather(*(read(engine.submit([request])) for request in requests), return_exceptions=True)

    first, failed, other, last = asyncio.run(submit_all())
    assert isinstance(failed, EngineError)
    assert "ZeroDivisionError" in str(failed)
    assert "path" not in str(failed)
    assert isinstance(first, Completion)
    assert isinstance(last, Completion)
    assert isinstance(other, Completion)
    assert first.content == last.content == before[0].content
    assert engine.stats().finished["error"] == 1
    assert engine.stats().running == 0
    with pytest.raises(EngineError):
        complete(engine, [GenerationRequest((5, fuse), "gate")])  # at its prompt already


def test_what_a_graft_refuses_is_said_in_its_own_sentence(engine: BatchingEngine) -> None:
    class Picky(Graft):
        def prepare(self, call: Call) -> None:
            raise GraftError("This graft reads poems alone: send one.")

    engine.replace("picky", Picky())
    with pytest.raises(ServingError, match="poems") as caught:
        complete(engine, [GenerationRequest(prompt(3), "picky")])
    assert caught.value.status == 400


def test_a_graft_is_replaced_while_it_answers(engine: BatchingEngine) -> None:
    request = GenerationRequest(prompt(6), "b", max_tokens=8)
    (before,) = complete(engine, [request])
    hooks = [len(module._forward_hooks) for module in backbone("llama").model.modules()]
    running = engine.submit([request])
    engine.replace("b", grafts("llama")["a"])
    assert asyncio.run(read(running)).content == before.content
    after = complete(engine, [request, replace(request, model="a")])
    assert after[0].content == after[1].content != before.content
    engine.replace("b", None)
    with pytest.raises(UnknownModelError):
        engine.submit([request])
    complete(engine, [replace(request, model="a")])
    assert [len(module._forward_hooks) for module in backbone("llama").model.modules()] < hooks


def test_names_and_kinds_are_checked_when_they_are_given(engine: BatchingEngine) -> None:
    assert engine.names == ("llama", "a", "b", "two", "gate")
    for name in ("llama", "a+b", ""):
        with pytest.raises(GraftError) as caught:
            engine.replace(name, Gate())
        assert repr(name) in str(caught.value)
    with pytest.raises(GraftError, match="dict"):
        engine.replace("c", {})
    with pytest.raises(BackboneError):
        BatchingEngine(backbone("bert"), {})


def test_a_graft_with_modules_of_its_own_is_refused() -> None:
    model = graft_onto(backbone("llama"), EXAMPLES["finetune"][0])
    model.detach()
    with pytest.raises(GraftError):
        BatchingEngine(backbone("llama"), {"own": model.grafts["graft"]})  # type: ignore[dict-item]  # it is a graft


@pytest.mark.parametrize("pack", [True, False])
def test_an_engine_packs_bfloat16_weights_while_it_runs_and_no_longer(pack: bool) -> None:
    served = Backbone.wrap(tiny_model("llama").bfloat16(), tiny_tokenizer(), "llama")
    config = graft_config({"kind": "adapter", "width": 4})
    given, second, third = (build_graft(config, served).bfloat16() for _ in range(3))
    modules = [served.model, given, second, third]

    def packed() -> list[bool]:
        return [any(isinstance(module, PackedLinear) for module in owner.modules()) for owner in modules]

    with pytest.raises(GraftError):
        BatchingEngine(served, {"a": given, "x+y": second}, "llama", EngineLimits(pack=pack))
    assert not any(packed())
    engine = BatchingEngine(served, {"a": given}, "llama", EngineLimits(pack=pack))
    try:
        assert packed() == [pack and can_pack()] * 2 + [False] * 2
        engine.replace("a", second)
        engine.replace("a", None)
        (done,) = complete(engine, [GenerationRequest(prompt(9), "llama", max_tokens=4)])
        assert done.finish.completion_tokens
        assert packed() == [pack and can_pack()] * 3 + [False]
    finally:
        engine.close(0)
    engine.replace("a", third)
    assert not any(packed())
