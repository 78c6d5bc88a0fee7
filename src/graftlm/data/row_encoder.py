"""Encode labelled rows as tokens, with targets for the heads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graftlm.data.labelled import AnswerSpan, LabelledRow, TaskRows
from graftlm.errors import BackboneError, DataError
from graftlm.grafts.heads import IGNORED, PLACES, TaskSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Texts = tuple[str, ...]
"""The text of a row, or the two texts of a pair."""
Columns = dict[str, list[Any]]
"""Values of sequences by the name of a model input, or of another output of the tokenizer."""

_CONTEXT = 1  # number of the context among the texts of a span task


@dataclass(frozen=True)
class EncodedRow:
    """A row, or one sequence of n tokens of it.

    Attributes:
        ids: token ids with special tokens, int32, (n,).
        segments: int8, (n,), 1 in the second text of a pair; None if the row has no such mark.
        target: the target as `graftlm.grafts.heads` expects it, for tagging (n,); None for a row without a label.
        alignment: for tagging (words,), the index of each word's first token, or -1; for span (n, 2), the range of
            context characters of each token, or -1.
        truncated: whether the row had more tokens.
        marks: for marked, int8, (n,), 1 at tokens of the first marked place, 2 at those of the second, 3 at both.
        has_cut_mark: whether a marked place continues after the last token.
        more: for choice the sequences of the choices after the first, for span the windows after the first; only their
            `ids`, `segments` and `alignment` are used.
    """

    ids: np.ndarray
    segments: np.ndarray | None
    target: Tensor | None
    alignment: np.ndarray | None = None
    truncated: bool = False
    marks: np.ndarray | None = None
    has_cut_mark: bool = False
    more: tuple[EncodedRow, ...] = ()

    def __len__(self) -> int:
        return max(len(sequence.ids) for sequence in self.sequences)

    @property
    def sequences(self) -> tuple[EncodedRow, ...]:
        """The sequences of tokens of the row: the row itself and `more`."""
        return (self, *self.more)


@dataclass(frozen=True)
class EncodedTask:
    """The rows of a task as tokens.

    Attributes:
        spec: the specification of the task's head.
        rows: the rows; for training on spans in windows, a row for each window.
        cut: number of rows that were truncated, including those that were left out.
        left_out: number of rows that can't be learned from.
        windowed: number of rows that were read in several windows.
    """

    spec: TaskSpec
    rows: list[EncodedRow]
    cut: int
    left_out: int = 0
    windowed: int = 0

    def __len__(self) -> int:
        return len(self.rows)


class RowEncoder:
    """Encode labelled rows as tokens.

    The tag of a word belongs to its first token. Rows of more than `length` tokens are truncated at their end: of a
    pair the longer text first, of a span task only the context. If the tokenizer puts no special tokens between the
    texts of a pair, the second one begins with a line break. Each choice of a row is the second text of a pair.

    A span task with a stride is read in windows instead: each has the question and as much of the context as fits, and
    begins `stride` tokens after the window before it, or fewer if the question leaves no room for as many, so that no
    token is left out. To learn, every window is a row. Its target is the first place of an answer that is whole in it,
    or the row's first token, which is never in the context, if there is none.

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
            training: leave out rows of a span or marked task whose answer or marked place is truncated, because nothing
                can be learned from them, and make each window a row.

        Raises:
            DataError: a row has no tokens; a row is too long, and `truncation` is False or its question alone fills the
                row; a marked place has no token; or all rows are left out.
            BackboneError: the task has tags, spans or marked places, and the tokenizer is not a fast one.
        """
        spec = task.spec
        if not task.rows:
            return EncodedTask(spec, [], 0)
        texts: list[Texts] = []
        owners: list[int] = []
        for number, row in enumerate(task.rows):
            of_row = self._texts(spec, row)
            texts += of_row
            owners += [number] * len(of_row)
        columns = self._tokenize(texts, spec)
        long = [index for index, ids in enumerate(columns["input_ids"]) if len(ids) > self.length]
        if long:
            self._check_lengths(columns, long, owners, task)
        if long and task.stride is None:
            self._truncate(columns, long, texts, spec)
        sequences = self._sequences(task, columns, owners, set(long))
        long_rows = len({owners[index] for index in long})
        windowed = 0 if task.stride is None else long_rows
        encoded: list[EncodedRow] = []
        left_out = 0
        for row, of_row in zip(task.rows, sequences, strict=True):
            kept = _rows_to_learn(row, of_row) if training else [_joined(of_row)]
            left_out += not kept
            encoded += kept
        if not encoded:
            raise DataError(
                f"No row of the task (the first is {task.rows[0].where}) has its whole answer, or both marked places, "
                f"in {self.length} tokens: raise the length."
            )
        return EncodedTask(spec, encoded, long_rows - windowed, left_out, windowed)

    def _sequences(
        self,
        task: TaskRows,
        columns: Columns,
        owners: Sequence[int],
        long: Collection[int],
    ) -> list[list[EncodedRow]]:
        """Return the sequences of each row: one, one for each choice, or one for each window.

        Args:
            task: the rows.
            columns: the tokens of all sequences.
            owners: the number of the row of each sequence.
            long: the indices of sequences that are longer than a row.
        """
        sequences: list[list[EncodedRow]] = [[] for _ in task.rows]
        for index, owner in enumerate(owners):
            values = {key: column[index] for key, column in columns.items()}
            row = task.rows[owner]
            if task.stride is None or index not in long:
                sequences[owner].append(self._encode_row(task.spec, row, values, truncated=index in long))
                continue
            context = self._context(values["offset_mapping"], values["sequences"])
            for window in _windows(values, context, self.length, task.stride):
                sequences[owner].append(self._encode_row(task.spec, row, window, truncated=False))
        return sequences

    def _texts(self, spec: TaskSpec, row: LabelledRow) -> list[Texts]:
        """Return what is tokenized of a row: a text or a pair, or a pair for each choice."""
        if spec.type == "tagging":
            return [(" ".join(row.texts),)]
        if spec.type == "choice":
            text = " ".join(row.texts)
            return [(text, self._separator + choice) for choice in row.choices]
        if len(row.texts) == 1:
            return [row.texts]
        first, second = row.texts
        return [(first, self._separator + second)]

    def _tokenize(self, texts: Sequence[Texts], spec: TaskSpec, max_length: int | None = None) -> Columns:
        """Tokenize texts, and truncate them to `max_length` tokens if it is set.

        Returns:
            Lists over the texts: `input_ids`, `token_type_ids`, for tagging, span and marked `offset_mapping`, and for
            the last two `sequences`, the number of each token's text or None.
        """
        has_positions = spec.of_tokens or spec.type == "marked"
        if has_positions and not self.tokenizer.is_fast:
            raise BackboneError(
                f"A {spec.type} task needs the positions of tokens in the text, which the tokenizer "
                f"{type(self.tokenizer).__name__} does not return: use a backbone with a tokenizer.json."
            )
        options: dict[str, Any] = {
            "return_attention_mask": False,
            "return_token_type_ids": True,
            "return_offsets_mapping": has_positions,
            "verbose": False,
        }
        if max_length is not None:
            options["truncation"] = "only_second" if spec.type == "span" else "longest_first"
            options["max_length"] = max_length
        inputs: list[Any] = [list(column) for column in zip(*texts, strict=True)]
        encoding = self.tokenizer(*inputs, **options)
        columns: Columns = dict(encoding)
        if spec.type in ("span", "marked"):
            columns["sequences"] = [encoding.sequence_ids(index) for index in range(len(texts))]
        return columns

    def _check_lengths(
        self,
        columns: Columns,
        long: Sequence[int],
        owners: Sequence[int],
        task: TaskRows,
    ) -> None:
        """Raise `DataError` if the texts `long` must not or can't be shortened.

        Args:
            columns: the encodings of all texts.
            long: the numbers of the texts that are too long.
            owners: the number of each text's row.
            task: the rows.
        """
        if not self.truncation and task.stride is None:
            size = len(columns["input_ids"][long[0]])
            raise DataError(
                f"{task.rows[owners[long[0]]].where} has {size} tokens, but a row has at most {self.length}: raise the "
                "length, shorten the text, or set truncation to true."
            )
        if task.spec.type != "span":
            return
        for index in long:
            sequences = columns["sequences"][index]
            question = sum(number != _CONTEXT for number in sequences)
            if task.stride is not None:
                question = len(sequences) - len(self._context(columns["offset_mapping"][index], sequences))
            if question >= self.length:
                raise DataError(
                    f"{task.rows[owners[index]].where} has {question} tokens without its context, which leaves no "
                    f"room for context in a row of {self.length}: raise the length, or shorten the question."
                )

    def _context(self, offsets: Sequence[tuple[int, int]], sequences: Sequence[int | None]) -> list[int]:
        """Return the numbers of the tokens of the context, without those of the separator before it."""
        shift = len(self._separator)
        tokens = enumerate(zip(offsets, sequences, strict=True))
        return [index for index, ((_, end), number) in tokens if number == _CONTEXT and end > shift]

    def _truncate(self, columns: Columns, long: Sequence[int], texts: Sequence[Texts], spec: TaskSpec) -> None:
        """Replace the encodings of the texts `long` by truncated ones."""
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
        marks = None
        has_cut_mark = False
        if spec.type == "marked":
            places = _marked_ranges(row, values["offset_mapping"], values["sequences"], len(self._separator))
            marks = _marked_tokens(places)
            has_cut_mark = truncated and not all(is_whole for _, is_whole in places)
            if not truncated and not _has_marks(marks):
                raise DataError(f"{row.where} has a marked place without a token: mark other characters.")
        return EncodedRow(
            ids=ids,
            segments=segments if self.segments and segments.any() else None,
            target=_encode_target(spec, row, alignment, len(ids)),
            alignment=alignment,
            truncated=truncated,
            marks=marks,
            has_cut_mark=has_cut_mark,
        )


def _separates_pairs(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer puts special tokens between the texts of a pair."""
    if not tokenizer.is_fast:
        return tokenizer.sep_token_id is not None
    sequences = tokenizer("a", "b", verbose=False).sequence_ids(0)
    between = sequences[sequences.index(0) : sequences.index(1)]
    return None in between


def _windows(
    values: Mapping[str, Sequence[object]],
    context: Sequence[int],
    length: int,
    stride: int,
) -> Iterator[dict[str, list[object]]]:
    """Yield the encodings of the windows of a long context.

    Args:
        values: the encoding of a question and its whole context, by column.
        context: the numbers of the tokens of the context, which follow each other.
        length: maximum number of tokens of a window, more than the tokens outside the context.
        stride: number of tokens from the start of a window in the context to that of the next one; windows that would
            leave out tokens begin earlier.
    """
    first = context[0]
    end = context[-1] + 1
    room = length - (len(values["sequences"]) - (end - first))
    step = min(stride, room)
    start = first
    while True:
        stop = min(start + room, end)
        window = {}
        for key, column in values.items():
            window[key] = [*column[:first], *column[start:stop], *column[end:]]
        yield window
        if stop == end:
            return
        start += step


def _joined(sequences: Sequence[EncodedRow]) -> EncodedRow:
    """Return the sequences of a row as one row."""
    first = sequences[0]
    if len(sequences) == 1:
        return first
    truncated = any(sequence.truncated for sequence in sequences)
    return replace(first, truncated=truncated, more=tuple(sequences[1:]))


def _rows_to_learn(row: LabelledRow, sequences: Sequence[EncodedRow]) -> list[EncodedRow]:
    """Return what can be learned from the sequences of a row: nothing, one row, or a row for each window."""
    if isinstance(row.target, AnswerSpan):
        return _windows_to_learn(row.target, sequences)
    joined = _joined(sequences)
    if joined.has_cut_mark:
        return []
    different = {sequence.ids.tobytes() for sequence in sequences}
    if joined.truncated and len(different) < len(sequences):
        return []  # nothing tells the choices apart after they were cut
    return [joined]


def _windows_to_learn(target: AnswerSpan, windows: Sequence[EncodedRow]) -> list[EncodedRow]:
    """Return windows with the place of an answer, or the first token where there is none; none without any answer."""
    if len(windows) == 1:
        place = _first_place(target, windows[0], is_first=True)
        return [] if place is None else [replace(windows[0], target=place)]
    learned = []
    found = False
    for number, window in enumerate(windows):
        place = _first_place(target, window, is_first=number == 0)
        found = found or place is not None
        no_answer = torch.zeros(2, dtype=torch.long)
        learned.append(replace(window, target=no_answer if place is None else place))
    return learned if found else []


def _first_place(target: AnswerSpan, window: EncodedRow, *, is_first: bool) -> Tensor | None:
    """Return the tokens of the first place of an answer that is whole in a window, or None.

    Args:
        target: the answer.
        window: a window.
        is_first: whether no other window is before it, so that it begins with the context.
    """
    ranges = window.alignment
    assert ranges is not None, "rows of span tasks are aligned"
    begins = ranges[ranges[:, 1] > 0, 0]
    for start, end in ((target.start, target.end), *target.others):
        begins_before = is_first or begins.min() <= start
        tokens = _encode_span(start, end, ranges)
        if begins_before and _is_whole(tokens):
            return tokens
    return None


def _is_whole(target: Tensor | None) -> bool:
    """Return whether the target of a span is not truncated. None passes."""
    return target is None or int(target[0]) != IGNORED


def _has_marks(marks: np.ndarray) -> bool:
    """Return whether both marked places have tokens."""
    return all(bool((marks & (1 << place)).any()) for place in range(PLACES))


def _marked_tokens(places: Sequence[tuple[np.ndarray, bool]]) -> np.ndarray:
    """Return 1 at the tokens of the first marked place, 2 at those of the second, and their sum at both, int8, (n,)."""
    marks = np.zeros(len(places[0][0]), dtype=np.int8)
    for place, (is_marked, _) in enumerate(places):
        marks |= is_marked.astype(np.int8) << place
    return marks


def _marked_ranges(
    row: LabelledRow,
    offsets: Sequence[tuple[int, int]],
    sequences: Sequence[int | None],
    shift: int,
) -> list[tuple[np.ndarray, bool]]:
    """Return for each marked place which tokens it has, bool (n,), and whether they reach its end.

    Args:
        row: the row.
        offsets: the range of characters of each token in its text.
        sequences: the number of each token's text, or None.
        shift: length of the separator before the second text.
    """
    ranges = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    texts = np.asarray([-1 if number is None else number for number in sequences])
    is_token = ranges[:, 1] > ranges[:, 0]
    places = []
    for mark in row.marks:
        moved = shift if mark.text else 0
        in_text = is_token & (texts == mark.text)
        is_marked = in_text & (ranges[:, 0] < mark.end + moved) & (ranges[:, 1] > mark.start + moved)
        marked_text = row.texts[mark.text][mark.start : mark.end].rstrip()
        last = mark.start + moved + len(marked_text)
        places.append((is_marked, bool((in_text & (ranges[:, 1] >= last)).any())))
    return places


def _encode_target(spec: TaskSpec, row: LabelledRow, alignment: np.ndarray | None, tokens: int) -> Tensor | None:
    """Return the target of a row of `tokens` tokens as its head expects it."""
    target: Any = row.target
    if target is None:
        return None
    if spec.type in ("classification", "marked"):
        return torch.tensor(spec.labels.index(target))
    if spec.type == "choice":
        return torch.tensor(int(target))
    if spec.type == "regression":
        return torch.tensor(float(target))
    if spec.type == "multi-label":
        return torch.tensor([float(label in target) for label in spec.labels])
    assert alignment is not None, "rows of tagging and span tasks are aligned"
    if spec.type == "span":
        return _encode_span(target.start, target.end, alignment)
    tags = torch.full((tokens,), IGNORED)
    for token, label in zip(alignment.tolist(), target, strict=True):
        if token >= 0:
            tags[token] = spec.labels.index(label)
    return tags


def _encode_span(start: int, end: int, ranges: np.ndarray) -> Tensor:
    """Return the first and the last token of an answer, shape (2,), or -100 twice if it is truncated.

    Args:
        start: index of its first character in the context.
        end: index after its last character.
        ranges: range of context characters of each token, (n, 2); -1 outside the context.
    """
    inside = (ranges[:, 0] < end) & (ranges[:, 1] > start)
    is_whole = inside.any() and ranges[:, 1].max() >= end
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
