"""The error tree, and the hints that go into messages."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm import errors
from graftlm.errors import GraftError, MissingExtraError, did_you_mean

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def _tree(parent: type[Exception] = GraftError) -> list[str]:
    own = [kind for kind in CLASSES if kind.__base__ is parent]
    return [parent.__name__, *(name for kind in own for name in _tree(kind))]


def test_the_docstring_draws_the_whole_tree_in_order() -> None:
    drawn = [line.lstrip(" │├└─").split()[0] for line in (errors.__doc__ or "").splitlines() if "Error " in line]
    assert drawn == _tree()
    assert len(drawn) == len(CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_a_graft_error_with_a_docstring(kind: type[Exception]) -> None:
    assert issubclass(kind, GraftError)
    assert kind.__doc__


def test_a_missing_extra_says_what_to_type() -> None:
    error = MissingExtraError("lm-eval", "harness", "graft eval --tasks")
    assert str(error) == (
        "graft eval --tasks needs the package lm-eval, which is not installed: run `pip install 'graftlm[harness]'`."
    )


def test_the_nearest_name_is_offered_or_all_are_listed() -> None:
    assert did_you_mean("capcity", ["capacity", "width"]) == " (did you mean capacity?)"
    assert did_you_mean("zzz", ["width", "capacity"]) == " (known: capacity, width)"
    assert did_you_mean("zzz", []) == ""


@given(st.text(), st.lists(st.text()))
def test_a_hint_never_fails(word: str, known: list[str]) -> None:
    assert did_you_mean(word, known) == did_you_mean(word, reversed(known))
