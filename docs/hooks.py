"""Fills placeholders of pages with tables that are generated from the code.

<!-- keys of module.Class -->   the keys of a config
<!-- verbs -->                  the verbs of `graft`
<!-- grafts -->                 the kinds of grafts
<!-- extras -->                 the extras of the package
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from graftlm.config import Config

_PLACEHOLDER = re.compile(r"<!-- (keys of (?P<config>[\w.]+)|verbs|grafts|extras) -->")


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Replace the placeholders of a page; mkdocs calls this function for every page."""
    folder = posixpath.dirname(page.file.src_uri) if page is not None else ""

    def fill(placeholder: re.Match[str]) -> str:
        if placeholder["config"]:
            return _keys(placeholder["config"])
        return {"verbs": _verbs, "grafts": _grafts, "extras": _extras}[placeholder[1]](folder)

    return _PLACEHOLDER.sub(fill, markdown)


def _verbs(folder: str) -> str:
    import typer.main

    from graftlm.cli import app

    page = posixpath.relpath("cli.md", folder or ".")
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = [[f"[`{verb}`]({page}#{verb})", command.get_short_help_str(200)] for verb, command in commands.items()]
    return _table(["verb", "what it does"], rows)


def _grafts(folder: str) -> str:
    from graftlm.generation.inspect import methods

    rows = [[f"`{method.kind}`", method.label, method.summary] for method in methods()]
    return _table(["kind", "label", "what it is"], rows)


def _extras(folder: str) -> str:
    """Extras with the comment above each in pyproject.toml, and their packages."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    rows = []
    for extra, requirements in tomllib.loads(text)["project"]["optional-dependencies"].items():
        comment = re.search(rf"^# (.+)\n{extra} = ", text, re.MULTILINE)
        packages = ", ".join(re.split(r"[<>=~!\[ ;]", requirement)[0] for requirement in requirements)
        rows.append([f"`graftlm[{extra}]`", comment[1] if comment else "", packages])
    return _table(["extra", "for", "packages"], rows)


def _keys(name: str) -> str:
    module, _, class_name = name.rpartition(".")
    config = getattr(import_module(module), class_name)
    assert issubclass(config, Config), f"{name} is not a config"
    return _table(["key", "value", "default", "meaning"], [_key(key, f) for key, f in config.model_fields.items()])


def _key(key: str, field: FieldInfo) -> list[str]:
    default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
    return [f"`{key}`", _type(field.annotation), default, field.description or ""]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _default(value: Any) -> str:
    if value is None or isinstance(value, Config) or value in ([], {}, ""):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value
    return f"`{shown}`"


def _type(annotation: Any) -> str:
    """A type in the words of readers of YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not NoneType)
    if origin is list:
        return f"list of {_type(arguments[0])}s"
    if origin is tuple:
        return f"list of {len(arguments)} {_type(arguments[0])}s"
    if origin is dict:
        return f"mapping to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation.__name__.removesuffix("Config").lower()
    return {str: "text", int: "number", float: "number", bool: "`true`, `false`"}.get(annotation, "any value")
