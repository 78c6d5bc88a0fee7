"""Which cases of the laws run when: by default, in slow runs (`slow`), or in the full matrix alone.

A case is a law on an example of a graft and a backbone. The full matrix has more than ten thousand. A default run has
each law with each kind of graft once, where kinds that share code take turns. The cases that are not `matrix` are
a pairwise cover: each law meets each example, each law meets each backbone, and each example meets each of its
backbones.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from graftlm.testing import GraftLaws
from tiny import ALL_ENCODERS

if TYPE_CHECKING:
    from laws.examples import Example

DEFAULT_FAMILIES = ("llama", "gemma3", "bert")
SHARED_CODE = (("neutral-residues", "adapter"), ("lora", "peft"), ("finetune", "llama-pro"))
"""Kinds of one implementation, and those that run nothing but the backbone's own code."""
_Choice = TypeVar("_Choice")


def is_wanted(config: pytest.Config, mark: str) -> bool:
    """Whether the expression of `-m` may select cases with a mark, `slow` or `matrix`."""
    expression = config.option.markexpr
    return not expression or (mark in expression and f"not {mark}" not in expression)


def marks(example: Example, backbone: str, law: str, *, decoders_only: bool = False) -> list[Any]:
    """The marks of a case.

    Args:
        example: the graft.
        backbone: the backbone's name, a family or `family+host`.
        law: the law's name.
        decoders_only: whether the law is tested on decoders only.
    """
    if backbone == _default_backbone(example, law, decoders_only):
        return [] if _is_its_turn(example, law, decoders_only) else [pytest.mark.slow]
    if is_covered(example, backbone, law, decoders_only=decoders_only):
        return [pytest.mark.slow]
    return [pytest.mark.matrix]


@functools.cache
def is_covered(example: Example, backbone: str, law: str, *, decoders_only: bool = False) -> bool:
    """Whether a case belongs to the pairwise cover."""
    others = _examples_of(backbone, law, decoders_only)
    if others and example is _chosen(others, _number(law) + _hash(backbone)):
        return True
    hosts = _hosts(example, law, decoders_only)
    return bool(hosts) and backbone == _chosen(hosts, _hash(f"{law} {example}"))


@functools.cache
def runs(example: Example, backbone: str, law: str, *, decoders_only: bool = False) -> bool:
    """Whether a law is tested with an example on a backbone."""
    if decoders_only and backbone.partition("+")[0] in ALL_ENCODERS:
        return False
    return example.exception(backbone, law) is None


@functools.cache
def _default_backbone(example: Example, law: str, decoders_only: bool) -> str | None:
    """The backbone of a default run: one for each law and kind of graft."""
    from laws.examples import first_example

    if example is not first_example(example.kind):
        return None
    hosts = _hosts(example, law, decoders_only)
    usual = [name for name in hosts if name in DEFAULT_FAMILIES]
    candidates = usual or hosts[:1]
    return _chosen(candidates, _hash(f"{law} {example.kind}")) if candidates else None


def _is_its_turn(example: Example, law: str, decoders_only: bool) -> bool:
    """Whether an example, of the kinds that share its code, is the one that a default run tests a law with."""
    from laws.examples import first_example

    for kinds in SHARED_CODE:
        if example.kind in kinds:
            tested = [kind for kind in kinds if _hosts(first_example(kind), law, decoders_only)]
            return example.kind == _chosen(tested, _hash(law))
    return True


@functools.cache
def _hosts(example: Example, law: str, decoders_only: bool) -> list[str]:
    """The backbones on which a law is tested with an example."""
    return [name for name in example.backbones() if runs(example, name, law, decoders_only=decoders_only)]


@functools.cache
def _examples_of(backbone: str, law: str, decoders_only: bool) -> list[Example]:
    """The examples with which a law is tested on a backbone."""
    from laws.examples import examples

    others = [example for example in examples() if backbone in example.backbones()]
    return [example for example in others if runs(example, backbone, law, decoders_only=decoders_only)]


@functools.cache
def _number(law: str) -> int:
    """The number of a law, so that a backbone's examples take turns from law to law."""
    laws = sorted(name.removeprefix("test_") for name in dir(GraftLaws) if name.startswith("test_"))
    return laws.index(law) if law in laws else _hash(law)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())


def _chosen(values: Sequence[_Choice], number: int) -> _Choice:
    return values[number % len(values)]
