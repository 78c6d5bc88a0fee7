"""Recipes: one YAML file that reproduces one training run, or a comparison of several."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from accelerate import PartialState
from pydantic import Field

from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config, parse_overridden, read_yaml
from graftlm.data import DataConfig
from graftlm.data.sources import check_sources
from graftlm.errors import ForgettingBudgetError, RecipeError
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.evaluator import BACKBONE_ROW, NEW_SET, OLD_SET, EvaluationConfig
from graftlm.evaluation.frontier import Frontier
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.report import write_report
from graftlm.files.writing import write_atomically
from graftlm.grafts import default_config, graft_class, kinds
from graftlm.grafts.base import ReplacesModel
from graftlm.runs.execute import execute, locked
from graftlm.runs.graft_run import GRAFT_NAME, AnyGraft, GraftRun, check_sections
from graftlm.runs.language_run import LanguageModelRecipe
from graftlm.runs.run import Log, Run
from graftlm.runs.task_run import TaskRecipe
from graftlm.training.config import TrainingConfig
from graftlm.training.distributed import check_tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MethodConfig(Config):
    """One row of a comparison: a graft, and the keys of training and data that differ from the recipe's."""

    label: str = ""
    graft: AnyGraft
    training: dict[str, Any] = Field({}, description="Keys of the training section, such as learning_rate.")
    data: dict[str, Any] = Field({}, description="Keys of the data section, such as new or replay_fraction.")


class StageConfig(MethodConfig):
    """One stage: what it is taught, and the keys that differ from the recipe's."""

    graft: AnyGraft | None = Field(None, description="The stage's graft; the recipe's when absent.")


class _TextRecipe(Config):
    """What recipes of grafts on text have in common."""

    backbone: BackboneConfig
    data: DataConfig = DataConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    def backbone_runs(self) -> list[Run]:
        """The run that measures the bare backbone; none without tests and tasks."""
        if not (self.data.test or self.evaluation.tasks):
            return []
        shared = {"backbone": self.backbone, "data": self.data, "evaluation": self.evaluation}
        return [GraftRun(id=BACKBONE_ROW, training=self.training, **shared)]


class GrowthRecipe(_TextRecipe):
    """Grafts trained one after the other on one backbone.

    A stage's model has the grafts of the stages before it, which don't change any more. To its old text come the new
    texts of those stages, so that its graft is silent on what the others know.
    """

    graft: AnyGraft | None = Field(None, description="What each stage trains, unless it has a graft of its own.")
    stages: dict[str, StageConfig] = Field(description="The stages in order, by name.")
    one_graft: bool = Field(False, description="Train one graft further in every stage instead of a new one.")
    out: str = Field("runs/growth", description="Folder for the grafts, the report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if not self.stages:
            yield "there are no stages: name at least one, with its text under data.new"
        if BACKBONE_ROW in self.stages:
            yield "the stage name backbone is taken by the backbone's own row; choose another"
        for name in self.stages:
            if name == GRAFT_NAME or not name.replace("-", "_").isidentifier():
                yield f"a stage can't be called {name!r}: choose letters, digits, _ and -, and not {GRAFT_NAME}"
        grafts = []
        for number, (name, graft, training, data) in enumerate(self._sections()):
            where = f"stages.{name}"
            if not (training.steps and data.new):
                lacks = "new text: name some under its data.new" if training.steps else "steps: set training.steps"
                yield f"{where} has no {lacks}"
            if graft.needs_tasks:
                yield f"{where} has a graft of the kind {graft.kind}, which learns tasks, and stages have text"
            if number and data.replay_fraction and data.old_objective == "distil":
                yield (
                    f"{where} has old_objective distil, which follows the bare backbone, and that does not know what "
                    "the stages before it taught: set it to replay behind the first stage"
                )
            check_sections(training, data, self.evaluation)
            grafts.append(graft)
        replacing = [graft for graft in grafts if issubclass(graft.graft_class, ReplacesModel)]
        if len(replacing) > 1 and not self.one_graft:
            yield (
                f"grafts of the kind {replacing[1].kind} change the backbone's modules, and two of that sort can't be "
                "attached together: choose another kind for all stages but one, or set one_graft to train one further"
            )
        if self.one_graft and any(graft != grafts[0] for graft in grafts):
            yield "one_graft trains one graft further, and the stages name different ones: name it once"

    def _sections(self) -> Iterator[tuple[str, Any, TrainingConfig, DataConfig]]:
        """Name, graft, training and data of each stage; its old text has the new text of the stages before it."""
        earlier: list[Any] = []
        for name, stage in self.stages.items():
            graft = stage.graft or self.graft
            if graft is None:
                raise ValueError(f"stages.{name} has no graft: name one, or one for all stages under graft")
            training, data = changed_sections(self, stage, "stages", name)
            yield name, graft, training, data.model_copy(update={"old": [*data.old, *earlier]})
            earlier += data.new

    def runs(self) -> list[Run]:
        """The bare backbone's run, where there is something to measure, and the stages' in order."""
        shared: dict[str, Any] = {"backbone": self.backbone, "evaluation": self.evaluation}
        runs, before = self.backbone_runs(), list[str]()
        for name, graft, training, data in self._sections():
            label = self.stages[name].label or f"after {name}: {graft.label}"
            fields = {"label": label, "graft": graft, "training": training, "data": data, **shared}
            depends_on = before[-1:] if self.one_graft else before
            runs.append(GraftRun(id=name, depends_on=tuple(depends_on), continues=self.one_graft, **fields))
            before.append(name)
        return runs

    def compared(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with what the model of each stage learned and lost of texts that have a stage's name.

        `learned_NAME` is the loss of the bare backbone minus the row's, and `lost_NAME`, behind that stage, the row's
        minus that of the model of the stage, in nats per token on the same tokens.
        """
        by_id, compared = {row.id: row for row in rows}, list(rows)
        names = [name for name in self.stages if BACKBONE_ROW in by_id and name in by_id[BACKBONE_ROW].metrics]
        for number, row in enumerate(rows):
            metrics = dict(row.metrics)
            for name in names if row.id in self.stages else []:
                loss = value_of(row.metrics[name])
                metrics[f"learned_{name}"] = value_of(by_id[BACKBONE_ROW].metrics[name]) - loss
                if list(self.stages).index(name) < list(self.stages).index(row.id):
                    metrics[f"lost_{name}"] = loss - value_of(by_id[name].metrics[name])
            compared[number] = row.model_copy(update={"metrics": metrics})
        return compared


def changed_sections(recipe: Any, row: Any, kind: str, name: str) -> tuple[TrainingConfig, DataConfig]:
    """The training and data sections of a recipe's row, under `kind`: the recipe's, with the keys that the row sets."""
    where = f"{kind}.{name}"
    if "test" in row.data:
        raise ValueError(f"{where}.data has the key test, and all {kind} are measured on the same texts")
    training = TrainingConfig.parse(recipe.training.model_dump() | row.training, where=f"{where}.training")
    return training, DataConfig.parse(recipe.data.model_dump() | row.data, where=f"{where}.data")


AnyRecipe: TypeAlias = "Recipe | GrowthRecipe | LanguageModelRecipe | TaskRecipe"


class FrontierConfig(Config):
    """What `graft compare --frontier` sweeps for every method alike."""

    rates: list[Annotated[float, Field(gt=0)]] = Field(
        [0.5, 2.0], description="Factors on each method's learning rate, beside 1."
    )
    strengths: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        [0.25, 0.5, 0.75],
        description="Shares of the way from the weights' start to where training took them, beside 1.",
    )


class Recipe(_TextRecipe):
    """A training run of one graft on text, or a comparison of several grafts on the same text."""

    graft: AnyGraft | None = Field(None, description="What to train; `kind` names the method.")
    methods: dict[str, MethodConfig] = Field({}, description="For graft compare: what to train, by row id.")
    frontier: FrontierConfig = Field(FrontierConfig(), description="For graft compare --frontier.")
    out: str = Field("runs/graft", description="Folder for the graft, its report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if self.graft is not None and self.graft.needs_tasks:
            yield (
                f"a graft of the kind {self.graft.kind} learns tasks, and the recipe has none: name some under tasks, "
                "in the place of data"
            )
        if self.graft is None and not self.methods:
            yield "a recipe has a graft section, or methods to compare; both are missing"
        if BACKBONE_ROW in self.methods:
            yield "the method id backbone is taken by the backbone's own row; choose another"
        if self.training.steps and not self.data.new:
            yield "a run with steps needs text: name some under data.new, or set training.steps to 0"
        for name in self.methods or [""]:
            training, data = self._sections_of(name)
            check_sections(training, data, self.evaluation)

    def _sections_of(self, name: str) -> tuple[TrainingConfig, DataConfig]:
        """The training and data sections of a method; the recipe's own where there is none of that name."""
        if name not in self.methods:
            return self.training, self.data
        return changed_sections(self, self.methods[name], "methods", name)

    def run(self) -> GraftRun:
        """The run that trains the recipe's graft. Raises RecipeError if the recipe has methods and no graft section."""
        if self.graft is None:
            why = "The recipe has methods to compare and no graft section: run graft compare, or add a graft section."
            raise RecipeError(why)
        shared = {"backbone": self.backbone, "data": self.data, "evaluation": self.evaluation}
        return GraftRun(id=self.graft.kind, folder=".", graft=self.graft, training=self.training, **shared)

    def comparison(self) -> list[GraftRun]:
        """The runs of a comparison: the recipe's methods, or its graft beside every kind that needs no settings."""
        methods = self.methods
        if not methods:
            assert self.graft is not None, "a recipe's own check"
            methods = {self.graft.kind: MethodConfig(graft=self.graft)}
            for kind in kinds():
                if (config := default_config(kind)) is not None:
                    methods.setdefault(kind, MethodConfig(graft=config))
        recipe = self.model_copy(update={"methods": methods})
        runs = []
        for name, method in methods.items():
            training, data = recipe._sections_of(name)
            shared = {"backbone": self.backbone, "data": data, "evaluation": self.evaluation, "training": training}
            runs.append(GraftRun(id=name, label=method.label, graft=method.graft, **shared))
        return runs

    def frontier_runs(self) -> dict[str, list[GraftRun]]:
        """The runs of a comparison at every rate and strength, by method; the first has the method's own rate.

        Raises RecipeError if what is learned and lost would not be measured.
        """
        if not {OLD_SET, NEW_SET} <= self.data.test.keys():
            raise RecipeError(
                "A frontier shows what was learned against what was forgotten: name test texts old and new under "
                "data.test."
            )
        evaluation = self.evaluation.model_copy(update={"strengths": self.frontier.strengths or [1.0]})
        recipe = Recipe.parse(self.model_dump() | {"evaluation": evaluation.model_dump()})  # which checks them
        runs: dict[str, list[GraftRun]] = {}
        for run in recipe.comparison():
            factors = sorted({1.0, *self.frontier.rates}) if run.training.steps else [1.0]
            factors.sort(key=lambda factor: factor != 1)
            runs[run.id] = [_at_rate(run, factor) for factor in factors]
        return runs


def run_recipe(recipe: AnyRecipe, out: str | Path | None = None, *, progress: bool = True, log: Log = print) -> Results:
    """Train the recipe's model and report. The graft is in `out/graft`, a language model in `out/model`.

    Raises ForgettingBudgetError if the run forgot more than the recipe allows; graft and report are written first.
    """
    folder = Path(out or recipe.out)
    if isinstance(recipe, GrowthRecipe):
        raise RecipeError("The recipe has stages: run graft grow.")
    if not isinstance(recipe, Recipe):
        return _run(recipe, [recipe.run()], folder, "train", progress, log)
    return _run(recipe, [*recipe.backbone_runs(), recipe.run()], folder, "train", progress, log)


def _at_rate(run: GraftRun, factor: float) -> GraftRun:
    """A run with its learning rate multiplied, and an id and label that say so."""
    if factor == 1:
        return run
    assert run.graft is not None, "of a comparison"
    rate = run.training.learning_rate * factor
    training = run.training.model_copy(update={"learning_rate": rate})
    label = f"{run.label or run.graft.label}, rate {rate:g}"
    return run.model_copy(update={"id": f"{run.id}-rate-{rate:g}", "label": label, "training": training})


def compare_recipe(
    recipe: AnyRecipe, out: str | Path | None = None, *, frontier: bool = False, progress: bool = True, log: Log = print
) -> Results:
    """Train every method of the recipe on the same data, and report them side by side; grafts are in `out/ROW/graft`.

    Args:
        recipe: of a graft or of several methods on text.
        out: the output folder; the recipe's when None.
        frontier: train each method at several rates, measure it at several strengths, and compare at equal learning.

    Raises RecipeError if the recipe is one of a language model or of tasks.
    """
    if isinstance(recipe, LanguageModelRecipe):
        raise RecipeError("The recipe trains one language model, and there is nothing to compare: run graft train.")
    if isinstance(recipe, TaskRecipe):
        raise RecipeError(
            "The recipe has tasks, and graft compare trains on text: run graft train once for each method, with an "
            "--out of its own."
        )
    if isinstance(recipe, GrowthRecipe):
        raise RecipeError("The recipe has stages: run graft grow, or name methods to compare.")
    folder = Path(out or recipe.out)
    if not frontier:
        return _run(recipe, [*recipe.backbone_runs(), *recipe.comparison()], folder, "compare", progress, log)
    by_method = recipe.frontier_runs()
    runs = [*recipe.backbone_runs(), *(run for of_method in by_method.values() for run in of_method)]
    methods = {name: [run.id for run in of_method] for name, of_method in by_method.items()}
    return _run(recipe, runs, folder, "compare", progress, log, methods)


def grow_recipe(
    recipe: AnyRecipe, out: str | Path | None = None, *, progress: bool = True, log: Log = print
) -> Results:
    """Train the recipe's stages one after the other, and report the model after each; grafts are in `out/STAGE/graft`.

    Raises RecipeError if the recipe has no stages, and ForgettingBudgetError if a stage forgot more than the recipe
    allows. Grafts and report are written all the same.
    """
    if not isinstance(recipe, GrowthRecipe):
        raise RecipeError("The recipe has no stages, which graft grow trains in order: name some, or run graft train.")
    return _run(recipe, recipe.runs(), Path(out or recipe.out), "grow", progress, log)


def _run(
    recipe: AnyRecipe,
    runs: Sequence[Run],
    folder: Path,
    name: str,
    progress: bool,
    log: Log,
    frontier: Mapping[str, Sequence[str]] | None = None,
) -> Results:
    """Execute runs, and write their report; the recipe is kept beside it. `frontier` has the ids of rows by method."""
    main = PartialState().is_main_process
    check_tracker(recipe.training.tracker)  # before anything is loaded or sampled
    for run in runs:
        if isinstance(run, GraftRun) and run.graft is not None and run.training.steps:
            check_sources(run.data)
    with locked(folder):
        if main:
            write_atomically(folder / "recipe.yaml", recipe.to_yaml().encode())
        measurements = execute(runs, folder, progress=progress, log=log)
        results = make_results(recipe, name, list(measurements.values()))
        if main:
            plots = recipe.plots(results) if isinstance(recipe, LanguageModelRecipe) else {}
            if frontier:
                results, plots = add_frontier(results, measurements, frontier)
                if not plots:
                    log("A method learned nothing at any rate, so there is no level of learning to compare at.")
            write_report(results, folder, plots=plots)
    if name != "compare":
        _check_budget(results)
    return results


def add_frontier(
    results: Results, measurements: Mapping[str, Measurement], methods: Mapping[str, Sequence[str]]
) -> tuple[Results, dict[str, Figure]]:
    """Results whose rows have their losses at equal learning, and a plot of the curves for each loss.

    A method's row gets `forgotten_at_equal` and `own_kl_at_equal`, in nats per token, at nine tenths of what every
    method can learn, and `equal_learned`, that level. They are left out where a method learns nothing.

    Args:
        measurements: by row, with the points of each strength.
        methods: ids of the rows of each method, the first of which gets the metrics.
    """
    from graftlm.evaluation.plots import frontier_curves  # matplotlib takes half a second to import

    frontier = Frontier({m: [measurements[row].details["strengths"] for row in rows] for m, rows in methods.items()})
    points = {name: {method: frontier.measured(method, name) for method in methods} for name in frontier.losses}
    results = results.model_copy(update={"details": {**results.details, "frontier": points}})
    if (level := frontier.level()) <= 0:
        return results, {}
    metrics: dict[str, dict[str, Any]] = {
        methods[method][0]: {"equal_learned": level} | {f"{name}_at_equal": value for name, value in values.items()}
        for method, values in frontier.at_level(level).items()
    }
    rows = [row.model_copy(update={"metrics": row.metrics | metrics.get(row.id, {})}) for row in results.rows]
    labels = {method: results.row(of_method[0]).label for method, of_method in methods.items()}
    plots = {}
    for name, by_method in points.items():
        curves = {labels[method]: paths for method, paths in by_method.items()}
        plots[f"frontier-{name.replace('_', '-')}"] = frontier_curves(curves, name)
    return results.model_copy(update={"rows": rows}), plots


def make_results(recipe: AnyRecipe, name: str, measurements: Sequence[Measurement]) -> Results:
    """The results of some runs of a recipe."""
    details: dict[str, Any] = {}
    for measurement in measurements:
        for kind, value in measurement.details.items():
            if value:
                details.setdefault(kind, {})[measurement.row.id] = _without_windows(value)
    rows = [measurement.row for measurement in measurements]
    if isinstance(recipe, GrowthRecipe):
        rows = recipe.compared(rows)
    if name == "train":
        rows += [row for measurement in measurements for row in _moved_back(measurement)]
    budget = recipe.evaluation.forgetting_budget if isinstance(recipe, Recipe | GrowthRecipe) else None
    aims = _budget_aims(measurements, budget)
    return Results.here(name, rows, seeds=[recipe.training.seed], aims=aims, details=details)


def _moved_back(measurement: Measurement) -> Iterator[Row]:
    """A row for each strength below 1 that a trained model was measured at."""
    for point in measurement.details.get("strengths", []):
        if (strength := point["strength"]) < 1:
            row, suffix = measurement.row, f"strength {strength:g}"
            values = {"id": f"{row.id}-{suffix.replace(' ', '-')}", "label": f"{row.label}, {suffix}"}
            yield Row.model_validate(values | {"metrics": point["metrics"]})


def _without_windows(value: Any) -> Any:
    """A detail of a measurement without the numbers of each window, which only intervals need."""
    if not (isinstance(value, list) and value and isinstance(value[0], dict) and "windows" in value[0]):
        return value
    return [{key: item for key, item in point.items() if key != "windows"} for point in value]


def _budget_aims(measurements: Sequence[Measurement], budget: float | None) -> list[Aim]:
    aims = []
    for measurement in measurements:
        forgotten = measurement.row.metrics.get("forgotten")
        if budget is None or forgotten is None:
            continue
        value = value_of(forgotten)
        text = f"{measurement.row.label} forgets at most the budget"
        aims.append(Aim(text=text, metric="forgotten", aim=budget, measured=value, met=value <= budget))
    return aims


def _check_budget(results: Results) -> None:
    for aim in results.aims:
        if not aim.met:
            raise ForgettingBudgetError(
                f"The run forgot {aim.measured:.4f} nats per token of the old domain, and the budget is {aim.aim}: "
                "raise the share of old text or the local loss, lower the learning rate, or raise forgetting_budget."
            )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe of a graft on text, of one on tasks (key `tasks`), of a language model (`kind`), or of `stages`.

    Args:
        path: a YAML file. Local paths in it are relative to the working folder.
        overrides: changes of the form `training.steps=200`.

    Raises RecipeError, one sentence on the first mistake.
    """
    where = str(path)
    return parse_overridden(lambda values: parse_recipe(values, where), read_yaml(path), overrides, where)


def parse_recipe(values: dict[str, Any], where: str) -> AnyRecipe:
    """The recipe in plain values; `kind`, `tasks` and `stages` decide which of the forms it has.

    Raises RecipeError, one sentence on the first problem.
    """
    kind = values.get("kind")
    if "stages" in values:
        return GrowthRecipe.parse(values, where=where)
    if kind is None:
        return (TaskRecipe if "tasks" in values else Recipe).parse(values, where=where)
    if kind != LanguageModelRecipe.model_fields["kind"].default:
        why = f"{where}: kind is {kind!r}, but language-model is expected: leave kind out of a graft's recipe."
        raise RecipeError(why)
    return LanguageModelRecipe.parse(values, where=where)


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of recipes, for editors: every kind of graft with its own keys, and language models."""
    forms = [recipe.model_json_schema() for recipe in (Recipe, LanguageModelRecipe, TaskRecipe, GrowthRecipe)]
    definitions = {name: schema for form in forms for name, schema in form.pop("$defs").items()}
    of_models = forms[1]
    of_models["required"] = sorted({*of_models["required"], "kind"})
    variants = []
    for kind in kinds():
        variant = copy.deepcopy(graft_class(kind).Config.model_json_schema())
        definitions |= variant.pop("$defs", {})
        variant["required"] = sorted({*variant.get("required", []), "kind"})
        variants.append(variant)
    definitions["GraftConfig"] = {"title": "Graft", "oneOf": variants}
    return {"title": "Recipe", "oneOf": forms, "$defs": definitions}
