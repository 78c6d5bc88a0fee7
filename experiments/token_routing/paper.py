"""The published figures: percent of right answers, graded by hand, 15 questions of each task."""

from __future__ import annotations

from graftlm.evaluation import PaperRow

_COLUMNS = ("accuracy_average", "accuracy_arc", "accuracy_gsm8k", "accuracy_codealpaca", "accuracy_squad")
# Table 1; its Specialized is each task's own expert, and Token-level Adaptation (k) is renewed every k tokens.
TABLE_1 = {
    "base": (16.7, 33.3, 0.00, 6.67, 26.7),
    "oracle": (40.0, 26.7, 26.7, 26.7, 80.0),
    "paper_k1": (36.7, 53.3, 6.67, 46.7, 40.0),
    "paper_k2": (48.3, 73.3, 6.67, 53.3, 60.0),
    "paper_k3": (38.3, 66.7, 20.0, 13.3, 53.3),
    "paper_k4": (36.6, 53.3, 6.67, 13.3, 73.3),
}


def rows() -> list[PaperRow]:
    """Every published figure; ours are other measures of another model, so only their order can be compared."""
    return [
        PaperRow(id=name, metrics=dict(zip(_COLUMNS, values, strict=True)), where="Table 1")
        for name, values in TABLE_1.items()
    ]
