"""The block-state experiment at its quick size: texts, rows, results and errors."""

from __future__ import annotations

import json
import re
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments import Options, block_state, reproduce
from experiments.block_state.run import (
    BLOCK_STATE,
    CORPORA,
    FILES,
    FULL,
    ROWS,
    Corpus,
    LongTextStudy,
    aims,
    cells,
    differences,
    make_corpora,
    packages_of,
)
from experiments.block_state.words import losses_by_distance, word_tokens
from experiments.parents import read_texts
from experiments.python_texts import source_files
from experiments.sequence_rows import ROWS as DIFFERENCES
from experiments.sequence_rows import parameter_count
from graftlm.errors import DataError
from graftlm.evaluation import Interval, Results
from graftlm.runs.language_run import LanguageModelRun
from graftlm.training.language_model import train_tokenizer
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


@pytest.mark.slow
def test_training_text_does_not_contain_test_text(data: Path, tmp_path: Path) -> None:
    size = Corpus(vocab_size=300, characters=40_000, test_characters=3_000)
    folder = make_corpora(options_for(data, tmp_path), tmp_path / "corpora", size)
    for name in CORPORA:
        train = "".join(read_texts(folder / f"{name}-train.jsonl"))
        (test,) = read_texts(folder / f"{name}-test.jsonl")
        assert 0 < len(train) <= size.characters
        (validation,) = read_texts(folder / f"{name}-validation.jsonl")
        assert 0 < len(test) <= size.test_characters
        assert 0 < len(validation) <= size.test_characters
        starts = range(0, len(test) - 100, 100)
        assert not any(
            test[start : start + 100] in train or test[start : start + 100] in validation for start in starts
        )


@pytest.mark.slow
def test_a_package_has_the_source_of_all_its_modules() -> None:
    packages = packages_of(source_files())
    assert sum(map(len, packages.values())) > 5_000_000
    assert "class Future" in packages["asyncio"]
    assert "class Task" in packages["asyncio"]
    assert "import" in packages[""]


def without_difference(run: LanguageModelRun) -> str:
    """The settings that all rows share, in order."""
    difference = {"intermediate_size", *(name for row in DIFFERENCES.values() for name in row)}
    settings = run.settings()
    settings["model"] = {name: value for name, value in settings["model"].items() if name not in difference}
    return json.dumps(settings, sort_keys=True)


@pytest.mark.slow
def test_rows_have_equal_size_and_one_difference(data: Path, tmp_path: Path) -> None:
    study = LongTextStudy(options_for(data, tmp_path, quick=False))
    runs = [study.run(row, 0, 1e-3) for row, _ in cells(("attribution", "layouts")).values()]
    assert len({without_difference(run) for run in runs}) == 1
    models: list[Any] = [run.model for run in runs]
    sizes = [parameter_count(model) for model in models]
    assert max(sizes) < 1.02 * min(sizes)
    assert abs(sizes[0] / FULL.parameters - 1) < 0.02
    assert {model["state_size"] for model in models} == {64}


@pytest.mark.slow
def test_other_sizes_and_windows_differ_in_nothing_else(data: Path, tmp_path: Path) -> None:
    """A variant's rows have its width or window, one size, and the attribution's data and training."""
    study = LongTextStudy(options_for(data, tmp_path, quick=False))
    expected = {"width192": ("hidden_size", 192), "width384": ("hidden_size", 384)}
    expected |= {"window32": ("window", 32), "window512": ("window", 512)}
    by_variant: dict[str, list[LanguageModelRun]] = {}
    for row, variant in cells(("scale", "window")).values():
        by_variant.setdefault(variant, []).append(study.run(row, 0, 1e-3, variant))
    assert by_variant.keys() == expected.keys()
    base = json.loads(without_difference(study.run("slide", 0, 1e-3)))
    for variant, runs in by_variant.items():
        key, value = expected[variant]
        sizes = [parameter_count(run.model) for run in runs if isinstance(run.model, dict)]
        assert max(sizes) < 1.01 * min(sizes)
        (shared,) = {without_difference(run) for run in runs}
        changed = json.loads(shared)
        model = changed.pop("model")
        assert changed == {name: part for name, part in base.items() if name != "model"}
        names = {name for name in model if model[name] != base["model"][name]}
        assert names - {"initializer_range"} == {key}
        assert model[key] == value


@pytest.mark.slow
def test_rows_are_searched_and_measured_on_words(data: Path, tmp_path: Path) -> None:
    options = options_for(data, tmp_path / "out", tables=("attribution", "window"))
    results = reproduce("block-state", options)
    assert [row.id for row in results.rows] == list(cells(("attribution", "window")))
    assert [row.id for row in results.rows][: len(ROWS)] == list(ROWS)
    details: Any = results.details
    assert details["search"].keys() == {row.id for row in results.rows}
    best = details["best_block_state"]
    assert best.keys() == {"", "window32", "window512"}
    assert best[""] in BLOCK_STATE
    assert sorted([*details["differences"], *best.values()]) == sorted(row.id for row in results.rows)
    for rival, variant in {"slide": "", "slide_window32": "window32"}.items():
        own = details["by_seed"][best[variant]].values()
        pairs = zip(own, details["by_seed"][rival].values(), strict=True)
        expected = [mine["bpb_code"] - other["bpb_code"] for mine, other in pairs]
        assert details["differences"][rival]["bpb_code"]["mean"] == pytest.approx(np.mean(expected))
    for row in results.rows:
        assert {f"bpb_{corpus}" for corpus in CORPORA} <= row.metrics.keys()
        assert any(name.startswith("nats_documents_to_") for name in row.metrics)
    assert reproduce("block-state", options).rows == results.rows, "finished runs are read from the cache"


FAR, FIRST = "nats_novels_to_1024", "nats_novels_first"


def test_differences_are_paired_over_seeds() -> None:
    """A rival's seeds differ more than the rows do: the interval is of the differences."""
    by_seed = {
        "own": {"0": {FAR: 3.0, FIRST: 1.0, "bpb_validation_novels": 1.0}, "1": {FAR: 5.0, FIRST: 2.0}},
        "rival": {"0": {FAR: 3.2, FIRST: 1.1}, "1": {FAR: 5.21, FIRST: 2.1}},
    }
    found = differences(by_seed, "own", "rival")
    assert found.keys() == {FAR, FIRST, f"{FAR}_less_first"}
    assert found[f"{FAR}_less_first"].mean == pytest.approx(-0.105)
    interval = found[FAR]
    assert interval.mean == pytest.approx(-0.205)
    assert -0.3 < interval.low < interval.mean < interval.high < -0.1


def test_aims_count_words_beyond_the_window_and_the_whole_interval() -> None:
    below, around = Interval(mean=-0.2, low=-0.3, high=-0.1), Interval(mean=-0.2, low=-0.5, high=0.1)
    names = ("nats_novels_to_128", "nats_novels_to_1024", "nats_code_to_16384", "nats_novels_first", "bpb_novels")
    shown = aims("sh_delta", "slide_ssm", dict(zip(names, (below, below, around, below, below), strict=True)))
    assert [(one.metric, one.met) for one in shown] == [("nats_novels_to_1024", True), ("nats_code_to_16384", False)]


class ByPosition(torch.nn.Module):
    """Gives the next token of position t in a window log p = -t."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        length = input_ids.shape[1]
        nats = torch.arange(length, dtype=torch.float64)
        rest = torch.log(-torch.expm1(-nats.clamp(min=1e-9)) / (VOCABULARY - 1))
        logits = rest[:, None].expand(-1, VOCABULARY).clone()
        logits[torch.arange(length - 1), input_ids[0, 1:]] = -nats[:-1]
        return SimpleNamespace(logits=logits[None])


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
    losses = losses_by_distance(ByPosition(), tokens, len(tokens.ids), limits)
    expected = {"first": 0, f"to_{limits[0]}": found[1], f"to_{limits[1]}": found[2]}
    assert losses.keys() == expected.keys()
    for name, distance in expected.items():  # the loss of a token is its position, less one
        positions = np.flatnonzero(tokens.distance == distance)
        assert losses[name] == pytest.approx(float(positions[positions > 0].mean()) - 1, rel=1e-5)
    short = losses_by_distance(
        ByPosition(), tokens, at[1] + 8, limits
    )  # the third stands in a window without the second
    assert short.keys() == {"first", f"to_{limits[0]}"}


def test_a_word_has_the_tokens_that_begin_with_a_space_and_no_digits() -> None:
    tokenizer = train_tokenizer([SENTENCE.format(1) * 50], 300)
    text = "a wonderful day, wonderful days of snake_case 123456"  # " w" is a token
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    assert any(text[start] == " " and end > start + 1 for start, end in encoded["offset_mapping"])
    inside = zip(encoded["offset_mapping"], word_tokens(tokenizer, text).distance, strict=True)
    words = "".join(text[start:end] for (start, end), distance in inside if distance >= 0)
    assert words.replace(" ", "") == "wonderfulwonderfulsnake"


def test_missing_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        reproduce("block-state", options_for(tmp_path, tmp_path))
    assert "lm_text/eltec_eng.jsonl" in str(error.value)


def test_the_committed_results_have_every_row() -> None:
    results = Results.read(Path(block_state.__file__).parent)
    measured = [row for row in cells(("attribution", "scale", "window")) if row != "slide_ssm_width384"]
    assert [row.id for row in results.rows] == measured
    assert results.seeds == [0, 1, 2]
    details: Any = results.details
    for row, searched in details["search"].items():
        assert min(searched, key=searched.get) == f"{row}_lr{details['rates'][row]:g}_s0"
    best, shown = details["best_block_state"], cells(("attribution", "scale", "window"))
    rivals = [row.id for row in results.rows if row.id.startswith("slide_ssm")]
    far = [f"nats_{corpus}_to_{distance}" for corpus in CORPORA for distance in (1024, 16_384)]
    expected_aims = [(name, details["differences"][rival][name]["high"]) for rival in rivals for name in far]
    assert [(one.metric, one.measured) for one in results.aims] == expected_aims
    assert best[""] == min(BLOCK_STATE, key=lambda row: min(details["search"][row].values()))
    assert best.keys() == {variant for _, variant in shown.values()}
    for rival, of_rival in details["differences"].items():
        expected = differences(details["by_seed"], best[shown[rival][1]], rival)
        assert of_rival.keys() == expected.keys()
        for name, interval in of_rival.items():
            assert interval["mean"] == pytest.approx(expected[name].mean, abs=1e-9)
            assert interval["low"] == pytest.approx(expected[name].low, abs=1e-9)
            assert interval["high"] == pytest.approx(expected[name].high, abs=1e-9)
    for row, by_seed in details["by_seed"].items():
        seeds = 1 if shown[row][1] == "window512" else 3
        assert list(by_seed) == [f"{row}_lr{details['rates'][row]:g}_s{seed}" for seed in range(seeds)]
        two = ("block_recurrent_window512", "sh_delta_window512", "slide_ssm_width192")
        assert len(details["search"][row]) == (1 if row == "sh_delta_reset_width192" else 2 if row in two else 3)


def test_the_intervals_of_the_readme_are_those_of_the_results() -> None:
    """Every quoted interval is a difference of two rows, paired over seeds."""
    folder = Path(block_state.__file__).parent
    details: Any = Results.read(folder).details
    by_seed = {row: seeds for row, seeds in details["by_seed"].items() if len(seeds) == 3}
    known = set()
    for row, rival in permutations(by_seed, 2):
        for interval in differences(by_seed, row, rival).values():
            known.add(written(interval))
    text = (folder / "README.md").read_text(encoding="utf-8")
    intervals = re.findall(r"-?\d\.\d{3} \[-?\d\.\d{3}, -?\d\.\d{3}\]", text)
    assert intervals
    assert not {interval.replace("-0.000", "0.000") for interval in intervals} - known


def written(interval: Any) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]".replace("-0.000", "0.000")
