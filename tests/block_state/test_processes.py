"""Two processes train a block-state model of a published preset as one process does, and a classifier too."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from block_state import process_jobs
from graftlm.training.history import read_history
from training.test_processes import TOLERANCE, check_close, launch

NAMES = ["bst-sh-s", "bst-mf-unstruct-l", "bst-mh-s-sharded", process_jobs.CLASSIFIER]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    alone = tmp_path_factory.mktemp("alone")
    together = tmp_path_factory.mktemp("together")
    process_jobs.run_jobs(alone, NAMES)
    launch(together, NAMES, Path(process_jobs.__file__))
    return alone, together


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(folders: tuple[Path, Path], name: str) -> None:
    ours, theirs = (read_history(folder / name / "history.jsonl") for folder in folders)
    assert len(ours) == len(theirs) == process_jobs.steps_config().steps
    for one, two in zip(ours, theirs, strict=True):
        assert one["tokens"] == two["tokens"]
        for key in ("loss", "gradient_norm"):
            assert two[key] == pytest.approx(one[key], rel=TOLERANCE, abs=1e-6), (one["step"], key)
    alone, together = (load_file(folder / name / "final.safetensors") for folder in folders)
    assert alone.keys() == together.keys()
    for key, tensor in alone.items():
        check_close(together[key], tensor, key)
