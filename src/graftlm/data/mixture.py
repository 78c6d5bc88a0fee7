"""The mixture of old and new rows that training draws its batches from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graftlm.backbone import padding_id
from graftlm.data.sources import DataConfig, Document, SourceConfig, check_domains, read_documents
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
from graftlm.data.boundaries import Boundaries, check_rows, split_rows
from graftlm.data.marked_ids import unmark
from graftlm.data.rows import DOMAIN_NAMES, NEW, OLD, Batch, collate
from graftlm.data.streams import RowPacker, StreamingBlocks


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
