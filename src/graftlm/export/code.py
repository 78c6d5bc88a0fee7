"""Write the code of models next to their weights."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

_PACKAGE = "graftlm"
_LOADERS = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def save_unchanged(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Save a model with `save_pretrained`, and leave the model's config unchanged.

    `save_pretrained` alone would write the class and the dtype into the config of the model.

    Args:
        model: the model.
        folder: the folder to write to; it is created if necessary.
        options: further arguments of `save_pretrained`.
    """
    shallow = copy.copy(model)
    shallow.config = copy.deepcopy(model.config)
    shallow.save_pretrained(folder, **options)


def copy_code(model: PreTrainedModel, folder: Path) -> bool:
    """Copy the code of a model of GraftLM into the folder of its weights, and name its classes in `config.json`.

    Args:
        model: any model; for a model that is not defined in GraftLM, nothing is done.
        folder: the folder that `save_pretrained` wrote.

    Returns:
        Whether the model is defined in GraftLM.
    """
    if not is_own(type(model)):
        return False
    names = []
    for cls in model_classes(model):
        module = copy_module(cls.__module__, folder)
        names.append(f"{module}.{cls.__name__}")
    write_config(folder, names)
    return True


def model_classes(model: PreTrainedModel) -> list[type]:
    """Return the classes of a model's config, of its base model, and of the model itself, in this order."""
    return [type(model.config), type(model.base_model), type(model)]


def is_own(cls: type) -> bool:
    """Return whether a class is defined in GraftLM."""
    return cls.__module__.startswith(f"{_PACKAGE}.")


def copy_module(module: str, folder: Path) -> str:
    """Copy a module of GraftLM, and the modules of GraftLM that it imports, side by side into a folder.

    The copies import each other relatively. Modules must differ in the last part of their names: a file that exists
    already is kept.

    Args:
        module: dotted name of the module.
        folder: an existing folder.

    Returns:
        The module's name in the folder.
    """
    name = module.rpartition(".")[2]
    spec = find_spec(module)
    assert spec is not None, "the module is imported already"
    assert spec.origin is not None, "the module is a file"
    path = folder / f"{name}.py"
    if path.exists():
        return name
    source = Path(spec.origin).read_text(encoding="utf-8")
    relative = re.sub(rf"(?m)^from {_PACKAGE}\.(?:\w+\.)*(\w+) import", r"from .\1 import", source)
    path.write_text(relative, encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{_PACKAGE}."):
            copy_module(node.module, folder)
    return name


def add_older_rope_keys(folder: Path) -> None:
    """Add the keys of rotary positions that transformers 4 reads to `config.json`; without them it takes defaults.

    Nothing is added where layers differ in their rotary positions, for which transformers 4 has no common keys.

    Args:
        folder: the model's folder, with a `config.json`.
    """
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    for config in (values, values.get("text_config")):
        rope = config.get("rope_parameters") if isinstance(config, dict) else None
        if not isinstance(rope, dict) or "rope_theta" not in rope:
            continue
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                config[key] = rope[key]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_config(folder: Path, classes: Sequence[str], **changes: object) -> None:
    """Change `config.json`: name the classes that the Auto classes load, and set further keys.

    Args:
        folder: the model's folder, with a `config.json`.
        classes: MODULE.CLASS of the config, the base model and the model, in this order.
        changes: further keys and their JSON values.
    """
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["auto_map"] = dict(zip(_LOADERS, classes, strict=True))
    values.update(changes)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
