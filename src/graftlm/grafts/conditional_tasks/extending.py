"""Read a trained graft that is extended with new tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from graftlm.backbone import Backbone, Fingerprint
from graftlm.errors import ArtifactError, RecipeError, WrongBackboneError, first_line
from graftlm.grafts.conditional_tasks.config import ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.trained_layers import trained_names

# The keys that a config may set together with `extends`; all others are those of the trained graft.
_KEYS_WITH_EXTENDS = {"kind", "tasks", "extends", "adapts", "like"}


def read_trained(
    config: ConditionalTasksConfig,
    backbone: Backbone,
) -> tuple[ConditionalTasksConfig, dict[str, Tensor]]:
    """Read config and tensors of the trained graft that `config` extends.

    Args:
        config: the config with the new tasks; its `extends` is the folder of the trained graft.
        backbone: the backbone to which the extended graft is attached.

    Returns:
        The config of the trained graft, without the new tasks, and its tensors by name.

    Raises:
        ArtifactError: the folder is not a complete graft of this kind.
        RecipeError: `config` has a trained task's name, or settings that differ from those of the trained graft; it
            adapts all shared weights, but there are none; or the saved config is invalid.
        WrongBackboneError: the graft was trained on another backbone.
    """
    folder = Path(str(config.extends))
    manifest, tensors, fingerprint = _read_folder(folder)
    kind = manifest["kind"]
    if kind != config.kind:
        raise ArtifactError(
            f"{folder}, which is to be extended, has a graft of the kind {kind}, but {config.kind} is expected: name "
            "another folder."
        )
    difference = fingerprint.difference(backbone.fingerprint)
    if difference:
        raise WrongBackboneError(
            f"{folder}, which is to be extended, was trained on another backbone than {backbone.name} ({difference}): "
            "name the backbone that it was trained on, or another folder."
        )
    values = manifest["config"]
    trained = ConditionalTasksConfig.parse({**values, "kind": kind}, where=str(folder)).check_saved(values)
    _check_settings(config, trained, folder)
    _check_that_something_trains(config, trained, backbone)
    _check_names(config, trained, folder)
    return trained, tensors


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Fingerprint]:
    """Read the manifest, the tensors and the backbone's fingerprint of a graft."""
    try:
        manifest = json.loads((folder / "graft.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "graft.safetensors")
        fingerprint = Fingerprint(**manifest["backbone"]["fingerprint"])
        required = {key: manifest[key] for key in ("kind", "config")}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ArtifactError(
            f"{folder}, which is to be extended, is not a complete graft ({reason}): name a folder that graft train "
            "wrote."
        ) from None
    return required, tensors, fingerprint


def _check_settings(config: ConditionalTasksConfig, trained: ConditionalTasksConfig, folder: Path) -> None:
    """Raise `RecipeError` if a setting that the config names differs from that of the trained graft."""
    given = config.model_fields_set - _KEYS_WITH_EXTENDS
    for key in sorted(given):
        value = getattr(config, key)
        trained_value = getattr(trained, key)
        if value != trained_value:
            raise RecipeError(
                f"{folder} was trained with {key} {trained_value!r}, but the config that extends it has {value!r}: "
                f"leave {key} out, since the settings of the trained graft are used."
            )


def _check_that_something_trains(
    config: ConditionalTasksConfig,
    trained: ConditionalTasksConfig,
    backbone: Backbone,
) -> None:
    """Raise `RecipeError` if shared weights are to train, but the trained graft has none."""
    if config.adapts != "all" or trained.is_modulated:
        return
    if not trained_names(backbone.model, trained.frozen):
        raise RecipeError(
            f"adapts is all, but the tasks of {config.extends} share no trained weights: leave adapts out."
        )


def _check_names(config: ConditionalTasksConfig, trained: ConditionalTasksConfig, folder: Path) -> None:
    both = sorted(set(trained.tasks) & set(config.tasks))
    if both:
        raise RecipeError(f"The graft {folder} already has a task {both[0]}: choose another name for the new task.")
