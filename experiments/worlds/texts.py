"""Worlds of invented facts, the conversations that teach them, and questions about one world or two.

A world has the facts about some kinds of things, such as countries and mountains. The conversations of a world ask for
one of its facts, or for two in one question. No conversation asks for facts of two worlds.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.facts.generator import TRAINED_PHRASINGS, Fact, FactSet, Part, Question, conversation
from experiments.facts.metrics import Answers, Items, is_right

WORLDS = {
    "lands": ("country", "mountain"),
    "makers": ("device", "person", "company"),
    "works": ("book", "film"),
    "nature": ("animal", "dish", "room"),
}
"""The kinds of things of each world."""
DOUBLES = 2
"""Number of taught questions for two facts in which each fact is the first one."""

PairKind = Literal["across", "within"]


@dataclass(frozen=True)
class Pair:
    """A question for two facts.

    Attributes:
        id: unique in a set of questions.
        kind: whether the facts are of two worlds (`across`) or of one (`within`).
        worlds: the worlds of both facts.
        parts: the question for each fact.
    """

    id: str
    kind: PairKind
    worlds: tuple[str, str]
    parts: tuple[Question, Question]

    @property
    def text(self) -> str:
        """The question."""
        first, second = self.parts
        return f"{first.text} {second.text}"


class WorldSet:
    """The facts of all worlds, and their questions.

    Args:
        count: number of facts of all worlds together.
        seed: seed of all names, values and pairs.
        known: lower-case words that no invented word may be.
        part: who asks: the search or the test, which share no held-out phrasing.

    Attributes:
        facts: the generator of the facts.
        worlds: the facts of each world.
    """

    def __init__(self, count: int, seed: int, known: Collection[str] = (), part: Part = "test") -> None:
        self.facts = FactSet(count, seed, known, part)
        self._seed = seed
        world_of_kind = {kind: world for world, kinds in WORLDS.items() for kind in kinds}
        self._world_of_relation = {
            name: world_of_kind[relation.subject] for name, relation in self.facts.relations.items()
        }
        self.worlds: dict[str, list[Fact]] = {world: [] for world in WORLDS}
        for fact in self.facts.facts:
            self.worlds[self._world_of_relation[fact.relation]].append(fact)

    def conversations(self, world: str) -> list[dict[str, Any]]:
        """Return the conversations that teach a world, in random order.

        They ask for each fact in every trained phrasing, and for each fact followed by another one.
        """
        generator = random.Random(f"conversations of {world} {self._seed}")
        facts = self.worlds[world]
        rows = []
        for fact in facts:
            statement = self.facts.statement(fact)
            questions = [self.facts.question(fact, phrasing) for phrasing in range(TRAINED_PHRASINGS)]
            rows += [conversation(question, statement) for question in questions]
            for _ in range(DOUBLES):
                other = self._other_relation(fact, facts, generator)
                rows.append(self._double(fact, other, generator))
        generator.shuffle(rows)
        return rows

    def _double(self, first: Fact, second: Fact, generator: random.Random) -> dict[str, Any]:
        questions = []
        statements = []
        for fact in (first, second):
            questions.append(self.facts.question(fact, generator.randrange(TRAINED_PHRASINGS)))
            statements.append(self.facts.statement(fact))
        return conversation(" ".join(questions), " ".join(statements))

    def _other_relation(self, fact: Fact, facts: Sequence[Fact], generator: random.Random) -> Fact:
        """Return a random fact of another relation, so that a value of one can't be taken for one of the other."""
        return generator.choice([other for other in facts if other.relation != fact.relation])

    def world_of(self, question: Question) -> str:
        """Return the world of a question for one fact."""
        return self._world_of_relation[question.relation]

    def pairs(self, kind: PairKind, count: int) -> list[Pair]:
        """Return `count` questions for two facts, in the held-out phrasing of the part."""
        asked = dict(zip(self.facts.facts, self.facts.unseen(), strict=True))
        drawn = self._draw(kind, random.Random(f"pairs {kind} of {self._seed}"))
        pairs: dict[tuple[Fact, Fact], Pair] = {}
        while len(pairs) < count:
            first, second = next(drawn)
            worlds = (self._world_of_relation[first.relation], self._world_of_relation[second.relation])
            name = f"{kind}-{len(pairs)}"
            pairs.setdefault((first, second), Pair(name, kind, worlds, (asked[first], asked[second])))
        return list(pairs.values())

    def _draw(self, kind: PairKind, generator: random.Random) -> Iterator[tuple[Fact, Fact]]:
        """Yield pairs of facts without end; each world is the first one, and the second one, equally often."""
        while True:
            for world in WORLDS:
                facts = self.worlds[world]
                first = generator.choice(facts)
                if kind == "within":
                    yield first, self._other_relation(first, facts, generator)
                else:
                    other = generator.choice([name for name in WORLDS if name != world])
                    yield first, generator.choice(self.worlds[other])


def judge_pairs(pairs: Sequence[Pair], answers: Answers) -> Items:
    """Judge answers to questions for two facts.

    Returns:
        For `across` and `within`, whether the answer gives both facts and no rival of either. For `across_first` and so
        on, whether it gives that fact, whatever it says of the other one.
    """
    items: Items = {}
    for pair in pairs:
        answer = answers[pair.id]
        first, second = (is_right(answer, part.accepted) for part in pair.parts)
        both = all(is_right(answer, part.accepted, part.rivals) for part in pair.parts)
        judgements = {"": both, "_first": first, "_second": second}
        for suffix, value in judgements.items():
            items.setdefault(f"{pair.kind}{suffix}", {})[pair.id] = float(value)
    return items
