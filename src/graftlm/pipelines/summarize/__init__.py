"""Summaries of long documents: select sentences, write the summary, and keep the source of each sentence."""

from importlib import import_module
from typing import TYPE_CHECKING

from graftlm.pipelines.summarize.batch import append_summaries, find_documents, pending_documents, summarize_many
from graftlm.pipelines.summarize.default_selector import DefaultSelector
from graftlm.pipelines.summarize.document import Section, SourceDocument
from graftlm.pipelines.summarize.oracle import oracle_extract, oracle_labels
from graftlm.pipelines.summarize.readers import read_document, read_foreign_pdf, read_text
from graftlm.pipelines.summarize.selection import Budget, Extract, LeadSelector, RankedSentence, Selector, select
from graftlm.pipelines.summarize.summary import Summary, format_summary, summarize

if TYPE_CHECKING:
    from graftlm.pipelines.summarize.prompt_layout import CHAT_LAYOUT, PromptLayout
    from graftlm.pipelines.summarize.selector_run import run_selector_training
    from graftlm.pipelines.summarize.selector_training import (
        SelectorExample,
        SelectorTrainingConfig,
        selector_example,
        train_selector,
    )
    from graftlm.pipelines.summarize.summarized import SummarizedDocument, hold_out, read_summarized
    from graftlm.pipelines.summarize.trained_selector import TrainedSelector, load_selector
    from graftlm.pipelines.summarize.variants import writer_examples
    from graftlm.pipelines.summarize.writer import LanguageModelWriter, SummaryDecoding, load_writer
    from graftlm.pipelines.summarize.writer_run import WriterTrainingConfig, run_writer_training
    from graftlm.pipelines.summarize.writer_training import WriterExample, train_writer

# These names need torch and transformers, which are slow to import and which an extract does without.
_LAZY_NAMES = {
    "SelectorExample": "selector_training",
    "SummarizedDocument": "summarized",
    "hold_out": "summarized",
    "read_summarized": "summarized",
    "SelectorTrainingConfig": "selector_training",
    "TrainedSelector": "trained_selector",
    "load_selector": "trained_selector",
    "run_selector_training": "selector_run",
    "run_writer_training": "writer_run",
    "selector_example": "selector_training",
    "train_selector": "selector_training",
    "CHAT_LAYOUT": "prompt_layout",
    "LanguageModelWriter": "writer",
    "PromptLayout": "prompt_layout",
    "SummaryDecoding": "writer",
    "load_writer": "writer",
    "WriterExample": "writer_training",
    "WriterTrainingConfig": "writer_run",
    "train_writer": "writer_training",
    "writer_examples": "variants",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_LAZY_NAMES[name]}")
    return getattr(module, name)
