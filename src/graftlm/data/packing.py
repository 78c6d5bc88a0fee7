"""Documents to token rows to training batches.

Every document is tokenised with its tokenizer's leading BOS, if any, and ends with EOS. The ids of all documents form
one stream that is cut into rows of `length` tokens; the last row is padded. With boundaries `whole`, a row ends before
the first document that does not fit, and is padded. Plain text longer than a row is cut anyway; prompted text is not.

A prompt is tokenised apart from its text, as it is in generation; the BOS belongs to the prompt.

The stream holds *marked* ids, int32: `id` inside a document, `~id` (negative) for its first token, `PADDING` after the
last document, the bit `PROMPT` in the ids of a prompt, and the bit `UNSCORED` in those of later turns of a conversation
that are not predicted. One array thus carries ids, prompts, starts and padding.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from graftlm.backbone import leading_bos, padding_id
from graftlm.data.chats import ChatExample, chat_tokens
from graftlm.data.sources import DataConfig, Document, SourceConfig, check_domains, read_documents
from graftlm.errors import DataError, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Boundaries = Literal["separate", "joined", "whole"]

OLD, NEW = 0, 1
DOMAIN_NAMES = {OLD: "old", NEW: "new"}
IGNORED = -100
PADDING = np.iinfo(np.int32).min
PROMPT = 1 << 30  # above every vocabulary, and ~(id | PROMPT | UNSCORED) is never PADDING
UNSCORED = 1 << 29
CHUNK_CHARACTERS = 1 << 18
GROUP_CHARACTERS = 1 << 19  # tokenizers are fastest on batches
STREAM_GROUP_CHARACTERS = 1 << 16


def unmark(marked: np.ndarray, pad_id: int) -> np.ndarray:
    """Plain ids of marked ids of any shape."""
    return np.where(marked == PADDING, pad_id, np.where(marked < 0, ~marked, marked) & ~(PROMPT | UNSCORED))


def is_start(marked: np.ndarray) -> np.ndarray:
    """Which marked ids are the first of a document."""
    return (marked < 0) & (marked != PADDING)


def is_prompt(marked: np.ndarray) -> np.ndarray:
    """Which marked ids belong to a prompt: what stands before the first predicted token of its document."""
    return _has_bit(marked, PROMPT)


def _has_bit(marked: np.ndarray, bits: int) -> np.ndarray:
    return (np.where(marked < 0, ~marked, marked) & bits).astype(bool) & (marked != PADDING)


# Documents to windows of tokens


def window_bounds(
    n_tokens: int, length: int, *, overlap: int = 0, starts: Sequence[int] | None = None
) -> Iterator[tuple[int, int]]:
    """(start, stop) of windows of at most `length` tokens, each with `overlap` tokens of the one before it.

    With `starts`, sorted positions at which documents start, a window ends before the first document that it can't
    hold to its end; a document longer than a window is cut anyway.
    """
    start = stop = 0
    while stop < n_tokens:
        stop = min(start + length, n_tokens)
        if starts is not None and stop < n_tokens:
            last = starts[bisect_right(starts, stop) - 1] if len(starts) else 0  # the last document start up to `stop`
            stop = int(last) if start < last <= stop else stop
        yield start, stop
        start = stop - overlap


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


def pad_row(row: np.ndarray, length: int) -> np.ndarray:
    """Pad marked ids (n,) at their end to (length,)."""
    return np.pad(row, (0, length - len(row)), constant_values=PADDING)


def split_rows(stream: np.ndarray, length: int, boundaries: Boundaries) -> np.ndarray:
    """Cut marked ids (n,) into padded rows (N, length)."""
    return np.stack([pad_row(stream[start:stop], length) for start, stop in _row_bounds(stream, length, boundaries)])


def _row_bounds(stream: np.ndarray, length: int, boundaries: Boundaries) -> Iterator[tuple[int, int]]:
    starts = np.flatnonzero(is_start(stream)).tolist() if boundaries == "whole" else None
    return window_bounds(len(stream), length, starts=starts)


class RowPacker:
    """Packs the documents that `open_documents` opens at their beginning into rows of `length` tokens.

    With `repeat` it starts over after the last document instead of ending. `DataConfig` explains `boundaries`.

    Attributes:
        tail: marked ids (n,) that are tokenised and not yet in a row.
        chunks: number of chunks that were tokenised in this epoch.
        epoch: how often the documents were read to their end.
        n_tokens: number of tokens so far.
    """

    def __init__(
        self,
        open_documents: Callable[[], Iterable[Document]],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        boundaries: Boundaries = "separate",
        *,
        repeat: bool = False,
    ) -> None:
        self.length, self.pad_id = length, padding_id(tokenizer)
        self.boundaries: Boundaries = boundaries
        self.tail = np.empty(0, dtype=np.int32)
        self.chunks = self.epoch = self.n_tokens = 0
        self._open_documents, self._tokenizer, self._repeat = open_documents, tokenizer, repeat
        self._groups: Iterator[list[TextChunk]] | None = None

    def __iter__(self) -> Iterator[np.ndarray]:
        while (row := self.next_row()) is not None:
            yield row

    def next_row(self) -> np.ndarray | None:
        """The next row of marked ids (length,); None after the last one.

        Raises DataError if a repeated source has no text, or a document with a prompt must stay whole and does not fit.
        """
        needed = self.length + (self.boundaries == "whole")  # the token after a row shows whether a document ends there
        while len(self.tail) < needed and (group := self._next_group()):
            self._tokenise(group)
        if not len(self.tail):
            return None
        _, stop = next(_row_bounds(self.tail[:needed], self.length, self.boundaries))
        row, self.tail = self.tail[:stop], self.tail[stop:]
        return pad_row(row, self.length)

    def resume(self, tail: np.ndarray, chunks: int, epoch: int) -> None:
        """Continue from the given attributes."""
        self.tail, self.chunks, self.epoch, self._groups = tail, chunks, epoch, None

    def _tokenise(self, group: list[TextChunk]) -> None:
        streams = tokenise(group, self._tokenizer)
        if self.boundaries == "whole":
            self._check_fits(group, streams)
        self.tail = np.concatenate([self.tail, *streams])
        self.chunks += len(group)
        self.n_tokens += sum(map(len, streams))

    def _next_group(self) -> list[TextChunk] | None:
        if self._groups is None:
            chunks = islice(split_documents(self._open_documents()), self.chunks, None)
            self._groups = group_chunks(chunks, STREAM_GROUP_CHARACTERS if self._repeat else GROUP_CHARACTERS)
        if (group := next(self._groups, None)) or not self._repeat:
            return group
        if not self.chunks:
            raise DataError("The streaming source gives no text: name a source with text that can be read again.")
        self.resume(self.tail, 0, self.epoch + 1)
        return self._next_group()

    def _check_fits(self, group: list[TextChunk], streams: list[np.ndarray]) -> None:
        """Raise `DataError` if a document with a prompt is longer than a row."""
        starts = np.flatnonzero(is_start(self.tail))
        last = self.tail[starts[-1] :] if len(starts) else self.tail
        size = len(last) if is_prompt(last).any() else None  # tokens of the current document, if it has a prompt
        for chunk, stream in zip(group, streams, strict=True):
            if chunk.first:
                size = 0 if chunk.prompt or chunk.chat is not None else None
            if size is not None and (size := size + len(stream)) > self.length:
                raise DataError(
                    f"{chunk.where} takes {size} tokens or more with its prompt, but a row holds {self.length} and "
                    "documents stay whole: raise the length, leave the row out, or set boundaries to separate."
                )


@dataclass(eq=False)
class TokenBlocks:
    """Packed rows of one domain, in memory: `marked` is int32, (N, length). `DataConfig` explains `boundaries`."""

    marked: np.ndarray
    boundaries: Boundaries = "separate"
    pad_id: int = 0

    def __len__(self) -> int:
        return len(self.marked)

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.marked.shape[1]

    @property
    def input_ids(self) -> np.ndarray:
        """Plain ids, int32, shape (N, length)."""
        return unmark(self.marked, self.pad_id)

    def take(self, first: int, count: int, key: tuple[int, int]) -> np.ndarray:
        """Rows `first` to `first + count` of an endless sequence in which every epoch is a new order of all rows.

        The order depends only on `key` (seed, domain) and the epoch. Returns marked ids, shape (count, length).
        """
        positions = (divmod(at, len(self)) for at in range(first, first + count))
        rows = [_epoch_order(len(self), *key, epoch)[index] for epoch, index in positions]
        return self.marked[np.array(rows, dtype=np.int64)]


@lru_cache(maxsize=4)
def _epoch_order(size: int, *key: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key)).permutation(size)


class StreamingBlocks:
    """Packed rows of one domain, out of an endless stream and in random order.

    A row is drawn at random out of a buffer of `buffer_rows` rows and replaced by the next row of the packer, which
    repeats its documents. The drawn position depends only on the key of `take` and the row's number.
    """

    def __init__(self, packer: RowPacker, *, buffer_rows: int = 256) -> None:
        self.length, self.pad_id = packer.length, packer.pad_id
        self.boundaries: Boundaries = packer.boundaries
        self._packer, self._buffer_rows, self._drawn = packer, buffer_rows, 0
        self._buffer = np.empty((0, self.length), dtype=np.int32)

    def take(self, first: int, count: int, key: tuple[int, int]) -> np.ndarray:
        """The next `count` rows as marked ids, shape (count, length).

        Raises DataError if row `first` is not the next one, the source has no text, or a document with a prompt must
        stay whole and does not fit into a row.
        """
        if first != self._drawn:
            raise DataError(
                f"The stream stands at row {self._drawn}, but row {first} is asked for: streams go forward only, "
                "so load the state that was saved at that step."
            )
        if not len(self._buffer):
            self._buffer = np.array([self._packer.next_row() for _ in range(self._buffer_rows)], dtype=np.int32)
        return np.array([self._draw(key) for _ in range(count)], dtype=np.int32).reshape(count, self.length)

    def _draw(self, key: tuple[int, int]) -> np.ndarray:
        at = np.random.Generator(np.random.Philox([*key, self._drawn])).integers(self._buffer_rows)
        row = self._buffer[at].copy()
        row_after = self._packer.next_row()
        assert row_after is not None, "a packer that repeats has no last row"
        self._buffer[at] = row_after
        self._drawn += 1
        return row

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next rows depend on, as plain JSON values."""
        return {
            "epoch": self._packer.epoch,
            "chunks": self._packer.chunks,
            "drawn": self._drawn,
            "tail": _encode(self._packer.tail),
            "buffer": _encode(self._buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same documents and length. Raises DataError if its buffer has another size."""
        buffer = _decode(state["buffer"])
        if len(buffer) not in (0, self._buffer_rows * self.length):
            raise DataError(
                f"The stream's state holds {len(buffer)} buffered tokens, but {self._buffer_rows} rows of "
                f"{self.length} are expected: resume with the data settings of the run that saved it."
            )
        self._packer.resume(_decode(state["tail"]), int(state["chunks"]), int(state["epoch"]))
        self._drawn, self._buffer = int(state["drawn"]), buffer.reshape(-1, self.length)


def _encode(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode("ascii")


def _decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").astype(np.int32)


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    boundaries: Boundaries = "separate",
    name: str = "The documents",
) -> TokenBlocks:
    """Tokenise `documents`, which errors call `name`, and pack them into rows of `length` tokens; see `RowPacker`.

    Raises DataError if the documents have too few tokens for one row, or one must stay whole and does not fit.
    """
    packer = RowPacker(lambda: documents, tokenizer, length, boundaries)
    rows = list(packer)
    check_rows(packer.n_tokens, length, boundaries, name)
    return TokenBlocks(np.stack(rows), boundaries=boundaries, pad_id=packer.pad_id)


def check_rows(n_tokens: int, length: int, boundaries: Boundaries, name: str) -> None:
    """Raise `DataError` if what errors call `name` has too few tokens for one row."""
    if n_tokens < (1 if boundaries == "whole" else length):
        raise DataError(f"{name}: {n_tokens} tokens in all, but one row takes {length}: add text, or lower the length.")


# Rows to batches


@dataclass(frozen=True)
class Batch:
    """B rows of L tokens; labels are aligned with the inputs, and the model shifts them.

    Attributes:
        input_ids: long, (B, L).
        labels: long, (B, L); -100 at tokens that are not predicted: the row's first, padding, prompts and, unless
            documents are joined, the first of each document.
        attention_mask: long, (B, L), 0 at padding; None when there is no padding.
        position_ids: long, (B, L), from 0 at each document and at the padding; None unless a row holds several
            separate documents.
        domain: long, (B,): 0 = old, 1 = new.
        prompt: bool, (B, L), True at tokens of a prompt; None when the batch has none.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    domain: Tensor
    prompt: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, rows: slice) -> Batch:
        """Some of the rows, such as a micro-batch."""
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> Batch:
        """The same rows on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the forward pass of a `GraftedModel`.

        transformers keeps the documents of a row apart where positions restart, but only without an attention mask and
        a cache. The mask is therefore left out when there are positions. Padding is then one more document that no
        other sees, and `token_mask` marks it.
        """
        names = ("input_ids", "labels", "domain", "prompt", "position_ids", "attention_mask")
        inputs = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.position_ids is not None and self.attention_mask is not None:
            inputs["token_mask"] = inputs.pop("attention_mask").bool()
        return {**inputs, "use_cache": False}

    def totals(self, n_domains: int = 2) -> Tensor:
        """Float, (1 + n_domains,): number of predicted tokens, then of input tokens of each domain without padding."""
        targets = (self.labels[:, 1:] != IGNORED).sum()
        mask = torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask
        counts = torch.zeros(n_domains, dtype=torch.long, device=mask.device)
        counts.index_add_(0, self.domain, mask.sum(dim=1))
        return torch.cat([targets[None], counts]).float()

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


def collate(marked: np.ndarray, domain: np.ndarray, *, boundaries: Boundaries, pad_id: int) -> Batch:
    """The batch of marked rows (B, L) with their domains (B,)."""
    padding = marked == PADDING
    starts, prompt, unscored = is_start(marked), is_prompt(marked), _has_bit(marked, PROMPT | UNSCORED)
    input_ids = unmark(marked, pad_id).astype(np.int64)
    separate = boundaries != "joined"
    ignored = padding | unscored | starts if separate else padding | unscored
    ignored[:, 0] = True
    several = separate and bool(starts[:, 1:].any())
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(np.where(ignored, IGNORED, input_ids)),
        attention_mask=torch.from_numpy((~padding).astype(np.int64)) if padding.any() else None,
        position_ids=torch.from_numpy(_positions(starts, padding)) if several else None,
        domain=torch.from_numpy(domain.astype(np.int64)),
        prompt=torch.from_numpy(prompt) if prompt.any() else None,
    )


def _positions(starts: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Positions (B, L) that count from 0 at every start, and at the first padding token."""
    first_padding = padding & ~np.roll(padding, 1, axis=1)
    columns = np.arange(starts.shape[1])
    last_start = np.maximum.accumulate(np.where(starts | first_padding, columns, 0), axis=1)
    return columns - last_start


def check_boundaries(model: Any, boundaries: Boundaries) -> None:
    """Raise `RecipeError` if documents must stay separate and the model takes no position ids to separate them."""
    if boundaries != "joined" and "position_ids" not in inspect.signature(model.forward).parameters:
        raise RecipeError(
            f"A model of the type {model.config.model_type} takes no position ids, so it can't keep the documents of a "
            "row apart: set data.boundaries to joined."
        )


class Batches(Protocol):
    """What a training loop draws batches from."""

    batch_size: int

    def batch(self, step: int) -> Any:
        """The rows of one optimiser step, counted from 0."""

    def fingerprint(self) -> str:
        """A hash over everything that decides the batches."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, as plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


Blocks = TokenBlocks | StreamingBlocks


class Mixture:
    """Endless batches that mix domains by fixed shares; equal for equal seed and step.

    Over n rows a domain of share p gives floor(np) rows: shares are exact in the long run, and a batch is off by less
    than one row. Finite domains are a function of (seed, step); streams must be drawn step by step.

    Args:
        shares: the share of each domain, summing to 1.
        batch_size: rows of one optimiser step, over all processes and micro-batches.

    Raises DataError if a domain with a share has no data, or the domains' rows differ in form.
    """

    def __init__(
        self, domains: Mapping[int, Blocks], shares: Mapping[int, float], batch_size: int, seed: int = 0
    ) -> None:
        self.shares = _exact_shares(shares)
        for domain, share in self.shares.items():
            if domain not in domains:
                raise DataError(
                    f"The {DOMAIN_NAMES.get(domain, domain)} domain has share {float(share):g} but no data: name "
                    "sources, or set the share to 0."
                )
        self.domains = {domain: domains[domain] for domain in self.shares}
        self.batch_size, self.seed = batch_size, seed
        forms: set[tuple[int, Boundaries, int]] = {(b.length, b.boundaries, b.pad_id) for b in self.domains.values()}
        if len(forms) != 1:
            why = f"The domains' rows differ in length, boundaries or padding id ({sorted(forms)}): pack them alike."
            raise DataError(why)
        self.boundaries: Boundaries
        self.length, self.boundaries, self.pad_id = forms.pop()

    def counts(self, rows: int) -> dict[int, int]:
        """Number of rows of each domain among the first `rows` rows."""
        counts, rows_left, share_left = {}, rows, Fraction(1)
        for domain, share in self.shares.items():
            counts[domain] = int(rows_left * share / share_left)
            rows_left, share_left = rows_left - counts[domain], share_left - share
        return counts

    def batch(self, step: int) -> Batch:
        """The rows of one optimiser step, counted from 0, in random order."""
        before, after = self.counts(step * self.batch_size), self.counts((step + 1) * self.batch_size)
        taken = {
            domain: blocks.take(before[domain], after[domain] - before[domain], (self.seed, domain))
            for domain, blocks in self.domains.items()
        }
        marked = np.concatenate(list(taken.values()))
        domain_ids = np.concatenate([np.full(len(rows), domain) for domain, rows in taken.items()])
        # The last number keeps this random stream apart from that of (seed, domain, epoch).
        order = np.random.Generator(np.random.Philox([self.seed, step, 0, 1])).permutation(len(marked))
        return collate(marked[order], domain_ids[order], boundaries=self.boundaries, pad_id=self.pad_id)

    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the batches; of a stream, whose text is not in memory, only its form."""
        digest = hashlib.sha256(repr((self.shares, self.batch_size, self.seed, self.length, self.boundaries)).encode())
        for domain, blocks in sorted(self.domains.items()):
            digest.update(str(domain).encode())
            if isinstance(blocks, TokenBlocks):
                digest.update(blocks.marked.tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The streams' states by domain, as plain JSON values; empty when all domains are finite."""
        return {str(domain): blocks.state_dict() for domain, blocks in self._streams().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a mixture of the same data; `DataError` if the state has other domains."""
        streams = self._streams()
        if set(state) != {str(domain) for domain in streams}:
            raise DataError(
                f"The saved data state has streams for domains {sorted(state)}, but this mixture streams "
                f"{sorted(map(str, streams))}: resume with the data settings of the run that saved it."
            )
        for domain, blocks in streams.items():
            blocks.load_state_dict(state[str(domain)])

    def _streams(self) -> dict[int, StreamingBlocks]:
        return {domain: blocks for domain, blocks in self.domains.items() if isinstance(blocks, StreamingBlocks)}


def _exact_shares(shares: Mapping[int, float]) -> dict[int, Fraction]:
    """Shares above 0 as fractions that sum to 1, by domain."""
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        raise DataError(f"The domains' shares are {dict(shares)}, but shares from 0 to 1 that sum to 1 are expected.")
    exact = {domain: Fraction(share).limit_denominator(10**6) for domain, share in sorted(shares.items()) if share > 0}
    *others, last = exact
    return {**exact, last: Fraction(1) - sum(exact[domain] for domain in others)}


def build_mixture(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, batch_size: int, own_text: Sequence[np.ndarray] = ()
) -> Mixture:
    """The mixture of a recipe's new and old texts, `batch_size` rows per optimiser step.

    `own_text` holds the marked ids of the texts that the backbone sampled, which are old as well.

    Raises DataError if a source can't be read, there are no new sources, or no old ones though their share is above 0.
    """
    check_domains(config)
    shares = {OLD: config.replay_fraction, NEW: 1 - config.replay_fraction}
    named = [source for source in config.old if isinstance(source, SourceConfig)]
    domains = {}
    if shares[OLD] > 0:
        domains[OLD] = build_blocks(named, config, tokenizer, own_text)
    if shares[NEW] > 0:
        domains[NEW] = build_blocks(config.new, config, tokenizer)
    return Mixture(domains, shares, batch_size, config.seed)


def build_blocks(
    sources: Sequence[SourceConfig],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    own_text: Sequence[np.ndarray] = (),
) -> Blocks:
    """The rows of one domain, of sources and of the backbone's own text: streamed if any source is, else in memory.

    Raises DataError if a source can't be read, has too little text, or is streamed beside the backbone's own text.
    """

    def documents() -> Iterator[Document]:
        return (document for source in sources for document in read_documents(source))

    if any(source.streaming for source in sources):
        if own_text:
            raise DataError("A streaming source can't stand beside the backbone's own text: set streaming to false.")
        return StreamingBlocks(RowPacker(documents, tokenizer, config.length, config.boundaries, repeat=True))
    names = ", ".join(source.name for source in sources)
    blocks = [pack(documents(), tokenizer, config.length, boundaries=config.boundaries, name=names)] if sources else []
    if own_text:
        stream = np.concatenate(own_text)
        check_rows(len(stream), config.length, config.boundaries, "The backbone's own text")
        rows = split_rows(stream, config.length, config.boundaries)
        blocks.append(TokenBlocks(rows, config.boundaries, padding_id(tokenizer)))
    return replace(blocks[0], marked=np.concatenate([part.marked for part in blocks]))
