"""Engines with grafts of several kinds, and what their tickets give."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.grafts import Graft
from graftlm.serving.engine import BatchingEngine
from graftlm.serving.protocol import Ask, End, Limits, Piece, Ticket
from graftlm.serving.reference import SerialEngine
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


BLOCKING = Ask((77,), "gate", max_tokens=2)


@contextlib.contextmanager
def batching() -> Iterator[BatchingEngine]:
    """An engine with every graft of `grafts` and a closed gate."""
    Gate.shut()
    made = BatchingEngine(backbone("llama"), {**grafts("llama"), "gate": Gate()}, "llama", Limits(batch_size=4))
    yield made
    Gate.opened.set()
    made.close(10)
