"""An English anchor and a French specialist, composed with a twentieth of the specialist's text and pairs of verses.

Every trained row takes as many steps on the same data, at the rate that its own search on validation text chose. Test
text took no part in any choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments import Options
from experiments.ambiguity_checkers.run import verses
from experiments.composed import Amounts, ComposedRow, TextStudy, better_parent, named
from experiments.parents import fitting, spaced, write_examples
from graftlm.evaluation import Results

NTREX = ("parallel/ntrex/newstest2019-src.eng.txt", "parallel/ntrex/newstest2019-ref.fra.txt")
BIBLE = ("parallel/bible/BSB.txt", "parallel/bible/FreSynodale1921.txt")
FILES = (*NTREX, *BIBLE)

Pair = tuple[str, str]


class LanguageAmounts(Amounts):
    """How much of each text.

    Args:
        pairs: verses that rows are trained on, half in each direction.
        longest: characters of a sentence of a pair.
    """

    tested: int = 8_000
    examples: int = 60
    pairs: int = 600
    longest: int = 160


QUICK = LanguageAmounts(share=0.5, old=1_200, pairs=20, tested=1_500, examples=4)


def write_texts(study: TextStudy, amounts: LanguageAmounts) -> None:
    """Write every text and task, cut or chosen so that all is whole in a row."""
    study.write_parts({"french": "french", "python": "python-train"}, cut=True)
    for name, pairs in with_prompts(study.options.data, amounts).items():
        write_examples(study.texts / f"{name}.jsonl", fitting(pairs, study.tokenizer, study.length))


def with_prompts(data: Path, amounts: LanguageAmounts) -> dict[str, Sequence[Pair]]:
    """Verses to train on, and the tasks; verses of training, validation and test are thirds of the book."""
    verses, news = read_verses(data, amounts.longest), read_news(data, amounts.longest)
    third, count = len(verses) // 3, amounts.examples
    train, validation, test = verses[:third], verses[third : 2 * third], verses[2 * third :]
    return {
        "verses-prompts": _both_ways(spaced(train, amounts.pairs)),
        "task-ntrex_en_fr": [into_french(pair) for pair in spaced(news, count)],
        "task-ntrex_fr_en": [into_english(pair) for pair in spaced(news, count)],
        "task-bible_en_fr": [into_french(pair) for pair in spaced(test, count)],
        "task-bible_fr_en": [into_english(pair) for pair in spaced(test, count)],
        "task-validation_pairs": _both_ways(spaced(validation, count // 2)),
    }


def into_french(pair: Pair) -> Pair:
    """(prompt, answer) of a pair (English, French)."""
    return f"English: {pair[0]}\nFrench:", f" {pair[1]}\n"


def into_english(pair: Pair) -> Pair:
    """(prompt, answer) of a pair (English, French), the other way."""
    return f"French: {pair[1]}\nEnglish:", f" {pair[0]}\n"


def _both_ways(pairs: Sequence[Pair]) -> list[Pair]:
    return [into_french(pair) if index % 2 else into_english(pair) for index, pair in enumerate(pairs)]


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
    "rows": ("mixture", "cross", "both", "lora", "skyline", "vanilla_m_a", "random_m_a"),
    "specialists": ("both", "french_and_code"),
    "tokenizers": ("cross", "own_tokenizer"),
}
LABELS = {
    "m_a": "French specialist m_A",
    "m_a_code": "code specialist",
    "m_a_own": "French specialist, own tokenizer",
    "own_tokenizer": "cross-attentions, specialist's own tokenizer",
    "french_and_code": "both, with both specialists",
}
TASKS = ("ntrex_en_fr", "ntrex_fr_en", "bible_en_fr", "bible_fr_en")
TEXTS = {"new_bpb": "French", "old_bpb": "English", "python_bpb": "Python"}
PARENTS = ("m_b", "m_a")
RATIOS = better_parent(TEXTS, PARENTS) | {
    ("ntrex_fr_en_bpb", "both", PARENTS, 0.97): "NTREX into English: both, over the better parent",
    ("ntrex_fr_en_bpb", "both", ("lora",), 1.0): "NTREX into English: both, over LoRA",
    ("new_bpb", "both", ("lora",), 1.0): "French: both, over LoRA",
    ("new_bpb", "both", ("fixed_mixture",), 1.0): "French: both, over the fixed mixture",
    ("new_bpb", "both", ("mixture",), 1.0): "French: both, over the mixture alone",
    ("new_bpb", "both", ("random_m_a",), 1.0): "French: both, over both with a random m_A",
    ("new_bpb", "french_and_code", ("both",), 1.05): "French with both specialists over the French one alone",
    ("python_bpb", "french_and_code", ("m_b", "m_a_code"), 1.01): "Python with both specialists over the better parent",
    ("new_bpb", "own_tokenizer", ("cross",), 1.05): "French with the specialist's own tokenizer over the shared one",
}


def run(options: Options) -> Results:
    """Run the chosen tables."""
    amounts = QUICK if options.quick else LanguageAmounts()
    study = TextStudy(options, TABLES, LABELS, amounts, FILES)
    write_texts(study, amounts)
    study.validation = [study.task("validation_pairs")]
    study.tasks = [study.task(name) for name in TASKS]
    parents = study.parents
    folders = {"m_b": parents.anchor, "m_a": parents.french, "m_a_code": parents.code, "m_a_own": parents.own}
    rows, details = study.measure({name: study.model(folder) for name, folder in folders.items()}, trained_rows(study))
    # Another tokenizer's tokens are other units, so only bits per byte stand for it.
    kept = ("_bpb", "_answer", "_parameters")
    own = study.measured["m_a_own"].row
    metrics = {name: value for name, value in own.metrics.items() if name.endswith(kept)}
    rows = [row.model_copy(update={"metrics": metrics}) if row.id == own.id else row for row in rows]
    details["setting"] = study.setting()
    return study.report(__file__, rows, RATIOS, TEXTS, details)


def trained_rows(study: TextStudy) -> list[ComposedRow]:
    """Every trained row, all on the same data: French and pairs of verses, and text of the anchor's own domains."""
    parents = study.parents
    sets = ("old", "new", "python", "validation_old", "validation_new", "validation_python")
    data = study.data(
        ["french-part", "verses-prompts"], ["english-part", "python-part"], dict(zip(sets, sets, strict=True))
    )
    grafts = study.grafts("french", parents.french)
    grafts["french_and_code"] = grafts["both"] | {"augmenting": named({"french": parents.french, "code": parents.code})}
    grafts["own_tokenizer"] = grafts["cross"] | {"augmenting": named({"french": parents.own})}
    return [ComposedRow(name, graft, data) for name, graft in grafts.items()]
