"""Clarifying conversations over HTTP: the body of a turn, and the turn itself.

The state of a conversation travels in the bodies. Only the templates of GraftLM can be named, because the pipeline
would open any other name as a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, JsonValue

from graftlm.config import Config
from graftlm.serving.clients import EngineClient, Event
from graftlm.serving.protocol import ServingError
from graftlm.serving.request_schema import RequestBody
from graftlm.serving.service import Service

if TYPE_CHECKING:
    from graftlm.pipelines.clarify import Conversation

MAX_QUERY = 20_000  # characters of a text to clarify
MAX_ANSWER = 2000  # characters of an answer to a question
MAX_QUESTIONS = 5
Name = Annotated[str, Field(min_length=1, max_length=500)]


class ConversationStart(Config):
    """The start of a conversation.

    Args:
        text: the text to clarify.
        template: name of a template of GraftLM.
        target: code of the target language; needed if the template has several.
        budget: maximum number of questions.
        threshold: minimum expected information gain of a question in bits; None asks every question.
    """

    text: str = Field(max_length=MAX_QUERY)
    template: Name = "translate"
    target: Name | None = None
    budget: int = Field(1, ge=0, le=MAX_QUESTIONS)
    threshold: float | None = Field(None, ge=0, le=1000)


class ClarifyBody(RequestBody):
    """One turn: the start of a conversation, or the answer to its open question.

    Args:
        model: the backbone, a graft, or grafts joined by +.
        start: starts a conversation.
        conversation: continues a conversation, which the last turn returned.
        answer: answer to the open question; None or blanks decline to answer.
        rules: ask only if rules find an ambiguity.
        max_tokens: maximum number of tokens of a reply of the model.
    """

    model: Name
    start: ConversationStart | None = None
    conversation: dict[str, JsonValue] | None = None
    answer: Annotated[str, Field(max_length=MAX_ANSWER)] | None = None
    rules: bool = False
    max_tokens: int = Field(256, ge=1)

    def _problems(self) -> Iterator[str]:
        if (self.start is None) == (self.conversation is None):
            found = "neither start nor conversation is" if self.start is None else "both start and conversation are"
            yield f"{found} given, but one of them is expected"
        if self.answer is not None and self.conversation is None:
            yield "an answer needs its conversation: send it as the last turn returned it"


def template_list() -> dict[str, object]:
    """Return the response of GET /v1/graftlm/clarify: the templates with their target languages."""
    from graftlm.pipelines import clarify

    templates = [clarify.load_template(name) for name in clarify.template_names()]
    return {
        "object": "list",
        "data": [
            {"name": template.name, "languages": template.languages, "source": template.source}
            for template in templates
        ],
        "most_questions": MAX_QUESTIONS,
    }


def run_turn(service: Service, body: ClarifyBody, client: EngineClient) -> Event:
    """Start or continue a conversation, up to its next question or its end.

    Args:
        service: the service of the model's backbone.
        body: the turn.
        client: generates the replies.

    Returns:
        The conversation as JSON values, which the client sends with its next turn.

    Raises:
        ServingError: the template does not exist or has changed, the conversation is too large or has no open question
            for the answer, or the generation failed.
        GraftError: the conversation is invalid, or its target language is not one of the template's.
    """
    from graftlm.pipelines import clarify
    from graftlm.serving.writers import ClarifyWriter

    conversation = _continued(body) if body.start is None else _started(body.start)
    writer = ClarifyWriter(client, service.tokenizer, body.max_tokens)
    chain = clarify.Chain(writer, detector=clarify.find_ambiguities if body.rules else None)
    return chain.run(conversation).to_json()


def _started(start: ConversationStart) -> Conversation:
    from graftlm.pipelines import clarify

    _check_template(start.template)
    return clarify.Conversation.start(
        start.text,
        start.template,
        start.target,
        budget=start.budget,
        threshold=start.threshold,
    )


def _continued(body: ClarifyBody) -> Conversation:
    """Return the conversation that a client sent, with its answer."""
    from graftlm.pipelines import clarify

    values = body.conversation or {}
    _check_template(values.get("template"))
    if values.get("exemplars") is not None:
        raise ServingError("The server opens no files of exemplars: start a conversation without them.", "conversation")
    conversation = clarify.Conversation.parse(values, where="conversation")
    template = clarify.load_template(conversation.template)
    if template.sha256 != conversation.template_sha256:
        raise ServingError(
            f"The template {conversation.template} has changed since the conversation began: start a new one.",
            "conversation",
        )
    template.target(conversation.target)  # raises if the language is not one of the template's
    if conversation.budget > MAX_QUESTIONS or len(conversation.text) > MAX_QUERY:
        raise ServingError(
            f"The text has {len(conversation.text):,} characters and the budget is {conversation.budget}, but at most "
            f"{MAX_QUERY:,} characters and {MAX_QUESTIONS} questions are accepted: shorten the text, or lower the "
            "budget.",
            "conversation",
        )
    if conversation.step == "answer":
        return conversation.reply(body.answer)
    if body.answer is not None:
        raise ServingError("The conversation has no open question, but an answer was sent: leave it out.", "answer")
    return conversation


def _check_template(name: object) -> None:
    from graftlm.pipelines.clarify import template_names

    known = template_names()
    if name not in known:
        raise ServingError(f"There is no template {str(name)[:100]!r}: use one of {', '.join(known)}.", "template")
