"""The base class of every config: frozen, without unknown keys, YAML both ways, errors in one sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, dataclass_transform, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from graftlm.errors import RecipeError, did_you_mean, shorten

_Parsed = TypeVar("_Parsed")


# No field specifiers are named, so that type checkers know that Field(None, …) has a default.
@dataclass_transform(kw_only_default=True, frozen_default=True)
class _ConfigMeta(type(BaseModel)):
    """Makes `SomeConfig(key=value)` raise the one-sentence error of a recipe."""

    if not TYPE_CHECKING:  # pydantic's own signature tells type checkers more

        def __call__(cls, *arguments: Any, **values: Any) -> Any:
            try:
                return super().__call__(*arguments, **values)
            except ValidationError as error:
                raise RecipeError(explain(error, cls, cls.__name__)) from None


class Config(BaseModel, metaclass=_ConfigMeta):
    """A frozen set of named values.

    Unknown keys, wrong types and values out of range raise `RecipeError` with the key's path and the nearest known key.
    Where a class defines `_problems(self) -> Iterator[str]`, its first clause on what does not fit is raised.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Any, *, where: str = "config") -> Self:
        """Validate a mapping from YAML or JSON, from `where`; RecipeError is one sentence on the first problem."""
        if not isinstance(values, dict):
            raise RecipeError(f"{where} holds {_kind_of(values)}, but a mapping of keys to values is expected.")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(explain(error, cls, where)) from None

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file, then apply `overrides` such as `training.steps=200`."""
        return parse_overridden(lambda keys: cls.parse(keys, where=str(path)), read_yaml(path), overrides, str(path))

    def to_yaml(self) -> str:
        """The config as YAML without default values."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_first_problem(cls, values: Any, validate: Callable[[Any], Self]) -> Self:
        config = validate(values)
        _refuse_truth_values(values, config.__dict__, ())
        for problem in getattr(config, "_problems", tuple)():
            raise ValueError(problem)
        return config

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialise: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Serialise fields with one possible value, such as `kind`, even where defaults are left out."""
        fields = type(self).model_fields.items()
        types = [(name, field.annotation) for name, field in fields]
        tags = [name for name, type_ in types if get_origin(type_) is Literal and len(get_args(type_)) == 1]
        return {name: getattr(self, name) for name in tags} | serialise(self)


def _refuse_truth_values(value: Any, parsed: Any, path: tuple[str | int, ...]) -> None:
    """Refuse true and false where pydantic took them for 1 and 0; configs within configs do so themselves."""
    if isinstance(value, bool) and type(parsed) in (int, float):
        message = PydanticCustomError("bool_as_number", "the value should be a number")
        raise ValidationError.from_exception_data("", [{"type": message, "loc": path, "input": value}])
    if value is not parsed and isinstance(value, list | tuple) and isinstance(parsed, list | tuple):
        value, parsed = dict(enumerate(value)), dict(enumerate(parsed))
    if value is not parsed and isinstance(value, dict) and isinstance(parsed, dict):
        for name, inner in value.items():
            _refuse_truth_values(inner, parsed.get(name), (*path, name))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file; RecipeError if it is missing, is not UTF-8 YAML, or holds no mapping."""
    try:
        values = _load(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(f"There is no file {path}: name an existing one, or write it (see `graft schema`).") from None
    except OSError as error:
        raise RecipeError(f"{path} can't be read as a recipe ({error.strerror}): name a readable YAML file.") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path} is not UTF-8 text, but a YAML recipe is expected.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        where = f" at line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{path} is not valid YAML{where}: {problem}.") from None
    if values is None:
        raise RecipeError(f"{path} is empty, but a recipe is expected: start from one that `graft schema` describes.")
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {_kind_of(values)}, but a mapping of keys to values is expected.")
    return values


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2 and an error for duplicate keys.

    PyYAML implements YAML 1.1, where 2:10 is the number 130, the language code no is false, and 1e-4 is text.
    """

    yaml_implicit_resolvers = {}  # filled below

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader of YAML 1.1 or 1.2 would take for another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        breaks = any(mark in text for mark in "\x85\u2028\u2029")  # PyYAML folds these like line feeds
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)


_DECIMAL = "tag:yaml.org,2002:int"
_SCALARS = {  # tag -> plain scalars that have it, and their first characters
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    _DECIMAL: (r"[-+]?[0-9]+", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "tag:yaml.org,2002:merge": (r"<<", ["<"]),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(_DECIMAL, lambda _, node: int(node.value))
_Dumper.add_representer(str, _Dumper.represent_text)


def _load(text: str) -> Any:
    """Parse a YAML text; every failure is a `YAMLError`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, AttributeError) as error:  # PyYAML does not wrap errors of tags' constructors
        raise yaml.YAMLError(f"a value does not fit its tag ({error})") from None


def parse_overridden(
    parse: Callable[[dict[str, Any]], _Parsed], values: dict[str, Any], overrides: Sequence[str], where: str
) -> _Parsed:
    """Apply `overrides` to a copy of `values` and parse the result.

    Args:
        parse: raises `RecipeError` for values that do not fit.
        values: the mapping of a file; it stays as it is.
        overrides: of the form `training.steps=200`.
        where: the file's name, with which the errors of `parse` begin.

    Raises RecipeError if a value does not fit; it names the override without which all would fit, if there is one.
    """
    overridden = _overridden(values, overrides)
    try:
        return parse(overridden)
    except RecipeError as error:
        for i, override in enumerate(overrides):
            try:
                parse(_overridden(values, [*overrides[:i], *overrides[i + 1 :]]))
            except RecipeError:
                continue
            reason = str(error).removeprefix(f"{where}: ")
            raise RecipeError(f"The override {shorten(override)!r}: {reason}") from None
        raise


def _overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    values = dict(values)
    for override in overrides:
        apply_override(values, override)
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one dotted key in place: `a.b.2.c=value`; the value is YAML, numbers are indices of lists.

    Nested containers on the path are copied, so that values shared through a YAML alias stay as they were.
    Raises RecipeError if the override is malformed, or its path does not exist.
    """
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(f"The override {shorten(override)!r} is not like key=value, such as training.steps=200.")
    try:
        value = _load(text)
    except yaml.YAMLError:
        raise RecipeError(f"The override {shorten(override)!r}'s value is not valid YAML: put it in quotes.") from None
    *parents, last = path
    node: Any = values
    for name in parents:
        index = _index(node, name, override)
        inner = node.get(index) if isinstance(node, dict) else node[index]
        node[index] = {} if inner is None else copy.copy(inner)
        node = node[index]
    node[_index(node, last, override)] = value


def _index(node: Any, name: str, override: str) -> str | int:
    """The key or list index that `name` denotes in `node`."""
    if isinstance(node, dict):
        return name
    if not isinstance(node, list):
        raise RecipeError(f"The override {shorten(override)!r} goes into {_kind_of(node)}, which has no keys.")
    if name.isdecimal() and int(name) < len(node):
        return int(name)
    counted = f"a list with {len(node)} items (counted from 0)"
    raise RecipeError(f"The override {shorten(override)!r} names item {name!r} of {counted}: name one that is there.")


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """One problem of a pydantic error as a sentence: an unknown key before others, then the most deeply nested."""
    errors = error.errors()
    first = max(errors, key=lambda problem: (problem["type"] == "extra_forbidden", len(problem["loc"])))
    # Keys and indices, without the labels of validators and union branches.
    labels = ("function-", "list[", "dict[", "tuple[", "lax-or-strict[", "json-or-python[", "literal[", "constrained-")
    labels += ("tagged-",)
    path = [str(part) for part in first["loc"] if not str(part).startswith(labels)]
    key = shorten(".".join(path))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key {key}{did_you_mean(path[-1], _fields_at(model, path[:-1]))}{more}."
    if first["type"] == "missing":
        return f"{where}: the key {key} is missing, and it has no default{more}."
    return f"{where}: {key + ': ' if key else ''}{_mismatch(first)}{more}."


def _mismatch(problem: Any) -> str:
    """The expected value of one problem, and the actual one."""
    kind, value = problem["type"], problem["input"]
    shown = _kind_of(value) if isinstance(value, dict | list | None) else shorten(repr(value))
    if kind == "value_error":  # raised by a config's own validator, whose message says what it expects
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        return message if isinstance(value, dict | list | BaseModel) else f"{message}, but found {shown}"
    message = problem["msg"].replace("Input", "the value", 1)
    if kind.endswith(("_parsing", "_from_float")):
        message = message.partition(",")[0]
    if kind in ("model_type", "dict_type"):
        message = "the value should be a mapping of keys"
    quotes = ": put it in quotes" if kind == "string_type" and isinstance(value, int | float) else ""
    return f"{message}, but found {shown}{quotes}"


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Field names of the config at `path`, found through annotations; a union contributes those of all branches."""
    models = [model]
    for part in map(str, path):
        fields = [candidate.model_fields[part] for candidate in models if part in candidate.model_fields]
        models = [reached for field in fields for reached in _models_in(field.annotation)] or models
    return sorted({name for candidate in models for name in candidate.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models_in(argument)]


def _kind_of(value: Any) -> str:
    names = {str: "a string", list: "a list", dict: "a mapping", int: "a number", float: "a number"}
    names |= {bool: "a truth value", type(None): "nothing"}
    return names.get(type(value), f"a {type(value).__name__}")
