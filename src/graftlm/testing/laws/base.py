"""What all laws share: backbones, parametrization over families, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.testing.passes import attach_graft, is_encoder, randomise, tiny_backbone_of
from graftlm.testing.state import state_of

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 5e-5}
"""Tolerance of float32 logits of about 5 that were added in another order."""
ROUNDINGS = 8
"""Errors of half precision that may add up, each of the largest value times the dtype's precision."""
LONG = 130
"""Number of tokens of a long row, on the first family: more than any window or stride that a graft is likely to have.
"""
LENGTHS = (24, 13, 19)
"""Numbers of tokens of three rows."""

_Law = TypeVar("_Law", bound=Callable[..., None])


def decoders_only(law: _Law) -> _Law:
    """Mark a law that does not hold for encoders."""
    law.decoders_only = True
    return law


class LawsBase:
    """The base class of groups of laws. `GraftLaws` documents the attributes."""

    config: ClassVar[Mapping[str, Any]]
    families: ClassVar[Sequence[str]] = ("llama", "gemma3", "gpt2", "bert", "llama+bfloat16")
    spread: ClassVar[float] = 0.2
    learning_rate: ClassVar[float] = 1e-2
    start: ClassVar[float] = 0.0
    exceptions: ClassVar[Mapping[str, str]] = {}

    # Backbones

    def backbone(self, family: str) -> Backbone:
        """Return the backbone of a family, which is the same object until `renew_backbones` is called."""
        return tiny_backbone_of(family)

    def renew_backbones(self) -> None:
        """Discard all backbones. `backbone` then builds new ones."""
        tiny_backbone_of.cache_clear()

    @pytest.fixture(autouse=True)
    def _backbone_stays(self, request: pytest.FixtureRequest) -> Iterator[None]:
        family = self.families[0]
        if "family" in request.fixturenames:
            family = request.getfixturevalue("family")
        with self.backbone_stays(family):
            yield

    @contextmanager
    def backbone_stays(self, family: str) -> Iterator[None]:
        """Fail if the block changes anything of a backbone. In this case, the following laws get new backbones.

        Args:
            family: the backbone's family.
        """
        before = state_of(self.backbone(family).model)
        try:
            yield
        finally:
            after = state_of(self.backbone(family).model)
            changed = [name for name in before if after[name] != before[name]]
            if changed:
                self.renew_backbones()
        assert not changed, f"the graft has changed the backbone's {', '.join(changed)}"

    # Families

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each law with the argument `family` on every family."""
        if "family" not in metafunc.fixturenames:
            return
        law = metafunc.function.__name__.removeprefix("test_")
        families = list(self.families)
        if getattr(metafunc.function, "decoders_only", False):
            families = [family for family in families if not is_encoder(family)]
        metafunc.parametrize("family", [self.param(law, family) for family in families])

    def param(self, law: str, family: str) -> Any:
        """Return a value of pytest's parameter `family`, with a mark if the law is skipped on the family.

        Args:
            law: the name of the law, without `test_`.
            family: the name of the family.
        """
        reason = self.exception(law, family)
        return pytest.param(family, marks=[pytest.mark.skip(reason=reason)] if reason else [])

    def exception(self, law: str, family: str) -> str | None:
        """Return the reason why a law is skipped on a family, or None if it runs.

        Args:
            law: the name of the law, without `test_`.
            family: the name of the family.
        """
        keys = [law, family]
        if is_encoder(family):
            keys.append("encoders")
        for key in keys:
            if key in self.exceptions:
                return f"{key}: {self.exceptions[key]}"
        return None

    def lengths(self, family: str) -> tuple[int, ...]:
        """Return the lengths of rows. The first family has a long one, for effects that begin late."""
        first, *others = LENGTHS
        if family == self.families[0]:
            first = LONG
        return (first, *others)

    def is_half(self, family: str) -> bool:
        """Return whether the backbone computes in bfloat16 or float16."""
        return self.backbone(family).model.dtype.itemsize < 4

    # Models and comparisons

    def attach(self, family: str, *, trained: bool = True) -> GraftedModel:
        """Attach the graft to its backbone in evaluation mode. A `with` block detaches it.

        Args:
            family: the backbone's family.
            trained: whether to add noise of the deviation `spread` to the graft, which replaces training.
        """
        model = attach_graft(self.backbone(family), self.config).eval()
        return randomise(model, self.spread) if trained else model

    def assert_close(
        self, family: str, actual: Tensor, expected: Tensor, name: str = "The two", **limits: object
    ) -> None:
        """Compare two computations of the same values.

        Args:
            family: the backbone's family; half precision allows `ROUNDINGS` errors instead of `limits`.
            actual: the values.
            expected: the expected values.
            name: name of the values in messages.
            limits: `rtol` and `atol`, which replace those of `CLOSE`.
        """
        actual = actual.float()
        expected = expected.float()
        if self.is_half(family):
            precision = torch.finfo(self.backbone(family).model.dtype).eps
            limits = {"rtol": 0.0, "atol": ROUNDINGS * precision * expected.abs().max().item()}

        def message(text: str) -> str:
            return f"{name}: {text}"

        torch.testing.assert_close(actual, expected, **{**CLOSE, **limits}, msg=message)

    def skip_copies(self, model: GraftedModel) -> None:
        """Skip a law on what a graft leaves to the backbone, for a graft that trains a copy of it."""
        if model.model is not model.backbone.model:
            pytest.skip("a graft that trains a copy of the model trains it in float32, and with its dropout")
