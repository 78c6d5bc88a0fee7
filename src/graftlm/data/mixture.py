"""The mixture of old and new rows that training draws its batches from."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

import numpy as np

from graftlm.backbone import padding_id
from graftlm.data.boundaries import Boundaries, check_rows, split_rows
from graftlm.data.marked_ids import unmark
from graftlm.data.rows import DOMAIN_NAMES, NEW, OLD, Batch, collate, is_predicted
from graftlm.data.sources import DataConfig, Document, SourceConfig, check_domains, read_documents
from graftlm.data.streams import RowPacker, StreamingBlocks
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_COUNTED_ROWS = 4096  # rows that are looked through together, which bounds the memory


@dataclass(eq=False)
class TokenBlocks:
    """Packed rows of one domain, in memory.

    Attributes:
        marked: marked ids, int32, (N, length); see `graftlm.data.marked_ids`.
        boundaries: how documents share rows; see `DataConfig`.
        pad_id: the token id of padding.
        ignored_keys: see `RowPacker`.
        tokens_by_source: number of tokens of each source.
    """

    marked: np.ndarray
    boundaries: Boundaries = "separate"
    pad_id: int = 0
    ignored_keys: Mapping[str, int] = field(default_factory=dict)
    tokens_by_source: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.marked)

    @property
    def length(self) -> int:
        """Number of tokens of a row."""
        return self.marked.shape[1]

    @property
    def input_ids(self) -> np.ndarray:
        """Plain token ids, int32, (N, length)."""
        return unmark(self.marked, self.pad_id)

    def without_target(self) -> int:
        """Return the number of rows that have no predicted token."""
        parts = range(0, len(self), _COUNTED_ROWS)
        rows = (self.marked[start : start + _COUNTED_ROWS] for start in parts)
        return sum(int((~is_predicted(part, self.boundaries)).all(axis=1).sum()) for part in rows)

    def take(self, first: int, count: int, key: tuple[int, int]) -> np.ndarray:
        """Return rows of an endless sequence in which each epoch is a new order of all rows.

        There must be at least one row.

        Args:
            first: position of the first returned row in the sequence, from 0.
            count: number of rows to return.
            key: the seed and the domain. The order depends only on these and on the epoch.

        Returns:
            Marked ids, int32, (count, length).
        """
        rows = []
        for position in range(first, first + count):
            epoch, place = divmod(position, len(self))
            rows.append(_epoch_order(len(self), *key, epoch)[place])
        return self.marked[np.array(rows, dtype=np.int64)]


@lru_cache(maxsize=4)
def _epoch_order(size: int, *key: int) -> np.ndarray:
    """Return the order of `size` rows in an epoch; the key is the seed, the domain and the epoch."""
    return np.random.Generator(np.random.Philox(key)).permutation(size)


def pack(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    boundaries: Boundaries = "separate",
    name: str = "The documents",
) -> TokenBlocks:
    """Tokenize documents and pack them into rows.

    A last row with too few tokens is padded.

    Args:
        documents: the documents, read once.
        tokenizer: the backbone's tokenizer.
        length: number of tokens of a row.
        boundaries: how documents share rows; see `DataConfig`.
        name: the name of the documents in error messages.

    Raises:
        DataError: the documents have too few tokens for a row, a conversation does not fit the tokenizer's chat
            template, or `boundaries` is `whole` and a conversation or a document with a prompt is longer than a row.
    """
    packer = RowPacker(lambda: documents, tokenizer, length, boundaries)
    rows = list(packer)
    check_rows(packer.tokens_by_source.total(), length, boundaries, name)
    return TokenBlocks(
        np.stack(rows),
        boundaries=boundaries,
        pad_id=packer.pad_id,
        ignored_keys=packer.ignored_keys,
        tokens_by_source=packer.tokens_by_source,
    )


class SourceRead(TypedDict):
    """How much of a source was read, as plain JSON values.

    Attributes:
        domain: old or new.
        source: title of the source.
        tokens: number of its tokens; of a stream, of those that were read so far.
        passes: number of times that they were read; missing for a stream.
    """

    domain: str
    source: str
    tokens: int
    passes: NotRequired[float]


class Batches(Protocol):
    """A source of batches for a training loop."""

    batch_size: int

    def batch(self, step: int) -> Any:
        """Return the rows of an optimizer step, counted from 0."""

    def fingerprint(self) -> str:
        """Return a digest of everything that determines the batches."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Return the position in the data as plain JSON values."""
        ...

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the present `state_dict()`, even after later batches have been drawn.

        Training takes a snapshot before each step, so this should be fast.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`."""


Blocks = TokenBlocks | StreamingBlocks


class Mixture:
    """An endless sequence of batches that mixes domains by fixed shares. It depends only on the seed and the data.

    Among the first n rows, the number of rows of a domain with share p differs from n p by less than one. With two
    domains, the same holds for each batch. Batches of rows in memory can be drawn in any order; those of streams must
    be drawn step by step.

    Args:
        domains: the rows of each domain. Domains with a share of 0 are not used.
        shares: the share of each domain, from 0 to 1; they sum to 1.
        batch_size: number of rows of an optimizer step, over all processes and micro-batches.
        seed: seed of the order of rows.

    Raises:
        DataError: a share is negative, the shares don't sum to 1, a domain with a share above 0 is not in `domains`, or
            the domains' rows differ in length, boundaries or padding id.
    """

    def __init__(
        self,
        domains: Mapping[int, Blocks],
        shares: Mapping[int, float],
        batch_size: int,
        seed: int = 0,
    ) -> None:
        self.shares = _exact_shares(shares)
        for domain, share in self.shares.items():
            if domain not in domains:
                raise DataError(
                    f"The {DOMAIN_NAMES.get(domain, domain)} domain has the share {float(share):g} but no data: name "
                    "sources, or set the share to 0."
                )
        self.domains = {domain: domains[domain] for domain in self.shares}
        self.batch_size = batch_size
        self.seed = seed
        first, *others = self.domains.values()
        for blocks in others:
            if _form(blocks) != _form(first):
                raise DataError(
                    f"One domain has rows of {_form(first)}, and another has rows of {_form(blocks)}, but all must be "
                    "alike: pack them with the same settings."
                )
        self.length = first.length
        self.boundaries: Boundaries = first.boundaries
        self.pad_id = first.pad_id

    def ignored_keys(self) -> dict[str, int]:
        """Return how often each key of messages and column beside them was not read so far; see `RowPacker`."""
        counts: Counter[str] = Counter()
        for blocks in self.domains.values():
            counts.update(blocks.ignored_keys)
        return dict(counts)

    def text_read(self, steps: int) -> list[SourceRead]:
        """Return how much of each source was read.

        Args:
            steps: number of steps whose batches were drawn.
        """
        rows = self.counts(steps * self.batch_size)
        read: list[SourceRead] = []
        for domain, blocks in self.domains.items():
            for source, tokens in blocks.tokens_by_source.items():
                of_source: SourceRead = {"domain": DOMAIN_NAMES[domain], "source": source, "tokens": tokens}
                if isinstance(blocks, TokenBlocks):
                    of_source["passes"] = rows[domain] / len(blocks)
                read.append(of_source)
        return read

    def counts(self, rows: int) -> dict[int, int]:
        """Return the number of rows of each domain among the first `rows` rows."""
        counts = {}
        rows_left = rows
        share_left = Fraction(1)
        for domain, share in self.shares.items():
            count = int(rows_left * share / share_left)
            counts[domain] = count
            rows_left -= count
            share_left -= share
        return counts

    def batch(self, step: int) -> Batch:
        """Return the rows of an optimizer step in random order.

        Args:
            step: the number of the step, from 0.

        Raises:
            DataError: a domain is a stream, and `step` is not the next one or the stream's source can't be read.
        """
        before = self.counts(step * self.batch_size)
        after = self.counts((step + 1) * self.batch_size)
        rows = []
        domain_ids = []
        for domain, blocks in self.domains.items():
            count = after[domain] - before[domain]
            rows.append(blocks.take(before[domain], count, (self.seed, domain)))
            domain_ids.append(np.full(count, domain))
        # The last number separates these random numbers from those of (seed, domain, epoch).
        generator = np.random.Generator(np.random.Philox([self.seed, step, 0, 1]))
        order = generator.permutation(self.batch_size)
        return collate(
            np.concatenate(rows)[order],
            np.concatenate(domain_ids)[order],
            boundaries=self.boundaries,
            pad_id=self.pad_id,
        )

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of everything that determines the batches.

        The text of a stream is not in memory, so it is not part of the digest.
        """
        settings = (self.shares, self.batch_size, self.seed, self.length, self.boundaries)
        digest = hashlib.sha256(repr(settings).encode())
        for domain, blocks in sorted(self.domains.items()):
            digest.update(str(domain).encode())
            if isinstance(blocks, TokenBlocks):
                digest.update(blocks.marked.tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, object]:
        """Return the states of streams by domain, as plain JSON values; empty if all rows are in memory."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, object]]:
        """Return a function that returns the present `state_dict()`, even after later batches have been drawn."""
        snapshots = {str(domain): blocks.snapshot() for domain, blocks in self._streams().items()}

        def state_dict() -> dict[str, object]:
            return {domain: snapshot() for domain, snapshot in snapshots.items()}

        return state_dict

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict()` of a mixture of the same data.

        Raises:
            DataError: the state has streams of other domains, or a stream's buffer has another size.
        """
        streams = {str(domain): blocks for domain, blocks in self._streams().items()}
        if state.keys() != streams.keys():
            raise DataError(
                f"The saved data state has streams for {_domains_text(state)}, but this mixture has streams for "
                f"{_domains_text(streams)}: resume with the data settings of the run that saved it."
            )
        for domain, blocks in streams.items():
            blocks.load_state_dict(state[domain])

    def _streams(self) -> dict[int, StreamingBlocks]:
        return {domain: blocks for domain, blocks in self.domains.items() if isinstance(blocks, StreamingBlocks)}


def _domains_text(keys: Iterable[str]) -> str:
    """Return the names of the domains of a state's keys, for an error message."""
    names = [DOMAIN_NAMES.get(int(key), key) for key in sorted(keys)]
    return f"the domains {', '.join(names)}" if names else "no domain"


def _form(blocks: Blocks) -> str:
    """Return a description of what must be equal in all domains."""
    return f"{blocks.length} tokens with {blocks.boundaries} boundaries and the padding id {blocks.pad_id}"


def _exact_shares(shares: Mapping[int, float]) -> dict[int, Fraction]:
    """Return the shares above 0 as fractions that sum to 1, sorted by domain."""
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        found = ", ".join(f"{DOMAIN_NAMES.get(domain, domain)} {share:g}" for domain, share in shares.items())
        raise DataError(
            f"The domains' shares are {found or 'missing'}, but shares from 0 to 1 that sum to 1 are expected: change "
            "the shares."
        )
    exact = {}
    for domain, share in sorted(shares.items()):
        if share > 0:
            exact[domain] = Fraction(share).limit_denominator(10**6)
    *others, last = exact
    exact[last] = Fraction(1) - sum(exact[domain] for domain in others)
    return exact


def build_mixture(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    own_text: Sequence[np.ndarray] = (),
) -> Mixture:
    """Build the mixture of a recipe's new and old texts.

    Args:
        config: the data section of the recipe.
        tokenizer: the backbone's tokenizer.
        batch_size: rows of an optimizer step.
        own_text: marked ids (n,) of each text that the backbone sampled; these are old as well. They are required if
            `config.old` has only `self: true` sources and `replay_fraction` is above 0.

    Raises:
        DataError: there are no new sources, or no old text although `replay_fraction` is above 0; or the rows of a
            domain can't be built (see `build_blocks`).
    """
    check_domains(config)
    shares = {OLD: config.replay_fraction, NEW: 1 - config.replay_fraction}
    domains = {}
    if shares[OLD] > 0:
        named = [source for source in config.old if isinstance(source, SourceConfig)]
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
    """Build the rows of one domain: a stream of rows if any source is streaming, and otherwise rows in memory.

    Args:
        sources: the sources of the domain's texts.
        config: the data section of a recipe; only its `length` and `boundaries` are used.
        tokenizer: the backbone's tokenizer.
        own_text: marked ids (n,) of each text that the backbone sampled, which follow the sources' texts.

    Raises:
        DataError: there are neither sources nor sampled texts, or a source is streaming although there are sampled
            texts; or, of rows in memory, a source can't be read (see `read_documents`), its texts can't be packed (see
            `pack`), or the sampled texts have too few tokens for a row.
    """

    def documents() -> Iterator[Document]:
        for source in sources:
            yield from read_documents(source)

    if not sources and not own_text:
        raise DataError("A domain has neither sources nor sampled texts: name a source, or pass texts as own_text.")
    if any(source.streaming for source in sources):
        if own_text:
            names = ", ".join(source.name for source in sources if source.streaming)
            raise DataError(
                f"The backbone's own text can't be combined with streaming sources ({names}): set their streaming to "
                "false."
            )
        packer = RowPacker(documents, tokenizer, config.length, config.boundaries, repeat=True)
        return StreamingBlocks(packer)
    parts = []
    if sources:
        names = ", ".join(source.name for source in sources)
        parts.append(pack(documents(), tokenizer, config.length, boundaries=config.boundaries, name=names))
    if own_text:
        parts.append(_pack_own_text(own_text, config, tokenizer))
    marked = np.concatenate([part.marked for part in parts])
    tokens = {source: count for part in parts for source, count in part.tokens_by_source.items()}
    return replace(parts[0], marked=marked, tokens_by_source=tokens)


def _pack_own_text(
    own_text: Sequence[np.ndarray],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenBlocks:
    """Pack the marked ids of sampled texts into rows."""
    marked = np.concatenate(own_text)
    name = "The backbone's own text"
    check_rows(len(marked), config.length, config.boundaries, name)
    rows = split_rows(marked, config.length, config.boundaries)
    return TokenBlocks(
        rows,
        boundaries=config.boundaries,
        pad_id=padding_id(tokenizer),
        tokens_by_source={name: len(marked)},
    )
