"""Code shared by the compositions on real text: rows, the search of learning rates, tasks with a prompt, and aims."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from experiments import Options
from experiments.parents import FILES, QUICK, Size, cut_texts, held_out, make_parents, read_examples, read_texts
from experiments.python_texts import write_documents
from experiments.study import (
    Study,
    aim,
    all_runs,
    bars,
    check_files,
    over_seeds,
    published,
    training_config,
)
from graftlm.backbone import Backbone, load_backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.config import Config
from graftlm.data import DataConfig, SourceConfig
from graftlm.evaluation import Aim, Results, Row, combine_seeds
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.examples import Example, chrf, generate_answers, score_answers
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import build_graft, graft_config
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import RunContext, Trainee
from graftlm.training import TrainingConfig

# Share of training rows that are text of the anchor's own domains.
REPLAY_FRACTION = 0.4
# Learning rates that are tried for every row, by kind of graft.
RATES = {
    "composition": (1e-3, 3e-3, 1e-2),
    "lora": (3e-3, 1e-2, 3e-2),
    "finetune": (3e-4, 1e-3, 3e-3),
}
# Shares of the augmenting models that are tried for a mixture without a gate.
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
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
# Texts of aims. A key has the metric, the row, the rows of which the best is compared, and the limit of the ratio of
# the row to the best one.
Ratios = dict[tuple[str, str, tuple[str, ...], float], str]


class PromptTask(Config):
    """Prompts with their answers.

    Its metrics are `<name>` in nats per token of the answers, `<name>_bpb` in bits per byte, `<name>_answer` in nats
    per answer, and `<name>_chrf`, which compares greedy answers with the right ones.

    Args:
        name: prefix of the names of the metrics.
        path: JSON Lines file with a `prompt` and a `text` in each line.
        answers: number of prompts that are answered greedily for chrF; 0 leaves chrF out.
        max_new_tokens: longest answer in tokens.
        stop: strings that end an answer.
    """

    name: str
    path: str
    answers: int = 0
    max_new_tokens: int = 48
    stop: tuple[str, ...] = ("\n",)

    def measure(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the metrics of a model."""
        pairs = read_examples(Path(self.path))
        examples = [Example(prompt=prompt, answer=answer) for prompt, answer in pairs]
        scores = score_answers(model, tokenizer, examples)
        metrics: dict[str, Any] = {
            self.name: scores.interval("nats_per_token"),
            f"{self.name}_bpb": scores.interval("bits_per_byte"),
            f"{self.name}_answer": float(scores.nats.sum()) / len(examples),
        }
        if self.answers:
            answered = examples[: self.answers]
            answers = generate_answers(
                model,
                tokenizer,
                [example.prompt for example in answered],
                max_new_tokens=self.max_new_tokens,
                stop=self.stop,
            )
            metrics[f"{self.name}_chrf"] = chrf(answers, answered, beta=1)
        return metrics


class PromptedRun(GraftRun):
    """A run that is also measured on tasks with a prompt.

    Args:
        prompts: the tasks.
    """

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

    def add_tasks(self, measurement: Measurement, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Measure a model on the tasks and add the metrics to a measurement."""
        for task in self.prompts:
            measurement.add_metrics(task.measure(model, tokenizer))


class FixedMixtureRun(PromptedRun):
    """A mixture whose gate is constant.

    Args:
        share: share of each augmenting model in the distribution of every token.
    """

    share: float

    @contextmanager
    def build(self, context: RunContext) -> Iterator[Trainee]:
        with super().build(context) as trainee:
            graft: Any = trainee.model.grafts["graft"]
            gate = graft.readout.linear
            share_of_anchor = 1 - self.share * gate.out_features
            with torch.no_grad():
                gate.bias.fill_(math.log1p(self.share / share_of_anchor))
            yield trainee


class ComposedRow(NamedTuple):
    """A trained row.

    Attributes:
        id: name of the row.
        graft: config of its graft on the anchor.
        data: texts of its training and tests.
    """

    id: str
    graft: Mapping[str, Any]
    data: DataConfig


class ComposedStudy(Study):
    """Rows on one anchor: search, training, measurement and comparison.

    Args:
        options: options of the experiment.
        tables: rows by table.
        labels: labels of models and rows.
        anchor: backbone of all rows.
        steps: training steps of each row.
        batch_size: rows of a step.

    Attributes:
        wanted: rows of the chosen tables.
        validation: tasks that settings are chosen by, in addition to the test sets that begin with `validation`.
        tasks: tasks on which all rows are measured.
        evaluation: evaluation of all rows.
        rates: learning rates that are tried, by kind of graft.
        shares: shares that are tried for a mixture without a gate.
        search_steps: training steps of the search; by default a third of `steps`.
    """

    rates: Mapping[str, Sequence[float]] = RATES
    shares: Sequence[float] = SHARES
    validation: Sequence[PromptTask] = ()
    tasks: Sequence[PromptTask] = ()
    # The texts are measured to their ends.
    evaluation = EvaluationConfig(limit_tokens=None, decode_prompts=0, own_tokens=0)

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
        self.labels = dict(labels)
        self.anchor = anchor
        self.steps = 3 if options.quick else steps
        self.batch_size = 2 if options.quick else batch_size
        self.search_steps = max(1, self.steps // 3)

    def bare(self, name: str, backbone: BackboneConfig, data: DataConfig, **more: Any) -> PromptedRun:
        """Return the run that measures an untrained model; `more` has further fields of the run."""
        tests = {text: sources for text, sources in data.test.items() if not text.startswith("validation")}
        fields = {
            "label": self.labels[name],
            "training": self._training(0, 1e-3, 0),
            "prompts": self.tasks,
            **more,
        }
        return PromptedRun(
            id=name,
            backbone=backbone,
            data=data.model_copy(update={"test": tests}),
            evaluation=self.evaluation,
            **fields,
        )

    def cell(self, row: ComposedRow, rate: float, seed: int) -> PromptedRun:
        """Return the run of a row at one rate and with one seed, measured on the test texts."""
        run = self.bare(
            row.id,
            self.anchor,
            row.data.model_copy(update={"seed": seed}),
            graft=graft_config(dict(row.graft)),
            training=self._training(self.steps, rate, seed),
        )
        return run.model_copy(update={"id": f"{row.id}_lr{rate:g}_s{seed}"})

    def search_run(self, row: ComposedRow, rate: float) -> PromptedRun:
        """Return the run of a row at one rate with the steps of a search, measured on validation texts."""
        run = self.cell(row, rate, self.seeds[0])
        changes = {
            "id": f"search_{row.id}_lr{rate:g}",
            "training": self._training(self.search_steps, rate, self.seeds[0]),
            **self._validated(row.data),
        }
        return run.model_copy(update=changes)

    def fixed_runs(self, row: ComposedRow) -> list[FixedMixtureRun]:
        """Return fixed mixtures at every share, measured on validation texts; `row` is the gated mixture."""
        graft = graft_config(dict(row.graft))
        models = len(row.graft["augmenting"])
        bare = self.bare("fixed_mixture", self.anchor, row.data, graft=graft)
        fields: dict[str, Any] = {**dict(bare), **self._validated(row.data)}
        runs = []
        for share in self.shares:
            own_fields = {"id": f"search_fixed_{share:g}", "share": share / models}
            runs.append(FixedMixtureRun(**{**fields, **own_fields}))
        return runs

    def _validated(self, data: DataConfig) -> dict[str, Any]:
        """Return the fields of a run that measures on validation texts."""
        tests = {name: sources for name, sources in data.test.items() if name.startswith("validation")}
        return {
            "data": data.model_copy(update={"test": tests}),
            "prompts": tuple(self.validation),
        }

    def _training(self, steps: int, rate: float, seed: int) -> TrainingConfig:
        return training_config(
            steps,
            self.batch_size,
            rate,
            seed,
            precision="bf16",
            warmup_steps=min(10, steps // 4),
            checkpoint_every=max(1, steps),
        )

    def measure(
        self,
        models: Mapping[str, BackboneConfig],
        rows: Sequence[ComposedRow],
    ) -> tuple[list[Row], dict[str, Any]]:
        """Search and run the chosen tables.

        Args:
            models: models that are measured without training, including the anchor `m_b`.
            rows: rows of all tables, trained with every seed. `mixture` also yields the fixed mixture.

        Returns:
            The rows, and the details of the results.
        """
        rows = [row for row in rows if row.id in self.wanted]
        chosen = self._search(rows)
        rates = {row.id: chosen[row.id].training.learning_rate for row in rows}
        runs: dict[str, Sequence[PromptedRun]] = {}
        for name, backbone in models.items():
            runs[name] = [self.bare(name, backbone, rows[0].data)]
        fixed = chosen.get("fixed_mixture")
        if isinstance(fixed, FixedMixtureRun):
            tested = {
                "id": "fixed_mixture",
                "data": runs["m_b"][0].data,
                "prompts": tuple(self.tasks),
            }
            runs["fixed_mixture"] = [fixed.model_copy(update=tested)]
        for row in rows:
            runs[row.id] = [self.cell(row, rates[row.id], seed) for seed in self.seeds]
        self.execute(all_runs(runs), "the rows")
        if "both" in runs:
            runs["composition"] = runs["both"]
        results = []
        for name, runs_of_row in runs.items():
            measurements = [self.measured[run.id] for run in runs_of_row]
            results.append(over_seeds(measurements, name, self.labels[name]))
        return results, self._details(runs, rates)

    def _search(self, rows: Sequence[ComposedRow]) -> dict[str, PromptedRun]:
        """Return the run that validation texts choose for each row."""
        metrics = [name for name in rows[0].data.test if name.startswith("validation")]
        metrics += [task.name for task in self.validation]
        candidates: dict[str, Sequence[PromptedRun]] = {}
        for row in rows:
            candidates[row.id] = [self.search_run(row, rate) for rate in self._rates(row)]
        for row in rows:
            if row.id == "mixture":
                candidates["fixed_mixture"] = self.fixed_runs(row)
        return self.choose(candidates, metrics, "the search")

    def _details(self, runs: Mapping[str, Sequence[PromptedRun]], rates: Mapping[str, float]) -> dict[str, Any]:
        statistics = {}
        for name, runs_of_row in runs.items():
            details = self.measured[runs_of_row[0].id].details
            statistics[name] = details.get("statistics", {})
        return {
            **self.evidence(runs),
            "rates": rates,
            "statistics": statistics,
            "seconds": self.seconds,
        }

    def _rates(self, row: ComposedRow) -> Sequence[float]:
        rates = self.rates[row.graft["kind"]]
        return rates[1:2] if self.options.quick else rates

    def report(
        self,
        module: str,
        rows: Sequence[Row],
        ratios: Ratios,
        shown: Mapping[str, str],
        details: dict[str, Any],
    ) -> Results:
        """Write the results of an experiment, with its aims, published figures and a chart of bits per byte.

        `details` receives, for each aim, the ratio of every seed and its interval over seeds. An aim is met if the
        upper end of the interval does not exceed its limit.

        Args:
            module: `__file__` of the experiment's module.
            rows: rows of the results.
            ratios: aims of the experiment.
            shown: labels of the metrics in the chart, by name.
            details: details of `measure`.
        """
        by_seed = {name: list(runs.values()) for name, runs in details["by_seed"].items()}
        aims: list[Aim] = []
        for (name, row, others, limit), text in ratios.items():
            if not {row, *others} <= by_seed.keys():
                continue
            values = _ratios_to_best(by_seed, name, row, others)
            interval = combine_seeds(values)
            details.setdefault("ratios", {})[text] = {**interval.model_dump(), "by_seed": values}
            upper_end = f"{text}, upper end of the interval"
            aims.append(aim(upper_end, name, limit, interval.high, operator.le))
        return self.write(
            Path(module).parent.name.replace("_", "-"),
            rows,
            plots={"bits-per-byte": bars(rows, shown, "bits per byte")},
            details=details,
            aims=aims,
            paper=published(module),
        )


class Amounts(Config):
    """Amounts of text.

    Args:
        share: share of each of a specialist's training documents that compositions are trained on.
        old: characters of each of the anchor's novels in the old text; other documents have a twelfth of that.
        tested: characters of each set of test texts; validation takes a third.
        examples: examples of each task.
    """

    share: float = 0.05
    old: int = 18_000
    tested: int
    examples: int


class TextStudy(ComposedStudy):
    """Compositions of parents that the experiments train themselves.

    Args:
        options: options of the experiment.
        tables: rows by table.
        labels: labels of models and rows.
        amounts: amounts of text.
        files: files of the data folder, in addition to those of the parents.

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
        options.chosen(tuple(tables))  # An unknown table is an error before the parents are trained.
        check_files(options, (*FILES, *files))
        size = QUICK if options.quick else Size()
        self.parents = make_parents(options, size)
        self.texts = options.out / "texts"
        self.amounts = amounts
        self.length = size.length
        self.tokenizer = AutoTokenizer.from_pretrained(self.parents.anchor)
        super().__init__(
            options,
            tables,
            {**LABELS, **labels},
            self.model(self.parents.anchor),
            steps=60,
            batch_size=4,
        )

    def model(self, folder: Path) -> BackboneConfig:
        """Return the backbone config of a parent."""
        return BackboneConfig(name=str(folder), device=self.options.device)

    def write_parts(self, files: Mapping[str, str], *, cut: bool = False) -> dict[str, list[str]]:
        """Write held-out texts, the old English text, and the start of every text of `files`.

        Args:
            files: files of the parents' texts, by name.
            cut: cut texts into pieces that fit into a row.

        Returns:
            The texts of each name, before they are cut.
        """
        amounts = self.amounts
        corpus = self.parents.corpus
        held_out(self.options.data, corpus, self.texts, amounts.tested)
        parts = {}
        for name, file in files.items():
            texts = read_texts(corpus / f"{file}.jsonl")
            parts[name] = [text[: int(amounts.share * len(text))] for text in texts]
        english = read_texts(corpus / "english.jsonl")
        shortest_novel = max(len(text) for text in english) // 4
        parts["english"] = []
        for text in english:
            characters = amounts.old if len(text) > shortest_novel else amounts.old // 12
            parts["english"].append(text[:characters])
        for name, texts in parts.items():
            documents = cut_texts(texts, self.tokenizer, self.length) if cut else texts
            write_documents(self.texts / f"{name}-part.jsonl", documents)
        return parts

    def data(self, new: Sequence[str], old: Sequence[str], tests: Mapping[str, str]) -> DataConfig:
        """Return the texts of a row's training and tests.

        Args:
            new: names of new texts. Names that end with `-prompts` are files with prompts.
            old: names of old texts.
            tests: names of texts, by test set.
        """

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
        """Return a task on the experiment's texts; `more` has further fields."""
        return PromptTask(name=name, path=str(self.texts / f"task-{name}.jsonl"), **more)

    def setting(self) -> dict[str, Any]:
        """Return the settings that all rows share, for the details of the results."""
        return {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "length": self.length,
            "rates": {kind: list(rates) for kind, rates in RATES.items()},
            "replay_fraction": REPLAY_FRACTION,
            "amounts": self.amounts.model_dump(),
            "parents": self.parents.summaries,
        }

    def grafts(self, name: str, specialist: Path) -> dict[str, dict[str, Any]]:
        """Return the grafts of all rows with one specialist.

        Args:
            name: name of the specialist in the composition.
            specialist: folder of the specialist.
        """
        anchor = load_backbone(str(self.parents.anchor))
        grafts = composed_rows({name: specialist}, anchor, stride=1)
        controls = {
            "vanilla_m_a": self.parents.vanilla,
            "random_m_a": self.parents.random,
        }
        for row, folder in controls.items():
            grafts[row] = {**grafts["both"], "augmenting": named({name: folder})}
        return grafts


def named(augmenting: Mapping[str, Path]) -> dict[str, Any]:
    """Return the key `augmenting` of a composition's config."""
    return {name: {"name": str(folder)} for name, folder in augmenting.items()}


def composed_rows(augmenting: Mapping[str, Path], anchor: Backbone, **graft: Any) -> dict[str, dict[str, Any]]:
    """Return the grafts of rows on the same augmenting models, and of the rows without any.

    LoRA has as many trainable parameters as the composition, up to the rounding of its rank.

    Args:
        augmenting: folders of the augmenting models, by name.
        anchor: the anchor.
        graft: other keys of the composition.
    """
    cross = {"kind": "composition", "augmenting": named(augmenting), **graft}
    both = {**cross, "readout": "mixture"}
    composition = build_graft(graft_config(both), anchor)
    added = count_parameters(composition.parameters())
    return {
        "mixture": {**cross, **MIXTURE},
        "cross": cross,
        "both": both,
        "lora": {"kind": "lora", "capacity": added / count_parameters(anchor.model.parameters())},
        "skyline": {"kind": "finetune"},
    }


def better_parent(names: Mapping[str, str], parents: tuple[str, ...] = ("m_b", "m_a")) -> Ratios:
    """Return the aims that `both` is within 1% of the best parent on every text, by metric."""
    ratios: Ratios = {}
    for name, text in names.items():
        ratios[name, "both", parents, 1.01] = f"{text}: both, over the better parent"
    return ratios


def over_controls(names: Mapping[str, str], controls: Sequence[str]) -> Ratios:
    """Return the aims that `both` takes fewer bits than each control, by metric."""
    ratios: Ratios = {}
    for name, text in names.items():
        for control in controls:
            ratios[name, "both", (control,), 1.0] = f"{text}: both, over: {LABELS[control]}"
    return ratios


def _ratios_to_best(
    by_seed: Mapping[str, Sequence[Mapping[str, float]]],
    name: str,
    row: str,
    others: Sequence[str],
) -> list[float]:
    """Return, for each seed, a metric of a row over the lowest one of some other rows.

    An untrained model has the same values for every seed.
    """
    ratios = []
    for index, values in enumerate(by_seed[row]):
        rivals = []
        for other in others:
            seeds_of_other = by_seed[other]
            rivals.append(seeds_of_other[index % len(seeds_of_other)][name])
        ratios.append(values[name] / min(rivals))
    return ratios
