"""Read the published files of GLUE, SuperGLUE, MRQA, SNLI and SciTail.

    form      files                                   a row
    glue      GLUE, .tsv                              a line; the task names its columns
    snli      SNLI, SciTail and MultiNLI, .jsonl      a pair and its gold_label
    copa      SuperGLUE, .jsonl                       a premise with its question, two choices
    wic       SuperGLUE, .jsonl                       two sentences with the marked word in each
    wsc       SuperGLUE, .jsonl                       a text with a marked noun phrase and a marked pronoun
    multirc   SuperGLUE, .jsonl                       a passage, and a question with one of its answers
    record    SuperGLUE, .jsonl                       a passage, and the query with each entity of it as a choice
    mrqa      MRQA, .jsonl.gz                         a question on a context, with all places of its answer

Other files of these collections, such as BoolQ, CB and RTE, are plain tables. All may be gzipped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from graftlm.data.label_reader import AnswerSpan
from graftlm.data.marked_places import FEWEST_CHOICES, check_place
from graftlm.data.table_files import check_columns, check_text, read_objects, type_name
from graftlm.errors import DataError, shorten
from graftlm.files.reading import read_text
from graftlm.grafts.heads import TaskType

Form = Literal["glue", "snli", "copa", "wic", "wsc", "multirc", "record", "mrqa"]

FORM_TYPES: dict[Form, tuple[TaskType, ...]] = {
    "glue": ("classification", "regression"),
    "snli": ("classification",),
    "copa": ("choice",),
    "wic": ("marked",),
    "wsc": ("marked",),
    "multirc": ("classification",),
    "record": ("choice",),
    "mrqa": ("span",),
}
"""The types of tasks that each form can have."""
PAIR_FORMS: frozenset[str | None] = frozenset({"snli", "wic", "multirc"})
"""The forms whose rows have two texts, besides question and context."""

FormRow = tuple[list[object], str]
"""The texts of a row, its choices or marked places, its label, and its location."""
_Kind = TypeVar("_Kind")

_WORD = re.compile(r"\S+")
_LABELS: dict[Form, tuple[object, ...]] = {
    "snli": ("entailment", "neutral", "contradiction"),
    "wic": (False, True),
    "wsc": (False, True),
    "multirc": (0, 1),
}
"""The labels of forms that have fixed ones; 0 and 1 equal False and True."""
_NO_LABEL = "-"  # the annotators of SNLI did not agree
_PLACEHOLDER = "@placeholder"
_KIND_NAMES: dict[type, str] = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}
_QUESTIONS = {"cause": "What was the cause?", "effect": "What happened as a result?"}


def read_glue(
    path: Path,
    columns: Mapping[str, str],
    header: Sequence[str],
    skipped: Counter[str],
) -> Iterator[FormRow]:
    """Yield the values of some columns of a TSV file of GLUE, in which quotation marks have no meaning.

    Args:
        path: the file.
        columns: names of columns by the config key that sets each.
        header: names of all columns of a file without a header, such as that of CoLA; otherwise empty.
        skipped: counts rows with another number of cells than the header, of which some files have a few.

    Raises:
        DataError: the file can't be read, or lacks a column or has it twice.
    """
    lines = read_text(path).split("\n")
    names = list(header) or lines[0].split("\t")
    check_columns(names, columns, str(path), "task")
    first = 0 if header else 1
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) != len(names):
            skipped["rows with a wrong number of cells"] += 1
            continue
        row = dict(zip(names, cells, strict=True))
        yield [row[column] for column in columns.values()], f"{path}: line {number}"


def read_form(path: Path, form: Form, skipped: Counter[str]) -> Iterator[FormRow]:
    """Yield the rows of a JSON file in one of the published forms, except `glue`. The label of a row may be None.

    Args:
        path: a file of JSON lines, which may be gzipped.
        form: its form.
        skipped: counts rows that have no label.

    Raises:
        DataError: the file can't be read or is not valid JSON, a row lacks a key or has a value of a wrong type, or a
            place is outside its text.
    """
    read = _READERS[form]
    for values, where in read_objects(path):
        if form == "mrqa" and "header" in values:
            continue
        for row in read(values, where, skipped):
            yield row, where


def check_label(value: object, form: Form, where: str) -> None:
    """Raise `DataError` for a row without a label, or with one that the form does not have.

    Args:
        value: the last value of a row of `read_form`.
        form: the form.
        where: the location of the row.
    """
    labels = _LABELS.get(form)
    if value is not None and labels is not None and value not in labels:
        raise DataError(
            f"{where} has the label {shorten(repr(value))}, but in the form {form} it is one of "
            f"{', '.join(str(label) for label in labels)}: correct the row, or the form of the task."
        )
    if value is None:
        raise DataError(
            f"{where} has no label, as in the published test files: name the file of validation rows instead."
        )


def _value(values: object, key: str, kind: type[_Kind], where: str) -> _Kind:
    """Return the value of a key of an object; raise `DataError` unless it has this type."""
    found = values.get(key) if isinstance(values, dict) else None
    if isinstance(found, kind) and not (kind is int and isinstance(found, bool)):
        return found
    expected = _KIND_NAMES[kind]
    raise DataError(
        f"{where} has {type_name(found)} in the key {key!r}, but {expected} is expected: correct the row, or the form "
        "of the task."
    )


def _label(values: Mapping[str, object]) -> object:
    """Return the label of a row of SuperGLUE, or None if it has none, as in published test files."""
    return values.get("label")


def _snli(values: Mapping[str, object], where: str, skipped: Counter[str]) -> Iterator[list[object]]:
    label = _value(values, "gold_label", str, where)
    if label == _NO_LABEL:
        skipped["rows without a gold label"] += 1
        return
    yield [_value(values, "sentence1", str, where), _value(values, "sentence2", str, where), label]


def _copa(values: Mapping[str, object], where: str, _skipped: Counter[str]) -> Iterator[list[object]]:
    asked = _value(values, "question", str, where)
    if asked not in _QUESTIONS:
        raise DataError(
            f"{where} has {shorten(asked)!r} in the key 'question', but cause or effect is expected: correct the row."
        )
    text = f"{_value(values, 'premise', str, where)} {_QUESTIONS[asked]}"
    choices = [_value(values, key, str, where) for key in ("choice1", "choice2")]
    yield [text, choices, _label(values)]


def _wic(values: Mapping[str, object], where: str, _skipped: Counter[str]) -> Iterator[list[object]]:
    texts = []
    places = []
    for number in ("1", "2"):
        texts.append(_value(values, f"sentence{number}", str, where))
        places.append([_value(values, f"{key}{number}", int, where) for key in ("start", "end")])
    yield [*texts, *places, _label(values)]


def _wsc(values: Mapping[str, object], where: str, _skipped: Counter[str]) -> Iterator[list[object]]:
    """Yield a row whose places are given by the number of their first word, counted at blanks, and their text."""
    text = _value(values, "text", str, where)
    target = _value(values, "target", dict, where)
    places = []
    for number in ("1", "2"):
        index = _value(target, f"span{number}_index", int, where)
        marked = _value(target, f"span{number}_text", str, where)
        places.append(_words_at(text, index, marked, f"span{number}_index", where))
    yield [text, *places, _label(values)]


def _words_at(text: str, index: int, marked: str, key: str, where: str) -> list[int]:
    """Return the characters of the words of a marked text, the first of which has a number in the text."""
    words = list(_WORD.finditer(text))
    count = max(1, len(marked.split()))
    if index < 0 or index + count > len(words):
        raise DataError(
            f"{where} marks {count} words from the word {index} on in the key {key!r}, but the text has {len(words)} "
            "words: correct the row."
        )
    start = words[index].start()
    end = words[index + count - 1].end()
    # Punctuation after the last word is not marked.
    found = text.lower().find(marked.lower(), start, end) if marked.strip() else -1
    return [start, end] if found < 0 else [found, found + len(marked)]


def _multirc(values: Mapping[str, object], where: str, _skipped: Counter[str]) -> Iterator[list[object]]:
    passage = _value(values, "passage", dict, where)
    text = _value(passage, "text", str, where)
    for question in _value(passage, "questions", list, where):
        asked = _value(question, "question", str, where)
        for answer in _value(question, "answers", list, where):
            answered = _value(answer, "text", str, where)
            yield [text, f"{asked} {answered}", _label(answer)]


def _record(values: Mapping[str, object], where: str, skipped: Counter[str]) -> Iterator[list[object]]:
    """Yield a row for each query, whose choices are the query with each of the passage's entities in its gap.

    Of several right entities the choices have the first.
    """
    passage = _value(values, "passage", dict, where)
    text = _value(passage, "text", str, where)
    entities = []
    for entity in _value(passage, "entities", list, where):
        start = _value(entity, "start", int, where)
        end = _value(entity, "end", int, where) + 1  # `end` is the last character
        check_place(start, end, text, "entities", where)
        entities.append(text[start:end])
    entities = list(dict.fromkeys(entities))
    for question in _value(values, "qas", list, where):
        query = _value(question, "query", str, where)
        if _PLACEHOLDER not in query:
            raise DataError(
                f"{where} has the query {shorten(query)!r} without {_PLACEHOLDER}, which its choices replace: correct "
                "the row."
            )
        has_answers = "answers" in question
        listed = _value(question, "answers", list, where) if has_answers else []
        answers = [_value(answer, "text", str, where) for answer in listed]
        right = [entity for entity in entities if entity in answers]
        chosen = [entity for entity in entities if entity not in right[1:]]
        if (has_answers and not right) or len(chosen) < FEWEST_CHOICES:
            skipped["queries whose answer is not one of several entities"] += 1
            continue
        label = chosen.index(right[0]) if right else None
        yield [text, [query.replace(_PLACEHOLDER, entity) for entity in chosen], label]


def _mrqa(values: Mapping[str, object], where: str, skipped: Counter[str]) -> Iterator[list[object]]:
    context = check_text(_value(values, "context", str, where), "context", where)
    for question in _value(values, "qas", list, where):
        places = []
        for answer in _value(question, "detected_answers", list, where):
            text = _value(answer, "text", str, where)
            for listed in _value(answer, "char_spans", list, where):
                first, last = _characters(listed, context, where)
                if _letters(context[first:last]) == _letters(text):
                    places.append((first, last))
                else:
                    skipped["places with another text than their answer"] += 1
        if not places:
            raise DataError(
                f"{where} has a question without a place of its answer in the key 'detected_answers', but at least one "
                "is expected: correct the row, or leave it out."
            )
        start, end = places[0]
        texts = [context[first:last] for first, last in places]
        aliases = question.get("answers") or []
        texts += [answer for answer in aliases if isinstance(answer, str) and answer.strip()]
        span = AnswerSpan(start, end, tuple(dict.fromkeys(texts)), tuple(dict.fromkeys(places[1:])))
        yield [_value(question, "question", str, where), context, span]


def _letters(text: str) -> str:
    """Return the letters and digits of a text without case; tokenizers of the collection changed the others."""
    return "".join(character for character in text.casefold() if character.isalnum())


def _characters(place: object, context: str, where: str) -> tuple[int, int]:
    """Return the first character of a place in MRQA and the one after its last."""
    if not isinstance(place, list) or len(place) != 2 or not all(type(number) is int for number in place):
        raise DataError(
            f"{where} has {shorten(repr(place))} in the key 'char_spans', but the first and the last character of an "
            "answer are expected: correct the row."
        )
    start, last = place
    check_place(start, last + 1, context, "char_spans", where)
    return start, last + 1


_READERS: dict[str, Callable[[Mapping[str, object], str, Counter[str]], Iterator[list[object]]]] = {
    "snli": _snli,
    "copa": _copa,
    "wic": _wic,
    "wsc": _wsc,
    "multirc": _multirc,
    "record": _record,
    "mrqa": _mrqa,
}
