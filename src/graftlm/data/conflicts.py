"""Conversations that contradict each other: the same question with different answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from graftlm.data.sources import Document


class Conflict(NamedTuple):
    """Two conversations with the same question and different answers.

    Attributes:
        question: the question, as the later conversation has it.
        first: location and answer of the earlier conversation.
        second: location and answer of the later one.
    """

    question: str
    first: tuple[str, str]
    second: tuple[str, str]


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
    messages are different. A question that occurs several times is reported once, with the first answer that differs
    from its earliest one. A question without words is never reported.

    Args:
        documents: the documents. Those that are not such conversations are skipped.
    """
    answers: dict[tuple[str, str], tuple[str, str]] = {}
    conflicts: dict[tuple[str, str], Conflict] = {}
    for document in documents:
        turn = single_turn(document)
        if turn is None:
            continue
        question, answer = turn
        key = (_comparable(_system_text(document)), _comparable(question))
        if not key[1]:
            continue
        first = answers.setdefault(key, (document.where, answer))
        if _comparable(first[1]) != _comparable(answer) and key not in conflicts:
            conflicts[key] = Conflict(question=question, first=first, second=(document.where, answer))
    return list(conflicts.values())


def _system_text(document: Document) -> str:
    """Return the text of the system messages of a conversation."""
    messages = document.chat.messages if document.chat is not None else ()
    return "\n".join(str(message["content"]) for message in messages if message["role"] == "system")


def _comparable(text: str) -> str:
    """Return a text without case, repeated white space, and punctuation at its end."""
    return " ".join(text.casefold().split()).rstrip(" ?!.")
