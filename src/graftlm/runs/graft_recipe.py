"""The recipe of a graft on text, or of a comparison of several grafts on the same text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from graftlm.backbone.load import BackboneConfig, LearnedTokensConfig
from graftlm.config import Config
from graftlm.data import DataConfig, SelfSourceConfig
from graftlm.errors import RecipeError
from graftlm.evaluation.benchmarks.presets import preset_labels
from graftlm.evaluation.evaluator import BACKBONE_ROW, NEW_SET, OLD_SET, EvaluationConfig
from graftlm.evaluation.measured_names import name_problems
from graftlm.grafts import GraftConfig, HasSizes, default_config, kinds
from graftlm.runs.graft_run import AnyGraft, GraftRun
from graftlm.runs.matching import MatchedGraft, MethodGraft, trained_parameters
from graftlm.runs.run import Run
from graftlm.runs.shared import load_shared
from graftlm.training.config import TrainingConfig


class MethodConfig(Config):
    """One row of a comparison: a graft, and the keys of training and data that differ from the recipe's."""

    label: str = Field("", description="Name in tables; by default the method's, or the row's id if names repeat.")
    graft: MethodGraft
    training: dict[str, Any] = Field({}, description="Keys of the training section, such as learning_rate.")
    data: dict[str, Any] = Field({}, description="Keys of the data section, such as new or replay_fraction.")


class TextRecipe(Config):
    """The sections that all recipes of grafts on text have."""

    backbone: BackboneConfig
    data: DataConfig = DataConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    def backbone_runs(self) -> list[Run]:
        """Return the run that measures the bare backbone, in a list that is empty without test texts and tasks."""
        if not (self.data.test or self.evaluation.tasks or self.evaluation.benchmarks()):
            return []
        run = GraftRun(
            id=BACKBONE_ROW,
            backbone=self.backbone,
            data=self.data,
            training=self.training,
            evaluation=self.evaluation,
        )
        return [run]

    def changed_sections(self, config: MethodConfig, where: str) -> tuple[TrainingConfig, DataConfig]:
        """Return the training and data sections with the keys that a method or a stage changes.

        Args:
            config: the method or the stage.
            where: its path in the recipe, such as `methods.lora`.

        Raises:
            ValueError: the data section is changed in its test texts.
            RecipeError: a changed key is unknown, or its value does not fit.
        """
        if "test" in config.data:
            group, _, _ = where.partition(".")
            raise ValueError(
                f"{where}.data has the key test, but all {group} are measured on the same texts: remove it"
            )
        training = TrainingConfig.parse(self.training.model_dump() | config.training, where=f"{where}.training")
        data = DataConfig.parse(self.data.model_dump() | config.data, where=f"{where}.data")
        return training, data

    def check_added_tokens(self, training: TrainingConfig, data: DataConfig) -> None:
        """Check that the sections of a run go with `backbone.add_tokens`.

        Args:
            training: the training section of the run.
            data: its data section.

        Raises:
            ValueError: tokens are learned without new text, or from other text than in the rest of the recipe; the
                training is sharded; or the bare backbone would have to read added tokens.
        """
        tokens = self.backbone.add_tokens
        if tokens is None:
            return
        if isinstance(tokens, LearnedTokensConfig) and not data.new:
            raise ValueError(
                "backbone.add_tokens learns tokens from the new text, but data.new is empty: name some there, or list "
                "the tokens"
            )
        if isinstance(tokens, LearnedTokensConfig) and data.new != self.data.new:
            raise ValueError(
                "backbone.add_tokens learns tokens from data.new, but a method has other new text, so that its rows "
                "would not be compared on the same tokens: list the tokens, or give all methods the same data.new"
            )
        if training.sharded:
            raise ValueError(
                "backbone.add_tokens gives the graft rows of its own, which training.sharded can't spread over "
                "processes: set sharded to false, or leave add_tokens out"
            )
        if data.anchor:
            raise ValueError(
                "data.anchor lets the bare backbone read the new text, which may contain the tokens of "
                "backbone.add_tokens: set anchor to 0, or leave add_tokens out"
            )
        is_sampled = all(isinstance(source, SelfSourceConfig) for source in data.old)
        if data.old_objective == "distil" and data.replay_fraction and not is_sampled:
            raise ValueError(
                "old_objective distil lets the bare backbone read the old text, which may contain the tokens of "
                "backbone.add_tokens: set old_objective to replay, or let the backbone sample the old text (self: true)"
            )


class FrontierConfig(Config):
    """What `graft compare --frontier` sweeps for every method alike."""

    rates: list[Annotated[float, Field(gt=0)]] = Field(
        [0.5, 2.0], description="Factors on each method's learning rate, in addition to 1."
    )
    strengths: list[Annotated[float, Field(gt=0, le=1)]] = Field(
        [0.25, 0.5, 0.75],
        description="Shares of the way from the weights' start to where training took them, in addition to 1.",
    )


class Recipe(TextRecipe):
    """A training run of one graft on text, or a comparison of several grafts on the same text."""

    graft: AnyGraft | None = Field(None, description="What to train; `kind` names the method.")
    methods: dict[str, MethodConfig] = Field({}, description="For graft compare: what to train, by row id.")
    frontier: FrontierConfig = Field(FrontierConfig(), description="For graft compare --frontier.")
    out: str = Field("runs/graft", description="Folder for the graft, its report and the checkpoints.")

    def _problems(self) -> Iterator[str]:
        if self.graft is not None and self.graft.needs_tasks:
            yield (
                f"a graft of the kind {self.graft.kind} learns tasks, but the recipe has none: name some under tasks "
                "instead of data"
            )
        if self.graft is None and not self.methods:
            yield "the recipe has neither graft nor methods: name a graft to train, or methods to compare"
        if self.graft is None and self.methods and isinstance(self._first_method().graft, MatchedGraft):
            yield (
                "the capacity of the first method is match, which takes the parameters of the graft section or of the "
                "first method: add a graft section, or give the first method a size"
            )
        if BACKBONE_ROW in self.methods:
            yield "the method id backbone is the id of the backbone's own row: choose another"
        if self.training.has_steps and not self.data.new:
            yield "training needs text, but data.new is empty: name some there, or set training.steps to 0"
        if not self.methods:
            check_sections(self.training, self.data, self.evaluation)
            self.check_added_tokens(self.training, self.data)
        for name, method in self.methods.items():
            training, data = self.changed_sections(method, f"methods.{name}")
            check_sections(training, data, self.evaluation)
            self.check_added_tokens(training, data)

    def run(self) -> GraftRun:
        """Return the run that trains the recipe's graft.

        Raises:
            RecipeError: the recipe has methods and no graft section.
        """
        if self.graft is None:
            raise RecipeError(
                "The recipe has methods to compare and no graft section: run graft compare, or add a graft section."
            )
        return GraftRun(
            id=self.graft.kind,
            folder=".",
            backbone=self.backbone,
            graft=self.graft,
            data=self.data,
            training=self.training,
            evaluation=self.evaluation,
        )

    def _first_method(self) -> MethodConfig:
        return next(iter(self.methods.values()))

    def compared_methods(self) -> dict[str, MethodConfig]:
        """Return the methods of a comparison by row id.

        Without methods, they are the recipe's graft and every other kind of graft that needs no settings, of the same
        size where the kind has one.
        """
        return self.methods or self._default_methods()

    def comparison(self) -> list[GraftRun]:
        """Return the runs of a comparison, one for each method.

        The backbone is loaded if the size of a graft is to match that of another.

        Raises:
            ValueError: a method changes the test texts.
            RecipeError: a key that a method changes is unknown, or its value does not fit.
            GraftError: a size is to match, and the backbone can't be loaded, or a graft does not fit it.
        """
        methods = self.compared_methods()
        aim = self._matched_parameters(methods)
        runs = []
        for name, method in methods.items():
            training, data = self.changed_sections(method, f"methods.{name}")
            graft, matched = method.graft, None
            if isinstance(graft, MatchedGraft):
                graft, matched = graft.resolved(aim, load_shared(self.backbone.without_tokens))
            run = GraftRun(
                id=name,
                label=method.label,
                backbone=self.backbone,
                graft=graft,
                matched=matched,
                data=data,
                training=training,
                evaluation=self.evaluation,
            )
            runs.append(run)
        return _labelled(runs)

    def _matched_parameters(self, methods: Mapping[str, MethodConfig]) -> int:
        """Return the trainable parameters of the recipe's graft, or of the first method; 0 where no size is to match.

        Raises:
            GraftError: the backbone can't be loaded, or the graft does not fit it.
        """
        if not any(isinstance(method.graft, MatchedGraft) for method in methods.values()):
            return 0
        graft = self.graft or self._first_method().graft
        assert isinstance(graft, GraftConfig), "the size of the first method is given"
        return trained_parameters(graft, load_shared(self.backbone.without_tokens))

    def _default_methods(self) -> dict[str, MethodConfig]:
        """Return the recipe's graft, and every other kind of graft that needs no settings, as methods."""
        assert self.graft is not None, "a recipe without methods has a graft"
        grafts: dict[str, GraftConfig | MatchedGraft] = {self.graft.kind: self.graft}
        for kind in kinds():
            config = default_config(kind)
            if config is not None:
                has_sizes = issubclass(config.graft_class, HasSizes)
                grafts.setdefault(kind, MatchedGraft.of({"kind": kind}) if has_sizes else config)
        return {kind: MethodConfig(graft=graft) for kind, graft in grafts.items()}

    def frontier_runs(self) -> dict[str, list[GraftRun]]:
        """Return the runs of a comparison at every rate and strength, by method.

        The first run of a method has the method's own rate.

        Raises:
            RecipeError: the recipe lacks the test texts old or new, or strengths do not fit its training section.
        """
        sets = self.data.sets
        missing = [name for name in (OLD_SET, NEW_SET) if not sets.of_domain(name, self.data.test)]
        if missing:
            raise RecipeError(
                f"data.test has no texts {' and '.join(missing)}, but a frontier compares what was learned of new text "
                "with what was forgotten of old text: name test texts old and new, or after named sets of each."
            )
        evaluation = self.evaluation.model_copy(update={"strengths": self.frontier.strengths or [1.0]})
        # Parsed again, since strengths do not fit every training section.
        recipe = Recipe.parse(self.model_dump() | {"evaluation": evaluation.model_dump()})
        runs: dict[str, list[GraftRun]] = {}
        for run in recipe.comparison():
            others = sorted(set(self.frontier.rates) - {1.0}) if run.training.has_steps else []
            runs[run.id] = [run, *(_at_rate(run, factor) for factor in others)]
        return runs


def _labelled(runs: Sequence[GraftRun]) -> list[GraftRun]:
    """Return runs that all have labels: their own, that of the graft, or the id where labels of grafts repeat."""
    labels = {run.id: run.label or _graft_label(run) for run in runs}
    counts = Counter(labels.values())
    labelled = []
    for run in runs:
        repeats = not run.label and counts[labels[run.id]] > 1
        labelled.append(run.model_copy(update={"label": run.id if repeats else labels[run.id]}))
    return labelled


def _graft_label(run: GraftRun) -> str:
    """Return the label of the graft that a run of a comparison trains."""
    assert run.graft is not None, "a comparison has no bare backbone"
    return run.graft.label


def _at_rate(run: GraftRun, factor: float) -> GraftRun:
    """Return a run with its learning rate multiplied, and with the new rate in its id and label."""
    rate = run.training.learning_rate * factor
    return run.model_copy(
        update={
            "id": f"{run.id}-rate-{rate:g}",
            "label": f"{run.label}, rate {rate:g}",
            "training": run.training.model_copy(update={"learning_rate": rate}),
        }
    )


def check_sections(training: TrainingConfig, data: DataConfig, evaluation: EvaluationConfig) -> None:
    """Check that sections of a recipe fit together.

    Args:
        training: the training section of a run.
        data: its data section.
        evaluation: its evaluation section.

    Raises:
        ValueError: two measurements have one name, the training is sharded but uses strengths or distillation, text
            that continues from step to step does not fit the other keys, or the text of own_kl has the seed of training
            text.
    """
    labels = [*(task.label for task in evaluation.harness), *preset_labels(evaluation.preset)]
    for problem in name_problems(data.test, labels, with_sets=data.sets.are_named):
        raise ValueError(problem)
    if evaluation.forgetting_budget is not None and not data.sets.of_domain("old", data.test):
        known = " or ".join(data.sets.old or (OLD_SET,))
        raise ValueError(
            "evaluation.forgetting_budget is set, but no test text is old, so nothing forgotten is measured: name a "
            f"test text {known}, or leave forgetting_budget out"
        )
    if evaluation.strength is not None:
        tested = [source for sources in data.test.values() for source in sources]
        for source in (*evaluation.strength.old, *evaluation.strength.new):
            if source in tested:
                raise ValueError(
                    f"evaluation.strength is chosen on the text {source.title}, which is also a test text, so the "
                    "measured strength would have seen the test: name other text under strength"
                )
    moves_back = "strengths" if evaluation.strengths else "strength"
    if training.sharded and (evaluation.strengths or evaluation.strength is not None):
        raise ValueError(
            f"evaluation.{moves_back} moves weights back to their start, but training.sharded spreads the weights over "
            f"processes: set sharded to false, or leave {moves_back} out"
        )
    if evaluation.strength is not None and not training.has_steps:
        raise ValueError(
            "evaluation.strength moves trained weights back, but training.steps is 0: set steps, or leave strength out"
        )
    if training.sharded and (data.old_objective == "distil" or data.anchor):
        key = "anchor" if data.anchor else "old_objective distil"
        raise ValueError(
            f"{key} needs a pass of the bare backbone, but training.sharded spreads its weights over processes: set "
            "sharded to false, or change that key"
        )
    if training.epochs is not None and (data.stream or any(source.streaming for source in data.new)):
        raise ValueError(
            "training.epochs counts passes over text in memory, but data.new is streamed: set training.steps instead"
        )
    if data.stream:
        _check_stream(training, data)
    own_sources = [source for source in data.old if isinstance(source, SelfSourceConfig)]
    seeds_of_old_text = [source.seed for source in own_sources if source.near is None]
    if evaluation.own_tokens and data.replay_fraction and evaluation.own_seed in seeds_of_old_text:
        raise ValueError(
            f"evaluation.own_seed is {evaluation.own_seed}, which is also the seed of old text that the backbone "
            "samples, so own_kl would be measured on training text: choose another seed"
        )


def _check_stream(training: TrainingConfig, data: DataConfig) -> None:
    """Raise `ValueError` if other keys do not fit rows that continue from step to step."""
    changes = []
    if data.boundaries != "joined":
        changes.append("data.boundaries to joined")
    if data.replay_fraction:
        changes.append("data.replay_fraction to 0")
    if data.anchor:
        changes.append("data.anchor to 0")
    if training.gradient_checkpointing:
        changes.append("training.gradient_checkpointing to false")
    if changes:
        raise ValueError(
            "data.stream continues each row from the cache of the previous step, which needs joined boundaries, no "
            f"replay, no anchor and no gradient checkpointing: set {', '.join(changes)}, or set data.stream to false"
        )
    if data.weights is not None or any(source.weight is not None for source in data.new):
        raise ValueError(
            "data.stream reads each text in its order, so its sources have no weights: leave them out, or set "
            "data.stream to false"
        )
    for source in data.new:
        if source.streaming:
            raise ValueError(
                f"data.stream cuts its rows from text in memory, but the source {source.name} under data.new is "
                "streaming: set its streaming to false, or data.stream to false"
            )
