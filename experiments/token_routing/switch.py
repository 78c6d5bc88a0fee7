"""Documents that change domain in the middle: what every expert makes of them, and when the route follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from graftlm.evaluation.plots import PALETTE

FIRST, SECOND = "code", "reading"
# Tokens of the second half's expert in a row that count as having switched.
STAYS = 8
SHOWN = 48

Documents = Sequence[Mapping[str, Any]]


def metrics_of(documents: Documents, names: Sequence[str]) -> dict[str, float]:
    """Nats per token of both halves and of all; of routes also when they switch."""
    found = _nats([_halves(one) for one in documents])
    if len(names) > 1:
        tokens = [switched_after(one, names) for one in documents]
        found["switch_tokens"] = float(np.median(tokens))
        found["switched_within_32"] = float(np.mean([one <= 32 for one in tokens]))
    return found


def by_hand(first: Documents, second: Documents) -> dict[str, float]:
    """The same with one expert's nats before the boundary and another's behind it: as if it were known."""
    return _nats([(_halves(a)[0], _halves(b)[1]) for a, b in zip(first, second, strict=True)])


def switched_after(document: Mapping[str, Any], names: Sequence[str]) -> int:
    """How many tokens behind the boundary the largest weight is the second half's, to stay; all where it never is."""
    weights = np.array(document["weights"])[document["first"] :, : len(names)]
    right = weights.argmax(-1) == names.index(SECOND)
    for token in range(len(right)):
        if right[token : token + STAYS].all():
            return token
    return len(right)


def draw(rows: Mapping[str, tuple[Documents, Sequence[str]]]) -> Figure:
    """The mean weight of every expert around the boundary, a panel for each way to route."""
    figure = Figure(figsize=(9.2, 1.2 + 2.4 * len(rows)), layout="constrained")
    panels = np.atleast_1d(figure.subplots(len(rows), 1, sharex=True, sharey=True))
    for axes, (label, (documents, names)) in zip(panels, rows.items(), strict=True):
        places, means = _around(documents)
        for index, name in enumerate(names):
            axes.plot(places, means[:, index], color=PALETTE[index], linewidth=1.8, label=f"{name} expert")
        axes.axvline(0, color="#222222", linewidth=0.9)
        axes.set_title(label, loc="left", fontsize=10)
        axes.set_ylabel("weight")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens from the boundary: code before it, prose behind it")
    panels[0].legend(loc="center left", frameon=False, fontsize=9)
    return figure


def _around(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """Places from the boundary, and the mean weights there over the documents that reach so far."""
    cut = min(SHOWN, *(one["first"] for one in documents), *(len(one["weights"]) - one["first"] for one in documents))
    spans = [np.array(one["weights"])[one["first"] - cut : one["first"] + cut] for one in documents]
    return np.arange(-cut, cut), np.mean(spans, axis=0)


def _halves(document: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Nats of the tokens before the boundary, without the first, and of those behind it."""
    nats = np.array(document["nats"])
    return nats[: document["first"] - 1], nats[document["first"] - 1 :]


def _nats(halves: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    first, second = (np.concatenate([pair[place] for pair in halves]) for place in (0, 1))
    return {
        "nll_code_half": float(first.mean()),
        "nll_prose_half": float(second.mean()),
        "nll_document": float(np.concatenate([first, second]).mean()),
    }
