"""Encode labelled rows as tokens, with targets for the heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graftlm.data.labelled import AnswerSpan, LabelledRow, TaskRows
from graftlm.errors import BackboneError, DataError
from graftlm.grafts.heads import IGNORED, TaskSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Texts = tuple[str, ...]
"""The text of a row, or the two texts of a pair."""

_CONTEXT = 1  # number of the context among the texts of a span task


@dataclass(frozen=True)
class EncodedRow:
    """A row of n tokens.

    Attributes:
        ids: token ids with special tokens, int32, (n,).
        segments: int8, (n,), 1 in the second text of a pair; None if the row has no such mark.
        target: the target as `graftlm.grafts.heads` expects it, for tagging (n,); None for a row without a label.
        alignment: for tagging (words,), the index of each word's first token, or -1; for span (n, 2), the range of
            context characters of each token, or -1.
        truncated: whether the row had more tokens.
    """

    ids: np.ndarray
    segments: np.ndarray | None
    target: Tensor | None
    alignment: np.ndarray | None = None
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class EncodedTask:
    """The rows of a task as tokens.

    Attributes:
        spec: the specification of the task's head.
        rows: the rows.
        cut: number of rows that were truncated, including those that were left out.
    """

    spec: TaskSpec
    rows: list[EncodedRow]
    cut: int

    def __len__(self) -> int:
        return len(self.rows)


class RowEncoder:
    """Encode labelled rows as tokens.

    The tag of a word belongs to its first token. Rows of more than `length` tokens are truncated at their end: of a
    pair the longer text first, of a span task only the context. If the tokenizer puts no special tokens between the
    texts of a pair, the second one begins with a line break.

    Args:
        tokenizer: the backbone's tokenizer.
        length: maximum number of tokens of a row, including special tokens.
        segments: mark the second text of a pair in `EncodedRow.segments`, for models with `token_type_ids`.
        truncation: truncate longer rows instead of raising an error.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        segments: bool = True,
        truncation: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.length = length
        self.segments = segments
        self.truncation = truncation
        self._separator = "" if _separates_pairs(tokenizer) else "\n"

    def encode(self, task: TaskRows, *, training: bool = False) -> EncodedTask:
        """Encode the rows of a task.

        Args:
            task: the rows.
            training: leave out rows of a span task whose answer is truncated, because nothing can be learned from them.

        Raises:
            DataError: a row has no tokens; a row is too long, and `truncation` is False or its question alone fills the
                row; or all rows are left out.
            BackboneError: the task has tags or spans, and the tokenizer is not a fast one.
        """
        spec = task.spec
        if not task.rows:
            return EncodedTask(spec, [], 0)
        texts = [self._texts(spec, row) for row in task.rows]
        columns = self._tokenize(texts, spec)
        long = [index for index, ids in enumerate(columns["input_ids"]) if len(ids) > self.length]
        if long:
            self._check_truncation(columns, long, task)
            self._truncate(columns, long, texts, spec)
        truncated = set(long)
        encoded = []
        for index, row in enumerate(task.rows):
            values = {key: column[index] for key, column in columns.items()}
            encoded.append(self._encode_row(spec, row, values, truncated=index in truncated))
        if training and spec.type == "span":
            encoded = [row for row in encoded if _has_whole_answer(row)]
        if not encoded:
            raise DataError(
                f"No row of the task (the first is {task.rows[0].where}) has its whole answer in its first "
                f"{self.length} tokens: raise the length."
            )
        return EncodedTask(spec, encoded, len(long))

    def _texts(self, spec: TaskSpec, row: LabelledRow) -> Texts:
        """Return what is tokenized of a row."""
        if spec.type == "tagging":
            return (" ".join(row.texts),)
        if len(row.texts) == 1:
            return row.texts
        first, second = row.texts
        return (first, self._separator + second)

    def _tokenize(self, texts: Sequence[Texts], spec: TaskSpec, max_length: int | None = None) -> dict[str, list[Any]]:
        """Tokenize texts, and truncate them to `max_length` tokens if it is set.

        Returns:
            Lists over the rows: `input_ids`, `token_type_ids`, for tagging and span `offset_mapping`, and for span
            `sequences`, the number of each token's text or None.
        """
        if spec.of_tokens and not self.tokenizer.is_fast:
            raise BackboneError(
                f"A {spec.type} task needs the positions of tokens in the text, which the tokenizer "
                f"{type(self.tokenizer).__name__} does not return: use a backbone with a tokenizer.json."
            )
        options: dict[str, Any] = {
            "return_attention_mask": False,
            "return_token_type_ids": True,
            "return_offsets_mapping": spec.of_tokens,
            "verbose": False,
        }
        if max_length is not None:
            options["truncation"] = "only_second" if spec.type == "span" else "longest_first"
            options["max_length"] = max_length
        inputs: list[Any] = [list(column) for column in zip(*texts, strict=True)]
        encoding = self.tokenizer(*inputs, **options)
        columns: dict[str, list[Any]] = dict(encoding)
        if spec.type == "span":
            columns["sequences"] = [encoding.sequence_ids(index) for index in range(len(texts))]
        return columns

    def _check_truncation(self, columns: Mapping[str, list[Any]], long: Sequence[int], task: TaskRows) -> None:
        """Raise `DataError` if the rows `long` must not or can't be truncated."""
        if not self.truncation:
            size = len(columns["input_ids"][long[0]])
            raise DataError(
                f"{task.rows[long[0]].where} has {size} tokens, but a row has at most {self.length}: raise the length, "
                "shorten the text, or set truncation to true."
            )
        if task.spec.type != "span":
            return
        for index in long:
            question = [number for number in columns["sequences"][index] if number != _CONTEXT]
            if len(question) >= self.length:
                raise DataError(
                    f"{task.rows[index].where} has {len(question)} tokens without its context, which leaves no room "
                    f"for context in a row of {self.length}: raise the length, or shorten the question."
                )

    def _truncate(
        self, columns: dict[str, list[Any]], long: Sequence[int], texts: Sequence[Texts], spec: TaskSpec
    ) -> None:
        """Replace the encodings of the rows `long` by truncated ones."""
        shorter = self._tokenize([texts[index] for index in long], spec, self.length)
        for key, values in shorter.items():
            for index, value in zip(long, values, strict=True):
                columns[key][index] = value

    def _encode_row(
        self, spec: TaskSpec, row: LabelledRow, values: Mapping[str, Any], *, truncated: bool
    ) -> EncodedRow:
        """Return a row with its target and alignment."""
        ids = np.asarray(values["input_ids"], dtype=np.int32)
        if not len(ids):
            raise DataError(f"{row.where} has no tokens: enter text with known characters, or leave the row out.")
        segments = np.asarray(values["token_type_ids"], dtype=np.int8)
        alignment = None
        if spec.type == "tagging":
            alignment = first_tokens(row.texts, values["offset_mapping"])
        elif spec.type == "span":
            alignment = _context_ranges(values["offset_mapping"], values["sequences"], len(self._separator))
        return EncodedRow(
            ids=ids,
            segments=segments if self.segments and segments.any() else None,
            target=_encode_target(spec, row, alignment, len(ids)),
            alignment=alignment,
            truncated=truncated,
        )


def _separates_pairs(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer puts special tokens between the texts of a pair."""
    if not tokenizer.is_fast:
        return tokenizer.sep_token_id is not None
    sequences = tokenizer("a", "b", verbose=False).sequence_ids(0)
    between = sequences[sequences.index(0) : sequences.index(1)]
    return None in between


def _has_whole_answer(row: EncodedRow) -> bool:
    """Return whether the answer of a row of a span task is not truncated. Rows without a target pass."""
    return row.target is None or int(row.target[0]) != IGNORED


def _encode_target(spec: TaskSpec, row: LabelledRow, alignment: np.ndarray | None, tokens: int) -> Tensor | None:
    """Return the target of a row of `tokens` tokens as its head expects it."""
    target: Any = row.target
    if target is None:
        return None
    if spec.type == "classification":
        return torch.tensor(spec.labels.index(target))
    if spec.type == "regression":
        return torch.tensor(float(target))
    if spec.type == "multi-label":
        return torch.tensor([float(label in target) for label in spec.labels])
    assert alignment is not None, "rows of tagging and span tasks are aligned"
    if spec.type == "span":
        return _encode_span(target, alignment)
    tags = torch.full((tokens,), IGNORED)
    for token, label in zip(alignment.tolist(), target, strict=True):
        if token >= 0:
            tags[token] = spec.labels.index(label)
    return tags


def _encode_span(target: AnswerSpan, ranges: np.ndarray) -> Tensor:
    """Return the first and the last token of an answer, shape (2,), or -100 twice if it is truncated.

    Args:
        target: the answer.
        ranges: range of context characters of each token, (n, 2).
    """
    inside = (ranges[:, 0] < target.end) & (ranges[:, 1] > target.start)
    is_whole = inside.any() and ranges[:, 1].max() >= target.end
    if not is_whole:
        return torch.full((2,), IGNORED)
    first_and_last = np.flatnonzero(inside)[[0, -1]]
    return torch.from_numpy(first_and_last)


def first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the index of each word's first token, or -1 for a word without one: int64, (words,).

    A token that covers two words counts for the first of them.

    Args:
        words: the words of a text, which separates them by single spaces.
        offsets: (start, stop), in characters of the text, of each token.
    """
    first = np.full(len(words), -1, dtype=np.int64)
    start = 0
    token = 0
    taken = -1
    for number, word in enumerate(words):
        end = start + len(word)
        while token < len(offsets) and (offsets[token][1] <= start or token <= taken):
            token += 1
        if token < len(offsets) and offsets[token][0] < end:
            first[number] = token
            taken = token
        start = end + 1
    return first


def _context_ranges(offsets: Sequence[tuple[int, int]], sequences: Sequence[int | None], shift: int) -> np.ndarray:
    """Return the range of context characters of each token, shape (n, 2), or -1 for tokens outside the context.

    Args:
        offsets: the range of characters of each token in its text.
        sequences: the number of each token's text, or None.
        shift: length of the separator before the context.
    """
    ranges = np.asarray(offsets, dtype=np.int64).reshape(-1, 2) - shift
    in_context = np.asarray([number == _CONTEXT for number in sequences])
    in_context &= (ranges[:, 1] > ranges[:, 0]) & (ranges[:, 1] > 0)
    return np.where(in_context[:, None], np.maximum(ranges, 0), -1)
