"""Engines with grafts of several kinds, and the outputs of their streams."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from benchmarks.serial_engine import SerialEngine
from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafts import Graft
from graftlm.serving.batching import BatchingEngine
from graftlm.serving.protocol import EngineLimits, Finish, GenerationRequest, RequestStream, TokenOutput
from graftlm.testing import randomise
from laws.examples import EXAMPLES, Example
from laws.tools import graft_onto
from tiny import tiny_ids, tiny_model, tiny_tokenizer


@functools.cache
def backbone(family: str) -> Backbone:
    """In float64, in which rounding can't be mistaken for a row that leaks into another, nor hide one."""
    return Backbone.wrap(tiny_model(family).double(), tiny_tokenizer(), family)


@functools.cache
def grafts(family: str) -> dict[str, Graft]:
    chosen = {
        "a": EXAMPLES["neutral-residues"][0],
        "b": EXAMPLES["token-routing"][0],
        "two": EXAMPLES["composition"][2],
    }
    return {name: trained(family, example) for name, example in chosen.items()}


def trained(family: str, example: Example, seed: int = 1) -> Graft:
    model = randomise(graft_onto(backbone(family), example), example.spread, seed)
    model.detach()
    graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft.double().eval()


def prompt(length: int) -> tuple[int, ...]:
    return tuple(tiny_ids(1, length, seed=length)[0].tolist())


class Completion:
    """All outputs of one continuation."""

    def __init__(self, items: Sequence[TokenOutput | Finish]) -> None:
        self.outputs = [item for item in items if isinstance(item, TokenOutput)]
        (self.finish,) = [item for item in items if isinstance(item, Finish)]
        self.text = "".join(output.text for output in self.outputs) + self.finish.text

    @property
    def content(self) -> tuple[object, ...]:
        """What must be equal exactly: the text, the finish, and the tokens with the most likely ones."""
        finish = replace(self.finish, text="")
        return self.text, finish, [(output.token, [token for token, _ in output.top]) for output in self.outputs]


async def read(stream: RequestStream) -> Completion:
    return Completion([item async for item in stream])


def complete(engine: SerialEngine | BatchingEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """The completions of several requests that are submitted at once, each by itself."""

    async def submit_all() -> list[Completion]:
        return await asyncio.gather(*(read(engine.submit([request])) for request in requests))

    return asyncio.run(submit_all())


class Gate(Graft):
    """Lets no prompt of one token through until it is opened, and fails at some tokens."""

    opened = threading.Event()
    reached = threading.Event()
    fuse = -1

    @classmethod
    def shut(cls) -> None:
        cls.opened.clear()
        cls.reached.clear()

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


BLOCKING = GenerationRequest((77,), "gate", max_tokens=2)


@contextlib.contextmanager
def batching() -> Iterator[BatchingEngine]:
    """An engine with every graft of `grafts` and a closed gate."""
    Gate.shut()
    made = BatchingEngine(backbone("llama"), {**grafts("llama"), "gate": Gate()}, "llama", EngineLimits(batch_size=4))
    yield made
    Gate.opened.set()
    made.close(10)
