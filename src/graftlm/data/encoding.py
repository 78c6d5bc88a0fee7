"""Labelled rows as tokens: what stands for each word, where an answer begins and ends, and what was too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.data.labelled import LabelledRow, Span, TaskRows
from graftlm.errors import BackboneError, DataError
from graftlm.grafts.heads import IGNORED, TaskSpec

_BREAK = "\n"


@dataclass(frozen=True)
class EncodedRow:
    """A row of n tokens.

    Attributes:
        ids: int32, (n,).
        segments: int8, (n,), 1 in the second text of a pair; None where no token is in one.
        target: as `grafts.heads` takes it, of tagging (n,); None of a row without a label.
        places: of tagging the first token of each word, -1 for a word without one; of span, (n, 2), the characters of
            the context that each token stands for, -1 for all others.
    """

    ids: np.ndarray
    segments: np.ndarray | None
    target: Tensor | None
    places: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class EncodedTask:
    """The rows of a task as tokens.

    Attributes:
        kept: which of the task's rows these are: all, but for answers behind a cut that were to be learned.
        cut: how many rows were longer than is read.
    """

    spec: TaskSpec
    rows: list[EncodedRow]
    kept: list[int]
    cut: int

    def __len__(self) -> int:
        return len(self.rows)


class RowEncoder:
    """Turns rows into tokens.

    A word is tagged at its first token. Rows of more than `length` tokens are cut at their end: of a pair the longer
    text first, of span the context. Where a tokenizer puts nothing between two texts, a line break stands there.

    Args:
        tokenizer: the backbone's.
        length: tokens of a row, at most, special ones among them.
        segments: whether the model tells the second text of a pair by `token_type_ids`.
        truncation: truncate longer rows; without it a longer row is an error.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, length: int, *, segments: bool = True, truncation: bool = True
    ) -> None:
        self.tokenizer, self.length, self.segments, self.truncation = tokenizer, length, segments, truncation
        self._between = _BREAK if _stand_together(tokenizer) else ""

    def encode(self, task: TaskRows, *, training: bool = False) -> EncodedTask:
        """The rows of one task.

        Args:
            task: the rows.
            training: leave rows out whose answer lies behind the cut, as nothing can be learned of them.

        Raises:
            DataError: a row has no tokens, or is longer than `length` and may not be cut.
            BackboneError: tags or answers need a fast tokenizer, which this is not.
        """
        spec, rows = task.spec, task.rows
        if not rows:
            return EncodedTask(spec, [], [], 0)
        first, second = self._texts(spec, rows)
        found = self._tokenise(first, second, spec)
        longer = [place for place, ids in enumerate(found["input_ids"]) if len(ids) > self.length]
        if longer:
            self._cut(found, longer, first, second, rows, spec)
        encoded = [self._row(spec, row, found, place) for place, row in enumerate(rows)]
        cut = [spec.type == "span" and row.target is not None and int(row.target[0]) == IGNORED for row in encoded]
        kept = [place for place in range(len(rows)) if not (training and cut[place])]
        if not kept:
            raise DataError(f"{rows[0].where}: of no row the answer is within {self.length} tokens: raise the length.")
        return EncodedTask(spec, [encoded[place] for place in kept], kept, len(longer))

    def _texts(self, spec: TaskSpec, rows: Sequence[LabelledRow]) -> tuple[list[str], list[str] | None]:
        if spec.type == "tagging":
            return [" ".join(row.texts) for row in rows], None
        pairs = {len(row.texts) for row in rows} == {2}
        second = [self._between + row.texts[1] for row in rows] if pairs else None
        return [row.texts[0] for row in rows], second

    def _tokenise(
        self, first: Sequence[str], second: Sequence[str] | None, spec: TaskSpec, **more: Any
    ) -> dict[str, Any]:
        if spec.of_tokens:
            if not self.tokenizer.is_fast:
                raise BackboneError(
                    f"Tasks of the type {spec.type} need to know which characters a token stands for, and the "
                    f"tokenizer {type(self.tokenizer).__name__} does not say: use a backbone with a tokenizer.json."
                )
            more["return_offsets_mapping"] = True
        found = self.tokenizer(
            list(first),
            None if second is None else list(second),
            return_attention_mask=False,
            return_token_type_ids=True,
            verbose=False,
            **more,
        )
        values = {key: found[key] for key in found}
        if spec.type == "span":
            values["sequences"] = [found.sequence_ids(place) for place in range(len(first))]
        return values

    def _cut(
        self,
        found: dict[str, Any],
        places: Sequence[int],
        first: Sequence[str],
        second: Sequence[str] | None,
        rows: Sequence[LabelledRow],
        spec: TaskSpec,
    ) -> None:
        """Put shorter encodings in the place of those that are too long."""
        row = rows[places[0]]
        if not self.truncation:
            raise DataError(
                f"{row.where} has {len(found['input_ids'][places[0]])} tokens, but {self.length} are read: raise the "
                "length, shorten the text, or set truncation to true."
            )
        how = "only_second" if spec.type == "span" else "longest_first"
        if spec.type == "span":
            self._check_questions(found, places, rows)
        seconds = None if second is None else [second[place] for place in places]
        shorter = self._tokenise(
            [first[place] for place in places], seconds, spec, truncation=how, max_length=self.length
        )
        for key, values in shorter.items():
            for place, value in zip(places, values, strict=True):
                found[key][place] = value

    def _check_questions(self, found: dict[str, Any], places: Sequence[int], rows: Sequence[LabelledRow]) -> None:
        for place in places:
            others = sum(sequence != 1 for sequence in found["sequences"][place])
            if others >= self.length:
                raise DataError(
                    f"{rows[place].where} has a question of {others} tokens, which leaves nothing of the {self.length} "
                    "for its context: raise the length, or shorten the question."
                )

    def _row(self, spec: TaskSpec, row: LabelledRow, found: dict[str, Any], place: int) -> EncodedRow:
        ids = np.asarray(found["input_ids"][place], dtype=np.int32)
        if not len(ids):
            raise DataError(f"{row.where} has no tokens: give it text that the tokenizer knows, or leave the row out.")
        marks = np.asarray(found["token_type_ids"][place], dtype=np.int8)
        segments = marks if self.segments and marks.any() else None
        places = None
        if spec.type == "tagging":
            places = word_places(row.texts, found["offset_mapping"][place])
        elif spec.type == "span":
            places = _context_places(found["offset_mapping"][place], found["sequences"][place], len(self._between))
        return EncodedRow(ids, segments, _target(spec, row, places, len(ids)), places)


def _target(spec: TaskSpec, row: LabelledRow, places: np.ndarray | None, tokens: int) -> Tensor | None:
    """What a head is to predict; an answer behind the cut is -100 twice."""
    target = row.target
    if target is None:
        return None
    if isinstance(target, Span):
        assert places is not None, "a span has places"
        return torch.from_numpy(_answer_places(target, places))
    if spec.type == "classification":
        return torch.tensor(spec.labels.index(str(target)))
    if spec.type == "regression":
        return torch.tensor(float(target))  # type: ignore[arg-type]  # a number, by its type
    assert isinstance(target, tuple), "several labels, or a tag for each word"
    if spec.type == "multi-label":
        return torch.tensor([float(label in target) for label in spec.labels])
    assert places is not None, "tags have places"
    tags = torch.full((tokens,), IGNORED)
    for place, label in zip(places, target, strict=True):
        if place >= 0:
            tags[int(place)] = spec.labels.index(label)
    return tags


def word_places(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """For each word of a text, with a blank between any two, its first token; -1 where no token begins a word's part.

    A token that reaches over two words stands for the first of them.
    """
    places = np.full(len(words), -1, dtype=np.int64)
    start, token, taken = 0, 0, -1
    for number, word in enumerate(words):
        end = start + len(word)
        while token < len(offsets) and (offsets[token][1] <= start or token <= taken):
            token += 1
        if token < len(offsets) and offsets[token][0] < end:
            places[number] = taken = token
        start = end + 1
    return places


def _context_places(offsets: Sequence[tuple[int, int]], sequences: Sequence[int | None], shift: int) -> np.ndarray:
    """(n, 2): the context's characters behind each token, counted without what was put before it; -1 elsewhere."""
    of_context = np.asarray([sequence == 1 for sequence in sequences])
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2) - shift
    of_context &= (places[:, 1] > places[:, 0]) & (places[:, 1] > 0)
    return np.where(of_context[:, None], np.maximum(places, 0), -1)


def _answer_places(span: Span, places: np.ndarray) -> np.ndarray:
    """(2,): the first and the last token of an answer."""
    inside = (places[:, 0] < span.end) & (places[:, 1] > span.start)
    if not inside.any() or places[:, 1].max() < span.end:
        return np.full(2, IGNORED)
    chosen = np.flatnonzero(inside)
    return chosen[[0, -1]]


def _stand_together(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether nothing stands between the texts of a pair."""
    if not tokenizer.is_fast:
        return tokenizer.sep_token_id is None
    found = tokenizer("a", "b", verbose=False)
    sequences = found.sequence_ids(0)
    return None not in sequences[sequences.index(0) : sequences.index(1)]
