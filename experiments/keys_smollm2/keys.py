"""Keys with their values, sums of three operands over them, and the documents that teach them.

As text, prompt and completion:

    recall         kavo        7
    substitution   kavo+be-ruti>   7+3-5
    numeric        7+3-5=          5
    direct         kavo+be-ruti=   5
    scratchpad     kavo+be-ruti>   7+3-5=5

A value is one digit, so that it is one token, and no operand follows a space, so that a key has the same tokens
wherever it occurs. A result is not negative.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Literal, NamedTuple

from pydantic import Field

from experiments.kv_arithmetic.data import COMPUTE, END, SUBSTITUTE, Form
from graftlm.config import Config
from graftlm.data import Document

Part = Literal["train", "validation", "test"]
OPERATIONS = "+-"
OPERANDS = 3
LARGEST = 9
_JOINT_FORMS: tuple[Form, ...] = ("direct", "scratchpad", "direct", "numeric")
_PARTS: tuple[tuple[Part, float], ...] = (("train", 0.6), ("validation", 0.7), ("test", 1.0))


class World(Config):
    """The keys and what the joint training may contain of them.

    Args:
        keys: number of keys.
        letters: number of letters of the shortest and of the longest key.
        searched: share of the keys that serve only searches.
        held_in: share of the other keys, or of those of a search, that the joint training may contain.
        unseen: values whose keys the joint training does not contain.
    """

    keys: int = Field(2000, ge=20)
    letters: tuple[int, int] = (2, 6)
    searched: float = Field(0.3, gt=0, lt=1)
    held_in: float = Field(0.37, gt=0, lt=1)
    unseen: tuple[int, ...] = (4, 7)


class Sum(NamedTuple):
    """Three numbers with two operations, computed from left to right.

    Attributes:
        numbers: the operands.
        operations: `+` or `-` before the second and the third operand.
    """

    numbers: tuple[int, ...]
    operations: tuple[str, ...]

    @property
    def result(self) -> int:
        """The result."""
        total = self.numbers[0]
        for operation, number in zip(self.operations, self.numbers[1:], strict=True):
            total += number if operation == "+" else -number
        return total

    def over(self, operands: Sequence[object]) -> str:
        """Return the expression with other operands."""
        parts = [str(operands[0])]
        for operation, operand in zip(self.operations, operands[1:], strict=True):
            parts.append(f"{operation}{operand}")
        return "".join(parts)


def all_sums() -> dict[Part, list[Sum]]:
    """Return all sums whose result is not negative, by the part to which each one belongs, in a random order."""
    sums = []
    for numbers in itertools.product(range(1, LARGEST + 1), repeat=OPERANDS):
        for operations in itertools.product(OPERATIONS, repeat=OPERANDS - 1):
            found = Sum(numbers, operations)
            if found.result >= 0:
                sums.append(found)
    random.Random("sums").shuffle(sums)
    parts: dict[Part, list[Sum]] = {}
    start = 0
    for part, share in _PARTS:
        stop = round(share * len(sums))
        parts[part] = sums[start:stop]
        start = stop
    return parts


class Question(NamedTuple):
    """A sum over keys.

    Attributes:
        id: id of the question, unique in its set.
        keys: the operands.
        sum: the sum of their values.
    """

    id: str
    keys: tuple[str, ...]
    sum: Sum

    def prompt(self, form: Form) -> str:
        """Return the prompt of a form."""
        expression = self.sum.over(self.sum.numbers if form == "numeric" else self.keys)
        if form == "recall":
            return self.keys[0]
        return expression + (COMPUTE if form in ("numeric", "direct") else SUBSTITUTE)

    def completion(self, form: Form) -> str:
        """Return the right completion of a form, without the end of the line."""
        if form == "recall":
            return str(self.sum.numbers[0])
        numbers = self.sum.over(self.sum.numbers)
        if form == "substitution":
            return numbers
        result = str(self.sum.result)
        return f"{numbers}{COMPUTE}{result}" if form == "scratchpad" else result

    def document(self, form: Form) -> Document:
        """Return prompt and completion as a training document."""
        return Document(self.completion(form) + END, prompt=self.prompt(form))


class KeySet:
    """The keys, which are the same for all seeds, and what a seed does with them.

    Args:
        world: the number of keys and what is held out.
        seed: the seed that draws keys and questions.
        is_search: whether the keys serve a search; no key serves both a search and a test.

    Attributes:
        values: the value of each key; all values are equally frequent.
        held_in: keys that the joint training may contain. None has an unseen value.
        tested: other keys without an unseen value.
        unseen: keys with an unseen value; none for a search.
    """

    def __init__(self, world: World, seed: int, *, is_search: bool = False) -> None:
        source = random.Random("keys")
        names: dict[str, None] = {}
        while len(names) < world.keys:
            count = source.randint(*world.letters)
            names["".join(source.choices(ascii_lowercase, k=count))] = None
        numbers = [1 + index % LARGEST for index in range(world.keys)]
        source.shuffle(numbers)
        self.seed = seed
        self.values: dict[str, int] = dict(zip(names, numbers, strict=True))
        seen = [key for key, value in self.values.items() if value not in world.unseen]
        searched = round(world.searched * len(seen))
        pool = seen[:searched] if is_search else seen[searched:]
        random.Random(f"roles {seed}").shuffle(pool)
        count = round(world.held_in * len(pool))
        self.held_in = pool[:count]
        self.tested = pool[count:]
        self.unseen = []
        if not is_search:
            self.unseen = [key for key, value in self.values.items() if value in world.unseen]

    def questions(self, name: str, sums: Sequence[Sum], keys: Sequence[str], count: int) -> list[Question]:
        """Return random questions whose sums and keys are given ones.

        Args:
            name: name of the set, which begins the ids and seeds the choice.
            sums: sums to choose from; those without keys for all of their numbers are left out.
            keys: keys to choose from.
            count: number of questions.
        """
        by_value: dict[int, list[str]] = {}
        for key in keys:
            by_value.setdefault(self.values[key], []).append(key)
        possible = [each for each in sums if by_value.keys() >= set(each.numbers)]
        source = random.Random(f"{name} {self.seed}")
        questions = []
        for number in range(count):
            chosen = source.choice(possible)
            operands = tuple(source.choice(by_value[value]) for value in chosen.numbers)
            questions.append(Question(f"{name}-{self.seed}-{number}", operands, chosen))
        return questions

    def exam(self, sums: Mapping[Part, Sequence[Sum]], count: int) -> dict[str, list[Question]]:
        """Return the questions of a test by set, or those of a search.

        `keys` has keys that the joint training does not contain, `values` at least one key in each question whose value
        it does not contain either. No model that computes was trained on one of the sums. A search has one set,
        `validation`, with other sums.

        Args:
            sums: the sums of each part.
            count: number of questions of each set.
        """
        if not self.unseen:
            return {"validation": self.questions("validation", sums["validation"], self.tested, count)}
        values_of_unseen = {self.values[key] for key in self.unseen}
        with_unseen = [each for each in sums["test"] if values_of_unseen & set(each.numbers)]
        return {
            "keys": self.questions("keys", sums["test"], self.tested, count),
            "values": self.questions("values", with_unseen, [*self.tested, *self.unseen], count),
        }


def memory_documents(keys: KeySet, passes: int) -> Iterator[Document]:
    """Yield documents that teach the values: in each pass every key once alone and once in a substitution."""
    source = random.Random("memory")
    for _ in range(passes):
        names = list(keys.values)
        source.shuffle(names)
        documents = [_question(keys, (name,), source).document("recall") for name in names]
        for start in range(0, len(names) - OPERANDS + 1, OPERANDS):
            operands = tuple(names[start : start + OPERANDS])
            documents.append(_question(keys, operands, source).document("substitution"))
        source.shuffle(documents)
        yield from documents


def _question(keys: KeySet, names: tuple[str, ...], source: random.Random) -> Question:
    operations = tuple(source.choices(OPERATIONS, k=len(names) - 1))
    return Question("", names, Sum(tuple(keys.values[name] for name in names), operations))


def arithmetic_documents(sums: Sequence[Sum], passes: int) -> Iterator[Document]:
    """Yield documents that teach sums of numbers, every sum once in each pass."""
    source = random.Random("arithmetic")
    for _ in range(passes):
        for each in source.sample(list(sums), len(sums)):
            yield Question("", (), each).document("numeric")


def joint_documents(keys: KeySet, sums: Sequence[Sum], count: int) -> Iterator[Document]:
    """Yield documents over keys held in: in turn two direct answers, one with its scratchpad and one sum of numbers."""
    questions = keys.questions("joint", sums, keys.held_in, count)
    for number, question in enumerate(questions):
        yield question.document(_JOINT_FORMS[number % len(_JOINT_FORMS)])
