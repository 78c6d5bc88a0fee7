"""Errors in OpenAI's form, with their HTTP status: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from typing import get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from openai.types.shared import ErrorObject
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from graftlm.config import Config, explain
from graftlm.errors import GraftError
from graftlm.serving.protocol import QueueFullError, ServingError, ShuttingDownError

LOG = logging.getLogger("graftlm.serving")


class ErrorResponse(BaseModel):
    """The body of error responses."""

    error: ErrorObject


def error_body(error: GraftError) -> dict[str, dict[str, str | None]]:
    """Return the JSON object of an error in OpenAI's form.

    An error that is not a `ServingError` is reported as a mistake in the request (`invalid_request_error`).
    """
    known = error if isinstance(error, ServingError) else ServingError()
    return {
        "error": {
            "message": _valid_unicode(str(error)),
            "type": known.kind,
            "param": _valid_unicode(known.param),
            "code": known.code,
        }
    }


def _valid_unicode(text: str | None) -> str | None:
    """Replace unpaired surrogates, which an error may quote from the request."""
    if text is None:
        return None
    return text.encode("utf-8", "replace").decode()


def error_response(error: GraftError) -> JSONResponse:
    """Return the HTTP response of an error; the status is 400 for an error that is not a `ServingError`."""
    status = error.status if isinstance(error, ServingError) else 400
    headers = {}
    if isinstance(error, QueueFullError | ShuttingDownError):
        headers["Retry-After"] = "1"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response of a `GraftError`, a `RequestValidationError` or an `HTTPException`.

    FastAPI calls it with exceptions of these types only.
    """
    if isinstance(error, RequestValidationError):
        return error_response(_invalid_request(request, error))
    if isinstance(error, HTTPException):
        return error_response(_routing_error(request, error))
    assert isinstance(error, GraftError)
    return error_response(error)


def _invalid_request(request: Request, error: RequestValidationError) -> ServingError:
    """Return the error of a body or path parameter that does not fit its schema."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", "")).rstrip(".")
        return ServingError(
            f"The body is not JSON ({reason} at character {first['loc'][-1]}): send a JSON object.",
            code="invalid_json",
        )
    if first["loc"][0] != "body":
        parameter = str(first["loc"][-1])
        return ServingError(f"{parameter}: {first['msg']}.", parameter)
    model: type[Config] | None = get_type_hints(request.scope["endpoint"]).get("body")
    if model is None or not isinstance(error.body, dict):
        return ServingError("The request has no JSON object in its body: send one.")
    return _invalid_body(model, error.body)


def _invalid_body(model: type[Config], body: dict[str, object]) -> ServingError:
    """Validate a body again, for an error with all that `explain` needs."""
    try:
        model.model_validate(body)
    except ValidationError as error:
        problem = max(error.errors(), key=_relevance)
        return ServingError(explain(error, model, "The request"), param=_path(problem))
    return ServingError("The request does not fit its schema: compare it with /openapi.json.")


def _relevance(problem: ErrorDetails) -> tuple[bool, int]:
    """Rank unknown keys first, then the most deeply nested problems, as `explain` does."""
    return problem["type"] == "extra_forbidden", len(problem["loc"])


def _path(problem: ErrorDetails) -> str:
    """Return the key of a problem, such as `messages.0.role`, without pydantic's labels of validators."""
    labels = ("function-", "list[")
    parts = [str(part) for part in problem["loc"]]
    return ".".join(part for part in parts if not part.startswith(labels))


def _routing_error(request: Request, error: HTTPException) -> ServingError:
    path = request.url.path[:200]
    if error.status_code == 404:
        return ServingError(
            f"The path {path} does not exist: see /openapi.json for the available ones.",
            status=404,
            code="unknown_url",
        )
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ServingError(
            f"The path {path} does not support {request.method[:20]}: use {allowed}.",
            status=405,
            code="method_not_allowed",
        )
    return ServingError(
        "The body can't be read as JSON (nested too deeply, a number too large, or not UTF-8): send an object.",
        code="invalid_json",
    )


def internal_error(path: str, error: Exception) -> ServingError:
    """Log an unexpected exception with its traceback, and return the error that clients receive."""
    LOG.error("%s failed", path, exc_info=error)
    return ServingError(
        "The server failed; its log has the details: try again.",
        status=500,
        code="internal_error",
    )
