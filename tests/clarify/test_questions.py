"""The rule that a question is about its text, and that its options can be answers about it."""

from __future__ import annotations

import pytest

from clarify.server import ScriptedModel, by_chat, kinds
from graftlm.pipelines.clarify import (
    Chain,
    Conversation,
    Question,
    RecordedUser,
    load_template,
    summary_lines,
    template_names,
)
from graftlm.pipelines.clarify.chain import usable_question
from graftlm.pipelines.clarify.prompts import format_question, parse_question

CLEAR = "The shop closes at six on Sundays."


def usable(text: str, question: str, template: str = "translate") -> str | None:
    target = next(iter(load_template(template).languages))
    parsed = parse_question(question)
    assert parsed is not None
    result = usable_question(
        Conversation.start(text, template, target, any_language=True), Question(text=parsed[0], answers=parsed[1])
    )
    return result and format_question(result.text, result.answers)


@pytest.mark.parametrize(
    ("text", "question", "expected"),
    [
        # The words that are quoted must be words of the text; your is you.
        ("It broke.", 'What is "it"?', 'What is "it"?'),
        (CLEAR, 'What is "it"?', None),
        ("Show me your ticket.", 'Who is "you" in "your"?', 'Who is "you" in "your"?'),
        # Labels of address need somebody who is addressed.
        ("Are you sure?", "Who is meant? [a friend or relative | people in general]", "same"),
        (CLEAR, "Who is meant? [a friend or relative | people in general]", None),
        # Options for a pronoun are words of the text, or genders.
        ("The cups fell on the plate, and it broke.", 'What is "it"? [the cup | a plate]', "same"),
        (
            "The cup fell on the plate, and it broke.",
            'What is "it"? [the cup | the plate | a jacket]',
            'What is "it"? [the cup | the plate]',
        ),
        ("It broke.", 'What is "it"? [a machine | a vase]', 'What is "it"?'),
        ("She told Anna that she won.", "Who is she? [Anna | a customer]", None),
        ("It broke.", 'What is "it"? [masculine | feminine]', "same"),
        # Options of an exemplar fit no other text; new ones do.
        (CLEAR, "What does the word mean? [a dog's cry | the skin of a tree]", None),
        (CLEAR, "Who will come? [my aunt | my uncle]", None),
        ("Can you come over later?", "Can you come over later? [my aunt | my uncle]", None),
        ("The crane is tall.", "Which crane? [a bird | a machine]", "same"),
        # Placeholders are no answers.
        (CLEAR, "Which one? [one | another]", None),
        (CLEAR, "Which one? [a shop | another one]", None),
        (CLEAR, "Is it far?", "Is it far?"),
    ],
)
def test_options_that_fit(text: str, question: str, expected: str | None) -> None:
    assert usable(text, question) == (question if expected == "same" else expected)


def test_options_of_exemplars_need_their_text() -> None:
    question = "Of which country? [France | Italy]"
    assert usable("What is the capital of that country?", question, "answer") == question
    assert usable("What time does it start?", question, "answer") is None
    assert usable("Is Italy larger than France?", question, "answer") == question


@pytest.mark.parametrize("template", template_names())
def test_exemplars_obey_the_rule_and_fit_no_clear_text(template: str) -> None:
    for exemplar in load_template(template).exemplars:
        question = format_question(exemplar.question, exemplar.answers)
        assert usable(exemplar.text, question, template) in (question, exemplar.question), exemplar.id
        assert usable(CLEAR, question, template) is None, exemplar.id


def test_a_question_about_another_text_is_not_asked() -> None:
    replies = iter(['Who is "they"? [a friend | a boss]', "Le magasin ferme à six heures."])
    start = Conversation.start(CLEAR, "translate", "fr")
    found = Chain(ScriptedModel(lambda prompt: next(replies)), RecordedUser(["a boss"])).run(start)
    assert kinds(found) == ["skipped", "written"]
    assert found.turns[0].reason == "unusable"  # type: ignore[union-attr]
    assert found.written is not None
    assert found.written.mode == "plain"
    assert summary_lines(found)[0].startswith("asked nothing: ")
    assert Conversation.parse(found.model_dump()) == found


def test_answers_in_order_go_on_in_a_resumed_conversation() -> None:
    count = iter(range(9))
    chain = Chain(
        ScriptedModel(lambda prompt: f"Is it {next(count)}?" if "None" in prompt.instructions else by_chat(prompt))
    )
    waiting = chain.run(chain.run(Conversation.start("Are you sure?", "translate", "fr", budget=2)).reply("first"))
    for answers in (["second"], ["first", "second"]):
        assert RecordedUser(answers).answer(waiting)[0] == "second"
    assert RecordedUser(["first"]).answer(waiting)[0] is None
