"""A tokenizer of one's own: byte-level BPE, learned from the texts that a model will read."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|eos|>"
LEAST_PIECES = 257  # every byte, and the end of a text


def train_pieces(texts: Iterable[str], pieces: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `pieces` tokens, the end of a text among them; fewer where texts are short.

    Every text can be written with it, as every byte is a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
