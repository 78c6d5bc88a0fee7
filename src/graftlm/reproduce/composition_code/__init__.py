"""An English anchor and a Python specialist: docstrings from functions, and functions from docstrings."""

from graftlm.reproduce.composition_code.run import run

__all__ = ["run"]
