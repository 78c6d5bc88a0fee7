"""The results of a recipe, from the measurements of its runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.differences import WindowChanges, differences_between
from graftlm.evaluation.frontier import Frontier
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.classifier_run import ClassifierRecipe
from graftlm.runs.graft_recipe import Recipe
from graftlm.runs.growth_recipe import GrowthRecipe
from graftlm.runs.language_run import LanguageModelRecipe
from graftlm.runs.task_run import TaskRecipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyRecipe = Recipe | GrowthRecipe | LanguageModelRecipe | ClassifierRecipe | TaskRecipe


def make_results(
    recipe: AnyRecipe,
    name: str,
    measurements: Sequence[Measurement],
    matched: Mapping[str, Mapping[str, object]],
) -> Results:
    """Make the results of a recipe.

    Args:
        recipe: the recipe of the runs.
        name: the command: train, compare or grow.
        measurements: the measurements of the runs, in the order of the rows.
        matched: how the sizes of grafts were chosen, by row id.

    Returns:
        The results with one row for each run, one for each other model that a graft reads, and for the command train
        one for each strength below 1. If the recipe has a forgetting budget, there is an aim for each row whose
        forgetting was measured.
    """
    rows = [measurement.row for measurement in measurements]
    details = _details_by_kind(measurements)
    if matched:
        details["matched_sizes"] = dict(matched)
    if isinstance(recipe, GrowthRecipe):
        rows = recipe.compared(rows, _windows_by_row(measurements))
    if isinstance(recipe, Recipe) and name == "compare":
        # Of a frontier, the rows at a method's own rate.
        own = list(recipe.compared_methods())
        windows = {row_id: found for row_id, found in _windows_by_row(measurements).items() if row_id in own}
        items = {row_id: found for row_id, found in _items_by_row(measurements).items() if row_id in own}
        differences = list(differences_between(windows, items))
        if differences:
            details["method_differences"] = differences
    for measurement in measurements:
        for frozen in measurement.details.get("frozen_models", []):
            if "row" in frozen:
                rows.append(Row.model_validate(frozen["row"]))
    if name == "train":
        for measurement in measurements:
            rows.extend(_rows_at_strengths(measurement))
    return Results.here(
        name,
        rows,
        seeds=[recipe.training.seed],
        aims=_budget_aims(recipe, measurements),
        details=details,
    )


def _windows_by_row(measurements: Sequence[Measurement]) -> dict[str, WindowChanges]:
    """Return the changes in each window by row id, for the rows that have them."""
    windows = {}
    for measurement in measurements:
        if measurement.details.get("windows"):
            windows[measurement.row.id] = measurement.details["windows"]
    return windows


def _items_by_row(measurements: Sequence[Measurement]) -> dict[str, dict[str, list[float]]]:
    """Return the values of the items of each benchmark by row id."""
    items = {}
    for measurement in measurements:
        results = measurement.details.get("harness", {})
        items[measurement.row.id] = {label: result["values"] for label, result in results.items()}
    return items


def _details_by_kind(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return {kind of detail: {row id: detail}}, without the numbers of each window."""
    details: dict[str, Any] = {}
    for measurement in measurements:
        for kind, value in measurement.details.items():
            if value and kind != "windows":
                details.setdefault(kind, {})[measurement.row.id] = _without_windows(value)
    return details


def _without_windows(value: Any) -> Any:
    """Remove the numbers of each window, which only intervals need, from the points of a detail."""
    has_windows = isinstance(value, list) and value and isinstance(value[0], dict) and "windows" in value[0]
    if not has_windows:
        return value
    return [{key: item for key, item in point.items() if key != "windows"} for point in value]


def _rows_at_strengths(measurement: Measurement) -> Iterator[Row]:
    """Yield a row for each strength below 1 at which a trained model was measured."""
    row = measurement.row
    for point in measurement.details.get("strengths", []):
        strength = point["strength"]
        if strength < 1:
            values = {
                "id": f"{row.id}-strength-{strength:g}",
                "label": f"{row.label}, strength {strength:g}",
                "metrics": point["metrics"],
            }
            yield Row.model_validate(values)


def _budget_aims(recipe: AnyRecipe, measurements: Sequence[Measurement]) -> list[Aim]:
    """Return an aim for each row whose forgetting is measured, if the recipe has a budget."""
    if not isinstance(recipe, Recipe | GrowthRecipe):
        return []
    budget = recipe.evaluation.forgetting_budget
    if budget is None:
        return []
    aims = []
    for measurement in measurements:
        forgotten = measurement.row.metrics.get("forgotten")
        if forgotten is None:
            continue
        value = value_of(forgotten)
        aim = Aim(
            text=f"{measurement.row.label} forgets at most the budget",
            metric="forgotten",
            aim=budget,
            measured=value,
            met=value <= budget,
        )
        aims.append(aim)
    return aims


def add_frontier(
    results: Results,
    measurements: Mapping[str, Measurement],
    methods: Mapping[str, Sequence[str]],
) -> tuple[Results, dict[str, Figure]]:
    """Compare methods at equal learning.

    The first row of each method gets `equal_learned`, nine tenths of what every method can learn, and
    `forgotten_at_equal` and `own_kl_at_equal`, its losses at that level, all in nats per token. They are left out if a
    method learns nothing.

    Args:
        results: the results of the comparison.
        measurements: the measurements by row id, with the points of each strength.
        methods: row ids of each method.

    Returns:
        The results with these metrics, and a plot of the methods' curves for each loss, by its file name. Without
        plots if a method learns nothing.

    Raises:
        EvaluationError: the points lack what was learned or lost, or come from different test texts.
    """
    paths = {
        method: [measurements[row_id].details["strengths"] for row_id in row_ids] for method, row_ids in methods.items()
    }
    frontier = Frontier(paths)
    points = {loss: {method: frontier.measured(method, loss) for method in methods} for loss in frontier.losses}
    results = results.model_copy(update={"details": {**results.details, "frontier": points}})
    level = frontier.level()
    if level <= 0:
        return results, {}
    results = _with_losses_at_level(results, frontier, level, methods)
    labels = {method: results.row(row_ids[0]).label for method, row_ids in methods.items()}
    return results, _frontier_plots(points, labels)


def _with_losses_at_level(
    results: Results,
    frontier: Frontier,
    level: float,
    methods: Mapping[str, Sequence[str]],
) -> Results:
    """Return the results with the level and each loss at it in the first row of every method."""
    metrics: dict[str, dict[str, Any]] = {}
    for method, losses in frontier.at_level(level).items():
        first_row = methods[method][0]
        metrics[first_row] = {"equal_learned": level}
        for loss, value in losses.items():
            metrics[first_row][f"{loss}_at_equal"] = value
    rows = [row.model_copy(update={"metrics": row.metrics | metrics.get(row.id, {})}) for row in results.rows]
    return results.model_copy(update={"rows": rows})


def _frontier_plots(
    points: Mapping[str, Mapping[str, Any]],
    labels: Mapping[str, str],
) -> dict[str, Figure]:
    """Return a figure of the methods' curves for each loss, by its file name without suffix."""
    from graftlm.evaluation.plots import frontier_curves  # Importing matplotlib takes half a second.

    plots = {}
    for loss, by_method in points.items():
        curves = {labels[method]: paths for method, paths in by_method.items()}
        plots[f"frontier-{loss.replace('_', '-')}"] = frontier_curves(curves, loss)
    return plots
