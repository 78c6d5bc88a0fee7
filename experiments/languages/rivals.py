"""Rivals at equal size, data and search: which learns Danish from conversations, and what does each one retain?

Every conversation asks to continue one or two sentences, and the answer is the sentence that follows in a treebank. All
rows read the same new and old text. The rate of each row is searched on other sentences of the treebank and on
WikiText's validation text, by the sum of both losses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.languages.retention import retention
from experiments.languages.texts import NEWS, treebank_sentences, write_continuations
from experiments.precision import Precision, training_precision
from experiments.protocol import RateSearch, search_rate
from experiments.study import Study, all_runs, metric, over_seeds
from graftlm.evaluation import Results, Row
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.recipe import Recipe
from graftlm.runs.run import Run

NAME = "languages"
RIVALS = "rivals"
MODEL = "smollm2-135m-instruct"
TREEBANK = "ner/uner_da/da_ddt-ud-train.iob2"
WIKITEXT = "lm_text/wikitext2_valid_test"
NEUTRAL = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 1.0, "init": "he"}
LORA = {"kind": "lora", "capacity": "match"}
OFT = {"kind": "peft", "method": "OFT", "capacity": "match", "options": {"target_modules": "all-linear"}}
"""On the Linears of the FFNs alone, its largest block has 57% of the weights of the other rows."""
SWITCHED = "switched"
SCALED = "oft"
STEPS = 60
SEARCH_STEPS = 30
ROWS_PER_STEP = 4
LENGTH = 256
HELD_OUT = 400
"""Number of sentences at the end of the treebank that are not trained on: a half for strengths, a half for rates."""

ROWS: dict[str, dict[str, Any]] = {
    "neutral": {"label": "neutral residues", "graft": NEUTRAL},
    "lora": {"label": "LoRA", "graft": LORA},
    "asft": {"label": "ASFT", "graft": LORA, "data": {"new_objective": "dft", "anchor": 0.1}},
    "sdft": {"label": "SDFT", "graft": LORA, "data": {"rewrite": {}}},
    SCALED: {"label": "OFT, moved back as validation says", "graft": OFT},
    SWITCHED: {"label": "LoRA behind a switch of languages"},
}
LORA_RATES = (1e-3, 2e-3, 4e-3)
RATES = {
    "neutral": (3e-3, 6e-3, 1.2e-2),
    "lora": LORA_RATES,
    "asft": LORA_RATES,
    "sdft": LORA_RATES,
    SCALED: (1e-3, 2e-3, 4e-3),
    SWITCHED: LORA_RATES,
}


class RivalsStudy(Study):
    """The runs of the comparison.

    Args:
        options: options of the experiment.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        sentences = list(treebank_sentences(options.data / TREEBANK))
        news = (options.data / NEWS["da"]).read_text(encoding="utf-8").splitlines()
        if options.quick:
            sentences = sentences[: HELD_OUT + 40]
        folder = options.out / "texts"
        half = HELD_OUT // 2
        self._new = write_continuations(sentences[:-HELD_OUT], folder / "new.jsonl")
        self._strength = write_continuations(sentences[-HELD_OUT:-half], folder / "strength.jsonl")
        self._valid = write_continuations(sentences[-half:], folder / "valid.jsonl")
        self._test = write_continuations(news, folder / "test.jsonl")
        wikitext = (options.data / WIKITEXT / "valid.txt").read_text(encoding="utf-8")
        middle = len(wikitext) // 2
        self._old_strength = folder / "old-strength.txt"
        self._old_strength.write_text(wikitext[:middle], encoding="utf-8")
        self._old_valid = folder / "old-valid.txt"
        self._old_valid.write_text(wikitext[middle:], encoding="utf-8")
        self.searches: dict[str, RateSearch] = {}
        self.precision: Precision = training_precision(options.device)

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
        english = {"path": str(self._old_strength), "limit_characters": 40_000}
        return {
            "kind": "token-routing",
            "experts": {
                "danish": {"rank": rank, "targets": ["ffn"]},
                "english": {"bare": True, "sources": [english]},
            },
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
        new = self._valid if searched else self._test
        old = self._old_valid if searched else self.options.data / WIKITEXT / "test.txt"
        return {
            "new": [_conversations(self._new)],
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
        if name == SCALED:
            old = {"path": str(self._old_strength), "limit_characters": 20_000}
            values["strength"] = {"old": [old], "new": [_conversations(self._strength)]}
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

    def _search_row(self, name: str) -> RateSearch:
        def score(rate: float) -> float:
            run = self.run(name, rate, 0, searched=True)
            measurement = self.execute([run], f"search of {name}")[run.id]
            return -metric(measurement, "new") - metric(measurement, "old")

        rates = self._first_rates(name)
        return search_rate(score, rates, limit=len(rates) if self.options.quick else 6)

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


def _conversations(file: Path) -> dict[str, str]:
    return {"path": str(file), "messages_column": "messages"}


def run_rivals(options: Options) -> Results:
    """Search and train every row, with results in a folder of their own."""
    study = RivalsStudy(options.model_copy(update={"out": options.out / RIVALS}))
    bare, *_ = study.backbone_runs(study.seeds[0])
    measured = study.execute([bare], "the bare backbone")
    study.search(ROWS)
    rows = [measured[bare.id].row, *study.measure(ROWS)]
    return study.write(NAME, rows, details=_details(study))


def _details(study: RivalsStudy) -> dict[str, Any]:
    search = {}
    for name, found in study.searches.items():
        search[name] = {f"{rate:g}": round(value, 4) for rate, value in found.scores.items()}
    return {"seconds": study.seconds, "precision": study.precision, "search": search}
