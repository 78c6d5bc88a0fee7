"""Weighted sums of grafts from their folders, as in `runs/danish:0.7+runs/legal:0.3`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, GraftError
from graftlm.files.hub import holds
from graftlm.files.model_files import names_gguf_file
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.grafts.low_rank_taps import LowRankTaps
from graftlm.grafts.sums import read_sum
from graftlm.store.artifact import is_model
from graftlm.store.manifest import JSON_NAME, read_manifest
from graftlm.store.names import name_of
from graftlm.store.stages import chosen_graft, load_model_of


def read_summands(text: str | Path) -> dict[Path, float]:
    """Return the weight of each folder of a sum; none if a text is the name of a single graft or model.

    A folder that exists is no sum, whatever its name. The folder of a run stands for the graft in it.

    Args:
        text: the name of a folder, of a model, or a sum.

    Raises:
        GraftError: a sum has a wrong weight, or a folder twice.
    """
    text = str(text)
    has_colon = text.rpartition(":")[0] != ""
    if Path(text).exists() or names_gguf_file(text) or not ("+" in text or has_colon):
        return {}
    weights: dict[Path, float] = {}
    for name, weight in read_sum(text).items():
        folder = chosen_graft(Path(name))
        if folder in weights:
            raise GraftError(f"The sum {text} names the graft {folder} twice: add up its weights.")
        weights[folder] = weight
    return weights


def sum_of_grafts(summands: Mapping[Path, float], backbone: Backbone, changes: Sequence[str] = ()) -> GraftedModel:
    """Return a model with a weighted sum of grafts, whose names are those of their folders or runs.

    A stage of `graft grow` acts with the stages before it, and its weight multiplies what all of them add.

    Args:
        summands: the weight of each folder.
        backbone: the backbone that the grafts were trained on.
        changes: changes of the config of a single graft, see `load_graft`.

    Raises:
        ArtifactError: a folder has no graft, or one of several has a stage that acts with earlier ones.
        GraftError: two grafts have the same name, changes were given with several grafts, or a graft takes no weight.
    """
    if changes and len(summands) > 1:
        raise GraftError(
            f"Changes of the config were given with a sum of {len(summands)} grafts, but they are for one: leave out "
            "--set, or train with these keys."
        )
    if backbone.extended is not None:
        raise GraftError(
            "A graft of the sum has rows of added tokens, which take no weight: name it alone, without a weight."
        )
    grafts: dict[str, Graft] = {}
    weights: dict[str, float] = {}
    for folder, weight in summands.items():
        if not holds(folder, JSON_NAME) and is_model(folder):
            raise ArtifactError(f"{folder} is a complete model, but a sum has grafts: name the folder of a graft.")
        if len(summands) > 1:
            _check_no_stage(folder)
        name = name_of(folder).replace(".", "_")
        if name in grafts:
            raise GraftError(f"Two grafts of the sum have the name {name}: rename the folder of one of them.")
        graft = load_model_of(folder, backbone, changes)
        grafts[name] = LowRankTaps.of(graft, backbone) or graft
        weights[name] = weight
    return GraftedModel(backbone, grafts, weights=weights)


def _check_no_stage(folder: Path) -> None:
    """Raise `ArtifactError` if a graft acts with those of earlier stages."""
    earlier = read_manifest(folder).trained_after
    if earlier:
        raise ArtifactError(
            f"{folder} is a stage that acts with the stages before it ({', '.join(earlier)}) and can't be part of a "
            "sum of several grafts: name it alone, with one weight for all of them or without."
        )
