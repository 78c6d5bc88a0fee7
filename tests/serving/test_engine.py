"""The engine answers as the slow truth does, whoever else asks, and whatever goes wrong beside it."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graftlm.backbone import Call, Site, Tap
from graftlm.errors import BackboneError, GraftError
from graftlm.grafts import Graft
from graftlm.serving.engine import BatchingEngine
from graftlm.serving.protocol import (
    Ask,
    BusyError,
    ClosingError,
    End,
    EngineError,
    Limits,
    Piece,
    ServingError,
    Ticket,
    TooLongError,
    UnknownModelError,
)
from graftlm.serving.reference import SerialEngine
from laws.examples import EXAMPLES, Example, backbone
from laws.tools import graft_onto, randomise
from tiny import tiny_ids

FAMILIES = ("llama", "gpt2", "gemma3")
MODELS = ("llama", "a", "b", "a+b", "two")


@functools.cache
def grafts(family: str) -> dict[str, Graft]:
    chosen = {
        "a": EXAMPLES["neutral-residues"][0],
        "b": EXAMPLES["token-routing"][0],
        "two": EXAMPLES["composition"][2],
    }
    return {name: _trained(family, example) for name, example in chosen.items()}


def _trained(family: str, example: Example) -> Graft:
    model = randomise(graft_onto(backbone(family), example), example.spread)
    model.detach()
    graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft


def prompt(length: int) -> tuple[int, ...]:
    return tuple(tiny_ids(1, length, seed=length)[0].tolist())


class Answer:
    """All that a ticket gave."""

    def __init__(self, items: Sequence[Piece | End]) -> None:
        self.pieces = [item for item in items if isinstance(item, Piece)]
        (self.end,) = [item for item in items if isinstance(item, End)]
        self.text = "".join(piece.text for piece in self.pieces) + self.end.text

    @property
    def told(self) -> tuple[object, ...]:
        end = replace(self.end, text="")
        return self.text, end, [(piece.token, [token for token, _ in piece.top]) for piece in self.pieces]


async def read(ticket: Ticket) -> Answer:
    return Answer([item async for item in ticket])


def answers(engine: SerialEngine | BatchingEngine, asks: Sequence[Ask]) -> list[Answer]:
    """The answers to several requests that are handed in at once."""

    async def ask_all() -> list[Answer]:
        return await asyncio.gather(*(read(engine.submit(ask)) for ask in asks))

    return asyncio.run(ask_all())


@pytest.fixture
def engine() -> Iterator[BatchingEngine]:
    made = BatchingEngine(backbone("llama"), {**grafts("llama"), "gate": Gate()}, "llama", Limits(batch_size=4))
    yield made
    Gate.opened.set()
    made.close(10)


class Gate(Graft):
    """Lets no prompt of one token through until it is opened, and fails at some tokens."""

    opened = threading.Event()
    reached = threading.Event()
    fuse = -1

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", 1), "after", "add", self._wait)]

    def _wait(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        assert call.input_ids is not None
        if call.input_ids[0, -1] == 77:
            self.reached.set()
            self.opened.wait(30)
        if (call.input_ids == self.fuse).any():
            raise ZeroDivisionError("with a/path")
        return inputs * 0.1


@pytest.fixture(autouse=True)
def _closed_gate() -> None:
    Gate.opened.clear()
    Gate.reached.clear()


BLOCKING = Ask((77,), "gate", max_tokens=2)


ASKS = st.lists(
    st.builds(
        Ask,
        st.integers(1, 15).map(prompt),
        st.sampled_from(MODELS),
        max_tokens=st.integers(1, 12),
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
        top_p=st.sampled_from([1.0, 0.8]),
        seed=st.integers(0, 9),
        stop=st.sampled_from([(), ("e",), ("a", "\ufffd\ufffd", "on")]),
        logprobs=st.sampled_from([None, 0, 3]),
        trace=st.booleans(),
        user=st.sampled_from(["", "x"]),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_one_request_at_a_time(family: str) -> None:
    served = grafts(family)

    @settings(max_examples=4)
    @given(ASKS)
    def law(asks: list[Ask]) -> None:
        slow = SerialEngine(backbone(family), served, "llama")
        expected = [answers(slow, [ask])[0] for ask in asks]
        assert slow.close(10)
        engine = BatchingEngine(backbone(family), served, "llama", Limits(batch_size=3))
        found = answers(engine, asks)
        assert engine.close(10)
        for ask, one, other in zip(asks, found, expected, strict=True):
            assert one.told == other.told, ask
            for piece, like in zip(one.pieces, other.pieces, strict=True):
                assert piece.trace == pytest.approx(like.trace, abs=1e-4)
                assert [p for _, p in piece.top] == pytest.approx([p for _, p in like.top], abs=1e-4)
                assert piece.logprob == pytest.approx(like.logprob, abs=1e-4)

    law()


def test_a_seeded_answer_does_not_depend_on_its_neighbours(engine: BatchingEngine) -> None:
    ask = Ask(prompt(5), "a", max_tokens=10, temperature=1.0, seed=3)
    (alone,) = answers(engine, [ask])
    crowd = [Ask(prompt(n), model, max_tokens=n, temperature=1.0) for n, model in enumerate(MODELS, 3)]
    assert answers(engine, [*crowd, ask])[-1].told == alone.told
    assert answers(engine, [ask, replace(ask, seed=4)])[1].text != alone.text


def test_a_failing_request_fails_alone_and_the_engine_goes_on(
    engine: BatchingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gate.opened.set()
    sane, doomed = (Ask(prompt(n), "gate", max_tokens=6) for n in (4, 9))
    before = answers(engine, [sane, doomed])
    tokens = [{piece.token for piece in answer.pieces} for answer in before]
    fuse = next(token for token in tokens[1] - tokens[0] - {*sane.prompt, *doomed.prompt})
    monkeypatch.setattr(Gate, "fuse", fuse)

    async def ask_all() -> list[Answer | BaseException]:
        asks = [sane, doomed, Ask(prompt(3), "b", max_tokens=6), sane]
        return await asyncio.gather(*(read(engine.submit(ask)) for ask in asks), return_exceptions=True)

    first, failed, other, last = asyncio.run(ask_all())
    assert isinstance(failed, EngineError)
    assert "ZeroDivisionError" in str(failed)
    assert "path" not in str(failed)
    assert isinstance(first, Answer)
    assert isinstance(last, Answer)
    assert isinstance(other, Answer)
    assert first.told == last.told == before[0].told
    assert engine.stats().finished["error"] == 1
    assert engine.stats().running == 0
    with pytest.raises(EngineError):
        answers(engine, [Ask((5, fuse), "gate")])  # at its prompt already


def test_what_a_graft_refuses_is_said_in_its_own_sentence(engine: BatchingEngine) -> None:
    class Picky(Graft):
        def prepare(self, call: Call) -> None:
            raise GraftError("This graft reads poems alone: send one.")

    engine.replace("picky", Picky())
    with pytest.raises(ServingError, match="This graft reads poems alone") as caught:
        answers(engine, [Ask(prompt(3), "picky")])
    assert caught.value.status == 400


def test_users_take_turns(engine: BatchingEngine) -> None:
    async def ask_all() -> list[str]:
        done: list[str] = []

        async def wait(ask: Ask) -> None:
            await read(ticket_of[ask])
            done.append(f"{ask.user}{ask.prompt[0]}")

        await asyncio.to_thread(Gate.reached.wait, 30)
        asks = [Ask((n,), "a", max_tokens=1, user="greedy") for n in range(10, 18)]
        asks += [Ask((n,), "a", max_tokens=1, user="late") for n in (20, 21)]
        ticket_of = {ask: engine.submit(ask) for ask in asks}
        waiting = asyncio.gather(*map(wait, asks))
        await asyncio.sleep(0)
        Gate.opened.set()
        await waiting
        return done

    engine.submit(BLOCKING)
    done = asyncio.run(ask_all())
    assert {"late20", "late21"} <= set(done[:4])


def test_the_queue_is_bounded() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", Limits(batch_size=1, queue=2))
    first = engine.submit(BLOCKING)
    assert Gate.reached.wait(30)
    waiting = [engine.submit(Ask(prompt(2), "llama", max_tokens=1)) for _ in range(2)]
    with pytest.raises(BusyError, match="2 requests are waiting already"):
        engine.submit(Ask(prompt(2), "llama"))
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)
    Gate.opened.set()
    assert [asyncio.run(read(ticket)).end.reason for ticket in (first, *waiting)] == ["length"] * 3
    assert engine.stats().finished == {"length": 3}
    assert engine.stats().tokens == 4
    assert engine.close(10)


def test_who_leaves_is_not_waited_for(engine: BatchingEngine) -> None:
    running, waiting = (
        engine.submit(replace(BLOCKING, max_tokens=500)),
        engine.submit(Ask(prompt(3), "a", max_tokens=500)),
    )
    assert Gate.reached.wait(30)
    running.cancel()
    waiting.cancel()
    Gate.opened.set()
    assert asyncio.run(read(running)).end.reason == "cancelled"
    assert asyncio.run(read(waiting)).end.reason == "cancelled"
    assert answers(engine, [Ask(prompt(3), "a", max_tokens=2)])[0].end.completion_tokens > 0


def test_time_is_limited() -> None:
    engine = BatchingEngine(backbone("llama"), None, "llama", Limits(seconds=1e-9))
    assert answers(engine, [Ask(prompt(3), "llama")])[0].end == End("time", 3, 0)
    assert engine.close(10)


def test_a_graft_is_replaced_while_it_answers(engine: BatchingEngine) -> None:
    ask = Ask(prompt(6), "b", max_tokens=8)
    (before,) = answers(engine, [ask])
    hooks = [len(module._forward_hooks) for module in backbone("llama").model.modules()]
    running = engine.submit(ask)
    engine.replace("b", grafts("llama")["a"])
    assert asyncio.run(read(running)).told == before.told
    after = answers(engine, [ask, replace(ask, model="a")])
    assert after[0].told == after[1].told != before.told
    engine.replace("b", None)
    with pytest.raises(UnknownModelError, match="There is no model 'b'"):
        engine.submit(ask)
    answers(engine, [replace(ask, model="a")])
    assert [len(module._forward_hooks) for module in backbone("llama").model.modules()] < hooks


def test_what_runs_is_finished_when_the_engine_closes() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", Limits(batch_size=1))
    tickets = [engine.submit(BLOCKING), engine.submit(Ask(prompt(3), "llama", max_tokens=3))]
    assert Gate.reached.wait(30)
    threading.Timer(0.01, Gate.opened.set).start()
    assert engine.close(30)
    assert all(asyncio.run(read(ticket)).end.reason in ("length", "stop") for ticket in tickets)
    with pytest.raises(ClosingError, match="shutting down"):
        engine.submit(BLOCKING)
    assert engine.close(0)


def test_what_is_not_done_in_time_is_cancelled() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", Limits(batch_size=1))
    running, waiting = engine.submit(BLOCKING), engine.submit(Ask(prompt(3), "llama"))
    assert Gate.reached.wait(30)
    closing = threading.Thread(target=lambda: closed.append(engine.close(0)))
    closed: list[bool] = []
    closing.start()
    while not engine._stopping:
        closing.join(0.001)
    Gate.opened.set()
    closing.join()
    assert closed == [False]
    assert asyncio.run(read(running)).end.reason in ("cancelled", "length")
    with pytest.raises(ClosingError):
        asyncio.run(read(waiting))


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (Ask((), "llama"), ServingError, "The prompt has no tokens"),
        (Ask((1, 304), "llama"), ServingError, "holds the token id 304, but the model knows 0 to 303"),
        (Ask((1,), "llama", max_tokens=0), ServingError, "max_tokens is 0"),
        (Ask((1,), "llama", max_tokens=1025), TooLongError, "this server writes 1024 at most"),
        (Ask((1,) * 500, "llama", max_tokens=13), TooLongError, "which with 13 new ones makes 513, but 512"),
        (Ask((1,), "dansk"), UnknownModelError, "There is no model 'dansk'"),
        (Ask((1,), "a+dansk"), UnknownModelError, "There is no model 'dansk'"),
        (Ask((1,), "a+"), UnknownModelError, "There is no model ''"),
        (Ask((1,), "a+a"), ServingError, "names a twice"),
        (Ask((1,), "llama+a"), ServingError, "is in every mixture already"),
        (Ask((1,), "rewriting+again"), ServingError, "both replace what happens after norm"),
    ],
)
def test_what_can_not_be_answered_is_refused_at_once(
    engine: BatchingEngine, ask: Ask, error: type[ServingError], message: str
) -> None:
    if "rewriting" in ask.model:
        for name in ("rewriting", "again"):
            engine.replace(name, Norms())
    with pytest.raises(error, match=message):
        engine.submit(ask)
    assert engine.stats().waiting == 0


class Norms(Graft):
    """Replaces what comes out of the last norm."""

    def taps(self) -> list[Tap]:
        return [Tap(Site("norm"), "after", "replace", lambda call, inputs, outputs: outputs)]


def test_names_and_kinds_are_checked_when_they_are_given(engine: BatchingEngine) -> None:
    assert engine.names == ("llama", "a", "b", "two", "gate")
    for name, message in (("llama", "is the backbone's"), ("a+b", "holds a +"), ("", "is empty")):
        with pytest.raises(GraftError, match=message):
            engine.replace(name, Gate())
    with pytest.raises(GraftError, match="dict is no graft"):
        engine.replace("c", {})
    with pytest.raises(BackboneError, match="writes no text"):
        BatchingEngine(backbone("bert"), {})


def test_a_backbone_is_free_once_its_engine_is_closed() -> None:
    host, ids, served = backbone("gpt2"), tiny_ids(), grafts("gpt2")
    before = host.model(input_ids=ids).logits
    for kind in (SerialEngine, BatchingEngine):
        engine = kind(host, served, "gpt2")
        answers(engine, [Ask(prompt(3), "a+b", max_tokens=2)])
        assert engine.close(10)
        assert torch.equal(host.model(input_ids=ids).logits, before)


def test_a_graft_with_modules_of_its_own_is_refused() -> None:
    model = graft_onto(backbone("llama"), EXAMPLES["lora"][0])
    model.detach()
    with pytest.raises(GraftError, match="own brings modules of its own into the model"):
        BatchingEngine(backbone("llama"), {"own": model.grafts["graft"]})  # type: ignore[dict-item]  # it is a graft
