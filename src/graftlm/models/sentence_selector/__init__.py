"""Selectors of sentences: a hierarchical encoder with a classifier or a pointer."""

from graftlm.models.sentence_selector.config import SentenceSelectorConfig
from graftlm.models.sentence_selector.model import SelectorOutput, SentenceSelector

__all__ = ["SelectorOutput", "SentenceSelector", "SentenceSelectorConfig"]
