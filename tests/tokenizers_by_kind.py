"""Small tokenizers of the kinds that real models have, and chat templates of the kinds that they come with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny import tiny_tokenizer

TEXTS = [
    "The harbour of Vall has 12 cranes, 3 ferries and one lighthouse.\nIts keeper is called Oda Brandt.",
    "def keeper(name):\n    return name.title()\n\nfor boat in boats:\n    boat.sail(12, 3)",
    "We were 4 of 678: unaffable, unhappily, quickly jinxed; the sailors' boats sail unhappily; sailing, sailed.",
    "港の灯台は町の北にあります。",
]
_SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 or Qwen."""
    return tiny_tokenizer()


def _with_bytes(trained: Tokenizer) -> models.BPE:
    """Return the trained model with tokens for single bytes, which unknown characters fall back to."""
    model = json.loads(trained.to_str())["model"]
    vocab = model["vocab"]
    for token in _BYTES:
        vocab[token] = len(vocab)
    merges = [tuple(merge) for merge in model["merges"]]
    return models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)


def _sentencepiece(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )


def _trained_on_words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=220, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.model = _with_bytes(tokenizer)
    return tokenizer


def prefix_blank() -> PreTrainedTokenizerFast:
    """As Llama 2: the normalizer puts a blank before each text, which the decoder drops."""
    tokenizer = _trained_on_words()
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(tokenizer)


def first_blank() -> PreTrainedTokenizerFast:
    """As Llama 2 without `legacy`: a pre-tokenizer puts a blank before the first word, unless there is one."""
    return _sentencepiece(_trained_on_words())


def unigram() -> PreTrainedTokenizerFast:
    """As T5 or XLNet: a unigram model whose pre-tokenizer always puts a blank before a text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False, initial_alphabet=["\n"]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


def word_pieces() -> PreTrainedTokenizerFast:
    """As BERT: lower case, and `##` before the pieces that continue a word."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


def bytes_only() -> PreTrainedTokenizerFast:
    """As ByT5: one token per byte, without merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=259,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "prefix blank": prefix_blank,
    "first blank": first_blank,
    "unigram": unigram,
    "word pieces": word_pieces,
    "bytes": bytes_only,
}


def with_template(
    template: str,
    markers: Sequence[str],
    *,
    special: bool = True,
    make: Callable[[], PreTrainedTokenizerFast] = byte_level,
) -> PreTrainedTokenizerFast:
    """Add the markers of a chat template to a tokenizer, as special tokens or as plain added ones."""
    tokenizer = make()
    tokenizer.add_tokens(list(markers), special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer
