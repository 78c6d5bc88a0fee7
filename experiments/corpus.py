"""Small models for experiments: tokenizers trained on their texts, and Llamas with random weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from graftlm.data import SourceConfig, build_documents
from graftlm.training.language_model import new_model, train_tokenizer


def random_llama(
    tokenizer: PreTrainedTokenizerBase,
    *,
    width: int,
    layers: int,
    heads: int,
    length: int,
    seed: int,
) -> PreTrainedModel:
    """Build a Llama with random weights and tied embeddings.

    Args:
        tokenizer: Determines the vocabulary.
        width: Hidden size; the FFN is three times as wide.
        layers: Number of layers.
        heads: Number of attention heads.
        length: Tokens of a training row; the model has four times as many positions.
        seed: Seed of the weights.
    """
    config = {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4 * length,
    }
    return new_model(config, tokenizer, seed)


def train_corpus_tokenizer(files: Iterable[Path], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the texts of JSON lines.

    Args:
        files: The files.
        vocabulary: Maximum number of tokens.
    """
    documents = build_documents([SourceConfig(path=str(file)) for file in files])
    return train_tokenizer([document.text for document in documents], vocabulary)
