"""Conversations that contradict each other: the same question with different answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from graftlm.data.sources import Document


class Conflict(NamedTuple):
    """Conversations with the same question, of which not all have the same answer.

    Attributes:
        question: the question, as the first conversation has it.
        answers: location and answer of each conversation, in their order.
    """

    question: str
    answers: tuple[tuple[str, str], ...]


def single_turn(document: Document) -> tuple[str, str] | None:
    """Return the question and the answer of a conversation of one turn, without system messages; None for others."""
    if document.chat is None:
        return None
    turns = [message for message in document.chat.messages if message["role"] != "system"]
    if [message["role"] for message in turns] != ["user", "assistant"]:
        return None
    question, answer = (str(message["content"]) for message in turns)
    return question, answer


def find_conflicts(documents: Iterable[Document]) -> list[Conflict]:
    """Find conversations of one question and one answer that answer the same question differently.

    Questions and answers are compared without case and the punctuation at their end. Questions with different system
    messages are different. A question without words is never reported.

    Args:
        documents: the documents. Those that are not such conversations are skipped.
    """
    questions: dict[tuple[str, str], str] = {}
    answers: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for document in documents:
        turn = single_turn(document)
        if turn is None:
            continue
        question, answer = turn
        key = (_comparable(_system_text(document)), _comparable(question))
        if not key[1]:
            continue
        questions.setdefault(key, question)
        answers.setdefault(key, []).append((document.where, answer))
    conflicts = []
    for key, given in answers.items():
        if len({_comparable(answer) for _, answer in given}) > 1:
            conflicts.append(Conflict(question=questions[key], answers=tuple(given)))
    return conflicts


def _system_text(document: Document) -> str:
    """Return the text of the system messages of a conversation."""
    messages = document.chat.messages if document.chat is not None else ()
    return "\n".join(str(message["content"]) for message in messages if message["role"] == "system")


def _comparable(text: str) -> str:
    """Return a text without case, repeated white space, and punctuation at its end."""
    return " ".join(text.casefold().split()).rstrip(" ?!.")
