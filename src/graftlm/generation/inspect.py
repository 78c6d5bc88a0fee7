"""Inspect and evaluate trained grafts, and list methods: `graft inspect`, `graft eval`, `graft methods`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import JsonValue
from torch import Tensor

from graftlm.backbone import Backbone, Fingerprint
from graftlm.config import Config
from graftlm.errors import ArtifactError, DataError
from graftlm.evaluation.results import Metric, Results
from graftlm.files.adapter_config import ADAPTER_CONFIG, ADAPTER_TENSORS, read_adapter_config
from graftlm.files.hub import fetch_folder
from graftlm.files.reading import read_text
from graftlm.grafts import Graft, graft_class, kinds
from graftlm.grafts.base import ReadsPeft
from graftlm.store.artifact import backbone_of, load_graft, load_grafts, read_tensors
from graftlm.store.manifest import Manifest, read_manifest

# Models and training take seconds to import, so functions that run models import them.
if TYPE_CHECKING:
    from graftlm.data import Document
    from graftlm.evaluation import TaskConfig
    from graftlm.evaluation.evaluator import EvaluationConfig
    from graftlm.evaluation.measurement import Measurement

LENGTH = 256
_MAX_RANKED_VALUES = 2**24  # the effective rank of a larger matrix takes seconds


class TensorGroup(Config):
    """Tensors whose names differ in their numbers only; `name` has * for each number, `shape` is that of the first.

    `effective_rank` has one value for each matrix, but none for very large matrices.
    """

    name: str
    count: int
    shape: list[int]
    parameters: int
    effective_rank: list[float] = []


class Inspection(Config):
    """The result of `inspect_graft`.

    Args:
        label: the method's name in tables.
        library: the version of graftlm that wrote the graft.
        backbone: its name, model type and fingerprint.
        training: steps, tokens and settings of the training run.
        measured: metrics at the end of the run.
        layers: {quantity: {text or model: one number per layer}}, on the run's test texts and on further texts.
        described: further values that the method reports.
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
    described: dict[str, JsonValue] = {}


class Method(Config):
    """A registered kind of graft; `config` has its keys and defaults, None for a key without default."""

    kind: str
    label: str
    summary: str
    config: dict[str, JsonValue]


class AdapterInspection(Config):
    """The result of `inspect_adapter`.

    Args:
        method: PEFT's name of it.
        base: the model that it was trained on, as the adapter names it.
        targets: the modules that it changes, as its config names them.
        parameters: numbers in its tensors.
        size: of the file of tensors, in bytes.
        sections: by the kind of a graft that takes it, the `graft` section of a recipe.
        refusals: by the kind of a graft that does not take it, why not and what to do instead.
        mergeable: whether PEFT can merge it into the model.
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
    refusals: dict[str, str] = {}
    mergeable: bool


def inspect_adapter(folder: str | Path) -> AdapterInspection:
    """Describe a PEFT adapter, in a folder or on the hub, and what takes it; no backbone is loaded.

    Raises ArtifactError if the folder is no PEFT adapter, its config is damaged, or its weights are pickled, and
    RecipeError if rank or alpha is no number.
    """
    local = fetch_folder(folder, ADAPTER_CONFIG)
    values = read_adapter_config(local)
    read = read_tensors(local, ADAPTER_TENSORS)
    tensors = _group_tensors((path.removeprefix("base_model.model."), tensor) for path, tensor in read)
    name = re.sub(r"^[^A-Za-z]+|[^A-Za-z0-9_-]", "", Path(folder).resolve().name)
    sections, refusals = {}, {}
    for kind in kinds():
        if issubclass(method := graft_class(kind), ReadsPeft):
            try:
                sections[kind] = method.adapter_section(name or "expert", Path(folder))
            except ArtifactError as error:
                refusals[kind] = str(error)
    remedies = ("merge it", "convert it")  # what PEFT can convert, it can merge
    return AdapterInspection.parse(
        {
            "folder": str(folder),
            "method": str(values.get("peft_type")),
            "base": values.get("base_model_name_or_path"),
            "rank": values.get("r"),
            "alpha": next((value for key, value in values.items() if key.endswith("_alpha")), None),
            "targets": values.get("target_modules"),
            "parameters": sum(group.parameters for group in tensors),
            "size": (local / ADAPTER_TENSORS).stat().st_size,
            "tensors": tensors,
            "sections": sections,
            "refusals": refusals,
            "mergeable": bool(sections) or any(remedy in text for text in refusals.values() for remedy in remedies),
        },
        where=str(local / ADAPTER_CONFIG),
    )


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
    """Describe a graft in a folder from its files; with a backbone or texts also from forward passes.

    Args:
        backbone: the backbone's name or folder; None loads the recorded one, but only if there are texts.
        changes: overrides of the graft's config, as `KEY=VALUE`.
        texts: documents by name; the method's per-layer quantities are measured on the start of each.
        length: tokens per row of these texts.

    Raises ArtifactError if the folder is not a complete graft, or belongs to another backbone, and BackboneError if the
    backbone can't be loaded.
    """
    manifest = read_manifest(folder)
    inspection = _inspect_files(Path(folder), manifest)
    if backbone is None and not texts:
        return inspection
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    layers = {key: dict(values) for key, values in inspection.layers.items()}
    described = _inspect_layers(loaded, load_graft(folder, loaded, changes), texts or {}, length, layers)
    return inspection.model_copy(update={"layers": layers, "described": inspection.described | described})


def _inspect_files(folder: Path, manifest: Manifest) -> Inspection:
    """The part of an inspection that needs no backbone."""
    training = dict(manifest.training)
    return Inspection.parse(
        {
            "folder": str(folder),
            "kind": manifest.kind,
            "label": manifest.graft_config().label,
            "config": manifest.config,
            "library": manifest.library,
            "backbone": {
                "name": manifest.backbone.name,
                "model_type": manifest.backbone.model_type,
                "fingerprint": Fingerprint(**manifest.backbone.fingerprint).id,
            },
            "parameters": manifest.parameters,
            "tensors": _group_tensors(read_tensors(folder)),
            "measured": training.pop("measured", {}),
            "layers": training.pop("observed", {}),
            "described": training.pop("described", {}),
            "training": training,
        },
        where=str(folder),
    )


def _group_tensors(tensors: Iterator[tuple[str, Tensor]]) -> list[TensorGroup]:
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for name, tensor in tensors:
        key = re.sub(r"\d+", "*", name), tensor.dim()
        empty = {"name": key[0], "count": 0, "shape": list(tensor.shape), "parameters": 0, "effective_rank": []}
        group = groups.setdefault(key, empty)
        group["count"] += 1
        group["parameters"] += tensor.numel()
        if tensor.dim() == 2 and tensor.numel() <= _MAX_RANKED_VALUES and bool(tensor.isfinite().all()):
            group["effective_rank"].append(effective_rank(tensor))
    return [TensorGroup(**group) for group in groups.values()]


def _inspect_layers(
    backbone: Backbone,
    graft: Graft,
    texts: Mapping[str, Sequence[Document]],
    length: int,
    layers: dict[str, dict[str, list[float]]],
) -> dict[str, Any]:
    """What a graft describes given its backbone; per-layer quantities are added to `layers`."""
    from graftlm.evaluation.evaluator import BackboneEvaluator, EvaluationConfig
    from graftlm.grafted.model import GraftedModel

    described = dict(graft.describe(backbone))
    for name, spectra in described.pop("spectrum", {}).items():
        layers.setdefault("effective_rank", {})[name] = [effective_rank(torch.tensor(s).diag()) for s in spectra]
    if texts:
        evaluator = BackboneEvaluator(backbone, texts, EvaluationConfig(length=length), length)
        with GraftedModel(backbone, {"graft": graft}) as model:
            for name in texts:
                for key, values in evaluator.observe(model, name).items():
                    layers.setdefault(key, {})[name] = values
    return described


def effective_rank(matrix: Tensor) -> float:
    """(Σ s²)² / Σ s⁴ over the singular values s of a matrix; n equal values give n.

    Computed from the traces of W Wᵀ and its square, without a decomposition.
    """
    wide = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / wide.abs().max().clamp(min=1e-30)  # fourth powers must not underflow
    gram = wide @ wide.T
    return float(gram.trace() ** 2 / gram.square().sum().clamp(min=1e-30))


def evaluate_graft(
    folder: str | Path,
    *,
    backbone: str | Path | None = None,
    changes: Sequence[str] = (),
    texts: Mapping[str, Sequence[Document]] | None = None,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    evaluation: EvaluationConfig | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Results:
    """Measure a trained graft and its bare backbone; `inspect_graft` describes the other arguments.

    Args:
        folder: the graft's, or a model's.
        texts: documents by evaluation set; `old` and `new` give the metrics forgotten and learned.
        tasks: tasks of lm-evaluation-harness; their metrics are named `<task>_<metric>`.
        limit: maximum number of questions per task.
        evaluation: settings of the measurement, and tasks from files; by default without decoding speed.

    Raises DataError if there is neither a text nor a task, or an example can't be read, and ArtifactError if the folder
    is not a complete graft, or belongs to another backbone, and BackboneError if the backbone can't be loaded, and
    MissingExtraError if tasks need lm-eval, which is not installed.
    """
    from graftlm.evaluation.evaluator import BackboneEvaluator, EvaluationConfig
    from graftlm.evaluation.harness import run_lm_eval
    from graftlm.grafted.model import GraftedModel

    evaluation = evaluation or EvaluationConfig(decode_prompts=0)
    if not texts and not tasks and not evaluation.tasks:
        raise DataError(
            "There is nothing to measure: name a text (--text new=FILE), examples (--examples sums=FILE) "
            "or a task (--tasks NAME)."
        )
    if read_manifest(folder).graft_config().needs_tasks:
        raise DataError(
            f"The graft {folder} answers by heads of its own, and texts and examples need a language model: measure it "
            "on rows of its tasks (--rows NAME=FILE)."
        )
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    grafts = load_grafts(folder, loaded, changes)
    evaluator = BackboneEvaluator(loaded, texts or {}, evaluation, evaluation.length or LENGTH)

    def add_lm_eval(measurement: Measurement, model: Any) -> Measurement:
        scores = run_lm_eval(model, evaluator.tokenizer, tasks, limit=limit) if tasks else {}
        for task, metrics in scores.items():
            measurement.add_metrics({f"{task}_{name}": value for name, value in metrics.items()})
        return measurement

    bare = add_lm_eval(evaluator.measure_backbone(), loaded.model)
    with GraftedModel(loaded, grafts) as model:
        graft = grafts["graft"]
        grafted = add_lm_eval(evaluator.measure(model, graft.config.kind, graft.config.label), model)
    details: dict[str, JsonValue] = {"statistics": {grafted.row.id: grafted.details.get("statistics", {})}}
    if evaluator.tasks:
        details["tasks"] = {measurement.row.id: measurement.details.get("tasks", {}) for measurement in (bare, grafted)}
    return Results.here("eval", [bare.row, grafted.row], details=details)


def read_texts(named: Sequence[str], *, text_column: str = "text") -> dict[str, list[Document]]:
    """Documents by name, from `name=path` or a path; a path alone is named by its stem.

    Raises DataError if a path can't be read, or a name appears twice.
    """
    from graftlm.data import SourceConfig, build_documents

    return {
        name: build_documents([SourceConfig(path=path, text_column=text_column)])
        for name, path in files_by_name(named, "texts", "--text").items()
    }


def read_tasks(named: Sequence[str], **settings: Any) -> dict[str, TaskConfig]:
    """Tasks by name, from files of examples as `name=file` or a file; a file alone is named by its stem.

    `settings` are keys for all of these tasks, such as `metric`; None keeps a key's default.

    Raises DataError if a name appears twice, or examples or their metric are missing, RecipeError for a bad setting.
    """
    from graftlm.evaluation import TaskConfig

    values = {key: value for key, value in settings.items() if value is not None}
    if ("metric" in values) != bool(named):
        raise DataError(
            "Examples and their metric go together, and one of them is missing: "
            "write --examples sums=FILE --metric exact-match, or chrf, pass@1 or log-perplexity."
        )
    files = files_by_name(named, "files of examples", "--examples")
    return {name: TaskConfig.parse(values | {"path": path}, where=f"--examples {name}") for name, path in files.items()}


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without empty ones. Raises DataError if the file can't be read, or has no text."""
    lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{path} has no text: write one question a line.")
    return lines


def files_by_name(named: Sequence[str], what: str, option: str) -> dict[str, str]:
    """Paths by name, from `name=path` or a path, named by its stem. Raises DataError if a name appears twice."""
    paths: dict[str, str] = {}
    for argument in named:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            name, path = Path(argument).stem, argument
        if name in paths:
            raise DataError(f"Two {what} are called {name}: name them apart, as in {option} first=FILE.")
        paths[name] = path
    return paths


def methods() -> list[Method]:
    """Every registered kind of graft."""
    return [_describe_method(kind, graft_class(kind)) for kind in kinds()]


def _describe_method(kind: str, method: type[Graft]) -> Method:
    config: dict[str, Any] = {}
    for name, field in method.Config.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        config[name] = default.model_dump(mode="json") if isinstance(default, Config) else default
    del config["kind"]
    summary = (inspect.getdoc(method) or "").partition("\n")[0]
    return Method(kind=kind, label=method.label or kind, summary=summary, config=config)
