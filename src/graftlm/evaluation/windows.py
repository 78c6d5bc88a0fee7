"""Windows of tokens, in which texts are scored.

A document's tokens are cut into windows that never cross documents. A window begins with the last token of the previous
window, as context, so that each token but the first is scored once. A tokenizer that puts a BOS token before texts puts
one before every window, and then the first token is scored too. Other special tokens are left out. The tokens of a
document's prompt are context and are not scored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import ExtendedVocabulary, TokenSelection, encode_parts, leading_bos, padding_id
from graftlm.data import Document
from graftlm.data.boundaries import window_bounds
from graftlm.data.chats import chat_tokens, render_chat
from graftlm.data.conversations import ChatExample
from graftlm.data.own_text import OwnText
from graftlm.evaluation.inference import LanguageModel, device_of


@dataclass(frozen=True)
class Window:
    """Tokens of one document that a model reads in one row, the last of which are scored.

    Attributes:
        ids: (T,) int64 token ids, with a leading BOS if the tokenizer has one.
        first: the index of the first scored token, at least 1; all tokens from it on are scored.
        bytes: (T - first,) int64, the number of UTF-8 bytes of each scored token.
        document: the number of the document, counted from 0.
        prompt: the number of leading tokens that belong to the document's prompt, BOS included.
    """

    ids: np.ndarray
    first: int
    bytes: np.ndarray
    document: int
    prompt: int = 0

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return len(self.bytes)

    def spelled(self, extended: ExtendedVocabulary) -> Window:
        """Return the window with the old tokens that spell added ones. The first of them counts the bytes.

        Args:
            extended: the added tokens.
        """
        parts = [extended.spelling(token) for token in self.ids.tolist()]
        lengths = [len(part) for part in parts]
        first = sum(lengths[: self.first])
        byte_counts = np.zeros(sum(lengths) - first, dtype=np.int64)
        byte_counts[np.cumsum([0, *lengths[self.first : -1]])] = self.bytes
        return Window(
            ids=np.array([token for part in parts for token in part], dtype=np.int64),
            first=first,
            bytes=byte_counts,
            document=self.document,
            prompt=sum(lengths[: self.prompt]),
        )


def cut_windows(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str | Document], length: int
) -> Iterator[Window]:
    """Yield the windows of documents.

    Args:
        tokenizer: turns text into ids.
        documents: strings or `Document`s. A conversation has at least one window for each turn of the assistant.
        length: maximum number of tokens of a window, BOS included; at least 3.
    """
    for number, document in enumerate(documents):
        yield from _document_windows(tokenizer, document, length, number)


def _document_windows(
    tokenizer: PreTrainedTokenizerBase, document: str | Document, length: int, number: int
) -> Iterator[Window]:
    chat = getattr(document, "chat", None)
    if chat is not None:
        yield from _chat_windows(tokenizer, chat, length, number)
    else:
        yield from _text_windows(tokenizer, document, length, number)


def _text_windows(
    tokenizer: PreTrainedTokenizerBase, document: str | Document, length: int, number: int
) -> Iterator[Window]:
    """Yield the windows of a text after its prompt, without those that have nothing to score."""
    text = document if isinstance(document, str) else document.text
    parts = encode_parts(tokenizer, getattr(document, "prompt", ""), text)
    prompt_ids = np.asarray(parts.before, dtype=np.int64)
    text_ids = np.asarray(parts.ids, dtype=np.int64)
    text_bytes = _token_bytes(tokenizer, text_ids, parts.ends, text)
    ids = np.concatenate([prompt_ids, text_ids])
    byte_counts = np.concatenate([np.zeros_like(prompt_ids), text_bytes])
    bos = leading_bos(tokenizer)
    prefix = np.array([] if bos is None else [bos], dtype=np.int64)
    for start, stop in window_bounds(len(ids), length - len(prefix), overlap=1):
        has_context = start > 0 or len(prefix) == 0  # A document's first token is scored only after a BOS.
        first = max(start + 1 if has_context else start, len(prompt_ids))
        if first >= stop:
            continue
        prompt = len(prefix) + len(prompt_ids) - start if start < len(prompt_ids) else 0
        yield Window(
            ids=np.concatenate([prefix, ids[start:stop]]),
            first=len(prefix) + first - start,
            bytes=byte_counts[first:stop],
            document=number,
            prompt=prompt,
        )


def _chat_windows(tokenizer: PreTrainedTokenizerBase, chat: ChatExample, length: int, number: int) -> Iterator[Window]:
    """Yield a window for each turn of the assistant, after all that precedes it: its prompt. Long ones have several."""
    ids, predicted, ends = chat_tokens(tokenizer, chat)
    before = _bytes_before(render_chat(chat, tokenizer).text)
    byte_counts = np.diff(before[np.maximum.accumulate(ends)], prepend=0)
    edges = np.flatnonzero(np.diff(predicted.astype(np.int8), prepend=0, append=0))
    for start, stop in edges.reshape(-1, 2).tolist():
        step = length - 1 if stop - start < length else length // 2
        for first in range(max(start, 1), stop, step):
            last = min(first + step, stop)
            begin = max(0, last - length)
            yield Window(
                ids=ids[begin:last],
                first=first - begin,
                bytes=byte_counts[first:last],
                document=number,
                prompt=max(0, start - begin),
            )


def own_windows(samples: Iterable[OwnText]) -> Iterator[Window]:
    """Yield the windows of texts that a model sampled: one for each sampled part, after all that precedes it.

    Their tokens have no bytes, because a sample need not be valid text.
    """
    for number, sample in enumerate(samples):
        for start, stop in sample.turns:
            yield Window(
                ids=np.array(sample.ids[:stop], dtype=np.int64),
                first=start,
                bytes=np.zeros(stop - start, dtype=np.int64),
                document=number,
                prompt=start if start > 1 else 0,
            )


def limit_scored(windows: Iterable[Window], limit: int | None) -> Iterator[Window]:
    """Yield windows until `limit` tokens are scored, shortening the last one.

    Args:
        windows: the windows in the order in which they are scored.
        limit: maximum number of scored tokens; None yields all windows.
    """
    left = sys.maxsize if limit is None else limit
    for window in windows:
        if left <= 0:
            return
        yield replace(window, ids=window.ids[: window.first + left], bytes=window.bytes[:left])
        left -= window.tokens


def limited_windows(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str | Document], length: int, limit: int | None
) -> Iterator[Window]:
    """Yield the windows of documents, in which at most `limit` tokens are scored.

    Every source of a sequence of documents has an equal share of the limit, and what a source lacks, the others have in
    addition. Each source is scored from its beginning. Documents that are no sequence count as one source.

    Args:
        tokenizer: turns text into ids.
        documents: strings or `Document`s.
        length: maximum number of tokens of a window, BOS included; at least 3.
        limit: maximum number of scored tokens; None yields all windows.
    """
    if limit is None or not isinstance(documents, Sequence):
        yield from limit_scored(cut_windows(tokenizer, documents, length), limit)
        return
    beginnings = []
    for numbers in numbers_by_source(documents).values():
        windows = _windows_of(tokenizer, documents, length, numbers)
        beginnings.append(list(limit_scored(windows, limit)))
    available = [sum(window.tokens for window in windows) for windows in beginnings]
    for windows, share in zip(beginnings, even_shares(available, limit), strict=True):
        yield from limit_scored(windows, share)


def _windows_of(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str | Document], length: int, numbers: Iterable[int]
) -> Iterator[Window]:
    for number in numbers:
        yield from _document_windows(tokenizer, documents[number], length, number)


def numbers_by_source(documents: Iterable[str | Document]) -> dict[str, list[int]]:
    """Return the numbers of documents, counted from 0, by the title of their source; texts from memory have none."""
    numbers: dict[str, list[int]] = {}
    for number, document in enumerate(documents):
        numbers.setdefault(getattr(document, "source", ""), []).append(number)
    return numbers


def even_shares(available: Sequence[int], total: int) -> list[int]:
    """Divide a total evenly among parts. Where a part has less than its share, the others have more.

    Args:
        available: what each part has at most.
        total: what is divided.

    Returns:
        The share of each part. Their sum is the smaller of `total` and the sum of `available`.
    """
    shares = [0] * len(available)
    left = total
    smallest_first = sorted(range(len(available)), key=available.__getitem__)
    for rank, part in enumerate(smallest_first):
        shares[part] = min(available[part], left // (len(available) - rank))
        left -= shares[part]
    return shares


def encode_with_bytes(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of a text without special tokens, and the number of UTF-8 bytes of each token.

    The numbers sum to the text's bytes. Bytes that the tokenizer drops count for the next token, or for the last if
    none follows. A character that is split over tokens counts for the first of them.

    Returns:
        (n,) int64 ids and (n,) int64 numbers of bytes.
    """
    parts = encode_parts(tokenizer, "", text)
    ids = np.asarray(parts.ids, dtype=np.int64)
    return ids, _token_bytes(tokenizer, ids, parts.ends, text)


def _token_bytes(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, ends: list[int] | None, text: str) -> np.ndarray:
    """Return the number of UTF-8 bytes of each token, (n,) int64; see `encode_with_bytes`.

    Args:
        tokenizer: the tokenizer.
        ids: (n,) token ids.
        ends: the character of the text at which each token ends; None if the tokenizer has no positions.
        text: the text.
    """
    if not len(ids):
        return ids
    if ends is None:
        return np.diff(_ends_from_decoding(tokenizer, ids, text), prepend=0)
    last_characters = np.maximum.accumulate(np.asarray(ends, dtype=np.int64))
    last_characters[-1] = len(text)
    return np.diff(_bytes_before(text)[last_characters], prepend=0)


def _bytes_before(text: str) -> np.ndarray:
    """Return the number of UTF-8 bytes before each character of a text, and of all of it, (characters + 1,)."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = np.ones(len(points), dtype=np.int64)
    for first_of_next_width in (0x80, 0x800, 0x10000):
        widths += points >= first_of_next_width
    return np.concatenate([[0], np.cumsum(widths)])


def _ends_from_decoding(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, text: str) -> np.ndarray:
    """Return the byte positions at which tokens end, (n,), from decoded lengths scaled to the text's bytes."""
    byte_counts = []
    for token in ids:
        # A token that is part of a character decodes to a replacement mark, which counts as one byte.
        decoded = str(tokenizer.decode([int(token)])).replace("\ufffd", "?")
        byte_counts.append(len(decoded.encode()))
    ends = np.cumsum(byte_counts)
    total = len(text.encode())
    if not ends[-1]:
        return np.full(len(ids), total)
    return np.rint(ends * (total / ends[-1])).astype(np.int64)


def window_batch(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Window]
) -> tuple[dict[str, object], Tensor | None, Tensor]:
    """Turn windows into the inputs of a model, padded on the right, on the model's device.

    Args:
        model: the model that will read them.
        tokenizer: the model's tokenizer, for padding.
        batch: the windows, at least one.

    Returns:
        The keyword arguments of any model, with `input_ids` and `attention_mask` (B, T); a bool mask (B, T), True for
        tokens of prompts, or None if there is no prompt; and labels (B, T), each at the position that predicts it,
        -100 where no token is scored.
    """
    shape = (len(batch), max(len(window.ids) for window in batch))
    ids = torch.full(shape, padding_id(tokenizer))
    mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100)
    prompt = torch.zeros(shape, dtype=torch.bool)
    for row, window in enumerate(batch):
        size = len(window.ids)
        first = window.first
        ids[row, :size] = torch.from_numpy(window.ids)
        mask[row, :size] = 1
        prompt[row, : window.prompt] = True
        labels[row, first - 1 : size - 1] = ids[row, first:size]
    device = device_of(model)
    inputs: dict[str, object] = {
        "input_ids": ids.to(device),
        "attention_mask": mask.to(device),
        "use_cache": False,
    }
    return inputs, prompt.to(device) if prompt.any() else None, labels.to(device)


def scored_logits(
    model: LanguageModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Window]
) -> tuple[Tensor, Tensor]:
    """Run a model on a batch of windows, and return what predicts their scored tokens.

    Args:
        model: the model; a `GraftedModel` also receives the mask of prompt tokens.
        tokenizer: the model's tokenizer, for padding.
        batch: the windows, at least one.

    Returns:
        The logits (N, V) at the N positions before scored tokens, and the ids of these tokens, (N,). They are in the
        order of the windows, each of which has `Window.tokens` of them.
    """
    from graftlm.grafted.model import GraftedModel  # takes seconds to import

    inputs, prompt, labels = window_batch(model, tokenizer, batch)
    is_scored = labels != -100
    if isinstance(model, GraftedModel):
        return model.logits_at(is_scored, prompt=prompt, **inputs), labels[is_scored]
    selection = TokenSelection(is_scored)
    with selection.before_head(model):
        output = model(**inputs)
    return selection.logits(output.logits), labels[is_scored]
