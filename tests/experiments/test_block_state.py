"""The block-state experiment at its quick size: texts, rows, results and errors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments import Options, block_state, reproduce
from experiments.block_state.run import (
    ATTRIBUTION,
    CORPORA,
    FILES,
    FULL,
    QUICK,
    Corpus,
    LongTextStudy,
    make_corpora,
    packages_of,
)
from experiments.block_state.words import losses_by_distance, word_tokens
from experiments.parents import read_texts
from experiments.sequence_rows import LABELS, ROWS, parameter_count
from graftlm.demo.corpus import source_files
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results, value_of
from graftlm.runs.language_run import LanguageModelRun
from tiny import tiny_tokenizer

SENTENCE = "The long road of document number {} went on and on through the same wood. "


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for file in FILES:
        (folder / file).parent.mkdir(exist_ok=True)
        lines = (json.dumps({"text": f"{file} {SENTENCE.format(n)}" * (20 + n)}) + "\n" for n in range(6))
        (folder / file).write_text("".join(lines))
    return folder


def options_for(data: Path, out: Path, **changes: object) -> Options:
    return Options.parse({"data": data, "out": out, "quick": True, "jobs": 1, "seeds": (0,)} | changes)


def test_training_text_does_not_contain_test_text(data: Path, tmp_path: Path) -> None:
    size = Corpus(vocab_size=300, characters=40_000, test_characters=3_000)
    folder = make_corpora(options_for(data, tmp_path), tmp_path / "corpora", size)
    for name in CORPORA:
        train = "".join(read_texts(folder / f"{name}-train.jsonl"))
        (test,) = read_texts(folder / f"{name}-test.jsonl")
        assert 0 < len(train) <= size.characters
        assert 0 < len(test) <= size.test_characters
        assert test[:400] not in train


def test_a_package_has_the_source_of_all_its_modules() -> None:
    packages = packages_of(source_files())
    assert sum(map(len, packages.values())) > 5_000_000
    assert "class Future" in packages["asyncio"]
    assert "class Task" in packages["asyncio"]
    assert "import" in packages[""]


def without_difference(run: LanguageModelRun) -> str:
    """The settings that all rows share, in order."""
    difference = {"intermediate_size", *(name for row in ROWS.values() for name in row)}
    settings = run.settings()
    settings["model"] = {name: value for name, value in settings["model"].items() if name not in difference}
    return json.dumps(settings, sort_keys=True)


def test_rows_have_equal_size_and_one_difference(data: Path, tmp_path: Path) -> None:
    runs = LongTextStudy(options_for(data, tmp_path, quick=False))
    main = [runs.run(row, 0) for row in LABELS]
    sizes = [parameter_count(run.model) for run in main]
    assert max(sizes) < 1.02 * min(sizes)
    assert abs(sizes[0] / FULL.parameters - 1) < 0.02
    assert len({without_difference(run) for run in main}) == 1
    tables = [run for table in ("1", "placement", "number", "state") for row in runs.table(table) for run in row.runs]
    assert {run.training.steps for run in tables} == {FULL.training.steps}
    rows = [runs.attribution_run(row, 0, 1e-3) for row in ATTRIBUTION]
    assert len({without_difference(run) for run in rows}) == 1
    sizes = [parameter_count(run.model) for run in rows]
    assert max(sizes) < 1.02 * min(sizes)
    assert {run.model["state_size"] for run in rows} == {64}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_table_1_has_every_row_and_metric(data: Path, tmp_path: Path) -> None:
    options = options_for(data, tmp_path / "out", tables=("1",))
    results = reproduce("block-state", options)
    assert [row.id for row in results.rows] == list(LABELS)
    check_metrics(results, QUICK.lengths)
    assert len(results.aims) == 7
    assert {path.name for path in (tmp_path / "out").glob("length-*.png")} == {f"length-{c}.png" for c in CORPORA}
    assert reproduce("block-state", options).rows == results.rows, "finished runs are read from the cache"


def check_metrics(results: Results, lengths: tuple[int, ...]) -> None:
    for row in results.rows:
        expected = {f"bpb_{corpus}_at_{length}" for corpus in CORPORA for length in lengths}
        expected |= {f"bpb_{corpus}" for corpus in CORPORA} | {"train_tokens_per_s", "parameters", "peak_memory_bytes"}
        assert set(row.metrics) == expected
        assert all(value_of(metric) > 0 for metric in row.metrics.values())


@pytest.mark.exhaustive
def test_rows_of_the_attribution_are_searched_and_measured_on_words(data: Path, tmp_path: Path) -> None:
    results = reproduce("block-state", options_for(data, tmp_path / "out"))
    assert [row.id for row in results.rows] == [f"attribution-{row}" for row in ATTRIBUTION]
    assert set(results.details["search"]) == set(ATTRIBUTION)
    for row in results.rows:
        assert {f"bpb_{corpus}" for corpus in CORPORA} <= row.metrics.keys()
        assert any(name.startswith("nats_documents_to_") for name in row.metrics)


class Uniform(torch.nn.Module):
    """Predicts every token alike, but makes one id as likely as its logit says."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, -1))


VOCABULARY = 280


def test_words_count_by_how_far_back_they_last_stood() -> None:
    """A word's tokens have the distance to its last occurrence in the window; short words and gaps have none."""
    tokenizer = tiny_tokenizer(VOCABULARY)
    filler = " a b c" * 5
    text = f"garden{filler} garden{filler * 8} garden rivers"
    tokens = word_tokens(tokenizer, text)
    starts = [match.start() for match in re.finditer("garden|rivers", text)]
    at = [len(tokenizer(text[:start], add_special_tokens=False)["input_ids"]) for start in starts]
    found = [int(tokens.distance[position]) for position in at]
    assert found == [0, at[1] - at[0], at[2] - at[1], 0]
    assert (tokens.distance == -1).sum() > 100
    limits = (found[1], found[2])
    losses = losses_by_distance(Uniform(), tokens, len(tokens.ids), limits)
    assert losses.keys() == {"first", *(f"to_{limit}" for limit in limits)}
    assert all(loss == pytest.approx(math.log(VOCABULARY)) for loss in losses.values())
    short = losses_by_distance(Uniform(), tokens, at[1] + 8, limits)  # the third stands in a window without the second
    assert short.keys() == {"first", f"to_{limits[0]}"}


@pytest.mark.exhaustive
def test_tables_share_runs_with_equal_settings(data: Path, tmp_path: Path) -> None:
    options = options_for(data, tmp_path / "out", tables=("placement", "number"))
    results = reproduce("block-state", options)
    assert [row.id for row in results.rows] == ["placement-0", "placement-1", "number-1", "number-2"]
    assert results.aims == []
    metrics = {row.id: row.metrics for row in results.rows}
    assert metrics["number-1"] == metrics["placement-1"] != metrics["number-2"]
    assert {path.stem for path in (tmp_path / "out" / "runs" / "measurements").iterdir()} == {
        "bst_sh_s4d_2-steps_s0",
        "bst_sh_s4d_mixer_layers-1_2-steps_s0",
        "bst_sh_s4d_mixer_layers-0-1_2-steps_s0",
    }


def test_an_unknown_table_and_missing_data_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"There is no table 'placment' in this experiment \(did you mean placement"):
        reproduce("block-state", options_for(data, tmp_path, tables=("placment",)))
    with pytest.raises(DataError, match="lacks lm_text/eltec_eng.jsonl: pass --data with a folder that holds"):
        reproduce("block-state", options_for(tmp_path, tmp_path))


def test_the_committed_results_have_every_row_and_metric() -> None:
    results = Results.read(Path(block_state.__file__).parent)
    assert [row.id for row in results.rows] == [f"attribution-{row}" for row in ATTRIBUTION]
