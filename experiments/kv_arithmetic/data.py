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
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, digits
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graftlm.config import Config
from graftlm.data import Document
from graftlm.errors import DataError

Ints = NDArray[np.int64]
_BATCH = 512
_BATCHES = 64  # six operands up to 25,000 without a product take about 720 draws


class Operands:
    """Draws independent operands for given operations.

    Args:
        values: (N,) values of the available operands, from 1 to `largest`.
        largest: maximum of every intermediate number; the minimum is 1.
        seed: random seed.
    """

    def __init__(self, values: Sequence[int], largest: int, seed: int) -> None:
        array = np.asarray(values, dtype=np.int64)
        self.largest = largest
        self._order: Ints = np.argsort(array, kind="stable")
        self._values: Ints = array[self._order]
        self._source = np.random.default_rng(seed)
        self._counts_cache: dict[tuple[int, int], Ints] = {}
        self._pending: dict[str, list[list[int]] | None] = {}

    def draw(self, operations: str) -> list[int] | None:
        """Indices into `values`, one more than operations; None if no operands stay in range."""
        ready = self._pending.get(operations, [])
        if ready == []:
            ready = self._pending[operations] = self._draw_batch(operations)
        return ready.pop() if ready else None

    def _draw_batch(self, operations: str) -> list[list[int]] | None:
        lengths = [len(products) + 1 for products in re.split("[+-]", operations)]  # operands of each run of products
        signs = [1] + [1 if operation == "+" else -1 for operation in operations.replace("*", "")]
        if not all(self._count(length, self.largest) for length in lengths):
            return None
        for _ in range(_BATCHES):
            runs = [self._draw_run(length) for length in lengths]
            terms = np.stack([self._values[run].prod(axis=1) for run in runs], axis=1)
            sums_BT = np.cumsum(terms * np.asarray(signs), axis=1)
            within_B = ((sums_BT >= 1) & (sums_BT <= self.largest)).all(axis=1)
            if within_B.any():
                return self._order[np.concatenate(runs, axis=1)[within_B]].tolist()
        return None

    def _draw_run(self, length: int) -> Ints:
        """(B, length) indices into the ordered values, whose product stays in range."""
        left_B = np.full(_BATCH, self.largest)
        drawn = np.empty((_BATCH, length), dtype=np.int64)
        for index in range(length):
            drawn[:, index] = self._first_index(left_B, length - index)
            left_B //= self._values[drawn[:, index]]
        return drawn

    def _first_index(self, limits_B: Ints, length: int) -> Ints:
        """(B,) the first index of a run of this length whose product stays within each row's limit."""
        if length == 1:
            return self._source.integers(np.searchsorted(self._values, limits_B, side="right"))
        drawn = np.empty(len(limits_B), dtype=np.int64)
        for limit in np.unique(limits_B):
            rows = np.flatnonzero(limits_B == limit)
            sums = self._cumulative_counts(length, int(limit))
            drawn[rows] = np.searchsorted(sums, self._source.integers(sums[-1], size=len(rows)), side="right")
        return drawn

    def _cumulative_counts(self, length: int, limit: int) -> Ints:
        """Cumulative counts, over the ordered first values, of the runs within a limit."""
        if (length, limit) not in self._counts_cache:
            values = self._values[: np.searchsorted(self._values, limit, side="right")]
            left, which = np.unique(limit // values, return_inverse=True)
            counts = np.array([self._count(length - 1, int(remaining)) for remaining in left], dtype=np.int64)
            self._counts_cache[length, limit] = np.cumsum(counts[which])
        return self._counts_cache[length, limit]

    def _count(self, length: int, limit: int) -> int:
        if length == 0:
            return 1
        sums = self._cumulative_counts(length, limit)
        return int(sums[-1]) if len(sums) else 0


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
