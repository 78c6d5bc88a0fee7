"""The chain with a threshold: it asks what changes the output by more bits, and is told what an answer brought."""

from __future__ import annotations

from typing import Any

import pytest

from clarify.server import FRENCH, QUESTION, Scripted, by_chat, kinds, start
from graftlm.pipelines.clarify import Asked, Chain, Meter, Question, Recorded, Skipped, needed

_, POLITE = FRENCH


def test_a_question_that_changes_nothing_is_not_asked() -> None:
    writer = Scripted(lambda prompt: QUESTION if "write None" in prompt.instructions else "Voilà.")
    found = Chain(writer, Recorded([POLITE])).run(start(threshold=0.0))
    assert kinds(found) == ["skipped", "written"]
    assert found.written is not None
    assert (found.written.output, found.written.how) == ("Voilà.", "settled")
    assert found.summary()["saved"] == 1
    assert found.summary()["expected_bits"] == [0.0]
    assert found.cost.calls == 3, "the question and an output under each answer; the last of them is not written again"


def test_a_question_that_decides_is_asked_and_told_what_it_brought() -> None:
    found = Chain(Scripted(by_chat), Recorded([POLITE])).run(start(threshold=0.1))
    assert kinds(found) == ["asked", "answered", "written"]
    summary = found.summary()
    assert summary["expected_bits"] == summary["gained_bits"] == [1.0]
    assert found.cost.calls == 3, "what was written under the answer is not written again"
    assert found.written is not None
    assert found.written.output == FRENCH[POLITE]
    own_words = Chain(Scripted(by_chat), Recorded(["my aunt"])).run(start(threshold=0.1))
    assert own_words.gained() == [None]
    assert own_words.cost.calls == 4


def test_the_threshold_is_a_bound_that_must_be_passed() -> None:
    for threshold, first in ((0.99, "asked"), (1.0, "skipped")):
        assert kinds(Chain(Scripted(by_chat), Recorded([POLITE])).run(start(threshold=threshold)))[0] == first


def test_without_candidate_answers_it_asks_unmeasured() -> None:
    writer = Scripted(lambda prompt: "Who is it?" if "write None" in prompt.instructions else "Oui.")
    found = Chain(writer, Recorded(["me"])).run(start(threshold=0.5))
    assert isinstance(found.turns[0], Asked)
    assert found.turns[0].gain is None


def test_draws_at_random_are_corrected_for_chance() -> None:
    class Drawn(Scripted):
        def write(self, prompt: Any, *, temperature: float = 0.0, seed: int | None = None, **more: Any) -> Any:
            if "write None" in prompt.instructions:
                return super().write(prompt)
            self._replies = lambda prompt: f"Oui {seed % 3}" if temperature else "Oui"  # type: ignore[operator]  # a seed comes with it
            return super().write(prompt)

    writer = Drawn(lambda prompt: QUESTION)
    found = Chain(writer, Recorded([POLITE]), meter=Meter(writer, draws=6)).run(start(threshold=0.05))
    assert isinstance(found.turns[0], Skipped), "the same choices of words under each answer"
    gain = found.turns[0].gain
    assert gain is not None
    assert len(gain.outputs[0]) == 6


def test_the_likeliest_output_settles_what_is_not_asked() -> None:
    outputs = {"a": "Rare.", "b": "Usual.", "c": "Usual."}

    def replies(prompt: Any) -> str:
        return "Which? [a | b | c]" if "write None" in prompt.instructions else outputs[dict(prompt.parts)["answer"]]

    found = Chain(Scripted(replies), Recorded(["a"])).run(start(threshold=2.0))
    assert found.written is not None
    assert (found.written.output, found.written.how) == ("Usual.", "settled")


def test_few_draws_that_differ_by_chance_bring_less_than_they_count() -> None:
    class Drawn(Scripted):
        def write(self, prompt: Any, *, seed: int | None = None, **more: Any) -> Any:
            self._replies = lambda prompt: f"{dict(prompt.parts)['answer']} {seed}" if seed else "Oui."
            return super().write(prompt)

    question = Question(text="Who?", answers=("a", "b"))
    gain, _ = Meter(Drawn(lambda prompt: ""), draws=3).measure(start(), question)
    assert gain is not None
    counted = needed.information_gain(gain.prior, needed.shares(gain.outputs)[1])
    assert gain.bits == pytest.approx(needed.beyond_chance(gain.prior, gain.outputs)[0])
    assert gain.bits < counted - 0.1
