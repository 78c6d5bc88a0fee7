"""A translator that knows the references and makes known mistakes. It shows that the harness works, not how models do.

- Asked for a question, it asks for the label of the example and offers the labels as answers.
- As a user it gives the right label, except for one example in ten.
- Given a label, it writes the reference if the label is right. Otherwise it writes the contrast, or the source.
- With the context it is right for four examples in five, and without for one in two.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.clarify.datasets import AmbiguousExample
from graftlm.pipelines.clarify import Cost, Reply
from graftlm.pipelines.clarify.prompts import Prompt

NAME = "scripted"
_LANGUAGES = {"es": "Spanish", "fr": "French", "de": "German", "ja": "Japanese"}
_QUESTIONS = {
    "formality": ('Who is "you"?', ("formal", "informal")),
    "it": ('What is "it"?', ("masculine", "feminine", "neuter")),
    "polysemy": ('What does "{word}" mean?', ("the meaning in question", "another one")),
    "name": ("Is this person a man or a woman?", ("masculine", "feminine")),
    "profession": ("Is this person a man or a woman?", ("masculine", "feminine")),
}


class ScriptedTranslator:
    """Replies to prompts about known examples.

    Several examples may share a text. Then the answer or the context selects one of them, else the first.
    """

    def __init__(self, examples: Iterable[AmbiguousExample], name: str = NAME) -> None:
        self.name = name
        self._examples: defaultdict[str, list[AmbiguousExample]] = defaultdict(list)
        for example in examples:
            self._examples[example.source.strip()].append(example)

    def generate(self, prompt: Prompt, **_: Any) -> Reply:
        """Reply to a prompt; words count as tokens."""
        text = self._reply(prompt.instructions, dict(prompt.parts))
        words = sum(len(message["content"].split()) for message in prompt.messages())
        return Reply(text, Cost(calls=1, prompt_tokens=words, new_tokens=len(text.split())))

    def _reply(self, instructions: str, parts: Mapping[str, str]) -> str:
        examples = self._examples[parts["text"].strip()]
        if "Unknown" in instructions:
            return _answer([example for example in examples if " ".join(example.context) == parts["context"]])
        examples = [example for example in examples if _LANGUAGES[example.language] in instructions]
        if not examples:
            return "None"
        if "write None" in instructions:
            question, answers = _QUESTIONS[examples[0].kind]
            return f"{question.format(word=parts['text'].strip())} [{' | '.join(answers)}]"
        return _output(examples, parts)


def _answer(examples: Sequence[AmbiguousExample]) -> str:
    if not examples or examples[0].label is None:
        return "Unknown"
    right = right_label(examples[0])
    wrong = next(answer for answer in _QUESTIONS[examples[0].kind][1] if answer != right)
    return wrong if digit(examples[0]) == 0 else right


def _output(examples: Sequence[AmbiguousExample], parts: Mapping[str, str]) -> str:
    if "answer" in parts:
        right = next((example for example in examples if right_label(example) == parts["answer"]), None)
    elif "context" in parts:
        matching = (example for example in examples if " ".join(example.context) == parts["context"])
        right = next((example for example in matching if digit(example) < 8), None)
    else:
        right = examples[0] if digit(examples[0]) % 2 == 0 else None
    return right.reference if right is not None else examples[0].contrast or examples[0].source


def right_label(example: AmbiguousExample) -> str:
    """The answer that leads to the reference."""
    return _QUESTIONS["polysemy"][1][0] if example.kind == "polysemy" else example.label or ""


def digit(example: AmbiguousExample) -> int:
    """A fixed digit for each example, evenly distributed."""
    return hashlib.sha256(f"{example.id} {example.source}".encode()).digest()[0] % 10
