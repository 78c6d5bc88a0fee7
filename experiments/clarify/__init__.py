"""Interactive chains beside their baselines, for any endpoint and models (see README.md in this folder)."""

from experiments.clarify.run import run

__all__ = ["run"]
