"""Errors in OpenAI's form, each with its HTTP status: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from openai.types.shared import ErrorObject
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from graftlm.config import Config, explain
from graftlm.errors import GraftError
from graftlm.serving.protocol import QueueFullError, ServingError, ShuttingDownError

LOG = logging.getLogger("graftlm.serving")


class UnsupportedValueError(ValueError):
    """A key of OpenAI's protocol that this server does not implement; validators of pydantic raise ValueErrors."""


class ErrorResponse(BaseModel):
    """The body of every response whose status is not 200."""

    error: ErrorObject


def error_body(error: GraftError) -> dict[str, Any]:
    """The JSON object of an error. An error that is no `ServingError` is a mistake in the request."""
    known = error if isinstance(error, ServingError) else ServingError()
    values = {"message": str(error), "type": known.kind, "param": known.param, "code": known.code}
    # An error quotes the request, which may have unpaired surrogates.
    return {"error": {key: value and value.encode("utf-8", "replace").decode() for key, value in values.items()}}


def error_response(error: GraftError) -> JSONResponse:
    """The HTTP response of an error."""
    status = error.status if isinstance(error, ServingError) else 400
    headers = {"Retry-After": "1"} if isinstance(error, QueueFullError | ShuttingDownError) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """The response of a `GraftError`, a body that does not fit, or a path that is not there."""
    if isinstance(error, RequestValidationError):
        error = _invalid(request, error)
    elif isinstance(error, HTTPException):
        error = _routing_error(request, error)
    assert isinstance(error, GraftError)
    return error_response(error)


def _invalid(request: Request, error: RequestValidationError) -> ServingError:
    """The error of a body or path parameter that does not fit its schema."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        why = str(first.get("ctx", {}).get("error", "")).rstrip(".")
        return ServingError(
            f"The body is not JSON ({why} at character {first['loc'][-1]}): send a JSON object.", code="invalid_json"
        )
    if first["loc"][0] != "body":
        return ServingError(f"{first['loc'][-1]}: {first['msg']}.", str(first["loc"][-1]))
    model: type[Config] | None = get_type_hints(request.scope["endpoint"]).get("body")
    if model is None or not isinstance(error.body, dict):
        return ServingError("The request has no JSON object in its body: send one.")
    try:
        model.model_validate(error.body)
    except ValidationError as refusal:
        problem = max(refusal.errors(), key=lambda item: (item["type"] == "extra_forbidden", len(item["loc"])))
        param = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("function-", "list[")))
        unsupported = isinstance(problem.get("ctx", {}).get("error"), UnsupportedValueError)
        code = "unsupported_parameter" if unsupported else None
        own = getattr(model, "own_keys", lambda text, body: text)
        return ServingError(own(explain(refusal, model, "The request"), error.body), own(param, error.body), code=code)
    return ServingError("The request does not fit its schema: compare it with /openapi.json.")


def _routing_error(request: Request, error: HTTPException) -> ServingError:
    path = request.url.path[:200]
    if error.status_code == 404:
        message = f"Nothing answers at {path}: see /openapi.json for what there is."
        return ServingError(message, status=404, code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} does not answer {request.method[:20]}: use {allowed}."
        return ServingError(message, status=405, code="method_not_allowed")
    message = "The body can't be read as JSON (too deep, too large a number, or no UTF-8): send an object."
    return ServingError(message, code="invalid_json")


def internal_error(path: str, error: Exception) -> ServingError:
    """The error that clients receive for an unexpected exception; the log has the traceback."""
    LOG.error("%s failed", path, exc_info=error)
    message = "Something broke in the server, whose log says what: try again."
    return ServingError(message, status=500, code="internal_error")
