"""The experiment on routing between four worlds of invented facts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import Options, reproduce
from experiments.facts.answering import Asked, _generate, answer
from experiments.facts.generator import FactSet
from experiments.facts.kept import WIKITEXT
from experiments.worlds.rows import BACKBONE, BOTH, COMPARED_MIXTURES, DECLARED, LOOKUP, LOOKUP_ROUTED, OWN, ROWS
from experiments.worlds.run import SEEDS
from experiments.worlds.runs import AskedOf, BothRun, first_sentence
from experiments.worlds.texts import WORLDS, Pair, WorldSet, judge_pairs
from graftlm.backbone import load_backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data.chats import render_question
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


def test_a_rival_in_the_other_sentence_makes_the_pair_wrong_and_not_the_part() -> None:
    pair, _ = pair_of_facts()
    first, second = pair.parts
    items = judge_pairs([pair], {pair.id: f"It is {first.accepted[0]}. The other is {first.rivals[0]}."})
    assert items["across_first"][pair.id] == 1
    assert items["across_second"][pair.id] == 0
    said = f"It is {first.accepted[0]}. The other is {second.accepted[0]}, and {first.rivals[0]}."
    items = judge_pairs([pair], {pair.id: said})
    assert items["across"][pair.id] == 0
    assert items["across_first"][pair.id] == items["across_second"][pair.id] == 1


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Ada runs it. It is red.", "Ada runs it."),
        ("Ada runs it.", "Ada runs it."),
        ("3.5 m. Red.", "3.5 m."),
        ("", ""),
    ],
)
def test_a_sentence_ends_at_a_full_stop_before_a_blank(text: str, first: str) -> None:
    assert first_sentence(text) == first


class RecordingRun(BothRun):
    """Records which experts act on which questions, and answers all of them alike."""

    used: list[Any] = []

    def _graft(self, _backbone: Any, _context: Any, routing: Any) -> Any:
        return (self.merge or routing, self.experts)

    def _with(self, graft: Any, _backbone: Any, questions: Any, _scored: Any, begun: Any = None) -> Any:
        self.used.append((graft, begun or [question.id for question in questions]))
        return {question.id: "one. two." for question in questions}, []


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_both_experts_of_a_question_are_added_and_no_other(weight: float) -> None:
    asked = [AskedOf(Asked("a", "?", 4), "works+lands"), AskedOf(Asked("b", "?", 4), "lands+nature")]
    run = RecordingRun(
        id="both", backbone=BackboneConfig(name="none"), questions="", experts=tuple(WORLDS), weight=weight
    )
    answers, _ = run._answer(None, asked, None)  # type: ignore[arg-type]  # nothing is loaded
    assert answers.keys() == {"a", "b"}
    merge = {"combination_type": "cat", "weight": weight}
    assert run.used == [((merge, ("lands", "nature")), ["b"]), ((merge, ("works", "lands")), ["a"])]


def test_each_expert_writes_its_own_sentence() -> None:
    asked = [AskedOf(Asked("a", "?", 4), "works+lands")]
    run = RecordingRun(id="switched", backbone=BackboneConfig(name="none"), questions="", experts=tuple(WORLDS))
    run._answer(None, asked, None)  # type: ignore[arg-type]  # nothing is loaded
    first, second = run.used
    assert first == (({"fixed": {"works": 1.0}}, tuple(WORLDS)), ["a"])
    assert second == (({"fixed": {"lands": 1.0}}, tuple(WORLDS)), {"a": "one."})


def test_answers_continue_what_they_begin_with(tiny_chat_model: Path) -> None:
    backbone = load_backbone(tiny_chat_model)
    question = Asked("q", "What is it?", 6)
    begun = answer(backbone.model, backbone, [question], begun={"q": "It is"})["q"]
    assert begun.startswith("It is")
    prompt = render_question([{"role": "user", "content": question.text}], backbone.need_tokenizer()) + "It is"
    (row,) = _generate(
        backbone.model, backbone, [backbone.need_tokenizer()(prompt, add_special_tokens=False)["input_ids"]], 6
    )
    continued = backbone.need_tokenizer().decode(row, skip_special_tokens=True)
    assert begun == f"It is{continued}".strip()


def test_comparisons_are_of_rows_that_are_measured() -> None:
    for comparison in DECLARED:
        rows = {comparison.row, comparison.rival}
        assert rows <= {OWN, *ROWS}
        assert rows <= {OWN, "one", *COMPARED_MIXTURES}, "a row without a search of its rate"


@pytest.mark.slow
def test_every_row_is_measured(tmp_path: Path, tiny_chat_model: Path) -> None:
    text = tmp_path / "data" / WIKITEXT
    text.parent.mkdir(parents=True)
    text.write_text("the river ran under the old house", encoding="utf-8")
    out = tmp_path / "out"
    options = Options(data=tmp_path / "data", out=out, quick=True, jobs=1, backbone=str(tiny_chat_model))
    results = reproduce("worlds", options)
    assert {row.id for row in results.rows} == {BACKBONE, LOOKUP, LOOKUP_ROUTED, OWN, *ROWS, *BOTH}
    assert results.seeds == [SEEDS[0]]
    for row in results.rows:
        if row.id in BOTH:
            assert row.metrics.keys() == {"across", "across_first", "across_second"}
            continue
        assert {"recall", "across", "across_first", "across_second", "within"} <= row.metrics.keys()
        assert ("spill" in row.metrics) == (row.id != OWN), "near questions belong to no expert"
    assert value_of(results.row(LOOKUP).metrics["across"]) > 0
    assert {"new"} <= results.row(OWN).metrics.keys() & results.row("one").metrics.keys()
    comparisons: Any = results.details["comparisons"]
    # The tiny model answers no near question right, so nothing can be kept.
    assert [each["name"] for each in comparisons] == [comparison.name for comparison in DECLARED[:-1]]
    assert not any(each["decided"] for each in comparisons)
    assert json.loads((out / "results.json").read_text(encoding="utf-8"))["name"] == "worlds"
