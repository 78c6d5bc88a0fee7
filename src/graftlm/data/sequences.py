"""Labelled sequences of token ids: ListOps, bytes of texts and of pairs, and pixels. Id 0 is padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graftlm.data.labelled import LabelledRow, TaskRows, listed, read_held_out_rows, read_training_rows
from graftlm.data.listops import DIGITS, TOKENS, generate_expressions, read_expression
from graftlm.data.sequence_config import BytesConfig, ListOpsConfig, PixelsConfig, SequenceConfig
from graftlm.data.table_files import check_text, read_values
from graftlm.errors import DataError
from graftlm.grafts.heads import TaskSpec

_BYTES = 256
_SEPARATOR = _BYTES + 1
"""The id between the texts of a pair. That of a byte is its value plus one."""
_TASK = "bytes"
"""Name of the rows in error messages of the reader of labelled rows."""


@dataclass(frozen=True)
class Sequences:
    """Labelled sequences.

    Attributes:
        ids: token ids of each sequence, int32 (n,), with n of at least 1 and ids of at least 1.
        labels: number of each sequence's class, int64 (rows,).
    """

    ids: list[np.ndarray]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(len(ids) for ids in self.ids)


@dataclass(frozen=True)
class SequenceTask:
    """What a classifier learns and is tested on.

    Attributes:
        classes: names of the classes, in the order of their numbers.
        vocab_size: number of token ids, with that of padding.
        train: training sequences, at least one, of at least two classes.
        test: test sequences, at least one.
        notes: what a reader should know, as sentences.
    """

    classes: tuple[str, ...]
    vocab_size: int
    train: Sequences
    test: Sequences
    notes: tuple[str, ...] = ()


def read_task(config: SequenceConfig) -> SequenceTask:
    """Read or make the sequences of a data section.

    Args:
        config: the data section.

    Raises:
        DataError: a file can't be read, a row is invalid, too long or of an unknown class, the training rows have a
            single class, or there are too few expressions to generate.
    """
    if isinstance(config, ListOpsConfig):
        task = _list_operations(config)
    elif isinstance(config, BytesConfig):
        task = _bytes(config)
    else:
        task = _pixels(config)
    present = set(task.train.labels.tolist())
    if len(present) < 2:
        only = task.classes[present.pop()]
        raise DataError(
            f"All training rows are of the class {only!r} (number of rows: {len(task.train):,}), so there is nothing "
            "to learn: name files with more classes under data.train, or raise data.rows or data.limit."
        )
    return SequenceTask(
        classes=task.classes,
        vocab_size=task.vocab_size,
        train=task.train,
        test=task.test,
        notes=(*task.notes, *_shared_rows(task)),
    )


def read_test(config: SequenceConfig, classes: Sequence[str], path: str) -> tuple[Sequences, list[str]]:
    """Read the test sequences of another file, as a trained classifier reads them.

    Args:
        config: the data section of the training.
        classes: names of the classes in training.
        path: the file.

    Returns:
        The sequences, and notes on them.

    Raises:
        DataError: the data section reads no files, or the file can't be read; see `read_task`.
    """
    if isinstance(config, ListOpsConfig):
        return _read_expressions([path], config), []
    if isinstance(config, BytesConfig):
        return _read_bytes_test(config.model_copy(update={"test": path}), classes)
    raise DataError(f"The classifier reads pixels of {config.images}, and {path} can't be read so: leave out --rows.")


def _shared_rows(task: SequenceTask) -> list[str]:
    """Return a note if test rows are among the training rows."""
    known = {ids.tobytes() for ids in task.train.ids}
    shared = sum(ids.tobytes() in known for ids in task.test.ids)
    if not shared:
        return []
    return [f"Of the {len(task.test):,} test rows, {shared:,} have the tokens of a training row."]


def _list_operations(config: ListOpsConfig) -> SequenceTask:
    if config.train:
        train = _read_expressions(listed(config.train), config)
        test = _read_expressions(listed(config.test), config)
    else:
        expressions = generate_expressions(
            config.test_rows + config.rows,
            shortest=config.shortest,
            longest=config.length,
            depth=config.depth,
            arguments=config.arguments,
            seed=config.seed,
        )
        # The test rows come first, so that they stay the same when more training rows are drawn.
        test = _sequences(expressions[: config.test_rows])
        train = _sequences(expressions[config.test_rows :])
    return SequenceTask(classes=DIGITS, vocab_size=1 + len(TOKENS), train=train, test=test)


def _sequences(rows: Sequence[tuple[np.ndarray, int]]) -> Sequences:
    return Sequences(
        ids=[ids for ids, _ in rows],
        labels=np.array([label for _, label in rows], dtype=np.int64),
    )


def _read_expressions(files: Sequence[str], config: ListOpsConfig) -> Sequences:
    """Read files of expressions and their values, which are checked."""
    columns = {"Source": "Source", "Target": "Target"}
    rows = []
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise DataError(f"There is no file {path}: correct the files of ListOps.")
        for (source, target), where in read_values(path, columns, "ListOps file"):
            ids, value = read_expression(source, where)
            if len(ids) > config.length:
                raise DataError(
                    f"{where} has {len(ids):,} tokens, but data.length allows {config.length:,}, and a part of an "
                    "expression has no value: raise data.length, or leave the row out."
                )
            if str(target).strip() != str(value):
                raise DataError(
                    f"{where} has the Target {target!r}, but the value of its expression is {value}: correct the row."
                )
            rows.append((ids, value))
    if not rows:
        raise DataError(f"{', '.join(files)} has no rows, but at least one expression is expected: name another file.")
    return _sequences(rows)


def _bytes(config: BytesConfig) -> SequenceTask:
    labelled = config.labelled()
    train = read_training_rows(_TASK, labelled)
    classes = tuple(train.spec.labels)
    sequences, cut = _encode(train, config)
    test, test_notes = _read_bytes_test(config, classes)
    notes = [*train.notes, *_cut_notes("training", cut, len(sequences), config), *test_notes]
    return SequenceTask(
        classes=classes,
        vocab_size=1 + _SEPARATOR,
        train=sequences,
        test=test,
        notes=tuple(notes),
    )


def _read_bytes_test(config: BytesConfig, classes: Sequence[str]) -> tuple[Sequences, list[str]]:
    spec = TaskSpec(type="classification", labels=list(classes))
    rows = read_held_out_rows(_TASK, config.labelled(), spec)
    sequences, cut = _encode(rows, config)
    return sequences, [*rows.notes, *_cut_notes("test", cut, len(sequences), config)]


def _cut_notes(split: str, cut: int, rows: int, config: BytesConfig) -> list[str]:
    if not cut:
        return []
    return [f"Of the {rows:,} {split} rows, {cut:,} were cut to {config.length:,} tokens (data.length)."]


def _encode(task: TaskRows, config: BytesConfig) -> tuple[Sequences, int]:
    """Return rows as sequences of bytes, and the number of those that were cut."""
    numbers = {label: number for number, label in enumerate(task.spec.labels)}
    lengths: Counter[bool] = Counter()
    rows = []
    for row in task.rows:
        ids, is_cut = _bytes_of(row, config)
        lengths[is_cut] += 1
        assert isinstance(row.target, str), "a classification task has a label in each row"
        rows.append((ids, numbers[row.target]))
    return _sequences(rows), lengths[True]


def _bytes_of(row: LabelledRow, config: BytesConfig) -> tuple[np.ndarray, bool]:
    """Return the ids of a row's text or pair, and whether it was cut."""
    parts = []
    for text in row.texts:
        encoded = check_text(text, "text", row.where).encode("utf-8")
        parts.append(np.frombuffer(encoded, dtype=np.uint8).astype(np.int32) + 1)
    separators = len(parts) - 1
    size = sum(len(part) for part in parts) + separators
    if size <= config.length:
        return _joined(parts), False
    if not config.truncation:
        raise DataError(
            f"{row.where} has {size:,} tokens, but data.length allows {config.length:,}: raise it, shorten the text, "
            "or set data.truncation to true."
        )
    room = config.length - separators
    if len(parts) == 1:
        return parts[0][:room], True
    first, second = parts
    # The longer text is cut first, until both have the same length.
    kept = max(room - len(second), (room + 1) // 2)
    first = first[:kept]
    return _joined([first, second[: room - len(first)]]), True


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return np.concatenate([first, np.array([_SEPARATOR], dtype=np.int32), second])


def _pixels(config: PixelsConfig) -> SequenceTask:
    from sklearn.datasets import load_digits  # takes a second to import

    pixels, digits = load_digits(return_X_y=True)
    levels = np.asarray(pixels).astype(np.int32) + 1
    classes = np.asarray(digits).astype(np.int32)
    order = np.random.default_rng(config.seed).permutation(len(levels))
    rows = [(levels[index], int(classes[index])) for index in order]
    return SequenceTask(
        classes=tuple(str(name) for name in np.unique(classes)),
        vocab_size=1 + 17,
        train=_sequences(rows[config.test_rows :]),
        test=_sequences(rows[: config.test_rows]),
    )
