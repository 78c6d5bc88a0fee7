"""How often the right form of a pair is likelier, and whether a predicted gain tells what an answer brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from graftlm.evaluation import Metric
from graftlm.evaluation.intervals import bootstrap, percentile_interval
from graftlm.evaluation.plots import PALETTE
from graftlm.pipelines.clarify.gain import distributions_from_log_likelihoods, information_gain

CONDITIONS = ("nothing", "context", "answer", "word", "other")
NEEDED = 0.1  # bits that an answer must bring to be worth its question
Pairs = Sequence[Mapping[str, Any]]


def shares(pair: Mapping[str, Any]) -> dict[str, float]:
    """Percent by measure of one pair, which counts with either form as the right one: 0, 50 or 100."""
    nats = pair["nats"]
    has = [each for each in CONDITIONS if {each, f"{each}:0"} & nats.keys()]
    given = {each: [nats.get(f"{each}:{form}") or nats[each] for form in (0, 1)] for each in has}
    gaps = {each: [first[0] - first[1], second[1] - second[0]] for each, (first, second) in given.items()}
    values = {f"right_form_{each}": np.mean([gap > 0 for gap in gaps[each]]) for each in has}
    values |= {f"moved_{each}": sum(gaps[each]) > 0 for each in has if each != "nothing"}
    values |= {f"own_form_{each}": gaps[each][pair["right"]] > 0 for each in CONDITIONS[:3]}
    values |= {f"first_form_{each}": nats[each][0] > nats[each][1] for each in ("nothing", "question")}
    rates = np.array(given["answer"]) / pair["tokens"]
    values["per_token_answer"] = np.mean([rates[0, 0] > rates[0, 1], rates[1, 1] > rates[1, 0]])
    values["right_form_wrong_answer"] = np.mean([gap < 0 for gap in gaps["answer"]])
    return {name: 100.0 * float(value) for name, value in values.items()}


def values_of(runs: Sequence[Pairs], group: str, ids: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Percent by measure, (pairs,), means over runs: of a group or all, and of some ids where these are given."""
    kept = [[p for p in of if p["part"] == "test" and group in ("all", p["group"])] for of in runs]
    scored = [[shares(pair) for pair in of_run if not ids or pair["id"] in ids] for of_run in kept]
    names = [name for name in scored[0][0] if all(name in each for each in scored[0])]
    values = {name: np.mean([[each[name] for each in of_run] for of_run in scored], axis=0) for name in names}
    for pair in (("answer", "context"), ("context", "nothing"), ("answer", "word")):
        for first, second in [[f"{what}_{each}" for each in pair] for what in ("right_form", "moved")]:
            if second in values:
                values[f"{first}_minus_{pair[1]}"] = values[first] - values[second]
    return values


def median_nats(runs: Sequence[Pairs]) -> dict[str, float]:
    """By what is given, how far one form is likelier than the other, and how far each label moves that, in nats."""
    nats = [pair["nats"] for of_run in runs for pair in of_run if pair["part"] == "test"]
    gaps = {name: np.array([each[name] for each in nats]) @ [1, -1] for name in nats[0] if "other" not in name}
    moves = {name: (gaps[f"{name}:0"] - gaps[f"{name}:1"]) / 2 for name in CONDITIONS[1:4]}
    return {name: float(np.median(abs(each))) for name, each in ({"nothing": gaps["nothing"]} | moves).items()}


def gains(pair: Mapping[str, Any]) -> tuple[float, float, float]:
    """In bits: the question's predicted gain, what its right answer brought, and the entropy without a question."""
    given = distributions_from_log_likelihoods([pair["nats"][name] for name in ("answer:0", "answer:1", "nothing")])
    brought = np.log2(given[pair["right"], pair["right"]] / given[2, pair["right"]])
    return information_gain((0.5, 0.5), given[:2]), float(brought), float(-np.sum(given[2] * np.log2(given[2])))


def calibration(runs: Sequence[Pairs]) -> dict[str, Metric]:
    """Rank correlations and decisions to ask on the test texts, means over runs with bootstrap intervals over pairs.

    A run's thresholds have the best F1 on its dev texts; an answer was needed if it brought more than 0.1 bits.
    """
    parts = [[[p for p in of if ("dev" in p["part"]) == is_dev] for of in runs] for is_dev in (False, True)]
    test, dev = ([np.array([gains(pair) for pair in of_run]) for of_run in part] for part in parts)
    clear = np.array([pair["part"] == "clear" for pair in parts[0][0]])
    limits = [[_threshold(table[:, column], table[:, 1] > NEEDED) for column in (0, 2)] for table in dev]

    def statistics(rows: np.ndarray) -> dict[str, float]:
        of_runs = [_statistics(table[rows], clear[rows], limit) for table, limit in zip(test, limits, strict=True)]
        return {name: float(np.mean([each[name] for each in of_runs])) for name in of_runs[0]}

    random, measured = np.random.default_rng(0), statistics(np.arange(len(clear)))
    drawn = [statistics(random.integers(len(clear), size=len(clear))) for _ in range(500)]
    metrics: dict[str, Metric] = {n: percentile_interval(v, [each[n] for each in drawn]) for n, v in measured.items()}
    return metrics | {"threshold_bits": float(np.mean([limit[0] for limit in limits]))}


def _f1(ask: np.ndarray, needed: np.ndarray) -> float:
    return float(200 * (ask & needed).sum() / max(1, ask.sum() + needed.sum()))


def _threshold(predicted: np.ndarray, needed: np.ndarray) -> float:
    return max([-1.0, *predicted.tolist()], key=lambda limit: _f1(predicted > limit, needed))


def _rank(predicted: np.ndarray, brought: np.ndarray) -> float:
    result: Any = spearmanr(predicted, brought) if len(np.unique(predicted)) > 1 < len(np.unique(brought)) else None
    return float(result.statistic) if result else 0.0


def _statistics(table: np.ndarray, clear: np.ndarray, limits: Sequence[float]) -> dict[str, float]:
    """Rank correlations, 0 where nothing varies, and the rest in percent or bits."""
    (predicted, brought, entropy), needed = table.T, table[:, 1] > NEEDED
    ask, right = predicted > limits[0], 100 * ((predicted > limits[0]) & needed).sum()
    values = {"precision": right / max(1, ask.sum()), "recall": right / max(1, needed.sum()), "f1": _f1(ask, needed)}
    for name, rival in (("always", needed | True), ("entropy", entropy > limits[1])):
        values |= {f"f1_{name}": _f1(rival, needed), f"f1_minus_{name}": values["f1"] - _f1(rival, needed)}
    values["rank_entropy"] = _rank(entropy, brought)
    for name, of in (("all", clear | True), ("ambiguous", ~clear), ("clear", clear)):
        values[f"rank_{name}"] = _rank(predicted[of], brought[of])
        values |= {f"asked_{name}": 100 * ask[of].mean(), f"needed_{name}": 100 * needed[of].mean()}
        values |= {f"predicted_bits_{name}": predicted[of].mean(), f"brought_bits_{name}": brought[of].mean()}
    return values


def reliability(models: Mapping[str, Sequence[Pairs]]) -> Figure:
    """What answers brought against the predicted gain: means of five bins with as many texts each."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (name, runs) in zip(figure.subplots(1, len(models)), models.items(), strict=True):
        for color, part in zip(PALETTE, ("test", "clear"), strict=False):
            table = np.array(sorted(gains(pair)[:2] for of in runs for pair in of if pair["part"] == part))
            bins = [(x[:, 0].mean(), bootstrap(x[:, 1].tolist())) for x in np.array_split(table, 5) if len(x)]
            axes.plot(
                [x for x, _ in bins],
                [y.mean for _, y in bins],
                "o-",
                color=color,
                label="ambiguous" if part == "test" else part,
            )
            axes.vlines([x for x, _ in bins], [y.low for _, y in bins], [y.high for _, y in bins], color=color)
        axes.set(title=name, xlabel="predicted gain, bits", ylabel="brought by the answer, bits", xscale="log")
    axes.legend(frameon=False)
    return figure
