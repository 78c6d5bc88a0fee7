"""Batches that mix domains by fixed shares, the same for the same seed and step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from graftlm.data.batch import Batch, assemble
from graftlm.data.packing import Boundaries, TokenBlocks
from graftlm.data.streaming import StreamingBlocks
from graftlm.errors import DataError

OLD, NEW = 0, 1
DOMAIN_NAMES = {OLD: "old", NEW: "new"}
Blocks = TokenBlocks | StreamingBlocks


class Batches(Protocol):
    """What training draws its batches from, step by step."""

    batch_size: int

    def batch(self, step: int) -> Any:
        """The rows of one optimiser step, counted from 0."""

    def fingerprint(self) -> str:
        """A hash of all that sets the batches apart."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Mixture:
    """Endless batches of `batch_size` rows (all ranks and micro-batches of one optimiser step together).

    Over n rows a domain of share p gives floor(np) of them, so shares are exact in the long run and a batch is off by
    less than one row. Finite domains are a function of (seed, step); streams must be asked step by step.

    Raises:
        DataError: a domain with a share has no data, or the domains' rows differ in form.
    """

    def __init__(
        self, domains: Mapping[int, Blocks], shares: Mapping[int, float], batch_size: int, seed: int = 0
    ) -> None:
        self.shares = _exact(shares)
        self.domains = {domain: _blocks_of(domain, domains, share) for domain, share in self.shares.items()}
        self.batch_size = batch_size
        self.seed = seed
        forms = {(blocks.length, blocks.boundaries, blocks.pad_id) for blocks in self.domains.values()}
        if len(forms) != 1:
            raise DataError(
                f"The domains' rows differ in length, boundaries or padding id ({sorted(forms)}): pack them alike."
            )
        one = next(iter(self.domains.values()))
        self.length, self.pad_id = one.length, one.pad_id
        self.boundaries: Boundaries = one.boundaries

    def counts(self, rows: int) -> dict[int, int]:
        """How many of the first `rows` rows belong to each domain."""
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
        marks = np.concatenate([np.full(len(rows), domain) for domain, rows in taken.items()])
        # The last word keeps this order's randomness apart from that of (seed, domain, epoch).
        order = np.random.Generator(np.random.Philox([self.seed, step, 0, 1])).permutation(len(marked))
        return assemble(marked[order], marks[order], boundaries=self.boundaries, pad_id=self.pad_id)

    def fingerprint(self) -> str:
        """SHA-256 over all that sets the batches apart; of streams, whose text is not at hand, only their form."""
        digest = hashlib.sha256(repr((self.shares, self.batch_size, self.seed, self.length, self.boundaries)).encode())
        for domain, blocks in sorted(self.domains.items()):
            digest.update(str(domain).encode())
            if isinstance(blocks, TokenBlocks):
                digest.update(blocks.marked.tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Where the streams stand, as plain JSON values; empty when all domains are finite."""
        return {str(domain): blocks.state_dict() for domain, blocks in self._streams().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of a mixture of the same data.

        Raises:
            DataError: the state is of other domains.
        """
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


def _exact(shares: Mapping[int, float]) -> dict[int, Fraction]:
    """Shares above 0 as fractions that sum to 1, by domain."""
    if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
        raise DataError(f"The domains' shares are {dict(shares)}, but shares from 0 to 1 that sum to 1 are expected.")
    exact = {domain: Fraction(share).limit_denominator(10**6) for domain, share in sorted(shares.items()) if share > 0}
    *others, last = exact
    return {**exact, last: Fraction(1) - sum(exact[domain] for domain in others)}


def _blocks_of(domain: int, domains: Mapping[int, Blocks], share: Fraction) -> Blocks:
    if domain not in domains:
        name = DOMAIN_NAMES.get(domain, str(domain))
        raise DataError(
            f"The {name} domain has share {float(share):g} but no data: name sources, or set the share to 0."
        )
    return domains[domain]
