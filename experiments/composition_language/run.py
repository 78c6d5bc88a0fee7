"""An English anchor and a French specialist, composed with a twentieth of the specialist's text.

Every trained row takes as many steps of as many rows, at the learning rate that validation text chose for its kind of
graft. Test text took no part in any choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import Options
from experiments.composed import (
    REPLAY_FRACTION,
    ComposedRow,
    ComposedStudy,
    PromptTask,
    composition,
    composition_aims,
    equal_lora,
    source,
)
from experiments.composition_language import readout
from experiments.composition_language.texts import FILES, QUICK, LanguageAmounts, write_texts
from experiments.parents import FILES as PARENT_FILES
from experiments.parents import QUICK as QUICK_SIZE
from experiments.parents import Parents, Size, make_parents
from experiments.study import bars, check_files, published
from graftlm.data import DataConfig
from graftlm.evaluation import Results

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
LONG_RATES = {"composition_long": 1e-2, "lora_long": 1e-2}
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
PROMPTS = ("validation_continue", "validation_pairs")
# Only a choice of the setting, on validation text: one seed.
VARIANTS = TABLES["variants"][1:]
# Better French than both parents, little lost between two specialists or two tokenizers.
RATIOS = (
    ("French, bits per byte, over the anchor's", "new_bpb", "composition", "m_b", 1.0),
    ("French, bits per byte, over the specialist's", "new_bpb", "composition", "m_a", 1.0),
    (f"French after {LONG} times the steps, over the specialist's", "new_bpb", "composition_long", "m_a", 1.0),
    (
        "French with both specialists over the better of the French one alone",
        "new_bpb",
        "french_and_code",
        "composition",
        1.05,
    ),
    ("Python with both specialists over the code specialist alone", "python_bpb", "french_and_code", "code", 1.05),
    (
        "French with the specialist's own tokenizer over the shared one",
        "new_bpb",
        "own_tokenizer",
        "composition",
        1.05,
    ),
)


def run(options: Options) -> Results:
    """Run the chosen tables and write `results.json`, `report.md` and plots.

    Raises:
        DataError: the data folder lacks a file.
        RecipeError: there is no such table.
    """
    wanted = {row for table in options.chosen(tuple(TABLES), BY_DEFAULT) for row in TABLES[table]}
    check_files(options, (*PARENT_FILES, *FILES))
    size, amounts = (QUICK_SIZE, QUICK) if options.quick else (Size(), LanguageAmounts())
    answers = 4 if options.quick else 8
    parents, texts = make_parents(options, size), options.out / "texts"
    write_texts(options.data, parents, texts, amounts, size.length)
    french = data_of(texts, size, ["french"])
    names = ("continue", "ntrex_en_fr", "ntrex_fr_en", "bible_en_fr", "bible_fr_en")
    validation, tasks = (
        [
            PromptTask(name=name, path=str(texts / f"task-{name}.jsonl"), answers=answers if "bible" in name else 0)
            for name in group
        ]
        for group in (PROMPTS, names)
    )
    study = ComposedStudy(options, parents.anchor, sets=french, validation=validation, tasks=tasks)
    trained = [row for row in trained_rows(parents, texts, size) if row.id in wanted]
    main = [row for row in trained if row.id not in VARIANTS]
    models = {"m_b": parents.anchor, "m_a": parents.french, "m_a_code": parents.code, "m_a_own": parents.own}
    rows, details = study.measure(models, main, LABELS, [row for row in trained if row.id in VARIANTS])
    # Another tokenizer's tokens are other units, so only bits per byte stand for it.
    kept = ("_bpb", "_answer", "_chrf", "_parameters")
    own = study.measured["m_a_own"].row
    metrics = {name: value for name, value in own.metrics.items() if name.endswith(kept)}
    rows = [row.model_copy(update={"metrics": metrics}) if row.id == own.id else row for row in rows]
    rows += readout.readout_rows(study, parents, texts, size.length, wanted)
    details["setting"] |= {"amounts": amounts.model_dump(), "parents": parents.summaries}
    aims = composition_aims(rows, RATIOS)
    plots = {"bits-per-byte": bars(rows, {"new_bpb": "French", "old_bpb": "English"}, "bits per byte")}
    return study.write(NAME, rows, aims=aims, paper=published(__file__), details=details, plots=plots)


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
    grafts = {
        "composition": (pair, french),
        "lora": (equal_lora(parents.anchor, pair), french),
        "vanilla_m_a": (composition({"french": parents.vanilla}), french),
        "random_m_a": (composition({"french": parents.random}), french),
        "own_tokenizer": (composition({"french": parents.own}), french),
        "code": (composition({"code": parents.code}), code),
        "french_and_code": (composition({"french": parents.french, "code": parents.code}), both),
        "prompts": (pair, prompts),
        "encoder_m_a": (pair | {"refresh": "prompt"}, prompts),
        "norm_none": (pair | {"norm": "none"}, french),
        "stride_2": (pair | {"stride": 2}, french),
        "positions_none": (pair | {"positions": "none"}, french),
        "positions_rotary": (pair | {"positions": "rotary"}, french),
    }
    rows = [ComposedRow(name, LABELS[name], *parts) for name, parts in grafts.items()]
    return rows + [
        ComposedRow(name, LABELS[name], *grafts[name.removesuffix("_long")], times=LONG, rate=rate)
        for name, rate in LONG_RATES.items()
    ]
