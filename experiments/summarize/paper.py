"""The figures of the thesis: ROUGE on arXiv (Table 2.2), with other texts and a writer fifty times as large."""

from __future__ import annotations

from collections.abc import Container

from graftlm.evaluation import PaperRow

TABLE_2_2 = {
    "lead_10": (35.52, 10.33, 3.74, 31.44),
    "lexrank": (33.85, 10.73, 4.54, 28.99),
    "sumbasic": (29.47, 6.95, 2.36, 26.3),
    "sent_clf": (34.01, 8.71, 2.99, 30.41),
    "sent_ptr": (42.32, 15.63, 7.49, 38.06),
    "gold_extract": (44.25, 18.17, 9.14, 35.33),
    "tlm_i": (39.65, 12.15, 4.40, 35.76),
    "tlm_ie_gm": (41.62, 14.69, 6.16, 38.03),
    "tlm_ie_gg": (46.40, 18.15, 8.71, 42.27),
}
NAMES = ("rouge1", "rouge2", "rouge3", "rougeL")


def rows(ids: Container[str]) -> list[PaperRow]:
    """The rows of these ids."""
    return [
        PaperRow(id=row, metrics=dict(zip(NAMES, values, strict=True)), where="Table 2.2, arXiv")
        for row, values in TABLE_2_2.items()
        if row in ids
    ]
