"""Measure a trained classifier of sequences: `graft eval` on the folder of its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from graftlm.backbone.backbone import move
from graftlm.data.sequences import Sequences, read_task, read_test
from graftlm.evaluation import Metric, Results, Row
from graftlm.evaluation.classification import accuracy_metrics, predict_classes
from graftlm.evaluation.cost import count_parameters
from graftlm.processes import process_state
from graftlm.training.classifier import ClassifierRecord, read_classifier


def evaluate_classifier(
    folder: str | Path,
    files: Mapping[str, str],
    *,
    batch_size: int = 64,
    device: str | None = None,
) -> Results:
    """Measure a classifier on test rows.

    Args:
        folder: its folder, `model` in the output of a recipe.
        files: files of rows by name, in the form of those of training; without files, the recipe's own test rows.
        batch_size: rows of a forward pass.
        device: torch device; None selects the fastest available one.

    Returns:
        Results with one row, whose metrics end with the name of their file, if files are given.

    Raises:
        ArtifactError: the folder is not a complete classifier, or its files are damaged.
        DataError: a file can't be read, or has a class that the classifier does not have.
        EvaluationError: a prediction is not finite.
    """
    model, record = read_classifier(folder)
    move(model, device or str(process_state().device))
    metrics: dict[str, Metric] = {}
    notes: list[str] = []
    for name, sequences in _tests(record, files, notes).items():
        predicted = predict_classes(model, sequences, batch_size=batch_size)
        for metric, value in accuracy_metrics(predicted, sequences.labels, record.commonest).items():
            metrics[f"{metric}_{name}" if name else metric] = value
    metrics["parameters"] = count_parameters(model.parameters())
    row = Row(id=model.config.model_type, label=model.config.model_type, metrics=metrics)
    return Results.here("eval", [row], details={"notes": notes} if notes else {})


def _tests(record: ClassifierRecord, files: Mapping[str, str], notes: list[str]) -> dict[str, Sequences]:
    """Return the test sequences by name, which is empty for the recipe's own ones; `notes` receives notes on them."""
    tests: dict[str, Sequences] = {}
    if not files:
        task = read_task(record.data)
        notes.extend(task.notes)
        tests[""] = task.test
    for name, path in files.items():
        tests[name], of_file = read_test(record.data, record.classes, path)
        notes.extend(of_file)
    return tests
