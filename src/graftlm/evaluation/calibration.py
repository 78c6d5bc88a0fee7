"""Which labels a model confuses, whether its probabilities can be believed, and how far its numbers are off.

Calibration is over ten bins ((m - 1) / 10, m / 10] of the probability, as in scikit-learn's `calibration_curve`. With
n_m of n predictions in bin m, whose mean probability is p_m, and of which a share of t_m is right,

    expected_calibration_error = Σ_m n_m / n |t_m - p_m|        (Guo et al., 2017), here in points
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

BINS = 10
_QUANTILES = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)


def confusion_matrix(truth: Sequence[str], predicted: Sequence[str]) -> dict[str, dict[str, int]]:
    """How often each true label was predicted as each label: true label, predicted label, count; zeros are left out."""
    counts = Counter(zip(truth, predicted, strict=True))
    rows: dict[str, dict[str, int]] = {}
    for (true, label), count in sorted(counts.items()):
        rows.setdefault(true, {})[label] = count
    return rows


def calibration(probabilities: Sequence[float], right: Sequence[bool]) -> dict[str, Any]:
    """The error in points, and the curve: mean probability, share that is right, and count of each bin that has any.

    Args:
        probabilities: (n,) of what was predicted; those that are NaN are left out.
        right: (n,) whether it was so.
    """
    p, t = np.asarray(probabilities, np.float64), np.asarray(right, np.float64)
    p, t = p[~np.isnan(p)], t[~np.isnan(p)]
    if not len(p):
        return {}
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], p)
    counts = np.bincount(bins, minlength=BINS)
    used = counts > 0
    prob_pred, prob_true = (np.bincount(bins, x, BINS)[used] / counts[used] for x in (p, t))
    error = 100 * float(np.abs(prob_true - prob_pred) @ counts[used]) / len(p)
    curve = {"prob_pred": prob_pred.tolist(), "prob_true": prob_true.tolist(), "count": counts[used].tolist()}
    return {"expected_calibration_error": error, "calibration_curve": curve}


def residuals(truth: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    """Errors in the target's unit; a residual is a prediction minus its target. `r2_score` is None of equal targets."""
    y = np.asarray(truth, np.float64)
    left = np.asarray(predicted, np.float64) - y
    quantiles = {
        f"{share:.0%}": float(value) for share, value in zip(_QUANTILES, np.quantile(left, _QUANTILES), strict=True)
    }
    spread = float(np.square(y - y.mean()).sum())
    return {
        "mean_absolute_error": float(np.abs(left).mean()),
        "root_mean_squared_error": float(np.sqrt(np.square(left).mean())),
        "r2_score": 1 - float(np.square(left).sum()) / spread if spread else None,
        "residuals": {"mean": float(left.mean()), "std": float(left.std()), "quantiles": quantiles},
    }
