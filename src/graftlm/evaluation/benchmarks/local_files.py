"""Local files of benchmarks, read into the rows that lm-evaluation-harness' own tasks have on the hub.

    ifeval                  input_data.jsonl         as google-research has it
    nq_open                 dev.jsonl                as google-research-datasets has it
    bbh_VARIANT[_TASK]      TASK.json                of BIG-Bench-Hard; VARIANT is zeroshot, fewshot, cot_zeroshot, ...
    mgsm_VARIANT[_LANG]     mgsm_LANG.tsv            of url-nlp: question, tab, answer
    xcopa[_LANG]            test.LANG.jsonl          of cambridgeltl, with val.LANG.jsonl for shots
    gsm8k, gsm8k_cot        test.jsonl               of grade-school-math, with train.jsonl for shots
    arc_easy, arc_challenge, arc_challenge_chat, openbookqa
                            test.json                of LLM-Adapters, with train.json for shots

The prompts, filters and metrics are those of lm-evaluation-harness; only the rows are read here.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.harness_types import Values

RowReader: TypeAlias = Callable[[Path], list[Values]]

_CHOICE = re.compile(r"\s*Answer(\d): ")
_QUESTION = re.compile(r"[^:]*: (?P<question>.*?)\n\n(?P<choices>Answer1: .*?)\n\n", re.DOTALL)
_VARIANTS = ("cot_fewshot", "cot_zeroshot", "fewshot", "zeroshot")


@dataclass(frozen=True)
class LocalTask:
    """A task whose rows were read from local files.

    Attributes:
        definition: the path of its YAML below the folder of lm-evaluation-harness' tasks.
        rows: the rows to measure, in the order of the file.
        shots: further rows for solved examples; empty if there is no file of them.
    """

    definition: str
    rows: list[Values]
    shots: list[Values] = field(default_factory=list)


@dataclass(frozen=True)
class _Files:
    """The files of a task: globs in a folder, with {} for a part of the task's name."""

    family: str
    definition: str
    test: str
    read: RowReader
    train: str | None = None


def read_local_tasks(task: str, data: str) -> list[LocalTask]:
    """Read the local data of a task, or of all tasks of a group of which the folder has files.

    Args:
        task: name of the task or group in lm-evaluation-harness.
        data: a file, or a folder with the files, or with a folder of the family's name, such as `bbh`, that has them.

    Raises:
        EvaluationError: the form of this task's files is not known.
        DataError: there are no such files, or one can't be read.
    """
    files, part = _files_of(task)
    path = Path(data).expanduser()
    if path.is_file():
        if part is None:
            raise DataError(
                f"{path} is a file, but {task} is a group with a file for each task: name the folder, or one task."
            )
        return [_read_task(files, part, path)]
    folder = path / files.family if (path / files.family).is_dir() else path
    if not folder.is_dir():
        raise DataError(f"There is no file or folder {path} with the data of {task}: correct the path.")
    parts = [part] if part is not None else _parts_in(folder, files)
    tasks = []
    for each in parts:
        file = folder / files.test.format(each)
        if not file.is_file():
            raise DataError(f"The folder {folder} has no {file.name}, the data of {task}: name the folder that has it.")
        tasks.append(_read_task(files, each, file))
    if not tasks:
        pattern = files.test.format("*")
        raise DataError(f"The folder {folder} has no {pattern}, the data of {task}: name the folder that has them.")
    return tasks


def _parts_in(folder: Path, files: _Files) -> list[str]:
    """Return the parts of names, such as languages, of which a folder has files."""
    start, end = files.test.split("{}")
    return sorted(file.name[len(start) : len(file.name) - len(end)] for file in folder.glob(files.test.format("*")))


def _read_task(files: _Files, part: str, file: Path) -> LocalTask:
    rows = files.read(file)
    if not rows:
        raise DataError(f"{file} has no rows: name a file with at least one.")
    train = _file_of_shots(files, part, file)
    shots = [] if train is None else files.read(train)
    return LocalTask(definition=files.definition.format(part), rows=rows, shots=shots)


def _file_of_shots(files: _Files, part: str, file: Path) -> Path | None:
    """Return the file with the solved examples of a task, which stands beside its data; None without one."""
    if files.train is None:
        return None
    train = file.parent / files.train.format(part)
    return train if train.is_file() and train != file else None


def file_beside(task: str, data: str | Path) -> Path | None:
    """Return the file with solved examples that is read although `data` names another file; None if there is none.

    Args:
        task: name of the task.
        data: its file or folder. Everything in a folder belongs to the data.

    Raises:
        EvaluationError: the task has no known form of local data.
    """
    file = Path(data).expanduser()
    if not file.is_file():
        return None
    files, part = _files_of(task)
    return _file_of_shots(files, part or "", file)


def _files_of(task: str) -> tuple[_Files, str | None]:
    """Return the files of a task, and the part of its name that its file has; None for a group."""
    if task in _SINGLE:
        return _SINGLE[task], ""
    for pattern, files in _FAMILIES.items():
        match = re.fullmatch(pattern, task)
        if match:
            return files(match.groupdict()), match.group("part")
    known = ", ".join([*_SINGLE, "bbh_…", "mgsm_…", "xcopa_…"])
    raise EvaluationError(
        f"The form of local data of the task {task} is not known (known: {known}): choose one of these, or leave out "
        "data to read from the hub."
    )


def _bbh_files(groups: Mapping[str, str | None]) -> _Files:
    variant = groups["variant"] or "cot_fewshot"  # as the group bbh of lm-evaluation-harness
    return _Files("bbh", f"bbh/{variant}/{{}}.yaml", "{}.json", _read_bbh)


def _mgsm_files(groups: Mapping[str, str | None]) -> _Files:
    variant = groups["variant"]
    return _Files("mgsm", f"mgsm/{variant}/mgsm_{variant}_{{}}.yaml", "mgsm_{}.tsv", _read_mgsm)


def _xcopa_files(_: Mapping[str, str | None]) -> _Files:
    return _Files("xcopa", "xcopa/default_{}.yaml", "test.{}.jsonl", _read_xcopa, "val.{}.jsonl")


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each line of JSON."""
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}, line {number}", json.loads(line)
        except json.JSONDecodeError:
            raise DataError(f"Line {number} of {path} is not JSON: write one JSON object per line.") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(f"{path} can't be read ({reason}): name a text file of the benchmark.") from None


def _document(path: Path) -> object:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON ({error.msg} in line {error.lineno}): name a JSON file.") from None


def _checked(value: object, where: str, keys: Mapping[str, type]) -> Values:
    """Return a row after a check that it has keys with values of a type."""
    row = value if isinstance(value, dict) else {}
    for key, kind in keys.items():
        if not isinstance(row.get(key), kind):
            raise DataError(
                f"{where} has no {key} of type {kind.__name__}, which the benchmark's own rows have: correct the row, "
                "or name another file."
            )
    return row


def _rows_of(path: Path, keys: Mapping[str, type]) -> list[Values]:
    return [_checked(value, where, keys) for where, value in _lines(path)]


def _read_ifeval(path: Path) -> list[Values]:
    keys = {"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list}
    return _rows_of(path, keys)


def _read_nq_open(path: Path) -> list[Values]:
    return _rows_of(path, {"question": str, "answer": list})


def _read_gsm8k(path: Path) -> list[Values]:
    return _rows_of(path, {"question": str, "answer": str})


def _read_xcopa(path: Path) -> list[Values]:
    return _rows_of(path, {"premise": str, "choice1": str, "choice2": str, "question": str, "label": int})


def _read_bbh(path: Path) -> list[Values]:
    document = _checked(_document(path), str(path), {"examples": list})
    keys = {"input": str, "target": str}
    return [_checked(row, f"{path}, example {n}", keys) for n, row in enumerate(document["examples"], start=1)]


def _read_mgsm(path: Path) -> list[Values]:
    rows = []
    for number, cells in enumerate(
        csv.reader(_text(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE), start=1
    ):
        answer = cells[-1].replace(",", "") if len(cells) == 2 else ""
        if not re.fullmatch(r"-?\d+", answer):
            raise DataError(
                f"Line {number} of {path} is not a question, a tab and a whole number: correct it, or name another "
                "file."
            )
        # The hub's rows have an answer in words in the training split only.
        rows.append({"question": cells[0], "answer": None, "answer_number": int(answer), "equation_solution": None})
    return rows


def _read_arc(path: Path) -> list[Values]:
    return [
        {"question": question, "choices": choices, "answerKey": key}
        for question, choices, key in _choice_questions(path)
    ]


def _read_openbookqa(path: Path) -> list[Values]:
    return [
        {"question_stem": question, "choices": choices, "answerKey": key}
        for question, choices, key in _choice_questions(path)
    ]


def _choice_questions(path: Path) -> Iterator[tuple[str, dict[str, list[str]], str]]:
    """Yield the question, the choices {text, label} and the label of the right one of each row of LLM-Adapters."""
    document = _document(path)
    if not isinstance(document, list):
        raise DataError(f"{path} has no list of questions: name a file of the benchmark.")
    for number, row in enumerate(document, start=1):
        where = f"{path}, question {number}"
        checked = _checked(row, where, {"instruction": str, "answer": str})
        match = _QUESTION.match(checked["instruction"])
        texts = [] if match is None else _CHOICE.split(match["choices"])[2::2]
        right = re.fullmatch(r"answer(\d)", checked["answer"])
        if match is None or right is None or not 1 <= int(right[1]) <= len(texts):
            raise DataError(f"{where} has no choices with the right one among them: correct it, or name another file.")
        labels = [chr(ord("A") + index) for index in range(len(texts))]
        yield match["question"], {"text": texts, "label": labels}, labels[int(right[1]) - 1]


_SINGLE: dict[str, _Files] = {
    "ifeval": _Files("ifeval", "ifeval/ifeval.yaml", "input_data.jsonl", _read_ifeval),
    "nq_open": _Files("nq_open", "nq_open/nq_open.yaml", "dev.jsonl", _read_nq_open),
    "gsm8k": _Files("gsm8k", "gsm8k/gsm8k.yaml", "test.jsonl", _read_gsm8k, "train.jsonl"),
    "gsm8k_cot": _Files("gsm8k", "gsm8k/gsm8k-cot.yaml", "test.jsonl", _read_gsm8k, "train.jsonl"),
    "arc_easy": _Files("arc_easy", "arc/arc_easy.yaml", "test.json", _read_arc, "train.json"),
    "arc_challenge": _Files("arc_challenge", "arc/arc_challenge.yaml", "test.json", _read_arc, "train.json"),
    "arc_challenge_chat": _Files("arc_challenge", "arc/arc_challenge_chat.yaml", "test.json", _read_arc, "train.json"),
    "openbookqa": _Files("openbookqa", "openbookqa/openbookqa.yaml", "test.json", _read_openbookqa, "train.json"),
}

_FAMILIES: dict[str, Callable[[Mapping[str, str | None]], _Files]] = {
    rf"bbh(_(?P<variant>{'|'.join(_VARIANTS)})(_(?P<part>\w+))?)?": _bbh_files,
    r"mgsm_(?P<variant>direct|en_cot|native_cot)(_(?P<part>[a-z]{2}))?": _mgsm_files,
    r"xcopa(_(?P<part>[a-z]{2}))?": _xcopa_files,
}
