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
from experiments.python_texts import deal, write_documents
from experiments.study import shuffled, write_lines
from graftlm.config import Config

DOMAINS = ("math", "science", "code", "reading")
PARTS = ("train", "validation", "test")
GSM8K = ("routing/math/gsm8k/train.jsonl", "routing/math/gsm8k/test.jsonl")
ARC = {
    "train": ("routing/science/arc_easy/train.json", "routing/science/arc_challenge/train.json"),
    "test": ("routing/science/arc_easy/test.json", "routing/science/arc_challenge/test.json"),
}
MBPP = "routing/code/mbpp/mbpp.jsonl"
ALGORITHMS = "routing/code/thealgorithms_py.jsonl"
XQUAD = "routing/reading/xquad/xquad.en.json"
QED = "routing/reading/qed/qed-dev.jsonlines"
WIKIPEDIA = ("lm_text/wikitext2_valid_test/valid.txt", "lm_text/wikitext2_valid_test/test.txt")
FILES = (ENGLISH, *WIKIPEDIA, ALGORITHMS)
SHINGLE = 12  # in words
_CHOICE = re.compile(r"Answer(\d): ")
_QUESTION = "Please choose the correct answer to the question: "


class RoutingQuestion(NamedTuple):
    """A question with its right answer.

    Args:
        prompt: the question, up to the answer.
        answer: the right answer.
        choices: all answers of a multiple-choice question.
        tests: source of the tests of a program.
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
    """The amount of each text.

    Args:
        novels: number of English novels that the backbone reads.
        novel: characters of each novel.
        wikipedia: characters of Wikipedia that the backbone reads.
        code: characters of Python that the backbone reads.
        trained: maximum number of training examples of an expert.
        validated: validation questions of each domain.
        tested: test questions of each domain; every seed has different ones.
        chosen: test questions of each domain that slow rows answer.
        documents: number of documents that change domain, for validation and for test.
        half: maximum number of tokens of a half of such a document; the minimum is half of it.
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
    novels=2,
    novel=3_000,
    wikipedia=3_000,
    code=3_000,
    trained=12,
    validated=2,
    tested=3,
    chosen=3,
    documents=2,
    half=8,
)


def write_corpus(data: Path, file: Path, amounts: RoutingTextSizes) -> None:
    """Write the training text of the backbone: English novels, Wikipedia, Python."""
    novels = read_texts(data / ENGLISH)[: amounts.novels]
    novel_starts = [text[: amounts.novel] for text in novels]
    articles = up_to(_articles(data), amounts.wikipedia)
    dealt = deal(read_texts(data / ALGORITHMS), {"backbone": 2, "expert": 1})
    modules = up_to(dealt["backbone"], amounts.code)
    write_documents(file, [*novel_starts, *articles, *modules])


def write_changing(folder: Path, part: str, tokenizer: Any, amounts: RoutingTextSizes) -> None:
    """Write the documents that change domain, made of the written questions of one part."""
    code = read_questions(folder, "code", part)
    prose = read_questions(folder, "reading", part)
    write_lines(folder / f"changing-{part}.jsonl", _changing(code, prose, tokenizer, amounts))


def read_questions(folder: Path, domain: str, part: str) -> list[RoutingQuestion]:
    """Read the written questions of one domain and part."""
    questions = []
    for entry in json_lines(folder / f"{domain}-{part}.jsonl"):
        question = RoutingQuestion(
            prompt=entry["prompt"],
            answer=entry["answer"],
            choices=tuple(entry["choices"]),
            tests=entry["tests"],
        )
        questions.append(question)
    return questions


def read_changing(folder: Path, part: str) -> list[tuple[str, str]]:
    """Read the documents that change domain, as pairs of code and prose."""
    return [(first, second) for first, second in json_lines(folder / f"changing-{part}.jsonl")]


def shingles(texts: Iterable[str]) -> set[int]:
    """Return hashes of all sequences of `SHINGLE` consecutive words, without punctuation."""
    hashes = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        for start in range(len(words) - SHINGLE + 1):
            hashes.add(hash(tuple(words[start : start + SHINGLE])))
    return hashes


def cloze(entry: Mapping[str, str]) -> RoutingQuestion:
    """Return a question of ARC or OpenBookQA, without its choices in the prompt."""
    question, _, rest = entry["instruction"].removeprefix(_QUESTION).partition("\n\nAnswer1: ")
    parts = _CHOICE.split("Answer1: " + rest.partition("\n\nAnswer format")[0])
    choices = {}
    for number, text in zip(parts[1::2], parts[2::2], strict=True):
        choices[f"answer{number}"] = f" {text.strip()}\n"
    return RoutingQuestion(
        prompt=f"{question.strip()}\nAnswer:",
        answer=choices[entry["answer"]],
        choices=tuple(choices.values()),
    )


def _changing(
    code: Sequence[RoutingQuestion],
    prose: Sequence[RoutingQuestion],
    tokenizer: Any,
    amounts: RoutingTextSizes,
) -> list[tuple[str, str]]:
    """Return pairs of a program and a passage, both cut to their first tokens."""
    programs = [entry.answer.lstrip("\n") for entry in shuffled(code, "items")]
    passages = [entry.prompt.partition("\n")[0] for entry in shuffled(prose, "items")]
    first_halves = _cut(programs, tokenizer, amounts.half)
    second_halves = _cut(passages, tokenizer, amounts.half)
    return list(zip(first_halves, second_halves, strict=False))[: amounts.documents]


def _cut(texts: Sequence[str], tokenizer: Any, half: int) -> list[str]:
    """Return the first `half` tokens of every distinct text that has at least half as many."""
    halves = []
    for text in dict.fromkeys(texts):
        offsets = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        if len(offsets) < half // 2:
            continue
        beginning = text
        if len(offsets) > half:
            stop, _ = offsets[half]
            beginning = text[:stop]
        halves.append(beginning.removesuffix("\n") + "\n")
    return halves


def _articles(data: Path) -> list[str]:
    """Return the articles of Wikipedia, without the spaces that WikiText puts around punctuation."""
    articles = []
    for name in WIKIPEDIA:
        text = (data / name).read_text(encoding="utf-8").replace(" <unk>", "")
        text = re.sub(r" @(\W)@ ", r"\1", text)
        text = re.sub(r" ([,.;:!?)\]]|'s\b)", r"\1", text)
        text = text.replace("( ", "(").replace("[ ", "[")
        entries = [entry.strip() for entry in re.split(r"\n (?== [^=])", text)]
        articles += [entry for entry in entries if entry]
    return articles


def alternating(data: Path, files: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Yield the questions of several files in turn. The rest of the longer files follows at the end."""
    lists = [json.loads((data / file).read_text(encoding="utf-8")) for file in files]
    for entries in zip_longest(*lists):
        for entry in entries:
            if entry is not None:
                yield entry


def json_lines(file: Path) -> Iterator[Any]:
    """Yield the values of a file with one JSON value in each line."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)
