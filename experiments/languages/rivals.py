"""Rivals at equal size, data and search: which learns Danish from conversations, and what does each one retain?

Every conversation asks to continue a sentence of a news document in Danish, and the answer is the sentence that
follows. All rows read the same new text, and all but one a quarter of distilled own text. The rate of each row is
searched on other documents and on WikiText's validation text, by the sum of both losses.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.facts.generator import conversation
from experiments.languages.retention import retention
from experiments.languages.texts import (
    DOCUMENTS,
    ENGLISH_NEWS,
    NEWS,
    news_documents,
    split_documents,
    write_continuations,
)
from experiments.precision import Precision, training_precision
from experiments.protocol import RateSearch, search_rate
from experiments.study import Study, all_runs, check_files, metric, over_seeds, write_lines
from graftlm.data.chats import render_question
from graftlm.evaluation import Results, Row, value_of
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.recipe import Recipe
from graftlm.runs.rewriting_run import RewritingRun
from graftlm.runs.run import Run
from graftlm.runs.shared import load_shared
from graftlm.store.artifact import load_graft

NAME = "languages"
RIVALS = "rivals"
MODEL = "smollm2-135m-instruct"
WIKITEXT = "lm_text/wikitext2_valid_test"
IFEVAL = "eval/ifeval/input_data.jsonl"
PROBLEMS = "routing/math/gsm8k/train.jsonl"
FILES = (NEWS["da"], ENGLISH_NEWS, DOCUMENTS, PROBLEMS, f"{WIKITEXT}/valid.txt", f"{WIKITEXT}/test.txt")
NEUTRAL = {"kind": "neutral-residues", "capacity": 0.1064, "alpha": 1.0, "init": "he"}
"""Of the size of OFT's largest blocks on all Linears."""
LORA = {"kind": "lora", "capacity": "match"}
OFT = {"kind": "peft", "method": "OFT", "capacity": "match", "options": {"target_modules": "all-linear"}}
PLAIN = "lora-plain"
SWITCHED = "switched"
SCALED = "oft"
STEPS = 60
SEARCH_STEPS = 30
ROWS_PER_STEP = 4
LENGTH = 256
PARTS = {"new": 70, "strength": 10, "valid": 15}
"""Number of news documents of each part, in their order; the others are the test."""
ENGLISH_EXAMPLES = 200
"""Number of examples of each kind of English text that the switch of languages knows."""
_PARAGRAPH_CHARACTERS = 300

ROWS: dict[str, dict[str, Any]] = {
    "neutral": {"label": "neutral residues", "graft": NEUTRAL},
    "lora": {"label": "LoRA", "graft": LORA},
    PLAIN: {"label": "LoRA without old text", "graft": LORA, "data": {"replay_fraction": 0, "old": []}},
    "anchor": {"label": "LoRA with a KL anchor", "graft": LORA, "data": {"anchor": 0.1}},
    "asft": {"label": "ASFT", "graft": LORA, "data": {"new_objective": "dft", "anchor": 0.1}},
    "sdft": {"label": "SDFT", "graft": LORA, "data": {"rewrite": {}}},
    SCALED: {"label": "OFT, moved back as validation says", "graft": OFT},
    SWITCHED: {"label": "LoRA behind a switch of languages"},
}
MOST_RATES = 4
LORA_RATES = (1e-3, 2e-3, 4e-3)
RATES = dict.fromkeys(ROWS, LORA_RATES) | {"neutral": (6e-3, 1.2e-2, 2.4e-2), SCALED: (1.25e-4, 2.5e-4, 5e-4)}
"""The rates to begin with: three each. With 1e-3 OFT loses 1.5 nats of validation text."""


class RivalsStudy(Study):
    """The runs of the comparison.

    Args:
        options: options of the experiment.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        folder = options.out / "texts"
        documents = split_documents(news_documents(options.data, NEWS["da"]), PARTS, "test")
        english = split_documents(news_documents(options.data, ENGLISH_NEWS), PARTS, "test")
        if options.quick:
            documents["new"] = documents["new"][:4]
        files = {part: folder / f"{part}.jsonl" for part in documents}
        for part, file in files.items():
            write_continuations(documents[part], "Fortsæt teksten:", file)
        self._files = files
        wikitext = (options.data / WIKITEXT / "valid.txt").read_text(encoding="utf-8")
        middle = len(wikitext) // 2
        self._old_strength = folder / "old-strength.txt"
        self._old_strength.write_text(wikitext[:middle], encoding="utf-8")
        self._old_valid = folder / "old-valid.txt"
        self._old_valid.write_text(wikitext[middle:], encoding="utf-8")
        self._english = self._write_english(folder, english["new"], wikitext)
        self.searches: dict[str, RateSearch] = {}
        self.precision: Precision = training_precision(options.device)

    def _write_english(self, folder: Path, news: Sequence[Sequence[str]], wikitext: str) -> list[dict[str, str]]:
        """Write the English examples of the switch: continuations, word problems and paragraphs."""
        continuations = write_continuations(news, "Continue the text:", folder / "english-news.jsonl", ENGLISH_EXAMPLES)
        lines = (self.options.data / PROBLEMS).read_text(encoding="utf-8").splitlines()[:ENGLISH_EXAMPLES]
        problems = []
        for line in lines:
            row = json.loads(line)
            problems.append(conversation(row["question"], row["answer"]))
        write_lines(folder / "english-problems.jsonl", problems)
        paragraphs = [line.strip() for line in wikitext.splitlines() if len(line) > _PARAGRAPH_CHARACTERS]
        texts = [{"text": paragraph} for paragraph in paragraphs[:ENGLISH_EXAMPLES]]
        write_lines(folder / "english-paragraphs.jsonl", texts)
        chats = [_conversations(continuations), _conversations(folder / "english-problems.jsonl")]
        return [*chats, {"path": str(folder / "english-paragraphs.jsonl")}]

    def run(self, name: str, rate: float, seed: int, *, searched: bool) -> GraftRun:
        """Return the run of a row at a rate, on the texts of the search or of the test."""
        part = "search" if searched else "test"
        methods = {name: self._method(name)}
        recipe = Recipe.parse(
            {
                "backbone": self._backbone(),
                "graft": NEUTRAL,
                "methods": methods,
                "data": self._data(seed, searched=searched),
                "training": self._training(rate, seed, searched=searched),
                "evaluation": self._evaluation(name, searched=searched),
            }
        )
        (run,) = recipe.comparison()
        return run.model_copy(update={"id": f"{name}_{part}_lr{rate:g}_s{seed}"})

    def backbone_runs(self, seed: int) -> list[Run]:
        """Return the runs of the bare backbone on the texts of the test."""
        recipe = Recipe.parse(
            {
                "backbone": self._backbone(),
                "graft": NEUTRAL,
                "data": self._data(seed, searched=False),
                "training": self._training(1e-3, seed),
                "evaluation": self._evaluation("neutral", searched=False),
            }
        )
        return recipe.backbone_runs()

    def _backbone(self) -> dict[str, Any]:
        backbone = {"name": self.options.backbone or MODEL, "dtype": "float32"}
        if self.options.device:
            backbone["device"] = self.options.device
        return backbone

    def _method(self, name: str) -> dict[str, Any]:
        method = dict(ROWS[name])
        if name == SWITCHED:
            method["graft"] = self._switched()
        return method

    def _switched(self) -> dict[str, Any]:
        """Return a LoRA expert for Danish beside the bare backbone for English, of the rank of the row `lora`."""
        recipe = Recipe.parse(
            {
                "backbone": self._backbone(),
                "graft": NEUTRAL,
                "methods": {"lora": ROWS["lora"]},
                "data": self._data(0, searched=True),
                "training": self._training(1e-3, 0),
            }
        )
        (run,) = recipe.comparison()
        assert run.graft is not None
        rank = run.graft.model_dump()["rank"]
        return {
            "kind": "token-routing",
            "experts": {
                "danish": {"rank": rank, "targets": ["ffn"]},
                "english": {"bare": True, "sources": self._english},
            },
            "embedder": {"name": "backbone", "layers": 1 if self.options.quick else 4},
            "reads": "prompt",
            "top": 1,
        }

    def _training(self, rate: float, seed: int, *, searched: bool = False) -> dict[str, Any]:
        steps = 2 if self.options.quick else SEARCH_STEPS if searched else STEPS
        return {
            "steps": steps,
            "batch_size": ROWS_PER_STEP,
            "learning_rate": rate,
            "warmup_steps": steps // 10,
            "seed": seed,
            "checkpoint_every": 20,
            "keep_checkpoints": 1,
            "precision": self.precision,
        }

    def _data(self, seed: int, *, searched: bool) -> dict[str, Any]:
        new = self._files["valid" if searched else "test"]
        old = self._old_valid if searched else self.options.data / WIKITEXT / "test.txt"
        return {
            "new": [_conversations(self._files["new"])],
            "old": [{"self": True, "tokens": 300 if self.options.quick else 12_000}],
            "replay_fraction": 0.25,
            "old_objective": "distil",
            "length": LENGTH,
            "boundaries": "whole",
            "test": {
                "new": [_conversations(new)],
                "old": [{"path": str(old), "limit_characters": 60_000}],
            },
            "seed": seed,
        }

    def _evaluation(self, name: str, *, searched: bool) -> dict[str, Any]:
        quick = self.options.quick
        values: dict[str, Any] = {
            "limit_tokens": 300 if quick else 3072 if searched else 6144,
            "own_tokens": 0 if searched else 200 if quick else 2048,
            "decode_prompts": 0,
            "batch_size": 8,
        }
        if name == SCALED and not searched:
            old = {"path": str(self._old_strength), "limit_characters": 20_000}
            values["strength"] = {"old": [old], "new": [_conversations(self._files["strength"])]}
        if not searched:
            values |= retention(self.options)
        return values

    def _first_rates(self, name: str) -> Sequence[float]:
        return RATES[name][:1] if self.options.quick else RATES[name]

    def search(self, names: Collection[str]) -> None:
        """Search the rate of some rows with seed 0, by the sum of both losses on the texts of the search.

        The first rates of all rows are tried in one call, in which the runs share the backbone and its losses.
        """
        runs = [self.run(name, rate, 0, searched=True) for name in names for rate in self._first_rates(name)]
        self.execute(runs, "first rates")
        for name in names:
            self.searches[name] = self._search_row(name)

    def sent_to_the_adapter(self) -> dict[str, float]:
        """Return the share of Danish test prompts, and of IFEval's prompts, that the switch sends to its adapter."""
        run = self.run(SWITCHED, self.searches[SWITCHED].best, self.seeds[0], searched=False)
        backbone = load_shared(run.backbone)
        graft: Any = load_graft(self.runs / run.id / "graft", backbone)
        danish = [row["messages"][0]["content"] for row in _lines(self._files["test"])]
        sets = {"danish": danish}
        ifeval = self.options.data / IFEVAL
        if ifeval.exists():
            sets["ifeval"] = [row["prompt"] for row in _lines(ifeval)]
        tokenizer = backbone.need_tokenizer()
        shares = {}
        for name, questions in sets.items():
            sent = 0
            for question in questions:
                rendered = render_question([{"role": "user", "content": question}], tokenizer)
                sent += graft.choose(tokenizer(rendered, add_special_tokens=False)["input_ids"]) == "danish"
            shares[name] = sent / len(questions)
        return shares

    def rewriting(self) -> dict[str, float]:
        """Return how many answers of the new text were rewritten, and why others were not."""
        run = self.run("sdft", self.searches["sdft"].best, self.seeds[0], searched=False)
        counts = {}
        for needed in run.needs():
            if isinstance(needed, RewritingRun):
                measured = self.execute([needed], "rewritten answers")[needed.id]
                counts = {name: value_of(value) for name, value in measured.row.metrics.items()}
        return counts

    def _search_row(self, name: str) -> RateSearch:
        def score(rate: float) -> float:
            run = self.run(name, rate, 0, searched=True)
            measurement = self.execute([run], f"search of {name}")[run.id]
            return -metric(measurement, "new") - metric(measurement, "old")

        rates = self._first_rates(name)
        return search_rate(score, rates, limit=len(rates) if self.options.quick else MOST_RATES)

    def measure(self, names: Collection[str]) -> list[Row]:
        """Train rows at their best rates with every seed, and return them."""
        runs = {}
        for name in names:
            rate = self.searches[name].best
            runs[name] = [self.run(name, rate, seed, searched=False) for seed in self.seeds]
        self.execute([*self.backbone_runs(self.seeds[0])[1:], *all_runs(runs)], "best rates")
        rows = []
        for name, of_row in runs.items():
            measurements = [self.measured[run.id] for run in of_row]
            rows.append(over_seeds(measurements, name, ROWS[name]["label"]))
        return rows


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _conversations(file: Path) -> dict[str, str]:
    return {"path": str(file), "messages_column": "messages"}


def run_rivals(options: Options) -> Results:
    """Search and train every row, with results in a folder of their own."""
    check_files(options, FILES)
    study = RivalsStudy(options.model_copy(update={"out": options.out / RIVALS}))
    bare, *_ = study.backbone_runs(study.seeds[0])
    measured = study.execute([bare], "the bare backbone")
    study.search(ROWS)
    rows = [measured[bare.id].row, *study.measure(ROWS)]
    return study.write(NAME, rows, details=_details(study))


def _details(study: RivalsStudy) -> dict[str, Any]:
    """Return the searches, the shares of prompts that the switch sends to its adapter, and counts of rewriting."""
    return {
        "seconds": study.seconds,
        "precision": study.precision,
        "search": {name: search.details() for name, search in study.searches.items()},
        "sent_to_the_adapter": study.sent_to_the_adapter(),
        "rewriting": study.rewriting(),
    }
