"""What `graft clarify` needs: a model by its address or folder, a conversation to begin or resume, a user, printing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from graftlm.errors import DataError, RecipeError, shorten
from graftlm.generation.generate import load_model
from graftlm.pipelines.clarify.chain import HumanUser, RecordedUser, SimulatedUser, User
from graftlm.pipelines.clarify.conversation import Conversation, SkippedTurn, WrittenTurn
from graftlm.pipelines.clarify.endpoint import Endpoint, EndpointConfig
from graftlm.pipelines.clarify.models import ChatModel, LocalModel, StreamPrinter
from graftlm.pipelines.clarify.prompts import format_question, printable
from graftlm.pipelines.clarify.templates import load_template


def open_model(
    *,
    endpoint: str | None = None,
    model: str | None = None,
    backbone: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    max_new_tokens: int = 256,
    **connection: Any,
) -> ChatModel:
    """The `model` of a server, whose URL is `endpoint`, or one on this machine: the folder of a model or of a graft.

    `connection` has `key_variable`, `timeout` and `retries` of `EndpointConfig`.

    Raises RecipeError if neither or both are given, or the server's model is not named, and GraftError if the model
    can't be loaded.
    """
    if (endpoint is None) == (backbone is None):
        given = "Neither" if endpoint is None else "Both"
        raise RecipeError(f"{given} of --endpoint and --backbone was given: name a server's URL or a model's folder.")
    if backbone is None:
        if model is None:
            raise RecipeError("The server may have several models: name one (--model).")
        config = {"url": endpoint, "model": model, "max_new_tokens": max_new_tokens} | connection
        return Endpoint(EndpointConfig.parse(config, where="--endpoint"))
    network, tokenizer = load_model(backbone, device=device, trust_remote_code=trust_remote_code)
    return LocalModel(network, tokenizer, name=backbone, max_new_tokens=max_new_tokens)


def open_conversation(
    text: str | None,
    path: Path | None,
    *,
    template: str | None = None,
    target: str | None = None,
    budget: int | None = None,
    threshold: float | None = None,
    answers: Sequence[str] | None = None,
) -> Conversation:
    """The conversation in the file `path`, or a new one if there is no such file.

    Raises DataError if there is neither a text nor a conversation, or they differ, or it is finished and there are
    answers, and RecipeError if the template or the language is unknown.
    """
    if path is None or not path.exists():
        if text is None:
            raise DataError("There is no text to begin with: give one, or the file of a conversation (--resume).")
        options: dict[str, Any] = {} if budget is None else {"budget": budget}
        return Conversation.start(text, template or "translate", target, threshold=threshold, **options)
    conversation = Conversation.load(path)
    given = {"text": text, "template": template, "target": target, "budget": budget, "threshold": threshold}
    for name, value in given.items():
        if value is not None and value != (kept := getattr(conversation, name)):
            raise DataError(
                f"{path} holds a conversation whose {name} is {shorten(repr(kept), 40)}, not "
                f"{shorten(repr(value), 40)}: leave that out to go on with it, or name another file."
            )
    if answers and conversation.step == "done":
        raise DataError(
            f"The conversation in {path} is finished, so nothing is left to answer: leave out --answer to see its "
            "output, or name another file to begin another (--resume)."
        )
    return conversation


def choose_user(
    answers: Sequence[str] | None, context: str | None, model: ChatModel, ask: Callable[[str], str] | None
) -> User | None:
    """Who answers: recorded answers, a model that knows the context, a person, or nobody.

    `ask` shows a text to a person and returns what the person types; None if nobody is there.

    Raises RecipeError if both answers and a context are given.
    """
    if answers and context is not None:
        raise RecipeError("Both --answer and --context were given: either you answer, or a model does that knows it.")
    if answers:
        return RecordedUser(list(answers))
    if context is not None:
        return SimulatedUser(model, context)
    return None if ask is None else HumanUser(lambda question, known: _ask_person(question, known, ask))


def _ask_person(question: str, answers: Sequence[str], ask: Callable[[str], str]) -> str | None:
    """A person's answer. A number selects a possible answer; an empty line refuses."""
    listed = [f"  {number}. {printable(answer)}" for number, answer in enumerate(answers, start=1)]
    hint = "A number, your own words, or nothing: " if answers else "Your words, or nothing: "
    try:
        typed = ask("\n".join([printable(question), *listed, hint])).strip()
    except EOFError:
        return None
    number = int(typed) if typed.isascii() and typed.isdigit() else 0
    return answers[number - 1] if 0 < number <= len(answers) else typed or None


def ask_terminal(text: str) -> str:
    """The line that a person types after `text`, which goes to stderr; stdout is for results."""
    print(text, end="", file=sys.stderr, flush=True)  # noqa: T201  # the terminal is the purpose
    return input()


class TerminalPrinter(StreamPrinter):
    """Shows an output while it is written, without the label of replies, outer white space and control characters.

    As a context manager it ends the line if the output breaks off.
    """

    def __init__(self, conversation: Conversation, emit: Callable[[str], None]) -> None:
        label = f"{load_template(conversation.template).reply}:"

        def select(received: str) -> str:
            text = received.strip()
            is_label = label.startswith(text)  # the text may still become the label
            return "" if is_label else printable(text.removeprefix(label).strip())

        super().__init__(select, emit)

    def finish(self, final: str) -> None:
        """Show the rest of the output and end the line."""
        self.end(printable(final))
        self._end_line()

    def _end_line(self) -> None:
        self._emit("\n")
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._end_line()


def summary_lines(conversation: Conversation) -> list[str]:
    """What was asked, skipped and gained, and the cost, as lines for people."""
    summary, lines = conversation.summary(), []
    question = ""
    for turn in conversation.turns:
        if turn.kind == "asked":
            question = format_question(turn.question.text, turn.question.answers)
        if (turn.kind == "answered" or turn.kind == "refused") and turn.author != HumanUser.name:
            reply = turn.answer if turn.kind == "answered" else "no answer"
            lines.append(printable(f"asked: {question}; {turn.author}: {reply}"))
        elif isinstance(turn, SkippedTurn) and turn.question is not None and turn.gain is not None:
            lines.append(f"not asked, as it would bring {turn.gain.bits:.2f} bits: {printable(turn.question.text)}")
        elif isinstance(turn, SkippedTurn) and turn.reason != "nothing":
            lines.append(f"asked nothing: {_SKIP_REASONS[turn.reason]}")
        elif isinstance(turn, WrittenTurn) and not turn.output:
            lines.append("the model wrote nothing")
        elif isinstance(turn, WrittenTurn) and turn.truncated:
            lines.append("the output stops at the limit of tokens (--max-new-tokens)")
    if summary["asked"] == conversation.budget > 1:
        lines.append(f"asked as often as it may, {summary['asked']} times (--budget)")
    cost, gains = conversation.cost, [bits for bits in summary["gained_bits"] if bits is not None]
    bits = f", {sum(gains):.2f} bits gained" if gains else ""
    counts = f"{summary['asked']} asked, {summary['answered']} answered, {summary['saved']} saved{bits}"
    lines.append(f"{counts}; {cost.calls} calls, {cost.prompt_tokens} tokens read, {cost.new_tokens} written")
    return [*lines, "the conversation is finished"] if conversation.step == "done" else lines


_SKIP_REASONS = {
    "no-question": "the model's reply is no question",
    "repeated": "the model repeated its question",
    "unusable": "the model's question or its options fit another text",
}
