"""The mixture of old and new rows that training draws its batches from."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

import numpy as np

from graftlm.backbone import padding_id
from graftlm.data.blocks import TokenBlocks, pack
from graftlm.data.boundaries import Boundaries, check_rows, split_rows
from graftlm.data.config import DataConfig, check_domains
from graftlm.data.interleaving import InterleavedBlocks, InterleavedStreams, limited_weights
from graftlm.data.rows import DOMAIN_NAMES, NEW, NO_SET, OLD, Batch, collate
from graftlm.data.source_config import OldSource, SelfSourceConfig, SourceConfig
from graftlm.data.sources import Document, read_documents
from graftlm.data.streams import RowPacker, StreamingBlocks
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OWN_TEXT = "The backbone's own text"


class SourceRead(TypedDict):
    """How much of a source was read, as plain JSON values.

    Attributes:
        domain: old or new.
        source: title of the source.
        tokens: number of its tokens; of a stream that has not come to its end, those of the rows that were drawn.
        passes: number of times that they were drawn; missing for a stream that has not come to its end.
        share: its share of the tokens of the domain in the rows that were drawn; missing before the first row.
    """

    domain: str
    source: str
    tokens: int
    passes: NotRequired[float]
    share: NotRequired[float]


def passes_text(passes: float) -> str:
    """Return a number of passes in three digits, or all digits before the decimal point if there are more."""
    return f"{passes:,.0f} times" if passes >= 100 else f"{passes:.3g} times"


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


MemoryBlocks = TokenBlocks | InterleavedBlocks
Streams = StreamingBlocks | InterleavedStreams
Blocks = MemoryBlocks | Streams


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
        sets: for each source of the new domain the number of its named set, which batches then have as `text_set`;
            empty for batches without it.

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
        sets: Sequence[int] = (),
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
        self.sets = np.array(sets, dtype=np.int64)
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
            texts = blocks.text_read(rows[domain])
            drawn = sum(text.drawn for text in texts)
            for text in texts:
                of_source: SourceRead = {
                    "domain": DOMAIN_NAMES[domain],
                    "source": text.source,
                    "tokens": text.tokens,
                }
                if text.passes is not None:
                    of_source["passes"] = text.passes
                if drawn:
                    of_source["share"] = text.drawn / drawn
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
        sets = []
        for domain, blocks in self.domains.items():
            count = after[domain] - before[domain]
            drawn, sources = blocks.draw(before[domain], count, (self.seed, domain))
            rows.append(drawn)
            domain_ids.append(np.full(count, domain))
            has_sets = domain == NEW and len(self.sets)
            sets.append(self.sets[sources] if has_sets else np.full(count, NO_SET))
        # The last number separates these random numbers from those of (seed, domain, epoch).
        generator = np.random.Generator(np.random.Philox([self.seed, step, 0, 1]))
        order = generator.permutation(self.batch_size)
        return collate(
            np.concatenate(rows)[order],
            np.concatenate(domain_ids)[order],
            boundaries=self.boundaries,
            pad_id=self.pad_id,
            text_set=np.concatenate(sets)[order] if len(self.sets) else None,
        )

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of everything that determines the batches.

        The text of a stream is not in memory, so it is not part of the digest.
        """
        settings = (self.shares, self.batch_size, self.seed, self.length, self.boundaries)
        digest = hashlib.sha256(repr(settings).encode())
        if len(self.sets):
            digest.update(f"sets {self.sets.tolist()}".encode())
        for domain, blocks in sorted(self.domains.items()):
            digest.update(str(domain).encode())
            if not isinstance(blocks, StreamingBlocks):
                blocks.add_to_digest(digest)
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

    def _streams(self) -> dict[int, Streams]:
        return {domain: blocks for domain, blocks in self.domains.items() if isinstance(blocks, Streams)}


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
    own_text: Sequence[Sequence[np.ndarray]] = (),
    *,
    by_set: bool = False,
) -> Mixture:
    """Build the mixture of a recipe's new and old texts.

    Args:
        config: the data section of the recipe.
        tokenizer: the backbone's tokenizer.
        batch_size: rows of an optimizer step.
        own_text: for each `self: true` source of `config.old` the marked ids (n,) of each text that the backbone
            sampled; required if `replay_fraction` is above 0.
        by_set: whether no row has text of two named sets of new text, and batches have `text_set`.

    Raises:
        DataError: there are no new sources, or no old text although `replay_fraction` is above 0; or the rows of a
            domain can't be built (see `build_blocks`).
    """
    check_domains(config)
    shares = {OLD: config.replay_fraction, NEW: 1 - config.replay_fraction}
    domains = {}
    if shares[OLD] > 0:
        domains[OLD] = build_blocks(config.old, config, tokenizer, own_text)
    if shares[NEW] > 0:
        domains[NEW] = build_blocks(config.new, config, tokenizer, apart=by_set)
    sets: list[int] = []
    if by_set:
        names = config.sets.new
        sets = [names.index(source.set) for source in config.new if source.set is not None]
    return Mixture(domains, shares, batch_size, config.seed, sets)


def build_blocks(
    sources: Sequence[OldSource],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    own_text: Sequence[Sequence[np.ndarray]] = (),
    *,
    apart: bool = False,
) -> Blocks:
    """Build the rows of one domain, in memory or, if any source is streaming, read while they are drawn.

    Rows in memory are those of all sources together, unless a source has a weight or there is a temperature. Otherwise
    several sources are packed each by itself and interleaved; a source without a weight then has the weight 1. Sources
    that are only kept apart have the shares that they have together.

    Args:
        sources: the sources of the domain's texts.
        config: the data section of a recipe; its `length`, `boundaries` and `weights` are used.
        tokenizer: the backbone's tokenizer.
        own_text: for each `self: true` source the marked ids (n,) of each text that the backbone sampled.
        apart: whether each row has text of one source only.

    Raises:
        DataError: there are no sources, or no sampled texts of a `self: true` source; or, of rows in memory, a source
            can't be read (see `read_documents`), its texts can't be packed (see `pack`), or the sampled texts have too
            few tokens for a row.
    """
    if not sources:
        raise DataError("A domain has no sources: name at least one.")
    own_sources = [source for source in sources if isinstance(source, SelfSourceConfig)]
    if len(own_sources) != len(own_text):
        raise DataError(
            f"There are {len(own_sources)} sources that the backbone samples, but texts of {len(own_text)}: pass those "
            "of each as own_text."
        )
    is_streaming = any(_is_streaming(source) for source in sources)
    is_weighted = config.weights is not None or any(source.weight is not None for source in sources)
    if len(sources) == 1 or not (is_streaming or is_weighted or apart):
        return _blocks_together(sources, config, tokenizer, own_text)
    texts = iter(own_text)
    parts = []
    for source in sources:
        of_source = [next(texts)] if isinstance(source, SelfSourceConfig) else []
        parts.append(_blocks_together([source], config, tokenizer, of_source))
    in_memory = [part for part in parts if isinstance(part, TokenBlocks)]
    weights = [_weight(source) for source in sources]
    if len(in_memory) < len(parts):
        return InterleavedStreams(parts, weights)
    if config.weights is not None:
        weights = _weights_of_sizes(sources, in_memory, config.weights.temperature)
    elif not is_weighted:
        weights = [Fraction(part.n_tokens()) for part in in_memory]
    return InterleavedBlocks(in_memory, weights)


def _is_streaming(source: OldSource) -> bool:
    return isinstance(source, SourceConfig) and source.streaming


def check_weights(config: DataConfig) -> None:
    """Check that the weights of sources in memory are not too unequal, as far as that is known without their text.

    Rows are taken to be full, and sources by whose sizes a temperature weights are not checked.

    Raises:
        DataError: a source has too small a share.
    """
    for sources in (config.new, config.old if config.replay_fraction else []):
        if not any(_is_streaming(source) for source in sources):
            names = [source.title if isinstance(source, SourceConfig) else _OWN_TEXT for source in sources]
            limited_weights([_weight(source) for source in sources], names)


def _weight(source: OldSource) -> Fraction:
    """Return the weight of a source as it was written, such as 1/10 for 0.1; 1 without one."""
    return Fraction(1) if source.weight is None else Fraction(repr(source.weight))


def _weights_of_sizes(
    sources: Sequence[OldSource],
    parts: Sequence[TokenBlocks],
    temperature: float,
) -> list[Fraction]:
    """Return the weight of each source, n_i N^T / N, so that a set of N tokens has the weight N^T.

    Args:
        sources: the sources; one without a named set is a set by itself.
        parts: the rows of each source, of n_i tokens.
        temperature: T, above 0.
    """
    names = [source.set or number for number, source in enumerate(sources)]
    sizes = [part.n_tokens() for part in parts]
    of_sets: Counter[str | int] = Counter()
    for name, size in zip(names, sizes, strict=True):
        of_sets[name] += size
    return [
        Fraction(of_sets[name] ** temperature) * Fraction(size, of_sets[name])
        for name, size in zip(names, sizes, strict=True)
    ]


def _blocks_together(
    sources: Sequence[OldSource],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    own_text: Sequence[Sequence[np.ndarray]],
) -> TokenBlocks | StreamingBlocks:
    """Return the rows of one streaming source, or of sources in memory whose rows are shuffled together."""
    named = [source for source in sources if isinstance(source, SourceConfig)]

    def documents() -> Iterator[Document]:
        for source in named:
            yield from read_documents(source)

    if len(sources) == 1 and _is_streaming(sources[0]):
        return StreamingBlocks(RowPacker(documents, tokenizer, config.length, config.boundaries, repeat=True))
    parts = []
    if named:
        names = ", ".join(source.name for source in named)
        parts.append(pack(documents(), tokenizer, config.length, boundaries=config.boundaries, name=names))
    sampled = [text for texts in own_text for text in texts]
    if not (named or sampled):
        raise DataError("The backbone's own text is empty: raise the tokens of its source, or name real text.")
    if sampled:
        parts.append(_pack_own_text(sampled, config, tokenizer))
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
    check_rows(len(marked), config.length, config.boundaries, _OWN_TEXT)
    rows = split_rows(marked, config.length, config.boundaries)
    return TokenBlocks(
        rows,
        boundaries=config.boundaries,
        pad_id=padding_id(tokenizer),
        tokens_by_source={_OWN_TEXT: len(marked)},
    )
