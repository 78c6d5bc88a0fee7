"""The responses that all routes have in common, for the OpenAPI schema."""

from __future__ import annotations

from graftlm.serving.errors import ErrorResponse

Responses = dict[int | str, dict[str, object]]
_DESCRIPTIONS = {
    400: "A value of the request is invalid.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    408: "The request did not arrive in time.",
    413: "The request is too large.",
    415: "The body is not JSON.",
    421: "The Host is not a name of this server.",
    429: "The queue is full.",
    500: "The server failed.",
    501: "The server lacks a package that this route needs.",
    503: "The server is shutting down, or the time limit passed.",
}


def error_responses(*statuses: int) -> Responses:
    """Return the error responses of a route for its OpenAPI schema.

    Args:
        statuses: HTTP statuses from 400 on that this server uses.
    """
    return {status: {"model": ErrorResponse, "description": _DESCRIPTIONS[status]} for status in statuses}


ERRORS = error_responses(400, 401, 404, 408, 413, 415, 421, 429, 500, 503)
"""The errors of all routes."""
STREAM: Responses = {200: {"content": {"text/event-stream": {"schema": {}}}}}
"""A response that may be streamed."""
