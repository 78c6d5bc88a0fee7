"""The routes under /v1/graftlm/: what grafts are and measured, clarifying turns, summaries with their sources.

Texts travel in bodies, state travels as the pipeline's own JSON; no name that a client gives is ever opened as a file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field, JsonValue, model_validator

from graftlm.config import Config
from graftlm.errors import DataError, GraftError, MissingExtraError
from graftlm.pipelines import clarify as asking
from graftlm.pipelines import summarize as summing
from graftlm.pipelines.summarize.writer import read_layout
from graftlm.serving.errors import RefusedError
from graftlm.serving.protocol import BusyError, ServingError, UnknownModelError
from graftlm.serving.reports import Overview, Report, overview, report_of
from graftlm.serving.service import Service, user_of
from graftlm.serving.streams import unless_gone
from graftlm.serving.writers import ClarifyWriter, Errand, SummaryWriter

MOST_TEXT = 400_000  # characters to summarise: some seconds of one core
MOST_QUERY = 20_000  # characters to clarify
MOST_QUESTIONS = 5
MOST_TURNS, MOST_SUMMARIES = 64, 16  # requests at a time, waiting ones included
SUFFIXES = {"text": ".txt", "markdown": ".md", "html": ".html", "latex": ".tex"}

T = TypeVar("T")


class NotInstalledError(ServingError):
    """The server lacks a package that this needs."""

    status, kind, code = 501, "server_error", "not_installed"


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a pair of surrogates stands alone at character {error.start}") from None
    return text


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    _encodable(json.dumps(values, ensure_ascii=False))
    return values


Text = Annotated[str, AfterValidator(_encodable)]
Name = Annotated[Text, Field(min_length=1, max_length=500)]


class Start(Config):
    """What a conversation begins with.

    Args:
        text: the query.
        template: the name of one that comes with GraftLM.
        target: code of the language to write in; not needed where the template has one alone.
        budget: questions at most.
        threshold: bits that a question must be expected to bring; None puts every question.
    """

    text: Text = Field(max_length=MOST_QUERY)
    template: Name = "translate"
    target: Name | None = None
    budget: int = Field(1, ge=0, le=MOST_QUESTIONS)
    threshold: float | None = Field(None, ge=0, le=1000)


class ClarifyBody(Config):
    """One turn: the beginning of a conversation, or the answer to its open question.

    Args:
        model: who asks and writes: the backbone, a graft, or several joined by +.
        start: begins a conversation.
        conversation: goes on with one, as the last turn gave it.
        answer: to its open question; None or blanks refuse to answer.
        rules: ask only where rules find something ambiguous.
        max_tokens: of each reply of the model.
    """

    model: Name
    start: Start | None = None
    conversation: Annotated[dict[str, JsonValue], AfterValidator(_plain)] | None = None
    answer: Annotated[Text, Field(max_length=2000)] | None = None
    rules: bool = False
    max_tokens: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> ClarifyBody:
        if (self.start is None) == (self.conversation is None):
            raise ValueError("either start or conversation is expected, and not both")
        if self.answer is not None and self.conversation is None:
            raise ValueError("an answer belongs to a conversation: send it, as the last turn gave it")
        return self


class SummarizeBody(Config):
    """A text to summarise.

    Args:
        text: itself; never a path.
        format: how to read it.
        sentences: of the extract, at most.
        language: a code such as de; None tells it by the script, and takes Latin script for English.
        model: who writes the summary from the extract; None lets the extract be the summary.
        max_tokens: that it writes, at most.
    """

    text: Text = Field(max_length=MOST_TEXT)
    format: Literal["text", "markdown", "html", "latex"] = "text"
    sentences: int = Field(5, ge=1, le=1000)
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] | None = None
    model: Name | None = None
    max_tokens: int = Field(160, ge=1)


def router(service: Service) -> APIRouter:
    """The routes for what a server serves."""
    routes = APIRouter(prefix="/v1/graftlm", tags=["graftlm"])
    turns, summaries = _Workers(16, MOST_TURNS), _Workers(2, MOST_SUMMARIES)

    @routes.get("/grafts")
    def grafts() -> Overview:
        """What is served, and what each graft learned and forgot."""
        return overview(service)

    @routes.get("/grafts/{name}/report")
    def report(name: str) -> Report:
        """Everything that was measured of a graft."""
        for entry in service.shelf.entries():
            if entry.name == name:
                return report_of(entry)
        known = ", ".join(entry.name for entry in service.shelf.entries()) or "none"
        raise UnknownModelError(f"There is no graft {name[:100]!r}: name one that is served ({known}).")

    @routes.get("/clarify")
    def tasks() -> dict[str, Any]:
        """The templates of clarifying conversations, with the languages that each writes."""
        found = [asking.load_template(name) for name in asking.template_names()]
        data = [{"name": one.name, "languages": one.languages, "source": one.source} for one in found]
        return {"object": "list", "data": data, "most_questions": MOST_QUESTIONS}

    @routes.post("/clarify")
    async def clarify(body: ClarifyBody, request: Request) -> dict[str, Any]:
        """Begin a conversation, or go on with one, up to its next question or its end."""
        service.check_model(body.model)
        errand = Errand(service.engine, body.model, user_of(request))
        return await turns.run(request, errand, lambda: _turn(service, body, errand))

    @routes.post("/summarize")
    async def summarize(body: SummarizeBody, request: Request) -> dict[str, Any]:
        """Summarise a text, with the characters that each sentence stands at."""
        if body.model is not None:
            service.check_model(body.model)
        errand = Errand(service.engine, body.model or "", user_of(request))
        return await summaries.run(request, errand, lambda: _summary(service, body, errand))

    return routes


class _Workers:
    """Threads for what takes long and waits for the engine.

    Args:
        threads: that work at a time.
        most: requests that are taken on, waiting ones included.
    """

    def __init__(self, threads: int, most: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="graftlm-pipelines")
        self._most, self._open = most, 0

    async def run(self, request: Request, errand: Errand, work: Callable[[], T]) -> T:
        """The result of `work`; when the client leaves, its errand ends.

        Raises:
            BusyError: too many wait already.
            ClientLeftError: the client did.
            GraftError: the work's own.
        """
        if self._open >= self._most:
            raise BusyError(f"{self._open} such requests are under way, which is the most: try again in a moment.")
        self._open += 1
        try:
            return await unless_gone(request, self._work(work))
        except MissingExtraError as error:
            raise NotInstalledError(str(error)) from None
        finally:
            errand.leave()
            self._open -= 1

    async def _work(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _turn(service: Service, body: ClarifyBody, errand: Errand) -> dict[str, Any]:
    conversation = _begun(body.start) if body.start is not None else _continued(body)
    writer = ClarifyWriter(errand, service.prompts, body.max_tokens)
    chain = asking.Chain(writer, detector=asking.first_pass if body.rules else None)
    return asking.document(chain.run(conversation))


def _begun(start: Start) -> asking.Conversation:
    _check_template(start.template)
    return asking.Conversation.start(
        start.text, start.template, start.target, budget=start.budget, threshold=start.threshold
    )


def _continued(body: ClarifyBody) -> asking.Conversation:
    """The conversation that a client sends back, with its answer."""
    values = body.conversation or {}
    _check_template(values.get("template"))
    found = asking.Conversation.parse(values, where="conversation")
    _check_conversation(found)
    if found.step == "answer":
        return found.reply(body.answer)
    if body.answer is not None:
        raise RefusedError("The conversation has no open question, so there is nothing to answer.", "answer")
    return found


def _check_template(name: object) -> None:
    """Refuse what is not the name of a template of ours: the pipeline would take a path of a file as well."""
    if name not in asking.template_names():
        known = ", ".join(asking.template_names())
        raise RefusedError(f"There is no template {str(name)[:100]!r}: name one of {known}.", "template")


def _check_conversation(found: asking.Conversation) -> None:
    template = asking.load_template(found.template)
    if template.sha256 != found.template_sha256:
        raise RefusedError(
            f"The template {found.template} was changed since the conversation began: begin anew.", "conversation"
        )
    template.target(found.target)
    if found.budget > MOST_QUESTIONS or len(found.text) > MOST_QUERY:
        raise RefusedError(
            f"The conversation is larger than this server takes on: {MOST_QUERY:,} characters and {MOST_QUESTIONS} "
            "questions at most.",
            "conversation",
        )


def _summary(service: Service, body: SummarizeBody, errand: Errand) -> dict[str, Any]:
    document = _document(body)
    writer = None if body.model is None else _writer(service, body, errand)
    budget = summing.Budget(amount=body.sentences)
    return summing.summarize(document, writer=writer, budget=budget).to_json() | {"format": body.format}


def _document(body: SummarizeBody) -> summing.SourceDocument:
    try:
        return summing.read_text(body.text, SUFFIXES[body.format], language=body.language)
    except RecursionError:
        raise DataError(f"The text is nested too deeply to be read as {body.format}: send it as text.") from None
    except (GraftError, MemoryError):
        raise
    except Exception as error:  # parsers of other libraries raise many kinds
        raise DataError(
            f"The text can't be read as {body.format} ({type(error).__name__}): send it as text."
        ) from error


def _writer(service: Service, body: SummarizeBody, errand: Errand) -> SummaryWriter:
    known = {entry.name: entry.folder for entry in service.shelf.entries()}
    layout = read_layout(known[errand.model]) if errand.model in known else None
    return SummaryWriter(errand, service.prompts, service.context, body.max_tokens, layout)
