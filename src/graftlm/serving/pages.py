"""The front page's files, read once: no path that a client names is opened."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router(folder: Path = FOLDER) -> APIRouter:
    """A route for each file of the page, with index.html at the root."""
    router = APIRouter(include_in_schema=False)
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.suffix in _TYPES:
            path = file.relative_to(folder).as_posix()
            _add(router, "/" if path == "index.html" else f"/{path}", file.read_bytes(), _TYPES[file.suffix])
    return router


def _add(router: APIRouter, path: str, data: bytes, kind: str) -> None:
    async def give(request: Request) -> Response:
        return Response(data, headers=_HEADERS | {"Content-Type": kind})

    router.add_api_route(path, give, methods=["GET"])
