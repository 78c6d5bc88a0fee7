"""What the user should know about the new conversations of a run before it trains on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graftlm.backbone import Backbone
from graftlm.data import Document
from graftlm.data.conflicts import find_conflicts, single_turn
from graftlm.errors import shorten
from graftlm.evaluation.known_answers import find_known
from graftlm.evaluation.taught_answers import Acts, ClosedQuestions, evenly_spaced, find_closed, taught_questions
from graftlm.grafts import ChoosesByPrompt, FitsOnText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_CONFLICTS = 3
_KNOWN_CHECKED = 256
_CLOSED_CHECKED = 1024


def notes_on_conversations(documents: Sequence[Document], backbone: Backbone, *, asks: bool) -> Iterator[str]:
    """Yield sentences about new conversations: contradictions, and answers that are known.

    Args:
        documents: the new documents; nothing is said if there are no conversations among them.
        backbone: the backbone, to which no graft is attached.
        asks: whether the report has answers to questions.
    """
    conflicts = find_conflicts(documents)
    for conflict in conflicts[:_SHOWN_CONFLICTS]:
        (first, answer), (second, other) = conflict.first, conflict.second
        yield (
            f"{first} and {second} answer {shorten(conflict.question)!r} differently: {shorten(answer)!r} and "
            f"{shorten(other)!r}. Keep one of them."
        )
    if len(conflicts) > _SHOWN_CONFLICTS:
        yield f"Questions with different answers in all: {len(conflicts):,}."
    chats = [document for document in documents if document.chat is not None]
    if asks and chats and not any(single_turn(chat) for chat in chats):
        yield "No conversation has exactly one question, so the report will have no taught answers."
    checked = evenly_spaced(chats, _KNOWN_CHECKED)
    known = find_known(backbone.without_tokens, checked)
    if known:
        yield (
            f"The backbone already gives the answers of {len(known):,} of {len(checked):,} conversations, such as "
            f"{known[0].where}: they teach it nothing."
        )


def acts_by_prompt(graft: object) -> Acts | None:
    """Return the function that tells whether a graft acts on a prompt; None if it acts on all.

    Args:
        graft: the graft. One whose choice follows the text after the prompt too counts as acting on all.
    """
    if not (isinstance(graft, ChoosesByPrompt) and isinstance(graft, FitsOnText)):
        return None
    if graft.is_fixed or not graft.learns_from_prompts:
        return None
    choose = graft.choose
    return lambda prompt: choose(prompt) is not None


def closed_questions(
    graft: object,
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
) -> ClosedQuestions | None:
    """Return the taught questions on which a graft does not act, of up to 1,024; None without any.

    Args:
        graft: the graft, after it was fitted.
        documents: the new documents; only conversations of one question count.
        tokenizer: the backbone's tokenizer.
    """
    acts = acts_by_prompt(graft)
    if acts is None or not tokenizer.chat_template:
        return None
    closed = find_closed(taught_questions(documents, tokenizer, _CLOSED_CHECKED), acts)
    return closed if closed["closed"] else None
