"""Four domains as prompts and right answers, what the backbone reads, and documents that change domain in the middle.

Every prompt ends in the same way, so that nothing but its content tells the domains apart. Training, validation and
test are other questions; of reading comprehension also other articles. A question of validation or test that shares
`SHINGLE` words in a row with any training text, the backbone's among them, is left out.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from experiments.composition_code.functions import functions
from experiments.parents import ENGLISH, read_texts, up_to
from experiments.texts import spaced
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


class Item(NamedTuple):
    """A question with its right answer, and all answers to choose from where there are some."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()

    @property
    def whole(self) -> str:
        """Prompt and answer."""
        return self.prompt + self.answer


Parts = Mapping[str, list[Item]]


class Amounts(Config):
    """How much of each text.

    Args:
        novels, novel: English novels that the backbone reads, and the characters of each.
        wikipedia, code: characters that it reads of these.
        trained: examples that an expert is trained on, at most.
        validated, tested: questions of each domain.
        chosen: test questions with answers to choose from.
        documents: that change domain in the middle, as many for validation.
        half: tokens of each half of theirs, at most; at least half as many.
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


QUICK = Amounts(
    novels=2, novel=3_000, wikipedia=3_000, code=3_000, trained=12, validated=2, tested=3, chosen=3, documents=2, half=8
)


def ask(question: str) -> str:
    """The prompt of a question."""
    return f"{question.strip()}\nAnswer:"


def write_corpus(data: Path, file: Path, amounts: Amounts) -> None:
    """Write what the backbone reads: English novels, Wikipedia, Python."""
    novels = (text[: amounts.novel] for text in read_texts(data / ENGLISH)[: amounts.novels])
    modules = deal(_modules(data), {"backbone": 2, "expert": 1})["backbone"]
    write_documents(file, [*novels, *up_to(_articles(data), amounts.wikipedia), *up_to(modules, amounts.code)])


def read_domains(data: Path) -> dict[str, Parts]:
    """Every question of every domain, by domain and part."""
    return {"math": _math(data), "science": _science(data), "code": _code(data), "reading": _reading(data)}


def write_texts(
    data: Path, corpora: Iterable[Path], folder: Path, amounts: Amounts, tokenizer: Any, length: int
) -> dict[str, int]:
    """Write the chosen questions of every domain and part, and the documents; gives how many were left out, by domain.

    Args:
        corpora: files of what the backbone has read.
        tokenizer, length: only what fits into so many tokens is taken.
    """
    domains = {
        domain: {part: _fitting(items, tokenizer, length) for part, items in parts.items()}
        for domain, parts in read_domains(data).items()
    }
    trained = [one.whole for parts in domains.values() for one in parts["train"]]
    known = shingles([*(text for file in corpora for text in read_texts(file)), *trained])
    left_out = {}
    for domain, parts in domains.items():
        clean = {part: [one for one in parts[part] if not known & shingles([one.whole])] for part in PARTS[1:]}
        left_out[domain] = sum(len(parts[part]) - len(items) for part, items in clean.items())
        _write(folder / f"{domain}-train.jsonl", spaced(_shuffled(parts["train"]), amounts.trained))
        for part, count in {"validation": amounts.validated, "test": max(amounts.tested, amounts.chosen)}.items():
            _write(folder / f"{domain}-{part}.jsonl", _shuffled(clean[part])[:count])
        domains[domain] = {**parts, **clean}
    for part in PARTS[1:]:
        pairs = _changing(domains["code"][part], domains["reading"][part], tokenizer, amounts)
        (folder / f"changing-{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), "utf-8")
    return left_out


def read_items(folder: Path, domain: str, part: str) -> list[Item]:
    """What `write_texts` wrote of one domain and part."""
    with (folder / f"{domain}-{part}.jsonl").open(encoding="utf-8") as lines:
        return [Item(one["prompt"], one["answer"], tuple(one["choices"])) for one in map(json.loads, lines)]


def read_changing(folder: Path, part: str) -> list[tuple[str, str]]:
    """The documents that change domain, (code, prose)."""
    with (folder / f"changing-{part}.jsonl").open(encoding="utf-8") as lines:
        return [(first, second) for first, second in map(json.loads, lines)]


def shingles(texts: Iterable[str]) -> set[int]:
    """The hashes of all runs of `SHINGLE` words, whatever stands between them."""
    found = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        found |= {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}
    return found


# The domains


def _math(data: Path) -> Parts:
    """GSM8K; the end of its training part is for validation."""

    def read(file: str) -> list[Item]:
        return [Item(ask(one["question"]), f" {one['answer']}\n") for one in _json_lines(data / file)]

    train, test = map(read, GSM8K)
    cut = len(train) - max(1, len(train) // 20)
    return {"train": train[:cut], "validation": train[cut:], "test": test}


def _science(data: Path) -> Parts:
    """ARC, easy and challenge in turn, as questions without their choices; the end of training is for validation."""
    train, test = ([_cloze(one) for one in _alternating(data, ARC[part])] for part in ("train", "test"))
    cut = len(train) - max(1, len(train) // 20)
    return {"train": train[:cut], "validation": train[cut:], "test": test}


def _cloze(one: Mapping[str, str]) -> Item:
    question, _, rest = one["instruction"].removeprefix(_QUESTION).partition("\n\nAnswer1: ")
    parts = _CHOICE.split("Answer1: " + rest.partition("\n\nAnswer format")[0])
    choices = {f"answer{number}": f" {text.strip()}\n" for number, text in zip(parts[1::2], parts[2::2], strict=True)}
    return Item(ask(question), choices[one["answer"]], tuple(choices.values()))


def _code(data: Path) -> Parts:
    """MBPP in its published parts; for training also functions of The Algorithms, in files that the backbone lacks."""
    parts: dict[str, list[Item]] = {part: [] for part in PARTS}
    for one in _json_lines(data / MBPP):
        for part, numbers in MBPP_PARTS.items():
            if one["task_id"] in numbers:
                parts[part].append(Item(ask(one["text"]), "\n" + one["code"].replace("\r\n", "\n").strip() + "\n"))
    modules = deal(_modules(data), {"backbone": 2, "expert": 1})["expert"]
    parts["train"] += [Item(ask(one.doc), f"\n{one.code}\n") for one in functions(modules)]
    return parts


def _reading(data: Path) -> Parts:
    """XQuAD and QED, their articles dealt out."""
    articles: dict[str, list[Item]] = {}
    for article in json.loads((data / XQUAD).read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for one in paragraph["qas"]:
                item = _about(paragraph["context"], one["question"], one["answers"][0]["text"])
                articles.setdefault(_title(article["title"]), []).append(item)
    for one in _json_lines(data / QED):
        answers = [span["string"] for found in one["original_nq_answers"] for span in found]
        if answers:
            item = _about(one["paragraph_text"], one["question_text"], min(answers, key=len))
            articles.setdefault(_title(one["title_text"]), []).append(item)
    dealt = deal(list(articles), {"train": 8, "validation": 1, "test": 2})
    return {part: [item for title in titles for item in articles[title]] for part, titles in dealt.items()}


def _about(passage: str, question: str, answer: str) -> Item:
    return Item(ask(f"{passage.strip()}\n{question}"), f" {answer.strip()}\n")


def _title(title: str) -> str:
    return title.replace("_", " ").lower()


# Documents that change domain


def _changing(code: Sequence[Item], prose: Sequence[Item], tokenizer: Any, amounts: Amounts) -> list[tuple[str, str]]:
    """Pairs of a program and a passage, each cut to its first tokens."""
    programs = _cut([one.answer.lstrip("\n") for one in _shuffled(code)], tokenizer, amounts.half)
    passages = _cut([one.prompt.partition("\n")[0] for one in _shuffled(prose)], tokenizer, amounts.half)
    return list(zip(programs, passages, strict=False))[: amounts.documents]


def _cut(texts: Sequence[str], tokenizer: Any, half: int) -> list[str]:
    """The first `half` tokens of every different text of at least half as many."""
    found = []
    for text in dict.fromkeys(texts):
        starts = [start for start, _ in tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]]
        if len(starts) >= half // 2:
            found.append(text[: starts[half]] if len(starts) > half else text)
    return [text if text.endswith("\n") else text + "\n" for text in found]


# Files


def _articles(data: Path) -> list[str]:
    """Wikipedia's articles, with the blanks around its punctuation taken out again."""
    found = []
    for name in WIKIPEDIA:
        text = (data / name).read_text(encoding="utf-8").replace(" <unk>", "")
        text = re.sub(r" @(\W)@ ", r"\1", text)
        text = re.sub(r" ([,.;:!?)\]]|'s\b)", r"\1", text).replace("( ", "(").replace("[ ", "[")
        found += [one.strip() for one in re.split(r"\n (?== [^=])", text) if one.strip()]
    return found


def _modules(data: Path) -> list[str]:
    return read_texts(data / ALGORITHMS)


def _alternating(data: Path, files: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """The questions of several files in turn, until the shortest ends, then the others' rest."""
    lists = [json.loads((data / file).read_text(encoding="utf-8")) for file in files]
    for index in range(max(map(len, lists))):
        yield from (one[index] for one in lists if index < len(one))


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _write(file: Path, items: Iterable[Item]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(one._asdict() | {"text": one.whole}) + "\n" for one in items)
    file.write_text("".join(lines), encoding="utf-8")


def _fitting(items: Sequence[Item], tokenizer: Any, length: int) -> list[Item]:
    sizes = tokenizer([one.whole for one in items], verbose=False)["input_ids"] if items else []
    return [one for one, ids in zip(items, sizes, strict=True) if len(ids) + 4 < length]


def _shuffled(items: Sequence[Item]) -> list[Item]:
    """In another order, always the same."""
    return random.Random("items").sample(list(items), len(items))
