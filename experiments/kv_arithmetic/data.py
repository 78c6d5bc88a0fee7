"""Keys, their values, expressions over two of them, and the sets that models are trained and tested on.

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
SUBSTITUTE, COMPUTE, END = ">", "=", "\n"
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {"*": operator.mul, "+": operator.add, "-": operator.sub}
_PAD, _NUMBER = "<|pad|>", "#"
_TRIES = 1000


class World(Config):
    """The form of keys, numbers and expressions.

    Args:
        keys: number of keys.
        largest: values are the integers from 1 to this number, each as often as the others.
        letters: length of a key.
        whole: an operand is one token, a key or `#012`; otherwise keys are letters, and numbers digits as in a result.
        operations: the operations, each equally likely.
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
        if names < 2 * self.keys:  # half of the names are no keys
            raise ValueError(f"{self.keys} keys take {2 * self.keys} names, and there are {names}: allow more letters")
        return self

    @property
    def digits(self) -> int:
        """The number of digits of a number."""
        return len(str(self.largest))

    def result(self, value: int) -> str:
        """The text of a result: its digits, ones first."""
        return f"{value:0{self.digits}}"[::-1]

    def spelled(self, number: str) -> str:
        """The text of an operand as that of a result."""
        return number[:0:-1] if self.whole else number

    def number(self, value: int) -> str:
        """The text of an operand."""
        return f"{_NUMBER}{value:0{self.digits}}" if self.whole else self.result(value)


@dataclass(frozen=True)
class Expression:
    """Two operands, keys or numbers as text, with an operation between them."""

    first: str
    operation: str
    second: str

    def __str__(self) -> str:
        return self.first + self.operation + self.second

    def in_order(self) -> Expression:
        """The same expression with its operands sorted, if their order does not matter."""
        swapped = self.operation in "+*" and self.first > self.second
        return Expression(self.second, self.operation, self.first) if swapped else self


@dataclass(frozen=True)
class Pairs:
    """All keys with their values; the joint training data may contain those held in."""

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
        """The prompt."""
        end = {"substitution": SUBSTITUTE, "scratchpad": SUBSTITUTE, "recall": ""}.get(form, COMPUTE)
        return f"{self.numbers if form == 'numeric' else self.keys}{end}"

    def completion(self, form: Form) -> str:
        """The right completion, without the end of the line."""
        if form == "substitution":
            return f"{self.numbers}"
        if form == "recall":
            return self.numbers.second
        return f"{self.numbers}{COMPUTE}{self.result}" if form == "scratchpad" else self.result

    def document(self, form: Form) -> Document:
        """Prompt and completion as a training document."""
        return Document(self.completion(form) + END, prompt=self.prompt(form))

    def expressions(self) -> set[Expression]:
        """Over keys and over numbers, in order."""
        return {self.keys.in_order(), self.numbers.in_order()}


def make_pairs(world: World, seed: int) -> Pairs:
    """Random keys and values; the keys of a share of the values are held in, evenly over the values.

    No key held out has a value of one held in. A random share might contain few small values, of which all products are
    made.
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
    held_in, held_out = (tuple(key for key in values if (values[key] in chosen) == is_in) for is_in in (True, False))
    return Pairs(values, held_in, held_out)


def tasks(
    world: World, pairs: Pairs, keys: Sequence[str], source: random.Random, without: Collection[Expression] = ()
) -> Iterator[ArithmeticTask]:
    """An endless stream of tasks: any operation, any values whose result stays in range, any keys of these values.

    Args:
        keys: the operands.
        without: expressions in order, over keys or numbers, that no task has in any order.

    Raises:
        DataError: the keys allow too few other expressions.
    """
    by_value: dict[int, list[str]] = {}
    for key in keys:
        by_value.setdefault(pairs.values[key], []).append(key)
    values = np.array([*by_value])
    ranges = {name: _in_range(operation, values, world.largest) for name, operation in OPERATIONS.items()}
    tries = 0
    while tries < _TRIES:
        tries += 1
        operation = source.choice(world.operations)
        if not len(ranges[operation]):
            continue
        a, b = (int(values[index]) for index in ranges[operation][source.randrange(len(ranges[operation]))])
        over_keys = Expression(source.choice(by_value[a]), operation, source.choice(by_value[b]))
        over_numbers = Expression(world.number(a), operation, world.number(b))
        task = ArithmeticTask(over_keys, over_numbers, world.result(OPERATIONS[operation](a, b)))
        if not any(expression in without for expression in task.expressions()):
            yield task
            tries = 0
    raise DataError(f"{len(keys)} keys allow too few expressions: use more keys, or fewer tasks.")


def _in_range(operation: Callable[[Any, Any], Any], values: np.ndarray, largest: int) -> np.ndarray:
    """(pairs, 2) all indices of two operands whose result is from 1 to the largest."""
    results = operation(values[:, None], values[None])
    return np.argwhere((results >= 1) & (results <= largest))


def noise(world: World, source: random.Random, names: Container[str]) -> str:
    """Irrelevant text before an expression: one over words that are no keys; they are shorter where keys are whole."""
    if world.whole:
        first, second = (letters(source, max(1, world.letters - 1)) for _ in range(2))
    else:
        first, second = word(world, source, names), word(world, source, names)
    return f"{Expression(first, source.choice(world.operations), second)}{SUBSTITUTE}"


def word(world: World, source: random.Random, names: Container[str] = ()) -> str:
    """A random word in the form of a key, not in `names`."""
    while (name := letters(source, world.letters)) in names:
        pass
    return name


def letters(source: random.Random, count: int) -> str:
    """Random letters."""
    return "".join(source.choices(ascii_lowercase, k=count))


def make_tokenizer(world: World, keys: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character, and for each key and number where they are whole."""
    numbers = [world.number(value) for value in range(1, world.largest + 1)]
    characters = [END, *ascii_lowercase, *digits, *OPERATIONS, SUBSTITUTE, COMPUTE]
    tokens = [_PAD, *characters, *([*sorted(keys), *numbers] if world.whole else [])]
    tokenizer = Tokenizer(models.WordLevel({token: id_ for id_, token in enumerate(tokens)}, unk_token=_PAD))
    whole = rf"{_NUMBER}[0-9]+|[a-z]{{{world.letters}}}|" if world.whole else ""
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{whole}[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD)
