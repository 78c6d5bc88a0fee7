"""Documents for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional

from graftlm.pipelines.summarize import LanguageModelWriter, WriterExample
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.prompts import introduction_range
from graftlm.pipelines.summarize.writer_training import encode_example

TEA = """# A study of tea

## 1. Introduction

Tea is drunk by *many* people. Most of them live in Asia. We ask what tea does to attention, in 3 groups of 40 persons.

## 2. Method

Persons drank tea or water. They then sorted cards for 20 minutes. Nobody knew what was in the cup until the end.

## 3. Results

Those who drank tea sorted 12% more cards. Attention rose in all groups of persons who drank tea. It fell with water.

## References

Persons who drank tea sorted more cards, 1999.
"""


def introduction_text(document: SourceDocument) -> str:
    """The sentences that a writer reads as the introduction."""
    return " ".join(document.sentences[index].text for index in introduction_range(document))


def write_rows(path: Path, *rows: object) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def write_pdf(path: Path, *pages: str) -> Path:
    """A PDF with a text on each page."""
    with mpl.rc_context({"pdf.fonttype": 42}), PdfPages(path) as pdf:
        for page in pages:
            figure = Figure(figsize=(8, 11))
            figure.text(0.08, 0.95, page, va="top", fontsize=9)
            pdf.savefig(figure)
    return path


def pdf_pages(path: Path) -> list[str]:
    """The text of each page as pdfminer.six writes it."""
    from pdfminer.high_level import extract_text
    from pdfminer.layout import LAParams

    return extract_text(str(path), laparams=LAParams(all_texts=True)).split("\f")[:-1]


@dataclass(frozen=True)
class SummaryLikelihood:
    """Negative log-likelihood of a summary in nats, and its number of tokens with the final EOS."""

    nats: float
    tokens: int


@torch.inference_mode()
def summary_likelihoods(
    writer: LanguageModelWriter, examples: Sequence[WriterExample], batch_size: int = 8
) -> list[SummaryLikelihood]:
    """Return −Σ log p of each human summary, cut as in training, given its prompt."""
    writer.model.eval()
    encoded = [encode_example(writer, example) for example in examples]
    pairs = [(example.prompt, example.summary) for example in encoded]
    batches = (pairs[first : first + batch_size] for first in range(0, len(pairs), batch_size))
    return [likelihood for batch in batches for likelihood in _batch_likelihoods(writer.model, batch)]


def _batch_likelihoods(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[SummaryLikelihood]:
    """Score one batch. Padding is at the end, where causal attention ignores it."""
    rows = [torch.tensor(prompt + summary) for prompt, summary in pairs]
    ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(model.device)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits.float()
    for row, (prompt, summary) in enumerate(pairs):
        first, last = len(prompt), len(prompt) + len(summary)
        logits = logits_BTV[row, first - 1 : last - 1]
        nats = functional.cross_entropy(logits, ids_BT[row, first:last], reduction="sum")
        yield SummaryLikelihood(float(nats), len(summary))
