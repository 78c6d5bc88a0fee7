"""Summaries of long documents: select what matters, then write, and say where each sentence came from."""

from graftlm.pipelines.summarize.baselines import Lead, Sumy
from graftlm.pipelines.summarize.batch import Failure, documents_in, pending, summarize_many, write_rows
from graftlm.pipelines.summarize.document import Document, Section, Sentence
from graftlm.pipelines.summarize.oracle import oracle_extract, oracle_labels
from graftlm.pipelines.summarize.readers import read_document, read_text
from graftlm.pipelines.summarize.select import Budget, Extract, Ranked, Selector, select
from graftlm.pipelines.summarize.show import lines_of
from graftlm.pipelines.summarize.summary import Link, Summary, summarize
from graftlm.pipelines.summarize.train import Example, SelectorTraining, example_of, train_selector
from graftlm.pipelines.summarize.train_writer import Lesson, train_writer
from graftlm.pipelines.summarize.trained import TrainedSelector, load_selector
from graftlm.pipelines.summarize.write import LanguageModelWriter, Layout, Wording, Writer, load_writer

__all__ = [
    "Budget",
    "Document",
    "Example",
    "Extract",
    "Failure",
    "LanguageModelWriter",
    "Layout",
    "Lead",
    "Lesson",
    "Link",
    "Ranked",
    "Section",
    "Selector",
    "SelectorTraining",
    "Sentence",
    "Summary",
    "Sumy",
    "TrainedSelector",
    "Wording",
    "Writer",
    "documents_in",
    "example_of",
    "lines_of",
    "load_selector",
    "load_writer",
    "oracle_extract",
    "oracle_labels",
    "pending",
    "read_document",
    "read_text",
    "select",
    "summarize",
    "summarize_many",
    "train_selector",
    "train_writer",
    "write_rows",
]
