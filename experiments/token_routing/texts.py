"""Questions with right answers of four domains, the backbone's training text, and documents that change domain.

Every prompt ends in the same way, so that only its content tells the domains apart. Training, validation and test
have different questions, and reading comprehension different articles. Validation and test leave out every question
that shares `SHINGLE` consecutive words with a training text, the backbone's included.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from experiments.composition_code.run import functions
from experiments.parents import ENGLISH, read_texts, spaced, up_to
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
MBPP_PARTS = {"train": range(601, 975), "validation": range(511, 601), "test": range(11, 511)}
XQUAD, QED = "routing/reading/xquad/xquad.en.json", "routing/reading/qed/qed-dev.jsonlines"
WIKIPEDIA = ("lm_text/wikitext2_valid_test/valid.txt", "lm_text/wikitext2_valid_test/test.txt")
FILES = (ENGLISH, *WIKIPEDIA, *GSM8K, *ARC["train"], *ARC["test"], MBPP, ALGORITHMS, XQUAD, QED)
SHINGLE = 12
_CHOICE = re.compile(r"Answer(\d): ")
_QUESTION = "Please choose the correct answer to the question: "


class RoutingQuestion(NamedTuple):
    """A question with its right answer. `choices` holds all answers of a multiple-choice question."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Prompt and answer."""
        return self.prompt + self.answer


Parts = Mapping[str, list[RoutingQuestion]]


class RoutingTextSizes(Config):
    """Amount of each text.

    Args:
        novels: number of English novels that the backbone reads.
        novel: characters of each novel.
        wikipedia, code: characters of each that the backbone reads.
        trained: maximum number of training examples of an expert.
        validated, tested: questions of each domain.
        chosen: multiple-choice test questions.
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


def read_domains(data: Path) -> dict[str, Parts]:
    """Every question of every domain, by domain and part."""
    return {"math": _math(data), "science": _science(data), "code": _code(data), "reading": _reading(data)}


def write_texts(
    data: Path, corpora: Iterable[Path], folder: Path, amounts: RoutingTextSizes, tokenizer: Any, length: int
) -> dict[str, int]:
    """Write questions of every domain and part, and the documents; gives the number left out by domain.

    Args:
        corpora: files of the backbone's training text.
        tokenizer, length: only questions that fit into `length` tokens are taken.
    """
    domains = {
        domain: {part: _fitting(items, tokenizer, length) for part, items in parts.items()}
        for domain, parts in read_domains(data).items()
    }
    trained = [entry.text for parts in domains.values() for entry in parts["train"]]
    known = shingles([*(text for file in corpora for text in read_texts(file)), *trained])
    left_out = {}
    for domain, parts in domains.items():
        clean = {part: [entry for entry in parts[part] if not known & shingles([entry.text])] for part in PARTS[1:]}
        left_out[domain] = sum(len(parts[part]) - len(items) for part, items in clean.items())
        written = {
            "train": spaced(shuffled(parts["train"], "items"), amounts.trained),
            "validation": shuffled(clean["validation"], "items")[: amounts.validated],
            "test": shuffled(clean["test"], "items")[: max(amounts.tested, amounts.chosen)],
        }
        for part, items in written.items():
            write_lines(folder / f"{domain}-{part}.jsonl", (entry._asdict() | {"text": entry.text} for entry in items))
        domains[domain] = {**parts, **clean}
    for part in PARTS[1:]:
        pairs = _changing(domains["code"][part], domains["reading"][part], tokenizer, amounts)
        write_lines(folder / f"changing-{part}.jsonl", pairs)
    return left_out


def read_questions(folder: Path, domain: str, part: str) -> list[RoutingQuestion]:
    """The written questions of one domain and part."""
    lines = _json_lines(folder / f"{domain}-{part}.jsonl")
    return [RoutingQuestion(entry["prompt"], entry["answer"], tuple(entry["choices"])) for entry in lines]


def read_changing(folder: Path, part: str) -> list[tuple[str, str]]:
    """The documents that change domain, as pairs of code and prose."""
    return [(first, second) for first, second in _json_lines(folder / f"changing-{part}.jsonl")]


def shingles(texts: Iterable[str]) -> set[int]:
    """Hashes of all sequences of `SHINGLE` consecutive words; punctuation does not count."""
    split = (re.findall(r"\w+", text.lower()) for text in texts)
    return {hash(tuple(words[i : i + SHINGLE])) for words in split for i in range(len(words) - SHINGLE + 1)}


def _math(data: Path) -> Parts:
    """GSM8K. The last twentieth of its training part is validation."""
    entries = (_json_lines(data / file) for file in GSM8K)
    return _split_validation(*([_question(e["question"], f" {e['answer']}\n") for e in of_part] for of_part in entries))


def _science(data: Path) -> Parts:
    """ARC, easy and challenge in turn, as questions without choices. The last twentieth of training is validation."""
    return _split_validation(*([_cloze(entry) for entry in _alternating(data, files)] for files in ARC.values()))


def _split_validation(train: list[RoutingQuestion], test: list[RoutingQuestion]) -> Parts:
    cut = len(train) - max(1, len(train) // 20)
    return {"train": train[:cut], "validation": train[cut:], "test": test}


def _cloze(entry: Mapping[str, str]) -> RoutingQuestion:
    question, _, rest = entry["instruction"].removeprefix(_QUESTION).partition("\n\nAnswer1: ")
    parts = _CHOICE.split("Answer1: " + rest.partition("\n\nAnswer format")[0])
    choices = {f"answer{number}": f" {text.strip()}\n" for number, text in zip(parts[1::2], parts[2::2], strict=True)}
    return _question(question, choices[entry["answer"]], *choices.values())


def _code(data: Path) -> Parts:
    """MBPP in its published parts. Training adds functions of The Algorithms that the backbone does not read."""
    questions = {
        entry["task_id"]: _question(entry["text"], "\n{}\n".format(entry["code"].replace("\r\n", "\n").strip()))
        for entry in _json_lines(data / MBPP)
    }
    parts = {part: [questions[n] for n in questions if n in numbers] for part, numbers in MBPP_PARTS.items()}
    modules = deal(read_texts(data / ALGORITHMS), {"backbone": 2, "expert": 1})["expert"]
    parts["train"] += [_question(entry.doc, f"\n{entry.code}\n") for entry in functions(modules)]
    return parts


def _reading(data: Path) -> Parts:
    """XQuAD and QED, split by article."""
    articles: defaultdict[str, list[RoutingQuestion]] = defaultdict(list)

    def add(title: str, passage: str, question: str, answer: str) -> None:
        item = _question(f"{passage.strip()}\n{question}", f" {answer.strip()}\n")
        articles[title.replace("_", " ").lower()].append(item)

    for article in json.loads((data / XQUAD).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                add(article["title"], paragraph["context"], entry["question"], entry["answers"][0]["text"])
    for entry in _json_lines(data / QED):
        answers = [span["string"] for spans in entry["original_nq_answers"] for span in spans]
        if answers:
            add(entry["title_text"], entry["paragraph_text"], entry["question_text"], min(answers, key=len))
    dealt = deal(list(articles), {"train": 8, "validation": 1, "test": 2})
    return {part: [item for title in titles for item in articles[title]] for part, titles in dealt.items()}


def _question(question: str, answer: str, *choices: str) -> RoutingQuestion:
    return RoutingQuestion(f"{question.strip()}\nAnswer:", answer, choices)


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


def _alternating(data: Path, files: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """The questions of several files in turn. The rest of the longer files follows at the end."""
    lists = [json.loads((data / file).read_text(encoding="utf-8")) for file in files]
    yield from (entry for entries in zip_longest(*lists) for entry in entries if entry is not None)


def _json_lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _fitting(items: Sequence[RoutingQuestion], tokenizer: Any, length: int) -> list[RoutingQuestion]:
    sizes = tokenizer([entry.text for entry in items], verbose=False)["input_ids"] if items else []
    return [entry for entry, ids in zip(items, sizes, strict=True) if len(ids) + 4 < length]
