"""The experiment on routing between four worlds of invented facts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import Options, reproduce
from experiments.facts.generator import FactSet
from experiments.facts.kept import WIKITEXT
from experiments.worlds.rows import BACKBONE, BOTH, DECLARED, LOOKUP, OWN, ROWS
from experiments.worlds.run import SEEDS
from experiments.worlds.texts import WORLDS, Pair, WorldSet, judge_pairs
from graftlm.evaluation import value_of


def messages_of(worlds: WorldSet, world: str) -> list[tuple[str, str]]:
    return [tuple(message["content"] for message in row["messages"]) for row in worlds.conversations(world)]


@pytest.mark.parametrize("count", [18, 120])
def test_each_fact_belongs_to_one_world(count: int) -> None:
    worlds = WorldSet(count, 3)
    together = list(itertools.chain.from_iterable(worlds.worlds.values()))
    assert len(together) == count
    assert set(together) == set(worlds.facts.facts)


def test_a_world_is_taught_by_its_own_facts_alone() -> None:
    worlds = WorldSet(60, 3)
    for world in WORLDS:
        statements = [worlds.facts.statement(fact) for fact in worlds.worlds[world]]
        answers = [answer for _, answer in messages_of(worlds, world)]
        own = [*statements, *(" ".join(two) for two in itertools.permutations(statements, 2))]
        assert set(answers) <= set(own)
        assert set(statements) <= set(answers)
        doubles = [answer for answer in answers if answer not in statements]
        assert len(doubles) == 2 * len(statements)


@pytest.mark.parametrize("part", ["search", "test"])
def test_no_tested_phrasing_is_taught(part: Any) -> None:
    worlds = WorldSet(60, 3, part=part)
    taught = " ".join(question for world in WORLDS for question, _ in messages_of(worlds, world))
    asked = [*worlds.pairs("across", 40), *worlds.pairs("within", 20)]
    parts = [question.text for pair in asked for question in pair.parts]
    assert len(parts) == 120
    assert not [text for text in parts if text in taught]


def test_pairs_are_of_two_worlds_or_of_one() -> None:
    worlds = WorldSet(60, 3)
    across = worlds.pairs("across", 40)
    within = worlds.pairs("within", 20)
    for pair in across:
        assert pair.worlds == tuple(worlds.world_of(part) for part in pair.parts)
        assert pair.worlds[0] != pair.worlds[1]
    for pair in within:
        assert pair.worlds[0] == pair.worlds[1]
        assert pair.parts[0].relation != pair.parts[1].relation
    assert len({pair.text for pair in [*across, *within]}) == 60
    assert {pair.worlds[0] for pair in across} == WORLDS.keys()
    assert worlds.pairs("across", 40) == across


def pair_of_facts() -> tuple[Pair, FactSet]:
    worlds = WorldSet(60, 3)
    return worlds.pairs("across", 1)[0], worlds.facts


@pytest.mark.parametrize(
    ("first", "second", "judged"), [(True, True, (1, 1, 1)), (True, False, (0, 1, 0)), (False, True, (0, 0, 1))]
)
def test_both_facts_of_a_pair_must_be_right(first: bool, second: bool, judged: tuple[int, int, int]) -> None:
    pair, _ = pair_of_facts()
    said = [part.accepted[0] if right else "nothing" for part, right in zip(pair.parts, (first, second), strict=True)]
    items = judge_pairs([pair], {pair.id: f"It is {said[0]}. The other is {said[1]}."})
    found = tuple(items[name][pair.id] for name in ("across", "across_first", "across_second"))
    assert found == judged


def test_comparisons_are_of_rows_that_are_measured() -> None:
    for comparison in DECLARED:
        assert {comparison.row, comparison.rival} <= {OWN, *ROWS}


@pytest.mark.slow
def test_every_row_is_measured(tmp_path: Path, tiny_chat_model: Path) -> None:
    text = tmp_path / "data" / WIKITEXT
    text.parent.mkdir(parents=True)
    text.write_text("the river ran under the old house", encoding="utf-8")
    out = tmp_path / "out"
    options = Options(data=tmp_path / "data", out=out, quick=True, jobs=1, backbone=str(tiny_chat_model))
    results = reproduce("worlds", options)
    assert {row.id for row in results.rows} == {BACKBONE, LOOKUP, OWN, *ROWS, *BOTH}
    assert results.seeds == [SEEDS[0]]
    for row in results.rows:
        if row.id in BOTH:
            assert row.metrics.keys() == {"across", "across_first", "across_second"}
            continue
        assert {"recall", "across", "across_first", "across_second", "within", "spill"} <= row.metrics.keys()
    assert value_of(results.row(LOOKUP).metrics["across"]) > 0
    assert {"new"} <= results.row(OWN).metrics.keys() & results.row("one").metrics.keys()
    comparisons: Any = results.details["comparisons"]
    # The tiny model answers no near question right, so nothing can be kept.
    assert [each["name"] for each in comparisons] == [comparison.name for comparison in DECLARED[:-1]]
    assert not any(each["decided"] for each in comparisons)
    assert json.loads((out / "results.json").read_text(encoding="utf-8"))["name"] == "worlds"
