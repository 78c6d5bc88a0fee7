"""Whether a question is about the text at hand: small models copy questions and options from the exemplars.

The rule is a table in README.md. Small words such as *the* are no words here. A question that repeats the text is none.
"""

from __future__ import annotations

import re
from functools import cache

from graftlm.config import read_yaml
from graftlm.pipelines.clarify.ambiguity import word_list
from graftlm.pipelines.clarify.conversation import LANGUAGES, Conversation, Question
from graftlm.pipelines.clarify.templates import load_template

_QUOTED = re.compile(r"[\"“„«]([^\"“”„«»]+)[\"”“»]")
_ASKS_FOR = re.compile(r"^(?:what|who|which)\b.*\b(?:is|are|was|were) (\w+)\?$", re.IGNORECASE)


def usable_question(conversation: Conversation, question: Question) -> Question | None:
    """The question without options that fit another text, or None if it should not be asked.

    Less than two options are no choice: then a question that quotes the text is asked without options, others are not.
    """
    case = _words(" ".join([conversation.text, *(answer for _, answer in conversation.exchanges)]))
    quoted = [word for text in _QUOTED.findall(question.text) for word in _words(text)]
    if not case.issuperset(quoted) or question.text.strip() == conversation.text.strip():
        return None
    answers = tuple(answer for answer in question.answers if _fits(answer, question, quoted, conversation, case))
    if len(answers) < 2 and question.answers:
        return Question(text=question.text) if quoted else None
    return Question(text=question.text, answers=answers)


def _fits(answer: str, question: Question, quoted: list[str], conversation: Conversation, case: set[str]) -> bool:
    words, exemplars = _words(answer), load_template(conversation.template).exemplars
    content, genders = _content(words), bool(words & word_list("question_genders"))
    if words <= word_list("no_answers") or (content and content <= case) or genders:
        return bool(content)
    sources = [exemplar for exemplar in exemplars if content <= _words(" ".join(exemplar.answers))]
    if any(exemplar.kind == "formality" for exemplar in sources):
        return "you" in case
    asked_for = _ASKS_FOR.match(question.text)
    if word_list("question_pronouns") & {*quoted, *([] if asked_for is None else _words(asked_for[1]))}:
        return False
    if content & case or any(_content(_words(exemplar.text)) & case for exemplar in sources):
        return True
    return not sources and bool(quoted or _content(_words(question.text)) & case)


def _words(text: str) -> set[str]:
    """The words of a text in lower case, without the s of plurals; all forms of *you* are one."""
    words = re.findall(r"[^\W_]+", text.casefold())
    return {
        "you" if word in word_list("forms_of_you") else word.removesuffix("s") if len(word) > 3 else word
        for word in words
    }


def _content(words: set[str]) -> set[str]:
    """The words that are no small words of English."""
    return words - _small_words()


@cache
def _small_words() -> set[str]:
    return _words(read_yaml(LANGUAGES)["en"]["words"]) | word_list("no_answers")
