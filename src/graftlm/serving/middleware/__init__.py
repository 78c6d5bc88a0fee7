"""ASGI middleware in front of the routes, with one duty per class."""

from __future__ import annotations

from starlette.requests import Request

from graftlm.serving.middleware.api_keys import ApiKeyMiddleware
from graftlm.serving.middleware.body import RequestBodyMiddleware
from graftlm.serving.middleware.content_type import JsonContentMiddleware
from graftlm.serving.middleware.hosts import AllowedHostMiddleware
from graftlm.serving.middleware.internal_errors import InternalErrorMiddleware
from graftlm.serving.middleware.metrics import RequestMetricsMiddleware
from graftlm.serving.middleware.open_requests import OpenRequestsMiddleware
from graftlm.serving.middleware.refusals import RefusalMiddleware
from graftlm.serving.middleware.shutdown import ShutdownMiddleware

__all__ = [
    "AllowedHostMiddleware",
    "ApiKeyMiddleware",
    "InternalErrorMiddleware",
    "JsonContentMiddleware",
    "OpenRequestsMiddleware",
    "RefusalMiddleware",
    "RequestBodyMiddleware",
    "RequestMetricsMiddleware",
    "ShutdownMiddleware",
    "user_of",
]


def user_of(request: Request) -> str:
    """Return the name of the request's API key, as `ApiKeyMiddleware` stored it.

    If the server has no keys, it is the client's address; for a path that is not protected, it is empty.
    """
    return getattr(request.state, "user", "")
