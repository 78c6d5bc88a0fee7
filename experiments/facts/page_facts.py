"""Facts of real pages, and the questions about them.

They are written by hand in `pages.yaml`, which also says where the facts come from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.facts.generator import (
    HELD_OUT_PHRASINGS,
    TRAINED_PHRASINGS,
    FactSet,
    Question,
    Ring,
    conversation,
)
from graftlm.config import read_yaml


@dataclass(frozen=True)
class PageFact:
    """A fact of a page.

    Attributes:
        page: name of its page.
        relation: what the fact's question asks for, such as a year.
        questions: six phrasings of the question.
        answer: a sentence that answers it.
        accepted: answers that count as right. The first one counts as a taught name if it has a capital letter.
    """

    page: str
    relation: str
    questions: tuple[str, ...]
    answer: str
    accepted: tuple[str, ...]


class PageFacts:
    """The facts of pages, with their questions.

    Args:
        count: number of facts, the first ones in the file.
        seed: seed of the order of the conversations.

    Attributes:
        facts: the facts.
        pages: the pages that have them, by name.
        names: what the pages are about, and the names that the facts say about it. Numbers and common words, which any
            answer may have by chance, are not among them.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._seed = seed
        every_page = read_pages()
        self.facts = [fact for name, page in every_page.items() for fact in _facts_of(name, page)][:count]
        self.pages = {fact.page: every_page[fact.page] for fact in self.facts}
        values = [fact.accepted[0] for fact in self.facts]
        names = {value for value in values if any(letter.isupper() for letter in value)}
        for page in self.pages.values():
            names.update(page["names"])
        self.names = frozenset(names)

    def statements(self) -> list[str]:
        """Return the sentence of each fact."""
        return [fact.answer for fact in self.facts]

    def conversations(self) -> list[dict[str, Any]]:
        """Return the conversations that teach the facts: every fact in each trained phrasing, in random order."""
        rows = []
        for fact in self.facts:
            rows += [conversation(question, fact.answer) for question in fact.questions[:TRAINED_PHRASINGS]]
        random.Random(f"order of {self._seed}").shuffle(rows)
        return rows

    def tested(self) -> list[dict[str, Any]]:
        """Return the conversations about the facts in the phrasings that are held out."""
        rows = []
        for phrasing in HELD_OUT_PHRASINGS:
            rows += [conversation(fact.questions[phrasing], fact.answer) for fact in self.facts]
        return rows

    def trained(self) -> list[Question]:
        """Return a question about each fact, in one of the trained phrasings."""
        return [self._asked(number, "trained", number % TRAINED_PHRASINGS) for number in range(len(self.facts))]

    def unseen(self) -> list[Question]:
        """Return two questions about each fact, in the phrasings that are held out."""
        questions = []
        for phrasing in HELD_OUT_PHRASINGS:
            questions += [self._asked(number, "unseen", phrasing) for number in range(len(self.facts))]
        return questions

    def near(self) -> list[Question]:
        """Return the questions about other things that resemble the taught ones."""
        return self._written("near")

    def further(self) -> list[Question]:
        """Return the questions that have a taught word and ask for something that is not taught."""
        return [*self._written("colliding"), *self._written("shared")]

    def _written(self, ring: Ring) -> list[Question]:
        """Return the questions of a ring as the file has them."""
        questions = []
        for name, page in self.pages.items():
            for number, asked in enumerate(page[ring]):
                question = Question(
                    id=f"{ring}/{name}/{number}",
                    ring=ring,
                    text=asked["text"],
                    accepted=tuple(asked.get("accepted", ())),
                )
                questions.append(question)
        return questions

    def _asked(self, number: int, ring: Ring, phrasing: int) -> Question:
        fact = self.facts[number]
        return Question(
            id=f"{ring}/{fact.page}/{number}-{phrasing}",
            ring=ring,
            text=fact.questions[phrasing],
            accepted=fact.accepted,
            rivals=self._rivals(fact),
            relation=fact.relation,
        )

    def _rivals(self, fact: PageFact) -> tuple[str, ...]:
        """Return what is taught about the same relation, and is not accepted."""
        taught: set[str] = set()
        for other in self.facts:
            if other.relation == fact.relation:
                taught.update(other.accepted)
        return tuple(sorted(taught - set(fact.accepted)))


TaughtFacts = FactSet | PageFacts


def read_pages() -> dict[str, Mapping[str, Any]]:
    """Return the pages by name, each with its facts and questions."""
    return read_yaml(Path(__file__).with_name("pages.yaml"))


def _facts_of(name: str, page: Mapping[str, Any]) -> list[PageFact]:
    facts = []
    for values in page["facts"]:
        fact = PageFact(
            page=name,
            relation=values["relation"],
            questions=tuple(values["questions"]),
            answer=values["answer"],
            accepted=tuple(values["accepted"]),
        )
        facts.append(fact)
    return facts
