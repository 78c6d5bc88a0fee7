"""Exports in the real vLLM, with the same tokens as the grafted model. Run with `python -m pytest integrations/vllm`.

A case takes about a minute on two cores. All are skipped where vLLM can't be had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from graftlm.testing import tiny_ids
from integrations.vllm.carriers import exported_carrier
from integrations.vllm.comparison import Continuation, compare
from integrations.vllm.environment import UnavailableError, find_python
from integrations.vllm.jobs import run_jobs
from integrations.vllm.models import EFFECT, PROMPTS, STEPS, Exported, exported_graft, random_graft, tiny_backbone

WIDTH = 47
"""Width of the adapters; the export pads it to 64, so that it can be divided among processes."""
BLOCK = 32
"""Tokens of a block of vLLM's cache: the least on a CPU. Only whole blocks are found again."""
LONG_PROMPTS = [tiny_ids(1, 2 * BLOCK)[0].tolist() + prompt for prompt in PROMPTS]
"""Prompts that begin with the same two blocks."""


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of vLLM's environment, which is made if necessary."""
    try:
        return find_python()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Neutral residues on a tiny Llama."""
    backbone = tiny_backbone("llama")
    graft = random_graft({"kind": "neutral-residues", "width": WIDTH}, backbone)
    result = exported_graft(graft, backbone, tmp_path_factory.mktemp("vllm") / "model", LONG_PROMPTS)
    assert result.effect > EFFECT
    return result


def job(model: Path, prompts: Sequence[Sequence[int]], **engine: Any) -> dict[str, Any]:
    """A job of `generate.py` that continues prompts greedily, with options of vLLM's engine."""
    return {"name": model.name, "model": str(model), "prompts": prompts, "tokens": STEPS, "engine": engine}


def check(expected: Sequence[Continuation], result: Mapping[str, Any]) -> None:
    """Compare the result of a job with the continuations of a model of this process."""
    assert "error" not in result, result["error"]
    comparison = compare(expected, result["outputs"])
    assert not comparison.fault
    assert comparison.tokens > 0.8 * len(expected) * STEPS, "ties left little to compare"


def test_neutral_residues_with_a_prefix_cache(exported: Exported, python: Path) -> None:
    one_by_one = {"enable_prefix_caching": True, "block_size": BLOCK, "max_num_seqs": 1}
    (result,) = run_jobs(python, [job(exported.folder, LONG_PROMPTS, **one_by_one)])
    check(exported.expected, result)
    assert [output["cached"] for output in result["outputs"]] == [0] + [2 * BLOCK] * (len(PROMPTS) - 1)


def test_grafts_of_a_carrier_in_two_processes(python: Path, tmp_path: Path) -> None:
    """Each process has half of the heads, of the FFN and of the blank adapters; all grafts are in one batch."""
    carrier = exported_carrier(tiny_backbone("llama"), tmp_path / "many")
    assert carrier.effect > EFFECT
    engine = {**carrier.engine, "tensor_parallel_size": 2}
    (result,) = run_jobs(python, [{**job(carrier.folder, carrier.prompts, **engine), "loras": carrier.loras}])
    check(carrier.expected, result)
