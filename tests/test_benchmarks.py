"""Benchmarks run, and write results of the common form. Their speed is not tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.evaluation import Interval, Results, value_of

ROOT = Path(__file__).parents[1]
LENGTHS = (128, 256, 512, 1024)
ROWS = {
    "neutral_residues": ["train", "decode_closed", "decode_open"],
    "distillation": ["step", "memory"],
    "training": ["text", "conversations", "distil", "memory_text", "memory_distil", "memory_conversations"],
    "own_text": ["free_text", "conversations"],
    "loading": ["memory", "streams"],
    "composition": [
        "decode_step",
        "generate_256_vs_recompute",
        "train_step",
        "memory",
        *(f"recompute_{length}" for length in LENGTHS),
    ],
    "specialists": ["specialists_1", "specialists_2", "specialists_3"],
    "token_routing": [
        "decode_vs_one_lora",
        *(f"published_step_{length}" for length in LENGTHS),
        *(f"recompute_{length}" for length in LENGTHS),
        "vs_xlora",
        "routing_share",
        "batch16_mixed",
        "states_quarter",
        "states_last",
        "experts_2",
        "experts_8",
        "experts_32",
        "experts_128",
    ],
    "many_experts": [
        "memory",
        "route",
        "decode_all",
        "decode_stored",
        "decode_all_changing",
        "decode_stored_changing",
        "read",
    ],
    "operations": [
        "neutral_residues",
        "adapter",
        "lora",
        "routing_1",
        "routing_4",
        "routing_4_everywhere",
        "composition",
        "memory",
        "llama_pro",
    ],
    "block_state": [
        "forward_1k",
        "forward_4k",
        "forward_16k",
        "forward_65k",
        "growth_exponent",
        "decode_65k_vs_1k",
    ],
    "state_space": ["tokens_4k", "tokens_16k", "tokens_65k"],
    "conditional_tasks": ["train_step", "selection", "mixed_20_tasks", "memory_20_tasks", "serve_20_tasks"],
    "summarize": ["selector", "embedding_ranking", "sent_clf", "sent_ptr", "sent_modern", "oracle_labels"],
    "serving": [
        "clients_1",
        "clients_4",
        "clients_16",
        "clients_64",
        "mixed_grafts_4",
        "transformers_static_8",
        "transformers_static_16",
        "transformers_serve_16",
        "prefix_1000",
        "json",
    ],
    "vllm": ["clients_1", "clients_8", "clients_32", "mixed_grafts_2", "mixed_grafts_8"],
}
SKIPPED = 3  # status of a benchmark that can't run on this machine
AIMS = {
    "neutral_residues": ["ratio", "ratio", "ratio"],
    "distillation": [],
    "training": ["ratio"],
    "own_text": ["ratio", "ratio"],
    "loading": ["ratio", "ratio"],
    "composition": ["ratio", "ratio"],
    "specialists": [],
    "token_routing": ["ratio", "ratio", "ratio", "ratio", "ratio_top2"],
    "many_experts": ["ratio", "ratio", "ratio"],
    "operations": ["operations_ratio"] * 4,
    "block_state": ["ratio", "ratio", "ratio", "value", "value"],
    "state_space": ["ratio"],
    "conditional_tasks": ["ratio", "ratio", "ratio", "ratio"],
    "summarize": ["ratio"],
    "serving": ["ratio", "ratio", "ratio", "ratio", "ratio", "ratio"],
    "vllm": ["export_over_bare", "export_over_bare"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_quick_run_writes_results(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--out", str(tmp_path), "--quick"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    results = Results.read(tmp_path)
    check_form(results, name)
    assert (tmp_path / "report.md").is_file()
    assert all(aim.met is None for aim in results.aims)  # the aims do not apply to small models


@pytest.mark.parametrize("name", ROWS)
def test_the_committed_results_are_of_the_same_form(name: str) -> None:
    results = Results.read(ROOT / "benchmarks" / "results" / name)
    check_form(results, name)
    assert all(aim.met is not None for aim in results.aims)


def check_form(results: Results, name: str) -> None:
    assert results.name == f"bench-{name.replace('_', '-')}"
    assert [row.id for row in results.rows] == ROWS[name]
    for row in results.rows:
        if name == "operations":  # counts have no interval
            assert value_of(row.metrics["operations_ratio"]) >= 1
            continue
        names = ("ratio", "value", "export_over_bare", "carrier_over_bare")
        ratio = next(row.metrics[metric] for metric in names if metric in row.metrics)
        assert isinstance(ratio, Interval)
        assert ratio.low <= ratio.mean <= ratio.high
        assert ratio.low > 0 or row.id == "growth_exponent"
    assert [aim.metric for aim in results.aims] == AIMS[name]
