"""What a comparison adds for `graft compare --frontier`: losses at equal learning, and the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graftlm.evaluation import Results
from graftlm.evaluation.frontier import Frontier
from graftlm.runs.run import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_frontier(
    results: Results, measurements: Mapping[str, Measurement], methods: Mapping[str, Sequence[str]]
) -> tuple[Results, dict[str, Figure]]:
    """Results whose rows have their losses at equal learning, and a plot of the curves for each loss.

    A method's row gets `forgotten_at_equal` and `own_kl_at_equal`, in nats per token, at nine tenths of what every
    method can learn, and `equal_learned`, that level. They are left out where a method learns nothing.

    Args:
        results: of the comparison.
        measurements: by row, with the points of each strength.
        methods: ids of the rows of each method, the first of which gets the metrics.
    """
    from graftlm.evaluation.plots import frontier_curves  # matplotlib takes half a second to import

    frontier = Frontier({m: [measurements[row].details["strengths"] for row in rows] for m, rows in methods.items()})
    level = frontier.level()
    at_equal = frontier.at_level(level) if level > 0 else {}
    metrics: dict[str, dict[str, Any]] = {
        rows[0]: {"equal_learned": level} | {f"{name}_at_equal": value for name, value in at_equal[method].items()}
        for method, rows in methods.items()
        if level > 0
    }
    rows = [row.model_copy(update={"metrics": row.metrics | metrics.get(row.id, {})}) for row in results.rows]
    labels = {method: results.row(of_method[0]).label for method, of_method in methods.items()}
    points: dict[str, Any] = {
        name: {method: frontier.measured(method, name) for method in methods} for name in frontier.losses
    }
    plots = {
        f"frontier-{name.replace('_', '-')}": frontier_curves(
            {labels[m]: paths for m, paths in by_method.items()}, name
        )
        for name, by_method in points.items()
        if level > 0
    }
    details = {**results.details, "frontier": points}
    return results.model_copy(update={"rows": rows, "details": details}), plots
