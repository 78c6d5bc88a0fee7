"""The published 260k-parameter story model as a transformers folder: converts the llama2.c format (version 0).

The file: seven int32 (width, FFN width, layers, heads, key-value heads, vocabulary, longest sequence), then float32
tensors one after the other. Its rotary embedding turns adjacent pairs of a head's channels, transformers' turns the two
halves, so the channels of queries and keys are reordered. The vocabulary holds SentencePiece pieces with scores; a
merge is any pair of pieces whose concatenation is a piece, the best score first.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def convert_stories(source: Path, target: Path) -> Path:
    """Read `stories260K.bin` and `tok512.bin` in `source`, write model and tokenizer to `target`."""
    model = read_model(source / "stories260K.bin")
    model.save_pretrained(target)
    read_tokenizer(source / "tok512.bin", model.config.vocab_size).save_pretrained(target)
    return target


def read_model(path: Path) -> LlamaForCausalLM:
    raw = path.read_bytes()
    width, inner, layers, heads, kv_heads, vocabulary, longest = struct.unpack("7i", raw[:28])
    reader = _Reader(np.frombuffer(raw, dtype=np.float32, offset=28))
    head = width // heads
    kv_width = head * kv_heads
    state: dict[str, Tensor] = {"model.embed_tokens.weight": reader.take(vocabulary, width)}
    parts = [
        ("input_layernorm", (width,), 0),
        ("self_attn.q_proj", (width, width), heads),
        ("self_attn.k_proj", (kv_width, width), kv_heads),
        ("self_attn.v_proj", (kv_width, width), 0),
        ("self_attn.o_proj", (width, width), 0),
        ("post_attention_layernorm", (width,), 0),
        ("mlp.gate_proj", (inner, width), 0),
        ("mlp.down_proj", (width, inner), 0),
        ("mlp.up_proj", (inner, width), 0),
    ]
    for name, shape, rotary_heads in parts:
        for layer in range(layers):
            tensor = reader.take(*shape)
            state[f"model.layers.{layer}.{name}.weight"] = _halves(tensor, rotary_heads) if rotary_heads else tensor
    state["model.norm.weight"] = reader.take(width)
    reader.take(longest, head // 2)
    reader.take(longest, head // 2)
    assert reader.left == 0, f"{reader.left} floats are left over"
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=longest,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def read_tokenizer(path: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    raw = path.read_bytes()
    pieces: list[tuple[str, float]] = []
    offset = 4
    for _ in range(vocabulary):
        score, length = struct.unpack_from("fi", raw, offset)
        text = raw[offset + 8 : offset + 8 + length].decode("utf-8")
        pieces.append((text.replace(" ", "▁"), score))
        offset += 8 + length
    pieces[0], pieces[1], pieces[2] = ("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)
    ids = {piece: index for index, (piece, _) in enumerate(pieces)}
    scores = dict(pieces)
    merges = [
        (scores[piece], piece[:cut], piece[cut:])
        for piece in ids
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    ranked = [(left, right) for _, left, right in sorted(merges, key=lambda merge: -merge[0])]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=ranked, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


class _Reader:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._values) - self._at

    def take(self, *shape: int) -> Tensor:
        size = int(np.prod(shape))
        values = self._values[self._at : self._at + size].reshape(shape).copy()
        self._at += size
        return torch.from_numpy(values)


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Move channel pairs (0, 1), (2, 3), … of each head to positions (0, h/2), (1, h/2 + 1), …"""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)
