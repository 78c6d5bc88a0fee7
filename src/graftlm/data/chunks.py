"""Tokenize documents: split them into chunks of text, and turn chunks into marked ids.

Each document begins with the tokenizer's leading BOS, if it has one, and ends with EOS. A prompt has the tokens that it
has in generation, where its text is unknown, and the text those that continue it; see `encode_parts`. The BOS belongs
to the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graftlm.backbone import continuation_ids, encode_parts, leading_bos
from graftlm.data.chats import chat_tokens
from graftlm.data.conversations import ChatExample
from graftlm.data.marked_ids import PROMPT, UNSCORED
from graftlm.data.sources import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK_CHARACTERS = 1 << 18
_OVERLAP = 256  # characters of a chunk that the next one is tokenized with


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The prompt or the text of a document, or a part of a very long one.

    Attributes:
        text: the text.
        first: whether it is the first chunk of its document.
        last: whether it is the last chunk of its document.
        prompt: whether it belongs to the document's prompt rather than to its text.
        where: the document's location, for error messages.
        source: the title of the document's source.
        before: the chunk before it in its document; empty for the first chunk.
        chat: the whole conversation, if the document is one. It is always a single chunk.
        unread: columns of the document's row that are not read; with the last chunk.
    """

    text: str
    first: bool
    last: bool
    prompt: bool
    where: str
    source: str = ""
    before: str = ""
    chat: ChatExample | None = None
    unread: tuple[str, ...] = ()


def split_documents(documents: Iterable[Document]) -> Iterator[TextChunk]:
    """Split documents into chunks of at most `CHUNK_CHARACTERS` characters, which bounds the memory of tokenizers.

    A conversation stays one chunk, and other documents without text are left out. A chunk ends after the last line
    break between two visible characters, where tokenizers split anyway. If there is none, it ends before the last
    blank, or at the limit.
    """
    for document in documents:
        if document.chat is not None:
            yield TextChunk(
                text=document.text,
                first=True,
                last=True,
                prompt=False,
                where=document.where,
                source=document.source,
                chat=document.chat,
                unread=document.unread,
            )
            continue
        if not document.text:
            continue
        before = ""
        for start, stop in _chunk_bounds(document.prompt):
            text = document.prompt[start:stop]
            yield TextChunk(
                text=text,
                first=not before,
                last=False,
                prompt=True,
                where=document.where,
                source=document.source,
                before=before,
            )
            before = text
        for start, stop in _chunk_bounds(document.text):
            text = document.text[start:stop]
            is_last = stop == len(document.text)
            yield TextChunk(
                text=text,
                first=not before,
                last=is_last,
                prompt=False,
                where=document.where,
                source=document.source,
                before=before,
                unread=document.unread if is_last else (),
            )
            before = text


def _chunk_bounds(text: str) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each chunk of a text."""
    start = 0
    while start < len(text):
        stop = _best_cut(text, start, start + CHUNK_CHARACTERS)
        yield start, stop
        start = stop


def _best_cut(text: str, start: int, stop: int) -> int:
    """Return the last position up to `stop` where a chunk may end; see `split_documents`."""
    if stop >= len(text):
        return len(text)
    line_break = text.rfind("\n", start + 1, stop)
    while line_break > start:
        if not text[line_break - 1].isspace() and not text[line_break + 1].isspace():
            return line_break + 1
        line_break = text.rfind("\n", start + 1, line_break)
    blank = text.rfind(" ", start + 1, stop)
    return blank if blank > start and not text[blank - 1].isspace() else stop


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
    bos_id = leading_bos(tokenizer)
    eos_id = tokenizer.eos_token_id
    streams = []
    start_pending = False
    for ids, chunk in zip(_chunk_ids(group, tokenizer), group, strict=True):
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


def _chunk_ids(group: Sequence[TextChunk], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the ids of each chunk as it reads behind the chunk before it; none for conversations."""
    before = [_text_before(group, number) for number in range(len(group))]
    texts = [
        "" if chunk.chat is not None else text_before + chunk.text
        for chunk, text_before in zip(group, before, strict=True)
    ]
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    chunk_ids: list[list[int]] = []
    for number, (chunk, whole) in enumerate(zip(group, encoded["input_ids"], strict=True)):
        known: list[int] = []
        if _completes_prompt(group, number):
            known = chunk_ids[-1]
        elif before[number]:
            known = tokenizer(before[number], add_special_tokens=False, verbose=False)["input_ids"]
        if whole[: len(known)] == known:
            chunk_ids.append(whole[len(known) :])
        elif _completes_prompt(group, number):
            parts = encode_parts(tokenizer, chunk.before, chunk.text)
            chunk_ids[-1] = parts.before
            chunk_ids.append(parts.ids)
        else:
            chunk_ids.append(continuation_ids(tokenizer, chunk.before, chunk.text))
    return chunk_ids


def _text_before(group: Sequence[TextChunk], number: int) -> str:
    """Return the text that a chunk is tokenized with: the whole prompt before it, or the end of another chunk."""
    before = group[number].before
    return before if _completes_prompt(group, number) else before[-_OVERLAP:]


def _completes_prompt(group: Sequence[TextChunk], number: int) -> bool:
    """Return whether a chunk is the text behind a prompt of one chunk."""
    return number > 0 and not group[number].prompt and group[number - 1].prompt and group[number - 1].first


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
