"""Tasks that need a long memory (see README.md in this folder)."""

from experiments.long_memory.run import run

__all__ = ["run"]
