"""Text that a backbone sampled: the samples, their file, and their marked ids.

A file of samples has a line with a key, then a line for each batch. A batch depends on the seed, its number and the
earlier batches, so an interrupted sampling continues after the last complete line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graftlm.data.marked_ids import PROMPT
from graftlm.errors import DataError, first_line


@dataclass(frozen=True)
class OwnText:
    """A sampled text.

    Attributes:
        ids: all token ids, including those that the text begins with.
        turns: (start, stop), in tokens, of each part that the model sampled and that is predicted: one part of free
            text, two of a conversation, one of a conversation near the new text, and none of a text that is left out.
        question: (start, stop), in tokens, of the user's turn in a conversation near the new text, which is not
            predicted; None for other texts.
        left_out: why the text is not used; empty if it is used.
    """

    ids: list[int]
    turns: list[tuple[int, int]]
    question: tuple[int, int] | None = None
    left_out: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether the text is a conversation."""
        return len(self.turns) > 1 or self.question is not None

    @property
    def tokens(self) -> int:
        """The number of sampled tokens that are predicted."""
        return sum(stop - start for start, stop in self.turns)


def marked_ids(sample: OwnText) -> np.ndarray:
    """Return a sample as marked ids, int32, (n,); see `graftlm.data.marked_ids`.

    The tokens before the first sampled one are the prompt, unless there is only one, such as BOS.

    Args:
        sample: a text that is not left out.
    """
    start, _ = sample.turns[0]
    ids = np.array(sample.ids, dtype=np.int32)
    if start > 1:
        ids[:start] |= PROMPT
    ids[0] = ~ids[0]
    return ids


def read_own_text(path: Path) -> list[OwnText]:
    """Read the samples of a file, without those that are left out.

    The key of the file is not checked.

    Raises:
        DataError: the file is missing or damaged.
    """
    samples = []
    try:
        _, *lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            samples += _parse_batch(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"The file of sampled text {path} can't be read ({first_line(error)}): remove it if it exists, and run the "
            "same command to sample the text again."
        ) from None
    return [sample for sample in samples if not sample.left_out]


def read_complete_batches(path: Path, key: str) -> list[list[OwnText]]:
    """Read the complete batches of an interrupted sampling, and truncate the file after the last of them.

    Args:
        path: the file, which need not exist. Its folder is created.
        key: the key in the file's first line; a file with another key counts as empty and is not changed.

    Raises:
        OSError: the folder can't be created, or the file can't be truncated.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        first, *lines = path.read_bytes().splitlines(keepends=True)
        if json.loads(first) != {"key": key}:
            return []
    except (OSError, ValueError):
        return []
    batches = []
    size = len(first)
    for line in lines:
        if not line.endswith(b"\n"):
            break
        try:
            batches.append(_parse_batch(line))
        except (ValueError, KeyError, TypeError):
            break
        size += len(line)
    with path.open("r+b") as file:
        file.truncate(size)
    return batches


def key_line(key: str) -> bytes:
    """Return the first line of a file of samples, with its line break."""
    return json.dumps({"key": key}).encode() + b"\n"


def batch_line(batch: Sequence[OwnText]) -> bytes:
    """Return the line of a batch in a file of samples, with its line break."""
    return json.dumps([_sample_values(sample) for sample in batch]).encode() + b"\n"


def first_samples(samples: Iterable[OwnText], tokens: int) -> list[OwnText]:
    """Return the fewest first samples with at least `tokens` sampled tokens in total, or all if there are fewer."""
    kept = []
    total = 0
    for sample in samples:
        if total >= tokens:
            break
        kept.append(sample)
        total += sample.tokens
    return kept


def _sample_values(sample: OwnText) -> dict[str, object]:
    """Return a sample as JSON values, without the attributes that most samples lack."""
    values = asdict(sample)
    if sample.question is None:
        del values["question"]
    if not sample.left_out:
        del values["left_out"]
    return values


def _parse_batch(line: str | bytes) -> list[OwnText]:
    return [_parse_sample(values) for values in json.loads(line)]


def _parse_sample(values: Mapping[str, Any]) -> OwnText:
    ids = [int(token) for token in values["ids"]]
    turns = [(int(start), int(stop)) for start, stop in values["turns"]]
    question = values.get("question")
    if question is not None:
        start, stop = question
        question = (int(start), int(stop))
    return OwnText(ids, turns, question, str(values.get("left_out", "")))
