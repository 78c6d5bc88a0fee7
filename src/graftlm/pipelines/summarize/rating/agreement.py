"""Agreement of raters on an ordered scale: Krippendorff's alpha.

*Computing Krippendorff's Alpha-Reliability* (Krippendorff, 2011). The kept packages that have it are under the GPL,
which a library under the Apache licence can't ask its users to take.

Shapes: L different values, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def ordinal_alpha(units: Iterable[Sequence[float]]) -> float | None:
    """How far raters agree: 1 wholly, 0 as chance would, below 0 less than that.

        α = 1 − (n − 1) · Σ_ck o_ck δ²_ck / Σ_ck n_c n_k δ²_ck
        o_ck = Σ_u (pairs of values c and k in unit u) / (m_u − 1),   n_c = Σ_k o_ck,   n = Σ_c n_c
        δ_ck = Σ_{g=c..k} n_g − (n_c + n_k) / 2, the distance of their middle ranks

    Args:
        units: of each thing that was rated the ratings that it got, m_u of them; with fewer than two it says nothing.

    Returns:
        α; None where nothing was rated twice, or all ratings are the same.
    """
    paired = [unit for unit in units if len(unit) > 1]
    values = sorted({value for unit in paired for value in unit})
    o_LL = np.zeros((len(values), len(values)))
    for unit in paired:
        count_L = np.array([list(unit).count(value) for value in values], dtype=float)
        o_LL += (np.outer(count_L, count_L) - np.diag(count_L)) / (len(unit) - 1)
    n_L = o_LL.sum(axis=1)
    rank_L = n_L.cumsum() - n_L / 2
    distance_LL = np.square(rank_L[:, None] - rank_L)
    expected = float((np.outer(n_L, n_L) * distance_LL).sum())
    return 1 - float((n_L.sum() - 1) * (o_LL * distance_LL).sum() / expected) if expected else None
