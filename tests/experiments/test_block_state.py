"""Block-state transformers beside their baselines, at their smallest: texts, rows, results, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import Options, block_state, reproduce
from experiments.block_state.corpora import CORPORA, FILES, Corpus, make_corpora, packages_of
from experiments.block_state.run import FULL, LONGER, QUICK, TABLES, Plan
from experiments.parents import read_texts
from experiments.sequence_rows import LABELS, ROWS, count
from graftlm.demo.corpus import source_files
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results, value_of

SENTENCE = "The long road of document number {} went on and on through the same wood. "


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for file in FILES:
        (folder / file).parent.mkdir(exist_ok=True)
        lines = (json.dumps({"text": f"{file} {SENTENCE.format(n)}" * (20 + n)}) + "\n" for n in range(6))
        (folder / file).write_text("".join(lines))
    return folder


def options(data: Path, out: Path, **changes: object) -> Options:
    return Options.parse({"data": data, "out": out, "quick": True, "jobs": 1, "seeds": (0,)} | changes)


def test_no_test_text_is_read_in_training(data: Path, tmp_path: Path) -> None:
    size = Corpus(characters=40_000, tested=3_000)
    folder = make_corpora(options(data, tmp_path), tmp_path / "corpora", size)
    for name in CORPORA:
        learned = "".join(read_texts(folder / f"{name}-train.jsonl"))
        (tested,) = read_texts(folder / f"{name}-test.jsonl")
        assert 0 < len(learned) <= size.characters
        assert 0 < len(tested) <= size.tested
        assert tested[:400] not in learned


def test_packages_are_whole() -> None:
    packages = packages_of(source_files())
    assert sum(map(len, packages.values())) > 5_000_000
    assert "class Future" in packages["asyncio"]
    assert "class Task" in packages["asyncio"]
    assert "import" in packages[""]


def test_rows_differ_in_nothing_but_their_difference(data: Path, tmp_path: Path) -> None:
    plan = Plan(options(data, tmp_path, quick=False))
    cells = [plan.cell(row, 0) for row in LABELS]
    sizes = [count(cell.model) for cell in cells]
    assert max(sizes) < 1.02 * min(sizes)
    assert abs(sizes[0] / FULL.parameters - 1) < 0.02
    own = {"intermediate_size", *(key for row in ROWS.values() for key in row)}
    assert len({str({k: v for k, v in cell.model.items() if k not in own}) for cell in cells}) == 1
    assert len({str(cell.model_dump(exclude={"id", "model"})) for cell in cells}) == 1
    for table, lines in TABLES.items():
        steps = plan.setting.steps * (plan.setting.longer if table == "longer" else 1)
        assert {steps} == {cell.steps for line in lines(plan) for cell in line.cells}
    alike = [cell for line in TABLES["longer"](plan) for cell in line.cells if cell.seed == 0]
    assert len({str(cell.model_dump(exclude={"id", "model"})) for cell in alike}) == 1
    assert all(cell.model["mixer_layers"] == [1] for cell in alike)


@pytest.mark.slow
def test_every_row_in_the_one_form(data: Path, tmp_path: Path) -> None:
    asked = options(data, tmp_path / "out")
    results = reproduce("block-state", asked)
    assert [row.id for row in results.rows] == list(LABELS)
    check_metrics(results, QUICK.lengths)
    assert len(results.aims) == 7
    assert {path.name for path in (tmp_path / "out").glob("length-*.png")} == {f"length-{c}.png" for c in CORPORA}
    assert reproduce("block-state", asked).rows == results.rows, "what is finished is read back"


def check_metrics(results: Results, lengths: tuple[int, ...]) -> None:
    for row in results.rows:
        wanted = {f"bpb_{corpus}_at_{length}" for corpus in CORPORA for length in lengths}
        wanted |= {f"bpb_{corpus}" for corpus in CORPORA} | {"train_tokens_per_s", "parameters", "peak_memory_bytes"}
        assert set(row.metrics) == wanted
        assert all(value_of(metric) > 0 for metric in row.metrics.values())


def test_some_rows_learn_longer(data: Path, tmp_path: Path) -> None:
    results = reproduce("block-state", options(data, tmp_path / "out", tables=("longer",)))
    assert [row.id for row in results.rows] == [f"longer-{row}" for row in LONGER]
    check_metrics(results, QUICK.lengths)
    assert [aim.met is not None for aim in results.aims] == [True] * 7
    assert set(results.details["tokens"].values()) == {QUICK.longer * QUICK.steps * QUICK.batch_size * QUICK.length}


def test_what_tables_share_is_measured_once(data: Path, tmp_path: Path) -> None:
    asked = options(data, tmp_path / "out", tables=("placement", "number"))
    results = reproduce("block-state", asked)
    assert [row.id for row in results.rows] == ["placement-0", "placement-1", "number-1", "number-2"]
    assert results.aims == []
    of = {row.id: row.metrics for row in results.rows}
    assert of["number-1"] == of["placement-1"] != of["number-2"]
    assert {path.name for path in (tmp_path / "out" / "cells").iterdir()} == {
        "placement-0_s0",
        "placement-1_s0",
        "number-2_s0",
    }


def test_mistakes(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"There is no table 'placment' in this experiment \(did you mean placement"):
        reproduce("block-state", options(data, tmp_path, tables=("placment",)))
    with pytest.raises(DataError, match="lacks lm_text/eltec_eng.jsonl: pass --data with a folder that holds"):
        reproduce("block-state", options(tmp_path, tmp_path))


def test_the_committed_results_are_of_this_form() -> None:
    results = Results.read(Path(block_state.__file__).parent)
    assert [row.id for row in results.rows][: len(LABELS)] == list(LABELS)
    check_metrics(results, FULL.lengths)
