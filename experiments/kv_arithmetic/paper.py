"""The published figures (Table 1): accuracy in percent, of PaLM2-XXS as m_A and PaLM2-XS as m_B.

The paper's KV-MATH maps an expression to its result, and does not say whether the model may write the values first, so
its figures stand beside both forms. Its expressions span 25,000 keys and 3 to 6 operands; keys in training are 20%.
"""

from __future__ import annotations

from collections.abc import Container

from graftlm.evaluation import PaperRow

# KV-SUBS, NUM-MATH, KV-MATH.
TABLE_1 = {"m_a": (98.1, 4.2, 0.7), "m_b": (0.0, 73.7, 0.0), "composition": (92.9, 72.0, 84.3)}


def rows(ids: Container[str]) -> list[PaperRow]:
    """Table 1's rows of these ids, in the names of our metrics."""
    names = ("subs_held_out", "num_math", "kv_math_held_out", "kv_math_direct_held_out")
    return [
        PaperRow(id=row, metrics=dict(zip(names, (subs, num, kv, kv), strict=True)), where="Table 1")
        for row, (subs, num, kv) in TABLE_1.items()
        if row in ids
    ]
