"""The tree of errors, and the hints in messages."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm import errors
from graftlm.errors import GraftError, MissingExtraError, did_you_mean, first_of

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def tree(parent: type[Exception]) -> list[str]:
    """Return the names of a class and of its subclasses, depth first."""
    names = [parent.__name__]
    for kind in CLASSES:
        if kind.__base__ is parent:
            names += tree(kind)
    return names


def test_the_docstring_draws_the_whole_tree_in_order() -> None:
    lines = (errors.__doc__ or "").splitlines()
    drawn = [line.lstrip(" │├└─").split()[0] for line in lines if "Error " in line]
    assert drawn == tree(GraftError)
    assert len(drawn) == len(CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_a_graft_error_with_a_docstring(kind: type[Exception]) -> None:
    assert issubclass(kind, GraftError)
    assert kind.__doc__


def test_a_missing_extra_is_named_with_the_command_that_installs_it() -> None:
    message = str(MissingExtraError("lm-eval", "harness", "graft eval --tasks"))
    assert message.startswith("graft eval --tasks ")
    assert "lm-eval" in message
    assert "`pip install 'graftlm[harness]'`" in message


def test_the_nearest_name_is_suggested_or_all_are_listed() -> None:
    assert did_you_mean("capcity", ["capacity", "width"]) == " (did you mean capacity?)"
    assert did_you_mean("zzz", ["width", "capacity"]) == " (known: capacity, width)"
    assert did_you_mean("zzz", []) == ""


@given(st.text(), st.lists(st.text()))
def test_a_hint_never_fails(word: str, known: list[str]) -> None:
    assert did_you_mean(word, known) == did_you_mean(word, reversed(known))


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["a", "b", "c"], "a, b and 1 more"),
        (["a"] * 1002, "a, a and 1,000 more"),
    ],
)
def test_many_items_are_counted(items: list[str], text: str) -> None:
    assert first_of(items, 2) == text
