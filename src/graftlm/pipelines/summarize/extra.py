"""Libraries of the extra `summarize`, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graftlm.errors import MissingExtraError

_PACKAGES = {
    "markdown_it": "markdown-it-py",
    "rouge_score": "rouge-score",
}


def need(module: str, purpose: str) -> Any:
    """A module of the extra, as `markdown_it` or `sumy.summarizers.lex_rank`.

    Raises:
        MissingExtraError: its package is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        root = module.split(".")[0]
        if error.name != root:
            raise
        raise MissingExtraError(_PACKAGES.get(root, root), "summarize", purpose) from None
