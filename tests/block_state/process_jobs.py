"""Tiny models by published presets, for tests; as a script, it trains them in all the processes it is launched in."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from graftlm.data import NEW, Mixture, TokenBlocks
from graftlm.data.mixture import Batches
from graftlm.data.sequence_batches import SequenceBatches
from graftlm.data.sequences import Sequences, SequenceTask
from graftlm.training import TrainingConfig, train
from graftlm.training.classifier import SequenceClassifier, new_classifier
from graftlm.training.language_model import LanguageModel, new_model
from tiny import TOKENS, tiny_tokenizer

CLASSIFIER = "classifier"
SHARDED = "-sharded"
_ROWS = 20
_LENGTH = 18
_SMALL = {
    "model_type": "block-state",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 12,
    "intermediate_size": 32,
    "window": 4,
    "mixer_layers": [1],
    "state_size": 4,
    "filters": 3,
    "kernel_length": 32,
    "initializer_range": 0.25,
}


def steps_config(*, sharded: bool = False) -> TrainingConfig:
    return TrainingConfig(
        steps=4,
        batch_size=4,
        learning_rate=1e-2,
        weight_decay=0.1,
        checkpoint_every=2,
        sharded=sharded,
    )


def language_model(preset: str) -> tuple[nn.Module, Batches]:
    generator = np.random.default_rng(0)
    marked = generator.integers(4, TOKENS // 4, (_ROWS, _LENGTH)).astype(np.int32)
    batches = Mixture({NEW: TokenBlocks(marked, boundaries="joined")}, {NEW: 1.0}, 4)
    return LanguageModel(new_model(_SMALL | {"preset": preset}, tiny_tokenizer(), seed=0)), batches


def classifier() -> tuple[nn.Module, Batches]:
    """A bidirectional model of rows of different lengths, so that the processes have different padding."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(1, 10, size=6 + row % 7).astype(np.int32) for row in range(_ROWS)]
    rows = Sequences(ids, np.arange(_ROWS) % 3)
    task = SequenceTask(classes=("x", "y", "z"), vocab_size=10, train=rows, test=rows)
    model = new_classifier(_SMALL | {"preset": "bst-sh-s", "bidirectional": True}, task, seed=0)
    return SequenceClassifier(model), SequenceBatches(rows, 4)


def run_jobs(folder: Path, names: Sequence[str]) -> None:
    """Train the model of each job, and write its weights beside its history."""
    torch.set_num_threads(1)
    for name in names:
        preset = name.removesuffix(SHARDED)
        model, batches = classifier() if preset == CLASSIFIER else language_model(preset)
        train(model, batches, steps_config(sharded=name.endswith(SHARDED)), folder / name, progress=False)
        if int(os.environ.get("RANK", "0")) == 0:
            tensors = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
            save_file(tensors, folder / name / "final.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", type=json.loads, help="a list of presets, or the name of the classifier")
    arguments = parser.parse_args()
    run_jobs(arguments.folder, arguments.names)
    (arguments.folder / "processes.txt").write_text(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main()
