"""The chain with a threshold: it asks questions with a larger gain, and reports the gain of the answer."""

from __future__ import annotations

from typing import Any

from clarify.server import FRENCH, QUESTION, ScriptedModel, by_chat, kinds, start
from graftlm.pipelines.clarify import Chain, RecordedUser
from graftlm.pipelines.clarify.conversation import AskedTurn

_, POLITE = FRENCH


def test_a_question_that_changes_nothing_is_not_asked() -> None:
    writer = ScriptedModel(lambda prompt: QUESTION if "write None" in prompt.instructions else "Voilà.")
    found = Chain(writer, RecordedUser([POLITE])).run(start(threshold=0.0))
    assert kinds(found) == ["skipped", "written"]
    assert found.written is not None
    assert (found.written.output, found.written.mode) == ("Voilà.", "settled")
    assert found.summary()["saved"] == 1
    assert found.summary()["expected_bits"] == [0.0]
    assert found.cost.calls == 3, "the question and an output under each answer; the last of them is not written again"


def test_a_needed_question_is_asked_and_its_gain_reported() -> None:
    found = Chain(ScriptedModel(by_chat), RecordedUser([POLITE])).run(start(threshold=0.1))
    assert kinds(found) == ["asked", "answered", "written"]
    summary = found.summary()
    assert summary["expected_bits"] == summary["gained_bits"] == [1.0]
    assert found.cost.calls == 3, "what was written under the answer is not written again"
    assert found.written is not None
    assert found.written.output == FRENCH[POLITE]
    own_words = Chain(ScriptedModel(by_chat), RecordedUser(["my aunt"])).run(start(threshold=0.1))
    assert own_words.summary()["gained_bits"] == [None]
    assert own_words.cost.calls == 4


def test_the_gain_of_a_later_question_counts_the_answers_before_it() -> None:
    """The outputs under the second question's answers differ only if the first answer is known."""
    questions = ['Whose is "the kettle"? [a teacher | a neighbour]', 'Is "the kettle" old? [iron | copper]']
    outputs = {
        ("a teacher",): "Sa bouilloire.",
        ("a neighbour",): "Ma bouilloire.",
        ("a teacher", "iron"): "Sa bouilloire en fer.",
        ("a teacher", "copper"): "Sa bouilloire en cuivre.",
    }

    def replies(prompt: Any) -> str:
        answers = tuple(content for name, content in prompt.parts if name == "answer")
        if "write None" in prompt.instructions:
            return questions[len(answers)]
        return outputs.get(answers, "Une bouilloire.")

    chain = Chain(ScriptedModel(replies), RecordedUser(["a teacher", "copper"]))
    found = chain.run(start("The kettle sings.", budget=2, threshold=0.5))
    assert kinds(found) == ["asked", "answered", "asked", "answered", "written"]
    assert isinstance(found.turns[2], AskedTurn)
    assert found.turns[2].gain is not None
    assert found.turns[2].gain.outputs == (("Sa bouilloire en fer.",), ("Sa bouilloire en cuivre.",))
    assert found.summary()["expected_bits"] == [1.0, 1.0]


def test_the_threshold_is_a_bound_that_must_be_passed() -> None:
    for threshold, first in ((0.99, "asked"), (1.0, "skipped")):
        assert kinds(Chain(ScriptedModel(by_chat), RecordedUser([POLITE])).run(start(threshold=threshold)))[0] == first


def test_without_candidate_answers_it_asks_unmeasured() -> None:
    writer = ScriptedModel(lambda prompt: "Who is it?" if "write None" in prompt.instructions else "Oui.")
    found = Chain(writer, RecordedUser(["me"])).run(start(threshold=0.5))
    assert isinstance(found.turns[0], AskedTurn)
    assert found.turns[0].gain is None


def test_the_likeliest_output_settles_what_is_not_asked() -> None:
    outputs = {"my boss": "Rare.", "my son": "Usual.", "my aunt": "Usual."}

    def replies(prompt: Any) -> str:
        return (
            f'Who is "you"? [{" | ".join(outputs)}]'
            if "write None" in prompt.instructions
            else outputs[dict(prompt.parts)["answer"]]
        )

    found = Chain(ScriptedModel(replies), RecordedUser(["my boss"])).run(start(threshold=2.0))
    assert found.written is not None
    assert (found.written.output, found.written.mode) == ("Usual.", "settled")
