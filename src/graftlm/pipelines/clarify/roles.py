"""Who takes part: a model that writes, and a user who answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graftlm.pipelines.clarify import prompts
from graftlm.pipelines.clarify.conversation import Conversation
from graftlm.pipelines.clarify.prompts import Prompt
from graftlm.pipelines.clarify.templates import load_template
from graftlm.pipelines.clarify.turns import Cost


@dataclass(frozen=True)
class Reply:
    """What a model said.

    Attributes:
        cut: it stopped at its limit of tokens.
    """

    text: str
    cost: Cost = field(default_factory=lambda: Cost(calls=1))
    cut: bool = False


class Writer(Protocol):
    """A model that replies to prompts: an endpoint's, or a local one."""

    @property
    def name(self) -> str: ...

    def write(
        self,
        prompt: Prompt,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        """Reply to a prompt.

        Args:
            temperature: 0 takes the likeliest reply.
            seed: of random choices.
            on_text: called with each piece of the reply as soon as it is known, where the model can.
        """
        ...


class User(Protocol):
    """Answers questions."""

    @property
    def name(self) -> str: ...

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        """The answer to the open question of a conversation, or None, and what it cost."""
        ...


class Person:
    """Somebody at a keyboard, or behind a page.

    Args:
        ask: puts a question with its possible answers; None or blanks refuse.
    """

    name = "person"

    def __init__(self, ask: Callable[[str, Sequence[str]], str | None]) -> None:
        self._ask = ask

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        question = conversation.open_question
        assert question is not None, "no question is open"
        return self._ask(question.text, question.answers), Cost()


class Simulated:
    """A model that knows the context and answers from it; where the context does not tell, it refuses.

    Args:
        template: with the exemplars that it is shown; by default the conversation's own.
    """

    def __init__(self, writer: Writer, context: str, template: str | None = None) -> None:
        self._writer, self._context, self._template = writer, context, template

    @property
    def name(self) -> str:
        return f"simulated by {self._writer.name}"

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        question = conversation.open_question
        assert question is not None, "no question is open"
        template = load_template(self._template or conversation.template)
        prompt = prompts.answer(template, conversation.target, conversation.text, self._context, question.text)
        reply = self._writer.write(prompt)
        told = reply.text.strip().partition("\n")[0].removeprefix(f"{prompt.label}:").strip()
        return (None if prompts.same_word(told, template.untold) else told), reply.cost


class Recorded:
    """Answers that were given before.

    Args:
        answers: by question; or in order, one for each question that is put. Without one left it refuses.
    """

    name = "recorded"

    def __init__(self, answers: Mapping[str, str] | Sequence[str]) -> None:
        self._answers = answers

    def answer(self, conversation: Conversation) -> tuple[str | None, Cost]:
        question = conversation.open_question
        assert question is not None, "no question is open"
        if isinstance(self._answers, Mapping):
            return self._answers.get(question.text), Cost()
        place = len(conversation.told)
        return (self._answers[place] if place < len(self._answers) else None), Cost()
