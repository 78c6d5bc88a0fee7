"""Recipes: one YAML file that reproduces one training run, or a comparison of several."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.config import parse_overridden, read_yaml
from graftlm.data.mixture import check_weights
from graftlm.data.sources import check_sources
from graftlm.errors import ForgettingBudgetError, RecipeError
from graftlm.evaluation import Results
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.report import write_report
from graftlm.files.writing import write_atomically
from graftlm.grafts import HasSizes, graft_class, kinds
from graftlm.processes import process_state
from graftlm.runs.classifier_run import ClassifierRecipe
from graftlm.runs.execute import execute, locked
from graftlm.runs.graft_recipe import Recipe
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.growth_recipe import GrowthRecipe
from graftlm.runs.language_run import LanguageModelRecipe
from graftlm.runs.matching import CAPACITY, MATCH
from graftlm.runs.recipe_results import AnyRecipe, add_frontier, make_results
from graftlm.runs.run import Log, Run
from graftlm.runs.task_run import TaskRecipe
from graftlm.training.tracking import check_tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_recipe(recipe: AnyRecipe, out: str | Path | None = None, *, progress: bool = True, log: Log = print) -> Results:
    """Train the recipe's model and write the report.

    Args:
        recipe: the recipe of one graft, of tasks, of a language model or of a classifier.
        out: the output folder; by default the recipe's. A graft is written to `out/graft`, another model to
            `out/model`.
        progress: whether to show the progress of training.
        log: receives each line of the log.

    Returns:
        The results, which are also written to `out/results.json`.

    Raises:
        RecipeError: the recipe has stages, or methods and no graft section; another process works in the folder; or it
            can't be written.
        GraftError: the model or its texts can't be loaded, or training stops; see `train`.
        ForgettingBudgetError: the run forgot more than the recipe allows; graft and report are written first.
    """
    if isinstance(recipe, GrowthRecipe):
        raise RecipeError("The recipe has stages, but graft train trains one model: run graft grow.")
    runs: list[Run] = [recipe.run()]
    if isinstance(recipe, Recipe):
        runs = [*recipe.backbone_runs(), *runs]
    results = _run(recipe, runs, _folder(recipe, out), name="train", progress=progress, log=log)
    _check_budget(results)
    return results


def compare_recipe(
    recipe: AnyRecipe,
    out: str | Path | None = None,
    *,
    frontier: bool = False,
    progress: bool = True,
    log: Log = print,
) -> Results:
    """Train every method of the recipe on the same data, and report them side by side.

    Args:
        recipe: the recipe of a graft, or of several methods, on text.
        out: the output folder; by default the recipe's. Grafts are written to `out/ID/graft` by the ids of the rows.
        frontier: train each method at several rates, measure it at several strengths, and compare at equal learning.
        progress: whether to show the progress of training.
        log: receives each line of the log.

    Returns:
        The results with one row for each run, which are also written to `out/results.json`.

    Raises:
        RecipeError: the recipe is one of a new model, of tasks or of stages; `frontier` is true, but the test
            texts old or new are missing; or another process works in the folder.
        GraftError: the model or its texts can't be loaded, or training stops; see `train`.
    """
    recipe = _comparable(recipe)
    check_tracker(recipe.training.tracker)  # before the backbone is loaded to match sizes
    folder = _folder(recipe, out)
    if not frontier:
        runs = [*recipe.backbone_runs(), *recipe.comparison()]
        return _run(recipe, runs, folder, name="compare", progress=progress, log=log)
    by_method = recipe.frontier_runs()
    runs = recipe.backbone_runs()
    for runs_of_method in by_method.values():
        runs.extend(runs_of_method)
    row_ids = {method: [run.id for run in runs_of_method] for method, runs_of_method in by_method.items()}
    return _run(recipe, runs, folder, name="compare", progress=progress, log=log, frontier=row_ids)


def _comparable(recipe: AnyRecipe) -> Recipe:
    """Return the recipe if its methods can be compared, else raise `RecipeError`."""
    if isinstance(recipe, LanguageModelRecipe | ClassifierRecipe):
        raise RecipeError(f"The recipe trains one {recipe.kind}, so there is nothing to compare: run graft train.")
    if isinstance(recipe, TaskRecipe):
        raise RecipeError(
            "The recipe has tasks, but graft compare trains on text: run graft train once for each method, each with "
            "another --out."
        )
    if isinstance(recipe, GrowthRecipe):
        raise RecipeError("The recipe has stages, but graft compare needs methods: run graft grow, or name methods.")
    return recipe


def grow_recipe(
    recipe: AnyRecipe,
    out: str | Path | None = None,
    *,
    progress: bool = True,
    log: Log = print,
) -> Results:
    """Train the recipe's stages one after the other, and report the model after each stage.

    Args:
        recipe: a recipe with stages.
        out: the output folder; by default the recipe's. Grafts are written to `out/STAGE/graft`.
        progress: whether to show the progress of training.
        log: receives each line of the log.

    Returns:
        The results with one row for each stage, which are also written to `out/results.json`.

    Raises:
        RecipeError: the recipe has no stages, or another process works in the folder.
        GraftError: the model or its texts can't be loaded, or training stops; see `train`.
        ForgettingBudgetError: a stage forgot more than the recipe allows; grafts and report are written first.
    """
    if not isinstance(recipe, GrowthRecipe):
        raise RecipeError(
            "The recipe has no stages, but graft grow trains stages in order: name some under stages, or run "
            "graft train."
        )
    results = _run(recipe, recipe.runs(), _folder(recipe, out), name="grow", progress=progress, log=log)
    _check_budget(results)
    return results


def _folder(recipe: AnyRecipe, out: str | Path | None) -> Path:
    return Path(out or recipe.out)


def _run(
    recipe: AnyRecipe,
    runs: Sequence[Run],
    folder: Path,
    *,
    name: str,
    progress: bool,
    log: Log,
    frontier: Mapping[str, Sequence[str]] | None = None,
) -> Results:
    """Execute runs, and write the recipe and the report next to them.

    Args:
        recipe: the recipe of the runs.
        runs: the runs in the order of the report's rows.
        folder: the output folder, which is locked.
        name: the command: train, compare or grow.
        progress: whether to show the progress of training.
        log: receives each line of the log.
        frontier: row ids of each method to compare at equal learning; None for no such comparison.
    """
    # Before anything is loaded or sampled.
    check_tracker(recipe.training.tracker)
    for run in runs:
        if isinstance(run, GraftRun) and run.graft is not None and run.training.has_steps:
            check_weights(run.data)
            check_sources(run.data)
    is_main = process_state().is_main_process
    with locked(folder):
        if is_main:
            write_atomically(folder / "recipe.yaml", recipe.to_yaml().encode())
        measurements = execute(runs, folder, progress=progress, log=log)
        results = make_results(recipe, name, list(measurements.values()), _matched_sizes(runs))
        if is_main:
            results, plots = _add_plots(recipe, results, measurements, frontier, log)
            write_report(results, folder, plots=plots)
    return results


def _matched_sizes(runs: Sequence[Run]) -> dict[str, dict[str, object]]:
    """Return how the sizes of grafts were chosen, by row id, as JSON values."""
    return {run.id: run.matched.model_dump() for run in runs if isinstance(run, GraftRun) and run.matched is not None}


def _add_plots(
    recipe: AnyRecipe,
    results: Results,
    measurements: Mapping[str, Measurement],
    frontier: Mapping[str, Sequence[str]] | None,
    log: Log,
) -> tuple[Results, dict[str, Figure]]:
    """Return the results with those of a frontier, and the plots of the report by name."""
    if isinstance(recipe, LanguageModelRecipe):
        return results, recipe.plots(results)
    if not frontier:
        return results, {}
    results, plots = add_frontier(results, measurements, frontier)
    if not plots:
        log("A method learned nothing at any rate, so methods can't be compared at equal learning.")
    return results, plots


def _check_budget(results: Results) -> None:
    """Raise `ForgettingBudgetError` if an aim of the results is not met."""
    for aim in results.aims:
        if not aim.met:
            raise ForgettingBudgetError(
                f"An aim was missed, {aim.text!r}: {aim.measured:.4f} nats per token of the old domain were forgotten, "
                f"and the budget is {aim.aim:g}. Raise the share of old text, lower the learning rate, or raise "
                "forgetting_budget."
            )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe of any form.

    Args:
        path: a YAML file. Local paths in it are relative to the working folder.
        overrides: changes of the form `training.steps=200`.

    Raises:
        RecipeError: the file can't be read, an override has another form, or a value does not fit. The message is one
            sentence about the first problem.
    """
    where = str(path)

    def parse(values: dict[str, object]) -> AnyRecipe:
        return parse_recipe(values, where)

    return parse_overridden(parse, read_yaml(path), overrides, where)


def parse_recipe(values: dict[str, object], where: str) -> AnyRecipe:
    """Validate the plain values of a recipe.

    | key | form |
    |---|---|
    | `stages` | `GrowthRecipe` |
    | `tasks` | `TaskRecipe` |
    | `kind: language-model` | `LanguageModelRecipe` |
    | `kind: classifier` | `ClassifierRecipe` |
    | none of these | `Recipe` |

    Args:
        values: a mapping from YAML or JSON.
        where: origin of the mapping; error messages begin with it.

    Raises:
        RecipeError: a value does not fit; the message is one sentence about the first problem.
    """
    kind = values.get("kind")
    if "stages" in values:
        return GrowthRecipe.parse(values, where=where)
    for form in (LanguageModelRecipe, ClassifierRecipe):
        if kind == form.model_fields["kind"].default:
            return form.parse(values, where=where)
    if kind is not None:
        raise RecipeError(
            f"{where}: kind is {kind!r}, but language-model or classifier is expected: leave kind out of a graft's "
            "recipe."
        )
    if "tasks" in values:
        return TaskRecipe.parse(values, where=where)
    return Recipe.parse(values, where=where)


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema of recipes, for editors: every form, and every kind of graft with its own keys."""
    recipes = (Recipe, LanguageModelRecipe, ClassifierRecipe, TaskRecipe, GrowthRecipe)
    forms = {recipe: recipe.model_json_schema() for recipe in recipes}
    definitions: dict[str, object] = {}
    for form in forms.values():
        definitions.update(form.pop("$defs"))
    _require_kind(forms[LanguageModelRecipe])
    _require_kind(forms[ClassifierRecipe])
    variants = []
    for kind in kinds():
        variant = copy.deepcopy(graft_class(kind).Config.model_json_schema())
        definitions.update(variant.pop("$defs", {}))
        _require_kind(variant)
        variants.append(variant)
    definitions["GraftConfig"] = {"title": "Graft", "oneOf": variants}
    definitions["MatchedGraft"] = _matched_schema()
    return {"title": "Recipe", "oneOf": list(forms.values()), "$defs": definitions}


def _matched_schema() -> dict[str, object]:
    """Return the schema of a graft with `capacity: match`, whose other keys are those of its kind."""
    sized = [kind for kind in kinds() if issubclass(graft_class(kind), HasSizes)]
    return {
        "title": "Graft of a matched size",
        "type": "object",
        "properties": {"kind": {"enum": sized}, CAPACITY: {"const": MATCH}},
        "required": ["kind", CAPACITY],
    }


def _require_kind(schema: dict[str, Any]) -> None:
    """Make `kind` a required key, though it has a default: it distinguishes the forms."""
    schema["required"] = sorted({*schema.get("required", []), "kind"})
