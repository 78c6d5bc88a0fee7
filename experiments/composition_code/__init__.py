"""An English anchor and a Python specialist: docstrings from functions, and functions from docstrings."""
