"""Documents as windows of tokens that are each scored once, and the bytes of text that each token covers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graftlm.backbone import leading_bos
from graftlm.data.packing import window_bounds


@dataclass(frozen=True)
class Window:
    """Tokens to run in one row, and which of them count."""

    ids: np.ndarray  # (T,)
    first: int  # position of the first scored token
    bytes: np.ndarray  # (T - first,), of each scored token
    document: int
    prompt: int = 0  # how many of the first tokens are the document's prompt, a BOS before it included

    @property
    def tokens(self) -> int:
        return len(self.ids) - self.first


def cut_windows(tokenizer: Any, documents: Iterable[Any], length: int) -> Iterator[Window]:
    """The windows of all documents, in order, each of at most `length` tokens with its BOS.

    Documents are strings, or objects with `.text`; the tokens of a `.prompt` stand before it and are not scored.
    """
    bos = leading_bos(tokenizer)
    prefix = [] if bos is None else [bos]
    for index, document in enumerate(documents):
        ids, sizes = encode_with_bytes(tokenizer, document if isinstance(document, str) else document.text)
        given, _ = encode_with_bytes(tokenizer, getattr(document, "prompt", ""))
        ids, sizes = np.concatenate([given, ids]), np.concatenate([np.zeros_like(given), sizes])
        for start, stop in window_bounds(len(ids), length - len(prefix), overlap=1):
            unscored = 0 if prefix and start == 0 else 1  # a window's first token is scored only behind a BOS
            first = max(start + unscored, len(given))
            if first < stop:
                window = np.concatenate([np.asarray(prefix, dtype=np.int64), ids[start:stop]])
                prompt = len(prefix) + len(given) - start if start < len(given) else 0
                yield Window(window, len(prefix) + first - start, sizes[first:stop], index, prompt)


def limited(windows: Iterator[Window], limit: int | None) -> Iterator[Window]:
    """The first windows, until `limit` tokens are scored; the last window is cut short."""
    left = math.inf if limit is None else limit
    for window in windows:
        if left <= 0:
            return
        if window.tokens > left:
            keep = int(left)
            window = replace(window, ids=window.ids[: window.first + keep], bytes=window.bytes[:keep])
        left -= window.tokens
        yield window


def encode_with_bytes(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (n,) of a text without special tokens, and the UTF-8 bytes (n,) that each covers.

    The bytes add up to those of the text: what a tokenizer drops between tokens counts to the next one, and a character
    that is split over tokens counts to the first of them.
    """
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not len(ids):
        return ids, ids
    ends = _ends_from_offsets(encoded["offset_mapping"], text) if fast else _ends_from_decoding(tokenizer, ids, text)
    return ids, np.diff(ends, prepend=0)


def _ends_from_offsets(offsets: list[tuple[int, int]], text: str) -> np.ndarray:
    """Byte positions (n,) where tokens end, from their character offsets."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths)])
    ends = np.maximum.accumulate(np.asarray(offsets, dtype=np.int64)[:, 1])
    ends[-1] = len(points)
    return bytes_before[ends]


def _ends_from_decoding(tokenizer: Any, ids: np.ndarray, text: str) -> np.ndarray:
    """Byte positions (n,) where tokens end, from the lengths of the decoded tokens, scaled to the whole text."""
    # A token that is part of a character decodes to a replacement mark, which stands for about one byte.
    pieces = [tokenizer.decode([int(token)]).replace("\ufffd", "?") for token in ids]
    ends = np.cumsum([len(piece.encode()) for piece in pieces])
    total = len(text.encode())
    return np.rint(ends * (total / ends[-1])).astype(np.int64) if ends[-1] else np.full(len(ids), total)
