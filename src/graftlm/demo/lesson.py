"""What the demo teaches and asks: `facts.yaml` as objects and as files."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from graftlm.config import Config
from graftlm.files.writing import write_atomically


class DemoFact(Config):
    """An invented fact.

    Args:
        value: what a right answer contains.
        answer: the taught answer.
        trained: the phrasings of the question that are trained on.
        asked: a phrasing that is only asked.
    """

    value: str
    answer: str
    trained: list[str] = Field(min_length=1)
    asked: str

    def is_right(self, answer: str) -> bool:
        """Return whether an answer contains the value, regardless of case."""
        return self.value.casefold() in answer.casefold()


class Lesson(Config):
    """What the demo teaches: the facts, and everyday questions whose answers should not change."""

    facts: list[DemoFact] = Field(min_length=1)
    everyday: list[str] = Field(min_length=1)

    @classmethod
    def read(cls) -> Lesson:
        """Read the lesson of the package."""
        return cls.from_yaml(Path(__file__).with_name("facts.yaml"))

    def shortened(self, facts: int, everyday: int) -> Lesson:
        """Return the first facts and everyday questions."""
        return Lesson(facts=self.facts[:facts], everyday=self.everyday[:everyday])

    def questions(self) -> list[str]:
        """Return what is asked: each fact in a phrasing that was not trained on, then the everyday questions."""
        return [*(fact.asked for fact in self.facts), *self.everyday]

    def write_conversations(self, path: Path) -> Path:
        """Write each trained phrasing with its answer as a conversation, one per line, and return the path."""
        lines = []
        for fact in self.facts:
            for question in fact.trained:
                messages = [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": fact.answer},
                ]
                lines.append(json.dumps({"messages": messages}) + "\n")
        return write_atomically(path, "".join(lines).encode())
