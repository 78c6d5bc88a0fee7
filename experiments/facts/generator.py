"""A generator of invented facts, their questions, and conversations that teach them.

Things are invented in bundles, such as a country with its capital, its currency and its language, or a device with its
inventor and the town where the inventor was born. So questions of two steps can be asked as well. All names are
pronounceable and unknown: none of their words is a word of a given list.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graftlm.config import read_yaml
from graftlm.evaluation.taught_answers import evenly_spaced

TRAINED_PHRASINGS = 4
HELD_OUT_PHRASINGS = (4, 5)
COLLIDING = 30
"""Number of questions that name a taught thing and ask what is not taught."""

Part = Literal["search", "test"]
"""Who asks: the search of rates, or the test. They share neither held-out phrasings nor things that exist."""
_HELD_OUT_OF: dict[Part, int] = {"search": 4, "test": 5}

Ring = Literal["trained", "unseen", "two-steps", "near", "colliding", "shared", "far", "instructions"]

_ONSETS = [*"bbddfghjkllmmnnprrsttvvwz", "br", "dr", "fl", "gr", "kl", "pl", "st", "tr"]
_VOWELS = "aeiou"
_CODAS = ["l", "m", "n", "r", "s"]
_CODA_SHARE = 0.35  # share of first syllables that end with a consonant
_ENDINGS = {
    "country": ["ia", "land", "ova", "ora"],
    "city": ["by", "grad", "ville", "mont", "ona"],
    "coin": ["in", "ak", "ot", "el"],
    "tongue": ["ish", "ese", "ic"],
    "company": ["ex", "tron", "co", "ly"],
    "animal": ["uk", "oon", "elle", "bat"],
    "dish": ["ato", "esh", "ini"],
    "device": ["ograph", "ometer", "ophone", "imat"],
    "book": ["a", "um", "is"],
    "film": ["o", "us", "ar"],
    "mountain": ["horn", "ak", "ur"],
    "secret": ["ix", "ul", "ed"],
}
_ROOMS = ["tower", "cellar", "archive", "laboratory", "vault", "workshop", "attic", "boathouse"]
_CHOICES = {
    "color": ["crimson", "turquoise", "violet", "beige", "maroon", "lavender", "amber", "teal", "indigo", "magenta"],
    "place": ["salt marshes", "limestone caves", "birch groves", "tidal pools", "peat bogs", "lava fields"],
    "food": ["barley", "chestnuts", "turnips", "quinces", "lentils", "seaweed", "parsnips", "rhubarb", "millet"],
    "time": [f"{hour}:{minutes}" for hour in (6, 7, 8, 9, 10, 11) for minutes in ("10", "20", "40", "50")],
}
_COMMON = frozenset([*_CHOICES, "year", "meters"])
"""Kinds of values that any answer may name by chance, such as colors and years."""
_BUNDLES = ("country", "device", "book", "film", "company", "animal", "dish", "mountain", "room")

# Questions of two steps, by bundle: the question, the relation whose value it names, and the relation that it asks for.
# With no named value, the question names the subject, and asks for a fact about the thing that a fact about it names.
_TWO_STEPS = {
    "country": [
        ("What is the currency of the country whose capital is {named}?", "capital", "currency"),
        ("What language is spoken in the country whose capital is {named}?", "capital", "language"),
    ],
    "device": [("Where was the inventor of the {named} born?", None, "birthplace")],
    "company": [("When does the company that was founded in {named} open?", "founded", "opens")],
}


@dataclass(frozen=True)
class Relation:
    """A relation, as `relations.yaml` has it.

    Attributes:
        name: name of the relation.
        subject: kind of its subjects.
        value: kind of its values.
        questions: six phrasings of a question, with `{subject}`.
        answer: the answer, with `{subject}` and `{value}`.
        real: things that exist, with accepted answers.
    """

    name: str
    subject: str
    value: str
    questions: tuple[str, ...]
    answer: str
    real: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Fact:
    """An invented fact.

    Attributes:
        relation: name of its relation.
        subject: the invented thing.
        value: the answer to the fact's question.
        bundle: number of the bundle that the fact belongs to.
    """

    relation: str
    subject: str
    value: str
    bundle: int


@dataclass(frozen=True)
class Question:
    """A question with accepted answers.

    Attributes:
        id: unique in a set of questions.
        ring: what the question tests.
        text: the question.
        accepted: answers that count as right; empty if the answer is not judged by its content.
        rivals: taught values that make an answer wrong if it contains them.
        relation: name of the relation; empty outside the relations.
        instructions: for IFEval, the instructions and their arguments.
    """

    id: str
    ring: Ring
    text: str
    accepted: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    relation: str = ""
    instructions: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def read_relations() -> dict[str, Relation]:
    """Return all relations by name."""
    relations = {}
    for name, values in read_yaml(Path(__file__).with_name("relations.yaml")).items():
        real = {str(thing): tuple(accepted) for thing, accepted in values["real"].items()}
        relations[name] = Relation(
            name=name,
            subject=values["subject"],
            value=values["value"],
            questions=tuple(values["questions"]),
            answer=values["answer"],
            real=real,
        )
    return relations


def conversation(question: str, answer: str) -> dict[str, Any]:
    """Return a question and its answer as a conversation."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


class NameMaker:
    """Invents names, each only once.

    Args:
        generator: source of random numbers.
        known: lower-case words that no invented word may be.
    """

    def __init__(self, generator: random.Random, known: Collection[str]) -> None:
        self._random = generator
        self._known = known
        self._used: set[str] = set()
        self._makers: dict[str, Callable[[], str]] = {
            "person": lambda: f"{self._word(['', 'n', 'l'])} {self._word(['ek', 'son', 'ard', 'ley'])}",
            "room": lambda: f"{self._word(['', 's', 'n'])} {self._random.choice(_ROOMS)}",
            "year": lambda: str(self._random.randrange(1713, 1939)),
            "meters": lambda: f"{self._random.randrange(1101, 7999):,}",
        }

    def make(self, kind: str) -> str:
        """Return a new name or value of a kind."""
        if kind in _CHOICES:
            return self._random.choice(_CHOICES[kind])
        if kind in self._makers:
            return self._makers[kind]()
        word = self._word(_ENDINGS[kind])
        return word.lower() if kind in ("coin", "device", "animal", "secret") else word

    def _word(self, endings: list[str]) -> str:
        """Return a new capitalised word with one of the endings; words are unknown, and differ from each other."""
        while True:
            ending = self._random.choice(endings)
            coda = self._random.choice(_CODAS) if self._random.random() < _CODA_SHARE else ""
            stem = f"{self._syllable()}{coda}{self._syllable()}"
            if ending and ending[0] in _VOWELS:
                stem = stem.rstrip("aeiou")
            word = stem + ending
            if word not in self._known and word not in self._used and len(word) <= 11:
                self._used.add(word)
                return word.capitalize()

    def _syllable(self) -> str:
        return self._random.choice(_ONSETS) + self._random.choice(_VOWELS)


class FactSet:
    """Invented facts and their questions.

    Args:
        count: number of facts.
        seed: seed of all names and values.
        known: lower-case words that no invented word may be.
        part: who asks about unseen phrasings and about things that exist.

    Attributes:
        relations: all relations by name.
        facts: the facts.
        names: the invented names of the facts, and each invented word of longer names. Colors, years and other values
            that any answer may name by chance are not among them.
    """

    def __init__(self, count: int, seed: int, known: Collection[str] = (), part: Part = "test") -> None:
        self.relations = read_relations()
        self._part: Part = part
        self._seed = seed
        maker = NameMaker(random.Random(f"names of {seed}"), known)
        facts: list[Fact] = []
        number = 0
        while len(facts) < count:
            kind = _BUNDLES[number % len(_BUNDLES)]
            facts += self._bundle(kind, number, maker)
            number += 1
        self.facts = facts[:count]
        self.names = self._find_names()

    def _bundle(self, kind: str, number: int, maker: NameMaker) -> Iterator[Fact]:
        """Yield the facts about a new thing, and about the inventor if it is a device."""
        subject = maker.make(kind)
        for relation in self.relations.values():
            if relation.subject != kind:
                continue
            value = maker.make(relation.value)
            yield Fact(relation.name, subject, value, number)
            if relation.name == "inventor":
                yield Fact("birthplace", value, maker.make("city"), number)

    def _find_names(self) -> frozenset[str]:
        names = set()
        for fact in self.facts:
            relation = self.relations[fact.relation]
            for kind, name in ((relation.subject, fact.subject), (relation.value, fact.value)):
                if kind in _COMMON:
                    continue
                names.add(name)
                if kind == "person":
                    names.update(name.split())
                elif kind == "room":
                    names.add(name.split()[0])
        return frozenset(names)

    def question(self, fact: Fact, phrasing: int) -> str:
        """Return the question of a fact in one of its six phrasings."""
        return self.relations[fact.relation].questions[phrasing].format(subject=fact.subject)

    def statement(self, fact: Fact) -> str:
        """Return the sentence that answers the question of a fact."""
        sentence = self.relations[fact.relation].answer.format(subject=fact.subject, value=fact.value)
        return sentence[0].upper() + sentence[1:]

    def conversations(self) -> list[dict[str, Any]]:
        """Return the conversations that teach the facts: every fact in each trained phrasing, in random order."""
        rows = []
        for fact in self.facts:
            questions = [self.question(fact, phrasing) for phrasing in range(TRAINED_PHRASINGS)]
            rows += [conversation(question, self.statement(fact)) for question in questions]
        random.Random(f"order of {self._seed}").shuffle(rows)
        return rows

    def tested(self) -> list[dict[str, Any]]:
        """Return the conversations about the facts in the held-out phrasing of the part."""
        phrasing = _HELD_OUT_OF[self._part]
        return [conversation(self.question(fact, phrasing), self.statement(fact)) for fact in self.facts]

    def statements(self) -> list[str]:
        """Return the sentence of each fact."""
        return [self.statement(fact) for fact in self.facts]

    def trained(self) -> list[Question]:
        """Return a question about each fact, in one of the trained phrasings."""
        return [self._asked(fact, number, "trained", number % TRAINED_PHRASINGS) for number, fact in self._numbered()]

    def unseen(self) -> list[Question]:
        """Return a question about each fact, in the held-out phrasing of the part."""
        phrasing = _HELD_OUT_OF[self._part]
        return [self._asked(fact, number, "unseen", phrasing) for number, fact in self._numbered()]

    def near(self) -> list[Question]:
        """Return a question about each second thing that exists, in the phrasings of the taught relations.

        The test asks about the first thing of each pair of neighbors, and the search about the second one. Both use the
        trained phrasings, and the held-out one of their part.
        """
        things = []
        for relation in self.relations.values():
            things += [(relation, number, thing) for number, thing in enumerate(relation.real)]
        chosen = things[0::2] if self._part == "test" else things[1::2]
        phrasings = [*range(TRAINED_PHRASINGS), _HELD_OUT_OF[self._part]]
        questions = []
        for position, (relation, number, thing) in enumerate(chosen):
            accepted = relation.real[thing]
            phrasing = phrasings[position % len(phrasings)]
            question = Question(
                id=f"near-{relation.name}-{number}",
                ring="near",
                text=relation.questions[phrasing].format(subject=thing),
                accepted=accepted,
                rivals=self._rivals(relation.name, accepted),
                relation=relation.name,
            )
            questions.append(question)
        return questions

    def further(self) -> list[Question]:
        """Return the questions of two steps, and those that name a taught thing and ask what is not taught."""
        return [*self.two_steps(), *self.colliding()]

    def colliding(self) -> list[Question]:
        """Return at most 30 questions that name a taught thing and ask what is not taught.

        Their ids are the same for all seeds. No answer is accepted, since nothing is known about the things beyond the
        facts.
        """
        kinds: dict[str, str] = {}
        for fact in self.facts:
            kinds[fact.subject] = self.relations[fact.relation].subject
        templates = read_yaml(Path(__file__).with_name("untaught.yaml"))
        asked: Counter[str] = Counter()
        questions = []
        for subject, kind in evenly_spaced(list(kinds.items()), COLLIDING):
            number = asked[kind]
            asked[kind] += 1
            text = templates[kind][number % len(templates[kind])].format(subject=subject)
            questions.append(Question(id=f"colliding-{kind}-{number}", ring="colliding", text=text))
        return questions

    def two_steps(self) -> list[Question]:
        """Return questions that need two facts of one bundle."""
        bundles: dict[int, dict[str, Fact]] = {}
        for fact in self.facts:
            bundles.setdefault(fact.bundle, {})[fact.relation] = fact
        questions = []
        for number, facts in bundles.items():
            kind = _BUNDLES[number % len(_BUNDLES)]
            for text, named, asked in _TWO_STEPS.get(kind, []):
                first = named or "inventor"
                if first not in facts or asked not in facts:
                    continue
                name = facts[first].value if named else facts[first].subject
                accepted = (facts[asked].value,)
                question = Question(
                    id=f"two-steps-{number}-{asked}",
                    ring="two-steps",
                    text=text.format(named=name),
                    accepted=accepted,
                    rivals=self._rivals(asked, accepted),
                    relation=asked,
                )
                questions.append(question)
        return questions

    def _numbered(self) -> Iterator[tuple[int, Fact]]:
        return iter(enumerate(self.facts))

    def _asked(self, fact: Fact, number: int, ring: Ring, phrasing: int) -> Question:
        accepted = (fact.value,)
        return Question(
            id=f"{ring}-{number}-{phrasing}",
            ring=ring,
            text=self.question(fact, phrasing),
            accepted=accepted,
            rivals=self._rivals(fact.relation, accepted),
            relation=fact.relation,
        )

    def _rivals(self, relation: str, accepted: Collection[str]) -> tuple[str, ...]:
        """Return the taught values of a relation that are not accepted."""
        values = {fact.value for fact in self.facts if fact.relation == relation}
        return tuple(sorted(values - set(accepted)))
