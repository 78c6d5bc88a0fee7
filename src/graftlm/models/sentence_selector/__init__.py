"""Sentence selectors: a hierarchical encoder with a classifier or a pointer head."""

from graftlm.models.sentence_selector.config import SentenceSelectorConfig
from graftlm.models.sentence_selector.model import SelectorOutput, SentenceSelector
