"""LexRank by matrices beside sumy's, and oracle labels beside the loop over rouge-score.

Rows: `selector`, the selector of those who trained none, beside sumy's own form of it; `oracle_labels`, beside N x M
calls of rouge-score. Both sides must give the same, or there is no figure. A ratio is their seconds over ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from turns import AT_LEAST, Clock, command, interval, made_aim, rounds, seconds

from graftlm.evaluation import Results, Row
from graftlm.pipelines.summarize import Document, Sumy, oracle_labels, read_text

AIMS: dict[str, tuple[str, float] | None] = {"oracle_labels": (AT_LEAST, 20.0), "selector": None}
LABELS = {"oracle_labels": "Oracle labels beside rouge-score", "selector": "LexRank beside sumy's"}
SEED = 0


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
    """Both rows."""
    sizes = {"sentences": 113, "summary": 4, "words": 20, "rounds": 2 if quick else 9}  # means of technical proposals
    text = speech(sizes["sentences"], sizes["words"], SEED)
    summary = speech(sizes["summary"], sizes["words"], SEED + 1)
    document = read_text(" ".join(text))
    _check(document, text, summary)
    pairs = {
        "selector": (lambda: Sumy().rank(document), lambda: Sumy(exact=True).rank(document)),
        "oracle_labels": (lambda: oracle_labels(text, summary), lambda: naive_labels(text, summary)),
    }
    rows = [_row(name, ours, theirs, sizes, device, clock) for name, (ours, theirs) in pairs.items()]
    aims = [made_aim(LABELS["oracle_labels"], "ratio", (AT_LEAST, 20.0), None if quick else _middle(rows[1]))]
    return Results.here(
        "bench-summarize", rows, seeds=[SEED], aims=aims, details={"sizes": dict(sizes), "clock": clock, "equal": True}
    )


def _check(document: Document, text: list[str], summary: list[str]) -> None:
    """Both sides give the same, or there is nothing to compare."""
    ours, theirs = (Sumy(exact=exact).rank(document) for exact in (False, True))
    assert [one.index for one in ours] == [one.index for one in theirs], "rankings differ"
    assert oracle_labels(text, summary) == naive_labels(text, summary), "labels differ"


def _row(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    sizes: dict[str, int],
    device: torch.device,
    clock: Clock,
) -> Row:
    turns = {
        "ours": lambda: seconds(ours, device, clock),
        "theirs": lambda: seconds(theirs, device, clock),
    }
    measured = rounds(turns, sizes["rounds"])
    ratio = interval([b / a for a, b in zip(measured["ours"], measured["theirs"], strict=True)])
    speed = interval([sizes["sentences"] / a for a in measured["ours"]])
    return Row(id=name, label=LABELS[name], metrics={"ratio": ratio, "sentences_per_second": speed})


def _middle(row: Row) -> float:
    return row.metrics["ratio"].mean  # type: ignore[union-attr]  # an interval, made above


if __name__ == "__main__":
    aims = {name: aim[1] if aim else None for name, aim in AIMS.items()}
    command("bench-summarize", (__doc__ or "").splitlines()[0], benchmark, aims)
