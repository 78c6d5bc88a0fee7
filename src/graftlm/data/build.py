"""From the data section of a recipe to a mixture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field
from transformers import PreTrainedTokenizerBase

from graftlm.config import Config
from graftlm.data.documents import Document
from graftlm.data.mixture import NEW, OLD, Blocks, Mixture
from graftlm.data.packing import Progress, pack
from graftlm.data.sources import SourceConfig, read_some
from graftlm.data.streaming import StreamingBlocks
from graftlm.errors import DataError


class DataConfig(Config):
    """The texts of a run: what the model shall learn, and some of what it knows."""

    new: list[SourceConfig] = Field([], description="What the model shall learn.")
    old: list[SourceConfig] = Field([], description="Text like the backbone's own training data.")
    replay_fraction: float = Field(
        0.1, ge=0, le=1, description="Share p of rows that are old; 0 ignores the old sources."
    )
    length: int = Field(256, ge=2, description="Tokens per row.")
    boundaries: Literal["separate", "joined", "whole"] = Field(
        "separate",
        description="Whether documents of a row are kept apart, make one stream, or are kept apart and begin the next "
        "row where they don't fit into one; plain text that is longer than a row is cut all the same.",
    )
    validation: dict[str, list[SourceConfig]] = Field({}, description="Held-out texts by name ('old', 'new', others).")
    test: dict[str, list[SourceConfig]] = Field({}, description="Test texts by name ('old', 'new', others).")
    seed: int = Field(0, ge=0, description="Orders the rows.")


def build_mixture(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    *,
    progress: Progress | None = None,
) -> Mixture:
    """The mixture of a recipe's new and old texts, `batch_size` rows per optimiser step.

    Args:
        progress: called after every tokenised chunk with the number of characters done since the last call.

    Raises:
        DataError: a source can't be read, or there are no new sources, or no old ones though their share is above 0.
    """
    if not config.new:
        raise DataError("The recipe has no new sources, and there is nothing to learn from: name some under new.")
    if config.replay_fraction > 0 and not config.old:
        raise DataError(
            f"replay_fraction is {config.replay_fraction:g}, but the recipe has no old sources: name some under old, "
            "or set replay_fraction to 0."
        )
    shares = {OLD: config.replay_fraction, NEW: 1 - config.replay_fraction}
    sources = {OLD: config.old, NEW: config.new}
    domains = {
        domain: build_blocks(sources[domain], config, tokenizer, progress=progress)
        for domain, share in shares.items()
        if share > 0
    }
    return Mixture(domains, shares, batch_size, config.seed)


def build_blocks(
    sources: Sequence[SourceConfig],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    progress: Progress | None = None,
) -> Blocks:
    """The rows of one domain: streamed if any of its sources is, else packed in memory.

    Raises:
        DataError: a source can't be read, or holds too little text.
    """

    def read() -> Iterator[Document]:
        return (document for source in sources for document in read_some(source))

    if any(source.streaming for source in sources):
        return StreamingBlocks(read, tokenizer, config.length, boundaries=config.boundaries)
    names = ", ".join(source.name for source in sources)
    return pack(read(), tokenizer, config.length, boundaries=config.boundaries, progress=progress, name=names)
