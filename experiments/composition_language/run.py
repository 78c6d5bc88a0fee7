"""An English anchor composed with a French specialist, trained on a twentieth of the specialist's text and verse pairs.

Every trained row takes the same number of steps on the same data, at the learning rate that its own search on
validation text chose. Test text is used for no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments import Options
from experiments.ambiguity_checkers.run import verses
from experiments.composed import Amounts, ComposedRow, TextStudy, better_parent, named
from experiments.parents import FILES as PARENT_FILES
from experiments.parents import fitting, spaced, write_examples
from graftlm.evaluation import Results, Row

NTREX = ("parallel/ntrex/newstest2019-src.eng.txt", "parallel/ntrex/newstest2019-ref.fra.txt")
BIBLE = ("parallel/bible/BSB.txt", "parallel/bible/FreSynodale1921.txt")
FILES = (*PARENT_FILES, *NTREX, *BIBLE)

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

Pair = tuple[str, str]


class LanguageAmounts(Amounts):
    """Amounts of text.

    Args:
        pairs: pairs of verses that rows are trained on, half in each direction.
        longest: longest sentence of a pair, in characters.
    """

    tested: int = 8_000
    examples: int = 60
    pairs: int = 600
    longest: int = 160


QUICK = LanguageAmounts(
    share=0.5,
    old=1_200,
    pairs=20,
    tested=1_500,
    examples=4,
)


def run(options: Options) -> Results:
    """Run the chosen tables."""
    amounts = QUICK if options.quick else LanguageAmounts()
    study = TextStudy(options, TABLES, LABELS, amounts, FILES)
    write_texts(study, amounts)
    study.validation = [study.task("validation_pairs")]
    study.tasks = [study.task(name) for name in TASKS]
    parents = study.parents
    models = {
        "m_b": study.model(parents.anchor),
        "m_a": study.model(parents.french),
        "m_a_code": study.model(parents.code),
        "m_a_own": study.model(parents.own),
    }
    rows, details = study.measure(models, trained_rows(study))
    rows = [_comparable(row) if row.id == "m_a_own" else row for row in rows]
    details["setting"] = study.setting()
    return study.report(__file__, rows, RATIOS, TEXTS, details)


def _comparable(row: Row) -> Row:
    """Return a row without metrics per token, which a model with another tokenizer does not share."""
    kept = ("_bpb", "_answer", "_parameters")
    metrics = {name: value for name, value in row.metrics.items() if name.endswith(kept)}
    return row.model_copy(update={"metrics": metrics})


def trained_rows(study: TextStudy) -> list[ComposedRow]:
    """Return every trained row, all on the same data: French, verse pairs, and text of the anchor's own domains."""
    parents = study.parents
    sets = ("old", "new", "python", "validation_old", "validation_new", "validation_python")
    data = study.data(
        new=["french-part", "verses-prompts"],
        old=["english-part", "python-part"],
        tests={name: name for name in sets},
    )
    grafts = study.grafts("french", parents.french)
    specialists = {"french": parents.french, "code": parents.code}
    grafts["french_and_code"] = {**grafts["both"], "augmenting": named(specialists)}
    grafts["own_tokenizer"] = {**grafts["cross"], "augmenting": named({"french": parents.own})}
    return [ComposedRow(name, graft, data) for name, graft in grafts.items()]


def write_texts(study: TextStudy, amounts: LanguageAmounts) -> None:
    """Write every text and task, cut or chosen so that every example fits into a row."""
    study.write_parts({"french": "french", "python": "python-train"}, cut=True)
    for name, pairs in with_prompts(study.options.data, amounts).items():
        kept = fitting(pairs, study.tokenizer, study.length)
        write_examples(study.texts / f"{name}.jsonl", kept)


def with_prompts(data: Path, amounts: LanguageAmounts) -> dict[str, Sequence[Pair]]:
    """Return the verses of training and the tasks; verses of training, validation and test are thirds of the book."""
    verse_pairs = read_verses(data, amounts.longest)
    third = len(verse_pairs) // 3
    train = spaced(verse_pairs[:third], amounts.pairs)
    validation = spaced(verse_pairs[third : 2 * third], amounts.examples // 2)
    test = spaced(verse_pairs[2 * third :], amounts.examples)
    news = spaced(read_news(data, amounts.longest), amounts.examples)
    return {
        "verses-prompts": _both_ways(train),
        "task-ntrex_en_fr": [into_french(pair) for pair in news],
        "task-ntrex_fr_en": [into_english(pair) for pair in news],
        "task-bible_en_fr": [into_french(pair) for pair in test],
        "task-bible_fr_en": [into_english(pair) for pair in test],
        "task-validation_pairs": _both_ways(validation),
    }


def into_french(pair: Pair) -> Pair:
    """Return prompt and answer of a translation into French, from a pair (English, French)."""
    return f"English: {pair[0]}\nFrench:", f" {pair[1]}\n"


def into_english(pair: Pair) -> Pair:
    """Return prompt and answer of a translation into English, from a pair (English, French)."""
    return f"French: {pair[1]}\nEnglish:", f" {pair[0]}\n"


def _both_ways(pairs: Sequence[Pair]) -> list[Pair]:
    """Return examples of alternating direction."""
    examples = []
    for index, pair in enumerate(pairs):
        examples.append(into_french(pair) if index % 2 else into_english(pair))
    return examples


def read_news(data: Path, longest: int) -> list[Pair]:
    """Return the sentences of NTREX, English and French."""
    english, french = [(data / name).read_text(encoding="utf-8").splitlines() for name in NTREX]
    return _short(zip(english, french, strict=True), longest)


def read_verses(data: Path, longest: int) -> list[Pair]:
    """Return the verses that both Bibles have, English and French."""
    english = verses(data / BIBLE[0])
    french = verses(data / BIBLE[1])
    pairs = []
    for key, text in english.items():
        translation = french.get(key)
        if translation:
            pairs.append((" ".join(text.split()), " ".join(translation.split())))
    return _short(pairs, longest)


def _short(pairs: Iterable[Pair], longest: int) -> list[Pair]:
    """Return the pairs whose sides have 10 to `longest` characters."""
    kept = []
    for first, second in pairs:
        lengths = (len(first), len(second))
        if min(lengths) >= 10 and max(lengths) <= longest:
            kept.append((first.strip(), second.strip()))
    return kept
