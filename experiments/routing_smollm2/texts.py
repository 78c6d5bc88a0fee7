"""Questions of four skills with short answers, and three wrong answers to each question.

Validation questions have another source than test questions. No two of training, validation and the tests of the seeds
share a question; questions are compared without punctuation and case.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.composition_code.run import functions
from experiments.parents import read_texts
from experiments.python_texts import deal
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

SVAMP = "routing/math/svamp/SVAMP.json"
OPENBOOK = "routing/science/openbookqa/test.json"
FILES = (*GSM8K, SVAMP, *ARC["train"], *ARC["test"], OPENBOOK, MBPP, ALGORITHMS, XQUAD, QED)
SOURCES = {
    "math": ("GSM8K, training part", "GSM8K, test part", "SVAMP"),
    "science": ("ARC, training part", "OpenBookQA", "ARC, test part"),
    "code": ("MBPP 511-974", "The Algorithms", "MBPP 11-510"),
    "reading": ("XQuAD, three fifths of the articles", "QED", "XQuAD, the other articles"),
}
WRONG = 3  # wrong answers to each question
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
    """Write the parts of every domain: training, validation, and a different test for each seed (`DOMAIN-test0.jsonl`).

    Args:
        skills: every question by domain and part, see `read_skills`.
        folder: folder to write to.
        tokenizer: tokenizer of the backbone.
        counts: number of questions of a domain in `train`, in `validation`, and in the `test` of each seed.
        seeds: the seeds.
        longest: maximum number of tokens of a `prompt`, of an `answer`, and of a `program`.
        known: shingles of the training text of the backbone, of which validation and test questions have none.
    """
    for domain, parts in skills.items():
        kind = "program" if domain.startswith("code") else "answer"
        fitting: Parts = {}
        for part, questions in parts.items():
            fitting[part] = [
                question for question in questions if _fits(question, tokenizer, longest["prompt"], longest[kind])
            ]
        written = _split(fitting, counts, seeds, known)
        for part, questions in written.items():
            completed = with_choices(domain, questions)
            lines = [question._asdict() | {"text": question.text} for question in completed]
            write_lines(folder / f"{domain}-{part}.jsonl", lines)


def _split(
    parts: Mapping[str, Sequence[RoutingQuestion]],
    counts: Mapping[str, int],
    seeds: Sequence[int],
    known: Container[int],
) -> Parts:
    """Return the questions of each written part, which share no question."""
    trained = {normalised(question.prompt) for question in parts["train"]}
    validation = _fresh(parts["validation"], trained, known)[: counts["validation"]]
    chosen = {normalised(question.prompt) for question in validation}
    fresh = _fresh(parts["test"], trained, known)
    tests = [question for question in fresh if normalised(question.prompt) not in chosen]
    written = {
        "train": shuffled(parts["train"], "items")[: counts["train"]],
        "validation": validation,
    }
    for number, seed in enumerate(seeds):
        start = number * counts["test"]
        written[f"test{seed}"] = tests[start : start + counts["test"]]
    return written


def _fresh(
    questions: Iterable[RoutingQuestion],
    trained: Container[str],
    known: Container[int],
) -> list[RoutingQuestion]:
    """Return the distinct questions that neither training nor the backbone's text contains, in random order."""
    distinct = {normalised(question.prompt): question for question in questions}
    fresh = []
    for key, question in distinct.items():
        is_known = any(shingle in known for shingle in shingles([question.text]))
        if not is_known and key not in trained:
            fresh.append(question)
    return shuffled(fresh, "items")


def normalised(text: str) -> str:
    """Return the words of a text in lower case, joined by spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def read_skills(data: Path) -> dict[str, Parts]:
    """Read every question by domain and part; only those of science and reading already have `choices`."""
    return {
        "math": _math(data),
        "science": _science(data),
        "code": _code(data),
        "reading": _reading(data),
    }


def with_choices(domain: str, questions: Sequence[RoutingQuestion]) -> list[RoutingQuestion]:
    """Add wrong answers: other numbers, programs under the right name, parts of the passage."""
    completed = []
    for question in questions:
        source = random.Random(question.prompt)
        if domain.startswith("code"):
            candidates = _other_programs(question, questions, source)
        elif domain.startswith("math"):
            candidates = _other_numbers(question, source)
        else:
            candidates = list(question.choices)
        wrong = [candidate for candidate in dict.fromkeys(candidates) if candidate != question.answer]
        completed.append(question._replace(choices=(question.answer, *wrong[:WRONG])))
    return completed


def _other_programs(
    question: RoutingQuestion,
    questions: Sequence[RoutingQuestion],
    source: random.Random,
) -> list[str]:
    """Return the programs of other questions, renamed to the name of the right program."""
    name = _name(question.answer)
    sampled = source.sample(list(questions), min(8, len(questions)))
    programs = [other.answer for other in sampled]
    return [re.sub(rf"\b{_name(program)}\b", name, program) for program in programs]


def _other_numbers(question: RoutingQuestion, source: random.Random) -> list[str]:
    """Return the numbers of a question, and numbers near the right one, in random order."""
    right = int(question.answer)
    numbers = [int(number) for number in re.findall(r"\d+", question.prompt)]
    numbers += [right + difference for difference in (-10, -1, 1, 10)]
    sampled = source.sample(numbers, len(numbers))
    return [f" {number}\n" for number in sampled if number >= 0]


def _math(data: Path) -> Parts:
    train_file, test_file = GSM8K
    parts = {
        "train": _gsm8k(data / train_file),
        "validation": _gsm8k(data / test_file),
        "test": [question for _, question in svamp(data)],
    }
    natural: Parts = {}
    for part, questions in parts.items():
        natural[part] = [question for question in questions if question.answer.strip().isdigit()]
    return natural


def _gsm8k(file: Path) -> list[RoutingQuestion]:
    questions = []
    for entry in json_lines(file):
        number = entry["answer"].rpartition("#### ")[2].replace(",", "")
        questions.append(question_of(entry["question"], number))
    return questions


def svamp(data: Path) -> list[tuple[str, RoutingQuestion]]:
    """Read the questions of SVAMP whose answer is a natural number, as pairs of the operation and the question."""
    questions = []
    for entry in json.loads((data / SVAMP).read_text(encoding="utf-8")):
        text = f"{entry['Body'].rstrip(' .')}. {entry['Question']}"
        answer = f"{entry['Answer']:g}"
        if answer.isdigit():
            questions.append((entry["Type"], question_of(text, answer)))
    return questions


def _science(data: Path) -> Parts:
    files = {"train": ARC["train"], "validation": [OPENBOOK], "test": ARC["test"]}
    parts: Parts = {}
    for part, part_files in files.items():
        parts[part] = [_with_listed_choices(cloze(entry)) for entry in alternating(data, part_files)]
    return parts


def _with_listed_choices(question: RoutingQuestion) -> RoutingQuestion:
    """Add the choices of a question to its prompt."""
    listed = "; ".join(choice.strip() for choice in question.choices)
    prompt = question.prompt.replace("\nAnswer:", f"\nChoices: {listed}\nAnswer:")
    return question._replace(prompt=prompt)


def _code(data: Path) -> Parts:
    parts: Parts = {"train": [], "test": [], "validation": []}
    for entry in json_lines(data / MBPP):
        code = entry["code"].replace("\r\n", "\n").strip()
        tests = "\n".join([entry["test_setup_code"], *entry["test_list"]])
        has_one_function = len(re.findall(r"\bdef ", code)) == 1
        is_tested = f"{_name(code)}(" in tests
        number = entry["task_id"]
        if has_one_function and is_tested and number > 10:
            part = "train" if number > 510 else "test"
            parts[part].append(_program(entry["text"], code, tests))
    for function in functions(read_texts(data / ALGORITHMS)):
        if "def " in function.code:
            parts["validation"].append(_program(function.doc, function.code))
    return parts


def _program(text: str, code: str, tests: str = "") -> RoutingQuestion:
    return RoutingQuestion(
        prompt=f"{text.strip(' .')}. Name it {_name(code)}.\nAnswer:",
        answer=f"\n{code}\n",
        tests=tests,
    )


def _name(code: str) -> str:
    """Return the name of the first function."""
    match = re.search(r"\bdef (\w+)", code)
    return match[1] if match else ""


def xquad(data: Path) -> dict[str, list[RoutingQuestion]]:
    """Read the questions of XQuAD, by the title of the article."""
    articles: dict[str, list[RoutingQuestion]] = {}
    for article in json.loads((data / XQUAD).read_text(encoding="utf-8"))["data"]:
        questions = []
        for paragraph in article["paragraphs"]:
            answers = [entry["answers"][0]["text"] for entry in paragraph["qas"]]
            for entry, answer in zip(paragraph["qas"], answers, strict=True):
                questions.append(_passage(paragraph["context"], entry["question"], answer, answers))
        articles[article["title"]] = questions
    return articles


def _reading(data: Path) -> Parts:
    articles = xquad(data)
    parts: Parts = {}
    for part, titles in deal(list(articles), {"train": 3, "test": 2}).items():
        parts[part] = [question for title in titles for question in articles[title]]
    parts["validation"] = []
    for entry in json_lines(data / QED):
        answers = [span["string"] for spans in entry["original_nq_answers"] for span in spans]
        if answers:
            shortest = min(answers, key=len)
            question = _passage(entry["paragraph_text"], entry["question_text"], shortest, others=[])
            parts["validation"].append(question)
    return parts


def _passage(passage: str, question: str, answer: str, others: Sequence[str]) -> RoutingQuestion:
    """Return a question about the sentence with the answer and the sentence before it.

    The wrong answers are answers to other questions (`others`) that the passage contains, and other words of it.
    """
    sentences = re.split(r"(?<=[.!?])\s+", passage.strip())
    last = len(sentences) - 1
    for number, sentence in enumerate(sentences):
        if answer in sentence:
            last = number
            break
    excerpt = " ".join(sentences[max(0, last - 1) : last + 1])
    words = excerpt.split()
    size = len(answer.split())
    starts = random.Random(question).sample(range(len(words)), min(6, len(words)))
    wrong = [other for other in others if other in excerpt]
    wrong += [" ".join(words[start : start + size]) for start in starts]
    choices = tuple(f" {text.strip()}\n" for text in wrong)
    return question_of(f"{excerpt}\n{question}", answer)._replace(choices=choices)


def question_of(question: str, answer: str) -> RoutingQuestion:
    """Return a question with a short answer."""
    return RoutingQuestion(
        prompt=f"{question.strip()}\nAnswer:",
        answer=f" {answer.strip()}\n",
    )


def _fits(question: RoutingQuestion, tokenizer: Any, longest_prompt: int, longest_answer: int) -> bool:
    prompt, answer = tokenizer([question.prompt, question.answer], verbose=False)["input_ids"]
    return len(prompt) <= longest_prompt and len(answer) <= longest_answer
