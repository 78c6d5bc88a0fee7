"""The learning-and-forgetting report: a folder with `results.json`, `report.md` and plots.

    learned   = backbone's new - method's new      forgotten = method's old - backbone's old      (nats per token)

Figures come from `results.details`, so a report can be drawn again from its JSON alone:

    statistics   {row id: {"open_share": {domain: [per layer]}, "spectrum": {name: [values] or [[values] per layer]}}}
    paths        {row id: [[forgotten, learned], ...]}, other settings of a row, in order
    losses       {row id: [[step, loss], ...]}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.errors import DataError
from graftlm.evaluation.metrics import Scores, paired_difference
from graftlm.evaluation.results import Interval, Results, Row
from graftlm.evaluation.tables import render_markdown
from graftlm.io import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def learning_and_forgetting(backbone: Mapping[str, Scores], method: Mapping[str, Scores]) -> dict[str, Interval]:
    """The metrics of one method beside its backbone's, from scores per evaluation set ("old", "new", and any other).

    Gives `<set>` and `<set>_bpb` for each set of `method`, `learned` where both have "new", and `forgotten` where both
    have "old": paired bootstrap intervals, over the same windows.

    Raises:
        EvaluationError: the two were scored on other windows.
    """
    metrics: dict[str, Interval] = {}
    for name, scores in method.items():
        metrics[name] = scores.interval("nats_per_token")
        metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")
    if "new" in backbone and "new" in method:
        metrics["learned"] = paired_difference(backbone["new"], method["new"])
    if "old" in backbone and "old" in method:
        metrics["forgotten"] = paired_difference(method["old"], backbone["old"])
    return metrics


def write_report(results: Results, out: str | Path, *, plots: Mapping[str, Figure] | None = None) -> Path:
    """Write `results.json`, `report.md` and PNGs to the folder `out`; gives the path of `report.md`.

    Args:
        results: what was measured; its `details` give the figures.
        out: made when it does not exist.
        plots: further figures, by file name without ending; one of a known name takes that one's place.

    Raises:
        EvaluationError: the folder can't be written to.
    """
    out = Path(out)
    results.write(out)
    figures = draw_figures(results) | dict(plots or {})
    pictures = _save_figures(figures, out)
    return write_atomically(out / "report.md", render_markdown(results, pictures).encode())


def draw_figures(results: Results) -> dict[str, Figure]:
    """The figures that the results hold the values for, by file name without ending."""
    from graftlm.evaluation import plots  # matplotlib takes half a second that `graft --help` should not wait for

    labels = {row.id: row.label for row in results.rows}
    figures: dict[str, Figure] = {}
    if any({"learned", "forgotten"} <= row.metrics.keys() for row in _methods(results)):
        figures["learn-against-forget"] = plots.learn_against_forget(
            _methods(results), _mapping(results.details.get("paths"))
        )
    for row_id, statistics in _mapping(results.details.get("statistics")).items():
        label = labels.get(row_id, row_id)
        if share := _mapping(statistics).get("open_share"):
            figures[f"open-share-{row_id}"] = plots.open_share(share, title=f"{label}: open gates")
        if values := _mapping(statistics).get("spectrum"):
            figures[f"spectrum-{row_id}"] = plots.spectrum(values, title=f"{label}: spectrum of the gating matrices")
    if losses := _mapping(results.details.get("losses")):
        figures["training-loss"] = plots.loss_curves({labels.get(key, key): pairs for key, pairs in losses.items()})
    return figures


def _save_figures(figures: Mapping[str, Figure], out: Path) -> list[str]:
    from graftlm.evaluation import plots

    return [plots.save(figure, out / f"{name}.png").name for name, figure in figures.items()]


def _methods(results: Results) -> list[Row]:
    """Rows that learned or forgot; the backbone itself did neither."""
    return [row for row in results.rows if row.id != "backbone"]


def _mapping(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError("The details of the results do not hold a mapping of row ids where one is expected.")
    return value
