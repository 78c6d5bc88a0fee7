"""What a trained graft is, and how it does on any text: `graft inspect`, `graft eval` and `graft methods`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from torch import Tensor

from graftlm.artifact import Manifest, backbone_of, is_model, load_graft, read_manifest, read_tensors
from graftlm.backbone import Backbone, Fingerprint
from graftlm.config import Config
from graftlm.data import Document, SourceConfig, build_documents
from graftlm.errors import ArtifactError, DataError
from graftlm.evaluation import Metric, Results, TaskConfig, run_lm_eval
from graftlm.evaluation.results import FILE_NAME as RESULTS_NAME
from graftlm.grafts import Graft, GraftedModel, graft_class, kinds
from graftlm.runs.graft_run import BackboneEvaluator, EvaluationConfig, graft_label
from graftlm.runs.run import Measurement

LENGTH = 256
# A larger matrix takes seconds.
_LARGEST = 2**24


class TensorGroup(Config):
    """Tensors that differ only in the numbers of their names, such as a layer's.

    Args:
        name: their name, with * for the numbers.
        shape: of the first.
        effective_rank: of each matrix, see `effective_rank`; empty for what is no matrix, or a very large one.
    """

    name: str
    count: int
    shape: list[int]
    parameters: int
    effective_rank: list[float] = []


class Inspection(Config):
    """What `inspect_graft` found.

    Args:
        backbone: its name, model type and the id of its fingerprint.
        training: steps, tokens and settings of the run.
        measured: the metrics at its end.
        layers: {quantity: {whose or on which text: one number a layer}}, those of the run's own tests among them.
        described: what else the graft tells of itself.
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
    """One registered kind of graft.

    Args:
        config: its keys with their defaults, None for a key without one.
    """

    kind: str
    label: str
    summary: str
    config: dict[str, JsonValue]


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
    """What is in a graft's folder; beside its backbone when that is named, and at work when there are texts.

    Args:
        folder: the graft's folder.
        backbone: the backbone's name or folder; None leaves it out, unless texts need it.
        changes: of the graft's config, as `KEY=VALUE`.
        texts: documents by name; the graft is watched while it reads the start of each.
        length: tokens per row of what it reads.
        device: where models run; None takes the fastest there is.
        trust_remote_code: run model code that comes with the backbone.

    Raises:
        ArtifactError: the folder is not a whole graft, or that of another backbone.
        BackboneError: the backbone can't be loaded.
    """
    manifest = read_manifest(folder)
    found = _still(Path(folder), manifest)
    if backbone is None and not texts:
        return found
    live = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    layers, described = _at_work(live, load_graft(folder, live, changes), texts or {}, length)
    both = {key: found.layers.get(key, {}) | layers.get(key, {}) for key in {**found.layers, **layers}}
    return found.model_copy(update={"layers": both, "described": found.described | described})


def _still(folder: Path, manifest: Manifest) -> Inspection:
    """What the files alone say."""
    training = dict(manifest.training)
    return Inspection.parse(
        {
            "folder": str(folder),
            "kind": manifest.kind,
            "label": graft_label(manifest.graft_config()),
            "config": manifest.config,
            "library": manifest.library,
            "backbone": {
                "name": manifest.backbone.name,
                "model_type": manifest.backbone.model_type,
                "fingerprint": Fingerprint(**manifest.backbone.fingerprint).id,
            },
            "parameters": manifest.parameters,
            "tensors": _groups(read_tensors(folder)),
            "measured": training.pop("measured", {}),
            "layers": training.pop("observed", {}),
            "described": training.pop("described", {}),
            "training": training,
        },
        where=str(folder),
    )


def _groups(tensors: Iterator[tuple[str, Tensor]]) -> list[TensorGroup]:
    groups: dict[tuple[str, int], TensorGroup] = {}
    for name, tensor in tensors:
        key = re.sub(r"\d+", "*", name), tensor.dim()
        last = groups.get(key)
        ranks = [effective_rank(tensor)] if tensor.dim() == 2 and tensor.numel() <= _LARGEST else []
        groups[key] = TensorGroup(
            name=key[0],
            count=1 + (last.count if last else 0),
            shape=last.shape if last else list(tensor.shape),
            parameters=tensor.numel() + (last.parameters if last else 0),
            effective_rank=[*(last.effective_rank if last else []), *ranks],
        )
    return list(groups.values())


def _at_work(
    backbone: Backbone, graft: Graft, texts: Mapping[str, Sequence[Document]], length: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
    """Layers and descriptions that need the backbone."""
    described = dict(graft.describe(backbone))
    layers: dict[str, dict[str, list[float]]] = {}
    if "spectrum" in described:
        spectra = described.pop("spectrum")
        layers["effective_rank"] = {whose: [rank_of(s) for s in each] for whose, each in spectra.items()}
    if texts:
        evaluator = BackboneEvaluator(backbone, texts, EvaluationConfig(length=length), length)
        with GraftedModel(backbone, {"graft": graft}) as model:
            for name in texts:
                for key, values in evaluator.observe(model, name).items():
                    layers.setdefault(key, {})[name] = values
    return layers, described


def effective_rank(matrix: Tensor) -> float:
    """How many directions a matrix uses: (sum of s^2)^2 / sum of s^4 over its singular values s; n for n equal ones.

    Through traces of W W^T, without a decomposition.
    """
    wide = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / wide.abs().max().clamp(min=1e-30)  # so that no fourth power underflows
    gram = wide @ wide.T
    return float(gram.trace() ** 2 / gram.square().sum().clamp(min=1e-30))


def rank_of(spectrum: Sequence[float]) -> float:
    """`effective_rank` from singular values."""
    squares = [value * value for value in spectrum]
    return sum(squares) ** 2 / max(sum(square * square for square in squares), 1e-30)


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
    """Measure a trained graft beside its bare backbone.

    Args:
        folder: the graft's folder.
        backbone: where the backbone is; None takes the name that the graft remembers.
        changes: of the graft's config, as `KEY=VALUE`.
        texts: documents by set; `old` and `new` give what was forgotten and learned.
        tasks: tasks of lm-evaluation-harness; their metrics are called `<task>_<metric>`.
        limit: of questions per task.
        evaluation: how much is measured on the texts, and tasks of one's own; by default without decoding speed.
        device: where models run; None takes the fastest there is.
        trust_remote_code: run model code that comes with the backbone.

    Raises:
        DataError: there is neither text nor task, or an example can't be read.
        ArtifactError: the folder is not a whole graft, or that of another backbone.
        BackboneError: the backbone can't be loaded.
        MissingExtraError: tasks need lm-eval, which is not installed.
    """
    evaluation = evaluation or EvaluationConfig(decode_prompts=0)
    if not texts and not tasks and not evaluation.tasks:
        raise DataError(
            "There is nothing to measure: name a text (--text new=FILE), examples (--examples sums=FILE) "
            "or a task (--tasks NAME)."
        )
    if not is_model(folder) and read_manifest(folder).graft_config().needs_tasks:
        raise DataError(
            f"The graft {folder} answers by heads of its own, and texts and examples need a language model: measure it "
            "on rows of its tasks (--rows NAME=FILE)."
        )
    live = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    graft = load_graft(folder, live, changes)
    evaluator = BackboneEvaluator(live, texts or {}, evaluation, LENGTH)

    def with_tasks(measured: Measurement, model: Any) -> Measurement:
        found = run_lm_eval(model, evaluator.tokenizer, tasks, limit=limit) if tasks else {}
        more = {f"{task}_{name}": value for task, metrics in found.items() for name, value in metrics.items()}
        measured.row = measured.row.model_copy(update={"metrics": measured.row.metrics | more})
        return measured

    bare = with_tasks(evaluator.measure_backbone(), live.model)
    with GraftedModel(live, {"graft": graft}) as model:
        grafted = with_tasks(evaluator.measure(model, graft.config.kind, graft_label(graft.config)), model)
    details: dict[str, JsonValue] = {"statistics": {grafted.row.id: grafted.details.get("statistics", {})}}
    if evaluator.tasks:
        details["tasks"] = {measured.row.id: measured.details.get("tasks", {}) for measured in (bare, grafted)}
    return Results.here("eval", [bare.row, grafted.row], details=details)


def read_texts(named: Sequence[str], *, text_column: str = "text") -> dict[str, list[Document]]:
    """Documents by name, from `name=path`, or from a path alone, which is then called by its stem.

    Raises:
        DataError: a path can't be read, or a name appears twice.
    """
    return {
        name: build_documents([SourceConfig(path=path, text_column=text_column)])
        for name, path in files_by_name(named, "texts", "--text").items()
    }


def read_tasks(named: Sequence[str], **settings: Any) -> dict[str, TaskConfig]:
    """Tasks by name, from `name=file`, or from a file alone, which is then called by its stem.

    Args:
        named: where the examples are.
        settings: keys of every one of these tasks, such as `metric`; those that are None keep their default.

    Raises:
        DataError: a name appears twice, or there is a metric and nothing to measure with it, or the other way round.
        RecipeError: a setting does not fit.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    if ("metric" in given) != bool(named):
        raise DataError(
            "Examples and their metric go together, and one of them is missing: "
            "write --examples sums=FILE --metric exact-match, or chrf, pass@1 or log-perplexity."
        )
    files = files_by_name(named, "files of examples", "--examples")
    return {name: TaskConfig.parse(given | {"path": path}, where=f"--examples {name}") for name, path in files.items()}


def files_by_name(named: Sequence[str], what: str, option: str) -> dict[str, str]:
    """Paths by name, from `name=path`, or from a path alone, which is then called by its stem.

    Raises:
        DataError: a name appears twice.
    """
    paths: dict[str, str] = {}
    for one in named:
        name, equals, path = one.partition("=")
        if not equals or Path(one).exists():
            name, path = Path(one).stem, one
        if name in paths:
            raise DataError(f"Two {what} are called {name}: name them apart, as in {option} first=FILE.")
        paths[name] = path
    return paths


def is_results(folder: str | Path) -> bool:
    """Whether a folder holds a report rather than a graft.

    Raises:
        ArtifactError: it holds neither.
    """
    folder = Path(folder)
    if (folder / "graft.json").exists():
        return False
    if not (folder / RESULTS_NAME).exists():
        raise ArtifactError(f"{folder} has no graft.json and no {RESULTS_NAME}: name a folder that graft train wrote.")
    return True


def files_of(folder: str | Path) -> dict[str, list[str]]:
    """What a run left in its folder: grafts, report and plots."""
    patterns = {
        "graft": ("graft/", "*/graft/"),
        "model": ("model/",),
        "report": ("report.md",),
        "results": (RESULTS_NAME,),
        "plot": ("*.png",),
    }
    found = {
        kind: sorted(str(path) for pattern in each for path in Path(folder).glob(pattern))
        for kind, each in patterns.items()
    }
    return {kind: paths for kind, paths in found.items() if paths}


def methods() -> list[Method]:
    """Every registered kind of graft."""
    return [_method(kind, graft_class(kind)) for kind in kinds()]


def _method(kind: str, room: type[Graft]) -> Method:
    summary = (inspect.getdoc(room) or "").partition("\n")[0]
    fields = {name: field for name, field in room.Config.model_fields.items() if name != "kind"}
    defaults = {n: None if f.is_required() else f.get_default(call_default_factory=True) for n, f in fields.items()}
    defaults = {n: one.model_dump(mode="json") if isinstance(one, Config) else one for n, one in defaults.items()}
    return Method(kind=kind, label=room.label or kind, summary=summary, config=defaults)
