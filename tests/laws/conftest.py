"""Tests with the argument `example` and no list of their own run for every example of a graft."""

from __future__ import annotations

import pytest

from graftlm.grafts import kinds
from laws.examples import examples, first_example


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = " ".join(str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "example" in metafunc.fixturenames and "example" not in given:
        params = []
        for example in examples():
            is_first = example is first_example(example.kind)
            params.append(pytest.param(example, id=str(example), marks=[] if is_first else pytest.mark.slow))
        metafunc.parametrize("example", params)


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kinds of grafts take turns with the caches of the slowest law; with the other cache a case is slow."""
    for item in items:
        cache = getattr(item, "callspec", None) and item.callspec.params.get("cache")
        example = getattr(getattr(item, "cls", None), "example", None)
        if cache not in ("dynamic", "static") or example is None or item.get_closest_marker("matrix"):
            continue
        if cache != ("dynamic", "static")[kinds().index(example.kind) % 2]:
            item.add_marker(pytest.mark.slow)
