"""The paths that need an API key, and that a busy or closing server refuses."""

from __future__ import annotations

from starlette.types import Scope

_PROTECTED = ("/v1/", "/metrics/")


def is_protected(scope: Scope) -> bool:
    """Return whether a request is for a path under /v1/ or for /metrics; all other paths are open."""
    path = f"{scope['path']}/"
    return path.startswith(_PROTECTED)
