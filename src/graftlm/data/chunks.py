"""Tokenize documents: split them into chunks of text, and turn chunks into marked ids.

Each document begins with the tokenizer's leading BOS, if it has one, and ends with EOS. A prompt is tokenized without
its text, as in generation; the BOS belongs to the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graftlm.backbone import leading_bos
from graftlm.data.chats import ChatExample, chat_tokens
from graftlm.data.marked_ids import PROMPT, UNSCORED
from graftlm.data.sources import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The prompt or the text of a document, or a part of a very long one.

    Attributes:
        text: the text.
        first: whether it is the first chunk of its document.
        last: whether it is the last chunk of its document.
        prompt: whether it belongs to the document's prompt rather than to its text.
        where: the document's location, for error messages.
        chat: the whole conversation, if the document is one. It is always a single chunk.
    """

    text: str
    first: bool
    last: bool
    prompt: bool
    where: str
    chat: ChatExample | None = None


def split_documents(documents: Iterable[Document]) -> Iterator[TextChunk]:
    """Split documents into chunks of at most `CHUNK_CHARACTERS` characters, which bounds the memory of tokenizers.

    A conversation stays one chunk, and other documents without text are left out. A chunk ends after the last line
    break between two visible characters, where tokenizers split anyway, or at the limit if there is none. A tokenizer
    that marks the start of a text may add one token per chunk.
    """
    for document in documents:
        if document.chat is not None:
            yield TextChunk(
                text=document.text,
                first=True,
                last=True,
                prompt=False,
                where=document.where,
                chat=document.chat,
            )
            continue
        if not document.text:
            continue
        first = True
        for start, stop in _chunk_bounds(document.prompt):
            yield TextChunk(
                text=document.prompt[start:stop],
                first=first,
                last=False,
                prompt=True,
                where=document.where,
            )
            first = False
        for start, stop in _chunk_bounds(document.text):
            yield TextChunk(
                text=document.text[start:stop],
                first=first,
                last=stop == len(document.text),
                prompt=False,
                where=document.where,
            )
            first = False


def _chunk_bounds(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each chunk of a text."""
    start = 0
    while start < len(text):
        stop = _best_cut(text, start, start + CHUNK_CHARACTERS)
        yield start, stop
        start = stop


def _best_cut(text: str, start: int, stop: int) -> int:
    """Return the last position up to `stop` after a line break between two visible characters; else `stop`."""
    if stop >= len(text):
        return len(text)
    line_break = text.rfind("\n", start + 1, stop)
    while line_break > start:
        if not text[line_break - 1].isspace() and not text[line_break + 1].isspace():
            return line_break + 1
        line_break = text.rfind("\n", start + 1, line_break)
    return stop


def group_chunks(chunks: Iterable[TextChunk], characters: int) -> Iterator[list[TextChunk]]:
    """Group chunks into lists of at least `characters` characters. The last list may have fewer.

    A chunk of a prompt is always in the same list as the chunk after it.
    """
    group: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += len(chunk.text)
        if size >= characters and not chunk.prompt:
            yield group
            group = []
            size = 0
    if group:
        yield group


def tokenize(group: Sequence[TextChunk], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Return the marked ids of each chunk: int32, (its number of tokens,).

    Args:
        group: chunks in the order of `split_documents`. The last one does not belong to a prompt.
        tokenizer: the backbone's tokenizer.

    Raises:
        DataError: a conversation does not fit the tokenizer's chat template; see `chat_tokens`.
    """
    encoded = tokenizer(
        [chunk.text for chunk in group],
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    bos_id = leading_bos(tokenizer)
    eos_id = tokenizer.eos_token_id
    streams = []
    start_pending = False
    for ids, chunk in zip(encoded["input_ids"], group, strict=True):
        if chunk.chat is not None:
            streams.append(mark_chat(tokenizer, chunk.chat))
            continue
        bos = [bos_id] if chunk.first and bos_id is not None else []
        eos = [eos_id] if chunk.last and eos_id is not None else []
        stream = np.array([*bos, *ids, *eos], dtype=np.int32)
        if chunk.prompt:
            stream |= PROMPT
        if chunk.first:
            start_pending = True
        # A blank prompt may have no tokens. The document then starts with its text.
        if start_pending and len(stream):
            stream[0] = ~stream[0]
            start_pending = False
        streams.append(stream)
    return streams


def mark_chat(tokenizer: PreTrainedTokenizerBase, chat: ChatExample) -> np.ndarray:
    """Return the marked ids of a conversation of n tokens: int32, (n,).

    The text before the first predicted token is the prompt. No BOS or EOS is added, since they are part of the chat
    template.

    Raises:
        DataError: the conversation does not fit the tokenizer's chat template; see `chat_tokens`.
    """
    ids, predicted, _ = chat_tokens(tokenizer, chat)
    first_predicted = int(predicted.argmax())
    positions = np.arange(len(ids))
    marks = np.where(positions < first_predicted, PROMPT, UNSCORED)
    marks[predicted] = 0
    stream = ids.astype(np.int32) | marks.astype(np.int32)
    stream[0] = ~stream[0]
    return stream
