"""Which questions are needed: a chain with a known translator, on sentences with and without what resolves them.

MT-GenEval has sentences about people whose gender only the preceding sentence shows. With that sentence nothing has to
be asked. Without it one has to ask, if the feminine and the masculine translation differ. The translator always asks.
It writes the translation of the gender that the pronouns of its text show, or else of the answer. The chain puts the
question if its expected gain is above the threshold.

Recall is 100% by construction: without the preceding sentence this translator has no pronoun to read, so the gain is
one bit exactly where the translations differ. Only precision is a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.clarify.metrics import share
from graftlm.evaluation import Row
from graftlm.pipelines.clarify import Chain, Conversation, Cost, Reply
from graftlm.pipelines.clarify.datasets import AmbiguousExample, english_gender, mt_geneval_contexts
from graftlm.pipelines.clarify.gain import normalize_text
from graftlm.pipelines.clarify.prompts import Prompt, format_question

LANGUAGES = ("de", "fr", "es")
THRESHOLD = 0.1
ANSWERS = {"a woman": "feminine", "a man": "masculine"}
_QUESTION = format_question("Is this person a woman or a man?", tuple(ANSWERS))


class PronounTranslator:
    """Translates an example's sentence by the gender of the pronouns in its text.

    An example whose context shows no gender by a pronoun counts as masculine. Only whether the two translations are
    told apart matters.
    """

    name = "pronoun translator"

    def __init__(self, example: AmbiguousExample) -> None:
        self._example = example

    def generate(self, prompt: Prompt, **_: Any) -> Reply:
        parts = dict(prompt.parts)
        if prompt.label == "Question":
            return Reply(_QUESTION)
        gender = english_gender(parts["text"]) or ANSWERS.get(parts.get("answer", ""))
        is_right = gender == (self._example.label or "masculine")
        return Reply(self._example.reference if is_right else self._example.contrast or "")


def rows(data: Path, limit: int) -> list[Row]:
    """Precision and recall of asking, in percent, for each language whose files exist.

    `precision_always` is the precision of asking every time.
    """
    folder = data / "ambig" / "mt_geneval"
    file = "geneval-context-wikiprofessions-2to1-test.en_{}.en"
    languages = [language for language in LANGUAGES if (folder / file.format(language)).exists()]
    return [language_row(language, mt_geneval_contexts(folder, language)[:limit]) for language in languages]


def language_row(language: str, examples: Sequence[AmbiguousExample]) -> Row:
    """The row of one language; every example counts with and without its context."""
    decisions: list[tuple[Any, ...]] = [
        decision(example, with_context) for example in examples for with_context in (False, True)
    ]
    questions, needed = (sum(decision[index] for decision in decisions) for index in (0, 1))
    right = sum(question and is_needed for question, is_needed, _ in decisions)
    metrics: dict[str, Any] = {
        "precision": share(right, questions),
        "recall": share(right, needed),
        "precision_always": share(needed, len(decisions)),
        "asked": questions,
        "needed": needed,
        "texts": len(decisions),
        "calls": sum(cost.calls for _, _, cost in decisions),
    }
    return Row(id=f"needed_{language}", label=f"needed, {language}", metrics=metrics)


def decision(example: AmbiguousExample, with_context: bool) -> tuple[bool, bool, Cost]:
    """Whether the question was asked, whether it was needed, and the cost."""
    text = " ".join((*example.context, example.source)) if with_context else example.source
    differ = normalize_text(example.reference) != normalize_text(example.contrast or "")
    start = Conversation.start(text, "translate", example.language, threshold=THRESHOLD, any_language=True)
    conversation = Chain(PronounTranslator(example)).run(start)
    return conversation.turns[0].kind == "asked", differ and not with_context, conversation.cost
