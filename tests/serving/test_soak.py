"""The soak runs; whether it finds something is for the long run to say, whose results are committed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.evaluation import Results

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "serving_soak"


@pytest.mark.slow
def test_a_quick_soak(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "serving_soak.py"), "--out", str(tmp_path), "--quick"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = Results.read(tmp_path)
    check(results)
    assert results.rows[0].metrics["wrong"] == 0, results.details["went_wrong"]
    assert all(aim.met is None for aim in results.aims), "a few seconds say nothing about the aims"
    assert (tmp_path / "report.md").is_file()


def test_the_committed_soak_took_ten_minutes() -> None:
    if not COMMITTED.is_dir():
        pytest.skip(f"{COMMITTED} is not there yet")
    results = Results.read(COMMITTED)
    check(results)
    assert results.rows[0].metrics["seconds"] == 600
    assert all(aim.met is not None for aim in results.aims)


def check(results: Results) -> None:
    """Every request is accounted for."""
    assert (results.name, [row.id for row in results.rows]) == ("bench-serving-soak", ["soak"])
    metrics = results.rows[0].metrics
    kinds = ("answered", "failed_cleanly", "vanished", "wrong")
    assert metrics["requests"] == sum(metrics[kind] for kind in kinds)
    assert all(metrics[kind] > 0 for kind in kinds[:3])
    assert [aim.metric for aim in results.aims] == ["wrong", "memory_growth"]
