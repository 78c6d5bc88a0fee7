"""Metrics of the abstracts: losses by layout, and scores of the written texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.evaluation import Metric, Scores, bootstrap, paired_difference
from graftlm.pipelines.summarize import read_text
from graftlm.pipelines.summarize.metrics import default_encoder, faithfulness, rouge
from graftlm.pipelines.summarize.provenance import link_sentences
from graftlm.pipelines.summarize.text import ngrams, split_words

LAYOUTS = ("i", "ie_gold", "ie_selected", "ie_random", "i_long")
WRITTEN = ("i", "ie_gold", "ie_selected")  # layouts whose summaries are written
_ROUGE = ("rouge1", "rouge2", "rougeL")

Details = Mapping[str, Any]  # details of the measurement of a run: `nats` and `texts`
Documents = Mapping[str, Mapping[str, Any]]  # rows of the test documents by name
Texts = Mapping[str, str]  # texts by document
Values = dict[str, NDArray[np.float64]]  # values (documents,) by metric


def tabulate(
    runs: Sequence[Sequence[Details]],
    documents: Documents,
    like: Sequence[Details],
) -> tuple[dict[str, dict[str, Metric]], dict[str, Any], dict[str, list[float]]]:
    """Compute the metrics of a variant.

    Args:
        runs: details by seed and collection.
        documents: the test documents.
        like: details of one seed by collection, whose documents are used.

    Returns:
        Metrics by layout, differences of `ie_selected` less other layouts and the extract, and losses by seed. The
        metrics are means over seeds of each document.
    """
    scored: list[str] = []
    written: set[str] = set()
    for run in like:
        scored.extend(run["nats"])
        written.update(run["texts"]["i"])
    tokens = np.array([len(documents[name]["answer"]) for name in scored])
    values: dict[str, Values] = {}
    for layout in WRITTEN:
        texts = _texts(runs, layout, written)
        values[layout] = text_values(texts, documents)
    scores: dict[str, Scores] = {}
    losses: dict[str, list[float]] = {}
    for layout in LAYOUTS:
        nats = _nats(runs, layout, scored)
        scores[layout] = Scores(nats.mean(axis=0), tokens, tokens, np.arange(len(tokens)))
        by_seed = nats.sum(axis=1) / tokens.sum()
        losses[layout] = by_seed.round(4).tolist()
    metrics: dict[str, dict[str, Metric]] = {}
    minus: dict[str, Any] = {}
    for layout in LAYOUTS:
        metrics[layout] = {"abstract_nll": scores[layout].interval()}
        for metric, column in values.get(layout, {}).items():
            metrics[layout][metric] = bootstrap(column)
        difference = paired_difference(scores["ie_selected"], scores[layout])
        minus[f"abstract_nll_{layout}"] = difference.model_dump()
    first_texts = _texts(runs, "i", written)[0]
    extracts = rival_texts(documents, list(first_texts), "extract")
    extract_values = text_values([extracts], documents)
    minus.update(_differences_of_texts(values, extract_values))
    return metrics, minus, losses


def _differences_of_texts(values: Mapping[str, Values], extract_values: Values) -> dict[str, Any]:
    """Return the metrics of `ie_selected` less those of `i` and of the extract."""
    differences: dict[str, Any] = {}
    for metric, selected in values["ie_selected"].items():
        less_introduction = bootstrap(selected - values["i"][metric])
        less_extract = bootstrap(selected - extract_values[metric])
        differences[f"{metric}_i"] = less_introduction.model_dump()
        differences[f"{metric}_extract"] = less_extract.model_dump()
    return differences


def _texts(runs: Sequence[Sequence[Details]], layout: str, names: Collection[str]) -> list[Texts]:
    """Return the texts of a layout, for each seed."""
    by_seed = []
    for collections in runs:
        texts: dict[str, str] = {}
        for run in collections:
            texts.update(run["texts"][layout])
        by_seed.append({name: text for name, text in texts.items() if name in names})
    return by_seed


def _nats(runs: Sequence[Sequence[Details]], layout: str, names: Sequence[str]) -> NDArray[np.float64]:
    """Return the losses of documents with a layout, (seeds, documents)."""
    rows = []
    for collections in runs:
        nats: dict[str, Mapping[str, float]] = {}
        for run in collections:
            nats.update(run["nats"])
        rows.append([nats[name][layout] for name in names])
    return np.array(rows)


def rival_texts(documents: Documents, names: Sequence[str], rival: str) -> Texts:
    """Return the texts of an extract with which the summaries are compared."""
    return {name: " ".join(documents[name]["rivals"][rival]) for name in names}


def text_values(texts: Sequence[Texts], documents: Documents) -> Values:
    """Return the metrics of summaries as means over seeds.

    Args:
        texts: summaries by document, for each seed.
        documents: the test documents.
    """
    by_seed = [_scores_of(summaries, documents) for summaries in texts]
    values: Values = {}
    for metric in by_seed[0][0]:
        columns = [[scores[metric] for scores in rows] for rows in by_seed]
        values[metric] = np.mean(columns, axis=0)
    return values


def _scores_of(summaries: Texts, documents: Documents) -> list[dict[str, float]]:
    return [text_scores(text, documents[name]) for name, text in summaries.items()]


def text_scores(text: str, document: Mapping[str, Any]) -> dict[str, float]:
    """Return ROUGE, the shares of unsupported sentences, new pairs of words and repeated runs of four, and the length.

    The sentences are compared with the text that all rows of the document read together, so that a row that reads more
    text has no advantage. A text without a sentence counts as unsupported.
    """
    rivals = (" ".join(sentences) for sentences in document["rivals"].values())
    passages = "\n\n".join([*document["read"].values(), *rivals])
    source = read_text(passages, ".txt", document["id"], "en")
    links = link_sentences(text, source, range(len(source.sentences)), default_encoder())
    similarity = rouge([link.text for link in links], document["abstract"])
    unsupported = sum(link.mark == "unsupported" for link in links)
    bigrams = faithfulness(text, document["source"]).bigrams
    words = split_words(text)
    runs = ngrams(words, 4)
    rouge_scores = {name: similarity[name] for name in _ROUGE}
    return {
        **rouge_scores,
        "unsupported_share": unsupported / len(links) if links else 1.0,
        "new_pairs": 0.0 if bigrams is None else 1 - bigrams,
        "words": float(len(words)),
        "repeated_share": 1 - len(set(runs)) / len(runs) if runs else 0.0,
    }
