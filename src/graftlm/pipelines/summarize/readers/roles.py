"""The roles of markup elements: which kind of block an element is, or how it occurs inside a text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from graftlm.config import read_yaml


@cache
def element_roles(markup: str) -> dict[str, Any]:
    """Return the role of each listed element of a markup language, by the name of the element.

    Args:
        markup: a key of `elements.yaml`, such as `html` or `latex_macros`.
    """
    listed = read_yaml(Path(__file__).with_name("elements.yaml"))[markup]
    roles: dict[str, Any] = {}
    for role, names in listed.items():
        if isinstance(names, str):
            names = names.split()
        roles.update(dict.fromkeys(names, role))
    return roles
