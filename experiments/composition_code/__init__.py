"""An English anchor and a Python specialist: docstrings from functions, and functions from docstrings."""

from experiments.composition_code.run import run

__all__ = ["run"]
