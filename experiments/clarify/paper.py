"""The published figures: PaLM with 540 billion parameters, 8 exemplars (Tables 4.2 and 4.3 of the thesis)."""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.evaluation import PaperRow, Row

METHODS = ("intercpt", "with_context", "no_extra")
# By language, one tuple per method: formality BLEU and accuracy, "it" BLEU and accuracy, hit@3, hit@10.
TABLE_4_2 = {
    "es": ((36.3, 67, 33.6, 77, 46, 48), (34.7, 64, 30.8, 68, 40, 46), (34.6, 62, 29.6, 63, 33, 40)),
    "fr": ((39.1, 72, 35.3, 73, 46, 48), (36.4, 65, 33.5, 68, 36, 40), (35.7, 63, 32.3, 66, 33, 37)),
    "de": ((35.8, 69, 24.0, 75, 43, 45), (33.6, 61, 22.4, 69, 35, 39), (32.5, 62, 22.8, 63, 32, 35)),
    "ja": ((28.6, 67, 23.1, 74, 41, 44), (26.3, 60, 21.4, 67, 34, 38), (25.9, 61, 21.2, 61, 30, 33)),
}
# BLEU and accuracy of names, then of professions where the table has any.
TABLE_4_3 = {
    "es": ((31.8, 76, 37.3, 70), (29.9, 66, 37.1, 69), (30.9, 59, 35.5, 59)),
    "fr": ((31.0, 71), (29.5, 64), (30.0, 63)),
    "de": ((17.9, 73, 14.3, 68), (15.6, 67, 14.0, 66), (15.2, 61, 12.2, 62)),
    "ja": ((16.1, 71), (14.7, 65), (14.4, 60)),
}
_NAMES = {
    "4.2": ["formality_{}_bleu", "formality_{}_accuracy", "it_{}_bleu", "it_{}_accuracy"]
    + ["polysemy_{}_hit3", "polysemy_{}_hit10"],
    "4.3": ["name_{}_bleu", "name_{}_accuracy", "profession_{}_bleu", "profession_{}_accuracy"],
}


def rows(measured: Sequence[Row]) -> list[PaperRow]:
    """PaLM's figures for every row whose id ends in a method of the paper, limited to the row's metrics."""
    published: list[PaperRow] = []
    for row in measured:
        method = row.id.rpartition("-")[2]
        for table, number in ((TABLE_4_2, "4.2"), (TABLE_4_3, "4.3")) if method in METHODS else ():
            metrics = {
                name.format(language): float(value)
                for language, values in table.items()
                for name, value in zip(_NAMES[number], values[METHODS.index(method)], strict=False)
            }
            if shown := {name: value for name, value in metrics.items() if name in row.metrics}:
                published.append(PaperRow(id=row.id, metrics=shown, where=f"Table {number}"))
    return published
