"""Import packages that optional extras install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graftlm.errors import MissingExtraError


def import_extra(extra: str, module: str, purpose: str) -> Any:
    """Import a module that an extra of graftlm installs. Raises MissingExtraError where it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        root = module.split(".")[0]
        if error.name != root:
            raise
        package = "markdown-it-py" if root == "markdown_it" else root.replace("_", "-")
        raise MissingExtraError(package, extra, purpose) from None
