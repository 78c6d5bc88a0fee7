"""A translator that reads the references and makes known mistakes. It tests the harness, not the quality of models.

- Prompted for a question, it asks for the label of the example and offers the labels as answers.
- As a user it gives the right label, except for one example in ten.
- Given a label, it writes the reference if the label is right. Otherwise it writes the contrast, or the source.
- With the context it is right for four examples in five, and without for one in two.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from experiments.clarify.datasets import AmbiguousExample
from graftlm.pipelines.clarify import Cost, Reply
from graftlm.pipelines.clarify.prompts import Prompt, format_question

NAME = "scripted"
_LANGUAGES = {"es": "Spanish", "fr": "French", "de": "German", "ja": "Japanese"}
_PERSON = ("Is this person a man or a woman?", ("masculine", "feminine"))
_QUESTIONS = {
    "formality": ('Who is "you"?', ("formal", "informal")),
    "it": ('What is "it"?', ("masculine", "feminine", "neuter")),
    "polysemy": ('What does "{word}" mean?', ("the meaning in question", "another one")),
    "name": _PERSON,
    "profession": _PERSON,
}


class ScriptedTranslator:
    """Replies to prompts about known examples.

    Several examples may have the same text. Then the answer or the context selects one of them; by default it is the
    first.

    Args:
        examples: the examples.
        name: name of the model in conversations.
    """

    def __init__(self, examples: Iterable[AmbiguousExample], name: str = NAME) -> None:
        self.name = name
        self._examples: defaultdict[str, list[AmbiguousExample]] = defaultdict(list)
        for example in examples:
            self._examples[example.source.strip()].append(example)

    def generate(self, prompt: Prompt, *, on_text: Callable[[str], None] | None = None) -> Reply:
        """Reply to a prompt; words count as tokens."""
        text = self._reply(prompt.instructions, dict(prompt.parts))
        words = 0
        for message in prompt.messages():
            words += len(message["content"].split())
        cost = Cost(calls=1, prompt_tokens=words, new_tokens=len(text.split()))
        return Reply(text, cost)

    def _reply(self, instructions: str, parts: Mapping[str, str]) -> str:
        """Return the reply to the step that the instructions name."""
        word = parts["text"].strip()
        examples = self._examples[word]
        if "Unknown" in instructions:
            return _answer(_with_context(examples, parts["context"]))
        examples = [example for example in examples if _LANGUAGES[example.language] in instructions]
        if not examples:
            return "None"
        if "write None" in instructions:
            question, answers = _QUESTIONS[examples[0].kind]
            return format_question(question.format(word=word), answers)
        return _output(examples, parts)


def _with_context(examples: Sequence[AmbiguousExample], context: str) -> list[AmbiguousExample]:
    return [example for example in examples if " ".join(example.context) == context]


def _answer(examples: Sequence[AmbiguousExample]) -> str:
    """Return the answer of a user, which is wrong for one example in ten."""
    if not examples or examples[0].label is None:
        return "Unknown"
    example = examples[0]
    right = right_label(example)
    if digit(example) != 0:
        return right
    _, answers = _QUESTIONS[example.kind]
    return next(answer for answer in answers if answer != right)


def _output(examples: Sequence[AmbiguousExample], parts: Mapping[str, str]) -> str:
    """Return the reference of an example if the parts of the prompt lead to it, otherwise a wrong translation."""
    if "answer" in parts:
        right = [example for example in examples if right_label(example) == parts["answer"]]
    elif "context" in parts:
        right = [example for example in _with_context(examples, parts["context"]) if digit(example) < 8]
    else:
        right = [example for example in examples[:1] if digit(example) % 2 == 0]
    if right:
        return right[0].reference
    return examples[0].contrast or examples[0].source


def right_label(example: AmbiguousExample) -> str:
    """Return the answer that leads to the reference."""
    if example.kind == "polysemy":
        _, answers = _QUESTIONS["polysemy"]
        return answers[0]
    return example.label or ""


def digit(example: AmbiguousExample) -> int:
    """Return a fixed digit for an example; digits are evenly distributed."""
    hashed = hashlib.sha256(f"{example.id} {example.source}".encode()).digest()
    return hashed[0] % 10
