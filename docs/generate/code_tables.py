"""Tables that describe the code: keys of configs, verbs and their options, kinds of grafts, extras."""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from docs.generate.markdown import table
from graftlm.config import Config
from graftlm.grafts.presets import PRESET, PresetConfig

ROOT = Path(__file__).parents[2]
SHARED_BY = 5  # an option that at least as many verbs have with the same help is listed once, for all of them
_ARGUMENTS = re.compile(r"^Args:\n(?P<arguments>.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^ {4}(?P<name>\w+): (?P<meaning>.*(?:\n {5,}.*)*)", re.MULTILINE)
_TYPES = {str: "text", int: "number", float: "number", bool: "`true`, `false`"}


def keys(name: str, page: Path) -> str:
    """Return the keys of a config, which is named by its module and class."""
    module, _, class_name = name.rpartition(".")
    config = getattr(import_module(module), class_name)
    if not issubclass(config, Config):
        raise TypeError(f"{name} is not a config.")
    described = _described_arguments(config)
    rows = []
    for key, field in config.model_fields.items():
        if key == "kind":
            continue
        value = _value(field)
        if key == PRESET and issubclass(config, PresetConfig):
            value = ", ".join(f"`{name}`" for name in config.presets)
            if not value:
                continue
        rows.append([f"`{key}`", value, field.description or described.get(key, "")])
    return table(["key", "value", "meaning"], rows)


def _value(field: FieldInfo) -> str:
    """Return the default of a key, or the kind of its value; of several words the default is bold."""
    kind = _type(field.annotation)
    if field.is_required():
        return f"{kind}, required"
    default = _default(field.get_default(call_default_factory=True))
    if not default:
        return kind
    if default in kind:
        return kind.replace(default, f"**{default}**", 1)
    return default


def _described_arguments(config: type) -> dict[str, str]:
    """Return the section `Args:` of a class and its bases, by the names of the arguments."""
    described: dict[str, str] = {}
    for base in reversed(config.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        section = _ARGUMENTS.search(text)
        if section is None:
            continue
        for argument in _ARGUMENT.finditer(section["arguments"]):
            described[argument["name"]] = " ".join(argument["meaning"].split())
    return described


def _default(value: object) -> str:
    if value is None or isinstance(value, Config) or value in ([], {}, ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`"


def _type(annotation: Any) -> str:
    """Return a type in the words of readers of YAML."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        kinds = [_type(argument) for argument in arguments if argument is not NoneType]
        return " or ".join(dict.fromkeys(kinds))
    if origin is list:
        item = _type(arguments[0])
        if item.startswith("list"):
            return f"list of {item}"
        return f"list of {item}s"
    if origin is tuple:
        item = _type(arguments[0])
        return f"list of {len(arguments)} {item}s"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "mapping"
    return _TYPES.get(annotation, "any value")


def commands() -> Mapping[str, Any]:
    """Return the verbs of `graft` as click commands."""
    import typer.main

    from graftlm.cli import app

    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


def verbs(arguments: str, page: Path) -> str:
    """Return the verbs of `graft`, with links to the page on the command line."""
    target = os.path.relpath(ROOT / "docs" / "cli.md", page.parent)
    if page.name == "cli.md":
        target = ""
    rows = []
    for verb, command in commands().items():
        section = verb.replace(" ", "-")
        rows.append([f"[`{verb}`]({target}#{section})", command.get_short_help_str(200)])
    return table(["verb", "what it does"], rows)


def options(verb: str, page: Path) -> str:
    """Return the options of a verb; those of `shared` are the options that many verbs have."""
    shared = _shared_options()
    if verb == "shared":
        chosen = list(shared.values())
    else:
        own = _options(commands()[verb])
        chosen = [option for option in own if _identity(option) not in shared]
    rows = [_option_row(option) for option in chosen]
    return table(["option", "meaning"], rows)


def _options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def _identity(option: Any) -> tuple[str, str]:
    return option.opts[0], option.help or ""


def _shared_options() -> dict[tuple[str, str], Any]:
    """Return the options that many verbs have, by their names and help texts."""
    counts: Counter[tuple[str, str]] = Counter()
    options_by_identity: dict[tuple[str, str], Any] = {}
    for command in commands().values():
        for option in _options(command):
            counts[_identity(option)] += 1
            options_by_identity.setdefault(_identity(option), option)
    return {identity: option for identity, option in options_by_identity.items() if counts[identity] >= SHARED_BY}


def _option_row(option: Any) -> list[str]:
    """Return the names and the help of an option, with its default where the help does not give one."""
    names = [*option.opts, *option.secondary_opts]
    shown = ", ".join(f"`{name}`" for name in names)
    if option.metavar:
        shown = f"`{names[0]} {option.metavar}`"
    text = option.help or ""
    has_default = option.default not in (None, False, True, "", "auto")
    if has_default and "default" not in text:
        text = f"{text.removesuffix('.')}. Default: `{option.default}`."
    return [shown, text]


def grafts(arguments: str, page: Path) -> str:
    """Return the kinds of grafts."""
    from graftlm.generation.methods import methods

    rows = [[f"`{method.kind}`", method.label, method.summary] for method in methods()]
    return table(["kind", "label", "what it is"], rows)


def extras(arguments: str, page: Path) -> str:
    """Return the extras with the comment above each in pyproject.toml, and their packages."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    rows = []
    for extra, requirements in project["optional-dependencies"].items():
        comment = re.search(rf"^# (.+)\n{extra} = ", text, re.MULTILINE)
        purpose = comment[1] if comment else ""
        packages = [re.split(r"[<>=~!\[ ;]", requirement)[0] for requirement in requirements]
        rows.append([f"`graftlm[{extra}]`", purpose, ", ".join(packages)])
    return table(["extra", "for", "packages"], rows)


def experiments(arguments: str, page: Path) -> str:
    """Return the experiments with the titles of their READMEs."""
    rows = []
    for readme in sorted((ROOT / "experiments").glob("*/README.md")):
        first_line, _, _ = readme.read_text(encoding="utf-8").partition("\n")
        title = first_line.removeprefix("# ")
        name = readme.parent.name.replace("_", "-")
        link = os.path.relpath(readme, page.parent)
        rows.append([f"[`{name}`]({link})", title])
    return table(["experiment", "subject"], rows)


def file(path: str, page: Path) -> str:
    """Return a file of the repository as a code block."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = Path(path).suffix.removeprefix(".")
    return f"```{language}\n{text.rstrip()}\n```"
