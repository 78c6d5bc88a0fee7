"""An audit: two models side by side, on text that the first one samples itself and on what the user names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import numpy as np

from graftlm.data import Document, SelfSourceConfig, SourceConfig, build_documents
from graftlm.data.new_names import NewNames
from graftlm.data.own_text import OwnText
from graftlm.data.own_text_sampling import sample_own_text
from graftlm.data.questions import sample_questions
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation import chat_answers
from graftlm.evaluation.audit.comparison import TokenComparison, changed_tokens, compare_windows, scores_of
from graftlm.evaluation.audit.config import AuditConfig
from graftlm.evaluation.audit.differences import template_difference, tokenizer_difference
from graftlm.evaluation.audit.loading import Auditable, AuditedModel, Change, load_pair
from graftlm.evaluation.audit.passages import Passage, widest_passages
from graftlm.evaluation.audit.result import Audit, Conversation
from graftlm.evaluation.benchmarks import Benchmark, load_benchmarks, measure_benchmarks
from graftlm.evaluation.chat_answers import ChatQuestion
from graftlm.evaluation.divergence import own_text_counts
from graftlm.evaluation.harness import run_lm_eval
from graftlm.evaluation.kept_answers import (
    AnswerPair,
    answer_metrics,
    compare_answers,
    questions_about_new,
    worst_answers,
)
from graftlm.evaluation.remarks import fewer_questions, left_out_questions
from graftlm.evaluation.results import Aim, Interval, Metric, Results, Row, value_of
from graftlm.evaluation.scored_text import scored_parts
from graftlm.evaluation.scores import Scores, mean_difference, paired_difference, score
from graftlm.evaluation.tasks import Task, measure_task, read_task
from graftlm.evaluation.windows import Window, limited_windows, own_windows
from graftlm.files.digests import by_content, digest
from graftlm.progress import SHARE, progress_bar

_OWN_METRICS = ("own_kl", "chat_kl", "changed_tokens")
_ANSWER_METRICS = ("stops_lost", "keeps_template_lost", "same_language_lost")
_SPILL = "spill"
_TEXT_METRICS = ("lost", "kl", "changed_tokens")
_MEAN_LOST = "texts_lost"  # of several texts
# Names of texts that would give the metrics of a text the names of other metrics.
_TAKEN_NAMES = {"own", "chat", "changed", "stops", "keeps_template", "same_language", "kept_answers", "texts", _SPILL}

_NO_QUESTIONS = "No questions were asked, since tokens is 0 and none were named (--prompts)."
_REMEDIES: dict[Change, str] = {
    "trained": "train it with more old text or a lower learning rate",
    "quantized": "keep more bits of its weights, or all",
    "unknown": "train it with more old text or a lower learning rate, or keep more bits if it was quantized",
}

Text = str | Path | Sequence[str | Document]


def audit(
    base: Auditable,
    tuned: Auditable,
    out: str | Path | None = None,
    *,
    texts: Mapping[str, Text] | None = None,
    progress: bool = True,
    **settings: object,
) -> Audit:
    """Compare a tuned model with the one that it was made from.

    Args:
        base: the model before: a name, a folder, a GGUF file, a PEFT adapter's or a graft's folder, a `Backbone` or a
            `GraftedModel`.
        tuned: the model after, likewise.
        out: a folder that keeps the sampled text, so that an interrupted sampling can continue; None keeps none. The
            report and the page are written by `Audit.write`.
        texts: further texts by name: a path, or documents (strings).
        progress: show progress bars.
        settings: keys of `AuditConfig`, such as `tokens=2000` or `budget={"own_kl": 0.05}`.

    Raises:
        GraftError: a model can't be loaded, a setting does not fit, or there is nothing to compare.
    """
    config = AuditConfig.parse(settings, where="audit")
    documents = {name: _documents(name, text) for name, text in (texts or {}).items()}
    _check_names(documents, config)
    tasks = {name: read_task(task) for name, task in config.examples.items()}
    benchmarks = load_benchmarks(config.benchmarks(), confirm_unsafe_code=config.confirm_unsafe_code)
    pair = load_pair(
        base,
        tuned,
        quantize=config.quantize,
        backbone=config.backbone,
        device=config.device,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    with pair as (first, second):
        auditor = _Auditor(config, first, second, documents, tasks, benchmarks, progress)
        return auditor.run(base, out)


def _documents(name: str, text: Text) -> Sequence[str | Document]:
    if isinstance(text, str | Path):
        return build_documents([SourceConfig(path=str(text))])
    if not isinstance(text, Sequence):
        raise DataError(
            f"The text {name} is of type {type(text).__name__}, but a path or a list of strings is expected: pass one "
            "of them."
        )
    for number, each in enumerate(text):
        if not (isinstance(each, str) or hasattr(each, "text")):
            raise DataError(
                f"Document {number} of the text {name} is of type {type(each).__name__}, but a string is expected: "
                "convert it."
            )
    return text


def _joined(documents: Sequence[str | Document]) -> str:
    texts = [document.full_text if isinstance(document, Document) else document for document in documents]
    return "\n".join(texts)


def _check_names(documents: Mapping[str, Sequence[str | Document]], config: AuditConfig) -> None:
    """Check names of texts, the budget, and that there is something to compare, before any model is loaded."""
    known = _budget_metrics(documents, config)
    for name in config.budget:
        if name not in known:
            remedy = f"choose one of {', '.join(known)}" if known else "leave the budget out"
            raise EvaluationError(f"This audit has no metric {name!r} for a budget: {remedy}.")
    taken = _TAKEN_NAMES.intersection(documents)
    if taken:
        raise DataError(
            f"The name {min(taken)!r} of a text would give its metrics the names of other metrics: give it another "
            "name."
        )
    tasks = config.tasks or config.examples or config.harness or config.preset
    if not (config.tokens or config.prompts or documents or tasks):
        raise DataError("There is nothing to compare: raise tokens, or name a text, prompts, a task or examples.")


def _budget_metrics(names: Mapping[str, object], config: AuditConfig) -> list[str]:
    """Return the metrics that a budget may limit in an audit of texts with these names."""
    metrics: list[str] = []
    if config.tokens:
        metrics += _OWN_METRICS
    if config.prompts or (config.tokens and config.answers):
        metrics += _ANSWER_METRICS
        if config.new:
            metrics.append(_SPILL)
    for name in names:
        metrics += [f"{name}_{metric}" for metric in _TEXT_METRICS]
    if len(names) > 1:
        metrics.append(_MEAN_LOST)
    for name, task in config.examples.items():
        metrics.append(f"{name}_{task.metric}_lost")
    metrics += [f"{task.label}_lost" for task in config.benchmarks()]
    return metrics


class _Auditor:
    """Measures two loaded models.

    Args:
        config: what is measured.
        base: the model before.
        tuned: the model after.
        documents: further texts by name.
        tasks: tasks of prompts and answers by name.
        benchmarks: tasks of the harness that are compared item by item.
        progress: show progress bars.
    """

    def __init__(
        self,
        config: AuditConfig,
        base: AuditedModel,
        tuned: AuditedModel,
        documents: Mapping[str, Sequence[str | Document]],
        tasks: Mapping[str, Task],
        benchmarks: Sequence[Benchmark],
        progress: bool,
    ) -> None:
        self.config = config
        self.base = base
        self.tuned = tuned
        self.documents = documents
        self.tasks = tasks
        self.benchmarks = benchmarks
        self.progress = progress
        self.base_metrics: dict[str, Metric] = {}
        self.tuned_metrics: dict[str, Metric] = {}
        self.notes = [*base.notes, *tuned.notes]
        self.compared: list[tuple[str, TokenComparison]] = []
        self.conversations: list[Conversation] = []
        self.pairs: list[AnswerPair] = []
        self.details: dict[str, object] = {}
        self.has_same_tokens = True

    def run(self, given: Auditable, out: str | Path | None) -> Audit:
        """Measure everything.

        Args:
            given: the base as the user named it, for the identity of its sampled text.
            out: the folder of that text.
        """
        texts = {name: _joined(documents) for name, documents in self.documents.items()}
        difference = tokenizer_difference(self.base.tokenizer, self.tuned.tokenizer, texts)
        self.has_same_tokens = difference is None
        if difference is None:
            self._note_templates()
            samples = self._sample_own_text(given, out)
            self._compare_own_text(samples)
            self._compare_texts()
            self._compare_answers(samples)
        else:
            self._note_tokenizers(difference)
            self._score_texts()
        self._compare_examples()
        self._compare_benchmarks()
        self._compare_tasks()
        passages = widest_passages(self.compared, self.base.tokenizer)
        return Audit(
            results=self._results(passages),
            passages=passages,
            conversations=self.conversations,
            notes=self.notes,
            worst=worst_answers(self.pairs),
            remedy=_REMEDIES[self.tuned.change],
        )

    def _sides(self) -> tuple[tuple[AuditedModel, dict[str, Metric]], ...]:
        """Return both models with their metrics."""
        return (self.base, self.base_metrics), (self.tuned, self.tuned_metrics)

    def _note_tokenizers(self, difference: str) -> None:
        if not (self.documents or self.tasks or self.benchmarks or self.config.tasks):
            raise DataError(
                f"BASE and TUNED have different tokenizers ({difference}), so their predictions of one token can't be "
                "compared: name a text (--text NAME=PATH), which gives bits per byte, or a task (--tasks NAME)."
            )
        self.notes.append(f"The tokenizers differ ({difference}), so only bits per byte and tasks are compared.")

    def _note_templates(self) -> None:
        difference = template_difference(self.base.tokenizer, self.tuned.tokenizer)
        if difference:
            self.notes.append(
                f"The chat templates differ ({difference}). Both models are measured in BASE's template; TUNED is not "
                "measured in its own."
            )

    def _sample_own_text(self, given: Auditable, out: str | Path | None) -> list[OwnText]:
        """Sample text of the base; nothing where the config asks for no tokens."""
        config = self.config
        if not config.tokens:
            return []
        base = self.base
        source = SelfSourceConfig(self=True, tokens=config.tokens, seed=config.seed)
        is_named = isinstance(given, str | Path)
        identity: object = by_content({"name": str(given)}) if is_named else uuid4().hex
        settings = source.model_dump(mode="json")
        key = digest(identity, base.backbone.fingerprint.id, settings, config.length, config.dtype)
        with tempfile.TemporaryDirectory() as temporary:
            return sample_own_text(
                base.backbone,
                source,
                config.length,
                Path(out or temporary) / "own-text.jsonl",
                key=key,
                model=None if base.is_bare else base.predictor,
                progress=self.progress,
            )

    def _compare_own_text(self, samples: Sequence[OwnText]) -> None:
        if not samples:
            return
        self.details["own_text_counts"] = {"tuned": own_text_counts(samples)}
        windows = list(own_windows(samples))
        compared = self._compare("its own text", windows, "comparing on own text")
        scores = scores_of(compared, side=1).by_document()
        self.tuned_metrics["own_kl"] = scores.interval("kl_per_token")
        is_chat = np.array([samples[number].is_chat for number in scores.document])
        if is_chat.any():
            self.tuned_metrics["chat_kl"] = scores.subset(is_chat).interval("kl_per_token")
        else:
            self.notes.append(
                "BASE sampled no conversation: it has no usable chat template, or its user's turns do not end within "
                "half a text."
            )
        self.tuned_metrics["changed_tokens"] = changed_tokens(compared, by_document=True)

    def _compare(self, name: str, windows: Sequence[Window], title: str) -> list[TokenComparison]:
        """Compare both models on windows of the text `name`, with a progress bar."""
        total = sum(window.tokens for window in windows)
        with progress_bar(title, total, SHARE, show=self.progress) as update:
            compared = compare_windows(
                self.base.predictor,
                self.tuned.predictor,
                self.base.tokenizer,
                windows,
                batch_size=self.config.batch_size,
                on_batch=lambda tokens: update(advance=tokens),
            )
        self.compared += [(name, each) for each in compared]
        return compared

    def _compare_texts(self) -> None:
        before: list[Scores] = []
        after: list[Scores] = []
        for name, documents in self.documents.items():
            windows = limited_windows(self.base.tokenizer, documents, self.config.length, self.config.limit_tokens)
            compared = self._compare(name, list(windows), f"comparing on {name}")
            base_scores = scores_of(compared, side=0)
            self._keep_scored(name, base_scores, documents)
            tuned_scores = scores_of(compared, side=1)
            for metrics, scores in ((self.base_metrics, base_scores), (self.tuned_metrics, tuned_scores)):
                metrics[name] = scores.interval("nats_per_token")
                if scores.bytes.sum():
                    metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")
            self.tuned_metrics[f"{name}_lost"] = paired_difference(tuned_scores, base_scores)
            self.tuned_metrics[f"{name}_kl"] = tuned_scores.interval("kl_per_token")
            self.tuned_metrics[f"{name}_changed_tokens"] = changed_tokens(compared)
            before.append(base_scores)
            after.append(tuned_scores)
        if len(after) > 1:
            self.tuned_metrics[_MEAN_LOST] = mean_difference(after, before)

    def _keep_scored(self, name: str, scores: Scores, documents: Sequence[str | Document]) -> None:
        """Keep what was scored of a text, for the report."""
        scored = self.details.setdefault("scored_text", {"base": {}})
        assert isinstance(scored, dict)
        scored["base"][name] = scored_parts(scores, documents)

    def _score_texts(self) -> None:
        """Measure bits per byte, which do not depend on the tokenizer."""
        for name, documents in self.documents.items():
            for model, metrics in self._sides():
                scores = score(
                    model.predictor,
                    model.tokenizer,
                    documents,
                    length=self.config.length,
                    batch_size=self.config.batch_size,
                    limit_tokens=self.config.limit_tokens,
                )
                metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")
                if model is self.base:
                    self._keep_scored(name, scores, documents)

    def _compare_answers(self, samples: Sequence[OwnText]) -> None:
        questions = self._questions(samples)
        wanted = len(self.config.prompts) or self.config.answers
        if not questions:
            if wanted and not self.config.tokens:
                self.notes.append(_NO_QUESTIONS)
            return
        if len(questions) < wanted:
            self.notes.append(fewer_questions(len(questions), wanted))
        if not chat_answers.detects_languages():
            self.notes.append("The language of answers was not detected: install graftlm[audit] for that.")
        both = []
        with progress_bar("answering questions", 2 * len(questions), SHARE, show=self.progress) as update:
            for model, metrics in self._sides():
                answered = chat_answers.answer_questions(
                    model.predictor,
                    self.base.tokenizer,
                    questions,
                    tuned_tokenizer=self.tuned.tokenizer,
                    max_new_tokens=self.config.max_new_tokens,
                    batch_size=2 * self.config.batch_size,
                    on_batch=lambda count: update(advance=count),
                )
                metrics.update(chat_answers.behavior(answered))
                both.append(answered)
        self.tuned_metrics.update(chat_answers.behavior_lost(*both))
        self.conversations = list(zip(questions, *both, strict=True))
        self._note_languages()
        self._compare_kept()

    def _note_languages(self) -> None:
        """Note how many answers were long enough to detect their language, if not all were."""
        known = 0
        for _, base_answer, tuned_answer in self.conversations:
            known += base_answer.same_language is not None and tuned_answer.same_language is not None
        if chat_answers.detects_languages() and known < len(self.conversations):
            self.notes.append(
                f"Of {len(self.conversations)} questions, {known} have answers of both models that are long enough to "
                "detect their language; same_language_lost is over these."
            )

    def _questions(self, samples: Sequence[OwnText]) -> list[ChatQuestion]:
        """Return the user's questions, or those of the sampled conversations and as many more as are missing."""
        config = self.config
        base = self.base
        if config.prompts:
            remedy = "leave out prompts, or audit a BASE with a chat template"
            return chat_answers.template_questions(config.prompts, base.tokenizer, remedy=remedy)
        questions = chat_answers.own_questions(samples, base.tokenizer, config.answers)
        missing = config.answers - len(questions)
        if questions and missing:
            model = None if base.is_bare else base.predictor
            more = sample_questions(base.backbone, missing, config.seed, model, progress=self.progress)
            questions += chat_answers.template_questions(more, base.tokenizer)
        return questions

    def _compare_kept(self) -> None:
        """Compare what the answers say, and look for names of the new text in them."""
        names = NewNames(build_documents(self.config.new), self.base.tokenizer) if self.config.new else None
        self.pairs = compare_answers(
            [question.text for question, _, _ in self.conversations],
            [answer.text for _, answer, _ in self.conversations],
            [answer.text for _, _, answer in self.conversations],
            names,
        )
        self.tuned_metrics.update(answer_metrics(self.pairs, with_spill=names is not None))
        about_new = questions_about_new(self.pairs)
        if about_new:
            self.notes.append(left_out_questions(about_new, len(self.pairs)))

    def _compare_examples(self) -> None:
        for name, task in self.tasks.items():
            results = []
            for model, metrics in self._sides():
                result = measure_task(model.predictor, model.tokenizer, task, batch_size=self.config.batch_size)
                metrics.update(result.metrics(name))
                results.append(result)
            base_result, tuned_result = results
            for gain_name, gain in tuned_result.gain(name, base_result).items():
                self.tuned_metrics[gain_name.removesuffix("gain") + "lost"] = _opposite(gain)

    def _compare_benchmarks(self) -> None:
        results = []
        for model, metrics in self._sides():
            # Both in BASE's template, as everything else, if the token ids are the same.
            tokenizer = self.base.tokenizer if self.has_same_tokens else model.tokenizer
            measured = measure_benchmarks(
                model.predictor,
                tokenizer,
                self.benchmarks,
                batch_size=2 * self.config.batch_size,
                progress=self.progress,
            )
            for label, result in measured.items():
                metrics.update(result.metrics(label))
            results.append(measured)
        base_results, tuned_results = results
        for label, result in tuned_results.items():
            change = result.change(label, base_results[label])[f"{label}_change"]
            self.tuned_metrics[f"{label}_lost"] = _opposite(change)
        if tuned_results:
            sides = zip(("base", "tuned"), results, strict=True)
            self.details["harness"] = {
                side: {label: result.to_json() for label, result in measured.items()} for side, measured in sides
            }

    def _compare_tasks(self) -> None:
        if not self.config.tasks:
            return
        for model, metrics in self._sides():
            measured = run_lm_eval(
                model.predictor,
                model.tokenizer,
                self.config.tasks,
                limit=self.config.limit,
                confirm_unsafe_code=self.config.confirm_unsafe_code,
            )
            for task, values in measured.items():
                for name, value in values.items():
                    metrics[f"{task}_{name}"] = value

    def _results(self, passages: Sequence[Passage]) -> Results:
        rows = [
            Row(id="base", label=f"base: {self.base.name}", metrics=self.base_metrics),
            Row(id="tuned", label=f"tuned: {self.tuned.name}", metrics=self.tuned_metrics),
        ]
        conversations = []
        for question, base_answer, tuned_answer in self.conversations:
            conversations.append(
                {"question": question.text, "base": asdict(base_answer), "tuned": asdict(tuned_answer)}
            )
        details = self.details | {
            "settings": self.config.model_dump(mode="json"),
            "notes": self.notes,
            "passages": [asdict(passage) for passage in passages],
            "conversations": conversations,
            "answers": {"tuned": [pair.to_json() for pair in worst_answers(self.pairs)]},
        }
        details = json.loads(json.dumps(details))  # Tuples become lists.
        return Results.here("audit", rows, seeds=[self.config.seed], aims=self._aims(), details=details)

    def _aims(self) -> list[Aim]:
        aims = []
        for name, budget in self.config.budget.items():
            if name not in self.tuned_metrics:
                problem = f"The budget is on {name}, which was not measured: leave it out, or name what it needs."
                raise EvaluationError(" ".join([problem, *self.notes]))
            measured = value_of(self.tuned_metrics[name])
            aim = Aim(text=f"budget of {name}", metric=name, aim=budget, measured=measured, met=measured <= budget)
            aims.append(aim)
        return aims


def _opposite(interval: Interval) -> Interval:
    """Return a loss as a gain, or the reverse; 0 - x is never -0."""
    return Interval(mean=0 - interval.mean, low=0 - interval.high, high=0 - interval.low)
