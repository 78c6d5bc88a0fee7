"""Conditional tasks against single-task and multi-task fine-tuning and adapters (see README.md in this folder)."""

from experiments.conditional_tasks.run import run

__all__ = ["run"]
