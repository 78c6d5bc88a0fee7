"""The sizes that a graft can have, and the one whose number of trainable parameters is nearest to an aim."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graftlm.backbone import Backbone
from graftlm.grafts.base import GraftConfig


@dataclass(frozen=True)
class Sizes:
    """The sizes that a graft can have on a backbone.

    Attributes:
        key: the key of the config that sets the size, such as `rank`.
        values: its possible values, at least one, in the order of rising numbers of parameters.
        parameters: returns the number of trainable parameters with a value.
        config: returns the graft's config with a value.
    """

    key: str
    values: Sequence[int]
    parameters: Callable[[int], int]
    config: Callable[[int], GraftConfig]

    def nearest(self, aim: int) -> int:
        """Return the value with the nearest number of parameters to an aim; of two, the smaller one.

        Args:
            aim: a number of trainable parameters.
        """
        low, high = 0, len(self.values) - 1
        of_low, of_high = self._count(low), self._count(high)
        if aim <= of_low:
            return self.values[low]
        if aim >= of_high:
            return self.values[high]
        # Most sizes are linear, so that a line between two of them finds the place in a few steps.
        while high - low > 1:
            share = (aim - of_low) / (of_high - of_low)
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
            of_middle = self._count(middle)
            if of_middle <= aim:
                low, of_low = middle, of_middle
            else:
                high, of_high = middle, of_middle
        is_low_nearer = aim - of_low <= of_high - aim
        return self.values[low if is_low_nearer else high]

    def _count(self, index: int) -> int:
        return self.parameters(self.values[index])


class HasSizes(ABC):
    """A graft whose size can be chosen by a number of trainable parameters.

    Attributes:
        size_keys: the keys of the config that set the size, each with a value that fits any other key. They are
            replaced by the value that is chosen.
    """

    size_keys: ClassVar[Mapping[str, int]] = {}

    @classmethod
    @abstractmethod
    def sizes(cls, config: GraftConfig, backbone: Backbone) -> Sizes:
        """Return the sizes that the graft can have.

        Args:
            config: the graft's config, whose size does not count.
            backbone: the backbone, which does not change.

        Raises:
            GraftError: with this config the size can't be chosen.
        """
