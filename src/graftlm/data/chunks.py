"""Documents to tokens: chunks of text, and their marked ids.

Every document is tokenised with its tokenizer's leading BOS, if any, and ends with EOS. A prompt is tokenised apart
from its text, as it is in generation; the BOS belongs to the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.backbone import leading_bos
from graftlm.data.chats import ChatExample, chat_tokens
from graftlm.data.sources import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from graftlm.data.marked_ids import PROMPT, UNSCORED

CHUNK_CHARACTERS = 1 << 18


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A document's prompt or text, or a part of a very long one; `first` and `last` of its document."""

    text: str
    first: bool
    last: bool
    prompt: bool
    where: str
    chat: ChatExample | None = None


def split_documents(documents: Iterable[Document]) -> Iterator[TextChunk]:
    """Split documents into chunks of at most `CHUNK_CHARACTERS`, which bounds the memory that tokenizers need.

    Chunks end at line ends between two visible characters, where tokenizers split anyway. A tokenizer that marks the
    start of a text may add one token per chunk.
    """
    for document in documents:
        if not document.text:
            continue
        if document.chat is not None:  # rendered by its template, it is one chunk
            yield TextChunk(document.text, True, True, False, document.where, document.chat)
            continue
        first = True
        for text, prompt in ((document.prompt, True), (document.text, False)):
            start = 0
            while start < len(text):
                stop = _line_end(text, start, start + CHUNK_CHARACTERS)
                last = not prompt and stop == len(text)
                yield TextChunk(text[start:stop], first, last, prompt, document.where)
                start, first = stop, False


def _line_end(text: str, start: int, stop: int) -> int:
    """The best cut up to `stop`: after a newline between two visible characters, else at `stop`."""
    if stop >= len(text):
        return len(text)
    at = stop
    while (at := text.rfind("\n", start + 1, at)) > start:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    return stop


def group_chunks(chunks: Iterable[TextChunk], characters: int) -> Iterator[list[TextChunk]]:
    """Group chunks into lists of about so many characters; no list ends with a prompt."""
    group: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += len(chunk.text)
        if size >= characters and not chunk.prompt:
            yield group
            group, size = [], 0
    if group:
        yield group


def tokenise(group: list[TextChunk], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """The marked ids of each chunk, of shape (its tokens,)."""
    options: dict[str, Any] = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    encoded = tokenizer([chunk.text for chunk in group], add_special_tokens=False, **options)["input_ids"]
    bos_id, eos_id = leading_bos(tokenizer), tokenizer.eos_token_id
    streams, starts = [], False
    for ids, chunk in zip(encoded, group, strict=True):
        if chunk.chat is not None:
            streams.append(mark_chat(tokenizer, chunk.chat))
            continue
        bos = [bos_id] if chunk.first and bos_id is not None else []
        eos = [eos_id] if chunk.last and eos_id is not None else []
        stream = np.array([*bos, *ids, *eos], dtype=np.int32) | np.int32(PROMPT if chunk.prompt else 0)
        starts = starts or chunk.first
        if starts and len(stream):  # a blank prompt may have no token: the document then starts with its text
            stream[0], starts = ~stream[0], False
        streams.append(stream)
    return streams


def mark_chat(tokenizer: Any, chat: ChatExample) -> np.ndarray:
    """The marked ids (n,) of a conversation; its template has the tokens that begin and end it."""
    ids, predicted, _ = chat_tokens(tokenizer, chat)
    lead = np.arange(len(ids)) < predicted.argmax()
    stream = ids.astype(np.int32) | np.where(predicted, 0, np.where(lead, PROMPT, UNSCORED)).astype(np.int32)
    stream[0] = ~stream[0]
    return stream
