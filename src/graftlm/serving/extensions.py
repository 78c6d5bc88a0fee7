"""The routes under /v1/graftlm/: grafts and their reports, clarifying conversations, summaries, predictions.

Texts and states travel in request bodies. No name from a client is opened as a file.
"""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Request, Response

from graftlm.serving import clarification, summarization
from graftlm.serving.clarification import ClarifyBody
from graftlm.serving.clients import EngineClient, Event
from graftlm.serving.middleware import user_of
from graftlm.serving.openapi import ERRORS, error_responses
from graftlm.serving.pipeline_workers import PipelineWorkers
from graftlm.serving.prediction import PredictBody, PredictionEngine, predictions
from graftlm.serving.protocol import ServingError, UnknownModelError
from graftlm.serving.reports import GraftReport, ServedModels, graft_report, served_models
from graftlm.serving.service import Service
from graftlm.serving.streaming import run_until_disconnect
from graftlm.serving.summarization import SummarizeBody

SUMMARIZE_PATH = "/v1/graftlm/summarize"
MAX_CONVERSATIONS = 64  # maximum number at the same time, including waiting ones
MAX_SUMMARIES = 16
_LIMITS = {
    "text": summarization.MAX_TEXT,
    "query": clarification.MAX_QUERY,
    "answer": clarification.MAX_ANSWER,
    "questions": clarification.MAX_QUESTIONS,
    "sentences": summarization.MAX_SENTENCES,
}


def router(service: Service) -> APIRouter:
    """Return the routes under /v1/graftlm/ for a service, and start the threads of its pipelines."""
    routes = APIRouter(
        prefix="/v1/graftlm",
        tags=["graftlm"],
        responses=ERRORS | error_responses(501),
    )
    conversations = PipelineWorkers(threads=16, max_open=MAX_CONVERSATIONS)
    summaries = PipelineWorkers(threads=2, max_open=MAX_SUMMARIES)

    @routes.get("/grafts")
    def grafts() -> ServedModels:
        """Return the backbones and the grafts, with learning and forgetting of each graft."""
        return served_models(service, _LIMITS)

    @routes.get("/grafts/{name}/report")
    def report(name: str) -> GraftReport:
        """Return all measurements of a graft."""
        entries = service.store.entries()
        if name not in entries:
            remedy = f"use one of {', '.join(entries)}" if entries else "this server has none; serve one with --graft"
            raise UnknownModelError(f"There is no graft {name[:100]!r}: {remedy}.")
        return graft_report(entries[name])

    @routes.get("/clarify")
    def templates() -> dict[str, object]:
        """Return the templates of clarifying conversations, with their target languages."""
        return clarification.template_list()

    @routes.post("/clarify")
    async def clarify_turn(body: ClarifyBody, request: Request) -> Event:
        """Start or continue a conversation, up to its next question or its end."""
        member = service.of(body.model)
        client = EngineClient(member.engine, body.model, user_of(request))
        return await conversations.run(request, client, partial(clarification.run_turn, member, body, client))

    @routes.post("/summarize", response_model=Event)
    async def summary(body: SummarizeBody, request: Request) -> Event | Response:
        """Summarize a text or a PDF file, with the character range of each extracted sentence."""
        member = service if body.model is None else service.of(body.model)
        client = EngineClient(member.engine, body.model or "", user_of(request))
        work = partial(summarization.summarize, member, body, client)
        if body.stream:
            return summaries.stream(client, work, service.settings.send_seconds)
        return await summaries.run(request, client, partial(work, _ignore))

    @routes.post("/predict")
    async def predict(body: PredictBody, request: Request) -> dict[str, object]:
        """Return predictions of a graft's heads for rows of any of its tasks, in their order."""
        return await _predict(service, body, request)

    return routes


def _ignore(event: Event) -> None:
    """Discard the events of a response that is not streamed."""


async def _predict(service: Service, body: PredictBody, request: Request) -> dict[str, object]:
    member = service.of(body.model)
    engine = member.engine
    if not isinstance(engine, PredictionEngine):
        raise ServingError(
            f"{member.name} generates text and can't predict: serve a graft of an encoder for predictions.", "model"
        )
    entries = service.store.entries()
    rows = await asyncio.to_thread(lambda: list(engine.requests(body, entries, user_of(request))))
    data: list[dict[str, object]] = []
    batch_size = member.limits.batch_size
    for first in range(0, len(rows), batch_size):  # all at once may not fit into the queue
        stream = engine.submit(rows[first : first + batch_size])
        try:
            data += await run_until_disconnect(request, predictions(stream))
        finally:
            stream.cancel()
    return {"object": "list", "model": body.model, "data": data}
