"""What a recipe runs: one method, or several on the same data, and their report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import PartialState

from graftlm.data import DataConfig, Document, Mixture, build_documents, build_mixture
from graftlm.data.batch import check_apart
from graftlm.errors import ForgettingBudgetError, RecipeError
from graftlm.evaluation import Aim, Results, value_of
from graftlm.evaluation.report import write_report
from graftlm.io import write_atomically
from graftlm.runs.bench import Bench, Measurement, count_weights, graft_label
from graftlm.runs.language_recipe import LanguageModelRecipe
from graftlm.runs.language_run import train_language_model
from graftlm.runs.recipe import AnyRecipe, EvaluationConfig, Recipe
from graftlm.runs.task_recipe import TaskRecipe
from graftlm.runs.task_run import train_tasks

Say = Callable[[str], None]


def run_recipe(recipe: AnyRecipe, out: str | Path | None = None, *, progress: bool = True, say: Say = print) -> Results:
    """Train the recipe's graft and report; the graft is in `out/graft`, a language model in `out/model`.

    Raises:
        ForgettingBudgetError: the run forgot more than the recipe allows; graft and report are written all the same.
    """
    if isinstance(recipe, LanguageModelRecipe):
        return train_language_model(recipe, Path(out or recipe.out), progress=progress, say=say)
    if isinstance(recipe, TaskRecipe):
        return train_tasks(recipe, Path(out or recipe.out), progress=progress, say=say)
    if recipe.graft is None:
        raise RecipeError(
            "The recipe has methods to compare and no graft section: run graft compare, or add a graft section."
        )
    folder = Path(out or recipe.out)
    bench, mixture = prepare(recipe, folder, progress=progress, say=say)
    steps = recipe.training.steps
    say(
        f"Training {graft_label(recipe.graft)} for {steps:,} steps."
        if steps
        else f"Making {graft_label(recipe.graft)}."
    )
    measured = bench.run(recipe.graft.kind, recipe.graft, mixture, recipe.training, folder, progress=progress)
    results = report(folder, "train", bench, [measured], [recipe.training.seed], recipe.evaluation)
    _check_budget(results, recipe.evaluation.forgetting_budget)
    return results


def compare_recipe(
    recipe: AnyRecipe,
    out: str | Path | None = None,
    *,
    progress: bool = True,
    say: Say = print,
) -> Results:
    """Train every method of the recipe on the same data, report them side by side; grafts go to `out/<row>/graft`.

    Raises:
        RecipeError: the recipe is one of a language model, or of tasks.
    """
    if isinstance(recipe, LanguageModelRecipe):
        raise RecipeError(
            "The recipe is of one language model, and there is nothing to compare it with: run graft train."
        )
    if isinstance(recipe, TaskRecipe):
        raise RecipeError(
            "The recipe has tasks, and graft compare trains on text: run graft train once for each method, with an "
            "--out of its own."
        )
    folder = Path(out or recipe.out)
    recipe = recipe.comparison()
    bench, mixture = prepare(recipe, folder, progress=progress, say=say)
    measured = []
    for name, method in recipe.methods.items():
        config, training = recipe.method(name)
        say(f"Training {method.label or graft_label(config)} for {training.steps:,} steps.")
        if mixture and (mixture.state_dict() or mixture.batch_size != training.batch_size):
            mixture = build_mixture(recipe.data, bench.tokenizer, training.batch_size)
        measured.append(
            bench.run(name, config, mixture, training, folder / name, label=method.label, progress=progress)
        )
    return report(folder, "compare", bench, measured, [recipe.training.seed], recipe.evaluation)


def prepare(recipe: Recipe, folder: Path, *, progress: bool, say: Say) -> tuple[Bench, Mixture | None]:
    """Load backbone, tests and mixture of a recipe, and keep the recipe beside its results; no mixture for no steps."""
    backbone = recipe.backbone.load()
    tests = load_tests(recipe.data)
    mixture = None
    if recipe.data.new:
        check_apart(backbone.model, recipe.data.boundaries)
        mixture = build_mixture(recipe.data, backbone.need_tokenizer(), recipe.training.batch_size)
    if PartialState().is_main_process:
        write_atomically(folder / "recipe.yaml", recipe.to_yaml().encode())
    say(f"Backbone {backbone.name}: {count_weights(backbone.model.parameters()):,} parameters, frozen.")
    return Bench(backbone, tests, recipe.evaluation, recipe.data.length), mixture


def load_tests(config: DataConfig) -> dict[str, list[Document]]:
    """The test documents of a recipe, by set."""
    return {name: list(build_documents(sources)) for name, sources in config.test.items()}


def report(
    folder: Path,
    name: str,
    bench: Bench,
    measured: Sequence[Measurement],
    seeds: Sequence[int],
    evaluation: EvaluationConfig,
) -> Results:
    """Write `results.json`, `report.md` and plots of some methods beside their backbone."""
    base = [bench.backbone_measurement()] if bench.tests or bench.tasks else []
    results = Results.here(
        name,
        [one.row for one in (*base, *measured)],
        seeds=seeds,
        aims=_budget_aims(measured, evaluation.forgetting_budget),
        details={
            "statistics": {one.row.id: one.statistics for one in measured if one.statistics},
            "losses": {one.row.id: one.losses for one in measured if one.losses},
            "tasks": {one.row.id: one.tasks for one in (*base, *measured) if one.tasks},
        },
    )
    if PartialState().is_main_process:
        write_report(results, folder)
    return results


def _budget_aims(measured: Sequence[Measurement], budget: float | None) -> list[Aim]:
    aims = []
    for one in measured:
        forgotten = one.row.metrics.get("forgotten")
        if budget is None or forgotten is None:
            continue
        value = value_of(forgotten)
        text = f"{one.row.label} forgets at most the budget"
        aims.append(Aim(text=text, metric="forgotten", aim=budget, measured=value, met=value <= budget))
    return aims


def _check_budget(results: Results, budget: float | None) -> None:
    for aim in results.aims:
        if not aim.met:
            raise ForgettingBudgetError(
                f"The run forgot {aim.measured:.4f} nats per token of the old domain, and the budget is {budget}: "
                "raise the share of old text or the local loss, lower the learning rate, or raise forgetting_budget."
            )
