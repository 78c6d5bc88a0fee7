"""Summaries of long documents (see README.md in this folder)."""

from experiments.summarize.run import run

__all__ = ["run"]
