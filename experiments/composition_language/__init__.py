"""An English anchor and a French specialist: Tables 2 and 5, two specialists at once, and two tokenizers."""

from experiments.composition_language.run import run

__all__ = ["run"]
