"""The shape of a sentence selector."""

from __future__ import annotations

from typing import Any, Literal

from transformers import PreTrainedConfig

from graftlm.errors import RecipeError, did_you_mean

_CHOICES = {"reads": ("tokens", "vectors"), "document": ("lstm", "transformer"), "head": ("classifier", "pointer")}
_SIZES = ("vocab_size", "embedding_size", "hidden_size", "num_layers", "num_heads", "vector_size")
_LIMITS = ("max_sentences", "max_tokens", "beams", "extract_size")


class SentenceSelectorConfig(PreTrainedConfig):
    """Config of `SentenceSelector`; the defaults are those of the thesis.

    Args:
        reads: `tokens`, by an LSTM over each sentence; or `vectors` of sentences, as another encoder gives them.
        document: what reads sentence after sentence: a two-way `lstm`, or a `transformer`.
        head: `classifier`, one probability a sentence; or `pointer`, one sentence after another.
        vocab_size: number of tokens.
        embedding_size: width of their embeddings.
        hidden_size: of each direction of an LSTM, and of the pointer's LSTM; half the width of a transformer.
        num_layers: of each LSTM, or of the transformer.
        num_heads: of the transformer's attention.
        vector_size: of given vectors.
        encoder: the sentence-transformers model that gives them, by name or folder.
        dropout: share of activations dropped between layers in training.
        max_sentences: sentences of a document that are read at a time.
        max_tokens: tokens of a sentence that are read.
        beams: of the pointer's search.
        extract_size: how many sentences an extract has on average in training.

    Raises:
        RecipeError: a value does not fit.
    """

    model_type = "sentence-selector"

    def __init__(
        self,
        reads: Literal["tokens", "vectors"] = "tokens",
        document: Literal["lstm", "transformer"] = "lstm",
        head: Literal["classifier", "pointer"] = "pointer",
        vocab_size: int = 40_000,
        embedding_size: int = 300,
        hidden_size: int = 512,
        num_layers: int = 2,
        num_heads: int = 4,
        vector_size: int = 384,
        encoder: str | None = None,
        dropout: float = 0.5,
        max_sentences: int = 300,
        max_tokens: int = 35,
        beams: int = 4,
        extract_size: int = 10,
        **more: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "more", "__class__")}
        for name, value in given.items():
            setattr(self, name, value)
        _check(given)
        super().__init__(**more)

    @property
    def width(self) -> int:
        """Of the vectors of sentences in their document."""
        return 2 * self.hidden_size


def _check(given: dict[str, Any]) -> None:
    for name, known in _CHOICES.items():
        if given[name] not in known:
            raise RecipeError(f"{name} is {given[name]!r}, which is not known{did_you_mean(str(given[name]), known)}.")
    for name in (*_SIZES, *_LIMITS):
        if not isinstance(given[name], int) or given[name] < 1:
            raise RecipeError(f"{name} is {given[name]!r}, but a whole number above 0 is expected.")
    if not 0 <= given["dropout"] < 1:
        raise RecipeError(f"dropout is {given['dropout']!r}, but a share from 0 to below 1 is expected.")
    if given["document"] == "transformer" and 2 * given["hidden_size"] % given["num_heads"]:
        raise RecipeError(
            f"{given['num_heads']} heads don't divide a width of {2 * given['hidden_size']} (twice hidden_size): "
            "choose another number of heads."
        )
