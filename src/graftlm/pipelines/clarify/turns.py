"""The turns of a conversation: what was asked, skipped, answered, refused and written, and what each cost."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from graftlm.config import Config

How = Literal["informed", "settled", "plain"]


class Cost(Config):
    """What was asked of models; tokens are as the server or the tokenizer counts them."""

    calls: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(self.model_dump().items(), other.model_dump().values(), strict=True)
        return Cost(**{name: mine + its for (name, mine), its in pairs})


class Question(Config):
    """What is asked, and the answers that its author thinks possible."""

    text: str = Field(min_length=1)
    answers: tuple[str, ...] = ()


class Gain(Config):
    """What an answer would change.

    Args:
        bits: the expected information gain of the question (see `needed`).
        prior: the share of each candidate answer.
        outputs: what would be written under each, in their order; several where outputs were drawn at random.
        by_answer: bits that each answer would bring.
        likeliest: the output with the largest share over all answers.
        estimator: decoded counts outputs; likelihood compares their probabilities.
    """

    bits: float = Field(ge=0)
    prior: tuple[float, ...]
    outputs: tuple[tuple[str, ...], ...]
    by_answer: tuple[float, ...]
    likeliest: str
    estimator: Literal["decoded", "likelihood"] = "decoded"


class Asked(Config):
    """A question was put to the user."""

    kind: Literal["asked"] = "asked"
    question: Question
    gain: Gain | None = None
    cost: Cost = Cost()


class Skipped(Config):
    """No question was put.

    Args:
        reason: nothing: the translator found nothing to ask, or rules did. no-question: what it said asks nothing.
            repeated: it asked what had been asked. not-needed: the gain is not above the threshold.
        said: what the translator said.
    """

    kind: Literal["skipped"] = "skipped"
    reason: Literal["nothing", "no-question", "repeated", "not-needed"]
    said: str = ""
    question: Question | None = None
    gain: Gain | None = None
    cost: Cost = Cost()

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self.reason == "not-needed" and (self.question is None or self.gain is None):
            raise ValueError("a question that was not needed comes with its gain")
        return self


class Answered(Config):
    """The user answered."""

    kind: Literal["answered"] = "answered"
    answer: str = Field(min_length=1)
    by: str
    cost: Cost = Cost()


class Refused(Config):
    """The user did not answer, or did not know."""

    kind: Literal["refused"] = "refused"
    by: str
    said: str = ""
    cost: Cost = Cost()


class Written(Config):
    """The output.

    Args:
        how: informed: by answers. settled: answers to a question that was not put lead there. plain: by the text alone.
        by: the model.
        cut: the model stopped at its limit of tokens.
    """

    kind: Literal["written"] = "written"
    output: str
    how: How
    by: str
    cut: bool = False
    cost: Cost = Cost()


Turn = Annotated[Asked | Skipped | Answered | Refused | Written, Field(discriminator="kind")]
