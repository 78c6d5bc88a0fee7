"""The thesis' figures: BERT-base on GLUE (Tables 3.1 and 3.2), and SciTail with few rows (Table 3.3)."""

from __future__ import annotations

from graftlm.evaluation import PaperRow

# Average, standard deviation across tasks, share of the data.
TABLE_3_1 = {
    "multi_task": (80.61, 14.41, 1.0),
    "+attention": (82.41, 10.67, 1.0),
    "+bottleneck": (82.90, 11.27, 1.0),
    "+alignment_cln": (83.12, 10.91, 1.0),
    "ca_mtl": (84.03, 10.02, 0.663),
}
# Average, all parameters over the encoder's.
TABLE_3_2 = {"single_task": (79.6, 9.0), "ca_mtl": (80.9, 1.12)}
# Accuracy on SciTail by share of its training rows.
TABLE_3_3 = {
    "few_added": {"0.1%": 83.2, "1%": 88.7, "10%": 91.4, "100%": 95.6},
    "few_finetune": {"0.1%": 51.2, "1%": 82.2, "10%": 90.5, "100%": 94.3},
}


def rows() -> list[PaperRow]:
    """All rows."""
    names = ("average", "task_sigma", "data_share")
    ladder = [
        PaperRow(id=row, metrics=dict(zip(names, values, strict=True)), where="Table 3.1")
        for row, values in TABLE_3_1.items()
    ]
    test_sets = [
        PaperRow(id=row, metrics={"average": average, "total_parameters_ratio": ratio}, where="Table 3.2, test sets")
        for row, (average, ratio) in TABLE_3_2.items()
    ]
    scitail = [
        PaperRow(
            id=row, metrics={f"score_{share}": value for share, value in scores.items()}, where="Table 3.3, SciTail"
        )
        for row, scores in TABLE_3_3.items()
    ]
    return ladder + test_sets + scitail
