"""Questions in files, the small backbone's training text, and documents that change domain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from experiments.parents import ENGLISH, read_texts, up_to
from experiments.study import shuffled, write_lines
from graftlm.config import Config
from graftlm.demo.corpus import deal, write_documents

DOMAINS = ("math", "science", "code", "reading")
PARTS = ("train", "validation", "test")
GSM8K = ("routing/math/gsm8k/train.jsonl", "routing/math/gsm8k/test.jsonl")
ARC = {
    part: tuple(f"routing/science/arc_{level}/{part}.json" for level in ("easy", "challenge"))
    for part in ("train", "test")
}
MBPP, ALGORITHMS = "routing/code/mbpp/mbpp.jsonl", "routing/code/thealgorithms_py.jsonl"
XQUAD, QED = "routing/reading/xquad/xquad.en.json", "routing/reading/qed/qed-dev.jsonlines"
WIKIPEDIA = ("lm_text/wikitext2_valid_test/valid.txt", "lm_text/wikitext2_valid_test/test.txt")
FILES = (ENGLISH, *WIKIPEDIA, ALGORITHMS)
SHINGLE = 12
_CHOICE = re.compile(r"Answer(\d): ")
_QUESTION = "Please choose the correct answer to the question: "


class RoutingQuestion(NamedTuple):
    """A question with its right answer. `choices` holds all answers of a multiple-choice question.

    `tests` is the source of the tests of a program.
    """

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    tests: str = ""

    @property
    def text(self) -> str:
        """Prompt and answer."""
        return self.prompt + self.answer


class RoutingTextSizes(Config):
    """Amount of each text.

    Args:
        novels: number of English novels that the backbone reads.
        novel: characters of each novel.
        wikipedia, code: characters of each that the backbone reads.
        trained: maximum number of training examples of an expert.
        validated, tested: questions of each domain; every seed has its own tests.
        chosen: test questions of each domain that slow rows answer.
        documents: number of documents that change domain, for validation and for test.
        half: maximum number of tokens of a half of such a document; the minimum is half as many.
    """

    novels: int = 23
    novel: int = 70_000
    wikipedia: int = 1_200_000
    code: int = 1_000_000
    trained: int = 1_800
    validated: int = 24
    tested: int = 60
    chosen: int = 100
    documents: int = 24
    half: int = Field(96, ge=8)


QUICK_TEXT_SIZES = RoutingTextSizes(
    novels=2, novel=3_000, wikipedia=3_000, code=3_000, trained=12, validated=2, tested=3, chosen=3, documents=2, half=8
)


def write_corpus(data: Path, file: Path, amounts: RoutingTextSizes) -> None:
    """Write the backbone's training text: English novels, Wikipedia, Python."""
    novels = (text[: amounts.novel] for text in read_texts(data / ENGLISH)[: amounts.novels])
    modules = deal(read_texts(data / ALGORITHMS), {"backbone": 2, "expert": 1})["backbone"]
    write_documents(file, [*novels, *up_to(_articles(data), amounts.wikipedia), *up_to(modules, amounts.code)])


def write_changing(folder: Path, part: str, tokenizer: Any, amounts: RoutingTextSizes) -> None:
    """Write the documents that change domain, of the written questions of one part."""
    code, prose = (read_questions(folder, domain, part) for domain in ("code", "reading"))
    write_lines(folder / f"changing-{part}.jsonl", _changing(code, prose, tokenizer, amounts))


def read_questions(folder: Path, domain: str, part: str) -> list[RoutingQuestion]:
    """The written questions of one domain and part."""
    lines = json_lines(folder / f"{domain}-{part}.jsonl")
    return [RoutingQuestion(e["prompt"], e["answer"], tuple(e["choices"]), e["tests"]) for e in lines]


def read_changing(folder: Path, part: str) -> list[tuple[str, str]]:
    """The documents that change domain, as pairs of code and prose."""
    return [(first, second) for first, second in json_lines(folder / f"changing-{part}.jsonl")]


def shingles(texts: Iterable[str]) -> set[int]:
    """Hashes of all sequences of `SHINGLE` consecutive words; punctuation does not count."""
    split = (re.findall(r"\w+", text.lower()) for text in texts)
    return {hash(tuple(words[i : i + SHINGLE])) for words in split for i in range(len(words) - SHINGLE + 1)}


def cloze(entry: Mapping[str, str]) -> RoutingQuestion:
    """A question of ARC or OpenBookQA, without its choices in the prompt."""
    question, _, rest = entry["instruction"].removeprefix(_QUESTION).partition("\n\nAnswer1: ")
    parts = _CHOICE.split("Answer1: " + rest.partition("\n\nAnswer format")[0])
    choices = {f"answer{number}": f" {text.strip()}\n" for number, text in zip(parts[1::2], parts[2::2], strict=True)}
    return RoutingQuestion(f"{question.strip()}\nAnswer:", choices[entry["answer"]], tuple(choices.values()))


def _changing(
    code: Sequence[RoutingQuestion], prose: Sequence[RoutingQuestion], tokenizer: Any, amounts: RoutingTextSizes
) -> list[tuple[str, str]]:
    """Pairs of a program and a passage, each cut to its first tokens."""
    programs = _cut([entry.answer.lstrip("\n") for entry in shuffled(code, "items")], tokenizer, amounts.half)
    passages = _cut([entry.prompt.partition("\n")[0] for entry in shuffled(prose, "items")], tokenizer, amounts.half)
    return list(zip(programs, passages, strict=False))[: amounts.documents]


def _cut(texts: Sequence[str], tokenizer: Any, half: int) -> list[str]:
    """The first `half` tokens of every distinct text that has at least half as many."""
    halves = []
    for text in dict.fromkeys(texts):
        starts = [start for start, _ in tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]]
        if len(starts) >= half // 2:
            halves.append((text[: starts[half]] if len(starts) > half else text).removesuffix("\n") + "\n")
    return halves


def _articles(data: Path) -> list[str]:
    """Wikipedia's articles, without the spaces that WikiText puts around punctuation."""
    articles = []
    for name in WIKIPEDIA:
        text = (data / name).read_text(encoding="utf-8").replace(" <unk>", "")
        text = re.sub(r" @(\W)@ ", r"\1", text)
        text = re.sub(r" ([,.;:!?)\]]|'s\b)", r"\1", text).replace("( ", "(").replace("[ ", "[")
        articles += [entry.strip() for entry in re.split(r"\n (?== [^=])", text) if entry.strip()]
    return articles


def alternating(data: Path, files: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """The questions of several files in turn. The rest of the longer files follows at the end."""
    lists = [json.loads((data / file).read_text(encoding="utf-8")) for file in files]
    yield from (entry for entries in zip_longest(*lists) for entry in entries if entry is not None)


def json_lines(file: Path) -> Iterator[Any]:
    """The values of a file with one a line."""
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())
