"""Inspect trained grafts: `graft inspect`."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import JsonValue
from torch import Tensor

from graftlm.backbone import Backbone, Fingerprint
from graftlm.config import Config
from graftlm.evaluation.results import Metric
from graftlm.grafts import Graft
from graftlm.store.artifact import backbone_of, load_graft, read_tensors
from graftlm.store.manifest import Manifest, read_manifest

# Models and training take seconds to import, so functions that run models import them.
if TYPE_CHECKING:
    from graftlm.data import Document

LENGTH = 256
_MAX_RANKED_VALUES = 2**24  # the effective rank of a larger matrix takes seconds

_Layers = dict[str, dict[str, list[float]]]


class TensorGroup(Config):
    """Tensors with the same number of dimensions whose names differ only in their numbers.

    Args:
        name: the common name, with * for each number.
        count: number of tensors.
        shape: shape of the first tensor.
        parameters: number of values in all tensors.
        effective_rank: one value per matrix; matrices with more than 2^24 values, NaN or infinity are omitted.
    """

    name: str
    count: int
    shape: list[int]
    parameters: int
    effective_rank: list[float] = []


class Inspection(Config):
    """The result of `inspect_graft`.

    Args:
        folder: folder of the graft.
        kind: kind of the graft.
        label: the method's name in tables.
        config: the graft's config.
        library: the version of graftlm that saved the graft.
        backbone: name, model type and fingerprint of the backbone.
        parameters: number of values in the saved tensors.
        tensors: the saved tensors, grouped by name.
        training: steps, tokens and settings of the training run.
        measured: metrics at the end of the run.
        layers: {quantity: {name of a text or model: values}}, from the run and from `inspect_graft`. There is one value
            per layer or other place where the graft acts, or a single one for the whole graft.
        place: what these places are called, such as layer.
        described: further values that the method reports, such as counts of its modules.
    """

    folder: str
    kind: str
    label: str
    config: dict[str, JsonValue]
    library: str
    backbone: dict[str, str]
    parameters: int
    tensors: list[TensorGroup]
    training: dict[str, JsonValue]
    measured: dict[str, Metric]
    layers: dict[str, dict[str, list[float]]] = {}
    place: str = "layer"
    described: dict[str, JsonValue] = {}


def inspect_graft(
    folder: str | Path,
    *,
    backbone: str | Path | None = None,
    changes: Sequence[str] = (),
    texts: Mapping[str, Sequence[Document]] | None = None,
    length: int = LENGTH,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """Describe a graft by its files and, if a backbone or texts are given, by its effect on the backbone.

    Args:
        folder: folder of the graft.
        backbone: name or folder of the backbone; None loads the recorded one, and only if there are texts.
        changes: overrides of the graft's config, as `KEY=VALUE`; unused if no backbone is loaded.
        texts: documents by name. The quantities of the method's `observe` are measured on the beginning of each text.
        length: number of tokens of each sequence into which these texts are divided.
        device: torch device; None selects the fastest available one.
        trust_remote_code: allow the backbone's repository to run its own code.

    Raises:
        ArtifactError: the folder is not a complete graft, or the graft belongs to another backbone.
        RecipeError: a change does not fit the graft's config, or the record of the training is damaged.
        BackboneError: the backbone can't be loaded, or has no tokenizer for the texts.
    """
    manifest = read_manifest(folder)
    inspection = _inspect_files(Path(folder), manifest)
    if backbone is None and not texts:
        return inspection
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    graft = load_graft(folder, loaded, changes)
    described = dict(graft.describe(loaded))
    spectra: Any = described.pop("spectrum", {})
    layers = {key: dict(values) for key, values in inspection.layers.items()}
    _add_effective_ranks(layers, spectra)
    if texts:
        _add_observations(layers, loaded, graft, texts, length)
    return inspection.model_copy(update={"layers": layers, "described": inspection.described | described})


def _inspect_files(folder: Path, manifest: Manifest) -> Inspection:
    """Return the part of an inspection that needs no backbone."""
    training = dict(manifest.training)
    measured = training.pop("measured", {})
    observed = training.pop("observed", {})
    described = training.pop("described", {})
    backbone = {
        "name": manifest.backbone.name,
        "model_type": manifest.backbone.model_type,
        "fingerprint": Fingerprint(**manifest.backbone.fingerprint).id,
    }
    values = {
        "folder": str(folder),
        "kind": manifest.kind,
        "label": manifest.graft_config().label,
        "config": manifest.config,
        "library": manifest.library,
        "backbone": backbone,
        "parameters": manifest.parameters,
        "tensors": group_tensors(read_tensors(folder)),
        "measured": measured,
        "layers": observed,
        "place": manifest.graft_config().graft_class.observed_place,
        "described": described,
        "training": training,
    }
    return Inspection.parse(values, where=str(folder))


def group_tensors(tensors: Iterable[tuple[str, Tensor]]) -> list[TensorGroup]:
    """Group tensors with the same number of dimensions whose names differ only in their numbers.

    Args:
        tensors: names and tensors, which are read one at a time.
    """
    shapes: defaultdict[tuple[str, int], list[list[int]]] = defaultdict(list)
    ranks: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for name, tensor in tensors:
        key = (re.sub(r"\d+", "*", name), tensor.dim())
        shapes[key].append(list(tensor.shape))
        is_small_matrix = tensor.dim() == 2 and tensor.numel() <= _MAX_RANKED_VALUES
        if is_small_matrix and bool(tensor.isfinite().all()):
            ranks[key].append(effective_rank(tensor))
    groups = []
    for key, shapes_of_group in shapes.items():
        group = TensorGroup(
            name=key[0],
            count=len(shapes_of_group),
            shape=shapes_of_group[0],
            parameters=sum(math.prod(shape) for shape in shapes_of_group),
            effective_rank=ranks[key],
        )
        groups.append(group)
    return groups


def _add_effective_ranks(layers: _Layers, spectra: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Add the effective rank of each layer's singular values, by name."""
    for name, spectrum in spectra.items():
        ranks = [effective_rank(torch.tensor(values).diag()) for values in spectrum]
        layers.setdefault("effective_rank", {})[name] = ranks


def _add_observations(
    layers: _Layers,
    backbone: Backbone,
    graft: Graft,
    texts: Mapping[str, Sequence[Document]],
    length: int,
) -> None:
    """Add the quantities that the method observes on texts."""
    from graftlm.evaluation.evaluator import BackboneEvaluator, EvaluationConfig
    from graftlm.grafted.model import GraftedModel

    evaluator = BackboneEvaluator(backbone, texts, EvaluationConfig(length=length), length)
    with GraftedModel(backbone, {"graft": graft}) as model:
        for name in texts:
            for key, values in evaluator.observe(model, name).items():
                layers.setdefault(key, {})[name] = values


def effective_rank(matrix: Tensor) -> float:
    """Return the effective rank (Σ s²)² / Σ s⁴ over the singular values s of a matrix.

    If n singular values are equal and the others are 0, the effective rank is n. It is computed from the traces of
    W Wᵀ and of its square, without a decomposition. A zero matrix has the effective rank 0.

    Args:
        matrix: the matrix W, (rows, columns), with finite values and at least one.
    """
    wide = matrix.float()
    if matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    wide = wide / wide.abs().max().clamp(min=1e-30)  # keeps fourth powers from underflowing
    gram = wide @ wide.T
    return float(gram.trace() ** 2 / gram.square().sum().clamp(min=1e-30))
