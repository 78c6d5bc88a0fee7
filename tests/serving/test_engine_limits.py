"""The engine's bounds: turns of users, the queue, time, clients that leave, its end, and what it refuses at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.serial_engine import SerialEngine
from graftlm.backbone import Site, Tap
from graftlm.grafts import Graft
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.protocol import (
    ContextLengthError,
    EngineLimits,
    Finish,
    GenerationRequest,
    QueueFullError,
    ServingError,
    ShuttingDownError,
    UnknownModelError,
)
from serving.engines import BLOCKING, Gate, backbone, batching, complete, grafts, prompt, read
from tiny import tiny_ids


@pytest.fixture
def engine() -> Iterator[BatchingEngine]:
    with batching() as engine:
        yield engine


@pytest.fixture(autouse=True)
def _closed_gate() -> None:
    Gate.shut()


def test_users_take_turns(engine: BatchingEngine) -> None:
    async def submit_all() -> list[str]:
        done: list[str] = []

        async def wait(request: GenerationRequest) -> None:
            await read(ticket_of[request])
            done.append(f"{request.user}{request.prompt[0]}")

        await asyncio.to_thread(Gate.reached.wait, 30)
        requests = [GenerationRequest((n,), "a", max_tokens=1, user="greedy") for n in range(10, 18)]
        requests += [GenerationRequest((n,), "a", max_tokens=1, user="late") for n in (20, 21)]
        ticket_of = {request: engine.submit([request]) for request in requests}
        waiting = asyncio.gather(*map(wait, requests))
        await asyncio.sleep(0)
        Gate.opened.set()
        await waiting
        return done

    engine.submit([BLOCKING])
    done = asyncio.run(submit_all())
    assert {"late20", "late21"} <= set(done[:4])


def test_the_queue_is_bounded() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", EngineLimits(batch_size=1, queue=2))
    first = engine.submit([BLOCKING])
    assert Gate.reached.wait(30)
    waiting = [engine.submit([GenerationRequest(prompt(2), "llama", max_tokens=1)]) for _ in range(2)]
    with pytest.raises(QueueFullError):
        engine.submit([GenerationRequest(prompt(2), "llama")])
    with pytest.raises(QueueFullError):
        engine.submit([GenerationRequest(prompt(2), "llama")] * 2)
    assert (engine.stats().running, engine.stats().waiting) == (1, 2), "all requests of a call are accepted, or none"
    Gate.opened.set()
    assert [asyncio.run(read(ticket)).finish.reason for ticket in (first, *waiting)] == ["length"] * 3
    assert engine.stats().finished == {"length": 3}
    assert engine.stats().tokens == 4
    assert engine.close(10)


def test_who_leaves_is_not_waited_for(engine: BatchingEngine) -> None:
    running, waiting = (
        engine.submit([replace(BLOCKING, max_tokens=500)]),
        engine.submit([GenerationRequest(prompt(3), "a", max_tokens=500)]),
    )
    assert Gate.reached.wait(30)
    running.cancel()
    waiting.cancel()
    Gate.opened.set()
    assert asyncio.run(read(running)).finish.reason == "cancelled"
    assert asyncio.run(read(waiting)).finish.reason == "cancelled"
    assert complete(engine, [GenerationRequest(prompt(3), "a", max_tokens=2)])[0].finish.completion_tokens > 0


def test_who_comes_as_all_others_leave_is_answered() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", EngineLimits(batch_size=4))
    running = engine.submit([replace(BLOCKING, max_tokens=500)])
    assert Gate.reached.wait(30)
    running.cancel()
    coming = engine.submit([GenerationRequest(prompt(3), "gate", max_tokens=5)])
    Gate.opened.set()  # the turn that drops the one begins the other
    found = asyncio.run(read(coming))
    assert found.content == complete(engine, [GenerationRequest(prompt(3), "gate", max_tokens=5)])[0].content
    assert engine.stats().finished["cancelled"] == 1
    assert engine.close(10)


def test_time_is_limited() -> None:
    engine = BatchingEngine(backbone("llama"), None, "llama", EngineLimits(seconds=1e-9))
    assert complete(engine, [GenerationRequest(prompt(3), "llama")])[0].finish == Finish("time", 3, 0)
    assert engine.close(10)


def test_what_runs_is_finished_when_the_engine_closes() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", EngineLimits(batch_size=1))
    tickets = [engine.submit([BLOCKING]), engine.submit([GenerationRequest(prompt(3), "llama", max_tokens=3)])]
    assert Gate.reached.wait(30)
    threading.Timer(0.01, Gate.opened.set).start()
    assert engine.close(30)
    assert all(asyncio.run(read(ticket)).finish.reason in ("length", "stop") for ticket in tickets)
    with pytest.raises(ShuttingDownError):
        engine.submit([BLOCKING])
    assert engine.close(0)


def test_what_is_not_done_in_time_is_cancelled() -> None:
    engine = BatchingEngine(backbone("llama"), {"gate": Gate()}, "llama", EngineLimits(batch_size=1))
    running, waiting = engine.submit([BLOCKING]), engine.submit([GenerationRequest(prompt(3), "llama")])
    assert Gate.reached.wait(30)
    closing = threading.Thread(target=lambda: closed.append(engine.close(0)))
    closed: list[bool] = []
    closing.start()
    while not engine._stopping:
        closing.join(0.001)
    Gate.opened.set()
    closing.join()
    assert closed == [False]
    assert asyncio.run(read(running)).finish.reason in ("cancelled", "length")
    with pytest.raises(ShuttingDownError):
        asyncio.run(read(waiting))


class Norms(Graft):
    """Replaces what comes out of the last norm."""

    def taps(self) -> list[Tap]:
        return [Tap(Site("norm"), "after", "replace", lambda call, inputs, outputs: outputs)]


@pytest.mark.parametrize(
    ("refused", "error", "culprit"),
    [
        (GenerationRequest((), "llama"), ServingError, "prompt"),
        (GenerationRequest((1, 304), "llama"), ServingError, "304"),
        (GenerationRequest((1,), "llama", max_tokens=0), ServingError, "max_tokens"),
        (GenerationRequest((1,), "llama", max_tokens=1025), ContextLengthError, "1024"),
        (GenerationRequest((1,) * 500, "llama", max_tokens=13), ContextLengthError, "512"),
        (GenerationRequest((1,), "dansk"), UnknownModelError, "'dansk'"),
        (GenerationRequest((1,), "a+dansk"), UnknownModelError, "'dansk'"),
        (GenerationRequest((1,), "a+"), UnknownModelError, "''"),
        (GenerationRequest((1,), "a+a"), ServingError, "twice"),
        (GenerationRequest((1,), "llama+a"), ServingError, "'llama+a'"),
        (GenerationRequest((1,), "rewriting+again"), ServingError, "norm"),
    ],
)
def test_what_can_not_be_answered_is_refused_at_once(
    engine: BatchingEngine, refused: GenerationRequest, error: type[ServingError], culprit: str
) -> None:
    if "rewriting" in refused.model:
        for name in ("rewriting", "again"):
            engine.replace(name, Norms())
    with pytest.raises(error) as caught:
        engine.submit([refused])
    assert culprit in str(caught.value)
    assert engine.stats().waiting == 0


def test_a_backbone_is_free_once_its_engine_is_closed() -> None:
    host, ids, served = backbone("gpt2"), tiny_ids(), grafts("gpt2")
    before = host.model(input_ids=ids).logits
    for kind in (SerialEngine, BatchingEngine):
        engine = kind(host, served, "gpt2")
        complete(engine, [GenerationRequest(prompt(3), "a+b", max_tokens=2)])
        assert engine.close(10)
        assert torch.equal(host.model(input_ids=ids).logits, before)
