"""Tasks: what is read, what each metric makes of the same answers, and intervals that mean what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlm.errors import DataError, EvaluationError, RecipeError
from graftlm.evaluation import (
    Example,
    Task,
    TaskConfig,
    TaskResult,
    chrf,
    measure_task,
    paired_difference,
    read_task,
    score_answers,
)
from tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{i}+{i}=", "answer": f"{2 * i}"} for i in range(8)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def task_of(path: Path | str, **values: Any) -> Task:
    return read_task(TaskConfig.parse({"path": str(path), "metric": "exact-match"} | values))


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`answering(function)` makes every model answer as the function does, and notes what it was requests."""
    requests: list[dict[str, Any]] = []

    def use(answer: Any) -> list[dict[str, Any]]:
        def generate(model: Any, tokenizer: Any, prompts: list[str], **settings: Any) -> list[str]:
            requests.append({"prompts": prompts} | settings)
            return [answer(prompt) for prompt in prompts]

        monkeypatch.setattr("graftlm.evaluation.tasks.generate_answers", generate)
        return requests

    return use


def solve(prompt: str) -> str:
    """Right but for the sum of 3 and 3."""
    last = prompt.rpartition("\n")[2]
    return " 7" if last.startswith("3") else f"{2 * int(last[0])} "


# Reading


def test_examples_come_from_columns(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text('q,a\n"one, two",x\nthree,"y\nz"\n')
    task = task_of(tmp_path / "qa.csv", prompt_column="q", answer_column="a")
    assert task.examples == (Example("one, two", "x"), Example("three", "y\nz"))
    assert task.prompts() == ["one, two", "three"]


def test_shots_stand_before_every_prompt_and_do_not_count(file: Path) -> None:
    task = task_of(file, shots=2, limit=3)
    assert [example.prompt for example in task.examples] == ["2+2=", "3+3=", "4+4="]
    assert task.prompts()[0] == "0+0=0\n\n1+1=2\n\n2+2="
    assert len(task_of(file).examples) == 8


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"path": "no/such.jsonl"}, "no/such.jsonl"),
        ({"path": "FOLDER"}, "FOLDER"),
        ({"path": "notes.txt"}, "notes.txt"),
        ({"prompt_column": "ask"}, "prompt_column"),
        ({"answer_column": "x"}, "answer_column"),
        ({"shots": 8}, "8"),
        ({"path": "empty.jsonl"}, "empty.jsonl"),
        ({"path": "numbers.jsonl"}, "'answer'"),
    ],
)
def test_files_without_a_task(file: Path, values: dict, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    Path("FOLDER").mkdir()
    Path("notes.txt").write_text("x")
    Path("empty.jsonl").touch()
    Path("numbers.jsonl").write_text('{"prompt": "1+1=", "answer": 2}')
    with pytest.raises(DataError) as caught:
        task_of(**({"path": file.name} | values))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "values", [{"metric": "bleu"}, {"stop": ["\n", ""]}, {"stops": []}, {"max_new_tokens": 0}], ids=str
)
def test_bad_configs(values: dict) -> None:
    with pytest.raises(RecipeError) as caught:
        TaskConfig.parse({"path": "x", "metric": "chrf"} | values)
    assert next(iter(values)) in str(caught.value)


# Measuring


def test_exact_match(file: Path, answering: Any) -> None:
    requests = answering(solve)
    task = task_of(file, stop=["\n", "."], max_new_tokens=5)
    outcome = measure_task(None, None, task, batch_size=3)
    assert outcome.value == 7 / 8
    metrics = outcome.metrics("sums")
    assert set(metrics) == {"sums_exact-match"}
    assert metrics["sums_exact-match"].low < 7 / 8 < metrics["sums_exact-match"].high < 1
    assert requests == [{"prompts": task.prompts(), "max_new_tokens": 5, "stop": ["\n", "."], "batch_size": 3}]
    described = outcome.describe(task)
    assert described["examples"] == 8
    assert described["samples"][3] == {"prompt": "3+3=", "expected": "6", "answer": " 7"}
    assert json.loads(json.dumps(described)) == described


@pytest.mark.parametrize(("metric", "beta"), [("chrf", 2), ("chrf1", 1)])
def test_chrf(file: Path, answering: Any, metric: str, beta: int) -> None:
    answering(solve)
    task = task_of(file, metric=metric)
    outcome = measure_task(None, None, task)
    assert outcome.value == pytest.approx(chrf(outcome.answers, task.examples, beta=beta))
    metrics = outcome.metrics("sums")[f"sums_{metric}"]
    assert metrics.low <= metrics.mean == outcome.value <= metrics.high
    assert metrics.low < metrics.high
    assert outcome.describe(task)["signature"].startswith(f"chrF{beta}|nrefs:1|")


@pytest.mark.parametrize(("metric", "beta"), [("chrf", 2), ("chrf1", 1)])
def test_chrf1_weighs_precision_like_recall(tmp_path: Path, answering: Any, metric: str, beta: int) -> None:
    """All n-grams of the answer abc are in the reference abcd: 3 of its 4 letters, 2 of 3 pairs and 1 of 2 triples."""
    from sacrebleu.metrics.chrf import CHRF

    (tmp_path / "letters.csv").write_text("prompt,answer\nspell,abcd\n")
    answering(lambda prompt: "abc")
    outcome = measure_task(None, None, task_of(tmp_path / "letters.csv", metric=metric))
    expected = CHRF(beta=beta).corpus_score(["abc"], [["abcd"]]).score
    assert outcome.value == pytest.approx(expected)
    precision = 1
    recall = (3 / 4 + 2 / 3 + 1 / 2) / 3
    by_hand = (1 + beta**2) * precision * recall / (beta**2 * precision + recall)
    assert outcome.value == pytest.approx(100 * by_hand)


def test_log_perplexity(file: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    task = task_of(file, metric="log-perplexity", shots=1)
    outcome = measure_task(model, tokenizer, task, batch_size=3)
    requests = [Example(prompt, example.answer) for prompt, example in zip(task.prompts(), task.examples, strict=True)]
    scores = score_answers(model, tokenizer, requests)
    metrics = outcome.metrics("sums")
    assert outcome.value == pytest.approx(scores.value("nats_per_token"), rel=1e-6)
    assert metrics["sums_log-perplexity"].mean == outcome.value
    assert metrics["sums_log-perplexity_bpb"].mean == pytest.approx(scores.value("bits_per_byte"), rel=1e-6)
    assert outcome.answers == []
    other = measure_task(tiny_model("llama", seed=1), tokenizer, task)
    gain = other.gain("sums", outcome)["sums_log-perplexity_gain"]
    expected = paired_difference(scores, score_answers(tiny_model("llama", seed=1), tokenizer, requests))
    assert gain.mean == pytest.approx(expected.mean, abs=1e-5)
    assert [gain.low, gain.high] == pytest.approx(
        [expected.low, expected.high], abs=0.3 * (expected.high - expected.low)
    )


# Intervals


def shares(right: list[int]) -> TaskResult:
    return TaskResult("exact-match", np.array([[value, 1] for value in right], dtype=np.float64))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=60))
def test_intervals_of_shares_hold_the_share_and_are_never_certain(right: list[int]) -> None:
    metrics = shares(right).metrics("a")["a_exact-match"]
    assert 0 <= metrics.low <= metrics.mean == sum(right) / len(right) <= metrics.high <= 1
    assert metrics.high - metrics.low > 0.01


def test_intervals_of_shares_are_wilson_s() -> None:
    metrics = shares([1] * 8 + [0] * 2).metrics("a")["a_exact-match"]
    assert (metrics.low, metrics.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson 1927, by any calculator
    none = shares([0] * 100).metrics("a")["a_exact-match"]
    assert (none.low, none.high) == pytest.approx((0, 0.0370), abs=1e-4)


def test_a_gain_is_paired() -> None:
    chance = np.random.default_rng(0)
    base = chance.integers(0, 2, 200)
    better = np.where(chance.random(200) < 0.1, 1, base)
    gain = shares(better.tolist()).gain("a", shares(base.tolist()))["a_exact-match_gain"]
    assert gain.mean == pytest.approx((better - base).mean())
    assert 0 < gain.low < gain.mean < gain.high
    alone = shares(better.tolist()).metrics("a")["a_exact-match"]
    assert gain.high - gain.low < 0.7 * (alone.high - alone.low)
    lower = shares(base.tolist()).gain("a", shares(better.tolist()))["a_exact-match_gain"]
    assert lower.mean == -gain.mean


@pytest.mark.slow
def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    chance, covered = np.random.default_rng(1), 0
    for _ in range(100):
        nats = chance.gamma(4.0, 5.0, size=60)
        sums = np.stack([nats, np.full(60, 10.0), np.full(60, 40.0)], axis=1)
        metrics = TaskResult("log-perplexity", sums).metrics("a")
        covered += metrics["a_log-perplexity"].low <= 2.0 <= metrics["a_log-perplexity"].high
        assert metrics["a_log-perplexity_bpb"].mean == pytest.approx(nats.sum() / 2400 / math.log(2))
    assert 86 <= covered <= 99


def test_results_of_other_examples_do_not_pair() -> None:
    with pytest.raises(EvaluationError):
        shares([1, 0]).gain("a", shares([1]))
