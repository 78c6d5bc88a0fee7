"""One model that reads all corpora, and what it makes of texts that it has not read, at several lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from experiments.block_state.corpora import CORPORA, make_tokenizer
from experiments.jobs import Job
from graftlm.data import NEW, Mixture, SourceConfig, TokenBlocks, build_documents, pack
from graftlm.data.sources import read_documents
from graftlm.evaluation import MemoryWatch
from graftlm.runs.graft_run import count_parameters
from graftlm.runs.language_run import LengthsConfig, bits_per_byte, metrics_by_length
from graftlm.training import TrainingConfig, train
from graftlm.training.checkpoint import read_history
from graftlm.training.language_model import LanguageModel, new_model


class Cell(Job):
    """One row for one seed.

    Args:
        model: its config, with `model_type`.
        corpora: folder of the texts.
        pieces: of the tokenizer.
        length: tokens of a row of training.
        lengths: that are measured.
    """

    model: dict[str, Any]
    corpora: str
    pieces: int
    length: int
    lengths: tuple[int, ...]
    rate: float = Field(gt=0)
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    seed: int = 0

    @property
    def tokens(self) -> int:
        """That are read in training."""
        return self.steps * self.batch_size * self.length


def measure(cell: Cell, folder: Path) -> Mapping[str, Any]:
    """Train a model and measure it: metrics, and the losses of its training.

    Tokens per second are over the process's own time, which stands still while other work has the core.
    """
    corpora = Path(cell.corpora)
    tokenizer = make_tokenizer(corpora, cell.pieces)
    model = new_model(cell.model, tokenizer, cell.seed)
    training = TrainingConfig(
        steps=cell.steps,
        batch_size=cell.batch_size,
        learning_rate=cell.rate,
        warmup_steps=max(1, cell.steps // 20),
        weight_decay=0.1,
        seed=cell.seed,
        checkpoint_every=max(1, cell.steps // 4),
        keep_checkpoints=1,
    )
    mixture = Mixture({NEW: _rows(cell.corpora, cell.pieces, cell.length)}, {NEW: 1.0}, cell.batch_size, cell.seed)
    started = time.process_time()
    with MemoryWatch() as memory:
        done = train(LanguageModel(model), mixture, training, folder, identity={"cell": cell.key()}, progress=False)
    seconds = time.process_time() - started
    tests = {name: build_documents([SourceConfig(path=str(corpora / f"{name}-test.jsonl"))]) for name in CORPORA}
    settings = LengthsConfig(limit_tokens=max(cell.lengths) - 1, tokens_per_pass=max(4096, cell.length))
    found = bits_per_byte(model, tokenizer, tests, cell.lengths, settings)
    metrics = {name: one.model_dump() for name, one in metrics_by_length(found, cell.length).items()}  # type: ignore[union-attr]  # all are intervals
    cost = {
        "train_tokens_per_s": done.tokens / seconds,
        "parameters": count_parameters(model.parameters()),
        "peak_memory_bytes": memory.peak,
    }
    losses = [[line["step"], line["loss"]] for line in read_history(done.history)]
    return {"metrics": metrics | cost, "losses": losses}


@lru_cache(maxsize=1)
def _rows(corpora: str, pieces: int, length: int) -> TokenBlocks:
    """All training texts, kept for the next cells of this process."""
    sources = [SourceConfig(path=str(Path(corpora) / f"{name}-train.jsonl")) for name in CORPORA]
    documents = (document for source in sources for document in read_documents(source))
    return pack(documents, make_tokenizer(Path(corpora), pieces), length, boundaries="joined")
