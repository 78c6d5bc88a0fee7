"""Summaries of long documents: select sentences, write the summary, and keep the source of each sentence."""
# ruff: noqa: F401  # the names of this package

from graftlm.pipelines.summarize.batch import append_summaries, find_documents, pending_documents, summarize_many
from graftlm.pipelines.summarize.document import Section, SourceDocument
from graftlm.pipelines.summarize.oracle import oracle_extract, oracle_labels
from graftlm.pipelines.summarize.ranking import DefaultSelector
from graftlm.pipelines.summarize.readers import read_document, read_text
from graftlm.pipelines.summarize.selection import Budget, Extract, LeadSelector, RankedSentence, Selector, select
from graftlm.pipelines.summarize.selector import (
    SelectorExample,
    SelectorTrainingConfig,
    TrainedSelector,
    load_selector,
    selector_example,
    train_selector,
)
from graftlm.pipelines.summarize.summary import Summary, format_summary, summarize
from graftlm.pipelines.summarize.writer import (
    CHAT_LAYOUT,
    LanguageModelWriter,
    PromptLayout,
    SummaryDecoding,
    WriterExample,
    load_writer,
    train_writer,
)
