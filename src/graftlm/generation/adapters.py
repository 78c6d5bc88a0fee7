"""Inspect PEFT adapters: `graft inspect` on a folder that contains an adapter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from graftlm.config import Config
from graftlm.errors import ArtifactError
from graftlm.files.adapter_config import ADAPTER_CONFIG, ADAPTER_TENSORS, preparation, read_adapter_config, saved_ends
from graftlm.files.hub import fetch_folder
from graftlm.generation.inspect import TensorGroup, group_tensors
from graftlm.grafts import graft_class, kinds
from graftlm.grafts.base import ReadsPeft
from graftlm.store.artifact import read_tensors


class AdapterInspection(Config):
    """The result of `inspect_adapter`.

    Args:
        folder: folder or hub name of the adapter.
        method: PEFT's name of the method.
        base: the model that the adapter was trained on, according to its config; None if it names none.
        rank: the rank in its config; None if it has none.
        alpha: the scale in its config, such as `lora_alpha`; None if it has none.
        targets: the modules that it changes, according to its config, as names or a pattern.
        parameters: number of values in its tensors.
        size: size of the file of tensors, in bytes.
        tensors: the saved tensors, grouped by name.
        sections: the section `graft` of a recipe for each kind of graft that accepts the adapter.
        hints: what several adapters in one graft need, for each of these kinds; kinds that need nothing are missing.
        refusals: the error message of each kind of graft that rejects the adapter.
        mergeable: whether PEFT can merge the adapter into the model.
        preparation: Python statements that prepare a model, `model`, before the adapter is loaded on it.
    """

    folder: str
    method: str
    base: str | None
    rank: int | None
    alpha: int | float | None
    targets: JsonValue
    parameters: int
    size: int
    tensors: list[TensorGroup]
    sections: dict[str, dict[str, JsonValue]] = {}
    hints: dict[str, str] = {}
    refusals: dict[str, str] = {}
    mergeable: bool
    preparation: list[str] = []


def inspect_adapter(folder: str | Path) -> AdapterInspection:
    """Describe a PEFT adapter and the kinds of grafts that accept it, without loading a backbone.

    Args:
        folder: folder of the adapter, or its name on the hub.

    Returns:
        The config and the tensors of the adapter, and its uses.

    Raises:
        ArtifactError: the folder is not a PEFT adapter, its config or its file of tensors is damaged, or its weights
            are pickled.
        RecipeError: a value of the config has a wrong type, such as a rank that is not a number.
    """
    local = fetch_folder(folder, ADAPTER_CONFIG)
    config = read_adapter_config(local)
    named = read_tensors(local, ADAPTER_TENSORS)
    tensors = group_tensors((path.removeprefix("base_model.model."), tensor) for path, tensor in named)
    sections, refusals = _find_users(Path(folder))
    values = {
        "folder": str(folder),
        "method": str(config.get("peft_type")),
        "base": config.get("base_model_name_or_path"),
        "rank": config.get("r"),
        "alpha": next((value for key, value in config.items() if key.endswith("_alpha")), None),
        "targets": config.get("target_modules"),
        "parameters": sum(group.parameters for group in tensors),
        "size": (local / ADAPTER_TENSORS).stat().st_size,
        "tensors": tensors,
        "sections": sections,
        "hints": _hints(sections),
        "refusals": refusals,
        "preparation": preparation(saved_ends(local)),
        "mergeable": bool(sections) or _is_mergeable(refusals),
    }
    return AdapterInspection.parse(values, where=str(local / ADAPTER_CONFIG))


def _find_users(folder: Path) -> tuple[dict[str, dict[str, object]], dict[str, str]]:
    """Return the recipe sections of the kinds that accept an adapter, and the reasons of those that reject it."""
    name = re.sub(r"^[^A-Za-z]+|[^A-Za-z0-9_-]", "", folder.resolve().name) or "expert"
    sections = {}
    refusals = {}
    for kind in kinds():
        method = graft_class(kind)
        if not issubclass(method, ReadsPeft):
            continue
        try:
            sections[kind] = method.adapter_section(name, folder)
        except ArtifactError as error:
            refusals[kind] = str(error)
    return sections, refusals


def _hints(sections: Mapping[str, object]) -> dict[str, str]:
    hints = {}
    for kind in sections:
        method = graft_class(kind)
        assert issubclass(method, ReadsPeft), "only such kinds have sections"
        if method.several_adapters:
            hints[kind] = method.several_adapters
    return hints


def _is_mergeable(refusals: dict[str, str]) -> bool:
    """Return whether a refusal recommends merging or conversion; PEFT can merge every adapter that it can convert."""
    return any("merge it" in text or "convert it" in text for text in refusals.values())
