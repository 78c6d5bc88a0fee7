"""Fills pages with what the code knows best: the keys of a recipe come from the classes that read it."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from graftlm.config import Config

_MARK = re.compile(r"<!-- keys of ([\w.]+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- keys of module.Class -->` by a table of that config's keys; mkdocs calls this for every page."""
    return _MARK.sub(lambda mark: _table(mark.group(1)), markdown)


def _table(name: str) -> str:
    module, _, class_name = name.rpartition(".")
    config = getattr(__import__(module, fromlist=[class_name]), class_name)
    assert issubclass(config, Config), f"{name} is not a config"
    rows = [_row(key, field) for key, field in config.model_fields.items()]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])


def _row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
    cells = [f"`{key}`", _words(field.annotation), default, field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    if value is None or isinstance(value, Config) or value in ([], {}, ""):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value
    return f"`{shown}`"


def _words(annotation: Any) -> str:
    """What a value may be, in words for readers of YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_words(one) for one in arguments if one is not NoneType)
    if origin is list:
        return f"list of {_words(arguments[0])}s"
    if origin is tuple:
        return f"list of {len(arguments)} {_words(arguments[0])}s"
    if origin is dict:
        return f"mapping to {_words(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation.__name__.removesuffix("Config").lower()
    return {str: "text", int: "number", float: "number", bool: "`true`, `false`"}.get(annotation, "any value")
