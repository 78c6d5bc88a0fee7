"""Summaries of long documents: select sentences, write the summary, and keep the source of each sentence."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graftlm.pipelines.summarize.batch import append_summaries, find_documents, pending_documents, summarize_many
from graftlm.pipelines.summarize.document import Section, SourceDocument
from graftlm.pipelines.summarize.oracle import oracle_extract, oracle_labels
from graftlm.pipelines.summarize.ranking import DefaultSelector
from graftlm.pipelines.summarize.readers import read_document, read_foreign_pdf, read_text
from graftlm.pipelines.summarize.selection import Budget, Extract, LeadSelector, RankedSentence, Selector, select
from graftlm.pipelines.summarize.summary import Summary, format_summary, summarize

if TYPE_CHECKING:
    from graftlm.pipelines.summarize.selector import (
        SelectorExample,
        SelectorTrainingConfig,
        TrainedSelector,
        load_selector,
        selector_example,
        train_selector,
    )
    from graftlm.pipelines.summarize.writer import (
        CHAT_LAYOUT,
        LanguageModelWriter,
        PromptLayout,
        SummaryDecoding,
        WriterExample,
        load_writer,
        train_writer,
    )

_SELECTOR = "SelectorExample SelectorTrainingConfig TrainedSelector load_selector selector_example train_selector"
_WRITER = "CHAT_LAYOUT LanguageModelWriter PromptLayout SummaryDecoding WriterExample load_writer train_writer"


def __getattr__(name: str) -> Any:
    for module, names in (("selector", _SELECTOR), ("writer", _WRITER)):  # an extract does without their slow imports
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
