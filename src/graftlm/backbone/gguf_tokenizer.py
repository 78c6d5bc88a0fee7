"""How the tokenizer of a GGUF file splits text before it merges bytes: by the name of the split in the file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from graftlm.backbone.gguf_header import GgufHeader
from graftlm.errors import BackboneError

# The package tokenizers takes a while to import, so functions import it.
if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

_KEY = "tokenizer.ggml.pre"
_BYTE_LEVEL = "gpt2"
"""The kind of tokenizer that merges bytes. Others do not split, whatever the file states."""
_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "mellum"}
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
"""As GPT-2, after each digit was split off."""
_QWEN2 = {"stablelm2", "hunyuan", "solar-open", "grok-2"}
_BLOOM = {"bloom", "gpt3-finnish", "poro-chat"}
_UNSTATED = "default"

_BLOOM_WORD = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def check_split(name: str, header: GgufHeader) -> None:
    """Warn if a file does not state how its tokenizer splits text, which is then split as for GPT-2.

    Args:
        name: name of the model in messages.
        header: the file's header.

    Raises:
        BackboneError: the split is unknown.
    """
    if header.metadata.get("tokenizer.ggml.model") != _BYTE_LEVEL:
        return
    split = _stated_split(header)
    if split is None:
        warnings.warn(
            f"The GGUF file {name} does not state how its tokenizer splits text ({_KEY}), so digits and blanks may be "
            "encoded in another way than in its training: name the model's safetensors checkpoint.",
            stacklevel=3,
        )
    elif split not in _by_transformers() and _pre_tokenizer(split) is None:
        raise BackboneError(
            f"The GGUF file {name} has {_KEY} = {split!r}, but GraftLM does not know how this splits text: name the "
            "model's safetensors checkpoint."
        )


def apply_split(tokenizer: PreTrainedTokenizerFast, header: GgufHeader) -> None:
    """Make a tokenizer split text as its file states, where transformers does not.

    Args:
        tokenizer: the tokenizer that transformers made from the file.
        header: the file's header, which `check_split` passed.
    """
    split = _stated_split(header)
    if header.metadata.get("tokenizer.ggml.model") != _BYTE_LEVEL or split is None or split in _by_transformers():
        return
    tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(split)


def _stated_split(header: GgufHeader) -> str | None:
    """Return the name of a file's split; None if the file, as those of older converters, names none."""
    split = str(header.metadata.get(_KEY, _UNSTATED))
    return None if split == _UNSTATED else split


def named_split(split: str) -> PreTokenizer | None:
    """Return the pre-tokenizer that splits text in the way of this name; None if the name is unknown."""
    from tokenizers.pre_tokenizers import ByteLevel, Sequence

    pattern = _by_transformers().get(split)
    if pattern is None:
        return _pre_tokenizer(split)
    return Sequence([_matches(pattern), ByteLevel(add_prefix_space=False, use_regex=False)])


def _by_transformers() -> Mapping[str, str]:
    """Return the patterns by which transformers splits text, by name."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return GGUF_PRE_TOKENIZER_SPLITS


def _pre_tokenizer(split: str) -> PreTokenizer | None:
    """Return the pre-tokenizer of a split that transformers does not apply; None if it is unknown."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    gpt2 = ByteLevel(add_prefix_space=False)
    each_digit = Digits(individual_digits=True)
    if split in _GPT2:
        return gpt2
    if split in _DIGITS:
        return Sequence([each_digit, gpt2])
    if split == "falcon":
        digits = Digits(individual_digits=False)
        return Sequence([Punctuation(behavior="contiguous"), gpt2, digits, _matches("[0-9][0-9][0-9]")])
    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    if split in _QWEN2:
        return Sequence([_matches(PRETOKENIZE_REGEX), bytes_only])
    if split in _BLOOM:
        return Sequence([_matches(_BLOOM_WORD), bytes_only])
    if split == "viking":
        return Sequence([_matches(_BLOOM_WORD), each_digit, bytes_only])
    if split == "deepseek-coder":
        matches = [_matches(pattern) for pattern in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE)]
        return Sequence([*matches, each_digit, bytes_only])
    return None


def _matches(pattern: str) -> PreTokenizer:
    """Return a pre-tokenizer that makes each match of a pattern a separate piece."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    return Split(Regex(pattern), behavior="isolated")
