"""Keys, their values, expressions over them, and the sets that models are trained and tested on.

The three sets of the paper, over one kind of expression:

    KV-SUBS     abc+def  ->  12+34            NUM-MATH    12+34  ->  46            KV-MATH    abc+def  ->  46

As text for a model of characters, prompt and completion:

    substitution   abc+def>   210+430           numeric      210+430=   640
    scratchpad     abc+def>   210+430=640       direct       abc+def=   640

A number has as many digits as the largest value, padded with zeros, least significant digit first. The result of an
expression and every intermediate number lie in the range of the values.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import Literal, Self

from pydantic import Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from experiments.kv_arithmetic.operands import Operands
from graftlm.config import Config
from graftlm.data import Document
from graftlm.errors import DataError

Form = Literal["substitution", "scratchpad", "direct", "numeric"]
SUBSTITUTE, COMPUTE, END = ">", "=", "\n"
OPERATIONS: dict[str, Callable[[int, int], int]] = {"*": operator.mul, "+": operator.add, "-": operator.sub}
_PAD = "<|pad|>"
_TRIES = 1000


class World(Config):
    """The form of keys, numbers and expressions.

    Args:
        keys: number of keys; their values are the integers from 1 to this number, in random order.
        letters: minimum and maximum length of a key, each length equally likely.
        ones_first: write the least significant digit first.
        operands: minimum and maximum number in an expression, each equally likely.
        operations: the operations, each equally likely.
        held_in: share of the keys that the joint training data may contain.
    """

    keys: int = Field(500, ge=10)
    letters: tuple[int, int] = (3, 3)
    ones_first: bool = True
    operands: tuple[int, int] = (2, 2)
    operations: str = "+-*"
    held_in: float = Field(0.2, gt=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, least, (fewest, most) in (("letters", 1, self.letters), ("operands", 2, self.operands)):
            if not least <= fewest <= most:
                raise ValueError(f"{name} are {fewest} to {most}: give the fewest, at least {least}, before the most")
        names = sum(len(ascii_lowercase) ** n for n in range(self.letters[0], self.letters[1] + 1))
        if names < 2 * self.keys:  # half of the names are no keys
            raise ValueError(f"{self.keys} keys take {2 * self.keys} names, and there are {names}: allow more letters")
        return self

    @property
    def digits(self) -> int:
        """The number of digits of a number."""
        return len(str(self.keys))

    def number(self, value: int) -> str:
        """The text of a number."""
        text = f"{value:0{self.digits}}"
        return text[::-1] if self.ones_first else text


@dataclass(frozen=True)
class Expression:
    """Operands, keys or numbers as text, with an operation between each two."""

    operands: tuple[str, ...]
    operations: str

    def __str__(self) -> str:
        pairs = zip(self.operands[1:], self.operations, strict=True)
        return self.operands[0] + "".join(operation + operand for operand, operation in pairs)


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
        end = SUBSTITUTE if form in ("substitution", "scratchpad") else COMPUTE
        return f"{self.numbers if form == 'numeric' else self.keys}{end}"

    def completion(self, form: Form) -> str:
        """The right completion, without the end of the line."""
        if form == "substitution":
            return f"{self.numbers}"
        return f"{self.numbers}{COMPUTE}{self.result}" if form == "scratchpad" else self.result

    def document(self, form: Form) -> Document:
        """Prompt and completion as a training document."""
        return Document(self.completion(form) + END, prompt=self.prompt(form))


def make_pairs(world: World, seed: int) -> Pairs:
    """Random keys with unique values from 1 to their number; a share of them is held in, evenly over the values.

    A random share might contain few small values, of which all products are made.
    """
    source = random.Random(f"pairs {seed}")
    names: dict[str, None] = {}
    while len(names) < world.keys:
        names[word(world, source)] = None
    numbers = list(range(1, world.keys + 1))
    source.shuffle(numbers)
    values = dict(zip(names, numbers, strict=True))
    ordered = sorted(values, key=values.__getitem__)
    count = round(world.held_in * world.keys)
    chosen = {ordered[source.randrange(i * world.keys // count, (i + 1) * world.keys // count)] for i in range(count)}
    held_in, held_out = (tuple(key for key in values if (key in chosen) == is_in) for is_in in (True, False))
    return Pairs(values, held_in, held_out)


def compute(values: Sequence[int], operations: str) -> list[int]:
    """All intermediate numbers, the result last: products first, then from left to right."""
    stack, intermediate, signs = [values[0]], [], []
    for operation, value in zip(operations, values[1:], strict=True):
        if operation == "*":
            stack[-1] *= value
            intermediate.append(stack[-1])
        else:
            stack.append(value)
            signs.append(operation)
    total = stack[0]
    for operation, value in zip(signs, stack[1:], strict=True):
        total = OPERATIONS[operation](total, value)
        intermediate.append(total)
    return intermediate


def tasks(
    world: World, pairs: Pairs, keys: Sequence[str], source: random.Random, without: Container[Expression] = ()
) -> Iterator[ArithmeticTask]:
    """An endless stream of tasks over some keys, except expressions in `without`; all operations are equally likely.

    Raises:
        DataError: the keys allow too few other expressions.
    """
    values = [pairs.values[key] for key in keys]
    operands = Operands(values, world.keys, source.getrandbits(64))
    tries = 0
    while tries < _TRIES:
        tries += 1
        operations = _operations(world, source)
        indices = operands.draw(operations)
        if indices is None:  # no operands stay in range
            continue
        drawn = [values[index] for index in indices]
        over_keys = Expression(tuple(keys[index] for index in indices), operations)
        over_numbers = Expression(tuple(map(world.number, drawn)), operations)
        if over_keys not in without and over_numbers not in without:
            yield ArithmeticTask(over_keys, over_numbers, world.number(compute(drawn, operations)[-1]))
            tries = 0
    raise DataError(f"{len(keys)} keys allow too few expressions: use more keys, or fewer tasks.")


def _operations(world: World, source: random.Random) -> str:
    return "".join(source.choice(world.operations) for _ in range(source.randint(*world.operands) - 1))


def noise(world: World, source: random.Random, names: Container[str]) -> str:
    """Irrelevant text before an expression: an expression over words that are no keys."""
    operations = _operations(world, source)
    words = tuple(word(world, source, names) for _ in range(len(operations) + 1))
    return f"{Expression(words, operations)}{SUBSTITUTE}"


def word(world: World, source: random.Random, names: Container[str] = ()) -> str:
    """A random word in the form of a key, not in `names`."""
    while True:
        name = "".join(source.choice(ascii_lowercase) for _ in range(source.randint(*world.letters)))
        if name not in names:
            return name


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    characters = [END, *ascii_lowercase, *digits, *OPERATIONS, SUBSTITUTE, COMPUTE]
    vocabulary = {token: number for number, token in enumerate([_PAD, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_PAD)
