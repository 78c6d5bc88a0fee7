"""The routes under /v1/graftlm/: grafts and their reports, clarifying conversations, summaries, predictions.

Texts and states travel in request bodies. No name that a client sends is opened as a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import Base64Bytes, Field, JsonValue

from graftlm.config import Config
from graftlm.errors import DataError, GraftError, MissingExtraError
from graftlm.serving.clients import EngineClient, OnEvent
from graftlm.serving.middleware import user_of
from graftlm.serving.predicting import PredictBody, PredictionEngine, predictions
from graftlm.serving.protocol import QueueFullError, ServingError, UnknownModelError
from graftlm.serving.reports import GraftReport, ServedModels, graft_report, served_models
from graftlm.serving.requests import RequestBody, service_of
from graftlm.serving.responses import EventStream, as_event, run_until_disconnect
from graftlm.serving.service import Service

if TYPE_CHECKING:
    from graftlm.pipelines.clarify import Conversation
    from graftlm.pipelines.summarize import SourceDocument

MAX_TEXT = 400_000  # characters of a text to summarize; they take some seconds on one core
MAX_QUERY = 20_000  # characters of a text to clarify
MAX_ANSWER = 2000  # characters of an answer to a question
MAX_QUESTIONS, MAX_SENTENCES = 5, 1000
MAX_CONVERSATIONS, MAX_SUMMARIES = 64, 16  # requests at a time, waiting ones included
_LIMITS = {"text": MAX_TEXT, "query": MAX_QUERY, "answer": MAX_ANSWER}
_LIMITS |= {"questions": MAX_QUESTIONS, "sentences": MAX_SENTENCES}
_SUFFIXES = {"text": ".txt", "markdown": ".md", "html": ".html", "latex": ".tex"}

_T = TypeVar("_T")


Name = Annotated[str, Field(min_length=1, max_length=500)]


class ConversationStart(Config):
    """The start of a conversation.

    Args:
        text: the text to clarify.
        template: name of a template that comes with GraftLM.
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
        conversation: continues a conversation; as the last turn returned it.
        answer: to the open question; None or blanks decline to answer.
        rules: ask only if rules find an ambiguity.
        max_tokens: of each reply of the model.
    """

    model: Name
    start: ConversationStart | None = None
    conversation: dict[str, JsonValue] | None = None
    answer: Annotated[str, Field(max_length=MAX_ANSWER)] | None = None
    rules: bool = False
    max_tokens: int = Field(256, ge=1)

    def _problems(self) -> Iterator[str]:
        if (self.start is None) == (self.conversation is None):
            yield "either start or conversation is expected, and not both"
        if self.answer is not None and self.conversation is None:
            yield "an answer belongs to a conversation: send it, as the last turn gave it"


class SummarizeBody(Config):
    """A text or a PDF file to summarize.

    Args:
        text: the text itself, not a path.
        pdf: in place of a text: the bytes of a PDF file, in base64.
        format: format of the text.
        sentences: maximum number of sentences of the extract.
        language: a code such as de; None detects it by the script, and takes Latin script for English.
        model: writes the summary from the extract; with None the extract is the summary.
        max_tokens: maximum tokens of a written summary.
        stream: sends events: the extract, the pieces of a written text, and at last the whole.
    """

    text: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    pdf: Base64Bytes | None = None
    format: Literal["text", "markdown", "html", "latex"] = "text"
    sentences: int = Field(5, ge=1, le=MAX_SENTENCES)
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] | None = None
    model: Name | None = None
    max_tokens: int = Field(160, ge=1)
    stream: bool = False

    def _problems(self) -> Iterator[str]:
        if (self.text is None) == (self.pdf is None):
            yield "either text or pdf is expected, and not both"


def router(service: Service) -> APIRouter:
    """The routes of a service."""
    routes = APIRouter(prefix="/v1/graftlm", tags=["graftlm"])
    conversations, summaries = PipelineWorkers(16, MAX_CONVERSATIONS), PipelineWorkers(2, MAX_SUMMARIES)

    @routes.get("/grafts")
    def grafts() -> ServedModels:
        """The backbone and the grafts, with what each graft learned and forgot."""
        return served_models(service, _LIMITS)

    @routes.get("/grafts/{name}/report")
    def report(name: str) -> GraftReport:
        """All measurements of a graft."""
        entries = service.store.entries()
        if name not in entries:
            known = ", ".join(entries) or "none"
            raise UnknownModelError(f"There is no graft {name[:100]!r}: name one that is served ({known}).")
        return graft_report(entries[name])

    @routes.get("/clarify")
    def templates() -> dict[str, Any]:
        """The templates of clarifying conversations, with their target languages."""
        from graftlm.pipelines import clarify

        loaded = [clarify.load_template(name) for name in clarify.template_names()]
        data = [{"name": item.name, "languages": item.languages, "source": item.source} for item in loaded]
        return {"object": "list", "data": data, "most_questions": MAX_QUESTIONS}

    @routes.post("/clarify")
    async def clarify_turn(body: ClarifyBody, request: Request) -> dict[str, Any]:
        """Start or continue a conversation, up to its next question or its end."""
        own = service_of(service, body.model)
        client = EngineClient(own.engine, body.model, user_of(request))
        return await conversations.run(request, client, partial(_run_turn, own, body, client))

    @routes.post("/summarize", response_model=dict[str, Any])
    async def summary(body: SummarizeBody, request: Request) -> Any:
        """Summarize a text or a PDF file, with the character range of each extracted sentence."""
        own = service if body.model is None else service_of(service, body.model)
        client = EngineClient(own.engine, body.model or "", user_of(request))
        work = partial(_summarize, own, body, client)
        if body.stream:
            return summaries.stream(client, work, service.settings.send_seconds)
        return await summaries.run(request, client, partial(work, lambda event: None))

    @routes.post("/predict")
    async def predict(body: PredictBody, request: Request) -> dict[str, Any]:
        """Predictions of a graft's heads for rows of any of its tasks, in their order."""
        own, data = service_of(service, body.model), []
        if not isinstance(engine := own.engine, PredictionEngine):
            raise ServingError(f"{own.name} is served to write text: serve an encoder's graft to predict.", "model")
        rows = await asyncio.to_thread(lambda: list(engine.requests(body, service.store.entries(), user_of(request))))
        for first in range(0, len(rows), size := own.limits.batch_size):  # more would fill the queue
            stream = engine.submit(rows[first : first + size])
            try:
                data += await run_until_disconnect(request, predictions(stream))
            finally:
                stream.cancel()
        return {"object": "list", "model": body.model, "data": data}

    return routes


class PipelineWorkers:
    """Threads for pipelines, which take long and wait for the engine; `max_open` counts waiting requests too."""

    def __init__(self, threads: int, max_open: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="graftlm-pipelines")
        self._max_open, self._open = max_open, set[Any]()

    def _start(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        if (count := len(self._open)) >= self._max_open:
            raise QueueFullError(f"{count} such requests are under way, which is the most: try again in a moment.")
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    async def run(self, request: Request, client: EngineClient, work: Callable[[], _T]) -> _T:
        """The result of `work`; the client disconnects from the engine at the end."""
        try:
            return await run_until_disconnect(request, self._start(work))
        except MissingExtraError as error:
            raise ServingError(str(error), status=501, code="not_installed") from None
        finally:
            client.disconnect()

    def stream(self, client: EngineClient, work: Callable[[OnEvent], dict[str, Any]], seconds: float) -> EventStream:
        """What `work` calls its argument with, and its result last, as events of a stream as of `EventStream`."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        result = self._start(partial(work, partial(loop.call_soon_threadsafe, queue.put_nowait)))
        result.add_done_callback(queue.put_nowait)

        async def events() -> AsyncGenerator[str, None]:
            while (event := await queue.get()) is not result:
                yield as_event(event)
            yield as_event(await result)

        return EventStream(events(), seconds, lambda: (result.cancel(), client.disconnect()))


def _run_turn(service: Service, body: ClarifyBody, client: EngineClient) -> dict[str, Any]:
    from graftlm.pipelines import clarify
    from graftlm.serving.writers import ClarifyWriter

    if (start := body.start) is None:
        conversation = _continued(body)
    else:
        _check_template(start.template)
        limits = {"budget": start.budget, "threshold": start.threshold}
        conversation = clarify.Conversation.start(start.text, start.template, start.target, **limits)
    writer = ClarifyWriter(client, service.tokenizer, body.max_tokens)
    chain = clarify.Chain(writer, detector=clarify.find_ambiguities if body.rules else None)
    return chain.run(conversation).to_json()


def _continued(body: ClarifyBody) -> Conversation:
    """The conversation that a client sent, with its answer."""
    from graftlm.pipelines import clarify

    values = body.conversation or {}
    _check_template(values.get("template"))
    conversation = clarify.Conversation.parse(values, where="conversation")
    template = clarify.load_template(conversation.template)
    if template.sha256 != conversation.template_sha256:
        why = f"The template {conversation.template} was changed since the conversation began: begin anew."
        raise ServingError(why, "conversation")
    template.target(conversation.target)
    if conversation.budget > MAX_QUESTIONS or len(conversation.text) > MAX_QUERY:
        most = f"{MAX_QUERY:,} characters and {MAX_QUESTIONS} questions at most"
        raise ServingError(f"The conversation is larger than this server takes on: {most}.", "conversation")
    if conversation.step == "answer":
        return conversation.reply(body.answer)
    if body.answer is not None:
        raise ServingError("The conversation has no open question, so there is nothing to answer.", "answer")
    return conversation


def _check_template(name: object) -> None:
    """Accept only the names of GraftLM's templates: the pipeline would open any other name as a file."""
    from graftlm.pipelines.clarify import template_names

    if name not in template_names():
        why = f"There is no template {str(name)[:100]!r}: name one of {', '.join(template_names())}."
        raise ServingError(why, "template")


def _summarize(service: Service, body: SummarizeBody, client: EngineClient, on_event: OnEvent) -> dict[str, Any]:
    from graftlm.pipelines import summarize
    from graftlm.pipelines.summarize.prompt_layout import read_layout
    from graftlm.serving.writers import SummaryWriter

    document, writer = _read_document(body), None
    source = {"format": body.format} if body.pdf is None else {"format": "pdf", "pages": document.pages}
    if body.model is not None:
        entry = service.store.entries().get(body.model)
        layout = read_layout(entry.folder) if entry is not None else None
        writer = SummaryWriter(client, service.tokenizer, service.context, body.max_tokens, layout, on_event)
    on_event(source)
    budget = summarize.Budget(amount=body.sentences)
    return summarize.summarize(document, writer=writer, budget=budget).to_json() | source


def _read_document(body: SummarizeBody) -> SourceDocument:
    from graftlm.pipelines.summarize import read_foreign_pdf, read_text

    try:
        if body.pdf is not None:
            return read_foreign_pdf(body.pdf, "The PDF file", MAX_TEXT, body.language)
        return read_text(body.text or "", _SUFFIXES[body.format], language=body.language)
    except RecursionError:
        raise DataError(f"The text is nested too deeply to be read as {body.format}: send its text.") from None
    except (GraftError, MemoryError):
        raise
    except Exception as error:  # each parser raises its own exceptions
        raise DataError(f"The text can't be read as {body.format} ({type(error).__name__}): send its text.") from error
