"""A service with grafts and reports whose models say what a script has them say: for the page and our own routes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graftlm.backbone import Backbone
from graftlm.evaluation import Interval, Results
from graftlm.evaluation.results import Row
from graftlm.grafts import build_graft, graft_config
from graftlm.serving.protocol import EngineStats, Finish, GenerationRequest, RequestStream, ServingError, TokenOutput
from graftlm.serving.service import Service
from graftlm.serving.store import GraftStore
from graftlm.serving.tokenization import ServingTokenizer
from graftlm.store.artifact import save_graft
from serving.web import web_service
from tiny import tiny_model, tiny_tokenizer

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
FRENCH = {"a friend": "Es-tu sûre ?", "a stranger": "Êtes-vous sûre ?"}
ENDLESS = "forever"


def say(prompt: str, request: GenerationRequest) -> str:
    """What the scripted models say: translators ask who "you" is, the others name themselves."""
    if "write None" in prompt:
        asked = prompt.rpartition("<text>")[2]
        return 'Who is "you"? [a friend | a stranger]' if re.search(r"\byou\b", asked) else "None."
    if "Translation:" in prompt:
        answered = prompt.rpartition("<answer>\n")[2].partition("\n</answer>")[0]
        return FRENCH.get(answered, "Tu es sûr ?") if "<answer>" in prompt.rpartition("<text>")[2] else "Tu es sûr ?"
    if "wrong" in prompt and "danish" in request.model:
        raise ServingError("The graft danish can't: leave it out.")
    return HOSTILE if "hostile" in prompt else f"This is {request.model}, née here.\nIt writes 2 lines."


class FinishedStream(RequestStream):
    """A stream whose outputs are all there; an endless one waits after them until it is cancelled."""

    def __init__(self, items: list[TokenOutput | Finish], cancelled: threading.Event | None = None) -> None:
        super().__init__()
        self.cancelled_event = cancelled
        for item in items:
            self.put(item)

    def cancel(self) -> None:
        super().cancel()
        if self.cancelled_event is not None:
            self.cancelled_event.set()
            self.put(Finish("cancelled", 1, 1))
            self.wake_readers([self])


class ScriptedEngine:
    """An `Engine` whose continuations are the tokens of what `say` returns.

    Args:
        names: the backbone's first.
        tokenizer: the backbone's.
        say: from a prompt's text and the request to the continuation.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        tokenizer: ServingTokenizer,
        say: Callable[[str, GenerationRequest], str] = say,
    ) -> None:
        self.names, self.tokenizer, self.say = names, tokenizer.tokenizer, say
        self.requests: list[GenerationRequest] = []
        self.cancelled = threading.Event()

    def submit(self, requests: Sequence[GenerationRequest]) -> RequestStream:
        (request,) = requests
        self.requests.append(request)
        prompt = str(self.tokenizer.decode(list(request.prompt), skip_special_tokens=True))
        ids = self.tokenizer(self.say(prompt, request), add_special_tokens=False)["input_ids"]
        outputs = list(self._outputs(ids[: request.max_tokens], request))
        if ENDLESS in prompt:
            return FinishedStream([*outputs], self.cancelled)
        reason = "length" if len(ids) > request.max_tokens else "stop"
        return FinishedStream([*outputs, Finish(reason, len(request.prompt), len(outputs))])

    def _outputs(self, ids: list[int], request: GenerationRequest) -> Iterator[TokenOutput]:
        shown = ""
        for position, token in enumerate(ids):
            text = str(self.tokenizer.decode(ids[: position + 1])).removesuffix("\ufffd")
            top = ((token, -0.2 - position % 3), (5, -2.5)) if request.logprobs is not None else ()
            trace = self._trace(position, request)
            yield TokenOutput(token, text[len(shown) :], top[0][1] if top else None, top, trace)
            shown = text

    def _trace(self, position: int, request: GenerationRequest) -> dict[str, float]:
        if not request.trace or request.model == self.names[0]:
            return {}
        if "router" in request.model:
            weight = (position % 5) / 4
            return {"law": weight, "poetry": 0.9 * (1 - weight), "none": 0.1 * (1 - weight)}
        return {"open gates": (position % 4) / 4}

    def replace(self, name: str, graft: object | None) -> None:
        raise AssertionError("nothing is replaced here")

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, {})

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
        Results.here("compare", rows, command="graft compare DIR").write(folder)
    return path


def scripted_service(folder: Path, **changes: Any) -> Service:
    """A service of a backbone, `tiny`, and the grafts danish (with a report) and router, whose engine is scripted."""
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    given = {
        "danish": save_run(backbone, folder / "danish"),
        "router": save_run(backbone, folder / "router", report=False),
    }
    store = GraftStore({"tiny": backbone}, given)
    store.open()
    engine = ScriptedEngine(("tiny", *given), ServingTokenizer(backbone))
    return web_service(engine, backbone=backbone, store=store, **changes)
