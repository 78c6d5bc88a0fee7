"""The evaluator of a backbone: measures grafted models in comparison with the bare backbone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import Backbone, ExtendedVocabulary
from graftlm.config import Config
from graftlm.data import Document, SourceConfig, build_documents
from graftlm.data.own_text import OwnText
from graftlm.data.questions import read_questions, sample_questions
from graftlm.data.text_sets import ONE_SET, TextSets
from graftlm.errors import EvaluationError
from graftlm.evaluation.benchmarks import (
    Benchmark,
    BenchmarkResult,
    HarnessTaskConfig,
    PresetName,
    load_benchmarks,
    measure_benchmarks,
)
from graftlm.evaluation.benchmarks.config import duplicate_problem
from graftlm.evaluation.benchmarks.presets import with_preset
from graftlm.evaluation.chat_answers import (
    ChatAnswer,
    ChatQuestion,
    answer_questions,
    template_questions,
)
from graftlm.evaluation.cost import count_parameters, decode_speed, prompts_of
from graftlm.evaluation.divergence import own_text_counts, own_text_metrics
from graftlm.evaluation.inference import LanguageModel
from graftlm.evaluation.measurement import FrozenModel, Measurement
from graftlm.evaluation.models_alone import measure_alone
from graftlm.evaluation.observations import graft_statistics, observe
from graftlm.evaluation.results import Interval, Metric, Row, value_of
from graftlm.evaluation.scored_text import scored_parts
from graftlm.evaluation.scores import Scores, check_length, learning_and_forgetting, score_windows
from graftlm.evaluation.strengths import (
    StrengthConfig,
    changes_by_window,
    strength_point,
    weights_moved_back,
    windows_of,
)
from graftlm.evaluation.tasks import TaskConfig, TaskResult, measure_task, read_task
from graftlm.evaluation.taught_answers import Acts, TaughtAnswer, taught_questions
from graftlm.evaluation.windows import Window, limited_windows, own_windows
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.base import Graft, ReadsModels
from graftlm.progress import SHARE, progress_bar

OLD_SET = "old"
NEW_SET = "new"
BACKBONE_ROW = "backbone"
OWN_QUESTIONS = "own"
_QUESTIONS = 24  # sampled
_ANSWER_TOKENS = 48
_REMEDY = "leave out evaluation.ask, or name a chat model"
_OWN_SEED = 2**31 - 1  # Seed of the text for own_kl; people choose small ones for training.


class EvaluationConfig(Config):
    """What is measured after training, on test texts and on tasks."""

    length: int | None = Field(None, ge=3, description="Tokens per window; the data's row length when absent.")
    batch_size: int = Field(16, ge=1)
    limit_tokens: int | None = Field(
        50_000, ge=1, description="Tokens scored per test set, equal shares of its sources; all when null."
    )
    precision: Literal["fp32", "bf16"] = "fp32"
    decode_prompts: int = Field(2, ge=0, description="Prompts per domain for the decoding speed; 0 leaves it out.")
    decode_tokens: int = Field(32, ge=1, description="Tokens decoded per prompt.")
    tasks: dict[str, TaskConfig] = Field({}, description="Files of prompts and answers by name.")
    harness: list[HarnessTaskConfig] = Field([], description="Tasks of lm-evaluation-harness.")
    preset: PresetName | None = Field(
        None, description="retention: items of IFEval, BIG-Bench Hard and NQ-open, and ask: own for chat models."
    )
    eval_data: str | None = Field(
        None, description="Folder of the preset's data; by default $GRAFTLM_EVAL_DATA, or the hub if it is not set."
    )
    confirm_unsafe_code: bool = Field(False, description="Run harness tasks that execute code which the model writes.")
    own_tokens: int = Field(
        4096,
        ge=0,
        description="Tokens of text that the backbone samples, on which own_kl measures the divergence from it; 0 "
        "leaves it out.",
    )
    own_seed: int = Field(_OWN_SEED, ge=0, description="Seed of that text.")
    ask: str | None = Field(
        None,
        description="Questions to answer before and after training, whose answers the report compares: a file with one "
        "per line, or own for questions that the backbone samples.",
    )
    strengths: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        [],
        description="Measure the model also with its weights moved back: shares of the way from their start to where "
        "training took them.",
    )
    strength: StrengthConfig | None = Field(
        None,
        description="Move the weights back as far as validation text says, before they are measured and saved.",
    )
    forgetting_budget: float | None = Field(
        None, description="Nats per token of the old domain that the run may lose; more makes it fail."
    )

    @property
    def moves_weights_back(self) -> bool:
        """Whether the model is also measured, or left, with its weights moved back to their start."""
        return bool(self.strengths) or self.strength is not None

    def benchmarks(self) -> list[HarnessTaskConfig]:
        """Return the tasks of the harness, with those of the preset.

        Raises:
            DataError: the folder of the preset's data lacks the data of a task.
            EvaluationError: the preset has a task of the same name as another one.
        """
        return with_preset(self.harness, self.preset, self.eval_data)

    def _problems(self) -> Iterator[str]:
        problem = duplicate_problem(self.harness)
        if problem is not None:
            yield problem
        if self.eval_data is not None and self.preset is None:
            yield "eval_data is set, but only a preset reads it: set preset, or leave eval_data out"
        if self.strength is not None and self.strengths:
            yield (
                "strength chooses one strength, but strengths measures several: leave one of them out (a frontier "
                "measures several, too)"
            )


def _frozen_models(model: GraftedModel) -> dict[str, Backbone]:
    """Return the other models that the grafts of a model read, by name."""
    found: dict[str, Backbone] = {}
    for graft in model.grafts.values():
        if isinstance(graft, ReadsModels):
            found.update(graft.frozen_models())
    return found


def _models(backbones: Mapping[str, Backbone]) -> list[LanguageModel]:
    return [backbone.model for backbone in backbones.values()]


def check_questions(asked: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the key `ask` before anything is sampled.

    Args:
        asked: a file of questions, or `own`.
        tokenizer: the tokenizer, which needs a chat template.

    Raises:
        DataError: the file can't be read, or the tokenizer has no chat template.
    """
    texts = ["Why?"] if asked == OWN_QUESTIONS else read_questions(asked)
    template_questions(texts, tokenizer, remedy=_REMEDY)


def load_tests(test: Mapping[str, Sequence[SourceConfig]]) -> dict[str, list[Document]]:
    """Read the test documents of each set.

    Args:
        test: the sources of each set, as in `data.test`.

    Returns:
        The documents of each set, by its name.

    Raises:
        DataError: a source can't be read.
    """
    return {name: list(build_documents(sources)) for name, sources in test.items()}


@dataclass(eq=False)
class BackboneEvaluator:
    """Measures models that are built on one backbone, in comparison with the bare backbone.

    Args:
        backbone: the backbone, with a tokenizer.
        tests: test documents by set. `old` gives `forgotten`, `new` gives `learned`, and others `learned_<set>`.
        evaluation: what is measured; the files of its tasks are read now.
        length: tokens per window.
        own_text: texts that the backbone sampled, for own_kl and chat_kl. Without texts, these are not measured.
        progress: whether to show progress bars.
        sets: the named sets of new and old text, whose test sets give `learned_<set>` and `forgotten_<set>`; `learned`
            and `forgotten` are then their means.
        benchmarks: the loaded tasks of the harness; None loads them.
        bare_benchmarks: the backbone's results on them by label; None measures them.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the file of a task can't be read, or has too few examples.
        EvaluationError: a task of the harness can't be loaded.
    """

    backbone: Backbone
    tests: Mapping[str, Sequence[Document]]
    evaluation: EvaluationConfig
    length: int
    own_text: Sequence[OwnText] = ()
    progress: bool = False
    sets: TextSets = ONE_SET
    benchmarks: Sequence[Benchmark] | None = None
    bare_benchmarks: Mapping[str, BenchmarkResult] | None = None

    def __post_init__(self) -> None:
        self.tokenizer = self.backbone.need_tokenizer()
        self.tasks = {name: read_task(task) for name, task in self.evaluation.tasks.items()}
        if self.benchmarks is None:
            self.benchmarks = load_benchmarks(
                self.evaluation.benchmarks(), confirm_unsafe_code=self.evaluation.confirm_unsafe_code
            )

    def tokenizer_of(self, model: LanguageModel) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a grafted model, or that of the bare backbone, which has no added tokens.

        Args:
            model: a `GraftedModel`, or the backbone's model.
        """
        if isinstance(model, GraftedModel):
            return self.tokenizer
        return self.backbone.without_tokens.need_tokenizer()

    @cached_property
    def backbone_scores(self) -> dict[str, Scores]:
        """The backbone's scores by test set, computed on first access, which must come before a graft is attached."""
        return self._score_tests(self.backbone.model)

    @cached_property
    def validator(self) -> BackboneEvaluator | None:
        """The evaluator of the validation text on which a strength is chosen, made on first access; None without it.

        The first access must come before a graft is attached.

        Raises:
            DataError: the validation text can't be read.
        """
        strength = self.evaluation.strength
        if strength is None:
            return None
        tests = load_tests({OLD_SET: strength.old, NEW_SET: strength.new})
        settings = self.evaluation.model_copy(update={"strength": None, "tasks": {}, "harness": [], "preset": None})
        validator = BackboneEvaluator(self.backbone, tests, settings, self.length, progress=self.progress)
        _ = validator.backbone_scores
        return validator

    def choose_strength(
        self, model: GraftedModel, start: Mapping[str, Tensor]
    ) -> tuple[float, list[dict[str, float]]] | None:
        """Choose the strength of a trained model on the validation text; None without one.

        Args:
            model: the model, attached to the backbone.
            start: its trainable weights before training, by name.

        Returns:
            The strength, and what was learned and forgotten at each strength, in nats per token of validation text.
        """
        strength = self.evaluation.strength
        validator = self.validator
        if strength is None or validator is None:
            return None
        points = {}
        for value in sorted(set(strength.values)):
            with weights_moved_back(model.trainable_parameters(), start, value):
                points[value] = validator._text_metrics(validator._score_tests(model), None)
        described = [
            {"strength": value, **{name: value_of(metrics[name]) for name in ("learned", "forgotten")}}
            for value, metrics in points.items()
        ]
        return strength.choose(points), described

    @cached_property
    def backbone_outcomes(self) -> dict[str, TaskResult]:
        """The backbone's results by task, computed on first access, which must come before a graft is attached."""
        return self._measure_tasks(self.backbone.model)

    @cached_property
    def backbone_benchmarks(self) -> Mapping[str, BenchmarkResult]:
        """The backbone's results by benchmark, computed on first access, which must come before a graft is attached."""
        if self.bare_benchmarks is not None:
            return self.bare_benchmarks
        return self._measure_benchmarks(self.backbone.model)

    @property
    def asked(self) -> str | None:
        """The key `ask`, or `own` for a chat model that is measured by a preset; None if nothing is asked."""
        if self.evaluation.ask is None and self.evaluation.preset is not None and self.tokenizer.chat_template:
            return OWN_QUESTIONS
        return self.evaluation.ask

    @cached_property
    def questions(self) -> list[ChatQuestion]:
        """The questions of `asked`, read or sampled on first access; empty without it.

        Raises:
            DataError: the file can't be read, or the tokenizer has no chat template.
        """
        return template_questions(self._question_texts, self.tokenizer, remedy=_REMEDY) if self._question_texts else []

    @cached_property
    def _question_texts(self) -> list[str]:
        asked = self.asked
        if asked is None:
            return []
        if asked != OWN_QUESTIONS:
            return read_questions(asked)
        bare = self.backbone.without_tokens
        return sample_questions(bare, _QUESTIONS, self.evaluation.own_seed, progress=self.progress)

    @property
    def wanted_questions(self) -> int:
        """The number of questions that should be asked; the backbone may sample fewer."""
        return _QUESTIONS if self.asked == OWN_QUESTIONS else len(self.questions)

    @cached_property
    def backbone_answers(self) -> list[ChatAnswer]:
        """The backbone's answers, computed on first access, which must come before a graft is attached."""
        return self.answer(self.backbone.model)

    def answer(self, model: LanguageModel) -> list[ChatAnswer]:
        """Return a model's greedy answers to the questions of `ask`, of at most 48 tokens.

        Args:
            model: the backbone's model, or a grafted model on it.
        """
        questions = self.questions
        tokenizer = self.tokenizer_of(model)
        if questions and tokenizer is not self.tokenizer:
            questions = template_questions(self._question_texts, tokenizer, remedy=_REMEDY)
        return self._answers(model, questions)

    def _answers(self, model: LanguageModel, questions: Sequence[ChatQuestion]) -> list[ChatAnswer]:
        with progress_bar("answering questions", len(questions), SHARE, show=self.progress) as update:
            return answer_questions(
                model,
                self.tokenizer_of(model),
                questions,
                max_new_tokens=_ANSWER_TOKENS,
                batch_size=self.evaluation.batch_size,
                on_batch=lambda answers: update(advance=answers),
            )

    def ask_taught(self, model: LanguageModel, documents: Sequence[Document], acts: Acts) -> list[TaughtAnswer]:
        """Ask up to 24 new questions, evenly spaced over the documents.

        Args:
            model: the trained model.
            documents: the new documents; only conversations of one question count, with their system message.
            acts: whether the graft acts on a prompt.

        Returns:
            The answers; none if there are no such conversations.
        """
        taught = taught_questions(documents, self.tokenizer, _QUESTIONS)
        if not taught:
            return []
        answers = self._answers(model, [question for question, _ in taught])
        return [
            TaughtAnswer(question=question.text, taught=text, given=answer.text, acts=acts(question.ids))
            for (question, text), answer in zip(taught, answers, strict=True)
        ]

    def measure_backbone(self, label: str = BACKBONE_ROW, row_id: str = BACKBONE_ROW) -> Measurement:
        """Measure the bare backbone.

        Args:
            label: the backbone's name in tables.
            row_id: id of its row in the results.
        """
        metrics: dict[str, Metric] = dict(learning_and_forgetting({}, self.backbone_scores, self.sets))
        metrics.update(self._decode_speeds(self.backbone.model))
        metrics["total_parameters"] = count_parameters(self.backbone.model.parameters())
        for name, outcome in self.backbone_outcomes.items():
            metrics.update(outcome.metrics(name))
        for name, result in self.backbone_benchmarks.items():
            metrics.update(result.metrics(name))
        details = self._details({}, self.backbone_outcomes, self.backbone_scores, self.backbone_benchmarks)
        return Measurement(Row(id=row_id, label=label, metrics=metrics), details)

    def measure(
        self, model: GraftedModel, row_id: str, label: str, start: Mapping[str, Tensor] | None = None
    ) -> Measurement:
        """Measure a trained model.

        Args:
            model: the model, attached to the backbone.
            row_id: id of its row in the results.
            label: the model's name in tables.
            start: its trainable weights before training, by name. Without them, it is measured only as trained, and not
                at the strengths below 1.

        Returns:
            The metrics of texts, tasks and cost, with the details of the graft, the tasks and the strengths, and the
            changes in each window, which differences between methods need.
        """
        scores = self._score_tests(model, divergence=True)
        own_scores = self._score_own_text(model)
        metrics: dict[str, Metric] = dict(self._text_metrics(scores, own_scores))
        metrics.update(self._decode_speeds(model))
        metrics["trainable_parameters"] = count_parameters(model.trainable_parameters().values())
        others = _frozen_models(model)
        own = {id(parameter): parameter for each in (model, *_models(others)) for parameter in each.parameters()}
        stored = sum(graft.stored_parameters for graft in model.grafts.values() if isinstance(graft, Graft))
        metrics["total_parameters"] = count_parameters(own.values()) + stored
        outcomes = self._measure_tasks(model)
        for name, outcome in outcomes.items():
            metrics.update(outcome.metrics(name))
            metrics.update(outcome.gain(name, self.backbone_outcomes[name]))
        benchmarks = self._measure_benchmarks(model)
        for name, result in benchmarks.items():
            metrics.update(result.metrics(name))
            metrics.update(result.change(name, self.backbone_benchmarks[name]))
        details = self._details(self._statistics(model), outcomes, scores, benchmarks)
        if self.own_text:
            details["own_text_counts"] = own_text_counts(self.own_text)
        if others:
            details["frozen_models"] = [self._measure_alone(row_id, name, other) for name, other in others.items()]
        details["windows"] = windows_of(changes_by_window(self.backbone_scores, scores, own_scores, self.sets))
        if self.evaluation.strengths:
            trained = self._strength_point(1.0, scores, own_scores)
            details["strengths"] = [*self._weaker_points(model, start or {}), trained]
        return Measurement(Row(id=row_id, label=label, metrics=metrics), details)

    def _measure_alone(self, row_id: str, name: str, model: Backbone) -> FrozenModel:
        """Return another model that a graft reads, with its own row of the report, or why it has none."""
        found: FrozenModel = {
            "name": name,
            "model": model.name,
            "parameters": count_parameters(model.model.parameters()),
        }
        try:
            metrics = measure_alone(
                model,
                self.backbone,
                self.tests,
                self.backbone_scores,
                length=self.length,
                batch_size=self.evaluation.batch_size,
                precision=self.evaluation.precision,
                sets=self.sets,
            )
        except EvaluationError as error:
            found["problem"] = str(error)
            return found
        row = Row(id=f"{row_id}/{name}", label=f"{name} alone ({model.name})", metrics=metrics)
        found["row"] = row.model_dump(mode="json")
        return found

    def observe(self, model: GraftedModel, name: str) -> dict[str, list[float]]:
        """Return statistics of the graft's forward pass on the start of a test set, such as shares of open gates.

        Args:
            model: a model whose graft is named `graft`.
            name: name of a test set, such as `new`.

        Returns:
            One number per layer, by the statistic's name; empty if there is no such set.
        """
        return observe(model, self.backbone, self.tests.get(name, ()), self.length)

    def _text_metrics(self, scores: Mapping[str, Scores], own_scores: Scores | None) -> dict[str, Interval]:
        metrics = learning_and_forgetting(self.backbone_scores, scores, self.sets)
        if own_scores is not None:
            metrics.update(own_text_metrics(own_scores, self.own_text))
        return metrics

    def _weaker_points(self, model: GraftedModel, start: Mapping[str, Tensor]) -> list[dict[str, object]]:
        """Measure a model at each strength below 1, in rising order; nothing without weights before training."""
        if not start:
            return []
        points = []
        for strength in sorted(set(self.evaluation.strengths) - {1.0}):
            with weights_moved_back(model.trainable_parameters(), start, strength):
                scores = self._score_tests(model)
                own_scores = self._score_own_text(model)
            points.append(self._strength_point(strength, scores, own_scores))
        return points

    def _strength_point(
        self, strength: float, scores: Mapping[str, Scores], own_scores: Scores | None
    ) -> dict[str, object]:
        metrics = self._text_metrics(scores, own_scores)
        changes = changes_by_window(self.backbone_scores, scores, own_scores, self.sets)
        return strength_point(strength, metrics, changes)

    def _details(
        self,
        statistics: Mapping[str, object],
        outcomes: Mapping[str, TaskResult],
        scores: Mapping[str, Scores],
        benchmarks: Mapping[str, BenchmarkResult],
    ) -> dict[str, object]:
        """Return the details of a measurement, without empty ones."""
        details: dict[str, object] = {}
        if scores:
            details["scored_text"] = {name: scored_parts(scores[name], self.tests[name]) for name in scores}
        if statistics:
            details["statistics"] = dict(statistics)
        if self.sets.are_named:
            details["text_sets"] = {"new": list(self.sets.new), "old": list(self.sets.old)}
        if outcomes:
            details["tasks"] = {name: outcome.describe(self.tasks[name]) for name, outcome in outcomes.items()}
        if benchmarks:
            details["harness"] = {label: result.to_json() for label, result in benchmarks.items()}
        return details

    def _score_tests(self, model: LanguageModel, *, divergence: bool = False) -> dict[str, Scores]:
        """Score the test sets, on new text optionally with the divergence from the bare backbone."""
        check_length(model, self.length)
        scores = {}
        for name, documents in self.tests.items():
            reference = self.backbone.bare_model if divergence and self.sets.is_new(name) else None
            windows = list(limited_windows(self.tokenizer, documents, self.length, self.evaluation.limit_tokens))
            title = f"scoring {name}"
            if self.backbone.extended is None:
                scores[name] = self._score_windows(model, windows, reference, title)
            else:
                scores[name] = self._score_spelled(model, windows, self.backbone.extended, title)
        return scores

    def _score_spelled(
        self, model: LanguageModel, windows: Sequence[Window], extended: ExtendedVocabulary, title: str
    ) -> Scores:
        """Score windows of the extended tokenizer.

        The bare backbone reads the old tokens that spell the added ones, and both count these. There is no divergence,
        because the two predict different tokens.
        """
        spelled = [window.spelled(extended) for window in windows]
        if not isinstance(model, GraftedModel):
            check_length(model, max(len(window.ids) for window in spelled))
            return self._score_windows(model, spelled, None, title)
        scores = self._score_windows(model, windows, None, title)
        return replace(scores, tokens=np.array([window.tokens for window in spelled]))

    def _score_windows(
        self,
        model: LanguageModel,
        windows: Sequence[Window],
        reference: LanguageModel | None,
        title: str,
    ) -> Scores:
        total = sum(window.tokens for window in windows)
        with progress_bar(title, total, SHARE, show=self.progress) as update:
            return score_windows(
                model,
                self.tokenizer_of(model),
                windows,
                batch_size=self.evaluation.batch_size,
                precision=self.evaluation.precision,
                reference=reference,
                on_batch=lambda tokens: update(advance=tokens),
            )

    def _score_own_text(self, model: LanguageModel) -> Scores | None:
        """Score the backbone's own text; None without such text."""
        if not self.own_text:
            return None
        windows = list(own_windows(self.own_text))
        scores = self._score_windows(model, windows, self.backbone.bare_model, "scoring own text")
        return scores.by_document()

    def _measure_tasks(self, model: LanguageModel) -> dict[str, TaskResult]:
        results = {}
        for name, task in self.tasks.items():
            results[name] = measure_task(
                model,
                self.tokenizer_of(model),
                task,
                batch_size=self.evaluation.batch_size,
                precision=self.evaluation.precision,
            )
        return results

    def _measure_benchmarks(self, model: LanguageModel) -> dict[str, BenchmarkResult]:
        return measure_benchmarks(
            model,
            self.tokenizer_of(model),
            self.benchmarks or (),
            batch_size=self.evaluation.batch_size,
            progress=self.progress,
        )

    def _decode_speeds(self, model: LanguageModel) -> dict[str, float]:
        count = self.evaluation.decode_prompts
        if not count:
            return {}
        speeds = {}
        for name in (OLD_SET, NEW_SET):
            texts = [self.tests[each] for each in self.sets.of_domain(name, self.tests)]
            if texts:
                prompts = prompts_of(list(chain.from_iterable(texts)), count)
                tokenizer = self.tokenizer_of(model)
                speed = decode_speed(model, tokenizer, prompts, self.evaluation.decode_tokens)
                speeds[f"decode_{name}_tokens_per_s"] = speed
        return speeds

    def _statistics(self, model: GraftedModel) -> dict[str, object]:
        return graft_statistics(model, self.backbone, self.tests, self.length)
