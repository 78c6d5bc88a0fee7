"""The folders of `graft grow`: STAGE/graft for each stage, in the order of the recipe next to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graftlm.backbone import Backbone
from graftlm.config import read_yaml
from graftlm.errors import ArtifactError
from graftlm.grafts import Graft
from graftlm.grafts.base import ReplacesModel
from graftlm.grafts.low_rank_taps import LowRankTaps
from graftlm.grafts.stack import Stack
from graftlm.store.artifact import is_stage_name, load_grafts
from graftlm.store.manifest import JSON_NAME, read_manifest
from graftlm.store.names import graft_in

RECIPE_NAME = "recipe.yaml"


def stages_in(folder: Path) -> dict[str, Path]:
    """Return the folders of the grafts of a folder that `graft grow` wrote, by stage in order; none for others.

    Raises:
        RecipeError: the recipe in the folder can't be read.
    """
    if not (folder / RECIPE_NAME).is_file():
        return {}
    stages = read_yaml(folder / RECIPE_NAME).get("stages")
    return {str(name): folder / str(name) / "graft" for name in stages} if isinstance(stages, dict) else {}


def chosen_graft(folder: Path) -> Path:
    """Return the folder of a graft: that of a run, that of the last stage of `graft grow`, or the folder itself.

    Args:
        folder: any folder.

    Raises:
        ArtifactError: the last stage has no graft yet.
        RecipeError: the recipe in the folder can't be read.
    """
    if (folder / JSON_NAME).exists():
        return folder
    stages = stages_in(folder)
    if not stages:
        return graft_in(folder)
    name, last = next(reversed(stages.items()))
    if not (last / JSON_NAME).is_file():
        raise ArtifactError(
            f"{folder} has no graft of its last stage, {name}: let graft grow finish, or name the folder of a stage, "
            f"such as {next(iter(stages.values()))}."
        )
    return last


def members_of(folder: Path) -> list[Path]:
    """Return the folders of the grafts with which the graft in a folder was trained, which may be missing."""
    parent = folder.absolute().parent.parent
    names = [name for name in read_manifest(folder).trained_after if is_stage_name(name)]
    return [parent / name / "graft" for name in names]


def load_model_of(folder: Path, backbone: Backbone, changes: Sequence[str] = ()) -> Graft:
    """Return the graft in a folder, with those of the stages before it as one graft that acts through taps.

    Args:
        folder: the graft's folder.
        backbone: the backbone that all were trained on.
        changes: changes of the config of the graft in `folder`, see `load_graft`.

    Raises:
        ArtifactError: a graft of a stage is missing, can't be loaded, or changes the model.
        WrongBackboneError: a graft was trained on another backbone.
    """
    grafts = load_grafts(folder, backbone, changes)
    own = grafts.pop("graft")
    if not grafts:
        return own
    grafts[folder.absolute().parent.name] = own
    return Stack({name: _by_taps(name, graft, backbone) for name, graft in grafts.items()}).eval()


def _by_taps(name: str, graft: Graft, backbone: Backbone) -> Graft:
    """Return a graft that acts through taps; LoRA does so without its own modules."""
    if not isinstance(graft, ReplacesModel):
        return graft
    acting = LowRankTaps.of(graft, backbone)
    if acting is None:
        raise ArtifactError(
            f"The stage {name} has a graft of the kind {graft.config.kind}, which changes the model, so that it can't "
            "act together with the others here: use generate, chat, eval or audit, without a weight."
        )
    return acting
