"""The texts of documents from which a graft learns on which texts it acts."""

from __future__ import annotations

from typing import Any

from graftlm.data import Document
from graftlm.data.conversations import read_chat
from graftlm.data.example_texts import example_texts


def conversation(*turns: str, unlearned: int | None = None) -> Document:
    """Return a conversation of a system message and turns of the user and the assistant, one of which is context."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for number, turn in enumerate(turns):
        messages.append({"role": ("user", "assistant")[number % 2], "content": turn})
        if number == unlearned:
            messages[-1]["weight"] = 0
    chat = read_chat(messages, "here")
    return Document(chat.answers, chat=chat)


def test_each_learned_answer_has_the_users_turns_before_it_as_its_prompt() -> None:
    document = conversation("Hello.", "Hi.", "Capital of Vorlia?", "Tessaby.", "Its currency?", "The zem.", unlearned=1)
    assert example_texts([document], prompts_only=True) == [
        "Hello.\nCapital of Vorlia?",
        "Hello.\nCapital of Vorlia?\nIts currency?",
    ]


def test_turns_after_the_last_learned_answer_are_in_no_prompt() -> None:
    document = conversation("Capital of Vorlia?", "Tessaby.", "And of Zembranth?", "Unknown.", unlearned=3)
    assert example_texts([document], prompts_only=True) == ["Capital of Vorlia?"]


def test_whole_texts_have_questions_and_answers() -> None:
    documents = [conversation("Vorlia?", "Tessaby."), Document("a b.", prompt="Say: "), Document("c d.")]
    assert example_texts(documents, prompts_only=False) == ["Vorlia?\nTessaby.", "Say: a b.", "c d."]


def test_a_text_without_a_prompt_stands_for_its_prompt() -> None:
    documents = [Document("a b.", prompt="Say: "), Document("c d."), Document("e f.", prompt=" ")]
    assert example_texts(documents, prompts_only=True) == ["Say: ", "c d.", "e f."]
