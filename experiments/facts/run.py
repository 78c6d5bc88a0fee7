"""Invented facts are taught to a chat model by conversation: which method learns them, and which keeps the rest?

Rates are searched on 16 facts, which no main row learns. The main rows learn 120 facts for three seeds of names and of
weights; the table `large` has two rows of 1,000 facts. The table `pages` has facts of real pages, and results of its
own. The results are written after every row, from the rows that are there.

The judged answers are written to `items.json` beside the results. Rows that were measured earlier are taken from the
`items.json` in this folder, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments import Options
from experiments.facts.answering import AnsweringRun, Asked, answer_tokens, answers_of
from experiments.facts.generator import FactSet, Question
from experiments.facts.items import ITEMS_FILE, RATE, JudgedRows, read_items, write_items
from experiments.facts.kept import FILES, far_questions, instruction_prompts, known_words
from experiments.facts.lookup import behind_router, lookup_answers, most_frequent_answers, opened
from experiments.facts.metrics import Answers, Items, is_right, judge, shares
from experiments.facts.page_facts import PageFacts, TaughtFacts
from experiments.facts.page_tables import opened_shares, rows_of_pages, worst_answers
from experiments.facts.rows import (
    COMPARED_ON_PAGES,
    CONFIRMATION_SEEDS,
    DECLARED,
    DEFAULT,
    EVERY_ROW,
    LARGE,
    MAIN,
    OF_PAGES,
    PROMPTED,
    SCALED,
    SEARCH_SEED,
    STRENGTHS,
    TRAINED,
    UNTRAINED,
    amended,
    label_of,
    trained_rows,
)
from experiments.facts.sizes import PAGES, SIZES, Size
from experiments.facts.summaries import aims_of, over_seeds, plots_of, rounded_scores, search_score
from experiments.facts.training import data_of, training_of
from experiments.precision import Precision, training_precision
from experiments.protocol import (
    BigramTable,
    Evidence,
    conditions,
    decide,
    described,
    is_decided,
    search_rate,
)
from experiments.study import Study, check_files, write_lines
from graftlm.backbone.load import BackboneConfig
from graftlm.evaluation import Aim, Metric, Results, Row, value_of
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.evaluation.taught_answers import evenly_spaced
from graftlm.grafts import graft_config
from graftlm.runs.shared import load_shared
from graftlm.training.config import TrainingConfig

NAME = "facts"
MODEL = "smollm2-135m-instruct"
SEEDS = CONFIRMATION_SEEDS
"""The seeds if the options name none."""
TABLES = ("search", "main", "large", PAGES)
BACKBONE = "backbone"
"""Id of the row of the bare backbone."""
EARLIER_ITEMS = Path(__file__).with_name(ITEMS_FILE)
"""Judged answers that were measured earlier."""
CONSTANT_OF_BACKBONE = ("locality_", "unchanged", "spill")
"""How the names of metrics begin that compare the backbone with itself."""


class FactsStudy(Study):
    """The runs of the experiment.

    Args:
        options: options of the experiment.
        named: the rows to measure.
        table: the table of the results, `main` or `pages`.

    Attributes:
        backbone: config of the backbone.
        scaled: rows that also answer with their weights scaled back.
        precision: the precision of training on this machine.
        strength: the strength of scaled rows that the search chose.
        judged_rows: the judged answers of each row and seed, further metrics, and the searches.
        answers: for each row and seed that this study measured, the answers.
    """

    def __init__(self, options: Options, named: Sequence[str], table: str = "main") -> None:
        super().__init__(options)
        self.table = table
        self.backbone = BackboneConfig(
            name=options.backbone or MODEL, dtype="float32", device=options.device, attn_implementation="eager"
        )
        self.scaled = {SCALED[row] for row in named if row in SCALED}
        self.precision: Precision = training_precision(options.device)
        self.strength = STRENGTHS[0]
        self.judged_rows = JudgedRows()
        self.search_rows: dict[str, dict[str, float]] = {}
        self.answers: dict[str, dict[int, Answers]] = {}
        self._known = known_words(options.data)
        self._sets: dict[tuple[int, int], TaughtFacts] = {}
        self._written: set[Path] = set()
        self._tokenizer: Any = None
        self._bare: dict[tuple[int, int], Answers] = {}
        self._far: list[Question] = []
        self._far_answers: Answers = {}

    @property
    def tokenizer(self) -> Any:
        """The backbone's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_shared(self.backbone).need_tokenizer()
        return self._tokenizer

    def size(self, table: str) -> Size:
        """Return how much the rows of a table are taught and asked."""
        return Size(self.options.quick, table)

    def facts(self, size: Size, seed: int) -> TaughtFacts:
        """Return the facts of a seed."""
        key = (size.facts, seed)
        if key not in self._sets:
            if size.of_pages:
                self._sets[key] = PageFacts(size.facts, seed)
            else:
                self._sets[key] = FactSet(size.facts, seed, self._known, size.part)
        return self._sets[key]

    def read_earlier(self, path: Path) -> None:
        """Take the rows of the study's seeds, and the searches, that were measured earlier.

        Rows that it has are not measured again.

        Args:
            path: an `items.json`.

        Raises:
            EvaluationError: the file can't be read or is not JSON.
            RecipeError: its content does not have the form of `items.json`, or was judged by other rules.
        """
        self.judged_rows.pool(read_items(path), self.seeds)

    def folder(self, size: Size, seed: int) -> Path:
        """Return the folder of a seed's files, and write them."""
        folder = self.options.out / "facts" / f"{size.facts}_seed{seed}"
        if folder not in self._written:
            facts = self.facts(size, seed)
            write_lines(folder / "conversations.jsonl", facts.conversations())
            write_lines(folder / "unseen.jsonl", self._tested(size, seed))
            (folder / "statements.txt").write_text("\n".join(facts.statements()) + "\n", encoding="utf-8")
            self._written.add(folder)
        return folder

    def _tested(self, size: Size, seed: int) -> list[dict[str, Any]]:
        """Return the conversations by which nats per token are measured, of facts at equal distances."""
        return evenly_spaced(self.facts(size, seed).tested(), size.tested_documents)

    def questions(self, size: Size, seed: int) -> list[Question]:
        """Return the questions that all rows of a size and seed answer."""
        facts = self.facts(size, seed)
        questions = evenly_spaced(facts.trained(), size.trained) + evenly_spaced(facts.unseen(), size.unseen)
        questions += facts.near()[: size.near]
        if not size.is_search:
            questions += facts.further() + self._far + instruction_prompts(self.options.data, size.prompts)
        return questions

    def answering(self, run_id: str, questions: Sequence[Question], size: Size, **fields: Any) -> AnsweringRun:
        """Return a run of the bare backbone that answers questions."""
        return AnsweringRun(
            id=run_id,
            label=fields.pop("label", run_id),
            backbone=self.backbone,
            training=TrainingConfig(steps=0),
            evaluation=EvaluationConfig(own_tokens=0, decode_prompts=0),
            questions=self._asked(run_id, questions, size),
            **fields,
        )

    def _asked(self, name: str, questions: Sequence[Question], size: Size) -> str:
        """Write the questions for a run and return their file."""
        lines = []
        for question in questions:
            tokens = size.prompt_tokens if question.ring == "instructions" else size.answer_tokens
            lines.append(Asked(question.id, question.text, tokens)._asdict())
        path = self.options.out / "questions" / f"{name}.jsonl"
        write_lines(path, lines)
        return str(path)

    def answer_far(self) -> None:
        """Let the bare backbone answer questions without relation to the taught ones, and choose those to ask.

        They are all that it answers right, and some that it does not.
        """
        size = self.size("main")
        candidates = far_questions(self.options.data, size.far_candidates)
        run = self.answering("backbone_far", candidates, size)
        answers = answers_of(self.execute([run], "the backbone")[run.id])
        right = []
        others = []
        for question in candidates:
            if is_right(answers[question.id], question.accepted):
                right.append(question)
            else:
                others.append(question)
        self._far = [*right, *others[: size.far_unchanged]]
        self._far_answers = answers

    def bare_answers(self, size: Size, seed: int) -> Answers:
        """Return the bare backbone's answers to all questions of a size and seed."""
        key = (size.facts, seed)
        if key in self._bare:
            return self._bare[key]
        questions = self.questions(size, seed)
        folder = self.folder(size, seed).name
        kept = [question for question in questions if question.ring in ("near", "instructions")]
        taught = [question for question in questions if question.ring not in ("near", "instructions", "far")]
        runs = [
            self.answering("backbone_near" if size.is_search else f"backbone_kept{size.suffix}", kept, size),
            self.answering(f"backbone_{folder}", taught, size),
        ]
        measured = self.execute(runs, "the backbone")
        answers = dict(self._far_answers)
        for run in runs:
            answers |= answers_of(measured[run.id])
        self._bare[key] = answers
        return answers

    def prompted(self, name: str, size: Size, seed: int) -> AnsweringRun:
        """Return the run of the bare backbone with facts in the prompt."""
        return self.answering(
            f"{name}_{size.facts}_s{seed}",
            self.questions(size, seed),
            size,
            label=label_of(name),
            statements=str(self.folder(size, seed) / "statements.txt"),
            nearest=3 if name == "retrieval" else 0,
        )

    def trained(self, name: str, rate: float, size: Size, seed: int) -> AnsweringRun:
        """Return the run that trains a row at one rate."""
        row = TRAINED[name]
        scaled = name in self.scaled
        run_id = f"{row.shared_with or name}_{size.facts}_lr{rate:g}_s{seed}"
        return AnsweringRun(
            id=run_id,
            label=row.label,
            backbone=self.backbone,
            graft=graft_config(dict(row.graft)),
            data=data_of(row, self.folder(size, seed), size, seed),
            training=training_of(row, rate, size, seed, self.precision),
            evaluation=EvaluationConfig(
                own_tokens=0 if size.is_search else size.kl_tokens,
                decode_prompts=0,
                batch_size=8,
                strengths=list(STRENGTHS) if scaled else [],
            ),
            questions=self._asked(f"{size.facts}_s{seed}", self.questions(size, seed), size),
            moved_back=STRENGTHS if scaled else (),
        )

    def bigram_nats(self, size: Size, seed: int) -> float:
        """Return the nats per token of a bigram table of the taught answers on the test answers."""
        facts = self.facts(size, seed)
        table = BigramTable(answer_tokens(self.tokenizer, facts.conversations()), len(self.tokenizer))
        return table.nats_per_token(answer_tokens(self.tokenizer, self._tested(size, seed)))

    def judged(self, answers: Answers, size: Size, seed: int) -> Items:
        """Return the judged answers of a row."""
        names = self.facts(size, seed).names
        return judge(self.questions(size, seed), answers, self.bare_answers(size, seed), names)

    def search(self, names: Sequence[str]) -> None:
        """Search the rate of rows on other facts than those of the main rows, unless an earlier search is known.

        Raises:
            EvaluationError: the earlier searches of other rows have another precision.
        """
        size = self.size("search")
        for name in names:
            row = TRAINED[name]
            is_known = name in self.judged_rows.searches and name not in self.scaled
            if not row.rates or is_known:
                continue
            self.judged_rows.check_precision(SEARCH_SEED, self.precision)
            rates = row.rates[:1] if self.options.quick else row.rates
            found: dict[float, Items] = {}

            def score(rate: float, name: str = name, found: dict[float, Items] = found) -> float:
                run = self.trained(name, rate, size, SEARCH_SEED)
                measurement = self.execute([run], f"search of {name}")[run.id]
                found[rate] = self.judged(answers_of(measurement), size, SEARCH_SEED)
                self.search_rows[f"{name} {rate:g}"] = {
                    **shares(found[rate]),
                    **{key: value_of(value) for key, value in _training_metrics(measurement, run).items()},
                }
                return search_score(found[rate], TRAINED[name].searched_by)

            search = search_rate(score, rates, limit=len(rates) if self.options.quick else 6)
            self.judged_rows.add_search(name, search, self.precision)
            if name in self.scaled:
                self._search_strength(name, search.best, size)

    def _search_strength(self, name: str, rate: float, size: Size) -> None:
        """Choose the strength at which a row is scaled back, at its best rate."""
        run = self.trained(name, rate, size, SEARCH_SEED)
        measurement = self.measured[run.id]
        scores = {}
        for strength in STRENGTHS:
            items = self.judged(answers_of(measurement, strength), size, SEARCH_SEED)
            self.search_rows[f"{name} at {strength:g}"] = shares(items)
            scores[strength] = search_score(items)
        self.strength = max(scores, key=scores.__getitem__)

    def measure_prompted(self, name: str, size: Size, seed: int) -> None:
        """Measure a row with facts in the prompt."""
        self._keep(name, seed, self._prompted_answers(name, size, seed), {}, size)

    def _prompted_answers(self, name: str, size: Size, seed: int) -> Answers:
        run = self.prompted(name, size, seed)
        measurement = self.execute([run], f"{name}, seed {seed}")[run.id]
        return answers_of(measurement)

    def measure_untrained(self, name: str, size: Size, seed: int) -> None:
        """Measure a row without training behind the router."""
        backbone = load_shared(self.backbone)
        facts = self.facts(size, seed)
        questions = self.questions(size, seed)
        bare = self.bare_answers(size, seed)
        if name == "routed-lookup":
            answers = lookup_answers(backbone, facts, questions, bare)
        elif name == "routed-majority":
            frequent = most_frequent_answers(facts, questions)
            answers = behind_router(backbone, facts, questions, frequent, bare)
        else:
            retrieved = self._prompted_answers("retrieval", size, seed)
            answers = behind_router(backbone, facts, questions, retrieved, bare)
        self._keep(name, seed, answers, {}, size)

    def measure_trained(self, name: str, size: Size, seed: int, wanted: Sequence[str]) -> None:
        """Train a row, and judge it and the wanted rows that follow from it.

        Without a search, a row by the recipe has its rate. Any other row has the second of the rates with which the
        search would begin.
        """
        if name in self.judged_rows.searches:
            rate = self.judged_rows.searches[name].best
        else:
            rate = DEFAULT.training.learning_rate if TRAINED[name].by_recipe else TRAINED[name].rates[1]
        run = self.trained(name, rate, size, seed)
        measurement = self.execute([run], f"{name}, seed {seed}")[run.id]
        metrics = _training_metrics(measurement, run)
        answers = answers_of(measurement)
        if name in wanted:
            self._keep(name, seed, answers, metrics, size)
        for row in wanted:
            if SCALED.get(row) == name:
                self._keep(row, seed, answers_of(measurement, self.strength), {}, size)

    def measure(self, named: Sequence[str], table: str, seed: int) -> None:
        """Measure the named rows of a table for one seed, and write the results after every training.

        Rows that were measured earlier are left out.

        Raises:
            EvaluationError: the rows that were measured earlier for this seed have another precision.
        """
        size = self.size(table)
        missing = [name for name in named if not self.judged_rows.has(f"{name}{size.suffix}", seed)]
        if missing:
            self.judged_rows.check_precision(seed, self.precision)
        for name in PROMPTED:
            if name in missing:
                self.measure_prompted(name, size, seed)
        for name in UNTRAINED:
            if name in missing:
                self.measure_untrained(name, size, seed)
        for name in trained_rows(tuple(missing)):
            self.measure_trained(name, size, seed, missing)
            self.write_so_far()

    def _keep(self, name: str, seed: int, answers: Answers, metrics: Mapping[str, Metric], size: Size) -> None:
        row = f"{name}{size.suffix}"
        numbers = {key: value_of(value) for key, value in metrics.items()}
        self.judged_rows.add(row, seed, self.judged(answers, size, seed), numbers, self.precision)
        self.answers.setdefault(row, {})[seed] = answers

    def backbone_row(self, size: Size) -> Row:
        """Return the row of the bare backbone, for the seeds of the other rows."""
        for seed in self.judged_rows.seeds:
            if not self.judged_rows.has(BACKBONE, seed):
                answers = self.bare_answers(size, seed)
                self.judged_rows.add(BACKBONE, seed, self.judged(answers, size, seed), {}, self.precision)
        metrics = over_seeds(list(self.judged_rows.items[BACKBONE].values()))
        for name in metrics:
            if name.startswith(CONSTANT_OF_BACKBONE):
                metrics[name] = value_of(metrics[name])
        return Row(id=BACKBONE, label="backbone", metrics=metrics)

    def rows(self) -> list[Row]:
        """Return the rows that were measured so far."""
        rows = []
        large = self.size("large")
        labels = {name: label_of(name) for name in EVERY_ROW}
        for name in LARGE:
            labels[f"{name}{large.suffix}"] = f"{label_of(name)}, {SIZES['large']:,} facts"
        for name, label in labels.items():
            if name not in self.judged_rows.items:
                continue
            metrics = over_seeds(list(self.judged_rows.items[name].values()))
            further = list(self.judged_rows.metrics[name].values())
            for key in further[0]:
                metrics[key] = float(np.mean([of_seed[key] for of_seed in further if key in of_seed]))
            rows.append(Row(id=name, label=label, metrics=metrics))
        return rows

    def evidence_so_far(self) -> Evidence:
        """Return what the four conditions are judged by."""
        size = self.size(self.table)
        seeds = self.judged_rows.seeds
        items = {name: by_seed for name, by_seed in self.judged_rows.items.items() if name in EVERY_ROW}
        nats = {}
        for name in items:
            by_seed = self.judged_rows.metrics[name]
            values = [metrics["new"] for metrics in by_seed.values() if "new" in metrics]
            if values:
                nats[name] = float(np.mean(values))
        lost = {}
        if "lora" in items:
            for metric in ("locality_near", "locality_far"):
                by_seed = items["lora"].values()
                kept = [np.mean(list(of_seed[metric].values())) for of_seed in by_seed if metric in of_seed]
                if kept:
                    lost[metric] = 1 - float(np.mean(kept))
        declared = COMPARED_ON_PAGES if size.of_pages else DECLARED
        return Evidence(
            nats=nats,
            bigram_nats=float(np.mean([self.bigram_nats(size, seed) for seed in seeds])),
            lost_shares=lost,
            searches=self.judged_rows.searches,
            declared=declared,
            decisions=decide(declared, items),
            amended="chosen after the run" if size.of_pages else amended(seeds),
        )

    def write_so_far(self) -> Results:
        """Write the results of the rows that were measured so far, and their judged answers to `items.json`."""
        size = self.size(self.table)
        rows = self.rows()
        details: dict[str, Any] = {
            "search": rounded_scores(self.judged_rows.searches),
            "search_rows": self.search_rows,
            "seconds": self.seconds,
        }
        aims: list[Aim] = []
        if rows:
            rows = [self.backbone_row(size), *rows]
            evidence = self.evidence_so_far()
            if not size.of_pages:
                details["conditions"] = [asdict(condition) for condition in conditions(evidence)]
            details["comparisons"] = [
                described(decision, is_decided=is_decided(evidence)) for decision in evidence.decisions
            ]
            details["bigram_nats"] = evidence.bigram_nats
            details["precisions"] = {str(seed): name for seed, name in self.judged_rows.precisions.items()}
            details["by_seed"] = self._shares_by_seed()
            aims = aims_of(rows)
        if size.of_pages and "routed" in self.answers:
            rows += self._rows_of_pages(size)
            details |= self._details_of_pages(size)
        write_items(self.judged_rows, self.options.out)
        seeds = self.judged_rows.seeds or self.seeds
        return self.write(NAME, rows, seeds=seeds, aims=aims, details=details, plots=plots_of(rows))

    def _shares_by_seed(self) -> dict[str, list[dict[str, float]]]:
        """Return the shares of each row but the backbone, in the order of the seeds."""
        by_seed = {}
        for name, of_row in self.judged_rows.items.items():
            if name != BACKBONE:
                by_seed[name] = [shares(items) for _, items in sorted(of_row.items())]
        return by_seed

    def _rows_of_pages(self, size: Size) -> list[Row]:
        """Return what `routed` learned and lost on each page, with the first seed."""
        seed = self.seeds[0]
        facts = self.facts(size, seed)
        assert isinstance(facts, PageFacts)
        questions = self.questions(size, seed)
        opening = opened(load_shared(self.backbone), facts, questions)
        return rows_of_pages(facts, questions, self.judged_rows.items["routed"][seed], opening)

    def _details_of_pages(self, size: Size) -> dict[str, Any]:
        """Return where the router opens, and the worst answers of `routed` with the first seed."""
        seed = self.seeds[0]
        main = self.size("main")
        facts = self.facts(size, seed)
        backbone = load_shared(self.backbone)
        questions = self.questions(size, seed)
        taught = [question for question in questions if question.ring != "far"]
        far = far_questions(self.options.data, main.far_candidates)
        routed = [*taught, *far, *instruction_prompts(self.options.data, main.prompts)]
        return {
            "opened": opened_shares(routed, opened(backbone, facts, routed)),
            "worst": worst_answers(questions, self.answers["routed"][seed], self.bare_answers(size, seed)),
        }


def _training_metrics(measurement: Measurement, run: AnsweringRun) -> dict[str, Metric]:
    """Return what training cost and the metrics on texts."""
    metrics: dict[str, Metric] = {}
    for name in ("new", "learned", "own_kl", "chat_kl", "trainable_parameters"):
        if name in measurement.row.metrics:
            metrics[name] = measurement.row.metrics[name]
    last_step, _ = measurement.details["losses"][-1]
    tokens = last_step * run.training.batch_size * run.data.length
    metrics["tokens"] = tokens
    metrics[RATE] = run.training.learning_rate
    metrics["seconds"] = tokens / value_of(measurement.row.metrics["train_tokens_per_s"])
    return metrics


def run_pages(options: Options, named: Sequence[str]) -> Results:
    """Measure rows on facts of real pages, with results in a folder of their own."""
    study = FactsStudy(options.model_copy(update={"out": options.out / PAGES}), named, PAGES)
    study.answer_far()
    for seed in study.seeds:
        study.measure(named, PAGES, seed)
    return study.write_so_far()


def run(options: Options) -> Results:
    """Search the rates on 16 facts, then measure the main rows on 120.

    If requested, also measure two rows on 1,000 facts, and rows on facts of real pages.
    """
    check_files(options, FILES)
    chosen = options.chosen((*TABLES, *EVERY_ROW), (*TABLES, *MAIN))
    rows = tuple(name for name in chosen if name in EVERY_ROW)
    tables = [name for name in chosen if name in TABLES] or ["search", "main"]
    if PAGES in tables:
        results = run_pages(options, rows or OF_PAGES)
        if tables == [PAGES]:
            return results
    named = rows or MAIN
    study = FactsStudy(options, named)
    if EARLIER_ITEMS.exists() and not options.quick and options.backbone is None:
        study.read_earlier(EARLIER_ITEMS)
    if "search" in tables:
        study.search(trained_rows(named))
    if tables == ["search"]:
        return study.write_so_far()
    study.answer_far()
    if "main" in tables:
        for seed in study.seeds:
            study.measure(named, "main", seed)
    if "large" in tables:
        study.measure([name for name in LARGE if name in named], "large", study.seeds[0])
    return study.write_so_far()
