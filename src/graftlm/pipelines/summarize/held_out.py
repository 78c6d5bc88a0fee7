"""Scores of texts on held-out documents: ROUGE against the human summaries, and n-grams copied from the documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from graftlm.evaluation import Metric, Row, bootstrap
from graftlm.pipelines.summarize.metrics import copied_shares, rouge
from graftlm.pipelines.summarize.selection import Budget, Selector, select
from graftlm.pipelines.summarize.summarized import SummarizedDocument
from graftlm.pipelines.summarize.summary import SELECTION
from graftlm.pipelines.summarize.text import split_sentences, split_words
from graftlm.pipelines.summarize.variants import oracle_selection

_ROUGE = ("rouge1", "rouge2", "rougeL")


def text_row(
    row_id: str,
    label: str,
    texts: Sequence[str],
    documents: Sequence[SummarizedDocument],
    extracts: Sequence[str] = (),
    *,
    is_human: bool = False,
) -> Row:
    """Return the metrics of a text for each document, means over the documents with bootstrap intervals.

    Args:
        row_id: id of the row.
        label: name of the row in the report.
        texts: a text for each document.
        documents: held-out documents, at least one.
        extracts: the extract that the writer of each text read; empty if there was none.
        is_human: whether the texts are the human summaries themselves, which have no ROUGE.

    Returns:
        A row with `rouge1`, `rouge2` and `rougeL` (F1 in percent), `words` and, for several n, `copied_N`: the
        percentage of the n-grams of words that occur in the document; with extracts also `copied_N_extract`, the
        percentage of those that occur in the extract. A text with fewer than n words does not count for n.

    Raises:
        MissingExtraError: rouge-score or sentencex is not installed.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for position, (text, summarized) in enumerate(zip(texts, documents, strict=True)):
        language = summarized.document.language
        if not is_human:
            sentences = [text[start:end] for start, end in split_sentences(text, language)]
            scores = rouge(sentences, summarized.summary_sentences)
            for name in _ROUGE:
                values[name].append(scores[name])
        values["words"].append(len(split_words(text)))
        for size, share in copied_shares(text, summarized.document.text).items():
            values[f"copied_{size}"].append(100 * share)
        if extracts:
            for size, share in copied_shares(text, extracts[position]).items():
                values[f"copied_{size}_extract"].append(100 * share)
    metrics: dict[str, Metric] = {name: bootstrap(column) for name, column in values.items()}
    return Row(id=row_id, label=label, metrics=metrics)


def human_row(documents: Sequence[SummarizedDocument]) -> Row:
    """Return length and copying of the human summaries, with which those of other texts are compared."""
    texts = [summarized.summary for summarized in documents]
    return text_row("human", "human summary", texts, documents, is_human=True)


def oracle_row(documents: Sequence[SummarizedDocument]) -> Row:
    """Return the metrics of the oracle's extracts, an upper bound for selectors."""
    texts = [oracle_selection(summarized).text for summarized in documents]
    return text_row("oracle", "oracle extract", texts, documents)


def selector_row(
    row_id: str, label: str, selector: Selector, budget: Budget, documents: Sequence[SummarizedDocument]
) -> Row:
    """Return the metrics of a selector's extracts, and `oracle_sentences`, the percentage that are the oracle's.

    Args:
        row_id: id of the row.
        label: name of the row in the report.
        selector: the selector.
        budget: limit of each extract.
        documents: held-out documents, at least one.
    """
    extracts = [select(summarized.document, selector, budget, None, **SELECTION) for summarized in documents]
    row = text_row(row_id, label, [extract.text for extract in extracts], documents)
    shares = []
    for extract, summarized in zip(extracts, documents, strict=True):
        oracle = set(oracle_selection(summarized).indices)
        hits = sum(index in oracle for index in extract.indices)
        shares.append(100 * hits / max(len(extract.indices), 1))
    return row.model_copy(update={"metrics": {**row.metrics, "oracle_sentences": bootstrap(shares)}})
