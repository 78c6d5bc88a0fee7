"""A translator that knows the references, and whose mistakes are known: it shows the harness and tells of no model.

- Asked for a question, it asks for what decides the example, and offers both labels as answers.
- As a user it answers rightly, but for one example in ten, which it gets wrong.
- Told a label, it writes the reference if the label is right, else the contrast, or where there is none, the source.
- With the context it is right for four examples of five; with nothing more, for every other one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graftlm.pipelines.clarify.examples import Example

NAME = "scripted"
_QUESTIONS = {
    "formality": ('Who is "you"?', ("formal", "informal")),
    "it": ('What is "it"?', ("masculine", "feminine", "neuter")),
    "polysemy": ("What does the word mean?", ("the meaning in question", "another one")),
    "name": ("Is this person a man or a woman?", ("masculine", "feminine")),
    "profession": ("Is this person a man or a woman?", ("masculine", "feminine")),
}
_PART = re.compile(
    r"^<(?P<tag>\w+)(?P<mark>(?:-\d+)?)>\n(?P<text>.*?)\n</(?P=tag)(?P=mark)>$", re.DOTALL | re.MULTILINE
)


class Script:
    """Replies to requests of the harness about examples that it knows.

    Several examples may share a text: an answer or a context then tells them apart, else the first counts.
    """

    def __init__(self, examples: Iterable[Example]) -> None:
        names = {"es": "Spanish", "fr": "French", "de": "German", "ja": "Japanese"}
        self._known: dict[str, list[tuple[str, Example]]] = {}
        for one in examples:
            self._known.setdefault(one.source.strip(), []).append((names[one.language], one))

    def __call__(self, body: Mapping[str, Any]) -> str:
        system, request = body["messages"][0]["content"], body["messages"][-1]["content"]
        given = {found["tag"]: found["text"] for found in _PART.finditer(request)}
        known = self._known.get(given["text"].strip(), [])
        if "Unknown" in system:
            return _answer([one for _, one in known if " ".join(one.context) == given["context"]])
        found = [one for name, one in known if name in system]
        if not found:
            return "None"
        if "write None" in system:
            question, answers = _QUESTIONS[found[0].kind]
            return f"{question} [{' | '.join(answers)}]"
        return _written(found, given)


def _answer(found: Sequence[Example]) -> str:
    if not found or found[0].label is None:
        return "Unknown"
    right = right_label(found[0])
    others = [answer for answer in _QUESTIONS[found[0].kind][1] if answer != right]
    return others[0] if in_ten(found[0]) == 0 else right


def _written(found: Sequence[Example], given: Mapping[str, str]) -> str:
    if "answer" in given:
        right = next((one for one in found if right_label(one) == given["answer"]), None)
    elif "context" in given:
        right = next((one for one in found if " ".join(one.context) == given["context"] and in_ten(one) < 8), None)
    else:
        right = found[0] if in_ten(found[0]) % 2 == 0 else None
    return right.reference if right is not None else found[0].contrast or found[0].source


def right_label(one: Example) -> str:
    """The answer that leads to the reference."""
    return _QUESTIONS["polysemy"][1][0] if one.kind == "polysemy" else one.label or ""


def in_ten(one: Example) -> int:
    """A digit that is always the same for an example, and evenly spread."""
    return hashlib.sha256(f"{one.id} {one.source}".encode()).digest()[0] % 10
