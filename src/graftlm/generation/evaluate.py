"""Measure trained grafts: `graft eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from graftlm.errors import DataError
from graftlm.evaluation.results import Results, Row
from graftlm.generation.inspect import LENGTH
from graftlm.store.artifact import backbone_of, load_grafts
from graftlm.store.manifest import read_manifest

# Models and training take seconds to import, so functions that run models import them.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from graftlm.data import Document
    from graftlm.evaluation.evaluator import BackboneEvaluator, EvaluationConfig
    from graftlm.evaluation.measurement import FrozenModel, Measurement


def evaluate_graft(  # noqa: PLR0913  # keyword arguments of a public function
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
    """Measure a trained graft and its bare backbone.

    Args:
        folder: folder of a graft, or OWNER/NAME on the hub.
        backbone: name or folder of the graft's backbone; None uses the recorded one.
        changes: overrides of the graft's config, as `KEY=VALUE`.
        texts: documents by evaluation set. The set `old` gives the metric `forgotten`, and `new` gives `learned`.
        tasks: tasks of lm-evaluation-harness; their metrics are named `<task>_<metric>`.
        limit: maximum number of questions per task of lm-evaluation-harness; None asks all.
        evaluation: settings of the measurement, and tasks from files; None measures without the decoding speed.
        device: torch device; None selects the fastest available one.
        trust_remote_code: allow the backbone's repository to run its own code.

    Returns:
        Results with a row of the bare backbone and a row of the graft. Grafts that `graft grow` had attached while
        this one was trained are attached too.

    Raises:
        DataError: there is neither a text nor a task, an example can't be read, or the graft predicts with heads.
        ArtifactError: the folder is not a complete graft, or the graft belongs to another backbone.
        RecipeError: a change does not fit the graft's config.
        BackboneError: the backbone can't be loaded, or has no tokenizer.
        MissingExtraError: tasks need lm-eval, which is not installed.
    """
    from graftlm.evaluation.evaluator import BackboneEvaluator, EvaluationConfig
    from graftlm.grafted.model import GraftedModel

    evaluation = evaluation or EvaluationConfig(decode_prompts=0)
    manifest = read_manifest(folder)
    if not (texts or tasks or evaluation.tasks or evaluation.harness or evaluation.preset):
        raise DataError(
            "There is nothing to measure: name a text (--text new=FILE), examples (--examples sums=FILE) "
            "or a task (--tasks NAME)."
        )
    if manifest.graft_config().needs_tasks:
        raise DataError(
            f"The graft {folder} predicts with its own heads, but texts and examples need a language model: measure it "
            "on rows of its tasks (--rows NAME=FILE)."
        )
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    grafts = load_grafts(folder, loaded, changes)
    evaluator = BackboneEvaluator(loaded, texts or {}, evaluation, evaluation.length or LENGTH)
    bare = evaluator.measure_backbone()
    _add_lm_eval(bare, loaded.model, evaluator, tasks, limit)
    config = grafts["graft"].config
    with GraftedModel(loaded, grafts) as model:
        grafted = evaluator.measure(model, config.kind, config.label)
        _add_lm_eval(grafted, model, evaluator, tasks, limit)
    details: dict[str, JsonValue] = {"statistics": {grafted.row.id: grafted.details.get("statistics", {})}}
    if "scored_text" in bare.details:
        details["scored_text"] = {bare.row.id: bare.details["scored_text"]}
    if evaluator.tasks:
        details["tasks"] = {measurement.row.id: measurement.details.get("tasks", {}) for measurement in (bare, grafted)}
    if evaluator.benchmarks:
        details["harness"] = {measurement.row.id: measurement.details["harness"] for measurement in (bare, grafted)}
    rows = [bare.row, grafted.row]
    frozen_models: list[FrozenModel] = grafted.details.get("frozen_models", [])
    rows += [Row.model_validate(frozen["row"]) for frozen in frozen_models if "row" in frozen]
    if frozen_models:
        details["frozen_models"] = {grafted.row.id: grafted.details["frozen_models"]}
    return Results.here("eval", rows, details=details)


def _add_lm_eval(
    measurement: Measurement,
    model: PreTrainedModel,
    evaluator: BackboneEvaluator,
    tasks: Sequence[str],
    limit: int | None,
) -> None:
    """Add the metrics of lm-evaluation-harness to a measurement."""
    from graftlm.evaluation.harness import run_lm_eval

    if not tasks:
        return
    scores = run_lm_eval(
        model,
        evaluator.tokenizer_of(model),
        tasks,
        limit=limit,
        confirm_unsafe_code=evaluator.evaluation.confirm_unsafe_code,
    )
    for task, metrics in scores.items():
        named = {f"{task}_{name}": value for name, value in metrics.items()}
        measurement.add_metrics(named)
