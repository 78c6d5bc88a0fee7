"""Block-state transformers beside their baselines on long documents (see README.md in this folder)."""

from experiments.block_state.run import run

__all__ = ["run"]
