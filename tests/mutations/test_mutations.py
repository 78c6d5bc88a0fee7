"""Every mutation of the table is caught by the tests, as the committed results say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mutations.run import ROOT, apply, read_results
from mutations.table import MUTATIONS, SUITES, Mutation


def test_every_mutation_can_be_made() -> None:
    for mutation in MUTATIONS:
        text = (ROOT / "src" / "graftlm" / mutation.file).read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.name}: {mutation.old!r} is not in {mutation.file} once"
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
    assert {mutation.suite for mutation in MUTATIONS} == SUITES.keys()


def test_the_results_are_those_of_this_table_and_none_is_missed() -> None:
    results = read_results()
    digests = {mutation.name: mutation.digest() for mutation in MUTATIONS}
    assert {name: row["change"] for name, row in results.items()} == digests
    assert [name for name, row in results.items() if not row["caught"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gain in nats"])
def test_a_mutation_is_caught_and_its_suite_passes_without_it(name: str) -> None:
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--no-write", name]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert "passes without a mutation" in run.stdout
    assert f"{name}: caught by tests/" in run.stdout


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "src" / "graftlm" / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text("scale = 1\n")
    apply(Mutation("doubled", "gain", "module.py", "scale = 1", "scale = 2"), tmp_path)
    assert file.read_text() == "scale = 2\n"
    with pytest.raises(ValueError, match="doubled: 'scale = 1' occurs 0 times"):
        apply(Mutation("doubled", "gain", "module.py", "scale = 1", "scale = 2"), tmp_path)
