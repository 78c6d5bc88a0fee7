"""What replies cost: calls, tokens, and money at prices that the user states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from pydantic import Field, model_serializer

from graftlm.config import Config
from graftlm.errors import RecipeError

MILLION = 1_000_000


class Cost(Config):
    """The cost of a reply or of several.

    Args:
        calls: number of calls of a model. A call that was retried counts once.
        prompt_tokens: number of tokens of the prompts, as the server or the tokenizer counts them.
        new_tokens: number of generated tokens.
        unknown: number of the calls whose tokens the server did not report. Their tokens are not part of the counts.
    """

    calls: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    unknown: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            new_tokens=self.new_tokens + other.new_tokens,
            unknown=self.unknown + other.unknown,
        )

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out the number of unknown calls if all are known, so that earlier files keep their form."""
        values = serialize(self)
        if not self.unknown:
            values.pop("unknown", None)
        return values


class Prices(Config):
    """The prices of a model, in any currency.

    Args:
        prompt: price of a million tokens of prompts.
        new: price of a million generated tokens.
    """

    prompt: float = Field(ge=0)
    new: float = Field(ge=0)

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the prices from a text such as `0.15,0.60`: tokens read, then tokens written.

        Raises:
            RecipeError: the text has another form, or a price is negative or not finite.
        """
        try:
            prompt, new = (float(part) for part in text.split(","))
        except ValueError:
            raise RecipeError(
                f"The prices {text!r} are not two numbers: give those of a million tokens read and written, as in "
                "0.15,0.60 (--prices)."
            ) from None
        return cls.parse({"prompt": prompt, "new": new}, where="--prices")

    def of(self, cost: Cost) -> float | None:
        """Return the price of a cost, or None if the tokens of some of its calls are unknown."""
        if cost.unknown:
            return None
        return (self.prompt * cost.prompt_tokens + self.new * cost.new_tokens) / MILLION
