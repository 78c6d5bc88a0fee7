"""SmolLM2 learns German, French and Python one after the other: does a graft for each keep what the others know?

Rates and settings are those that `keep-smollm2` chose on validation texts for German; no row is searched here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import Options
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds
from graftlm.evaluation import Aim, Results, Row
from graftlm.evaluation.measurement import Measurement
from graftlm.runs.recipe import GrowthRecipe
from graftlm.runs.run import Run

NAME = "grow-smollm2"
MODEL = "smollm2-135m-instruct"
WIKITEXT, ENGLISH = "lm_text/wikitext2_valid_test/test.txt", "lm_text/eltec_eng.jsonl"
TEXTS = {
    "de": ("lm_text/eltec_deu.jsonl", "0:20", "21:22"),
    "fr": ("lm_text/eltec_fra.jsonl", "0:20", "29:30"),
    "py": ("routing/code/thealgorithms_py.jsonl", "0:900", "1000:1100"),
}
FILES = (WIKITEXT, ENGLISH, *(file for file, _, _ in TEXTS.values()))
NEUTRAL = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 1.0, "init": "he"}
LORA = {"kind": "lora", "capacity": 0.1, "scale": 2.0}
RATES = {"neutral-residues": 6e-3, "lora": 1e-3}
ALL = tuple(TEXTS)
ROWS: dict[str, tuple[tuple[str, ...], dict[str, Any], float]] = {
    "alone_de": (("de",), NEUTRAL, 0.25),
    "alone_fr": (("fr",), NEUTRAL, 0.25),
    "alone_py": (("py",), NEUTRAL, 0.25),
    "together": (ALL, NEUTRAL, 0.25),
    "lora_sequential": (ALL, LORA, 0.25),
    "lora_sequential_wide": (ALL, LORA | {"capacity": 0.3}, 0.25),  # as many weights as three grafts
    "lora_sequential_plain": (ALL, LORA, 0.0),
}
LABELS = {
    "alone_de": "German alone",
    "alone_fr": "French alone",
    "alone_py": "Python alone",
    "together": "three grafts together",
    "lora_sequential": "one LoRA, one after the other",
    "lora_sequential_wide": "one LoRA of three times the size",
    "lora_sequential_plain": "one LoRA, without old text",
}


class GrowStudy(Study):
    """The runs of the experiment."""

    def recipe(self, languages: Sequence[str], graft: Mapping[str, Any], seed: int, replay: float) -> GrowthRecipe:
        """Growth by these languages in order; one graft trained further where it is a LoRA."""
        data, quick = self.options.data, self.options.quick
        steps, tokens = (3, 200) if quick else (40, 2048)

        def source(name: str, documents: str, characters: int) -> list[dict[str, Any]]:
            return [{"path": str(data / name), "documents": documents, "limit_characters": characters}]

        tests = {
            "old": source(WIKITEXT, "0:", 60_000),
            "novels": source(ENGLISH, "20:21", 60_000),
            **{name: source(file, test, 60_000) for name, (file, _, test) in TEXTS.items()},
        }
        return GrowthRecipe.parse(
            {
                "backbone": {"name": self.options.backbone or MODEL, "dtype": "bfloat16"}
                | ({"device": self.options.device} if self.options.device else {}),
                "graft": dict(graft),
                "one_graft": graft["kind"] == "lora",
                "stages": {
                    name: {"data": {"new": source(TEXTS[name][0], TEXTS[name][1], 2_000_000)}} for name in languages
                },
                "data": {
                    "old": [{"self": True, "tokens": 300 if quick else 24_000}] if replay else [],
                    "replay_fraction": replay,
                    "length": 128 if quick else 256,
                    "test": tests,
                    "seed": seed,
                },
                "training": {
                    "steps": steps,
                    "batch_size": 2,
                    "learning_rate": RATES[graft["kind"]],
                    "warmup_steps": steps // 10,
                    "seed": seed,
                    "precision": "bf16",
                    "checkpoint_every": steps,
                    "keep_checkpoints": 1,
                },
                "evaluation": {
                    "limit_tokens": tokens,
                    "own_tokens": tokens,
                    "precision": "bf16",
                    "decode_prompts": 0,
                    "batch_size": 8,
                },
            }
        )

    def grown(self, row: str, seed: int) -> list[Run]:
        """The bare backbone's run and a row's stages in order."""
        languages, graft, replay = ROWS[row]
        runs = self.recipe(languages, graft, seed, replay).runs()
        ids = {run.id: stage_id(row, run.id, seed) for run in runs}
        return [
            run.model_copy(update={"id": ids[run.id], "depends_on": tuple(ids[name] for name in run.depends_on)})
            for run in runs
        ]


def stage_id(row: str, stage: str, seed: int) -> str:
    """The id of a run: the first stage of `together` is `alone_de`, trained once."""
    if stage == "backbone":
        return stage
    return f"{'alone' if row.startswith('alone') or (row, stage) == ('together', 'de') else row}_{stage}_s{seed}"


def run(options: Options) -> Results:
    """Train all rows' stages, seed by seed."""
    check_files(options, FILES)
    study = GrowStudy(options)
    for seed in study.seeds:
        runs = {run.id: run for row in ROWS for run in study.grown(row, seed)}
        study.execute(list(runs.values()), f"seed {seed}")
    bare = study.measured["backbone"]
    rows = [bare.row]
    for row, (languages, _, _) in ROWS.items():
        ends = [add_change(study, row, languages, seed) for seed in study.seeds]
        rows.append(over_seeds(ends, row, LABELS[row]))
    return study.write(NAME, rows, aims=aims(rows), details={"seconds": study.seconds})


def add_change(study: GrowStudy, row: str, languages: Sequence[str], seed: int) -> Measurement:
    """A row's last stage, with what it learned of each language, and lost since the stage that taught it."""
    last = study.measured[stage_id(row, languages[-1], seed)]
    change = {"forgotten_novels": metric(last, "novels") - metric(study.measured["backbone"], "novels")}
    for language in languages:
        change[f"learned_{language}"] = metric(study.measured["backbone"], language) - metric(last, language)
    for language in languages[:-1]:
        taught = study.measured[stage_id(row, language, seed)]
        change[f"lost_{language}"] = metric(last, language) - metric(taught, language)
    if row == "together":
        for language in languages:
            alone = metric(study.measured[stage_id(f"alone_{language}", language, seed)], language)
            change[f"over_alone_{language}"] = metric(last, language) / alone - 1
    last.add_metrics(change)
    return last


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Each language within 3% of alone, English forgotten by at most 0.02."""
    together = numbers_of(rows)["together"]
    within = [
        aim(
            f"loss on {name} of together over alone, minus 1",
            f"over_alone_{name}",
            0.03,
            together[f"over_alone_{name}"],
            operator.le,
        )
        for name in TEXTS
    ]
    forgotten = [
        aim(f"{name} of together", name, 0.02, together[name], operator.le)
        for name in ("forgotten", "forgotten_novels")
    ]
    return [*within, *forgotten]
