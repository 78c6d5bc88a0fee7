"""The base class of all configs: frozen, without unknown keys, read from YAML, with errors of one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, dataclass_transform, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from graftlm.errors import RecipeError, did_you_mean, shorten
from graftlm.yaml_text import YAMLError, dump_yaml, load_yaml

_Parsed = TypeVar("_Parsed")

_KINDS: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "a mapping",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "nothing",
}

UNKNOWN_TAG = "unknown_tag"
"""Type of the error of a union without a config for a mapping; its message describes the key that selects one."""

_PYDANTIC_LABELS = (
    "constrained-",
    "dict[",
    "function-",
    "json-or-python[",
    "lax-or-strict[",
    "list[",
    "literal[",
    "tagged-",
    "tuple[",
)
"""Prefixes of the parts of an error's location that are neither keys nor indices."""


# No field specifiers are named, so that type checkers take Field(None, ...) for a field with a default.
@dataclass_transform(kw_only_default=True, frozen_default=True)
class _ConfigMeta(type(BaseModel)):
    """Makes `SomeConfig(key=value)` raise `RecipeError` in one sentence."""

    if not TYPE_CHECKING:  # pydantic's own signature gives type checkers more information.

        def __call__(cls, *arguments: Any, **values: Any) -> Any:
            try:
                return super().__call__(*arguments, **values)
            except ValidationError as error:
                raise RecipeError(explain(error, cls, cls.__name__)) from None


class Config(BaseModel, metaclass=_ConfigMeta):
    """A frozen set of named values.

    Unknown keys, wrong types and values out of range raise `RecipeError` with the path of the key. For an unknown key,
    the message also has the most similar known key. A class may define `_problems(self) -> Iterator[str]` for further
    checks: the first clause that it yields becomes the message of the error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: object, *, where: str = "config") -> Self:
        """Validate a mapping from YAML or JSON.

        Args:
            values: the mapping, with strings as keys.
            where: origin of the mapping, such as a file; error messages begin with it.

        Raises:
            RecipeError: `values` is not a mapping, or a key or value does not fit; the message is one sentence about
                one problem.
        """
        if not isinstance(values, dict):
            raise RecipeError(
                f"{where} contains {_kind_of(values)}, but a mapping of keys to values is expected: write key: value."
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RecipeError(explain(error, cls, where)) from None

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a config from a YAML file.

        Args:
            path: the file.
            overrides: assignments such as `training.steps=200`, which are applied to the file's values in this order.

        Raises:
            RecipeError: the file can't be read, an override is malformed, or a key or value does not fit.
        """

        def parse(values: dict[str, object]) -> Self:
            return cls.parse(values, where=str(path))

        return parse_overridden(parse, read_yaml(path), overrides, str(path))

    def to_yaml(self) -> str:
        """Return the config as YAML text, without values that equal their defaults."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return dump_yaml(values)

    @model_validator(mode="wrap")
    @classmethod
    def _raise_first_problem(cls, values: object, validate: Callable[[Any], Self]) -> Self:
        config = validate(values)
        _refuse_truth_values(values, config.__dict__, ())
        find_problems = getattr(config, "_problems", None)
        if find_problems is not None:
            for problem in find_problems():
                raise ValueError(problem)
        return config

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Serialize fields with one possible value, such as `kind`, even if defaults are excluded."""
        tags: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            is_literal = get_origin(field.annotation) is Literal
            if is_literal and len(get_args(field.annotation)) == 1:
                tags[name] = getattr(self, name)
        return tags | serialize(self)


def _refuse_truth_values(value: object, parsed: object, path: tuple[str | int, ...]) -> None:
    """Raise `ValidationError` where pydantic took true or false for a number. Nested configs check themselves."""
    if isinstance(value, bool) and type(parsed) in (int, float):
        message = PydanticCustomError("bool_as_number", "the value should be a number")
        raise ValidationError.from_exception_data("", [{"type": message, "loc": path, "input": value}])
    if value is parsed:
        return
    if isinstance(value, list | tuple) and isinstance(parsed, list | tuple):
        value = dict(enumerate(value))
        parsed = dict(enumerate(parsed))
    if isinstance(value, dict) and isinstance(parsed, dict):
        for name, inner in value.items():
            _refuse_truth_values(inner, parsed.get(name), (*path, name))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Raises:
        RecipeError: the file can't be read, is not UTF-8 YAML, or contains anything but a mapping.
    """
    try:
        values = load_yaml(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(
            f"There is no file {path}: name an existing YAML file, or write it (`graft schema` describes the keys of "
            "recipes)."
        ) from None
    except OSError as error:
        raise RecipeError(f"{path} can't be read ({error.strerror}): name a readable YAML file.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is not UTF-8 text (byte {error.start}), but YAML is expected: name another file, or convert it."
        ) from None
    except YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML{_place_of(error)}: {_reason_of(error)}.") from None
    if values is None:
        raise RecipeError(
            f"{path} is empty, but a mapping of keys to values is expected: write key: value (`graft schema` describes "
            "the keys of recipes)."
        )
    if not isinstance(values, dict):
        raise RecipeError(
            f"{path} contains {_kind_of(values)}, but a mapping of keys to values is expected: write key: value."
        )
    return values


def _place_of(error: YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" at line {mark.line + 1}"


def _reason_of(error: YAMLError) -> str:
    reason = getattr(error, "problem", None) or getattr(error, "reason", None)
    return str(reason or error)


def parse_overridden(
    parse: Callable[[dict[str, Any]], _Parsed], values: dict[str, object], overrides: Sequence[str], where: str
) -> _Parsed:
    """Apply overrides to a copy of a mapping and parse the result.

    Args:
        parse: parses a mapping; raises `RecipeError` for values that do not fit.
        values: the mapping of a file; it is left unchanged.
        overrides: assignments such as `training.steps=200`.
        where: the file's name; the messages of `parse` begin with it.

    Returns:
        The result of `parse`.

    Raises:
        RecipeError: an override is malformed, or a value does not fit. If all values fit without one of the overrides,
            the message names this override.
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


def _overridden(values: dict[str, object], overrides: Sequence[str]) -> dict[str, object]:
    values = dict(values)
    for override in overrides:
        apply_override(values, override)
    return values


def apply_override(values: dict[str, object], override: str) -> None:
    """Set one dotted key in place.

    The nested containers on the path are replaced by copies. Values that are shared through a YAML alias keep their
    content at their other places.

    Args:
        values: the mapping to change.
        override: an assignment such as `a.b.2.c=value`. The value is YAML. A number in the path is an index where a
            list is found. Missing keys of mappings are created.

    Raises:
        RecipeError: the override has another form, its value is not valid YAML, or its path leads into a value
            without keys, or does not name an item of a list.
    """
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise RecipeError(
            f"The override {shorten(override)!r} does not have the form key=value, such as training.steps=200."
        )
    try:
        value = load_yaml(text)
    except YAMLError:
        raise RecipeError(
            f"The value of the override {shorten(override)!r} is not valid YAML: put it in quotes."
        ) from None
    *parents, last = path
    node: Any = values
    for name in parents:
        index = _index(node, name, override)
        inner = node.get(index) if isinstance(node, dict) else node[index]
        copied = {} if inner is None else copy.copy(inner)
        node[index] = copied
        node = copied
    node[_index(node, last, override)] = value


def _index(node: object, name: str, override: str) -> str | int:
    """Return the key or list index that `name` denotes in `node`."""
    if isinstance(node, dict):
        return name
    if not isinstance(node, list):
        raise RecipeError(
            f"The override {shorten(override)!r} names the key {shorten(name)!r} of {_kind_of(node)}, which has no "
            "keys: end the path before it."
        )
    if name.isdecimal() and int(name) < len(node):
        return int(name)
    raise RecipeError(
        f"The override {shorten(override)!r} names item {shorten(name)!r} of a list of length {len(node)}, whose items "
        "are counted from 0: name an existing item, or set the list as a whole."
    )


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Describe one problem of a pydantic error in a sentence.

    An unknown key is preferred to other problems, and a deeply nested problem to others.

    Args:
        error: an error with at least one problem.
        model: the class that was validated; its fields are suggested for unknown keys.
        where: origin of the values; the sentence begins with it.
    """
    errors = error.errors()

    def importance(problem: Any) -> tuple[bool, int]:
        return problem["type"] == "extra_forbidden", len(problem["loc"])

    first = max(errors, key=importance)
    path = [str(part) for part in first["loc"] if not str(part).startswith(_PYDANTIC_LABELS)]
    key = shorten(".".join(path))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _fields_at(model, path[:-1])
        hint = " (a key of another kind)" if path[-1] in known else did_you_mean(path[-1], known)
        return f"{where}: unknown key {key}{hint}{more}."
    if first["type"] == "missing":
        return f"{where}: the key {key} is missing, and it has no default{more}: set it."
    prefix = f"{key}: " if key else ""
    return f"{where}: {prefix}{_mismatch(first)}{more}."


def _expectation(kind: str, problem: Any) -> str:
    """Describe the expected value of one problem of pydantic."""
    message = problem["msg"].replace("Input", "the value", 1)
    if kind == "int_parsing_size":
        return "the value should be a smaller whole number"
    if kind in ("too_short", "too_long"):
        context = problem["ctx"]
        bound = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"the value should have {bound} item(s) instead of {context['actual_length']}"
    if kind.endswith(("_parsing", "_from_float")):
        return message.partition(",")[0]
    if kind in ("model_type", "dict_type"):
        return "the value should be a mapping of keys"
    return message


def _mismatch(problem: Any) -> str:
    """Describe the expected value of one problem, and the actual one."""
    kind = problem["type"]
    value = problem["input"]
    is_container = isinstance(value, dict | list)
    shown = _kind_of(value) if is_container or value is None else shorten(repr(value))
    if kind in ("value_error", UNKNOWN_TAG):
        # The config's own validator raised the error, whose message already describes the expected value.
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        if is_container or isinstance(value, BaseModel):
            return message
        return f"{message}, but found {shown}"
    message = _expectation(kind, problem)
    is_number_for_text = kind == "string_type" and isinstance(value, int | float)
    remedy = ": put it in quotes" if is_number_for_text else ""
    return f"{message}, but found {shown}{remedy}"


def _fields_at(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Return the field names of the config at `path`, found through annotations. Unions contribute all branches."""
    models = [model]
    for part in path:
        reached: list[type[BaseModel]] = []
        for candidate in models:
            if part in candidate.model_fields:
                reached.extend(_models_in(candidate.model_fields[part].annotation))
        models = reached or models
    names: set[str] = set()
    for candidate in models:
        names.update(candidate.model_fields)
    return sorted(names)


def _models_in(annotation: object) -> list[type[BaseModel]]:
    """Return the pydantic models in an annotation, such as a union or a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    models: list[type[BaseModel]] = []
    for argument in getattr(annotation, "__args__", ()):
        models.extend(_models_in(argument))
    return models


def _kind_of(value: object) -> str:
    """Name the type of a value as users of YAML do."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")
