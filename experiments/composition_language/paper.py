"""The published figures: chrF of translation into English (Table 2) and of its ablations (Table 5)."""

from __future__ import annotations

from graftlm.evaluation import PaperRow

# FLORES-200, ten low-resource languages into English, the average.
TABLE_2 = {"m_b": 41.7, "m_a": 37.2, "composition": 46.1}
# FLORES-200, all languages into English.
TABLE_5 = {"composition": 60.5, "vanilla_m_a": 59.2, "random_m_a": 58.8, "encoder_m_a": 59.3, "lora": 59.2}


def rows() -> list[PaperRow]:
    """Every published figure; ours are other measures of other models, so only their order can be compared."""
    flores = [PaperRow(id=name, metrics={"flores_xx_en_chrf": v}, where="Table 2") for name, v in TABLE_2.items()]
    more = [PaperRow(id=name, metrics={"flores_xx_en_chrf": v}, where="Table 5") for name, v in TABLE_5.items()]
    return [*flores, *more]
