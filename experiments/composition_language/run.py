"""An English anchor and a French specialist, composed with a twentieth of the specialist's text.

Every trained row takes as many steps of as many rows, at the learning rate that validation text chose for its kind of
graft. Test text took no part in any choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments import Options
from experiments.ambiguity_checkers.run import verses
from experiments.composed import LABELS as SHARED_LABELS
from experiments.composed import Amounts, ComposedRow, ComposedStudy, PromptTask, composition
from experiments.composition_language import readout
from experiments.parents import fitting, read_texts, spaced, write_examples
from graftlm.data import DataConfig
from graftlm.evaluation import Results

NTREX = ("parallel/ntrex/newstest2019-src.eng.txt", "parallel/ntrex/newstest2019-ref.fra.txt")
BIBLE = ("parallel/bible/BSB.txt", "parallel/bible/FreSynodale1921.txt")
FILES = (*NTREX, *BIBLE)

Pair = tuple[str, str]


class LanguageAmounts(Amounts):
    """How much of each text.

    Args:
        passage: characters of a passage whose first half is a prompt.
        pairs: verses that compositions with prompts are trained on, half in each direction.
        longest: characters of a sentence of a pair.
    """

    tested: int = 12_000
    examples: int = 40
    passage: int = 480
    pairs: int = 600
    longest: int = 160


QUICK = LanguageAmounts(share=0.5, old=1_200, passage=60, pairs=20, tested=1_500, examples=4)


def write_texts(study: ComposedStudy, amounts: LanguageAmounts) -> None:
    """Write every text and task, with prompts only where all fits into a row."""
    study.write_parts({"french": "french", "python": "python-train"})
    for name, pairs in with_prompts(study.options.data, study.texts, amounts).items():
        write_examples(study.texts / f"{name}.jsonl", fitting(pairs, study.tokenizer, study.length))


def with_prompts(data: Path, folder: Path, amounts: LanguageAmounts) -> dict[str, Sequence[Pair]]:
    """Training text with prompts, and the tasks."""
    verses, news = read_verses(data, amounts.longest), read_news(data, amounts.longest)
    third, count = len(verses) // 3, amounts.examples
    train, validation, test = verses[:third], verses[third : 2 * third], verses[2 * third :]

    def halves(name: str) -> list[Pair]:
        return passages(read_texts(folder / f"{name}.jsonl"), amounts.passage)

    return {
        "french-prompts": [*halves("french-part"), *_both_ways(spaced(train, amounts.pairs))],
        "english-prompts": halves("english-part"),
        "task-continue": spaced(halves("new"), count),
        "task-ntrex_en_fr": [into_french(pair) for pair in spaced(news, count)],
        "task-ntrex_fr_en": [into_english(pair) for pair in spaced(news, count)],
        "task-bible_en_fr": [into_french(pair) for pair in spaced(test, count)],
        "task-bible_fr_en": [into_english(pair) for pair in spaced(test, count)],
        "task-validation_continue": spaced(halves("validation_new"), count),
        "task-validation_pairs": _both_ways(spaced(validation, count)),
    }


def into_french(pair: Pair) -> Pair:
    """(prompt, answer) of a pair (English, French)."""
    return f"English: {pair[0]}\nFrench:", f" {pair[1]}\n"


def into_english(pair: Pair) -> Pair:
    """(prompt, answer) of a pair (English, French), the other way."""
    return f"French: {pair[1]}\nEnglish:", f" {pair[0]}\n"


def _both_ways(pairs: Sequence[Pair]) -> list[Pair]:
    return [into_french(pair) if index % 2 else into_english(pair) for index, pair in enumerate(pairs)]


def passages(texts: Iterable[str], characters: int) -> list[Pair]:
    """Texts cut into passages at spaces, each cut again in its middle: (prompt, what follows)."""
    pairs = []
    for text in texts:
        for start in range(0, len(text) - characters, characters):
            passage = text[start : start + characters].partition(" ")[2]
            middle = passage.find(" ", len(passage) // 2)
            if middle > 0:
                pairs.append((passage[:middle], passage[middle:]))
    return pairs


def read_news(data: Path, longest: int) -> list[Pair]:
    """NTREX's sentences, English and French."""
    sides = [(data / name).read_text(encoding="utf-8").splitlines() for name in NTREX]
    return _short(zip(*sides, strict=True), longest)


def read_verses(data: Path, longest: int) -> list[Pair]:
    """The verses that both Bibles have, English and French."""
    english, french = (verses(data / name) for name in BIBLE)
    pairs = ((text, french[key]) for key, text in english.items() if french.get(key))
    return _short(((" ".join(a.split()), " ".join(b.split())) for a, b in pairs), longest)


def _short(pairs: Iterable[Pair], longest: int) -> list[Pair]:
    return [(a.strip(), b.strip()) for a, b in pairs if min(len(a), len(b)) >= 10 and max(len(a), len(b)) <= longest]


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
LABELS = (
    {
        "m_a": "French specialist m_A",
        "m_a_code": "code specialist",
        "m_a_own": "French specialist, own tokenizer",
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
    }
    | SHARED_LABELS
    | readout.LABELS
)
PROMPTS = ("validation_continue", "validation_pairs")
TASKS = ("continue", "ntrex_en_fr", "ntrex_fr_en", "bible_en_fr", "bible_fr_en")
# Only a choice of the setting, on validation text: one seed.
VARIANTS = TABLES["variants"][1:]
# Better French than both parents, little lost between two specialists or two tokenizers.
RATIOS = {
    ("new_bpb", "composition", "m_b", 1.0): "French, bits per byte, over the anchor's",
    ("new_bpb", "composition", "m_a", 1.0): "French, bits per byte, over the specialist's",
    ("new_bpb", "composition_long", "m_a", 1.0): f"French after {LONG} times the steps, over the specialist's",
    ("new_bpb", "french_and_code", "composition", 1.05): (
        "French with both specialists over the better of the French one alone"
    ),
    ("python_bpb", "french_and_code", "code", 1.05): "Python with both specialists over the code specialist alone",
    ("new_bpb", "own_tokenizer", "composition", 1.05): "French with the specialist's own tokenizer over the shared one",
}


def run(options: Options) -> Results:
    """Run the chosen tables."""
    amounts, answers = (QUICK, 4) if options.quick else (LanguageAmounts(), 8)
    study = ComposedStudy(options, TABLES, LABELS, amounts, default=BY_DEFAULT, files=FILES)
    write_texts(study, amounts)
    study.validation, study.tasks = (
        [
            PromptTask(name=name, path=str(study.texts / f"task-{name}.jsonl"), answers=answers * ("bible" in name))
            for name in group
        ]
        for group in (PROMPTS, TASKS)
    )
    parents = study.parents
    models = {"m_b": parents.anchor, "m_a": parents.french, "m_a_code": parents.code, "m_a_own": parents.own}
    rows, details = study.measure(models, trained_rows(study), VARIANTS)
    # Another tokenizer's tokens are other units, so only bits per byte stand for it.
    kept = ("_bpb", "_answer", "_chrf", "_parameters")
    own = study.measured["m_a_own"].row
    metrics = {name: value for name, value in own.metrics.items() if name.endswith(kept)}
    rows = [row.model_copy(update={"metrics": metrics}) if row.id == own.id else row for row in rows]
    rows += readout.readout_rows(study)
    return study.report(__file__, rows, RATIOS, {"new_bpb": "French", "old_bpb": "English"}, details)


def data_of(study: ComposedStudy, *parts: str, prompts: bool = False) -> DataConfig:
    """What a row is trained and measured on: a twentieth of specialists' text, and some English."""
    ending, boundaries = ("prompts", "whole") if prompts else ("part", "separate")
    sets = ("old", "new", "python", "validation_old", "validation_new", "validation_python")
    new = [f"{part}-{ending}" for part in parts]
    return study.data(new, f"english-{ending}", dict(zip(sets, sets, strict=True)), boundaries)


def trained_rows(study: ComposedStudy) -> list[ComposedRow]:
    """Every trained row; those of which nothing else is said are trained on French."""
    parents, french, prompts = study.parents, data_of(study, "french"), data_of(study, "french", prompts=True)
    grafts = study.grafts("french", parents.french)
    pair, encoder = grafts["composition"], grafts.pop("encoder_m_a")
    grafts |= {
        "own_tokenizer": composition({"french": parents.own}),
        "code": composition({"code": parents.code}),
        "french_and_code": composition({"french": parents.french, "code": parents.code}),
        "prompts": pair,
        "encoder_m_a": encoder,
        "norm_none": pair | {"norm": "none"},
        "stride_2": pair | {"stride": 2},
        "positions_none": pair | {"positions": "none"},
        "positions_rotary": pair | {"positions": "rotary"},
    }
    data = {"code": data_of(study, "python"), "french_and_code": data_of(study, "french", "python")}
    data |= {"prompts": prompts, "encoder_m_a": prompts}
    rows = [ComposedRow(name, graft, data.get(name, french)) for name, graft in grafts.items()]
    long = {name: grafts[name.removesuffix("_long")] for name in LONG_RATES}
    return rows + [ComposedRow(name, graft, french, LONG, LONG_RATES[name]) for name, graft in long.items()]
