"""The routes for the operation of the server: health and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from graftlm.serving.response_schema import Health
from graftlm.serving.service import Service


def router(service: Service) -> APIRouter:
    """Return the routes /health and /metrics for a service."""
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

    @routes.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return routes
