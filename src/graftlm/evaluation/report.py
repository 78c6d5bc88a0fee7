"""The report of a run: a folder with `results.json`, `report.md` and plots.

`results.details` holds the values of all figures, so a report can be drawn again from its JSON alone:

    statistics   {row id: {"open_share": {domain: [per layer]}, "spectrum": {name: [values] or [[values] per layer]}}}
    losses       {row id: [[step, loss], ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.errors import DataError
from graftlm.evaluation.result_tables import render_markdown
from graftlm.evaluation.results import FILE_NAME, Results
from graftlm.files.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(results: Results, out: str | Path, *, plots: Mapping[str, Figure] | None = None) -> Path:
    """Write `results.json`, `report.md` and PNGs to the folder `out`; returns the path of `report.md`.

    Args:
        results: the measurements; their `details` give the figures.
        out: the folder; it is created if necessary.
        plots: further figures by file name without suffix; they replace figures of the same name.

    Raises EvaluationError if the folder can't be written to.
    """
    from graftlm.evaluation.plots import save

    out = Path(out)
    results.write(out)
    figures = _draw_figures(results) | dict(plots or {})
    pictures = [save(figure, out / f"{name}.png").name for name, figure in figures.items()]
    return write_atomically(out / "report.md", render_markdown(results, pictures).encode())


def _draw_figures(results: Results) -> dict[str, Figure]:
    from graftlm.evaluation import plots  # matplotlib takes half a second to import

    labels = {row.id: row.label for row in results.rows}
    methods = [row for row in results.rows if row.id != "backbone"]
    figures: dict[str, Figure] = {}
    if any({"learned", "forgotten"} <= row.metrics.keys() for row in methods):
        figures["learn-against-forget"] = plots.learn_against_forget(methods)
    for row_id, statistics in _mapping(results.details.get("statistics")).items():
        label = labels.get(row_id, row_id)
        if share := _mapping(statistics).get("open_share"):
            figures[f"open-share-{row_id}"] = plots.open_share(share, title=f"{label}: open gates")
        if values := _mapping(statistics).get("spectrum"):
            figures[f"spectrum-{row_id}"] = plots.spectrum(values, title=f"{label}: spectrum of the gating matrices")
    if losses := _mapping(results.details.get("losses")):
        figures["training-loss"] = plots.loss_curves({labels.get(key, key): pairs for key, pairs in losses.items()})
    return figures


def report_files(folder: str | Path) -> dict[str, list[str]]:
    """Paths of the grafts, models, report and plots in a run's folder, by kind."""
    patterns = {"graft": ["graft/", "*/graft/"], "model": ["model/"], "report": ["report.md"]}
    patterns |= {"results": [FILE_NAME], "plot": ["*.png"]}
    files = {
        kind: sorted(str(path) for glob in globs for path in Path(folder).glob(glob))
        for kind, globs in patterns.items()
    }
    return {kind: paths for kind, paths in files.items() if paths}


def _mapping(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError("The details of the results do not hold a mapping of row ids where one is expected.")
    return value
