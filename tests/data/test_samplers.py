"""Samplers choose what their equations say, the same for the same seed, and go on where they stopped."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlm.data.samplers import Pick, SamplerConfig, TaskSampler
from graftlm.errors import DataError

SIZES = {"large": 100, "middle": 25, "small": 4}


def uncertainties_of(picks: list[Pick]) -> list[float]:
    """An uncertainty that any two rows differ in."""
    return [math.sin(17.0 * pick.row + 3.0 * len(pick.task)) + 1 for pick in picks]


def annealed(steps: int | None, batch: int = 8) -> TaskSampler:
    return TaskSampler(SIZES, SamplerConfig(policy="annealed"), batch, steps=steps)


def run(sampler: TaskSampler, steps: int) -> list[list[Pick]]:
    return [sampler.choose(uncertainties_of(sampler.candidates())) for _ in range(steps)]


policies = st.sampled_from(["uniform", "size", "temperature", "entropy", "uncertainty"])


@given(policy=policies, batch=st.integers(1, 20), cut=st.integers(0, 6), seed=st.integers(0, 5))
def test_a_run_in_two_parts_chooses_what_one_run_does(policy: str, batch: int, cut: int, seed: int) -> None:
    config = SamplerConfig.parse({"policy": policy, "keep": 3, "floor": 0.5})
    whole = TaskSampler(SIZES, config, batch, seed)
    wanted = run(whole, 6)
    first = TaskSampler(SIZES, config, batch, seed)
    found = run(first, cut)
    second = TaskSampler(SIZES, config, batch, seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + run(second, 6 - cut) == wanted
    assert second.report() == whole.report()


@given(policy=policies, batch=st.integers(1, 20))
def test_a_batch_has_its_size_and_rows_that_there_are(policy: str, batch: int) -> None:
    for picks in run(TaskSampler(SIZES, SamplerConfig.parse({"policy": policy}), batch), 5):
        assert len(picks) == batch
        assert all(0 <= pick.row < SIZES[pick.task] for pick in picks)


@pytest.mark.parametrize("policy", ["uniform", "size", "temperature"])
def test_every_row_of_a_task_comes_before_any_comes_again(policy: str) -> None:
    picks = [
        pick for batch in run(TaskSampler(SIZES, SamplerConfig.parse({"policy": policy}), 8), 100) for pick in batch
    ]
    for task, size in SIZES.items():
        rows = [pick.row for pick in picks if pick.task == task]
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))
        assert rows[:size] != sorted(rows[:size]) or size < 3


@pytest.mark.parametrize(("policy", "alpha"), [("uniform", 0.0), ("size", 1.0), ("temperature", 0.5)])
def test_tasks_come_as_often_as_the_equation_says(policy: str, alpha: float) -> None:
    sampler = TaskSampler(SIZES, SamplerConfig.parse({"policy": policy, "alpha": 0.5}), 100)
    powers = {task: size**alpha for task, size in SIZES.items()}
    wanted = {task: power / sum(powers.values()) for task, power in powers.items()}
    assert sampler.shares() == pytest.approx(wanted)
    counts = Counter(pick.task for batch in run(sampler, 100) for pick in batch)
    for task, share in wanted.items():
        assert counts[task] / 10_000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 10_000))


def test_annealed_sampling_goes_from_sizes_to_nearly_even_shares() -> None:
    """N^alpha with alpha = 1 - 0.8 (e - 1) / (E - 1) for e = 1 to E, here by step."""
    sampler = annealed(5)
    for epoch in range(1, 7):
        alpha = 1 - 0.8 * (min(epoch, 5) - 1) / (5 - 1)
        powers = {task: math.exp(alpha * math.log(size)) for task, size in SIZES.items()}
        wanted = {task: power / sum(powers.values()) for task, power in powers.items()}
        assert sampler.shares() == pytest.approx(wanted)
        sampler.choose()
    assert annealed(1).shares() == pytest.approx({task: size / 129 for task, size in SIZES.items()})
    with pytest.raises(DataError, match="annealed"):
        annealed(None)


def test_annealed_sampling_resumes_at_its_exponent() -> None:
    whole = annealed(6)
    wanted = run(whole, 6)
    first = annealed(6)
    found = run(first, 2)
    second = annealed(6)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + run(second, 4) == wanted


def test_only_annealed_shares_depend_on_the_number_of_steps() -> None:
    assert annealed(6).horizon == 6
    assert TaskSampler(SIZES, SamplerConfig(policy="temperature"), 4, steps=6).horizon is None


def test_uncertain_tasks_come_more_often_under_entropy() -> None:
    sampler = TaskSampler(SIZES, SamplerConfig(policy="entropy", beta=2), 4)
    assert sampler.shares() == pytest.approx(dict.fromkeys(SIZES, 1 / 3))
    for task, value in (("large", 0.1), ("middle", 0.2), ("small", 0.4)):
        sampler.observe(task, [value, value])
    assert sampler.shares() == pytest.approx({"large": 1 / 21, "middle": 4 / 21, "small": 16 / 21})


def literal(candidates: dict[str, list[tuple[int, float, int]]], size: int, task_mean: bool) -> list[Pick]:
    """Algorithm 1, line by line: of each task (row, entropy, classes)."""
    means = {task: sum(h for _, h, _ in rows) / len(rows) for task, rows in candidates.items()}
    normed_means = {
        task: sum(h / math.log(classes) for _, h, classes in rows) / len(rows) for task, rows in candidates.items()
    }
    highest = max(means.values())
    measured = []
    for task, rows in candidates.items():
        for row, h, classes in rows:
            measure = h / math.log(classes)
            measure *= normed_means[task] / max(normed_means.values()) if task_mean else 1 / highest
            measured.append((measure, Pick(task, row)))
    measured.sort(key=lambda pair: -pair[0])
    return [pick for _, pick in measured[:size]]


@pytest.mark.parametrize("task_mean", [False, True])
@given(data=st.data(), batch=st.integers(1, 4))  # a task's rows are enough: no row is asked for twice
def test_uncertainty_chooses_what_algorithm_1_does(task_mean: bool, data: st.DataObject, batch: int) -> None:
    classes = {"large": 5, "middle": 2, "small": 3}
    sampler = TaskSampler(SIZES, SamplerConfig(policy="uncertainty", task_mean=task_mean), batch)
    asked = sampler.candidates()
    assert Counter(pick.task for pick in asked) == dict.fromkeys(SIZES, batch)
    scores = torch.tensor(data.draw(st.lists(st.integers(-400, 400), min_size=len(asked), max_size=len(asked)))) / 100
    rows = {task: [] for task in SIZES}
    values = []
    for pick, score in zip(asked, scores, strict=True):
        probabilities = torch.softmax(score * torch.arange(classes[pick.task], dtype=torch.double), dim=0)
        h = float(torch.special.entr(probabilities).sum())
        rows[pick.task].append((pick.row, h, classes[pick.task]))
        values.append(h / math.log(classes[pick.task]))
    assert sampler.choose(values) == literal(rows, batch, task_mean)


def test_candidates_are_the_same_until_they_are_chosen_from() -> None:
    sampler = TaskSampler(SIZES, SamplerConfig(policy="uncertainty"), 3)
    assert sampler.candidates() == sampler.candidates()
    before = sampler.candidates()
    sampler.choose(uncertainties_of(before))
    assert sampler.candidates() != before


def test_tasks_without_an_entropy_take_their_fixed_share() -> None:
    sampler = TaskSampler(SIZES, SamplerConfig(policy="uncertainty", fixed={"small": 0.3}), 5)
    assert {pick.task for pick in sampler.candidates()} == {"large", "middle"}
    counts = Counter(pick.task for batch in run(sampler, 20) for pick in batch)
    assert counts["small"] == 30
    assert sum(counts.values()) == 100


def score_of(pick: Pick) -> float:
    return {"large": 0.9, "middle": 0.5, "small": 0.1}[pick.task] + pick.row / 1000


def literal_highest(candidates: list[Pick], size: int, floor: dict[str, int]) -> Counter[Pick]:
    """The best rows of each task, as many as its floor, and then the best of all others."""
    best = sorted(candidates, key=lambda pick: -score_of(pick))
    first = [pick for task in SIZES for pick in [pick for pick in best if pick.task == task][: floor[task]]]
    others = [pick for pick in best if pick not in first]
    return Counter((first + others)[:size])


def test_no_task_falls_below_its_floor() -> None:
    """Tasks of low scores get floor / T of all rows, and no more; by their own best rows."""
    sampler = TaskSampler(SIZES, SamplerConfig(policy="uncertainty", floor=0.5), 4)
    counts: Counter[str] = Counter()
    for step in range(30):
        asked = sampler.candidates()
        due = {task: int((step + 1) * 4 * 0.5 / 3) - int(step * 4 * 0.5 / 3) for task in SIZES}
        picks = sampler.choose([score_of(pick) for pick in asked])
        assert Counter(picks) == literal_highest(asked, 4, due)
        counts.update(pick.task for pick in picks)
    assert counts == {"large": 80, "middle": 20, "small": 20}, "120 rows: a sixth for each, and the rest by score"


@pytest.mark.parametrize(("passes", "steps"), [(5.0, 30), (2.5, 7)])
def test_candidates_make_as_many_passes_as_the_config_says(passes: float, steps: int) -> None:
    config = SamplerConfig(policy="uncertainty", passes=passes)
    sampler = TaskSampler(SIZES, config, 4, steps=steps)
    asked: Counter[Pick] = Counter()
    for _ in range(steps):
        candidates = sampler.candidates()
        asked.update(candidates)
        assert len(sampler.choose(uncertainties_of(candidates))) == 4
    for task, size in SIZES.items():
        counts = [asked[Pick(task, row)] for row in range(size)]
        assert sum(counts) == int(passes * size)
        assert max(counts) - min(counts) <= 1, "no row is a candidate again before all others were"
    with pytest.raises(DataError):
        TaskSampler(SIZES, SamplerConfig(policy="uncertainty", passes=1), 4, steps=30)


def test_a_score_serves_for_some_steps() -> None:
    """With `keep` the choice is that of kept scores, and a row is scored again after that many steps alone."""
    sampler = TaskSampler({"only": 4}, SamplerConfig(policy="uncertainty", keep=3), 2)
    scored: dict[int, list[int]] = {}
    table: dict[int, float] = {}
    for step in range(8):
        asked = sampler.candidates()
        for pick in asked:
            scored.setdefault(pick.row, []).append(step)
            table[pick.row] = math.cos(5.0 * pick.row + step)
        assert len(sampler.choose([table[pick.row] for pick in asked])) == 2
    assert min(len(steps) for steps in scored.values()) >= 2
    assert all(later - earlier >= 3 for steps in scored.values() for earlier, later in pairwise(steps))


def test_kept_scores_decide() -> None:
    sampler = TaskSampler({"only": 4}, SamplerConfig(policy="uncertainty", keep=9), 4)
    first = sampler.choose([0.1 * (4 - pick.row) for pick in sampler.candidates()])
    assert not sampler.candidates(), "all rows have a score"
    assert sampler.choose() == first == [Pick("only", row) for row in range(4)]


def test_the_report_counts_rows_once() -> None:
    sampler = TaskSampler({"only": 4}, SamplerConfig(), 3)
    run(sampler, 1)
    assert sampler.report()["data_share"] == 0.75
    run(sampler, 2)
    found = sampler.report()
    assert found["data_share"] == 1.0
    assert found["picked"] == 9
    assert found["steps"] == [{"only": 3}] * 3


@pytest.mark.parametrize(
    ("sizes", "settings", "batch", "found"),
    [
        ({"empty": 0}, {}, 4, "empty"),
        ({}, {}, 4, "no task"),
        (SIZES, {}, 0, "batch_size"),
        (SIZES, {"fixed": {"small": 0.2}}, 4, "uniform"),
        (SIZES, {"policy": "uncertainty", "fixed": {"tiny": 0.2}}, 4, "'tiny'"),
        (SIZES, {"policy": "uncertainty", "fixed": {"small": 1.5}}, 4, "1.5"),
        (SIZES, {"policy": "uncertainty", "fixed": {"small": 0.5, "middle": 0.5}}, 4, "fixed shares"),
    ],
)
def test_settings_that_do_not_fit(sizes: dict[str, int], settings: dict, batch: int, found: str) -> None:
    config = SamplerConfig.parse(settings)
    with pytest.raises(DataError) as error:
        TaskSampler(sizes, config, batch)
    assert found in str(error.value)


def test_uncertainties_are_finite_numbers_for_all_candidates() -> None:
    sampler = TaskSampler(SIZES, SamplerConfig(policy="uncertainty"), 2)
    with pytest.raises(DataError):
        sampler.choose([0.5])
    with pytest.raises(DataError) as error:
        sampler.choose([math.nan, 0, 0, 0, 0, 0])
    assert "nan" in str(error.value)
    with pytest.raises(DataError) as error:
        sampler.observe("huge", [0.1])
    assert "'huge'" in str(error.value)
    with pytest.raises(DataError) as error:
        sampler.observe("large", [-0.1])
    assert "-0.1" in str(error.value)
    with pytest.raises(DataError) as error:
        sampler.observe("large", [0.5, math.inf])
    assert "inf" in str(error.value)


def test_a_state_of_other_tasks_is_refused() -> None:
    state = TaskSampler(SIZES, SamplerConfig(), 2).state_dict()
    with pytest.raises(DataError):
        TaskSampler({"other": 3}, SamplerConfig(), 2).load_state_dict(state)
