"""Special tokens, sequence lengths and decoding of a model's tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graftlm.backbone.families import FAMILIES
from graftlm.backbone.taps import left_padded

# transformers' models take seconds to import, so functions import them.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIMITED = sys.maxsize


def padding_id(tokenizer: Any) -> int:
    """The id that fills padded positions: the padding token's, else EOS, else 0. No model attends to or predicts it."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((value for value in ids if isinstance(value, int)), 0)


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a text: those of the model's generation config, and the tokenizer's EOS."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = (*(own if isinstance(own, list | tuple) else [own]), tokenizer.eos_token_id)
    return {token for token in ids if isinstance(token, int)}


def generate_rows(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], ends: Collection[int], **options: Any
) -> list[list[int]]:
    """The tokens that `model.generate` adds to each prompt, up to and with the first of `ends`; `options` are its."""
    inputs = left_padded(prompts, padding_id(tokenizer), model.device)
    output = model.generate(**inputs, eos_token_id=sorted(ends) or None, **options)
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1] for row in rows]


def token_texts(tokenizer: Any, ids: Sequence[int] | Tensor, **options: Any) -> list[str]:
    """The text that each token adds; a character of several tokens belongs to the last. `options` are of `decode`."""
    texts, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:end], **options))
        if end < len(ids):
            text = text.removesuffix("\ufffd")
        texts.append(text[len(shown) :])
        shown = max(shown, text, key=len)
    return texts


def leading_bos(tokenizer: Any) -> int | None:
    """The BOS id that the tokenizer puts before every text, or None.

    Models that were trained with a leading BOS predict badly without it. Documents therefore begin with it in training,
    in scoring and in generation alike.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def max_sequence_length(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Maximum sequence length in tokens, by a model's config and a tokenizer; `UNLIMITED` where neither sets one.

    RoBERTa-style models reserve `pad_token_id + 1` positions.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        limit = UNLIMITED
    elif getattr(FAMILIES.get(getattr(config, "model_type", "")), "counts_positions", False):
        limit -= (config.pad_token_id or 0) + 1
    return limit if tokenizer is None else min(limit, int(tokenizer.model_max_length))
