"""An English anchor and a French specialist, composed with a twentieth of the specialist's text.

Every trained row takes as many steps of as many rows, at the learning rate that validation text chose from the same
values. Test text took no part in any choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.composed import (
    REPLAY_FRACTION,
    ComposedRow,
    ComposedStudy,
    composition,
    details_of,
    equal_lora,
    more_forgotten,
    only,
    rows_of,
    source,
)
from experiments.composition_language import paper, readout
from experiments.composition_language.texts import FILES, QUICK, LanguageAmounts, write_texts
from experiments.parents import FILES as PARENT_FILES
from experiments.parents import QUICK as QUICK_SIZE
from experiments.parents import Parents, Size, make_parents
from experiments.study import bars, check_files
from experiments.tasks import PromptTask
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.report import write_report

NAME = "composition-language"
TABLES = {
    "2": ("composition",),
    "5": ("composition", "lora", "vanilla_m_a", "random_m_a"),
    "encoder": ("prompts", "encoder_m_a"),
    "specialists": ("composition", "code", "french_and_code"),
    "tokenizers": ("composition", "own_tokenizer"),
    "steps": ("composition", "lora", "composition_long", "lora_long"),
    "readout": tuple(readout.LABELS),
    "variants": ("composition", "norm_none", "stride_2", "positions_none", "positions_rotary"),
}
BY_DEFAULT = tuple(table for table in TABLES if table != "variants")
LONG = 3  # times the steps of the other rows
# Learning rates to try at that length.
LONG_RATES: dict[str, tuple[float, ...]] = {"composition_long": (1e-2,), "lora_long": (1e-2,)}
LABELS = {
    "m_b": "anchor m_B",
    "m_a": "French specialist m_A",
    "m_a_code": "code specialist",
    "m_a_own": "French specialist, own tokenizer",
    "composition": "composition",
    "lora": "LoRA, equal parameters",
    "vanilla_m_a": "with vanilla m_A",
    "random_m_a": "with random m_A",
    "own_tokenizer": "with the specialist's own tokenizer",
    "code": "with the code specialist",
    "french_and_code": "with both specialists",
    "composition_long": f"composition, {LONG} times the steps",
    "lora_long": f"LoRA, {LONG} times the steps",
    "prompts": "composition, rows with prompts",
    "encoder_m_a": "m_A as encoder, rows with prompts",
    "norm_none": "composition, norm: none",
    "positions_none": "composition, positions: none, as in the paper",
    "positions_rotary": "composition, positions: rotary",
    "stride_2": "composition, stride 2",
} | readout.LABELS
TEXT = ("validation_old", "validation_new")
PROMPTS = ("validation_continue", "validation_pairs")
# Only a choice of the setting, on validation text: one seed.
VARIANTS = TABLES["variants"][1:]


def run(options: Options) -> Results:
    """Run the chosen tables and write `results.json`, `report.md` and plots.

    Raises:
        DataError: the data folder lacks a file.
        RecipeError: there is no such table.
    """
    wanted = {row for table in options.chosen(tuple(TABLES), BY_DEFAULT) for row in TABLES[table]}
    check_files(options, (*PARENT_FILES, *FILES))
    size, amounts = (QUICK_SIZE, QUICK) if options.quick else (Size(), LanguageAmounts())
    parents = make_parents(options.data, options.out.parent / "composition-parents", size, options.jobs)
    texts = options.out / "texts"
    write_texts(options.data, parents, texts, amounts, size.length)
    study = study_of(options, parents, texts, size)
    trained = [row for row in trained_rows(parents, texts, size) if row.id in wanted]
    models = {"m_b": parents.anchor, "m_a": parents.french, "m_a_code": parents.code, "m_a_own": parents.own}
    bare = study.measure_bare(models)
    main_rows = [row for row in trained if row.id not in VARIANTS]
    tuning, rates = study.tune(main_rows)
    tuning |= study.try_out([row for row in trained if row.id in VARIANTS], rates["composition"])
    main = study.measure(main_rows, rates, "the chosen rates, every seed")
    # Another tokenizer's tokens are other units, so only bits per byte stand for it.
    rows = [
        only(row, "_bpb", "_answer", "_chrf", "_parameters") if row.id == "m_a_own" else row
        for row in rows_of(bare, main, LABELS)
    ]
    rows += readout.readout_rows(options, parents, texts, size.length, wanted)
    setting = study.setting() | {"amounts": amounts.model_dump(), "parents": parents.summaries}
    details = details_of(rates, tuning, main, setting)
    seeds, published = study.seeds, paper.rows()
    results = Results.here(NAME, rows, seeds=seeds, aims=aims(rows), paper=published, details=details)
    plots = {"bits-per-byte": bars(rows, {"new_bpb": "French", "old_bpb": "English"}, "bits per byte")}
    write_report(results, options.out, plots=plots)
    return results


def study_of(options: Options, parents: Parents, texts: Path, size: Size) -> ComposedStudy:
    """The settings that all rows share."""
    names = ("continue", "ntrex_en_fr", "ntrex_fr_en", "bible_en_fr", "bible_fr_en")
    answered = {"bible_en_fr": 4, "bible_fr_en": 4} if options.quick else {"bible_en_fr": 8, "bible_fr_en": 8}
    return ComposedStudy(
        options,
        parents.anchor,
        steps=3 if options.quick else 400,
        batch_size=2 if options.quick else 4,
        sets=data_of(texts, size, ["french"]),
        validation=[PromptTask(name=name, path=str(texts / f"task-{name}.jsonl")) for name in PROMPTS],
        tasks=[PromptTask(name=n, path=str(texts / f"task-{n}.jsonl"), answers=answered.get(n, 0)) for n in names],
    )


def data_of(texts: Path, size: Size, parts: Sequence[str], *, prompts: bool = False) -> DataConfig:
    """What a row is trained and measured on: a twentieth of specialists' text, and some English."""
    more = {"prompt_column": "prompt"} if prompts else {}
    ending = "prompts" if prompts else "part"

    sets = ("old", "new", "python", "validation_old", "validation_new", "validation_python")
    return DataConfig(
        new=[source(texts, f"{part}-{ending}", **more) for part in parts],
        old=[source(texts, f"english-{ending}", **more)],
        replay_fraction=REPLAY_FRACTION,
        length=size.length,
        boundaries="whole" if prompts else "separate",
        test={name: [source(texts, name)] for name in sets},
    )


def trained_rows(parents: Parents, texts: Path, size: Size) -> list[ComposedRow]:
    """Every trained row."""
    french, code = data_of(texts, size, ["french"]), data_of(texts, size, ["python"])
    both, prompts = data_of(texts, size, ["french", "python"]), data_of(texts, size, ["french"], prompts=True)
    pair = composition({"french": parents.french})
    two = {"french": parents.french, "code": parents.code}
    grafts: dict[str, tuple[Mapping[str, Any], DataConfig, tuple[str, ...]]] = {
        "composition": (pair, french, TEXT),
        "lora": (equal_lora(parents.anchor, pair), french, TEXT),
        "vanilla_m_a": (composition({"french": parents.vanilla}), french, TEXT),
        "random_m_a": (composition({"french": parents.random}), french, TEXT),
        "own_tokenizer": (composition({"french": parents.own}), french, TEXT),
        "code": (composition({"code": parents.code}), code, ("validation_old", "validation_python")),
        "french_and_code": (composition(two), both, (*TEXT, "validation_python")),
        "prompts": (pair, prompts, PROMPTS),
        "encoder_m_a": ({**pair, "refresh": "prompt"}, prompts, PROMPTS),
        "norm_none": ({**pair, "norm": "none"}, french, TEXT),
        "stride_2": ({**pair, "stride": 2}, french, TEXT),
        "positions_none": ({**pair, "positions": "none"}, french, TEXT),
        "positions_rotary": ({**pair, "positions": "rotary"}, french, TEXT),
    }
    rows = [ComposedRow(name, LABELS[name], *parts) for name, parts in grafts.items()]
    long = {name: ComposedRow(name, LABELS[name], *grafts[name.removesuffix("_long")]) for name in LONG_RATES}
    return [*rows, *(row._replace(times=LONG, rates=LONG_RATES[name]) for name, row in long.items())]


def aims(rows: Sequence[Row]) -> list[Aim]:
    """What the issue asks: better French than both parents, English kept, little lost between two tokenizers."""
    metrics_of = {row.id: {name: value_of(metric) for name, metric in row.metrics.items()} for row in rows}
    wanted: list[tuple[str, str, str, str]] = [
        ("French, bits per byte, over the anchor's", "new_bpb", "composition", "m_b"),
        ("French, bits per byte, over the specialist's", "new_bpb", "composition", "m_a"),
        (f"French after {LONG} times the steps, over the specialist's", "new_bpb", "composition_long", "m_a"),
        (
            "French with both specialists over the better of the French one alone",
            "new_bpb",
            "french_and_code",
            "composition",
        ),
        ("Python with both specialists over the code specialist alone", "python_bpb", "french_and_code", "code"),
        ("French with the specialist's own tokenizer over the shared one", "new_bpb", "own_tokenizer", "composition"),
    ]
    limits = {"own_tokenizer": 1.05, "french_and_code": 1.05}
    ratios = [
        Aim(text=text, metric=metric, aim=limit, measured=ratio, met=ratio < limit)
        for text, metric, row, other in wanted
        if {row, other} <= metrics_of.keys()
        for limit, ratio in [(limits.get(row, 1.0), metrics_of[row][metric] / metrics_of[other][metric])]
    ]
    return [*ratios, *more_forgotten(rows)]
