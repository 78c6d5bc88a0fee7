"""The routes for the operation of the server: health, version, metrics, and tokens as in vLLM."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from graftlm.serving.openapi import ERRORS
from graftlm.serving.protocol import ServingError
from graftlm.serving.request_parsing import detokenize, tokenize
from graftlm.serving.request_schema import DetokenizeRequest, TokenizeRequest
from graftlm.serving.response_schema import Health
from graftlm.serving.service import Service
from graftlm.version import __version__


def router(service: Service) -> APIRouter:
    """Return the routes /health, /version, /metrics, /tokenize and /detokenize for a service."""
    routes = APIRouter()

    @routes.get("/health", responses={503: {"model": Health}}, summary="Whether the server accepts requests")
    async def health(response: Response) -> Health:
        closing = service.closing.is_set()
        response.status_code = 503 if closing else 200
        stats = service.engine.stats()
        return Health(
            status="closing" if closing else "ready",
            running=stats.running,
            waiting=stats.waiting,
            models=len(service.engine.names),
            broken=sorted(service.store.problems()),
        )

    @routes.post("/tokenize", responses=ERRORS, summary="The tokens of a text or a chat, as in vLLM")
    async def tokens(body: TokenizeRequest) -> dict[str, int | list[int]]:
        member = _service_of(service, body.model)
        ids = await asyncio.to_thread(tokenize, member, body)
        return {"count": len(ids), "max_model_len": member.context, "tokens": ids}

    @routes.post("/detokenize", responses=ERRORS, summary="The text of tokens, as in vLLM")
    async def text(body: DetokenizeRequest) -> dict[str, str]:
        member = _service_of(service, body.model)
        return {"prompt": await asyncio.to_thread(detokenize, member, body)}

    @routes.get("/version", summary="The server's version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes


def _service_of(service: Service, model: str | None) -> Service:
    if model is not None:
        return service.of(model)
    if service.members:
        raise ServingError(
            "The key model is missing, but the backbones of this server may have different tokenizers: set model to "
            f"one of {', '.join(service.members)}.",
            "model",
        )
    return service
