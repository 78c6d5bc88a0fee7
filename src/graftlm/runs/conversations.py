"""What the user should know about the new conversations of a run before it trains on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graftlm.backbone import Backbone
from graftlm.data import Document
from graftlm.data.conflicts import Conflict, find_conflicts, single_turn
from graftlm.errors import shorten
from graftlm.evaluation.known_answers import find_known
from graftlm.evaluation.taught_answers import Acts, ClosedQuestions, evenly_spaced, find_closed, taught_questions
from graftlm.grafts import ChoosesByPrompt, FitsOnText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_CONFLICTS = 3
_SHOWN_ANSWERS = 8
_CHECKED = 256  # conversations, each of which may take a pass of the backbone


def notes_on_conversations(documents: Sequence[Document], backbone: Backbone, *, asks: bool) -> Iterator[str]:
    """Yield sentences about new conversations: contradictions, missing values, and answers that are known.

    Args:
        documents: the new documents; nothing is said if there are no conversations among them.
        backbone: the backbone, to which no graft is attached.
        asks: whether the report has answers to questions.
    """
    conflicts = find_conflicts(documents)
    for conflict in conflicts[:_SHOWN_CONFLICTS]:
        yield _conflict_text(conflict)
    if len(conflicts) > _SHOWN_CONFLICTS:
        yield f"Questions with different answers in all: {len(conflicts):,}."
    yield from _notes_on_missing(documents)
    chats = [document for document in documents if document.chat is not None]
    if asks and chats and not any(single_turn(chat) for chat in chats):
        yield "No conversation has exactly one question, so the report will have no taught answers."
    checked = evenly_spaced(chats, _CHECKED)
    known = find_known(backbone.without_tokens, checked)
    if known:
        yield (
            f"The backbone already gives the answers of {len(known):,} of {len(checked):,} conversations, such as "
            f"{known[0].where}: they teach it nothing."
        )


def _conflict_text(conflict: Conflict) -> str:
    """Return a sentence about all conversations that answer a question differently, of which the first are named."""
    shown = [f"{shorten(answer)!r} ({where})" for where, answer in conflict.answers[:_SHOWN_ANSWERS]]
    text = "; ".join(shown)
    more = len(conflict.answers) - len(shown)
    if more:
        text += f"; and {more:,} more conversations with this question"
    return f"The question {shorten(conflict.question)!r} has different answers, of which one should stay: {text}."


def _notes_on_missing(documents: Sequence[Document]) -> Iterator[str]:
    """Yield a sentence about conversations of which a message is what programs write for a missing value, if any."""
    missing = [document for document in documents if _has_missing(document)]
    if missing:
        yield (
            f"The number of conversations with NaN as a question or an answer is {len(missing):,}, and they are taught "
            f"as they are: if it stands for a missing value, leave such rows out. The first is {missing[0].where}."
        )


def _has_missing(document: Document) -> bool:
    turn = single_turn(document)
    return turn is not None and any(text.strip().casefold() == "nan" for text in turn)


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
    """Return the taught questions on which a graft does not act, of up to 256; None without any.

    Args:
        graft: the graft, after it was fitted.
        documents: the new documents; only conversations of one question count.
        tokenizer: the backbone's tokenizer.
    """
    acts = acts_by_prompt(graft)
    if acts is None or not tokenizer.chat_template:
        return None
    closed = find_closed(taught_questions(documents, tokenizer, _CHECKED), acts)
    return closed if closed["closed"] else None
