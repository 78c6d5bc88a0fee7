"""Generated text in the form of the data folder, for the experiments with token routing."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.parents import ENGLISH
from experiments.routing_smollm2.fields import CLINC, CLINC_PARTS, TOPICS
from experiments.routing_smollm2.texts import OPENBOOK, SVAMP
from experiments.token_routing import texts

WORDS = ["the", "river", "house", "walked", "under", "morning", "old", "said", "garden", "letter", "stone", "fish"]


def words(count: int, seed: object) -> str:
    source = random.Random(str(seed))
    return " ".join(source.choice(WORDS) for _ in range(count))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    write(path, "".join(json.dumps(line) + "\n" for line in lines))


def function(name: str) -> str:
    head = f'def {name}(x):\n    """Return {words(8, name)}."""\n'
    return f"{head}    total = x + {len(name)}\n    return total * total - x\n"


def arc(seed: object) -> dict[str, str]:
    choices = " ".join(f"Answer{n}: {words(2, (seed, n))}" for n in range(1, 5))
    question = f"Please choose the correct answer to the question: {words(6, seed)}?"
    return {"instruction": f"{question}\n\n{choices}\n\nAnswer format: answer1/answer2", "answer": "answer3"}


def article(number: int) -> dict[str, object]:
    context = words(14, ("article", number))
    question = {"question": f"{words(3, number)}?", "answers": [{"text": context.split()[2]}]}
    return {"title": f"Title_{number}", "paragraphs": [{"context": context, "qas": [question, question]}]}


def write_data(data: Path) -> Path:
    """A data folder with a few texts of each domain."""
    write_lines(data / ENGLISH, [{"text": words(600, f"novel {n}")} for n in range(3)])
    for name in texts.WIKIPEDIA:
        write(data / name, "".join(f"\n = Title {n} = \n \n {words(60, (name, n))} , <unk> .\n" for n in range(4)))
    for name in texts.GSM8K:
        sums = [{"question": f"{words(6, (name, n))} {n}?", "answer": f"{n} <<1+1=2>>2\n#### {n}"} for n in range(20)]
        write_lines(data / name, sums)
    for part, files in texts.ARC.items():
        for name in files:
            write(data / name, json.dumps([arc((part, name, n)) for n in range(20)]))
    kinds = ("Addition", "Subtraction", "Multiplication", "Common-Division")
    items = [
        {"Body": f"Tom has {n} fish", "Question": f"How many {words(2, n)}?", "Answer": float(n), "Type": kinds[n % 4]}
        for n in range(40)
    ]
    write(data / SVAMP, json.dumps(items))
    write(data / OPENBOOK, json.dumps([arc(("book", n)) for n in range(9)]))
    lines = [
        {"task_id": n, "text": f"Write {words(3, n)}.", "code": f"def f{n}(x): return x + {n}"}
        | {"test_setup_code": "", "test_list": [f"assert f{n}(1) == {n + 1}"]}
        for n in [*range(11, 41), *range(601, 631)]
    ]
    write(data / texts.MBPP, "".join(json.dumps(line) + "\n" for line in lines))
    head = 'def g{0}(x):\n    """Return the sum of x and {0}, as a number."""\n    '
    short = [(head + "total = x + {0}\n    total = total + total\n    return total - x\n").format(n) for n in range(9)]
    write(data / texts.ALGORITHMS, "".join(json.dumps({"path": "m.py", "text": text}) + "\n" for text in short))
    write(data / texts.XQUAD, json.dumps({"data": [article(n) for n in range(33)]}))
    intents = {topic: [f"{topic}_{n}" for n in range(5)] for topic in TOPICS}
    write(data / CLINC[0], json.dumps(intents))
    said = [(f"{words(3, (topic, n))} {n}", f"{topic}_{n % 5}") for topic in TOPICS for n in range(20)]
    write(data / CLINC[1], json.dumps({part: said[n::3] for n, part in enumerate(CLINC_PARTS.values())}))
    answer = [{"start": 0, "end": 4, "string": "x"}]
    question: dict[str, Any] = {"title_text": "Title 40", "question_text": "who", "paragraph_text": words(9, "qed")}
    write_lines(
        data / texts.QED, [question | {"original_nq_answers": [answer]}, question | {"original_nq_answers": []}]
    )
    return data
