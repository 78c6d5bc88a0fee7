"""Key-value arithmetic: one model knows keys, one computes, both compose (see README.md in this folder)."""

from experiments.kv_arithmetic.run import run

__all__ = ["run"]
