"""The benchmark of a GPU: its plan, its limits of time, what it keeps and what it refuses. Speeds are not tested."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from graftlm.errors import EvaluationError
from graftlm.evaluation import Interval, Results, Row, value_of

ROOT = Path(__file__).parents[1]
DECODED = ("bare", "neutral_closed", "neutral_open", "lora", "lora_merged", "adapter", "routing_4", "composition")
UNNEEDED = ("datasets", "pyarrow", "pandas", "scipy", "sklearn", "sacrebleu", "lm_eval", "sentence_transformers")
HIDING = """
import runpy, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {hidden}
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.argv = {arguments}
sys.path.insert(0, {folder})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The command, whose modules are imported as from its own folder, where folders of tests have the same names."""
    folder = ROOT / "benchmarks"
    names = [file.stem for file in folder.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        import gpu

        yield gpu
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


@pytest.fixture
def bench(gpu: ModuleType, tmp_path: Path) -> Any:
    """Makes a bench of functions by name, each of which returns the value of its only row."""

    def make(functions: dict[str, Any]) -> Any:
        items = [gpu.Item(name, 1.0, dict, partial(measure, function, name)) for name, function in functions.items()]
        return gpu.Bench(items, gpu.CPU, torch.device("cpu"), tmp_path)

    def measure(function: Any, name: str, _models: object) -> Any:
        value = function()
        ratio = Interval(mean=value, low=value, high=value)
        return gpu.Measured([Row(id=name, label=name, metrics={"ratio": ratio})], {}, {})

    return make


def test_items_are_measured_and_written(gpu: ModuleType, tmp_path: Path) -> None:
    names = ["decode_neutral_1", "train", "own_text", "decode_lora_1", "decode_routing_4_1", "decode_composition_1"]
    assert gpu.main(["--cpu", "--out", str(tmp_path), "--only", *names]) == 0
    results = Results.read(tmp_path)
    assert [row.id for row in results.rows] == [
        "decode_bare_1",
        "decode_neutral_closed_1",
        "decode_neutral_open_1",
        "train_lora",
        "train_neutral",
        "train_lora_ours",
        "train_bound",
        "own_text",
        "decode_lora_1",
        "decode_routing_4_1",
        "decode_composition_1",
    ]
    details: Any = results.details
    assert details["not_measured"] == {}
    assert details["items"]["decode_neutral_1"]["open_share"] == {"neutral_closed": 0.0, "neutral_open": 1.0}
    assert all(aim.met is None for aim in results.aims), "tiny models decide nothing"


@pytest.mark.slow
def test_the_whole_small_form_needs_few_packages(tmp_path: Path) -> None:
    folder = ROOT / "benchmarks"
    values = {"hidden": UNNEEDED, "arguments": [str(folder / "gpu.py"), "--cpu", "--out", str(tmp_path)]}
    program = HIDING.format(**{name: repr(value) for name, value in values.items()}, folder=repr(str(folder)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = Results.read(tmp_path)
    expected = {"own_text", "train_lora", "train_neutral", "train_lora_ours", "train_bound"}
    expected |= {f"server_{clients}" for clients in (1, 8, 32, 64)}
    expected |= {f"decode_{variant}_{rows}" for variant in DECODED for rows in (1, 8, 32)}
    expected |= {f"decode_{variant}_{rows}_3b" for variant in DECODED[:3] for rows in (1, 32)}
    assert {row.id for row in results.rows} == expected
    assert results.details["not_measured"] == {}
    assert {"ratio", "tokens_per_s", "static_tokens_per_s"} <= results.row("server_8").metrics.keys()


@pytest.mark.slow
def test_compiled_steps_are_those_of_the_variant(gpu: ModuleType) -> None:
    from dataclasses import replace

    from gpu_decoding import Decoding

    sizes = replace(gpu.CPU, compiles=True)
    decoding = Decoding(sizes, "1b", 2, ("neutral", "lora_merged"), torch.device("cpu"))
    for variant in ("neutral", "lora_merged"):
        measured = decoding.measure(variant)
        assert measured.problems == {}
        assert "ratio" in measured.rows[-1].metrics
        warm_up = measured.details[f"warm_up_compiled_{measured.rows[1 if variant == 'neutral' else 0].id[7:-2]}"]
        assert warm_up["graph_breaks"] == 0


def test_what_was_measured_is_kept_and_not_measured_again(bench: Any, tmp_path: Path) -> None:
    bench({"first": lambda: 1.0}).run(["first"], 1)
    bench({"first": pytest.fail, "second": lambda: 2.0}).run(["first", "second"], 1)
    rows = Results.read(tmp_path).rows
    assert {row.id: value_of(row.metrics["ratio"]) for row in rows} == {"first": 1.0, "second": 2.0}


def test_an_item_that_fails_is_named_and_measured_again(bench: Any, tmp_path: Path) -> None:
    def fail() -> float:
        raise MemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    bench({"failing": fail, "after": lambda: 1.0}).run(["failing", "after"], 1)
    results = Results.read(tmp_path)
    assert [row.id for row in results.rows] == ["after"]
    not_measured: Any = results.details["not_measured"]
    assert "out of memory" in not_measured["failing"]
    assert "out of memory" in (tmp_path / "report.md").read_text()
    bench({"failing": lambda: 2.0, "after": pytest.fail}).run(["failing", "after"], 1)
    assert [row.id for row in Results.read(tmp_path).rows] == ["failing", "after"]


def test_an_item_of_which_a_part_failed_is_measured_again_last(gpu: ModuleType, tmp_path: Path) -> None:
    measured: list[str] = []
    problems = {"partly": "no memory is left"}

    def measure(name: str, rows: int, _models: object) -> Any:
        measured.append(name)
        ratio = Interval(mean=1.0, low=1.0, high=1.0)
        found = [Row(id=f"{name}{number}", label=name, metrics={"ratio": ratio}) for number in range(rows)]
        return gpu.Measured(found, {name: problems[name]} if name in problems else {}, {})

    def run(rows: dict[str, int]) -> None:
        items = [gpu.Item(name, 1.0, dict, partial(measure, name, count)) for name, count in rows.items()]
        gpu.Bench(items, gpu.CPU, torch.device("cpu"), tmp_path).run(list(rows), 1)

    run({"partly": 1, "done": 1})
    run({"partly": 0, "done": 1, "new": 1})
    assert measured == ["partly", "done", "new", "partly"]
    assert [row.id for row in Results.read(tmp_path).rows] == ["partly0", "done0", "new0"], "as before, if all failed"
    problems.clear()
    run({"partly": 2, "done": 1})
    assert [row.id for row in Results.read(tmp_path).rows][:2] == ["partly0", "partly1"]


def test_items_that_would_not_end_in_time_are_named(bench: Any, tmp_path: Path) -> None:
    def slow() -> float:
        time.sleep(0.2)
        return 1.0

    bench({"slow": slow, "late": pytest.fail}).run(["slow", "late"], 0.3 / 60)
    results = Results.read(tmp_path)
    assert [row.id for row in results.rows] == ["slow"]
    not_measured: Any = results.details["not_measured"]
    assert set(not_measured) == {"late"}


def test_an_interruption_keeps_what_was_measured(bench: Any, tmp_path: Path) -> None:
    def interrupt() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench({"first": lambda: 1.0, "second": interrupt}).run(["first", "second"], 1)
    results = Results.read(tmp_path)
    assert [row.id for row in results.rows] == ["first"]
    not_measured: Any = results.details["not_measured"]
    assert set(not_measured) == {"second"}


def test_results_of_another_machine_are_not_continued(bench: Any, tmp_path: Path) -> None:
    bench({"first": lambda: 1.0}).run(["first"], 1)
    path = tmp_path / "results.json"
    values = json.loads(path.read_text())
    values["details"]["environment"]["card"] = "another card"
    path.write_text(json.dumps(values))
    with pytest.raises(EvaluationError, match="card"):
        bench({"first": lambda: 1.0})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--minutes", "soon"],
        ["--device", "tpu"],
        ["--device", "cpu"],
        ["--cpu", "--only", "decode_nothing"],
        ["--cpu", "--out", __file__],
        ["--colour"],
        pytest.param([], marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
    ids=" ".join,
)
def test_wrong_input_is_refused_in_one_sentence(
    gpu: ModuleType,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_peak_of_a_card_is_that_of_its_name(gpu: ModuleType) -> None:
    from gpu_training import peak_flops

    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("NVIDIA H200 MIG 1g.18gb") is None, "a part of a card has not its peak"
    assert peak_flops("NVIDIA GeForce GTX 980") is None


def test_flops_are_those_of_the_matrices(gpu: ModuleType) -> None:
    from gpu_models import FULL
    from gpu_training import flops_per_token

    # 2048 x (2048 + 512 + 512 + 2048) and 3 x 2048 x 8192 in each of 16 layers, 2048 x 128256 at the end.
    frozen = 16 * (2048 * 5120 + 3 * 2048 * 8192) + 2048 * 128_256
    assert frozen == pytest.approx(1.236e9, rel=1e-3)
    assert flops_per_token(FULL.models["1b"], 1024, 7) == 4 * frozen + 42 + 6 * 16 * 1024 * 2048
