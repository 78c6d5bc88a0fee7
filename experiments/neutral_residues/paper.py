"""The published figures: log-perplexity of a 1B English model taught French (papers' Tables 2, 4, 5, 6 and 7)."""

from __future__ import annotations

from graftlm.evaluation import PaperRow

BACKBONE = (0.663, 1.175)

# (old, new) by row, at p = 0.1 and p = 0.
TABLE_2 = {
    "finetune": ((0.811, 0.758), (0.874, 0.755)),
    "lora": ((0.730, 0.818), (0.770, 0.814)),
    "adapter": ((0.687, 0.812), (0.720, 0.810)),
    "neutral-residues": ((0.668, 0.793), (0.684, 0.790)),
}
TABLE_4 = {
    "none-l1": (0.687, 0.801),
    "sigmoid-ce": (0.677, 0.800),
    "sigmoid": (0.676, 0.800),
    "relu": (0.673, 0.791),
    "relu-l1": (0.674, 0.791),
    "adapter": (0.686, 0.812),
}
# (He, low variance)
TABLE_5 = {
    "none-l1": ((0.687, 0.812), (0.687, 0.801)),
    "sigmoid-ce": ((0.668, 0.810), (0.677, 0.800)),
    "relu-l1": ((0.673, 0.818), (0.674, 0.791)),
}
# By alpha.
TABLE_6 = {
    0.0: (0.673, 0.791),
    0.01: (0.674, 0.791),
    0.1: (0.672, 0.791),
    1.0: (0.674, 0.791),
    10.0: (0.672, 0.791),
    100.0: (0.667, 0.791),
}
# By learning rate 2e-5, 5e-5, 2e-4, 5e-4.
TABLE_7 = {
    "finetune": ((0.678, 0.963), (0.705, 0.840), (0.811, 0.758), (0.874, 0.757)),
    "lora": ((0.716, 0.842), (0.730, 0.819), (0.745, 0.802), (0.755, 0.806)),
    "adapter": ((0.686, 0.830), (0.686, 0.812), (0.689, 0.797), (0.688, 0.796)),
    "neutral-residues": ((0.673, 0.799), (0.674, 0.791), (0.673, 0.787), (0.675, 0.789)),
}


def row(row_id: str, pair: tuple[float, float], where: str) -> PaperRow:
    """A published pair of log-perplexities, with what was learned and forgotten against the backbone."""
    old, new = pair
    metrics = {"old": old, "new": new, "forgotten": round(old - BACKBONE[0], 4), "learned": round(BACKBONE[1] - new, 4)}
    return PaperRow(id=row_id, metrics=metrics, where=where)
