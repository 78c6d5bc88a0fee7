"""Which questions are needed: a chain with a known translator, on sentences with and without what decides them.

MT-GenEval has sentences on people whose gender only the sentence before tells. With it nothing has to be asked; without
it one has to ask, where the feminine and the masculine translation differ. The translator always asks, and writes the
translation of the gender that the pronouns of its text tell, or, where they tell none, of the answer. The chain puts
the question where the answer is expected to change the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.clarify.metrics import share
from graftlm.evaluation import Row
from graftlm.pipelines.clarify import Chain, Conversation, Reply
from graftlm.pipelines.clarify.ambiguity_sets import mt_geneval_contexts
from graftlm.pipelines.clarify.examples import Example, english_gender
from graftlm.pipelines.clarify.needed import same_form
from graftlm.pipelines.clarify.prompts import Prompt, question_line
from graftlm.pipelines.clarify.turns import Asked, Cost

LANGUAGES = ("de", "fr")
THRESHOLD = 0.1
ANSWERS = {"a woman": "feminine", "a man": "masculine"}
_QUESTION = question_line("Is this person a woman or a man?", tuple(ANSWERS))


class Reader:
    """Reads the gender of pronouns, and nothing else, in an example's sentence.

    The reference of an example whose context tells no gender by a pronoun counts as masculine: only whether the two
    translations are told apart matters.
    """

    name = "reader of pronouns"

    def __init__(self, one: Example) -> None:
        self._one = one

    def write(
        self,
        prompt: Prompt,
        *,
        temperature: float = 0.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Reply:
        parts = dict(prompt.parts)
        if prompt.label == "Question":
            return Reply(_QUESTION)
        gender = english_gender(parts["text"]) or ANSWERS.get(parts.get("answer", ""))
        right = gender == (self._one.label or "masculine")
        return Reply(self._one.reference if right else self._one.contrast or "")


def rows(data: Path, limit: int) -> list[Row]:
    """Precision and recall of "needed" for each language whose files are there, in percent.

    `precision_always` is what asking every time would have.
    """
    folder = data / "ambig" / "mt_geneval"
    there = [
        name for name in LANGUAGES if (folder / f"geneval-context-wikiprofessions-2to1-test.en_{name}.en").exists()
    ]
    return [_row(name, mt_geneval_contexts(folder, name)[:limit]) for name in there]


def _row(language: str, examples: Sequence[Example]) -> Row:
    found = [_judged(one, with_context) for one in examples for with_context in (False, True)]
    right = sum(asked and needed for asked, needed, _ in found)
    needed, asked = sum(needed for _, needed, _ in found), sum(asked for asked, _, _ in found)
    metrics: dict[str, Any] = {
        "precision": share(right, asked),
        "recall": share(right, needed),
        "precision_always": share(needed, len(found)),
        "asked": asked,
        "needed": needed,
        "texts": len(found),
        "calls": sum(cost.calls for _, _, cost in found),
    }
    return Row(id=f"needed_{language}", label=f"needed, {language}", metrics=metrics)


def _judged(one: Example, with_context: bool) -> tuple[bool, bool, Cost]:
    """Whether the question was put, whether it was needed, and what that cost."""
    text = " ".join((*one.context, one.source)) if with_context else one.source
    differ = same_form(one.reference) != same_form(one.contrast or "")
    begun = Conversation.start(text, "translate", one.language, threshold=THRESHOLD, any_language=True)
    found = Chain(Reader(one)).run(begun)
    return isinstance(found.turns[0], Asked), differ and not with_context, found.cost
