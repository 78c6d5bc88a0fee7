"""Errors in the form that OpenAI's clients know, each with its status: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from graftlm.config import Config, explain
from graftlm.errors import GraftError
from graftlm.serving.protocol import BusyError, ClosingError, ServingError

BODY = "The request"
LOG = logging.getLogger("graftlm.serving")


class RefusedError(ServingError):
    """What a request says does not fit.

    Args:
        message: one sentence.
        param: the key of the request that is meant.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedError(RefusedError):
    """A key of OpenAI's protocol that is not implemented here."""

    code = "unsupported_parameter"


class UnreadableError(ServingError):
    """The body is not JSON."""

    code = "invalid_json"


class UnknownKeyError(ServingError):
    """The API key is missing or wrong."""

    status, code = 401, "invalid_api_key"


class UnknownPathError(ServingError):
    """Nothing answers at this path."""

    status, code = 404, "unknown_url"


class WrongMethodError(ServingError):
    """The path answers to another method."""

    status, code = 405, "method_not_allowed"


class TooSlowError(ServingError):
    """The body did not arrive in time."""

    status, code = 408, "request_timeout"


class TooLargeError(ServingError):
    """The body is larger than the server takes."""

    status, code = 413, "request_too_large"


class NotJsonError(ServingError):
    """The body says that it is something else than JSON."""

    status, code = 415, "unsupported_media_type"


class UnknownHostError(ServingError):
    """The request calls the server by a name that is not its own."""

    status, code = 421, "unknown_host"


class BrokenError(ServingError):
    """A mistake of ours."""

    status, kind, code = 500, "server_error", "internal_error"


class TimedOutError(ServingError):
    """The time of a request ended before anything was written."""

    status, kind, code = 503, "server_error", "timed_out"


def error_body(error: GraftError) -> dict[str, Any]:
    """As JSON. What is no `ServingError` is a mistake of the request that a model found."""
    known = error if isinstance(error, ServingError) else ServingError()
    said = {"message": str(error), "type": known.kind, "param": getattr(error, "param", None), "code": known.code}
    return {"error": {key: _unicode(value) for key, value in said.items()}}


def _unicode(text: str | None) -> str | None:
    """Text that can be sent: a request may hold halves of surrogate pairs, and an error shows what it holds."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def error_response(error: GraftError) -> JSONResponse:
    """As an answer."""
    status = error.status if isinstance(error, ServingError) else 400
    headers = {"Retry-After": "1"} if isinstance(error, BusyError | ClosingError) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def handle_errors(app: FastAPI) -> None:
    """Let an app's errors leave it in this form; of mistakes of ours the guard makes answers."""
    app.add_exception_handler(GraftError, _on_graft_error)
    app.add_exception_handler(RequestValidationError, _on_misfit)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_graft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GraftError)
    return error_response(error)


async def _on_misfit(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(_misfit(request, error))


def _misfit(request: Request, error: RequestValidationError) -> ServingError:
    """One sentence about a body, or a part of the address, that does not fit its schema."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        why = str(first.get("ctx", {}).get("error", "")).rstrip(".")
        return UnreadableError(f"The body is not JSON ({why} at character {first['loc'][-1]}): send a JSON object.")
    if first["loc"][0] != "body":
        return RefusedError(f"{first['loc'][-1]}: {first['msg']}.", str(first["loc"][-1]))
    model = get_type_hints(request.scope["endpoint"]).get("body")
    if model is None or not isinstance(error.body, dict):
        return RefusedError("The request has no JSON object in its body: send one.")
    return _explained(model, error.body)


def _explained(model: type[Config], values: dict[str, Any]) -> ServingError:
    try:
        model.model_validate(values)
    except ValidationError as error:
        problem = max(error.errors(), key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
        param = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("function-", "list[")))
        missing = isinstance(problem.get("ctx", {}).get("error"), NotHere)
        return (UnsupportedError if missing else RefusedError)(explain(error, model, BODY), param)
    return RefusedError("The request does not fit its schema: compare it with /openapi.json.")


class NotHere(ValueError):  # noqa: N818  # pydantic's validators raise values' errors
    """A key that OpenAI has and this server has not."""


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(_plain(request, error))


def _plain(request: Request, error: HTTPException) -> ServingError:
    if error.status_code == 404:
        return UnknownPathError(f"Nothing answers at {request.url.path[:200]}: see /openapi.json for what there is.")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return WrongMethodError(f"{request.url.path[:200]} does not answer {request.method[:20]}: use {allowed}.")
    return UnreadableError(
        "The body can't be read as JSON (too deep, too large a number, or no UTF-8): send an object."
    )


def our_mistake(path: str, error: Exception) -> ServingError:
    """What clients hear of a mistake of ours: the log says more."""
    LOG.error("%s failed", path, exc_info=error)
    return BrokenError("Something broke in the server, whose log says what: try again.")
