"""A service with grafts and reports whose models say what a script has them say: for the page and our own routes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftlm.artifact import save_graft
from graftlm.backbone import Backbone
from graftlm.evaluation import Interval, Results
from graftlm.evaluation.results import Row
from graftlm.grafts import build_graft, graft_config
from graftlm.serving.prompts import Prompts
from graftlm.serving.protocol import Ask, End, Piece, ServingError, Stats
from graftlm.serving.service import Service
from graftlm.serving.shelf import Shelf
from serving.web import web_service
from tiny import tiny_model, tiny_tokenizer

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
FRENCH = {"a friend": "Es-tu sûre ?", "a stranger": "Êtes-vous sûre ?"}
ENDLESS = "forever"


def say(prompt: str, ask: Ask) -> str:
    """What the scripted models say: translators ask who "you" is, the others name themselves."""
    if "write None" in prompt:
        asked = prompt.rpartition("<text>")[2]
        return 'Who is "you"? [a friend | a stranger]' if re.search(r"\byou\b", asked) else "None."
    if "Translation:" in prompt:
        answered = prompt.rpartition("<answer>\n")[2].partition("\n</answer>")[0]
        return FRENCH.get(answered, "Tu es sûr ?") if "<answer>" in prompt.rpartition("<text>")[2] else "Tu es sûr ?"
    if "wrong" in prompt and "danish" in ask.model:
        raise ServingError("The graft danish can't: leave it out.")
    return HOSTILE if "hostile" in prompt else f"This is {ask.model}, née here.\nIt writes 2 lines."


@dataclass
class Written:
    """A ticket whose pieces are all there; an endless one waits behind them until it is cancelled."""

    items: list[Piece | End]
    cancelled: threading.Event | None = None

    async def __aiter__(self) -> AsyncIterator[Piece | End]:
        for item in self.items:
            yield item
            await asyncio.sleep(0)
        if self.cancelled is not None:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        if self.cancelled is not None:
            self.cancelled.set()


class ScriptedEngine:
    """An `Engine` whose continuations are the tokens of what `say` gives.

    Args:
        names: the backbone's first.
        prompts: the tokenizer.
        say: the prompt's text and what was asked -> what is written.
    """

    def __init__(self, names: tuple[str, ...], prompts: Prompts, say: Callable[[str, Ask], str] = say) -> None:
        self.names, self.prompts, self.say = names, prompts, say
        self.asks: list[Ask] = []
        self.cancelled = threading.Event()

    def submit(self, ask: Ask) -> Written:
        self.asks.append(ask)
        prompt = str(self.prompts.tokenizer.decode(list(ask.prompt), skip_special_tokens=True))
        ids = self.prompts.tokenizer(self.say(prompt, ask), add_special_tokens=False)["input_ids"]
        shown = list(self._pieces(ids[: ask.max_tokens], ask))
        if ENDLESS in prompt:
            return Written(shown, self.cancelled)
        return Written([*shown, End("length" if len(ids) > ask.max_tokens else "stop", len(ask.prompt), len(shown))])

    def _pieces(self, ids: list[int], ask: Ask) -> Iterator[Piece]:
        shown = ""
        for place, token in enumerate(ids):
            whole = str(self.prompts.tokenizer.decode(ids[: place + 1])).removesuffix("\ufffd")
            top = ((token, -0.2 - place % 3), (5, -2.5)) if ask.logprobs is not None else ()
            yield Piece(token, whole[len(shown) :], top[0][1] if top else None, top, self._trace(place, ask))
            shown = whole

    def _trace(self, place: int, ask: Ask) -> dict[str, float]:
        if not ask.trace or ask.model == self.names[0]:
            return {}
        if "router" in ask.model:
            weight = (place % 5) / 4
            return {"law": weight, "poetry": 0.9 * (1 - weight), "none": 0.1 * (1 - weight)}
        return {"open gates": (place % 4) / 4}

    def replace(self, name: str, graft: object | None) -> None:
        raise AssertionError("nothing is replaced here")

    def stats(self) -> Stats:
        return Stats(0, 0, 0, {})

    def close(self, grace: float) -> bool:
        return True


def metrics(learned: float, forgotten: float) -> dict[str, Any]:
    """Both metrics with intervals."""
    pairs = {"learned": learned, "forgotten": forgotten}
    return {name: Interval(mean=value, low=value - 0.02, high=value + 0.03) for name, value in pairs.items()}


def save_run(backbone: Backbone, folder: Path, *, report: bool = True, **config: Any) -> Path:
    """A graft as `graft compare` leaves it, untrained, with a report of three methods; gives the graft's folder."""
    graft = build_graft(graft_config({"kind": "neutral-residues", **config}), backbone)
    mine = metrics(0.42, 0.004)
    measured = {name: one.model_dump() for name, one in mine.items()} | {"trainable_parameters": 275456}
    known = {"steps": 100, "tokens": 204800, "training": {"seed": 0, "learning_rate": 0.003}, "measured": measured}
    path = save_graft(graft, backbone, folder / "neutral-residues" / "graft", training=known)
    if report:
        rows = [
            Row(id="backbone", label="backbone", metrics={"old": 5.4}),
            Row(id="lora", label=f"LoRA {HOSTILE[:8]}", metrics=metrics(0.45, 0.143)),
            Row(id="finetune", label="fine-tuning", metrics=metrics(1.27, 0.221)),
            Row(id="neutral-residues", label="neutral residues", metrics=mine),
        ]
        paths = {"lora": [[0.05, 0.2], [0.2, 0.5]]}
        Results.here("compare", rows, command="graft compare DIR", details={"paths": paths}).write(folder)
    return path


def scripted_service(folder: Path, **changes: Any) -> Service:
    """A service of a backbone, `tiny`, and the grafts danish (with a report) and router, whose engine is scripted."""
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    given = {
        "danish": save_run(backbone, folder / "danish"),
        "router": save_run(backbone, folder / "router", report=False),
    }
    shelf = Shelf(backbone, given, reserved=frozenset({"tiny"}))
    shelf.open()
    engine = ScriptedEngine(("tiny", *given), Prompts(backbone))
    return web_service(engine, backbone=backbone, shelf=shelf, **changes)
