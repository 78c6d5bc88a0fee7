"""The texts of documents from which a graft learns on which texts it acts."""

from __future__ import annotations

from collections.abc import Iterable

from graftlm.data.conversations import ChatExample
from graftlm.data.sources import Document


def example_texts(documents: Iterable[Document], *, prompts_only: bool) -> list[str]:
    """Return the texts of documents.

    A conversation is its questions and answers, one per line. System messages are left out, since they are usually the
    same in all conversations.

    Args:
        documents: the documents.
        prompts_only: whether to return the prompts that documents teach to answer instead, one for each answer that is
            learned. The prompt of a conversation's answer is the users' turns before it, one per line. A document
            without a prompt is returned whole.
    """
    if not prompts_only:
        return [_whole_text(document) for document in documents]
    return [text for document in documents for text in _prompts(document)]


def _whole_text(document: Document) -> str:
    if document.chat is None:
        return document.full_text
    return "\n".join(message["content"] for message in document.chat.messages if message["role"] != "system")


def _prompts(document: Document) -> list[str]:
    if document.chat is not None:
        return [_users_turns(document.chat, number) for number in document.chat.learned]
    if document.prompt.strip():
        return [document.prompt]
    return [document.text]


def _users_turns(chat: ChatExample, count: int) -> str:
    """Return the contents of the users' turns among the first `count` messages, one per line."""
    return "\n".join(message["content"] for message in chat.messages[:count] if message["role"] == "user")
