"""An audit: two models side by side, on text that the first samples itself and on what the user names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from pydantic import Field
from rich.console import Console

from graftlm.config import Config
from graftlm.data import SelfSourceConfig, SourceConfig, build_documents
from graftlm.data.own_text import OwnText
from graftlm.data.own_text_sampling import sample_own_text
from graftlm.errors import DataError, EvaluationError, ForgettingBudgetError
from graftlm.evaluation.audit import chats, models
from graftlm.evaluation.audit.comparison import Passage, TokenComparison, compare_windows, scores_of, widest_passages
from graftlm.evaluation.harness import run_lm_eval
from graftlm.evaluation.metrics import cut_windows, limit_scored, own_windows, paired_difference, score
from graftlm.evaluation.report import write_report
from graftlm.evaluation.result_tables import format_metric, metric_names, metric_title, print_side_by_side
from graftlm.evaluation.results import Aim, Interval, Metric, Results, Row, value_of
from graftlm.evaluation.tasks import Task, TaskConfig, TaskResult, measure_task, read_task
from graftlm.files.digests import by_content, digest
from graftlm.files.templates import fill_page
from graftlm.files.writing import write_atomically
from graftlm.progress import progress_bar

PAGE_NAME = "audit.html"
_SHARE = "{task.percentage:>3.0f}%"  # of a progress bar
_SEED = 2**31 - 2  # of the own text: neither training's nor that of own_kl in a run
_OWN_METRICS = ("own_kl", "chat_kl", "changed_tokens")
_LOST = ("stops_lost", "keeps_template_lost", "same_language_lost")

Text = str | Path | Sequence[Any]
Conversation = tuple[chats.ChatQuestion, chats.ChatAnswer, chats.ChatAnswer]
"""A question, and the answers of base and tuned."""


class AuditConfig(Config):
    """What an audit measures."""

    tokens: int = Field(10_000, ge=0, description="Tokens of text that BASE samples; 0 leaves them out.")
    seed: int = Field(_SEED, ge=0, description="Seed of that text.")
    length: int = Field(256, ge=3, description="Most tokens of a sampled text, and of a window of the user's texts.")
    answers: int = Field(32, ge=0, description="Questions of the sampled conversations that both models answer.")
    max_new_tokens: int = Field(128, ge=1, description="Most tokens of an answer.")
    prompts: list[str] = Field([], description="Questions in place of those that BASE samples.")
    examples: dict[str, TaskConfig] = Field({}, description="Files of prompts and answers by name.")
    tasks: list[str] = Field([], description="Tasks of lm-evaluation-harness.")
    limit: int | None = Field(None, ge=1, description="Most questions of such a task.")
    limit_tokens: int | None = Field(50_000, ge=1, description="Most tokens scored of each of the user's texts.")
    batch_size: int = Field(8, ge=1, description="Rows per forward pass.")
    budget: dict[str, float] = Field({}, description="Most that the tuned model may have of a metric.")
    quantize: Literal["int8", "int4"] | None = Field(None, description="Audit TUNED with its weights in fewer bits.")
    backbone: str | None = Field(None, description="Where the model below a graft or an adapter is now.")
    device: str | None = Field(None, description="Torch device; by default the fastest available.")
    dtype: str = Field("auto", description="Precision of models that are loaded; by default their own.")
    trust_remote_code: bool = Field(False, description="Run model code that comes with a model.")


@dataclass
class Audit:
    """What an audit found.

    Attributes:
        results: the rows `base` and `tuned`; the aims are the budget.
        passages: where the models differ most, the widest first.
        conversations: a question, and the answers of base and tuned.
        notes: what the reader should know, one sentence each.
    """

    results: Results
    passages: list[Passage] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, Metric]:
        """The tuned model's metrics."""
        return self.results.row("tuned").metrics

    def check_budget(self) -> None:
        """Raise `ForgettingBudgetError` where a metric exceeds its budget."""
        for aim in self.results.aims:
            if not aim.met:
                raise ForgettingBudgetError(
                    f"The tuned model has {aim.metric} {aim.measured:.4g}, and the budget is {aim.aim:g}: train it "
                    "with more old text or a lower learning rate, or raise the budget."
                )

    def write(self, folder: str | Path) -> Path:
        """Write `results.json`, `report.md` and the page; returns the path of the page.

        Raises EvaluationError if the folder can't be written to.
        """
        write_report(self.results, folder)
        return write_atomically(Path(folder) / PAGE_NAME, self.page().encode())

    def page(self) -> str:
        """HTML that needs no other file: tokens coloured by their divergence, and both models' choices."""
        base, tuned = self.results.row("base"), self.results.row("tuned")
        names = metric_names(self.results)
        cells = {name: [format_metric(name, row.metrics.get(name)) for row in (base, tuned)] for name in names}
        tokens = [token for passage in self.passages for token in passage.tokens]
        return fill_page(
            Path(__file__).with_name("page.html"),
            title=f"Audit of {tuned.label.removeprefix('tuned: ')}",
            base=base.label,
            tuned=tuned.label,
            notes=self.notes,
            rows=[(metric_title(name, names), cells[name]) for name in names],
            aims=self.results.aims,
            passages=self.passages,
            largest=max((token.kl for token in tokens), default=0.0),
            conversations=self.conversations,
            differing=[(question, *both) for question, *both in self.conversations if both[0].text != both[1].text],
            choices=[[token.kl, token.base, token.tuned] for token in tokens],
        )

    def __str__(self) -> str:
        text = StringIO()
        print_audit(self, Console(file=text, width=100))
        return text.getvalue()


def print_audit(audit: Audit, console: Console) -> None:
    """Print the metrics side by side, the budget and the notes."""
    print_side_by_side(audit.results, console)
    for aim in audit.results.aims:
        mark = "✓" if aim.met else "✗"
        console.print(f"{mark} {aim.text}: {aim.measured:.4g} (at most {aim.aim:g})", highlight=False, markup=False)
    for note in audit.notes:
        console.print(note, highlight=False, markup=False)


def audit(
    base: models.Auditable,
    tuned: models.Auditable,
    out: str | Path | None = None,
    *,
    texts: Mapping[str, Text] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Audit:
    """Compare a tuned model with the one that it was made from.

    Args:
        base: the model before: a name, a folder, a GGUF file, a PEFT adapter's or a graft's folder, a `Backbone` or a
            `GraftedModel`.
        tuned: the model after, likewise.
        out: a folder for the report and the page; an interrupted sampling goes on there.
        texts: further texts by name: a path, or documents (strings).
        settings: keys of `AuditConfig`, such as `tokens=2000` or `budget={"own_kl": 0.05}`.

    Raises GraftError if a model can't be loaded, a setting does not fit, or there is nothing to compare.
    """
    config = AuditConfig.parse(settings, where="audit")
    documents = {name: _documents(name, text) for name, text in (texts or {}).items()}
    _check_names(documents, config)
    tasks = {name: read_task(task) for name, task in config.examples.items()}
    keys = {"quantize", "backbone", "device", "dtype", "trust_remote_code"}
    with models.load_pair(base, tuned, **config.model_dump(include=keys)) as (first, second):
        work = _Auditor(config, first, second, documents, tasks, progress)
        return work.run(base, out)


def _documents(name: str, text: Text) -> Sequence[Any]:
    if isinstance(text, str | Path):
        return build_documents([SourceConfig(path=str(text))])
    if not isinstance(text, Sequence) or not all(isinstance(each, str) or hasattr(each, "text") for each in text):
        raise DataError(f"The text {name} is {type(text).__name__}, but a path or a list of strings is expected.")
    return text


def _check_names(documents: Mapping[str, Any], config: AuditConfig) -> None:
    """Check names of texts and the budget before anything is loaded."""
    known = [*(_OWN_METRICS if config.tokens else ()), *(_LOST if config.answers or config.prompts else ())]
    known += [f"{name}_{metric}" for name in documents for metric in ("lost", "kl", "changed_tokens")]
    known += [f"{name}_{task.metric}_lost" for name, task in config.examples.items()]
    for name in config.budget:
        if name not in known:
            raise EvaluationError(
                f"This audit has no metric {name!r} for a budget (it has {', '.join(known) or 'none'})."
            )
    taken = {"own", "chat", "changed", "stops", "keeps_template", "same_language"} & {*documents}
    if taken:
        raise DataError(f"The name {min(taken)!r} of a text is that of a metric: give it another name.")
    if not (config.tokens or config.prompts or documents or config.tasks or config.examples):
        raise DataError("There is nothing to compare: raise tokens, or name a text, a task or examples.")


class _Auditor:
    """Measures two loaded models."""

    def __init__(
        self,
        config: AuditConfig,
        base: models.AuditedModel,
        tuned: models.AuditedModel,
        documents: Mapping[str, Sequence[Any]],
        tasks: Mapping[str, Task],
        progress: bool,
    ) -> None:
        self.config, self.documents, self.tasks, self.progress = config, documents, tasks, progress
        self.pair = (base, tuned)
        self.metrics: tuple[dict[str, Metric], dict[str, Metric]] = ({}, {})
        self.notes = [*base.notes, *tuned.notes]
        self.compared: list[tuple[str, TokenComparison]] = []
        self.conversations: list[Conversation] = []

    def run(self, base: models.Auditable, out: str | Path | None) -> Audit:
        difference = models.tokenizer_difference(*(model.tokenizer for model in self.pair))
        if difference is None:
            self._note_templates()
            samples = self._sample(base, out)
            self._compare_own_text(samples)
            self._compare_texts()
            self._compare_chats(samples)
        else:
            self._note_tokenizers(difference)
            self._score_texts()
        self._compare_examples()
        self._compare_tasks()
        passages = widest_passages(self.compared, self.pair[0].tokenizer)
        return Audit(self._results(passages), passages, self.conversations, self.notes)

    def _note_tokenizers(self, difference: str) -> None:
        if not (self.documents or self.tasks or self.config.tasks):
            raise DataError(
                f"BASE and TUNED have different tokenizers ({difference}), so their predictions of one token can't be "
                "compared: name a text (--text NAME=PATH), which gives bits per byte, or a task (--tasks NAME)."
            )
        self.notes.append(f"The tokenizers differ ({difference}), so bits per byte and tasks are all that is compared.")

    def _note_templates(self) -> None:
        if difference := models.template_difference(*(model.tokenizer for model in self.pair)):
            self.notes.append(
                f"The chat templates differ ({difference}). Both models are measured in BASE's: how TUNED does in its "
                "own is not seen."
            )

    def _sample(self, given: models.Auditable, out: str | Path | None) -> list[OwnText]:
        """Text of the base's own; none where it has no tokens to sample."""
        if not self.config.tokens:
            return []
        base, config = self.pair[0], self.config
        source = SelfSourceConfig(self=True, tokens=config.tokens, seed=config.seed)
        identity: Any = by_content({"name": str(given)}) if isinstance(given, str | Path) else uuid4().hex
        settings = source.model_dump(mode="json")
        key = digest(identity, base.backbone.fingerprint.id, settings, config.length, config.dtype)
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(out or temporary) / "own-text.jsonl"
            model = None if base.is_bare else base.predictor
            return sample_own_text(
                base.backbone, source, config.length, path, key=key, model=model, progress=self.progress
            )

    def _compare_own_text(self, samples: Sequence[OwnText]) -> None:
        if not samples:
            return
        compared = self._compare("its own text", list(own_windows(samples)), "comparing on own text")
        scores = scores_of(compared, 1).by_document()
        in_chat = np.array([samples[number].is_chat for number in scores.document])
        self.metrics[1]["own_kl"] = scores.interval("kl_per_token")
        if in_chat.any():
            self.metrics[1]["chat_kl"] = scores.subset(in_chat).interval("kl_per_token")
        else:
            self.notes.append(
                "BASE sampled no conversation: it has no usable chat template, or its user's turns do not end within "
                "half a text."
            )
        self.metrics[1]["changed_tokens"] = changed_tokens(compared, by_document=True)

    def _compare(self, name: str, windows: list[Any], title: str) -> list[TokenComparison]:
        base, tuned = (model.predictor for model in self.pair)
        tokenizer, size = self.pair[0].tokenizer, self.config.batch_size
        with progress_bar(title, sum(window.tokens for window in windows), _SHARE, show=self.progress) as update:
            compared = compare_windows(
                base, tuned, tokenizer, windows, batch_size=size, on_batch=lambda tokens: update(advance=tokens)
            )
        self.compared += [(name, each) for each in compared]
        return compared

    def _compare_texts(self) -> None:
        for name, documents in self.documents.items():
            windows = cut_windows(self.pair[0].tokenizer, documents, self.config.length)
            limited = list(limit_scored(windows, self.config.limit_tokens))
            compared = self._compare(name, limited, f"comparing on {name}")
            sides = [scores_of(compared, side) for side in (0, 1)]
            for metrics, scores in zip(self.metrics, sides, strict=True):
                metrics[name] = scores.interval("nats_per_token")
                if scores.bytes.sum():
                    metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")
            self.metrics[1][f"{name}_lost"] = paired_difference(sides[1], sides[0])
            self.metrics[1][f"{name}_kl"] = sides[1].interval("kl_per_token")
            self.metrics[1][f"{name}_changed_tokens"] = changed_tokens(compared)

    def _score_texts(self) -> None:
        """Bits per byte, which two tokenizers share."""
        options = self.config.model_dump(include={"length", "batch_size", "limit_tokens"})
        for name, documents in self.documents.items():
            for metrics, model in zip(self.metrics, self.pair, strict=True):
                scores = score(model.predictor, model.tokenizer, documents, **options)
                metrics[f"{name}_bpb"] = scores.interval("bits_per_byte")

    def _compare_chats(self, samples: Sequence[OwnText]) -> None:
        base, config = self.pair[0], self.config
        if config.prompts:
            questions = chats.template_questions(config.prompts, base.tokenizer)
        else:
            questions = chats.own_questions(samples, base.tokenizer, config.answers)
        if not questions:
            return
        if not chats.tells_languages():
            self.notes.append("The language of answers is not told: install graftlm[audit] for that.")
        with progress_bar("answering questions", 2 * len(questions), _SHARE, show=self.progress) as update:
            sides = [
                chats.answer_questions(
                    model.predictor,
                    base.tokenizer,
                    questions,
                    tuned_tokenizer=self.pair[1].tokenizer,
                    max_new_tokens=config.max_new_tokens,
                    batch_size=2 * config.batch_size,
                    on_batch=lambda n: update(advance=n),
                )
                for model in self.pair
            ]
        for metrics, answers in zip(self.metrics, sides, strict=True):
            metrics |= chats.behaviour(answers)
        self.metrics[1].update(chats.behaviour_lost(*sides))
        self.conversations = list(zip(questions, *sides, strict=True))

    def _compare_examples(self) -> None:
        for name, task in self.tasks.items():
            outcomes: list[TaskResult] = [
                measure_task(model.predictor, model.tokenizer, task, batch_size=self.config.batch_size)
                for model in self.pair
            ]
            for metrics, outcome in zip(self.metrics, outcomes, strict=True):
                metrics |= outcome.metrics(name)
            ((gain_name, gain),) = outcomes[1].gain(name, outcomes[0]).items()
            lost = Interval(mean=0 - gain.mean, low=0 - gain.high, high=0 - gain.low)
            self.metrics[1][gain_name.removesuffix("gain") + "lost"] = lost

    def _compare_tasks(self) -> None:
        if not self.config.tasks:
            return
        for metrics, model in zip(self.metrics, self.pair, strict=True):
            measured = run_lm_eval(model.predictor, model.tokenizer, self.config.tasks, limit=self.config.limit)
            metrics |= {f"{task}_{name}": value for task, values in measured.items() for name, value in values.items()}

    def _results(self, passages: Sequence[Passage]) -> Results:
        rows = [
            Row(id=row_id, label=f"{row_id}: {model.name}", metrics=metrics)
            for row_id, model, metrics in zip(("base", "tuned"), self.pair, self.metrics, strict=True)
        ]
        details = {
            "settings": self.config.model_dump(mode="json"),
            "notes": self.notes,
            "passages": [asdict(passage) for passage in passages],
            "conversations": [
                {"question": question.text, "base": asdict(first), "tuned": asdict(second)}
                for question, first, second in self.conversations
            ],
        }
        details = json.loads(json.dumps(details))  # tuples become lists
        return Results.here("audit", rows, seeds=[self.config.seed], aims=self._aims(), details=details)

    def _aims(self) -> list[Aim]:
        aims = []
        for name, budget in self.config.budget.items():
            if name not in self.metrics[1]:
                raise EvaluationError(
                    f"The budget is on {name}, which could not be measured here ({' '.join(self.notes) or 'no data'}) "
                    "Leave it out, or name what it needs."
                )
            measured = value_of(self.metrics[1][name])
            text = f"budget of {name}"
            aims.append(Aim(text=text, metric=name, aim=budget, measured=measured, met=measured <= budget))
        return aims


def changed_tokens(compared: Sequence[TokenComparison], *, by_document: bool = False) -> Interval:
    """The share of scored tokens whose likeliest choice changed, with its interval over windows, or sampled texts."""
    counts = replace(scores_of(compared, 1), nats=np.array([each.changed.sum() for each in compared], dtype=np.float64))
    return (counts.by_document() if by_document else counts).interval("nats_per_token")
