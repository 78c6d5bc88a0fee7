"""Import packages that optional extras install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graftlm.errors import MissingExtraError

_PACKAGES = {"markdown_it": "markdown-it-py"}
"""Packages whose name differs from that of their module by more than a hyphen."""


def import_extra(extra: str, module: str, purpose: str) -> Any:
    """Import a module that an extra of graftlm installs.

    Args:
        extra: name of the extra.
        module: dotted name of the module.
        purpose: what needs the module, as the subject of a sentence.

    Returns:
        The module.

    Raises:
        MissingExtraError: the package is not installed.
        ModuleNotFoundError: the package is installed, but lacks the module or a dependency.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        root = module.split(".")[0]
        if error.name != root:
            raise
        package = _PACKAGES.get(root, root.replace("_", "-"))
        raise MissingExtraError(package, extra, purpose) from None
