"""The engine's bounds: turns of users, the queue, time, clients that leave, its end, and what it refuses at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from graftlm.backbone import Site, Tap
from graftlm.grafts import Graft
from graftlm.serving.engine import BatchingEngine
from graftlm.serving.protocol import (
    Ask,
    BusyError,
    ClosingError,
    End,
    Limits,
    ServingError,
    TooLongError,
    UnknownModelError,
)
from graftlm.serving.reference import SerialEngine
from serving.engines import BLOCKING, Gate, answers, backbone, batching, grafts, prompt, read
from tiny import tiny_ids


@pytest.fixture
def engine() -> Iterator[BatchingEngine]:
    with batching() as engine:
        yield engine


@pytest.fixture(autouse=True)
def _closed_gate() -> None:
    Gate.shut()


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


def test_who_comes_as_all_others_leave_is_answered() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", Limits(batch_size=4))
    running = engine.submit(replace(BLOCKING, max_tokens=500))
    assert Gate.reached.wait(30)
    running.cancel()
    coming = engine.submit(Ask(prompt(3), "gate", max_tokens=5))
    Gate.opened.set()  # the turn that drops the one begins the other
    found = asyncio.run(read(coming))
    assert found.told == answers(engine, [Ask(prompt(3), "gate", max_tokens=5)])[0].told
    assert engine.stats().finished["cancelled"] == 1
    assert engine.close(10)


def test_time_is_limited() -> None:
    engine = BatchingEngine(backbone("llama"), None, "llama", Limits(seconds=1e-9))
    assert answers(engine, [Ask(prompt(3), "llama")])[0].end == End("time", 3, 0)
    assert engine.close(10)


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


class Norms(Graft):
    """Replaces what comes out of the last norm."""

    def taps(self) -> list[Tap]:
        return [Tap(Site("norm"), "after", "replace", lambda call, inputs, outputs: outputs)]


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


def test_a_backbone_is_free_once_its_engine_is_closed() -> None:
    host, ids, served = backbone("gpt2"), tiny_ids(), grafts("gpt2")
    before = host.model(input_ids=ids).logits
    for kind in (SerialEngine, BatchingEngine):
        engine = kind(host, served, "gpt2")
        answers(engine, [Ask(prompt(3), "a+b", max_tokens=2)])
        assert engine.close(10)
        assert torch.equal(host.model(input_ids=ids).logits, before)
