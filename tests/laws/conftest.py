"""Tests with the argument `example` and no list of their own run for every example of a graft."""

from __future__ import annotations

import pytest

from laws.examples import examples, first_example


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = " ".join(str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "example" in metafunc.fixturenames and "example" not in given:
        params = []
        for example in examples():
            is_first = example is first_example(example.kind)
            params.append(pytest.param(example, id=str(example), marks=[] if is_first else pytest.mark.slow))
        metafunc.parametrize("example", params)
