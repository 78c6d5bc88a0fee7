"""Summaries of long documents (see README.md in this folder)."""

from graftlm.reproduce.summarize.run import run

__all__ = ["run"]
