"""What the compositions on real text share: trained rows and their rates, tasks with a prompt, and aims."""

from __future__ import annotations

import json
import operator
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from experiments import Options
from experiments.parents import FILES, QUICK, Size, cut_texts, held_out, make_parents, read_texts
from experiments.study import (
    Study,
    aim,
    bars,
    check_files,
    metric,
    numbers_of,
    over_seeds,
    published,
    training_config,
)
from graftlm.backbone import load_backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, SourceConfig
from graftlm.demo.corpus import write_documents
from graftlm.evaluation import Aim, Interval, Results, Row
from graftlm.evaluation.examples import Example, chrf, generate_answers, score_answers
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.graft_run import EvaluationConfig, GraftRun, count_parameters
from graftlm.runs.run import Measurement, RunContext, Trainee
from graftlm.training import TrainingConfig

# Of the rows that compositions are trained on: English that the anchor has read.
REPLAY_FRACTION = 0.2
# Learning rates by kind of graft, chosen on validation text (composition_language/README.md).
RATES = {"composition": 3e-3, "lora": 1e-2}

LABELS = {
    "m_b": "anchor m_B",
    "composition": "composition",
    "lora": "LoRA, equal parameters",
    "vanilla_m_a": "with vanilla m_A",
    "random_m_a": "with random m_A",
}
# Texts of aims by metric, row, other row, and what the ratio stays below.
Ratios = Mapping[tuple[str, str, str, float], str]


class PromptTask(Config):
    """Prompts and their answers.

    Its metrics: `<name>` in nats per token of the answers, `<name>_bpb` in bits per byte, `<name>_answer` in nats per
    answer, and `<name>_chrf`, which compares greedy answers with the right ones.

    Args:
        name: begins the names of its metrics.
        path: of a JSON Lines file with a `prompt` and a `text` a line.
        answers: so many of the first prompts are answered greedily, for chrF; 0 leaves it out.
        max_new_tokens: of an answer.
        stop: ends an answer.
    """

    name: str
    path: str
    answers: int = 0
    max_new_tokens: int = 48
    stop: tuple[str, ...] = ("\n",)

    def measure(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        """The metrics of a model."""
        lines = map(json.loads, Path(self.path).read_text(encoding="utf-8").splitlines())
        examples = [Example(prompt=line["prompt"], answer=line["text"]) for line in lines]
        scores = score_answers(model, tokenizer, examples)
        metrics: dict[str, Any] = {
            self.name: scores.interval("nats_per_token"),
            f"{self.name}_bpb": scores.interval("bits_per_byte"),
            f"{self.name}_answer": float(scores.nats.sum()) / len(examples),
        }
        if self.answers:
            answered = examples[: self.answers]
            prompts = [example.prompt for example in answered]
            answers = generate_answers(model, tokenizer, prompts, max_new_tokens=self.max_new_tokens, stop=self.stop)
            metrics[f"{self.name}_chrf"] = chrf(answers, answered, beta=1)
        return metrics


class PromptedRun(GraftRun):
    """A run that is also measured on tasks with a prompt."""

    prompts: tuple[PromptTask, ...] = ()

    def measure(self, context: RunContext) -> Measurement:
        measurement = super().measure(context)
        if self.graft is None:
            backbone = self.evaluator().backbone
            self._add_tasks(measurement, backbone.model, backbone.need_tokenizer())
        return measurement

    def evaluate(self, trainee: Trainee) -> Measurement:
        measurement = super().evaluate(trainee)
        self._add_tasks(measurement, trainee.model, self.evaluator().tokenizer)
        return measurement

    def _add_tasks(self, measurement: Measurement, model: Any, tokenizer: Any) -> None:
        for task in self.prompts:
            measurement.add_metrics(task.measure(model, tokenizer))


class Amounts(Config):
    """How much of each text.

    Args:
        share: of each of a specialist's training documents that compositions are trained on.
        old: characters of each of the anchor's novels in the old share; of its other documents a twelfth of that.
        tested: characters of each set of test texts; validation takes a third.
        examples: of each task.
    """

    share: float = 0.05
    old: int = 18_000
    tested: int
    examples: int


class ComposedRow(NamedTuple):
    """A row that is trained: a graft on the anchor, its data, `times` the study's steps, at the rate of its kind."""

    id: str
    graft: Mapping[str, Any]
    data: DataConfig
    times: int = 1
    rate: float | None = None

    def learning_rate(self) -> float:
        """Its own, or that of its kind of graft."""
        return self.rate or RATES[self.graft["kind"]]


class ComposedStudy(Study):
    """One experiment's parents, texts and tasks.

    Args:
        options: of the experiment.
        tables: rows by table.
        labels: of models and rows.
        amounts: how much of each text.
        default: tables of a run that names none; all when empty.
        files: of the data folder, beside those of the parents.

    Attributes:
        wanted: rows of the chosen tables.
        texts: folder of the experiment's own texts.
        validation: tasks that choose, measured for every run.
        tasks: measured for all but variants.
    """

    validation: Sequence[PromptTask] = ()
    tasks: Sequence[PromptTask] = ()

    def __init__(
        self,
        options: Options,
        tables: Mapping[str, Sequence[str]],
        labels: Mapping[str, str],
        amounts: Amounts,
        *,
        default: Sequence[str] = (),
        files: Sequence[str] = (),
    ) -> None:
        super().__init__(options)
        self.wanted = {row for table in options.chosen(tuple(tables), default) for row in tables[table]}
        check_files(options, (*FILES, *files))
        size = QUICK if options.quick else Size()
        self.labels, self.amounts, self.length = labels, amounts, size.length
        self.parents, self.texts = make_parents(options, size), options.out / "texts"
        self.tokenizer = AutoTokenizer.from_pretrained(self.parents.anchor)

    def write_parts(self, files: Mapping[str, str], *, cut: bool = False) -> dict[str, list[str]]:
        """Write texts that no model has read, the old share of English, and the start of every text of `files`.

        Args:
            files: of the parents' texts, by name.
            cut: into pieces that are whole in a row.

        Returns:
            The texts of each, before they are cut.
        """
        amounts, corpus = self.amounts, self.parents.corpus
        held_out(self.options.data, corpus, self.texts, amounts.tested)
        parts = {
            name: [text[: int(amounts.share * len(text))] for text in read_texts(corpus / f"{file}.jsonl")]
            for name, file in files.items()
        }
        english = read_texts(corpus / "english.jsonl")
        novel = max(map(len, english)) // 4
        parts["english"] = [text[: amounts.old if len(text) > novel else amounts.old // 12] for text in english]
        for name, texts in parts.items():
            documents = cut_texts(texts, self.tokenizer, self.length) if cut else texts
            write_documents(self.texts / f"{name}-part.jsonl", documents)
        return parts

    def data(self, new: Sequence[str], old: str, tests: Mapping[str, str], boundaries: Any) -> DataConfig:
        """What a row is trained and measured on, by names of texts; those that end with `-prompts` have prompts."""

        def source(name: str) -> SourceConfig:
            column = "prompt" if name.endswith("-prompts") else None
            return SourceConfig(path=str(self.texts / f"{name}.jsonl"), prompt_column=column)

        return DataConfig(
            new=[source(name) for name in new],
            old=[source(old)],
            replay_fraction=REPLAY_FRACTION,
            length=self.length,
            boundaries=boundaries,
            test={name: [source(file)] for name, file in tests.items()},
        )

    def training(self, rate: float = 1e-3, seed: int = 0, times: int = 1) -> TrainingConfig:
        """The numbers of one run of so many times the study's steps."""
        steps, batch_size = (3, 2) if self.options.quick else (400, 4)
        more: dict[str, Any] = {"warmup_steps": max(1, min(10, times * steps // 4)), "checkpoint_every": steps}
        return training_config(times * steps, batch_size, rate, seed, precision="bf16", **more)

    def bare(self, name: str, folder: Path, data: DataConfig, **more: Any) -> PromptedRun:
        """A model as it is; `more` are other fields of the run."""
        fields = {"training": self.training(), "prompts": (*self.validation, *self.tasks)} | more
        evaluation = EvaluationConfig(limit_tokens=None, decode_prompts=0)  # whole texts, whatever the tokenizer
        backbone = BackboneConfig(name=str(folder), device=self.options.device)
        return PromptedRun(id=name, backbone=backbone, data=data, evaluation=evaluation, **fields)

    def cell(self, row: ComposedRow, seed: int, **more: Any) -> PromptedRun:
        """One run of a row."""
        rate, data = row.learning_rate(), row.data.model_copy(update={"seed": seed})
        more |= {"label": self.labels[row.id], "graft": graft_config(dict(row.graft))}
        more["training"] = self.training(rate, seed, row.times)
        return self.bare(f"{row.id}_lr{rate:g}_s{seed}", self.parents.anchor, data, **more)

    def grafts(self, name: str, specialist: Path) -> dict[str, dict[str, Any]]:
        """A composition with a specialist, and the grafts beside it.

        LoRA has as many trainable parameters, up to the rounding of its rank.
        """
        pair, backbone = composition({name: specialist}), load_backbone(str(self.parents.anchor))
        extra = count_parameters(build_graft(graft_config(pair), backbone).parameters())
        return {
            "composition": pair,
            "lora": {"kind": "lora", "capacity": extra / count_parameters(backbone.model.parameters())},
            "vanilla_m_a": composition({name: self.parents.vanilla}),
            "random_m_a": composition({name: self.parents.random}),
            "encoder_m_a": pair | {"refresh": "prompt"},
        }

    def measure(
        self, models: Mapping[str, Path], rows: Sequence[ComposedRow], variants: Container[str] = ()
    ) -> tuple[list[Row], dict[str, Any]]:
        """The rows of the chosen tables, and what stands beside them.

        Args:
            models: folders of models that are measured as they are, the anchor `m_b` among them.
            rows: of all tables, trained for every seed.
            variants: rows trained with the first seed alone, and measured on the validation tasks alone.
        """
        wanted = [row for row in rows if row.id in self.wanted]
        bare = self.execute([self.bare(name, folder, rows[0].data) for name, folder in models.items()], "the parents")
        tried = [self.cell(row, self.seeds[0], prompts=self.validation) for row in wanted if row.id in variants]
        validated = self.execute(tried, "variants") if tried else {}
        wanted = [row for row in wanted if row.id not in variants]
        cells = {row.id: [self.cell(row, seed) for seed in self.seeds] for row in wanted}
        trained = self.execute([cell for of_row in cells.values() for cell in of_row], "the rows, every seed")
        main = {name: [trained[cell.id] for cell in of_row] for name, of_row in cells.items()}
        for measurement in trained.values():
            if "forgotten" in measurement.row.metrics:
                lost = metric(measurement, "old_bpb") - metric(bare["m_b"], "old_bpb")
                measurement.add_metrics({"forgotten_bpb": Interval(mean=lost, low=lost, high=lost)})
        first = {name: of_row[0].details for name, of_row in main.items()}
        training = self.training().model_dump(mode="json", exclude={"learning_rate", "seed"})
        rates = {kind: [rate] for kind, rate in RATES.items()}
        setting = {"training": training, "rates": rates, "replay_fraction": REPLAY_FRACTION}
        details = {
            "rates": {row.id: row.learning_rate() for row in wanted},
            "validation": {
                name: {key: value for key, value in values.items() if key.startswith("validation")}
                for name, values in numbers_of([measurement.row for measurement in validated.values()]).items()
            },
            "statistics": {name: of_row.get("statistics", {}) for name, of_row in first.items()},
            "losses": {name: of_row.get("losses", []) for name, of_row in first.items()},
            "setting": setting | {"amounts": self.amounts.model_dump(), "parents": self.parents.summaries},
        }
        measured = {name: [measurement] for name, measurement in bare.items()} | main
        return [over_seeds(of_row, name, self.labels[name]) for name, of_row in measured.items()], details

    def report(
        self, module: str, rows: Sequence[Row], ratios: Ratios, shown: Mapping[str, str], details: Any
    ) -> Results:
        """Write the results of an experiment's module, with its aims, published figures and bits per byte."""
        results: dict[str, Any] = {"aims": composition_aims(rows, ratios), "paper": published(module)}
        plots = {"bits-per-byte": bars(rows, shown, "bits per byte")}
        name = Path(module).parent.name.replace("_", "-")
        return self.write(name, rows, plots=plots, details=details, **results)


def composition(augmenting: Mapping[str, Path]) -> dict[str, Any]:
    """The graft section of a composition: every layer of the augmenting models with as many of the anchor's."""
    models = {name: {"name": str(folder)} for name, folder in augmenting.items()}
    return {"kind": "composition", "augmenting": models, "stride": 1, "positions": "local", "norm": "pre"}


def composition_aims(rows: Sequence[Row], ratios: Ratios) -> list[Aim]:
    """The ratios whose rows are there, and that the composition forgets no more than LoRA."""
    values = numbers_of(rows)
    met = [
        aim(text, name, limit, values[row][name] / values[other][name])
        for (name, row, other, limit), text in ratios.items()
        if {row, other} <= values.keys()
    ]
    if {"composition", "lora"} <= values.keys():
        more = values["composition"]["forgotten"] - values["lora"]["forgotten"]  # either may have gained
        met.append(aim("English forgotten beyond LoRA's, nats per token", "forgotten", 0.0, more, operator.le))
    return met
