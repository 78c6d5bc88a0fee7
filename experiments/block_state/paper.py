"""The published figures: perplexity per token (Table 5.1 of the thesis), about 200 million weights, windows of 512.

Corpora, tokenizers and sizes differ from ours, so only the order of the rows compares with bits per byte.
"""

from __future__ import annotations

from collections.abc import Container

from graftlm.evaluation import PaperRow

# PG19, GitHub, arXiv.
TABLE_5_1 = {
    "slide": (12.12, 2.28, 2.69),
    "transformer_xl": (11.96, 2.01, 2.48),
    "block_recurrent": (11.55, 2.04, 2.36),
    "bst_sh_s4d": (11.57, 2.14, 2.51),
    "bst_mh_s4d": (11.60, 2.15, 2.52),
    "bst_mf_s4d": (11.63, 2.07, 2.48),
    "bst_sh_unstructured": (11.52, 2.09, 2.49),
    "bst_mf_unstructured": (11.56, 2.03, 2.44),
}
NAMES = ("ppl_pg19", "ppl_github", "ppl_arxiv")


def rows(ids: Container[str]) -> list[PaperRow]:
    """The published rows with these ids."""
    return [
        PaperRow(id=row, metrics=dict(zip(NAMES, values, strict=True)), where="Table 5.1")
        for row, values in TABLE_5_1.items()
        if row in ids
    ]
