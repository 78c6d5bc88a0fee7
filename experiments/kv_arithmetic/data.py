"""Keys, their values, expressions over two of them, and the data sets of training and tests.

The three sets of the paper:

    KV-SUBS     abc+def  ->  12+34            NUM-MATH    12+34  ->  46            KV-MATH    abc+def  ->  46

As text, prompt and completion:

    substitution   abc+def>   #012+#034         numeric      #012+#034=   640
    scratchpad     abc+def>   #012+#034=640     direct       abc+def=     640
    recall         abc+def    #034

An operand, `abc` or `#012`, is one token, or three characters with `whole: false`; every other character is a token. A
result has as many digits as the largest value, ones first, and lies in the range of the values.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase, digits
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graftlm.config import Config
from graftlm.data import Document
from graftlm.errors import DataError

Form = Literal["substitution", "scratchpad", "direct", "numeric", "recall"]
SUBSTITUTE = ">"
COMPUTE = "="
END = "\n"
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "*": operator.mul,
    "+": operator.add,
    "-": operator.sub,
}
_PAD = "<|pad|>"
_NUMBER = "#"
_TRIES = 1000


class World(Config):
    """The form of keys, numbers and expressions.

    Args:
        keys: number of keys.
        largest: values are the integers from 1 to this number, all equally frequent.
        letters: length of a key in letters.
        whole: an operand is one token, a key or `#012`; otherwise keys are letters, and numbers digits as in a result.
        operations: the operations, all equally likely.
        held_in: share of the values whose keys the joint training data may contain.
    """

    keys: int = Field(2000, ge=10)
    largest: int = Field(999, ge=9)
    letters: int = Field(3, ge=1)
    whole: bool = True
    operations: str = "+-*"
    held_in: float = Field(0.2, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = len(ascii_lowercase) ** self.letters
        if names < 2 * self.keys:  # Half of the names remain for words that are not keys.
            raise ValueError(f"{self.keys} keys take {2 * self.keys} names, and there are {names}: allow more letters")
        return self

    @property
    def digits(self) -> int:
        """The number of digits of a number."""
        return len(str(self.largest))

    def result(self, value: int) -> str:
        """Return the text of a result: its digits, ones first."""
        text = f"{value:0{self.digits}}"
        return text[::-1]

    def spelled(self, number: str) -> str:
        """Return the text of an operand in the form of a result."""
        return number[:0:-1] if self.whole else number

    def number(self, value: int) -> str:
        """Return the text of an operand."""
        if self.whole:
            return f"{_NUMBER}{value:0{self.digits}}"
        return self.result(value)


@dataclass(frozen=True)
class Expression:
    """Two operands, keys or numbers as text, with an operation between them."""

    first: str
    operation: str
    second: str

    def __str__(self) -> str:
        return self.first + self.operation + self.second

    def in_order(self) -> Expression:
        """Return the same expression with its operands sorted, if their order does not matter."""
        commutative = self.operation in "+*"
        if commutative and self.first > self.second:
            return Expression(self.second, self.operation, self.first)
        return self


@dataclass(frozen=True)
class Pairs:
    """All keys with their values; the joint training data may contain only the keys held in."""

    values: dict[str, int]
    held_in: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class ArithmeticTask:
    """An expression over keys, the same expression over their values, and its result."""

    keys: Expression
    numbers: Expression
    result: str

    def prompt(self, form: Form) -> str:
        """Return the prompt."""
        if form == "numeric":
            return f"{self.numbers}{COMPUTE}"
        if form == "direct":
            return f"{self.keys}{COMPUTE}"
        if form == "recall":
            return f"{self.keys}"
        return f"{self.keys}{SUBSTITUTE}"

    def completion(self, form: Form) -> str:
        """Return the right completion, without the end of the line."""
        if form == "substitution":
            return f"{self.numbers}"
        if form == "recall":
            return self.numbers.second
        if form == "scratchpad":
            return f"{self.numbers}{COMPUTE}{self.result}"
        return self.result

    def document(self, form: Form) -> Document:
        """Return prompt and completion as a training document."""
        return Document(self.completion(form) + END, prompt=self.prompt(form))

    def expressions(self) -> set[Expression]:
        """Return the expressions over keys and over numbers, with sorted operands."""
        return {self.keys.in_order(), self.numbers.in_order()}


def make_pairs(world: World, seed: int) -> Pairs:
    """Return random keys and values; the keys of a share of the values are held in, evenly over the values.

    No key held out has the value of a key held in. A random share might contain few small values, of which all products
    are made.
    """
    source = random.Random(f"pairs {seed}")
    names: dict[str, None] = {}
    while len(names) < world.keys:
        names[word(world, source)] = None
    numbers = [1 + index % world.largest for index in range(world.keys)]
    source.shuffle(numbers)
    values = dict(zip(names, numbers, strict=True))
    count = round(world.held_in * world.largest)
    bounds = [index * world.largest // count for index in range(count + 1)]
    chosen = {source.randrange(start, end) + 1 for start, end in pairwise(bounds)}
    return Pairs(
        values=values,
        held_in=tuple(key for key, value in values.items() if value in chosen),
        held_out=tuple(key for key, value in values.items() if value not in chosen),
    )


def tasks(
    world: World,
    pairs: Pairs,
    keys: Sequence[str],
    source: random.Random,
    without: Collection[Expression] = (),
) -> Iterator[ArithmeticTask]:
    """Yield tasks without end: any operation, any values whose result stays in range, any keys of these values.

    Args:
        world: form of keys, numbers and expressions.
        pairs: all keys with their values.
        keys: keys that may be operands.
        source: source of random numbers.
        without: expressions with sorted operands, over keys or numbers, that no task has in any order.

    Raises:
        DataError: the keys allow too few other expressions.
    """
    by_value: dict[int, list[str]] = {}
    for key in keys:
        by_value.setdefault(pairs.values[key], []).append(key)
    values = np.array([*by_value])
    ranges = {}
    for name, operation in OPERATIONS.items():
        ranges[name] = _in_range(operation, values, world.largest)
    tries = 0
    while tries < _TRIES:
        tries += 1
        name = source.choice(world.operations)
        in_range = ranges[name]
        if not len(in_range):
            continue
        first, second = in_range[source.randrange(len(in_range))]
        a = int(values[first])
        b = int(values[second])
        key_of_a = source.choice(by_value[a])
        key_of_b = source.choice(by_value[b])
        task = ArithmeticTask(
            keys=Expression(key_of_a, name, key_of_b),
            numbers=Expression(world.number(a), name, world.number(b)),
            result=world.result(OPERATIONS[name](a, b)),
        )
        if not any(expression in without for expression in task.expressions()):
            yield task
            tries = 0
    raise DataError(f"{len(keys)} keys allow too few expressions: use more keys, or fewer tasks.")


def _in_range(operation: Callable[[Any, Any], Any], values: np.ndarray, largest: int) -> np.ndarray:
    """Return (pairs, 2) all indices of two operands whose result is from 1 to `largest`."""
    results = operation(values[:, None], values[None])
    return np.argwhere((results >= 1) & (results <= largest))


def noise(world: World, source: random.Random, names: Container[str]) -> str:
    """Return irrelevant text before an expression: an expression over words that are not keys.

    The words are shorter than keys if keys are whole tokens.
    """
    if world.whole:
        length = max(1, world.letters - 1)
        first = letters(source, length)
        second = letters(source, length)
    else:
        first = word(world, source, names)
        second = word(world, source, names)
    expression = Expression(first, source.choice(world.operations), second)
    return f"{expression}{SUBSTITUTE}"


def word(world: World, source: random.Random, names: Container[str] = ()) -> str:
    """Return a random word in the form of a key that is not in `names`."""
    while True:
        name = letters(source, world.letters)
        if name not in names:
            return name


def letters(source: random.Random, count: int) -> str:
    """Return random letters."""
    return "".join(source.choices(ascii_lowercase, k=count))


def make_tokenizer(world: World, keys: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character, and for each key and number if they are whole."""
    tokens = [_PAD, END, *ascii_lowercase, *digits, *OPERATIONS, SUBSTITUTE, COMPUTE]
    pattern = r"[\s\S]"
    if world.whole:
        tokens += sorted(keys)
        tokens += [world.number(value) for value in range(1, world.largest + 1)]
        pattern = rf"{_NUMBER}[0-9]+|[a-z]{{{world.letters}}}|{pattern}"
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD)
