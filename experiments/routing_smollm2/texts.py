"""Questions of four skills with short answers, and three wrong answers for each.

Validation is of another source than the test. No two of training, validation and the seeds' tests share a question, by
its text without punctuation and case.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.composition_code.run import functions
from experiments.parents import read_texts
from experiments.study import shuffled, write_lines
from experiments.token_routing.texts import (
    ALGORITHMS,
    ARC,
    GSM8K,
    MBPP,
    QED,
    XQUAD,
    RoutingQuestion,
    alternating,
    cloze,
    json_lines,
    shingles,
)
from graftlm.demo.corpus import deal

SVAMP, OPENBOOK = "routing/math/svamp/SVAMP.json", "routing/science/openbookqa/test.json"
FILES = (*GSM8K, SVAMP, *ARC["train"], *ARC["test"], OPENBOOK, MBPP, ALGORITHMS, XQUAD, QED)
SOURCES = {
    "math": ("GSM8K, training part", "GSM8K, test part", "SVAMP"),
    "science": ("ARC, training part", "OpenBookQA", "ARC, test part"),
    "code": ("MBPP 511-974", "The Algorithms", "MBPP 11-510"),
    "reading": ("XQuAD, three fifths of the articles", "QED", "XQuAD, the other articles"),
}
WRONG = 3  # wrong answers of each question
Parts = dict[str, list[RoutingQuestion]]


def write_skills(
    skills: Mapping[str, Parts],
    folder: Path,
    tokenizer: Any,
    counts: Mapping[str, int],
    seeds: Sequence[int],
    longest: Mapping[str, int],
    known: Container[int] = (),
) -> None:
    """Write training, validation, and a test part of its own for each seed: `DOMAIN-test0.jsonl`.

    Args:
        skills: every question by domain and part, as `read_skills` gives them.
        counts: questions of a domain in `train`, `validation`, and `test` for each seed.
        longest: tokens of a `prompt`, of an `answer`, and of a `program`.
        known: shingles of the backbone's training text, which no question of validation and test shares.
    """
    for domain, parts in skills.items():
        limit = longest["program" if domain.startswith("code") else "answer"]
        fitting = {
            part: [each for each in items if _fits(each, tokenizer, longest["prompt"], limit)]
            for part, items in parts.items()
        }
        trained = {normalised(each.prompt) for each in fitting["train"]}
        written = {"train": shuffled(fitting["train"], "items")[: counts["train"]]}
        for part in ("validation", "test"):
            fresh = {normalised(each.prompt): each for each in fitting[part]}
            fresh = {key: each for key, each in fresh.items() if not any(s in known for s in shingles([each.text]))}
            fitting[part] = shuffled([each for key, each in fresh.items() if key not in trained], "items")
        written["validation"] = fitting["validation"][: counts["validation"]]
        chosen = {normalised(each.prompt) for each in written["validation"]}
        fitting["test"] = [each for each in fitting["test"] if normalised(each.prompt) not in chosen]
        for number, seed in enumerate(seeds):
            written[f"test{seed}"] = fitting["test"][number * counts["test"] : (number + 1) * counts["test"]]
        for part, items in written.items():
            lines = (each._asdict() | {"text": each.text} for each in with_choices(domain, items))
            write_lines(folder / f"{domain}-{part}.jsonl", lines)


def normalised(text: str) -> str:
    """A question's words in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))


def read_skills(data: Path) -> dict[str, Parts]:
    """Every question by domain and part; only those of science and reading have `choices` yet."""
    return {"math": _math(data), "science": _science(data), "code": _code(data), "reading": _reading(data)}


def with_choices(domain: str, questions: Sequence[RoutingQuestion]) -> list[RoutingQuestion]:
    """The questions with wrong answers: other numbers, programs under the right name, parts of the passage."""
    completed = []
    for each in questions:
        source = random.Random(each.prompt)
        if domain.startswith("code"):
            name = _name(each.answer)
            others = [other.answer for other in source.sample(list(questions), min(8, len(questions)))]
            wrong = [re.sub(rf"\b{_name(other)}\b", name, other) for other in others]
        elif domain.startswith("math"):
            right = int(each.answer)
            numbers = [int(n) for n in re.findall(r"\d+", each.prompt)] + [right + n for n in (-10, -1, 1, 10)]
            wrong = [f" {n}\n" for n in source.sample(numbers, len(numbers)) if n >= 0]
        else:
            wrong = list(each.choices)
        wrong = [other for other in dict.fromkeys(wrong) if other != each.answer][:WRONG]
        completed.append(each._replace(choices=(each.answer, *wrong)))
    return completed


def _math(data: Path) -> Parts:
    train, validation = (
        [
            question_of(e["question"], e["answer"].rpartition("#### ")[2].replace(",", ""))
            for e in json_lines(data / file)
        ]
        for file in GSM8K
    )
    parts = {"train": train, "validation": validation, "test": [each for _, each in svamp(data)]}
    return {part: [each for each in of_part if each.answer.strip().isdigit()] for part, of_part in parts.items()}


def svamp(data: Path) -> list[tuple[str, RoutingQuestion]]:
    """SVAMP's questions whose answer is a natural number, each after its operation."""
    items = json.loads((data / SVAMP).read_text(encoding="utf-8"))
    texts = [(f"{e['Body'].rstrip(' .')}. {e['Question']}", f"{e['Answer']:g}") for e in items]
    return [(e["Type"], question_of(*text)) for e, text in zip(items, texts, strict=True) if text[1].isdigit()]


def _science(data: Path) -> Parts:
    files = {"train": ARC["train"], "validation": [OPENBOOK], "test": ARC["test"]}
    parts = {part: [cloze(entry) for entry in alternating(data, of_part)] for part, of_part in files.items()}
    return {
        part: [
            each._replace(prompt=each.prompt.replace("\nAnswer:", f"\nChoices: {_joined(each.choices)}\nAnswer:"))
            for each in of_part
        ]
        for part, of_part in parts.items()
    }


def _joined(choices: Iterable[str]) -> str:
    return "; ".join(choice.strip() for choice in choices)


def _code(data: Path) -> Parts:
    parts: defaultdict[str, list[RoutingQuestion]] = defaultdict(list)
    for entry in json_lines(data / MBPP):
        code = entry["code"].replace("\r\n", "\n").strip()
        tests = "\n".join([entry["test_setup_code"], *entry["test_list"]])
        if len(re.findall(r"\bdef ", code)) == 1 and f"{_name(code)}(" in tests and entry["task_id"] > 10:
            parts["train" if entry["task_id"] > 510 else "test"].append(_program(entry["text"], code, tests))
    parts["validation"] = [
        _program(each.doc, each.code) for each in functions(read_texts(data / ALGORITHMS)) if "def " in each.code
    ]
    return parts


def _program(text: str, code: str, tests: str = "") -> RoutingQuestion:
    return RoutingQuestion(f"{text.strip(' .')}. Name it {_name(code)}.\nAnswer:", f"\n{code}\n", (), tests)


def _name(code: str) -> str:
    """The name of the first function."""
    named = re.search(r"\bdef (\w+)", code)
    return named[1] if named else ""


def xquad(data: Path) -> dict[str, list[RoutingQuestion]]:
    """XQuAD's questions, by the title of the article."""
    articles: dict[str, list[RoutingQuestion]] = {}
    for article in json.loads((data / XQUAD).read_text(encoding="utf-8"))["data"]:
        articles[article["title"]] = [
            _passage(paragraph["context"], entry["question"], entry["answers"][0]["text"], others)
            for paragraph in article["paragraphs"]
            for others in [[entry["answers"][0]["text"] for entry in paragraph["qas"]]]
            for entry in paragraph["qas"]
        ]
    return articles


def _reading(data: Path) -> Parts:
    articles = xquad(data)
    dealt = deal(list(articles), {"train": 3, "test": 2})
    parts = {part: [each for title in titles for each in articles[title]] for part, titles in dealt.items()}
    parts["validation"] = []
    for entry in json_lines(data / QED):
        if answers := [span["string"] for spans in entry["original_nq_answers"] for span in spans]:
            parts["validation"].append(
                _passage(entry["paragraph_text"], entry["question_text"], min(answers, key=len), [])
            )
    return parts


def _passage(passage: str, question: str, answer: str, others: Sequence[str]) -> RoutingQuestion:
    """The sentence with the answer and the one before it. Other answers and parts of them are the wrong answers."""
    sentences = re.split(r"(?<=[.!?])\s+", passage.strip())
    last = next((n for n, sentence in enumerate(sentences) if answer in sentence), len(sentences) - 1)
    passage = " ".join(sentences[max(0, last - 1) : last + 1])
    words, size = passage.split(), len(answer.split())
    starts = random.Random(question).sample(range(len(words)), min(6, len(words)))
    wrong = [
        *(other for other in others if other in passage),
        *(" ".join(words[start : start + size]) for start in starts),
    ]
    choices = tuple(f" {text.strip()}\n" for text in wrong)
    return question_of(f"{passage}\n{question}", answer)._replace(choices=choices)


def question_of(question: str, answer: str) -> RoutingQuestion:
    """A question with a short answer."""
    return RoutingQuestion(f"{question.strip()}\nAnswer:", f" {answer.strip()}\n")


def _fits(question: RoutingQuestion, tokenizer: Any, prompt: int, answer: int) -> bool:
    sizes = [len(ids) for ids in tokenizer([question.prompt, question.answer], verbose=False)["input_ids"]]
    return sizes[0] <= prompt and sizes[1] <= answer
