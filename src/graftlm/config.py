"""The base of every config: frozen, keyword only, no unknown keys, YAML both ways, errors in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from graftlm.errors import RecipeError, did_you_mean


class Config(BaseModel):
    """A frozen set of named values.

    Unknown keys, wrong types and values out of range raise `RecipeError` with the key's path and the nearest known key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Any, *, where: str = "config") -> Self:
        """Validate plain `values` (a mapping, as YAML or JSON gives it).

        Raises:
            RecipeError: one sentence on the first thing that does not fit.
        """
        if not isinstance(values, dict):
            raise RecipeError(f"{where} holds {_kind_of(values)}, but a mapping of keys to values is expected.")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(explain(error, cls, where)) from None

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file, then apply `overrides` such as `training.steps=200`."""
        values = read_yaml(path)
        for override in overrides:
            apply_override(values, override)
        return cls.parse(values, where=str(path))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The config as YAML, without values that are at their default; also written to `path` when given."""
        text = yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        RecipeError: the file is missing, is not UTF-8 YAML, or does not hold a mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"There is no file {path}: name an existing recipe, or write one (see `graft schema`).") from None
    except (IsADirectoryError, PermissionError) as error:
        raise RecipeError(f"{path} can't be read as a recipe ({error.strerror}): name a readable YAML file.") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not UTF-8 text, but a YAML recipe is expected.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{path} is not valid YAML{line}: {getattr(error, 'problem', None) or error}.") from None
    if values is None:
        raise RecipeError(f"{path} is empty, but a recipe is expected: start from one that `graft schema` describes.")
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {_kind_of(values)}, but a mapping of keys to values is expected.")
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one dotted key in place: `a.b.2.c=value`, the value read as YAML. List items go by number."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"The override {override!r} is not of the form key=value, such as training.steps=200.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"The value of the override {override!r} is not valid YAML: put it in quotes.") from None
    *parents, last = key.strip().split(".")
    node: Any = values
    for name in parents:
        node = _step_into(node, name, override)
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise RecipeError(f"The override {override!r} goes into {_kind_of(node)}, which has no keys.")


def _step_into(node: Any, name: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, name, override)]
    if isinstance(node, dict):
        if node.get(name) is None:
            node[name] = {}
        return node[name]
    raise RecipeError(f"The override {override!r} goes into {_kind_of(node)}, which has no keys.")


def _index(items: list[Any], name: str, override: str) -> int:
    if name.isdigit() and int(name) < len(items):
        return int(name)
    raise RecipeError(f"The override {override!r} names item {name!r} of a list with {len(items)} items (counted from 0).")


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """The first problem of a pydantic error as one sentence."""
    first, *rest = error.errors()
    path = [part for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    key = ".".join(str(part) for part in path) or "the whole"
    more = f" ({len(rest)} more such problems follow.)" if rest else ""
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, path[:-1])
        hint = did_you_mean(str(path[-1]), known) if known else ""
        return f"{where}: unknown key {key}{hint}.{more}"
    if first["type"] == "missing":
        return f"{where}: the key {key} is missing, and it has no default.{more}"
    found = first.get("input")
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    shown = "" if isinstance(found, dict | list) else f", but found {found!r}"
    return f"{where}: {key}: {message}{shown}.{more}"


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """The field names of the config that `path` leads to, as far as annotations tell; a union gives those of all."""
    models = [model]
    for part in path:
        reached: list[type[BaseModel]] = []
        for candidate in models:
            field = candidate.model_fields.get(str(part))
            if field is not None:
                reached += _models_in(field.annotation)
        models = reached or models
    return sorted({name for candidate in models for name in candidate.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in getattr(annotation, "__args__", ()) for found in _models_in(argument)]


def _kind_of(value: Any) -> str:
    names = {str: "a string", list: "a list", dict: "a mapping", int: "a number", float: "a number", bool: "a truth value"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
