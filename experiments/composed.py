"""What the compositions on real text share: their rows, the search of rates, tasks with a prompt, and aims."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from experiments import Options
from experiments.parents import FILES, QUICK, Size, cut_texts, held_out, make_parents, read_examples, read_texts
from experiments.study import Study, aim, bars, check_files, over_seeds, published, training_config
from graftlm.backbone import Backbone, load_backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, SourceConfig
from graftlm.demo.corpus import write_documents
from graftlm.evaluation import Results, Row, combine_seeds
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.examples import Example, chrf, generate_answers, score_answers
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import RunContext, Trainee
from graftlm.training import TrainingConfig

REPLAY_FRACTION = 0.4  # of the rows that are trained on: text of the anchor's own domains
RATES = {"composition": (1e-3, 3e-3, 1e-2), "lora": (3e-3, 1e-2, 3e-2), "finetune": (3e-4, 1e-3, 3e-3)}
"""Learning rates that are tried for every row, by kind of graft."""
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)  # shares of the augmenting models that are tried for a mixture without a gate
LABELS = {
    "m_b": "anchor m_B",
    "m_a": "specialist m_A",
    "fixed_mixture": "fixed mixture of distributions",
    "mixture": "gated mixture alone",
    "cross": "cross-attentions alone",
    "both": "cross-attentions and mixture",
    "composition": "composition, as recommended (both)",
    "lora": "LoRA, equal parameters",
    "skyline": "anchor fine-tuned",
    "vanilla_m_a": "both, with vanilla m_A",
    "random_m_a": "both, with random m_A",
}
MIXTURE = {"readout": "mixture", "cross": False}
# Texts of aims by metric, row, the rows of which the better counts, and what the ratio to it stays below.
Ratios = dict[tuple[str, str, tuple[str, ...], float], str]


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
        examples = [Example(prompt=prompt, answer=answer) for prompt, answer in read_examples(Path(self.path))]
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
            self.add_tasks(measurement, backbone.model, backbone.need_tokenizer())
        return measurement

    def evaluate(self, trainee: Trainee) -> Measurement:
        measurement = super().evaluate(trainee)
        self.add_tasks(measurement, trainee.model, self.evaluator().tokenizer)
        return measurement

    def add_tasks(self, measurement: Measurement, model: Any, tokenizer: Any) -> None:
        """Measure a model on the tasks."""
        for task in self.prompts:
            measurement.add_metrics(task.measure(model, tokenizer))


class FixedMixtureRun(PromptedRun):
    """A mixture whose gate is not trained: every augmenting model has the same share of each token's distribution."""

    share: float

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee]:
        with super().build(context) as trainee:
            gate = trainee.model.grafts["graft"].readout.linear
            anchor = 1 - self.share * gate.out_features
            with torch.no_grad():
                gate.bias.fill_(math.log1p(self.share / anchor))
            yield trainee


class ComposedRow(NamedTuple):
    """A row that is trained: a graft on the anchor, and its data."""

    id: str
    graft: Mapping[str, Any]
    data: DataConfig


class ComposedStudy(Study):
    """Rows on one anchor: search, training, measurement and comparison.

    Args:
        options: of the experiment.
        tables: rows by table.
        labels: of models and rows.
        anchor: the backbone of all rows.
        steps: of each row.
        batch_size: rows of a step.

    Attributes:
        wanted: rows of the chosen tables.
        validation: tasks that choose, beside the test sets whose names begin with `validation`.
        tasks: measured for all rows.
        evaluation: of all rows.
        rates: that are tried, by kind of graft.
        shares: that are tried for a mixture without a gate.
        search_steps: of a row at each rate; a third of `steps`.
    """

    rates: Mapping[str, Sequence[float]] = RATES
    shares: Sequence[float] = SHARES
    validation: Sequence[PromptTask] = ()
    tasks: Sequence[PromptTask] = ()
    evaluation = EvaluationConfig(limit_tokens=None, decode_prompts=0, own_tokens=0)  # whole texts

    def __init__(
        self,
        options: Options,
        tables: Mapping[str, Sequence[str]],
        labels: Mapping[str, str],
        anchor: BackboneConfig,
        *,
        steps: int,
        batch_size: int,
    ) -> None:
        super().__init__(options)
        self.wanted = {row for table in options.chosen(tuple(tables)) for row in tables[table]}
        self.labels, self.anchor = dict(labels), anchor
        self.steps, self.batch_size = (3, 2) if options.quick else (steps, batch_size)
        self.search_steps = max(1, self.steps // 3)

    def bare(self, name: str, backbone: BackboneConfig, data: DataConfig, **more: Any) -> PromptedRun:
        """A model as it is; `more` are other fields of the run."""
        fields = {"label": self.labels[name], "training": self._training(0, 1e-3, 0), "prompts": self.tasks} | more
        tests = {text: sources for text, sources in data.test.items() if not text.startswith("validation")}
        data = data.model_copy(update={"test": tests})
        return PromptedRun(id=name, backbone=backbone, data=data, evaluation=self.evaluation, **fields)

    def cell(self, row: ComposedRow, rate: float, seed: int) -> PromptedRun:
        """A row at one rate, for one seed, measured on the test texts."""
        more = {"graft": graft_config(dict(row.graft)), "training": self._training(self.steps, rate, seed)}
        run = self.bare(row.id, self.anchor, row.data.model_copy(update={"seed": seed}), **more)
        return run.model_copy(update={"id": f"{row.id}_lr{rate:g}_s{seed}"})

    def search_run(self, row: ComposedRow, rate: float) -> PromptedRun:
        """A row at one rate, with the steps of a search, measured on validation texts."""
        run, steps = self.cell(row, rate, self.seeds[0]), self.search_steps
        changes = {"id": f"search_{row.id}_lr{rate:g}", "training": self._training(steps, rate, self.seeds[0])}
        return run.model_copy(update=changes | self._validated(row.data))

    def fixed_runs(self, row: ComposedRow) -> list[FixedMixtureRun]:
        """A fixed mixture at every share, measured on validation texts; `row` is the gated one."""
        graft = graft_config(dict(row.graft))
        models = len(row.graft["augmenting"])
        bare = self.bare("fixed_mixture", self.anchor, row.data, graft=graft)
        fields: dict[str, Any] = dict(bare) | self._validated(row.data)
        return [FixedMixtureRun(**fields | {"id": f"search_fixed_{s:g}", "share": s / models}) for s in self.shares]

    def _validated(self, data: DataConfig) -> dict[str, Any]:
        tests = {name: sources for name, sources in data.test.items() if name.startswith("validation")}
        return {"data": data.model_copy(update={"test": tests}), "prompts": tuple(self.validation)}

    def _training(self, steps: int, rate: float, seed: int) -> TrainingConfig:
        more: dict[str, Any] = {"warmup_steps": min(10, steps // 4), "checkpoint_every": max(1, steps)}
        return training_config(steps, self.batch_size, rate, seed, precision="bf16", **more)

    def measure(
        self, models: Mapping[str, BackboneConfig], rows: Sequence[ComposedRow]
    ) -> tuple[list[Row], dict[str, Any]]:
        """The rows of the chosen tables, and what stands beside them.

        Args:
            models: models that are measured as they are, the anchor `m_b` among them.
            rows: of all tables, trained for every seed. `mixture` also gives the fixed mixture.
        """
        rows = [row for row in rows if row.id in self.wanted]
        metrics = [*(name for name in rows[0].data.test if name.startswith("validation"))]
        metrics += [task.name for task in self.validation]
        candidates = {row.id: [self.search_run(row, rate) for rate in self._rates(row)] for row in rows}
        if gated := next((row for row in rows if row.id == "mixture"), None):
            candidates["fixed_mixture"] = list(self.fixed_runs(gated))
        chosen = self.choose(candidates, metrics, "the search")
        rates = {row.id: chosen[row.id].training.learning_rate for row in rows}
        runs = {name: [self.bare(name, backbone, rows[0].data)] for name, backbone in models.items()}
        if isinstance(fixed := chosen.get("fixed_mixture"), FixedMixtureRun):
            tested: dict[str, Any] = {"data": runs["m_b"][0].data, "prompts": tuple(self.tasks), "id": "fixed_mixture"}
            runs["fixed_mixture"] = [fixed.model_copy(update=tested)]
        runs |= {row.id: [self.cell(row, rates[row.id], seed) for seed in self.seeds] for row in rows}
        self.execute([run for of_row in runs.values() for run in of_row], "the rows")
        if "both" in runs:
            runs["composition"] = runs["both"]
        details = self.evidence(runs) | {
            "rates": rates,
            "statistics": {name: self.measured[of[0].id].details.get("statistics", {}) for name, of in runs.items()},
            "seconds": self.seconds,
        }
        measured = {name: [self.measured[run.id] for run in of_row] for name, of_row in runs.items()}
        return [over_seeds(of_row, name, self.labels[name]) for name, of_row in measured.items()], details

    def _rates(self, row: ComposedRow) -> Sequence[float]:
        rates = self.rates[row.graft["kind"]]
        return rates[1:2] if self.options.quick else rates

    def report(
        self, module: str, rows: Sequence[Row], ratios: Ratios, shown: Mapping[str, str], details: dict[str, Any]
    ) -> Results:
        """Write the results of an experiment's module, with its aims, published figures and bits per byte.

        `details` get, for each aim, the ratio of every seed with its interval over seeds. An aim is met if the whole
        interval is within it.
        """
        by_seed, aims = {name: list(runs.values()) for name, runs in details["by_seed"].items()}, []
        for (name, row, others, limit), text in ratios.items():
            if {row, *others} <= by_seed.keys():
                over = [_of_seeds(by_seed[other], name, len(by_seed[row])) for other in others]
                values = [
                    values[name] / min(other)
                    for values, other in zip(by_seed[row], zip(*over, strict=True), strict=True)
                ]
                interval = combine_seeds(values)
                details.setdefault("ratios", {})[text] = interval.model_dump() | {"by_seed": values}
                end = f"{text}, upper end of the interval"
                aims.append(aim(end, name, limit, interval.high, operator.le))
        plots = {"bits-per-byte": bars(rows, shown, "bits per byte")}
        name = Path(module).parent.name.replace("_", "-")
        paper = published(module)
        return self.write(name, rows, plots=plots, details=details, aims=aims, paper=paper)


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


class TextStudy(ComposedStudy):
    """Compositions of the parents that experiments train on the spot.

    Args:
        options: of the experiment.
        tables: rows by table.
        labels: of models and rows.
        amounts: how much of each text.
        files: of the data folder, beside those of the parents.

    Attributes:
        texts: folder of the experiment's own texts.
    """

    def __init__(
        self,
        options: Options,
        tables: Mapping[str, Sequence[str]],
        labels: Mapping[str, str],
        amounts: Amounts,
        files: Sequence[str] = (),
    ) -> None:
        self.options = options
        options.chosen(tuple(tables))  # before the parents are trained
        check_files(options, (*FILES, *files))
        size = QUICK if options.quick else Size()
        self.parents, self.texts = make_parents(options, size), options.out / "texts"
        self.amounts, self.length = amounts, size.length
        self.tokenizer = AutoTokenizer.from_pretrained(self.parents.anchor)
        super().__init__(
            options, tables, LABELS | dict(labels), self.model(self.parents.anchor), steps=60, batch_size=4
        )

    def model(self, folder: Path) -> BackboneConfig:
        """A parent as a backbone."""
        return BackboneConfig(name=str(folder), device=self.options.device)

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

    def data(self, new: Sequence[str], old: Sequence[str], tests: Mapping[str, str]) -> DataConfig:
        """What a row is trained and measured on, by names of texts; those that end with `-prompts` have prompts."""

        def source(name: str) -> SourceConfig:
            column = "prompt" if name.endswith("-prompts") else None
            return SourceConfig(path=str(self.texts / f"{name}.jsonl"), prompt_column=column)

        return DataConfig(
            new=[source(name) for name in new],
            old=[source(name) for name in old],
            replay_fraction=REPLAY_FRACTION,
            length=self.length,
            boundaries="whole",
            test={name: [source(file)] for name, file in tests.items()},
        )

    def task(self, name: str, **more: Any) -> PromptTask:
        """A task of the experiment's texts; `more` are other fields."""
        return PromptTask(name=name, path=str(self.texts / f"task-{name}.jsonl"), **more)

    def setting(self) -> dict[str, Any]:
        """What all rows share, for the details of results."""
        numbers: dict[str, Any] = {"steps": self.steps, "batch_size": self.batch_size, "length": self.length}
        numbers["rates"] = {kind: list(rates) for kind, rates in RATES.items()}
        numbers |= {"replay_fraction": REPLAY_FRACTION, "amounts": self.amounts.model_dump()}
        return numbers | {"parents": self.parents.summaries}

    def grafts(self, name: str, specialist: Path) -> dict[str, dict[str, Any]]:
        """The rows on one specialist."""
        parents = self.parents
        others = {"vanilla_m_a": parents.vanilla, "random_m_a": parents.random}
        rows = composed_rows({name: specialist}, load_backbone(str(parents.anchor)), stride=1)
        return rows | {row: rows["both"] | {"augmenting": named({name: folder})} for row, folder in others.items()}


def named(augmenting: Mapping[str, Path]) -> dict[str, Any]:
    """The key `augmenting` of a composition."""
    return {name: {"name": str(folder)} for name, folder in augmenting.items()}


def composed_rows(augmenting: Mapping[str, Path], anchor: Backbone, **graft: Any) -> dict[str, dict[str, Any]]:
    """The grafts of rows on the same augmenting models, and those without any.

    LoRA has as many trainable parameters as the composition, up to the rounding of its rank.
    """
    cross = {"kind": "composition", "augmenting": named(augmenting), **graft}
    both = cross | {"readout": "mixture"}
    extra = count_parameters(build_graft(graft_config(both), anchor).parameters())
    return {
        "mixture": cross | MIXTURE,
        "cross": cross,
        "both": both,
        "lora": {"kind": "lora", "capacity": extra / count_parameters(anchor.model.parameters())},
        "skyline": {"kind": "finetune"},
    }


def better_parent(names: Mapping[str, str], parents: tuple[str, ...] = ("m_b", "m_a")) -> Ratios:
    """The aims of `both`: within 1% of the better parent on every text, by metric."""
    return {(name, "both", parents, 1.01): f"{text}: both, over the better parent" for name, text in names.items()}


def over_controls(names: Mapping[str, str], controls: Sequence[str]) -> Ratios:
    """The aims of `both`: fewer bits than each control, by metric."""
    return {
        (name, "both", (control,), 1.0): f"{text}: both, over: {LABELS[control]}"
        for name, text in names.items()
        for control in controls
    }


def _of_seeds(values: Sequence[Mapping[str, float]], name: str, seeds: int) -> list[float]:
    """A metric seed by seed; a model that is not trained has the same one for every seed."""
    return [values[index % len(values)][name] for index in range(seeds)]
