"""The texts of the comparison: what compositions are trained on, and what no model has read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from experiments.parents import Parents, fitting, held_out, old_part, part, read_texts, spaced, write_examples
from graftlm.config import Config
from graftlm.demo.corpus import write_documents

NTREX = ("parallel/ntrex/newstest2019-src.eng.txt", "parallel/ntrex/newstest2019-ref.fra.txt")
BIBLE = ("parallel/bible/BSB.txt", "parallel/bible/FreSynodale1921.txt")
FILES = (*NTREX, *BIBLE)

Pair = tuple[str, str]


class LanguageAmounts(Config):
    """How much of each text.

    Args:
        share: of each of a specialist's training documents that compositions are trained on.
        old: characters of each of the anchor's novels in the old share; of its other documents a twelfth of that.
        passage: characters of a passage whose first half is a prompt.
        pairs: verses that compositions with prompts are trained on, half in each direction.
        tested: characters of each set of test texts; validation takes a third.
        examples: of each task.
        longest: characters of a sentence of a pair.
    """

    share: float = 0.05
    old: int = 18_000
    passage: int = 480
    pairs: int = 600
    tested: int = 12_000
    examples: int = 40
    longest: int = 160


QUICK = LanguageAmounts(share=0.5, old=1_200, passage=60, pairs=20, tested=1_500, examples=4)


def write_texts(data: Path, parents: Parents, folder: Path, amounts: LanguageAmounts, length: int) -> None:
    """Write every text and task into `folder`, with prompts only where all fits into a row of `length` tokens."""
    corpus = parents.corpus
    for name, file in (("french", "french"), ("python", "python-train")):
        write_documents(folder / f"{name}-part.jsonl", part(read_texts(corpus / f"{file}.jsonl"), amounts.share))
    write_documents(folder / "english-part.jsonl", old_part(read_texts(corpus / "english.jsonl"), amounts.old))
    held_out(data, corpus, folder, amounts.tested)
    tokenizer = AutoTokenizer.from_pretrained(parents.anchor)
    for name, pairs in with_prompts(data, folder, amounts).items():
        write_examples(folder / f"{name}.jsonl", fitting(pairs, tokenizer, length))


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
    english, french = (dict(_verses(data / name)) for name in BIBLE)
    return _short(((text, french[key]) for key, text in english.items() if french.get(key)), longest)


def _verses(file: Path) -> Iterator[tuple[str, str]]:
    """(book and verse, text) of a file of `### Book` headings and `[chapter:verse] text` lines."""
    book = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            book = line[4:]
        elif match := re.match(r"(\[\d+:\d+\])(.*)", line):
            yield book + match[1], " ".join(match[2].split())


def _short(pairs: Iterable[Pair], longest: int) -> list[Pair]:
    return [(a.strip(), b.strip()) for a, b in pairs if min(len(a), len(b)) >= 10 and max(len(a), len(b)) <= longest]
