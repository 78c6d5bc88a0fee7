"""Four worlds of invented facts, one LoRA each: does routing by token answer questions of two worlds at once?

The rates and the settings of the mixtures are searched on other facts, with other phrasings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments import Options
from experiments.facts.answering import answer_tokens
from experiments.facts.generator import Question
from experiments.facts.kept import WIKITEXT, known_words
from experiments.facts.lookup import behind_router
from experiments.facts.metrics import Answers, Items, judge, shares
from experiments.facts.retrieval import Lexicon
from experiments.facts.summaries import over_seeds, rounded_scores
from experiments.precision import training_precision
from experiments.protocol import (
    BigramTable,
    Condition,
    Evidence,
    RateSearch,
    conditions,
    decide,
    described,
    search_rate,
)
from experiments.study import Study, check_files, write_lines
from experiments.worlds.rows import (
    ALL,
    BACKBONE,
    BOTH,
    COMPARED_MIXTURES,
    DECLARED,
    EXPERT,
    LOOKUP,
    LOOKUP_ROUTED,
    ONE,
    OWN,
    RATES,
    ROWS,
    SEARCH_SEED,
    SEEDS,
    MixtureRow,
    Trained,
)
from experiments.worlds.runs import BothRun, ExpertsRun, MixtureRun
from experiments.worlds.sizes import Size
from experiments.worlds.texts import WORLDS, Pair, WorldSet, judge_pairs
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Metric, Results, Row, value_of
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.taught_answers import evenly_spaced
from graftlm.grafts import graft_config
from graftlm.runs.run import Run
from graftlm.runs.shared import load_shared
from graftlm.training.config import TrainingConfig

NAME = "worlds"
MODEL = "smollm2-135m-instruct"
FILES = (WIKITEXT,)
NEAR = ("unchanged", "spill", "locality_near")
"""Metrics of the questions about real things, which belong to no expert."""
__all__ = ["NAME", "SEEDS", "run"]


class WorldsStudy(Study):
    """The runs of the experiment.

    Args:
        options: options of the experiment.

    Attributes:
        precision: the precision of training on this machine.
        searches: the search of each training's rate.
        settings: for each row, the score of each of its settings, by its number.
        mixture_rates: for each mixture of the comparisons, its score with the experts of each rate.
        items: the judged answers of each row and seed.
        metrics: further metrics of each row and seed.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.backbone = BackboneConfig(
            name=options.backbone or MODEL, dtype="float32", device=options.device, attn_implementation="eager"
        )
        self.precision = training_precision(options.device)
        self.searches: dict[str, RateSearch] = {}
        self.settings: dict[str, list[float]] = {}
        self.mixture_rates: dict[str, RateSearch] = {}
        self.items: dict[str, dict[int, Items]] = {}
        self.metrics: dict[str, dict[int, dict[str, float]]] = {}
        self._known = known_words(options.data)
        self._sets: dict[int, WorldSet] = {}

    def size(self, seed: int) -> Size:
        """Return how much is taught and asked with a seed."""
        return Size(self.options.quick, is_search=seed == SEARCH_SEED)

    def worlds(self, seed: int) -> WorldSet:
        """Return the facts of a seed, and write their conversations."""
        if seed not in self._sets:
            size = self.size(seed)
            found = WorldSet(size.facts, seed, self._known, size.part)
            for world in WORLDS:
                write_lines(self.taught_file(seed, world), found.conversations(world))
                tested = [row for row, fact in self._tested(found) if fact in found.worlds[world]]
                write_lines(self.tested_file(seed, world), tested)
            self._sets[seed] = found
        return self._sets[seed]

    def _tested(self, worlds: WorldSet) -> list[tuple[dict[str, Any], Any]]:
        """Return the conversations by which nats per token are measured, with their facts."""
        count = 4 if self.options.quick else 40
        return evenly_spaced(list(zip(worlds.facts.tested(), worlds.facts.facts, strict=True)), count)

    def taught_file(self, seed: int, world: str) -> Path:
        """Return the file of the conversations that teach a world."""
        return self.options.out / "facts" / f"seed{seed}" / f"{world}.jsonl"

    def tested_file(self, seed: int, world: str) -> Path:
        """Return the file of the conversations about a world that are scored."""
        return self.options.out / "facts" / f"seed{seed}" / f"{world}-tested.jsonl"

    def pairs(self, seed: int) -> list[Pair]:
        """Return the questions for two facts."""
        size = self.size(seed)
        worlds = self.worlds(seed)
        return [*worlds.pairs("across", size.across), *worlds.pairs("within", size.within)]

    def questions_file(self, seed: int) -> Path:
        """Write the questions that all rows answer, and return their file."""
        size = self.size(seed)
        worlds = self.worlds(seed)
        lines: list[dict[str, Any]] = []

        def add(question: Question | Pair, tokens: int, world: str = "") -> None:
            lines.append({"id": question.id, "text": question.text, "tokens": tokens, "world": world})

        for question in evenly_spaced(worlds.facts.unseen(), size.unseen):
            add(question, size.answer_tokens, worlds.world_of(question))
        for pair in self.pairs(seed):
            add(pair, 2 * size.answer_tokens, pair.worlds[0])
        for question in worlds.facts.near()[: size.near]:
            add(question, size.answer_tokens)
        path = self.options.out / "questions" / f"seed{seed}.jsonl"
        write_lines(path, lines)
        return path

    # Runs

    def training_run(self, trained: Trained, rate: float, seed: int) -> ExpertsRun:
        """Return the run that trains the experts of the worlds, or one LoRA of all."""
        size = self.size(seed)
        self.worlds(seed)
        experts = dict.fromkeys(WORLDS, EXPERT) if trained == OWN else {ALL: ONE}
        sources = {}
        for world in WORLDS:
            sources[world] = [{"path": str(self.taught_file(seed, world)), "messages_column": "messages"}]
        data = {
            "new": sources if trained == OWN else [source for (source,) in sources.values()],
            "replay_fraction": 0,
            "length": size.length,
            "boundaries": "whole",
            "seed": seed,
        }
        training = {
            "learning_rate": rate,
            "batch_size": 4,
            "warmup_steps": 2 if self.options.quick else 10,
            "seed": seed,
            "precision": self.precision,
            "checkpoint_every": 40,
            "keep_checkpoints": 1,
            **({"steps": 2} if self.options.quick else {"epochs": 3}),
        }
        return ExpertsRun(
            id=f"{trained}_lr{rate:g}_s{seed}",
            backbone=self.backbone,
            graft=graft_config({"kind": "token-routing", "experts": experts}),
            data=DataConfig.parse(data),
            training=TrainingConfig.parse(training),
            evaluation=EvaluationConfig(own_tokens=0, decode_prompts=0),
            experts=tuple(experts),
        )

    def mixture(self, run_id: str, seed: int, trained: ExpertsRun | None = None, **fields: Any) -> MixtureRun:
        """Return a run that answers the questions of a seed, with the experts of a training or without any."""
        needs = () if trained is None else (trained.id,)
        experts = () if trained is None else trained.experts
        return MixtureRun(
            id=f"{run_id}_s{seed}",
            backbone=self.backbone,
            questions=str(self.questions_file(seed)),
            experts=experts,
            depends_on=needs,
            **fields,
        )

    def own(self, rate: float, seed: int) -> tuple[ExpertsRun, MixtureRun]:
        """Return the training of all experts, and the run in which each question's own expert answers."""
        trained = self.training_run(OWN, rate, seed)
        scored = {world: str(self.tested_file(seed, world)) for world in WORLDS}
        return trained, self.mixture(f"{OWN}-answers_lr{rate:g}", seed, trained, own=True, scored=scored)

    def of_row(self, name: str, setting: Mapping[str, Any], rate: float, seed: int) -> tuple[ExpertsRun, MixtureRun]:
        """Return the training and the answers of a row with one of its settings."""
        row = ROWS[name]
        trained = self.training_run(row.trained, rate, seed)
        fields: dict[str, Any] = {"merge" if row.is_merge else "routing": dict(setting)}
        if not row.is_merge and "fixed" not in setting:
            fields["examples"] = self._examples(row, seed)
        if name == "one":
            fields["scored"] = {world: str(self.tested_file(seed, world)) for world in WORLDS}
        number = row.settings.index(setting)
        return trained, self.mixture(f"{name}-{number}_lr{rate:g}", seed, trained, **fields)

    def _examples(self, row: MixtureRow, seed: int) -> dict[str, str]:
        """Return the files of the examples of each expert."""
        if row.trained == OWN:
            return {world: str(self.taught_file(seed, world)) for world in WORLDS}
        everything = self.options.out / "facts" / f"seed{seed}" / f"{ALL}.jsonl"
        worlds = self.worlds(seed)
        write_lines(everything, [line for world in WORLDS for line in worlds.conversations(world)])
        return {ALL: str(everything)}

    # Measurements

    def execute_together(self, pairs: Sequence[tuple[ExpertsRun, MixtureRun]], title: str) -> None:
        """Execute trainings with their answers, a training that several share once."""
        runs: dict[str, Run] = {}
        for pair in pairs:
            runs |= {run.id: run for run in pair}
        self.execute(list(runs.values()), title)

    def answers_of(self, runs: tuple[ExpertsRun, MixtureRun] | tuple[MixtureRun], title: str) -> Measurement:
        """Execute runs, and return the measurement of the last one."""
        self.execute(runs, title)
        return self.measured[runs[-1].id]

    def bare_answers(self, seed: int) -> Answers:
        """Return the bare backbone's answers to all questions of a seed."""
        return self.answers_of((self.mixture(BACKBONE, seed),), "the backbone").details["answers"]

    def judged(self, answers: Answers, seed: int) -> Items:
        """Judge the answers of a row."""
        worlds = self.worlds(seed)
        singles = [*worlds.facts.unseen(), *worlds.facts.near()]
        items = judge(singles, answers, self.bare_answers(seed), worlds.facts.names)
        if "generalization" in items:
            items["recall"] = items.pop("generalization")
        return items | judge_pairs(self.pairs(seed), answers)

    def search(self) -> None:
        """Search the rates of both trainings, then the settings of every row at these rates."""
        rates = RATES[:1] if self.options.quick else RATES
        trainings: tuple[Trained, ...] = (OWN, ALL)
        first = [self._of_rate(trained, rate) for trained in trainings for rate in rates]
        self.execute_together(first, "search of rates")
        for trained in trainings:

            def score(rate: float, trained: Trained = trained) -> float:
                measurement = self.answers_of(self._of_rate(trained, rate), f"search of {trained}")
                values = shares(self.judged(measurement.details["answers"], SEARCH_SEED))
                return values["recall"] + values["within"]

            self.searches[trained] = search_rate(score, rates, limit=len(rates) if self.options.quick else 6)
        self._search_settings()

    def _of_rate(self, trained: Trained, rate: float) -> tuple[ExpertsRun, MixtureRun]:
        """Return the training whose rate is searched, and the answers that judge it."""
        if trained == OWN:
            return self.own(rate, SEARCH_SEED)
        return self.of_row("one", ROWS["one"].settings[0], rate, SEARCH_SEED)

    def _search_settings(self) -> None:
        """Measure every setting of the rows that have several, at the best rate of their training."""
        runs = {}
        for name, row in ROWS.items():
            settings = row.settings[:1] if self.options.quick else row.settings
            if len(settings) == 1:
                settings = ()
            rate = self.rate(row.trained)
            runs[name] = [self.of_row(name, setting, rate, SEARCH_SEED) for setting in settings]
        self.execute_together([pair for pairs in runs.values() for pair in pairs], "search of settings")
        for name, pairs in runs.items():
            self.settings[name] = []
            for _, answers in pairs:
                self.settings[name].append(self._search_score(answers))
        self._search_rates_of_mixtures()

    def _search_score(self, run: MixtureRun) -> float:
        """Return by what the setting of a mixture is chosen."""
        values = shares(self.judged(self.measured[run.id].details["answers"], SEARCH_SEED))
        return round(values["recall"] + values["across"], 4)

    def _search_rates_of_mixtures(self) -> None:
        """Measure the mixtures of the comparisons with the experts of every rate that was tried.

        Their rate is that of the experts alone. This tells whether another one would have served them better.
        """
        rates = self.searches[OWN].scores
        runs = {}
        for name in COMPARED_MIXTURES:
            runs[name] = {rate: self.of_row(name, self.setting(name), rate, SEARCH_SEED) for rate in rates}
        self.execute_together([pair for by_rate in runs.values() for pair in by_rate.values()], "rates of mixtures")
        for name, by_rate in runs.items():
            scores = {rate: self._search_score(answers) for rate, (_, answers) in by_rate.items()}
            self.mixture_rates[name] = RateSearch(scores)

    def rate(self, trained: Trained) -> float:
        """Return the best rate of a training."""
        return self.searches[trained].best

    def setting(self, name: str) -> Mapping[str, Any]:
        """Return the best setting of a row; the first one of equally good ones."""
        scores = self.settings[name]
        return ROWS[name].settings[scores.index(max(scores)) if scores else 0]

    def measure(self, seed: int) -> None:
        """Measure all rows with a seed."""
        rows = {OWN: self.own(self.rate(OWN), seed)}
        for name, row in ROWS.items():
            rows[name] = self.of_row(name, self.setting(name), self.rate(row.trained), seed)
        self.bare_answers(seed)
        self.execute_together(list(rows.values()), f"all rows, seed {seed}")
        self.keep(BACKBONE, seed, self.measured[self.mixture(BACKBONE, seed).id])
        for name, (_, answers) in rows.items():
            self.keep(name, seed, self.measured[answers.id])
        self._measure_both(seed)
        self._measure_lookup(seed)

    def _measure_both(self, seed: int) -> None:
        """Measure the questions for two worlds with both of their experts."""
        trained = self.training_run(OWN, self.rate(OWN), seed)
        tokens = 2 * self.size(seed).answer_tokens
        across = [pair for pair in self.pairs(seed) if pair.kind == "across"]
        lines = [
            {"id": each.id, "text": each.text, "tokens": tokens, "world": "+".join(each.worlds)} for each in across
        ]
        path = self.options.out / "questions" / f"seed{seed}-across.jsonl"
        write_lines(path, lines)
        runs = {}
        for name, (_, weight) in BOTH.items():
            runs[name] = BothRun(
                id=f"{name}_s{seed}",
                backbone=self.backbone,
                questions=str(path),
                experts=trained.experts,
                depends_on=(trained.id,),
                weight=weight,
            )
        self.execute([trained, *runs.values()], f"both experts, seed {seed}")
        for name, run in runs.items():
            answers = self.measured[run.id].details["answers"]
            self.items.setdefault(name, {})[seed] = judge_pairs(across, answers)
            self.metrics.setdefault(name, {})[seed] = {}

    def keep(self, name: str, seed: int, measurement: Measurement) -> None:
        """Keep the judged answers and the further metrics of a row."""
        answers = measurement.details["answers"]
        items = self.judged(self._complete(answers, seed), seed)
        if name == OWN:
            items = {metric: values for metric, values in items.items() if metric not in NEAR}
        self.items.setdefault(name, {})[seed] = items
        numbers = {key: value_of(value) for key, value in measurement.row.metrics.items()}
        self.metrics.setdefault(name, {})[seed] = numbers

    def _complete(self, answers: Answers, seed: int) -> Answers:
        """Return answers where the bare backbone answers questions that a row leaves out."""
        return {**self.bare_answers(seed), **answers}

    def _measure_lookup(self, seed: int) -> None:
        """Measure a rival that is not trained: the taught answer of the nearest taught question, for each sentence.

        It is told where the sentences end. Behind the router it answers only prompts with a taught word.
        """
        worlds = self.worlds(seed)
        asked = []
        told = []
        for fact in worlds.facts.facts:
            for phrasing in range(4):
                asked.append(worlds.facts.question(fact, phrasing))
                told.append(worlds.facts.statement(fact))
        lexicon = Lexicon(asked)

        def nearest(text: str) -> str:
            (number,) = lexicon.nearest(text, 1)
            return told[number]

        answers = {question.id: nearest(question.text) for question in worlds.facts.unseen()}
        answers |= {question.id: nearest(question.text) for question in worlds.facts.near()}
        for pair in self.pairs(seed):
            answers[pair.id] = " ".join(nearest(part.text) for part in pair.parts)
        chosen = self.bare_answers(seed).keys()
        answers = {key: answer for key, answer in answers.items() if key in chosen}
        questions = [*worlds.facts.unseen(), *worlds.facts.near(), *self.pairs(seed)]
        asked = [question for question in questions if question.id in chosen]
        routed = behind_router(load_shared(self.backbone), worlds.facts, asked, answers, self.bare_answers(seed))
        for name, found in {LOOKUP: answers, LOOKUP_ROUTED: routed}.items():
            self.items.setdefault(name, {})[seed] = self.judged(found, seed)
            self.metrics.setdefault(name, {})[seed] = {}

    # Results

    def bigram_nats(self, seed: int) -> float:
        """Return the nats per token of a bigram table of the taught answers on the scored answers."""
        worlds = self.worlds(seed)
        taught = [row for world in WORLDS for row in worlds.conversations(world)]
        tested = [row for row, _ in self._tested(worlds)]
        tokenizer = load_shared(self.backbone).need_tokenizer()
        table = BigramTable(answer_tokens(tokenizer, taught), len(tokenizer))
        return table.nats_per_token(answer_tokens(tokenizer, tested))

    def rows(self) -> list[Row]:
        """Return the rows that were measured."""
        labels = {
            BACKBONE: "backbone",
            LOOKUP: "answer of the nearest taught question, for each sentence",
            LOOKUP_ROUTED: "the same where the prompt has a taught word",
            OWN: "the expert of the (first) world",
        }
        labels |= {name: row.label for name, row in ROWS.items()}
        labels |= {name: label for name, (label, _) in BOTH.items()}
        rows = []
        for name, label in labels.items():
            metrics: dict[str, Metric] = over_seeds(list(self.items[name].values()))
            further = list(self.metrics[name].values())
            for key in further[0]:
                metrics[key] = float(np.mean([of_seed[key] for of_seed in further]))
            rows.append(Row(id=name, label=label, metrics=metrics))
        return rows

    def evidence_so_far(self) -> Evidence:
        """Return what the four conditions are judged by."""
        seeds = list(self.items[OWN])
        nats = {}
        for name in (OWN, "one"):
            nats[name] = float(np.mean([metrics["new"] for metrics in self.metrics[name].values()]))
        near = [items["locality_near"] for items in self.items["one"].values() if "locality_near" in items]
        kept = [np.mean(list(of_seed.values())) for of_seed in near]
        return Evidence(
            nats=nats,
            bigram_nats=float(np.mean([self.bigram_nats(seed) for seed in seeds])),
            lost_shares={"locality_near": 1 - float(np.mean(kept))} if kept else {},
            searches={OWN: self.searches[OWN], "one": self.searches[ALL], **self.mixture_rates},
            declared=DECLARED,
            decisions=decide(DECLARED, self.items),
        )

    def conditions(self, evidence: Evidence) -> list[Condition]:
        """Return the four conditions. The third one also demands that mixtures have the rate that is best for them."""
        learned, lost, searched, declared = conditions(evidence)
        worse = [name for name, search in self.mixture_rates.items() if search.best != self.rate(OWN)]
        if worse and searched.met:
            reason = f"{searched.reason}; measured with {self.rate(OWN):g}: {', '.join(worse)}"
            searched = Condition(searched.name, False, reason)
        return [learned, lost, searched, declared]

    def write_results(self) -> Results:
        """Write the results of all rows."""
        evidence = self.evidence_so_far()
        judged = self.conditions(evidence)
        decided = all(condition.met for condition in judged)
        details = {
            "precision": self.precision,
            "search": rounded_scores(self.searches),
            "mixture_rates": rounded_scores(self.mixture_rates),
            "settings": self.settings,
            "chosen": {name: self.setting(name) for name in ROWS},
            "conditions": [asdict(condition) for condition in judged],
            "comparisons": [described(decision, is_decided=decided) for decision in evidence.decisions],
            "by_seed": {name: [shares(items) for items in found.values()] for name, found in self.items.items()},
            "seconds": self.seconds,
        }
        return self.write(NAME, self.rows(), seeds=tuple(self.items[OWN]), details=details)


def run(options: Options) -> Results:
    """Search rates and settings on other facts, then measure all rows with every seed."""
    check_files(options, FILES)
    study = WorldsStudy(options)
    study.search()
    for seed in study.seeds:
        study.measure(seed)
        study.write_results()
    return study.write_results()
