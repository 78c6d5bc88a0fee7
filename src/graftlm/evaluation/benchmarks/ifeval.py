"""IFEval's checker of lm-evaluation-harness, without what it downloads.

Five of its 25 kinds of instructions need a language detector or a sentence splitter: a further package, and data of
NLTK that is downloaded when the checker is imported. Prompts with these kinds are left out, on every machine alike, so
that the same prompts are measured wherever a benchmark runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from types import ModuleType

from graftlm.errors import EvaluationError

_UNCHECKED = frozenset(
    {
        "change_case:capital_word_frequency",
        "change_case:english_capital",
        "change_case:english_lowercase",
        "language:response_language",
        "length_constraints:number_sentences",
    }
)


def is_checkable(row: Mapping[str, object]) -> bool:
    """Return whether all instructions of a prompt can be checked without further packages and data.

    Args:
        row: a row of IFEval.
    """
    kinds = row["instruction_id_list"]
    assert isinstance(kinds, list), "the row was checked when it was read"
    return _UNCHECKED.isdisjoint(kinds)


@contextmanager
def offline_checker() -> Iterator[None]:
    """Let the checker be imported in the block without its further packages, and without a download."""
    import nltk  # installed with lm-eval

    stubs = {name: module for name, module in _stubs().items() if find_spec(name) is None}
    sys.modules.update(stubs)
    download = nltk.download
    nltk.download = _download_nothing
    try:
        with redirect_stdout(StringIO()):  # The checker prints that it downloaded something.
            yield
    finally:
        nltk.download = download
        for name in stubs:
            del sys.modules[name]


def _download_nothing(*_: object, **__: object) -> bool:
    return False


def _stubs() -> dict[str, ModuleType]:
    """Return modules that stand for packages of the checker that are not installed."""
    detector = ModuleType("langdetect")
    vars(detector).update(detect=_detect, LangDetectException=ValueError)
    immutable = ModuleType("immutabledict")
    vars(immutable).update(immutabledict=dict)
    return {"langdetect": detector, "immutabledict": immutable}


def _detect(_: str) -> str:
    raise EvaluationError(
        "An instruction of IFEval needs a language detector, which is not installed: install lm-eval[ifeval]."
    )
