"""Small files in the forms of the benchmarks, with items of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

THINGS = ("cat", "river", "lamp", "stone", "boat", "door", "cloud", "horse", "wheel", "garden")


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def ifeval_row(number: int) -> dict[str, Any]:
    """A prompt with one to three instructions, the kinds of which differ from row to row."""
    thing = THINGS[number % len(THINGS)]
    instructions: list[tuple[str, dict[str, Any]]] = [
        ("punctuation:no_comma", {}),
        ("keywords:existence", {"keywords": [thing]}),
        ("length_constraints:number_words", {"relation": "at least", "num_words": 4 + number % 5}),
        ("keywords:forbidden_words", {"forbidden_words": [thing, "never"]}),
        ("detectable_format:title", {}),
        ("startend:end_checker", {"end_phrase": f"That is the {thing}."}),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
        ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "less than"}),
        ("startend:quotation", {}),
    ]
    chosen = [instructions[(number + step) % len(instructions)] for step in range(1 + number % 3)]
    return {
        "key": number,
        "prompt": f"Write about the {thing}, number {number}.",
        "instruction_id_list": [kind for kind, _ in chosen],
        "kwargs": [keys for _, keys in chosen],
    }


def ifeval_answer(number: int) -> str:
    """An answer that follows some of the instructions of some prompts."""
    thing = THINGS[number % len(THINGS)]
    answers = (
        f"The {thing} stands here and it is old.",
        f"<<The {thing}>>\nA long story, of a {thing} that never ends. That is the {thing}.",
        f"* one {thing}\n* two",
        f'"A {thing} of wood"',
        "",
        "Yes",
        f"{thing} {thing} {thing} {thing} {thing} {thing} {thing} {thing} {thing}",
    )
    return answers[(number * 3 + number // 7) % len(answers)]


def write_ifeval(folder: Path, count: int = 12) -> Path:
    rows = [ifeval_row(number) for number in range(count)]
    rows.insert(
        1,
        {
            "key": 999,
            "prompt": "Write in lower case.",
            "instruction_id_list": ["change_case:english_lowercase"],
            "kwargs": [{}],
        },
    )
    return write_lines(folder / "ifeval" / "input_data.jsonl", rows)


def nq_row(number: int) -> dict[str, Any]:
    thing = THINGS[number % len(THINGS)]
    answers = [f"the {thing}", f"{thing} {number}"] if number % 3 else [f"{thing} {number}"]
    return {"question": f"what is thing number {number}", "answer": answers}


def nq_answer(number: int) -> str:
    thing = THINGS[number % len(THINGS)]
    answers = (f" The {thing}", f"{thing} {number}", f" {thing.upper()} {number}!", thing, "", f"a {thing}", "nothing")
    return answers[(number * 5 + number // 7) % len(answers)]


def write_nq_open(folder: Path, count: int = 12) -> Path:
    return write_lines(folder / "nq_open" / "dev.jsonl", [nq_row(number) for number in range(count)])


def write_bbh(folder: Path, count: int = 6) -> Path:
    snarks = [
        {"input": f"Which one?\nOptions:\n(A) the {THINGS[n]} is fine\n(B) a broken {THINGS[n]}", "target": "(B)"}
        for n in range(count)
    ]
    navigate = [{"input": f"Take {n} steps. Do you return?", "target": "Yes" if n % 2 else "No"} for n in range(count)]
    write_json(folder / "bbh" / "navigate.json", {"canary": "", "examples": navigate})
    return write_json(folder / "bbh" / "snarks.json", {"canary": "", "examples": snarks})


def choice_row(number: int, right: int | None = None) -> dict[str, str]:
    """A row of ARC in the form of LLM-Adapters; the choices have different lengths."""
    choices = [THINGS[number % 10], f"a very long {THINGS[(number + 1) % 10]}", THINGS[(number + 2) % 10], "none"]
    shown = " ".join(f"Answer{place}: {text}" for place, text in enumerate(choices, start=1))
    answer = f"answer{(number % 4 if right is None else right) + 1}"
    return {
        "instruction": f"Please choose: What floats: {number}?\n\n{shown}\n\nAnswer format: answer1/answer2",
        "input": "",
        "output": f"the correct answer is {answer}",
        "answer": answer,
    }


def write_arc(folder: Path, count: int = 8, name: str = "arc_easy") -> Path:
    write_json(folder / name / "train.json", [choice_row(number + 20) for number in range(3)])
    return write_json(folder / name / "test.json", [choice_row(number) for number in range(count)])


def write_retention(folder: Path) -> Path:
    """Write the data of the preset retention, and return its folder."""
    write_ifeval(folder)
    write_nq_open(folder, 20)
    write_bbh(folder)
    return folder
