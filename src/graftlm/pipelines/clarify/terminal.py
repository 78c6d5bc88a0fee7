"""Ask questions and show outputs in the terminal: `graft clarify`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

from graftlm.pipelines.clarify.bill import Bill
from graftlm.pipelines.clarify.chain import HumanUser
from graftlm.pipelines.clarify.conversation import (
    AnsweredTurn,
    AskedTurn,
    Conversation,
    RefusedTurn,
    SkippedTurn,
    WrittenTurn,
)
from graftlm.pipelines.clarify.models import StreamPrinter
from graftlm.pipelines.clarify.prompts import format_question, printable

_SKIP_REASONS = {
    "no-question": "the model's reply contains no question",
    "repeated": "the model repeated its question",
    "unusable": "the model's question or its options do not fit the text",
}


def ask_person(question: str, answers: Sequence[str], ask: Callable[[str], str]) -> str | None:
    """Ask a person a question.

    Args:
        question: the question.
        answers: its possible answers, which are numbered.
        ask: shows a text and returns what the person types.

    Returns:
        The answer that the person selected by its number, or else the typed words, which may be another number; None
        for an empty line or the end of the input.
    """
    lines = [printable(question)]
    for number, answer in enumerate(answers, start=1):
        lines.append(f"  {number}. {printable(answer)}")
    lines.append("A number, your own words, or nothing: " if answers else "Your words, or nothing: ")
    try:
        typed = ask("\n".join(lines)).strip()
    except EOFError:
        return None
    if typed.isascii() and typed.isdigit():
        number = int(typed)
        if 0 < number <= len(answers):
            return answers[number - 1]
    return typed or None


def ask_terminal(text: str) -> str:
    """Show a text on stderr, since stdout is for results, and return the line that the person types.

    Raises:
        EOFError: the input has ended.
    """
    print(text, end="", file=sys.stderr, flush=True)  # noqa: T201  # the terminal is the purpose
    return input()


class TerminalPrinter(StreamPrinter):
    """Shows an output while it is generated, without the label of replies, outer white space and control characters.

    As a context manager it ends the line if the generation fails.

    Args:
        conversation: the conversation whose output is shown.
        emit: receives the text to show.
    """

    def __init__(self, conversation: Conversation, emit: Callable[[str], None]) -> None:
        label = f"{conversation.task.reply}:"

        def select(received: str) -> str:
            text = received.strip()
            if label.startswith(text):  # the text may still become the label
                return ""
            return printable(text.removeprefix(label).strip())

        super().__init__(select, emit)

    def finish(self, final: str) -> None:
        """Show the rest of the output and end the line.

        Args:
            final: the whole output. If it does not begin with the text shown so far, it is shown on a new line.
        """
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


def summary_lines(conversation: Conversation, bill: Bill | None = None) -> list[str]:
    """Describe the questions, answers and cost of a conversation as lines of text.

    Args:
        conversation: the conversation.
        bill: the prices of its models; None if they are not known.
    """
    lines = _turn_lines(conversation)
    summary: dict[str, Any] = dict(conversation.summary())
    if summary["asked"] == conversation.budget > 1:
        lines.append(f"the budget of {conversation.budget} questions is used up (--budget)")
    counts = f"{summary['asked']} asked, {summary['answered']} answered, {summary['saved']} saved"
    gains = [bits for bits in summary["gained_bits"] if bits is not None]
    if gains:
        counts += f", {sum(gains):.2f} bits gained"
    cost = conversation.cost
    calls = "1 call" if cost.calls == 1 else f"{cost.calls} calls"
    lines.append(f"{counts}; {calls}, {cost.prompt_tokens} tokens read, {cost.new_tokens} written")
    if cost.unknown:
        lines.append(f"the server did not report the tokens of {cost.unknown} of them, which the counts leave out")
    if bill is not None:
        price = bill.of(conversation)
        lines.append("the price is unknown" if price is None else f"the price is {price:.6f}")
    if conversation.step == "done":
        lines.append("the conversation is finished")
    return lines


def _turn_lines(conversation: Conversation) -> list[str]:
    """Describe the turns that a person at the terminal has not seen."""
    lines = []
    question = ""
    for turn in conversation.turns:
        if isinstance(turn, AskedTurn):
            question = format_question(turn.question.text, turn.question.answers)
        elif isinstance(turn, AnsweredTurn | RefusedTurn):
            if turn.author != HumanUser.name:
                answer = turn.answer if isinstance(turn, AnsweredTurn) else "no answer"
                lines.append(printable(f"asked: {question}; {turn.author}: {answer}"))
        elif isinstance(turn, SkippedTurn):
            lines.extend(_skip_lines(turn))
        elif isinstance(turn, WrittenTurn):
            lines.extend(_output_lines(turn))
    return lines


def _skip_lines(turn: SkippedTurn) -> list[str]:
    if turn.question is not None and turn.gain is not None:
        return [f"not asked, since its expected gain is {turn.gain.bits:.2f} bits: {printable(turn.question.text)}"]
    if turn.reason == "nothing":
        return []
    return [f"asked nothing: {_SKIP_REASONS[turn.reason]}"]


def _output_lines(turn: WrittenTurn) -> list[str]:
    if not turn.output:
        return ["the model wrote nothing"]
    if turn.truncated:
        return ["the output stops at the limit of tokens (--max-new-tokens)"]
    return []
