"""Selectors of sentences: a hierarchical encoder with a classifier or a pointer."""

from graftlm.models.sentence_selector.config import SentenceSelectorConfig
from graftlm.models.sentence_selector.model import Choice, SentenceSelector

__all__ = ["Choice", "SentenceSelector", "SentenceSelectorConfig"]
