"""Special tokens, sequence lengths and decoding of a model's tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graftlm.backbone.decode_steps import compiled_decoding
from graftlm.backbone.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIMITED = sys.maxsize
_CONTEXT_TOKENS = 8


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id that fills padded positions: the padding token's, else EOS, else 0.

    Models neither attend to these positions nor predict them.
    """
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            return token
    return 0


def end_ids(model: object, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end a text: those of the model's generation config, and the tokenizer's EOS."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    candidates = list(configured) if isinstance(configured, list | tuple) else [configured]
    candidates.append(tokenizer.eos_token_id)
    return {token for token in candidates if isinstance(token, int)}


def generate_rows(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], ends: Collection[int], **options: Any
) -> list[list[int]]:
    """Generate tokens for a batch of prompts.

    Args:
        model: any decoder-only transformers model.
        tokenizer: its tokenizer, for the padding token.
        prompts: at least one prompt, each as token ids; they are padded on the left.
        ends: ids that end a text.
        options: further arguments of `model.generate`.

    Returns:
        The new tokens of each prompt, up to and including the first of `ends`, or all if there is none. With
        `num_return_sequences` in `options`, each prompt has that many consecutive rows.
    """
    inputs = left_padded(prompts, padding_id(tokenizer), model.device)
    prompt_length = inputs["input_ids"].shape[1]
    options |= compiled_decoding(model, options, prompt_tokens=prompt_length)
    output = model.generate(**inputs, eos_token_id=sorted(ends) or None, **options)
    rows: list[list[int]] = []
    for row in output[:, prompt_length:].tolist():
        stop = len(row)
        for position, token in enumerate(row):
            if token in ends:
                stop = position + 1
                break
        rows.append(row[:stop])
    return rows


def left_padded(prompts: Sequence[Sequence[int]], padding: int, device: str | torch.device) -> dict[str, Any]:
    """Pad B prompts on the left, so that they end in the same column.

    Args:
        prompts: at least one prompt, each as token ids.
        padding: id that fills padded columns.
        device: device of the tensors.

    Returns:
        Arguments of `generate`: `input_ids` and `attention_mask` (B, T), and `pad_token_id`.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = []
    mask = []
    for prompt in prompts:
        missing = width - len(prompt)
        ids.append([padding] * missing + list(prompt))
        mask.append([0] * missing + [1] * len(prompt))
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
        "pad_token_id": padding,
    }


def token_texts(
    tokenizer: Any, ids: Sequence[int] | Tensor, before: Sequence[int] | Tensor = (), **options: Any
) -> list[str]:
    """Return the text that each token adds. A character of several tokens is added by the last of them.

    Args:
        tokenizer: any tokenizer of transformers.
        ids: token ids, (T,).
        before: token ids before them, without which some decoders drop the first blank.
        options: further arguments of `tokenizer.decode`.
    """
    texts = []
    context = [int(token) for token in before[-_CONTEXT_TOKENS:]]
    new = [int(token) for token in ids]
    shown = str(tokenizer.decode(context, **options)) if context else ""
    for end in range(1, len(new) + 1):
        text = str(tokenizer.decode(context + new[:end], **options))
        if end < len(ids):
            text = text.rstrip("\ufffd")  # an incomplete character, with which some decoders lose those before it
        texts.append(text[len(shown) :])
        if len(text) > len(shown):
            shown = text
    return texts


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the BOS id that the tokenizer puts before every text; None if it puts none there.

    Models that were trained with a leading BOS predict badly without it. Documents therefore begin with it in training,
    in scoring and in generation alike.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokenizer("a")["input_ids"][:1] != [bos]:
        return None
    return bos


def max_sequence_length(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Return the maximum sequence length in tokens by a model's config and, if given, its tokenizer.

    It is `UNLIMITED` if neither sets one. RoBERTa-style models reserve `pad_token_id + 1` positions, which don't count.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if not isinstance(limit, int) or limit <= 0:
        limit = UNLIMITED
    elif family is not None and family.counts_positions:
        limit -= (config.pad_token_id or 0) + 1
    if tokenizer is None:
        return limit
    return min(limit, int(tokenizer.model_max_length))
