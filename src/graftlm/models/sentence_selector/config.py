"""Config of sentence selectors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from transformers import PreTrainedConfig

from graftlm.errors import RecipeError

_CHOICES = {
    "input_type": ("tokens", "embeddings"),
    "document_encoder": ("lstm", "transformer"),
    "head": ("classifier", "pointer"),
}
_POSITIVE = (
    "vocab_size",
    "embedding_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "sentence_embedding_size",
    "max_sentences",
    "max_tokens",
    "beam_size",
    "extract_size",
)


class SentenceSelectorConfig(PreTrainedConfig):
    """Config of `SentenceSelector`.

    Args:
        input_type: `tokens`, encoded by an LSTM for each sentence; or `embeddings` of sentences from another encoder.
        document_encoder: encoder of the sentences in their document: a bidirectional `lstm` or a `transformer`.
        head: `classifier` computes a probability for each sentence; `pointer` selects one sentence after another.
        vocab_size: number of tokens, without padding.
        embedding_size: size of token embeddings.
        hidden_size: size of each LSTM direction and of the pointer's LSTM; half the size of a transformer.
        num_layers: layers of each LSTM or of the transformer.
        num_heads: attention heads of a transformer.
        sentence_embedding_size: size of given sentence embeddings.
        sentence_encoder: name or folder of the sentence-transformers model that computes the embeddings.
        dropout: dropout probability.
        max_sentences: maximum number of sentences read at a time.
        max_tokens: maximum number of tokens read of a sentence.
        beam_size: number of beams in the pointer's search.
        extract_size: mean number of sentences of an extract in training.

    Raises:
        RecipeError: a value is invalid.
    """

    model_type = "sentence-selector"

    input_type: Literal["tokens", "embeddings"] = "tokens"
    document_encoder: Literal["lstm", "transformer"] = "lstm"
    head: Literal["classifier", "pointer"] = "pointer"
    vocab_size: int = 40_000
    embedding_size: int = 300
    hidden_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    sentence_embedding_size: int = 384
    sentence_encoder: str | None = None
    dropout: float = 0.5
    max_sentences: int = 300
    max_tokens: int = 35
    beam_size: int = 4
    extract_size: int = 10

    def __post_init__(self, **kwargs: object) -> None:
        for problem in self._problems():
            raise RecipeError(problem)
        super().__post_init__(**kwargs)

    @property
    def width(self) -> int:
        """Size of the sentence vectors that the document encoder returns."""
        return 2 * self.hidden_size

    def _problems(self) -> Iterator[str]:
        """Yield a message for each value that is not possible."""
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                yield f"{name} is {value!r}, but {' or '.join(known)} is expected: choose one of them."
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                yield f"{name} is {value!r}, but a whole number above 0 is expected: set one."
        if not 0 <= self.dropout < 1:
            yield f"dropout is {self.dropout!r}, but a number from 0 to below 1 is expected: set one."
        if self.document_encoder == "transformer" and self.width % self.num_heads:
            yield (
                f"num_heads is {self.num_heads}, but a divisor of {self.width} (twice hidden_size) is expected: choose "
                "another number of heads, or another hidden_size."
            )
