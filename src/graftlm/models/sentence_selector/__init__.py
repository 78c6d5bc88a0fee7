"""Sentence selectors: a hierarchical encoder with a classifier or a pointer head."""
# ruff: noqa: F401  # the names of this package

from graftlm.models.sentence_selector.config import SentenceSelectorConfig
from graftlm.models.sentence_selector.model import SelectorOutput, SentenceSelector
