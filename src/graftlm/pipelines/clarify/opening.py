"""What the command line needs: a model by its address or folder, a conversation to begin or resume, a person to ask."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from graftlm.artifact import JSON_NAME, backbone_of, load_graft
from graftlm.backbone import load_backbone
from graftlm.config import Config
from graftlm.errors import DataError, RecipeError
from graftlm.grafts import GraftedModel
from graftlm.pipelines.clarify.conversation import Conversation
from graftlm.pipelines.clarify.endpoint import Endpoint, EndpointConfig
from graftlm.pipelines.clarify.local import Local
from graftlm.pipelines.clarify.prompts import visible
from graftlm.pipelines.clarify.roles import Person, Recorded, Simulated, User, Writer
from graftlm.pipelines.clarify.templates import load_template
from graftlm.pipelines.clarify.turns import Skipped, Written


class ModelChoice(Config):
    """Which model takes part: one behind a server, or one on this machine.

    Args:
        endpoint: a server's URL; `model` then names one of its models.
        backbone: a model's folder or a graft's.
        device: where a model on this machine runs.
        timeout: see `EndpointConfig`, as for the rest.
    """

    endpoint: str | None = None
    model: str | None = None
    backbone: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    key_variable: str = "OPENAI_API_KEY"
    timeout: float = 60.0
    retries: int = 3
    max_new_tokens: int = 256

    def open(self) -> Writer:
        """The model.

        Raises:
            RecipeError: neither or both are given, or the server's model is not named.
            GraftError: it can't be loaded.
        """
        if (self.endpoint is None) == (self.backbone is None):
            given = "Neither" if self.endpoint is None else "Both"
            raise RecipeError(
                f"{given} of --endpoint and --backbone was given: name one, a server's URL or a model's folder."
            )
        return self._server() if self.endpoint is not None else self._local()

    def _server(self) -> Endpoint:
        if self.model is None:
            raise RecipeError("The server may have several models: name one (--model).")
        known = self.model_dump(include={"model", "key_variable", "timeout", "retries", "max_new_tokens"})
        return Endpoint(EndpointConfig.parse(known | {"url": self.endpoint}, where="--endpoint"))

    def _local(self) -> Local:
        name = str(self.backbone)
        if (Path(name) / JSON_NAME).is_file():
            live = backbone_of(name, device=self.device, trust_remote_code=self.trust_remote_code)
            model: Any = GraftedModel(live, {"graft": load_graft(name, live)})
        else:
            live = load_backbone(name, trust_remote_code=self.trust_remote_code)
            live.move(self.device)
            model = live.model
        return Local(model, live.need_tokenizer(), name=name, max_new_tokens=self.max_new_tokens)


def begin(
    text: str | None,
    keep: Path | None,
    *,
    template: str | None = None,
    target: str | None = None,
    budget: int | None = None,
    threshold: float | None = None,
) -> Conversation:
    """The conversation that `keep` holds, or a new one.

    Raises:
        DataError: there is neither a text nor a conversation, or the two differ.
        RecipeError: the template or the language is not known.
    """
    if keep is None or not keep.exists():
        if text is None:
            raise DataError("There is no text to begin with: give one, or the file of a conversation (--resume).")
        more: dict[str, Any] = {} if budget is None else {"budget": budget}
        return Conversation.start(text, template or "translate", target, threshold=threshold, **more)
    found = Conversation.load(keep)
    asked = {"text": text, "template": template, "target": target, "budget": budget, "threshold": threshold}
    for name, value in asked.items():
        if value is not None and value != (there := getattr(found, name)):
            raise DataError(
                f"{keep} holds a conversation whose {name} is {_short(there)}, not {_short(value)}: leave that out to "
                "go on with it, or name another file."
            )
    return found


def user_of(
    answers: Sequence[str] | None, context: str | None, writer: Writer, ask: Callable[[str], str] | None
) -> User | None:
    """Who answers: what was recorded, a model that knows the context, a person, or nobody here.

    Args:
        ask: puts a line to a person and gives what is typed.

    Raises:
        RecipeError: both answers and a context are given.
    """
    if answers and context is not None:
        raise RecipeError("Both --answer and --context were given: either you answer, or a model does that knows it.")
    if answers:
        return Recorded(list(answers))
    if context is not None:
        return Simulated(writer, context)
    return None if ask is None else Person(lambda question, known: put(question, known, ask))


def put(question: str, answers: Sequence[str], ask: Callable[[str], str]) -> str | None:
    """Put a question to a person; a number chooses one of the answers, and nothing refuses."""
    lines = [visible(question), *(f"  {number}. {visible(one)}" for number, one in enumerate(answers, start=1))]
    how = "A number, your own words, or nothing: " if answers else "Your words, or nothing: "
    try:
        typed = ask("\n".join([*lines, how])).strip()
    except EOFError:
        return None
    chosen = int(typed) if typed.isascii() and typed.isdigit() else 0
    return answers[chosen - 1] if 0 < chosen <= len(answers) else typed or None


def typed(line: str) -> str:
    """What a person types after a line on stderr; stdout is for results."""
    print(line, end="", file=sys.stderr, flush=True)  # noqa: T201  # the terminal is what this is for
    return input()


class Shown:
    """Shows an output while it is written: without the word before replies, blanks around it, or what steers terminals.

    As a block, it ends the line where the writing breaks off.

    Args:
        conversation: whose output it is.
        show: puts a piece on the screen.
    """

    def __init__(self, conversation: Conversation, show: Callable[[str], None]) -> None:
        self._label, self._show = f"{load_template(conversation.template).reply}:", show
        self._written = self._shown = ""

    def __call__(self, piece: str) -> None:
        self._written += piece
        text = self._written.strip()
        if not self._label.startswith(text):  # which may still become the label
            self._go_on(visible(text.removeprefix(self._label).strip()))

    def end(self, output: str) -> None:
        """The rest, and the end of the line; all of it where nothing was written now."""
        self._go_on(visible(output))
        self._show("\n")
        self._shown = ""

    def _go_on(self, text: str) -> None:
        if not text.startswith(self._shown):  # it became another text: begin anew
            self._show("\n")
            self._shown = ""
        if more := text[len(self._shown) :]:
            self._show(more)
            self._shown = text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._show("\n")


def first_pass(text: str, language: str) -> Sequence[Any]:
    """What rules find ambiguous in a text, without a model; in English itself all kinds count."""
    from graftlm.pipelines.clarify.ambiguity import detect

    return detect(text, language=None if language == "en" else language).found


def document(conversation: Conversation) -> dict[str, Any]:
    """A conversation for machines: its turns, what comes next, and what was asked, saved and gained."""
    question = conversation.open_question
    return {
        "conversation": conversation.model_dump(mode="json"),
        "step": conversation.step,
        "question": question.model_dump(mode="json") if question else None,
        "summary": conversation.summary(),
    }


def tale(conversation: Conversation) -> list[str]:
    """What was asked, saved and gained, in lines for people."""
    known, lines = conversation.summary(), []
    for turn in conversation.turns:
        if isinstance(turn, Skipped) and turn.question is not None and turn.gain is not None:
            lines.append(f"not asked, as it would bring {turn.gain.bits:.2f} bits: {visible(turn.question.text)}")
        elif isinstance(turn, Skipped) and turn.reason != "nothing":
            lines.append(f"asked nothing: {_UNASKED[turn.reason]}")
        elif isinstance(turn, Written) and not turn.output:
            lines.append("the model wrote nothing")
        elif isinstance(turn, Written) and turn.cut:
            lines.append("the output stops at the limit of tokens (--max-new-tokens)")
    if known["asked"] == conversation.budget > 1:
        lines.append(f"asked as often as it may, {known['asked']} times (--budget)")
    cost, gained = conversation.cost, [bits for bits in known["gained_bits"] if bits is not None]
    bits = f", {sum(gained):.2f} bits gained" if gained else ""
    asked = f"{known['asked']} asked, {known['answered']} answered, {known['saved']} saved{bits}"
    return [*lines, f"{asked}; {cost.calls} calls, {cost.prompt_tokens} tokens read, {cost.new_tokens} written"]


_UNASKED = {"no-question": "what the model said is no question", "repeated": "the model repeated its question"}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}…{text[-8:]}"
