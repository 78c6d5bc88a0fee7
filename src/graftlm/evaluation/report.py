"""The report of a run: a folder with `results.json`, `report.md` and plots.

`results.details` has the values of all figures, so that a report can be drawn again from its JSON alone:

    statistics   {row id: {"open_share": {domain: [per layer]}, "spectrum": {name: [values] or [[values] per layer]}}}
    losses       {row id: [[step, loss], ...]}
    trained      {row id: `TrainingDetails`}
    scored_text  {row id: {test set: [source, see `scored_parts`]}}
    text_sets    {row id: {"new": [name of a set], "old": [name of a set]}}, if sets have names
    matched_sizes, own_text_counts, asked_questions, closed_questions, frozen_models, method_differences: see `remarks`
        and `differences`
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.errors import DataError
from graftlm.evaluation.remarks import text_sets
from graftlm.evaluation.report_tables import render_markdown
from graftlm.evaluation.results import FILE_NAME, Results
from graftlm.evaluation.scores import difference_name
from graftlm.files.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FILES = {
    "graft": ("graft/", "*/graft/"),
    "model": ("model/",),
    "report": ("report.md",),
    "results": (FILE_NAME,),
    "plot": ("*.png",),
}


def write_report(results: Results, out: str | Path, *, plots: Mapping[str, Figure] | None = None) -> Path:
    """Write `results.json`, `report.md` and PNGs, and return the path of `report.md`.

    Args:
        results: the measurements; their `details` give the figures.
        out: the folder; it is created if necessary.
        plots: further figures by file name without suffix; they replace figures of the same name.

    Raises:
        EvaluationError: the folder can't be written to.
        DataError: the statistics or the losses in the details are not mappings.
    """
    from graftlm.evaluation.plots import save

    out = Path(out)
    results.write(out)
    figures = _draw_figures(results)
    figures.update(plots or {})
    pictures = []
    for name, figure in figures.items():
        path = save(figure, out / f"{name}.png")
        pictures.append(path.name)
    text = render_markdown(results, pictures)
    return write_atomically(out / "report.md", text.encode())


def _draw_figures(results: Results) -> dict[str, Figure]:
    """Return the figures of a report by file name without suffix."""
    from graftlm.evaluation import plots  # matplotlib takes half a second to import

    labels = {row.id: row.label for row in results.rows}
    methods = [row for row in results.rows if row.id != "backbone"]
    figures: dict[str, Figure] = {}
    if any({"learned", "forgotten"} <= row.metrics.keys() for row in methods):
        figures["learn-against-forget"] = plots.learn_against_forget(methods)
    sets = text_sets(results)
    changes = [difference_name(name, sets) for name in (*sets.new, *sets.old)] if sets.are_named else []
    if any(change in row.metrics for row in methods for change in changes):
        figures["by-set"] = plots.by_set(methods, changes)
    for row_id, value in _mapping(results.details.get("statistics"), "statistics").items():
        statistics = _mapping(value, f"statistics.{row_id}")
        label = labels.get(row_id, row_id)
        if statistics.get("open_share"):
            title = f"{label}: open gates"
            figures[f"open-share-{row_id}"] = plots.open_share(statistics["open_share"], title=title)
        if statistics.get("spectrum"):
            title = f"{label}: spectrum of the gating matrices"
            figures[f"spectrum-{row_id}"] = plots.spectrum(statistics["spectrum"], title=title)
    losses = _mapping(results.details.get("losses"), "losses")
    if losses:
        curves = {labels.get(row_id, row_id): pairs for row_id, pairs in losses.items()}
        figures["training-loss"] = plots.loss_curves(curves)
    return figures


def report_files(folder: str | Path) -> dict[str, list[str]]:
    """Return the files of a run by kind: graft, model, report, results, plot.

    Args:
        folder: the output folder of the run.

    Returns:
        The sorted paths of each kind; kinds without files are left out.
    """
    files: dict[str, list[str]] = {}
    for kind, patterns in _FILES.items():
        paths: list[str] = []
        for pattern in patterns:
            paths += [str(path) for path in Path(folder).glob(pattern)]
        if paths:
            files[kind] = sorted(paths)
    return files


def _mapping(value: object, key: str) -> dict[str, Any]:
    """Return a part of the details, which may be absent, as a mapping."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"details.{key} of the results is of type {type(value).__name__}, but a mapping is expected: write it in "
            "the form that the documentation of graftlm.evaluation.report shows."
        )
    return value
