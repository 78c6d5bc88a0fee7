"""The price of a conversation whose translator and user are different models."""

from __future__ import annotations

from typing import Self

from graftlm.config import Config
from graftlm.errors import RecipeError
from graftlm.pipelines.clarify.conversation import Conversation
from graftlm.pipelines.clarify.costs import Cost, Prices


class Bill(Config):
    """The prices of both models of a conversation.

    Args:
        translator: prices of the translator.
        user: prices of the model that answers.
    """

    translator: Prices
    user: Prices

    @classmethod
    def read(cls, prices: str | None, user_prices: str | None = None, user: str | None = None) -> Self | None:
        """Read the prices from texts such as `0.15,0.60` (`Prices.read`).

        Args:
            prices: prices of the translator; None if they are not known.
            user_prices: prices of the model that answers; by default those of the translator.
            user: name of the model that answers; required with `user_prices`.

        Returns:
            The bill; None without prices.

        Raises:
            RecipeError: a text has another form, or the user's prices are given without its name or the translator's.
        """
        if user_prices is not None and user is None:
            raise RecipeError("The prices of the user's model were given, but not its name: name it (--user).")
        if prices is None:
            if user_prices is not None:
                raise RecipeError("The prices of the user's model were given, but not the translator's: give --prices.")
            return None
        own = Prices.read(prices)
        return cls(translator=own, user=own if user_prices is None else Prices.read(user_prices))

    def of(self, conversation: Conversation) -> float | None:
        """Return the price of a conversation, or None if the tokens of some of its calls are unknown."""
        return self.total(conversation.translator_cost, conversation.user_cost)

    def total(self, translator: Cost, user: Cost) -> float | None:
        """Return the price of the costs of both models, or None if the tokens of some calls are unknown."""
        written = self.translator.of(translator)
        answered = self.user.of(user)
        if written is None or answered is None:
            return None
        return written + answered
