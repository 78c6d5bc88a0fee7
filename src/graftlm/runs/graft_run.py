"""The run of one graft on text: train it on its frozen backbone, measure both, save the graft.

Where it needs text that the backbone samples, a `SamplingRun` comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from accelerate.utils import set_seed
from pydantic import BeforeValidator, SerializeAsAny
from torch import Tensor

from graftlm.backbone import Backbone, acts_after_norm
from graftlm.backbone.load import BackboneConfig, LearnedTokensConfig
from graftlm.data import DataConfig, Document, Mixture, SelfSourceConfig, TokenBlocks, build_documents
from graftlm.data.boundaries import check_boundaries
from graftlm.data.mixture import build_blocks, build_mixture
from graftlm.data.new_names import NewNames
from graftlm.data.own_text import marked_ids, read_own_text
from graftlm.data.sources import read_documents
from graftlm.errors import RecipeError
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.evaluator import BACKBONE_ROW, BackboneEvaluator, EvaluationConfig, check_questions
from graftlm.evaluation.intervals import share_interval
from graftlm.evaluation.kept_answers import (
    WORST,
    answer_metrics,
    compare_answers,
    questions_about_new,
    worst_answers,
)
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.metric_text import format_metric
from graftlm.evaluation.strengths import move_back
from graftlm.evaluation.taught_answers import ClosedQuestions, TaughtAnswer, closed_text
from graftlm.files.digests import file_digest
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import (
    ChangesAtEnd,
    FitsOnText,
    Graft,
    GraftConfig,
    ReadsModels,
    ReplacesModel,
    TrainsOnSets,
    graft_config,
    new_graft,
)
from graftlm.runs.benchmark_run import BARE_RESULTS, BenchmarkRun, settings_of
from graftlm.runs.conversations import acts_by_prompt, closed_questions, notes_on_conversations
from graftlm.runs.fitting import example_sources, fit_on_text
from graftlm.runs.matching import MatchedSize
from graftlm.runs.rewriting_run import RewritingRun
from graftlm.runs.run import Run, RunContext, Trainee, TrainingRun, steps_text
from graftlm.runs.sampling_run import SAMPLES, SamplingRun
from graftlm.runs.shared import (
    load_shared_evaluator,
    load_shared_extended,
    release_shared,
    shared_batches,
    shared_notes,
)
from graftlm.runs.unused_tokens import note_on_unused_tokens
from graftlm.store.artifact import load_graft, save_graft
from graftlm.store.card import model_card
from graftlm.store.manifest import TENSORS_NAME
from graftlm.training.loop import TrainingSummary
from graftlm.training.stateful import StatefulBatches, StatefulModel

LATER_DATA_KEYS = ("new_objective", "anchor", "rewrite")
"""Keys of the data section that do not count at their defaults."""
GRAFT_NAME = "graft"
"""Name of the graft that a run trains, among the attached grafts."""


def _parse_graft(value: Any) -> GraftConfig:
    return value if isinstance(value, GraftConfig) else graft_config(value)


AnyGraft = Annotated[SerializeAsAny[GraftConfig], BeforeValidator(_parse_graft)]
"""The config of any kind of graft, chosen by its key `kind`."""


@dataclass(frozen=True)
class GraftEvaluation:
    """What is needed to evaluate a trained graft.

    Attributes:
        evaluator: the evaluator of the run's backbone, made before training.
        start: the weights before training by name; empty if the evaluation does not need them.
        closed: the taught questions on which the graft does not act; None if it acts on all.
    """

    evaluator: BackboneEvaluator
    start: Mapping[str, Tensor]
    closed: ClosedQuestions | None = None


class GraftRun(TrainingRun):
    """Train one graft on one backbone on text; without a graft, measure the bare backbone.

    The grafts of the runs in `depends_on` are attached before it and stay frozen. With `continues`, the last of them is
    trained further instead of a new graft. `matched` tells for the report how the size of the graft was chosen.
    """

    continues: bool = False
    matched: MatchedSize | None = None
    backbone: BackboneConfig
    graft: AnyGraft | None = None
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        settings["evaluation"].pop("forgetting_budget")
        del settings["matched"]  # the graft's config has the size
        # Later fields are left out at their defaults, so that earlier runs keep their keys.
        if not self.data.stream:
            del settings["data"]["stream"]
        for key in LATER_DATA_KEYS:
            if getattr(self.data, key) == DataConfig.model_fields[key].default:
                del settings["data"][key]
        if self._set_of:
            settings["data"]["by_set"] = True
        if not self.continues:
            del settings["continues"]
        for key in ("ask", "strength"):
            if getattr(self.evaluation, key) is None:
                del settings["evaluation"][key]
        self._settle_benchmarks(settings["evaluation"])
        if self.graft is None:
            data = settings["data"]
            settings["data"] = {"test": data["test"], "length": data["length"]}
            if self.data.sets.are_named:
                settings["data"]["sets"] = [list(self.data.sets.new), list(self.data.sets.old)]
            if self._text_of_tokens:
                settings["data"]["new"] = data["new"]
            del settings["training"]
        return settings

    def _settle_benchmarks(self, evaluation: MutableMapping[str, object]) -> None:
        """Replace the preset and the folder of its data by its tasks, in the settings of the evaluation."""
        harness = [settings_of(task) for task in self.evaluation.benchmarks()]
        for key in ("harness", "eval_data", "confirm_unsafe_code"):
            del evaluation[key]
        if self.evaluation.preset is None:
            del evaluation["preset"]
        if harness:
            evaluation["harness"] = harness

    def model_post_init(self, _context: object) -> None:
        if self.graft is not None:
            self.graft.check_new()
        if self.graft is not None and self.training.has_steps and not self.data.stream:
            self.graft.check_rows(self.data.length)
        if self.graft is not None and self.training.has_steps:
            self.graft.check_prompts([source.title for source in self.data.new if not source.has_prompts])
        if self._set_of and self.data.stream:
            raise RecipeError(
                "Parts of the graft train on named sets of new text, but with data.stream rows continue over their "
                "ends: set stream to false, or list the sources of data.new without names."
            )

    @property
    def _set_of(self) -> dict[str, str]:
        """The named set of new text on which a part of the graft trains, by the graft's name for the part."""
        return {} if self.graft is None else self.graft.set_of_parts(self.data.sets.new)

    def artefacts(self) -> tuple[str, ...]:
        return () if self.graft is None else ("graft/graft.json",)

    def check(self) -> None:
        """Check that the graft fits the backbone, by attaching an untrained one, and that it has the texts it needs.

        Raises:
            GraftError: the backbone can't be loaded, the graft does not fit it, or the questions to ask or the texts
                that the graft learns from can't be read.
        """
        if self.graft is None:
            return
        backbone = load_shared_extended(self.backbone, self._text_of_tokens)
        graft = new_graft(self.graft, backbone)
        with GraftedModel(backbone, {GRAFT_NAME: graft}):
            pass
        if isinstance(graft, FitsOnText) and not self.continues:
            sources = example_sources(graft, self.data.new, self._set_of)
            graft.check_examples([name for name, own in sources.items() if own])
            for own in sources.values():
                for source in own:
                    next(read_documents(source))
        if self.graft is not None and self.graft.changes_at_end and self.evaluation.moves_weights_back:
            raise RecipeError(
                f"{self.id} changes its weights at the end of training, so that they can't be moved back: "
                "leave out evaluation.strength and strengths, or what changes the weights."
            )
        if self.evaluation.ask is not None:
            check_questions(self.evaluation.ask, backbone.need_tokenizer())

    def needs(self) -> Sequence[Run]:
        if self.graft is None:
            return self._benchmark_runs()
        return [*self._rewriting(), *self._old_samples(), *self._test_samples(), *self._benchmark_runs()]

    def _benchmark_runs(self) -> list[BenchmarkRun]:
        """Return the run that measures the bare backbone on the benchmarks."""
        benchmarks = self.evaluation.benchmarks()
        if not benchmarks:
            return []
        run = BenchmarkRun.of(
            self.backbone.without_tokens,
            benchmarks,
            batch_size=self.evaluation.batch_size,
            confirm_unsafe_code=self.evaluation.confirm_unsafe_code,
        )
        return [run]

    def _rewriting(self) -> list[RewritingRun]:
        """Return the run that rewrites the answers of the new conversations, in a list that may be empty."""
        if self.data.rewrite is None or not self.training.has_steps:
            return []
        return [RewritingRun.of(self.backbone.without_tokens, self.data.rewrite, self.data.length, self.data.new)]

    def _old_samples(self) -> list[SamplingRun]:
        """Return the runs that sample old text to train on."""
        if not (self.training.has_steps and self.data.replay_fraction):
            return []
        sources = [source for source in self.data.old if isinstance(source, SelfSourceConfig)]
        bare = self.backbone.without_tokens
        return [SamplingRun.of(bare, source, self.data.length, self.data.new) for source in sources]

    def _test_samples(self) -> list[SamplingRun]:
        """Return the run that samples the text on which the divergence is measured.

        It samples from the unmodified distribution, since the divergence is an expectation over the backbone's texts.
        """
        if not self.evaluation.own_tokens:
            return []
        source = SelfSourceConfig(self=True, tokens=self.evaluation.own_tokens, seed=self.evaluation.own_seed)
        return [SamplingRun.of(self.backbone.without_tokens, source, self._scored_length)]

    @property
    def _scored_length(self) -> int:
        return self.evaluation.length or self.data.length

    @property
    def _text_of_tokens(self) -> str:
        """The new texts as `load_shared_extended` takes them; empty if no tokens are learned from them."""
        is_learned = isinstance(self.backbone.add_tokens, LearnedTokensConfig)
        return self.data.model_dump_json(include={"new"}) if is_learned else ""

    def evaluator(self, dependencies: Mapping[str, Path] | None = None) -> BackboneEvaluator:
        """Return the evaluator of the run's backbone, which the runs of one process share.

        Args:
            dependencies: folders of the runs of `needs` by id; without them, `own_kl` is not measured, and the bare
                backbone is measured on the benchmarks here.

        Raises:
            GraftError: the backbone, the test texts, the tasks or the sampled texts can't be read.
        """
        known = dependencies or {}
        own_text = None
        for run in self._test_samples():
            if run.id in known:
                own_text = known[run.id] / SAMPLES
        bare_results = None
        for run in self._benchmark_runs():
            if run.id in known:
                bare_results = known[run.id] / BARE_RESULTS
        return load_shared_evaluator(
            self.backbone,
            self._text_of_tokens,
            self.data.model_dump_json(include={"test"}),
            self.evaluation.model_dump_json(),
            self._scored_length,
            own_text,
            self.data.sets,
            bare_results,
        )

    def measure(self, context: RunContext) -> Measurement:
        if self.graft is not None:
            return super().measure(context)
        evaluator = self.evaluator(context.dependencies)
        evaluator.progress = context.progress
        parameters = count_parameters(evaluator.backbone.model.parameters())
        context.log(f"Backbone {evaluator.backbone.name}: {parameters:,} parameters, frozen.")
        return evaluator.measure_backbone(self.label or BACKBONE_ROW, self.id)

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee[GraftedModel, GraftEvaluation]]:
        """Build the grafted model and its batches, after the bare backbone was measured.

        The grafts are detached from the backbone when the block ends.

        Args:
            context: the folders of earlier grafts and of sampled text, and where to log.

        Raises:
            GraftError: the backbone, an earlier graft or the texts can't be read, or the graft does not fit the
                backbone.
        """
        assert self.graft is not None, "a bare backbone is not trained"
        evaluator = self.evaluator(context.dependencies)
        evaluator.progress = context.progress
        backbone = evaluator.backbone
        batches = self._batches(backbone, context.dependencies) if self.training.has_steps else None
        set_seed(self.training.seed)
        earlier = {name: load_graft(context.dependencies[name] / "graft", backbone) for name in self.depends_on}
        continued = None
        if self.continues and earlier:
            _, continued = earlier.popitem()
        graft = new_graft(self.graft, backbone) if continued is None else continued
        identity = self._identity(graft, backbone, batches, context)
        # These are measured once, while no graft is attached.
        _ = evaluator.backbone_scores
        _ = evaluator.backbone_outcomes
        _ = evaluator.backbone_benchmarks
        _ = evaluator.backbone_answers
        _ = evaluator.validator
        documents = self._new_chats()
        for note in self._notes_on(documents, backbone):
            context.log(note)
        self._log_start(context)
        unused = note_on_unused_tokens(backbone, batches)
        if unused is not None:
            context.log(unused)
        if isinstance(graft, TrainsOnSets) and self.training.has_steps:
            for note in graft.train_on_sets(self.data.sets.new):
                context.log(note)
        if isinstance(graft, FitsOnText) and continued is None:
            for note in fit_on_text(graft, self.data.new, self._set_of):
                context.log(note)
        closed = closed_questions(graft, documents, evaluator.tokenizer)
        if closed is not None:
            context.log(closed_text("The graft", closed))
        del documents  # which may be large
        model_class = StatefulModel if self.data.stream else GraftedModel
        grafts = {**earlier, GRAFT_NAME: graft}
        grafted = model_class(
            backbone,
            grafts,
            old_objective=self.data.old_objective,
            new_objective=self.data.new_objective,
            anchor=self.data.anchor,
        )
        with grafted as model:
            _freeze(model, earlier.values())
            evaluation = GraftEvaluation(evaluator=evaluator, start=self._weights_before_training(model), closed=closed)
            yield Trainee(model=model, batches=batches, identity=identity, evaluation=evaluation)

    def _identity(
        self,
        graft: Graft,
        backbone: Backbone,
        batches: Mixture | None,
        context: RunContext,
    ) -> dict[str, object]:
        """Return what a resumed run must share, as plain JSON values."""
        assert self.graft is not None, "a bare backbone is not trained"
        identity: dict[str, object] = {
            "graft": self.graft.model_dump(mode="json"),
            "backbone": backbone.fingerprint.id,
            "data": None if batches is None else batches.fingerprint(),
            "old_objective": self.data.old_objective,
        }
        data = self.data.model_dump(mode="json", include=set(LATER_DATA_KEYS))
        identity |= {key: value for key, value in data.items() if value != DataConfig.model_fields[key].default}
        if acts_after_norm(backbone.sites, graft.taps()):
            identity["ffn_exit"] = backbone.sites.family.ffn.exit
        if self.depends_on:
            files = [context.dependencies[name] / "graft" / TENSORS_NAME for name in self.depends_on]
            identity["trained_after"] = [file_digest(file) for file in files]
        if isinstance(graft, ReadsModels):
            models = graft.frozen_models()
            identity["frozen_models"] = {name: model.fingerprint.id for name, model in models.items()}
        return identity

    def _new_chats(self) -> list[Document]:
        """Return the new documents if there are conversations among them to train on; none of a stream."""
        has_chats = any(source.messages_column for source in self.data.new)
        if not (has_chats and self.training.has_steps) or any(source.streaming for source in self.data.new):
            return []
        return build_documents(self.data.new)

    def _notes_on(self, documents: Sequence[Document], backbone: Backbone) -> Sequence[str]:
        """Return what is known of the new conversations before the training. Runs of one process share it."""
        asks = self.evaluation.ask is not None
        key = (self.backbone, asks, documents)
        return shared_notes(key, lambda: notes_on_conversations(documents, backbone, asks=asks))

    def _log_start(self, context: RunContext) -> None:
        assert self.graft is not None, "a bare backbone is not trained"
        label = self.label or self.graft.label
        if self.training.steps:
            context.log(f"Training {label} for {steps_text(self.training.steps)}.")
        elif self.training.has_steps:
            context.log(f"Training {label}.")
        else:
            context.log(f"Fitting {label}.")

    def _weights_before_training(self, model: GraftedModel) -> dict[str, Tensor]:
        """Copy the trainable weights if the evaluation moves weights back to their start."""
        moves_back = self.evaluation.strengths or self.evaluation.strength is not None
        if not (moves_back and self.training.has_steps):
            return {}
        return {name: weight.detach().clone() for name, weight in model.trainable_parameters().items()}

    def _batches(self, backbone: Backbone, dependencies: Mapping[str, Path]) -> Mixture:
        """Return the run's batches, which the runs of one process share."""
        check_boundaries(backbone.model, self.data.boundaries, "set data.boundaries to joined")

        def build() -> Mixture:
            return self._build_batches(backbone, dependencies)

        data = self.data.model_dump_json(exclude={"test"})
        if self._set_of:
            data += " by set"
        return shared_batches((self.backbone, data, self.training.batch_size), build)

    def _build_batches(self, backbone: Backbone, dependencies: Mapping[str, Path]) -> Mixture:
        """Read the run's texts, including sampled ones, into batches."""
        tokenizer = backbone.need_tokenizer()
        files = [dependencies[run.id] / SAMPLES for run in self._old_samples()]
        own_text = [[marked_ids(sample) for sample in read_own_text(file)] for file in files]
        data = self.data
        for run in self._rewriting():
            data = data.model_copy(update={"new": run.rewritten_sources(dependencies[run.id])})
        if not data.stream:
            return build_mixture(data, tokenizer, self.training.batch_size, own_text, by_set=bool(self._set_of))
        blocks = build_blocks(data.new, data, tokenizer)
        assert isinstance(blocks, TokenBlocks), "the config does not allow a streaming source here"
        return StatefulBatches(blocks, self.training.batch_size)

    def evaluate(self, trainee: Trainee[GraftedModel, GraftEvaluation]) -> Measurement:
        assert self.graft is not None, "a bare backbone is not trained"
        label = self.label or self.graft.label
        evaluation = trainee.evaluation
        graft = trainee.model.grafts[GRAFT_NAME]
        finished = graft.finish() if isinstance(graft, ChangesAtEnd) and self.training.has_steps else {}
        chosen = evaluation.evaluator.choose_strength(trainee.model, evaluation.start)
        start = evaluation.start
        if chosen is not None:
            move_back(trainee.model.trainable_parameters(), start, chosen[0])
            start = {}
        measurement = evaluation.evaluator.measure(trainee.model, self.id, label, start)
        measurement.add_metrics(finished)
        if chosen is not None:
            measurement.add_metrics({"strength": chosen[0]})
            measurement.details["validated_strengths"] = chosen[1]
        if evaluation.closed is not None:
            measurement.details["closed_questions"] = evaluation.closed
        if evaluation.evaluator.asked is not None:
            self._compare_answers(evaluation.evaluator, trainee.model, measurement)
        return measurement

    def _compare_answers(self, evaluator: BackboneEvaluator, model: GraftedModel, measurement: Measurement) -> None:
        """Add what became of the backbone's answers to the questions of `ask`."""
        names = None
        if not any(source.streaming for source in self.data.new):
            documents = build_documents(self.data.new)
            names = NewNames(documents, evaluator.tokenizer)
            acts = acts_by_prompt(model.grafts[GRAFT_NAME]) or _acts_always
            self._add_taught(evaluator.ask_taught(model, documents, acts), measurement)
        pairs = compare_answers(
            [question.text for question in evaluator.questions],
            [answer.text for answer in evaluator.backbone_answers],
            [answer.text for answer in evaluator.answer(model)],
            names,
        )
        measurement.details["asked_questions"] = {
            "asked": len(evaluator.questions),
            "wanted": evaluator.wanted_questions,
            "about_new": questions_about_new(pairs),
        }
        measurement.add_metrics(answer_metrics(pairs, with_spill=names is not None))
        measurement.details["answers"] = [pair.to_json() for pair in worst_answers(pairs)]

    def _add_taught(self, answers: Sequence[TaughtAnswer], measurement: Measurement) -> None:
        """Add the share of taught questions that are answered as taught, and answers that are not."""
        if not answers:
            return
        wrong = [answer for answer in answers if not answer.is_right]
        measurement.add_metrics({"taught_answers": share_interval(len(answers) - len(wrong), len(answers))})
        measurement.details["taught_questions"] = {
            "asked": len(answers),
            "wrong": [asdict(answer) for answer in wrong[:WORST]],
        }

    def save(
        self,
        trainee: Trainee[GraftedModel, GraftEvaluation],
        context: RunContext,
        summary: TrainingSummary | None,
        measurement: Measurement,
    ) -> None:
        """Write the graft with its model card into the folder `graft` of the run's folder."""
        model = trainee.model
        graft = model.grafts[GRAFT_NAME]
        assert isinstance(graft, Graft), "a grafted model has grafts only"
        trained_after = [] if self.continues else list(self.depends_on)
        training = self.record(summary, measurement)
        if trained_after:
            training["trained_after"] = trained_after
        training |= _recorded_statistics(measurement.details.get("statistics", {}))
        save_graft(
            graft,
            model.backbone,
            context.folder / "graft",
            training=training,
            card=_model_card(model.backbone, graft.config, measurement, trained_after),
        )

    @classmethod
    def release(cls) -> None:
        release_shared()


def _acts_always(prompt: Sequence[int]) -> bool:
    return True


def _freeze(model: GraftedModel, grafts: Iterable[Graft]) -> None:
    """Freeze attached grafts: their own parameters, and those that a graft has put into the backbone's modules."""
    for graft in grafts:
        graft.requires_grad_(False)
        if isinstance(graft, ReplacesModel):
            # No other attached graft replaces modules, so everything that trains is registered in its graft.
            registered = {id(parameter) for parameter in model.grafts.parameters()}
            for parameter in model.parameters():
                if id(parameter) not in registered:
                    parameter.requires_grad_(False)


def _recorded_statistics(statistics: Mapping[str, object]) -> dict[str, object]:
    """Return the statistics of a graft that its manifest records."""
    return {
        "observed": {name: value for name, value in statistics.items() if _is_observed(value)},
        "described": {name: value for name, value in statistics.items() if isinstance(value, int | float | str)},
    }


def _is_observed(value: object) -> bool:
    """Return whether a statistic has the form {text: [numbers]}, in which `Graft.observe` is recorded."""
    return isinstance(value, dict) and all(_is_list_of_numbers(values) for values in value.values())


def _is_list_of_numbers(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, float) for value in values)


def _model_card(
    backbone: Backbone,
    config: GraftConfig,
    measurement: Measurement,
    trained_after: Sequence[str],
) -> str:
    """Return the model card of a graft, with a table of its metrics.

    Args:
        backbone: the graft's backbone.
        config: the graft's config.
        measurement: the measured result.
        trained_after: ids of the runs whose grafts were attached too.
    """
    measured = f"measured with {', '.join(trained_after)}" if trained_after else "measured"
    metrics = measurement.row.metrics.items()
    lines = [
        "The backbone's weights are not in this folder and were never changed. Log-perplexities are in nats per token, "
        "those that end in bpb in bits per byte.",
        "",
        f"| metric | {measured} |",
        "|---|---|",
        *(f"| {name} | {format_metric(name, value)} |" for name, value in metrics),
    ]
    return model_card(
        backbone.name,
        config.label,
        "\n".join(lines),
        several=bool(trained_after),
        with_tokens=backbone.extended is not None,
    )
