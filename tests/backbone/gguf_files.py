"""A tiny Llama as a GGUF file in float32, as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of llama.cpp: rotated pairs are neighbours, not half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, tokenizer: Any) -> Path:
    """Write a Llama model and its byte-level BPE tokenizer to `path`."""
    from gguf import GGUFWriter

    config, writer = model.config, GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        outer, _, suffix = name.rpartition(".")
        if outer not in OUTER:
            _, _, layer, inner = outer.split(".", 3)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(NAMES[inner])
            weight = interleave(weight, heads) if heads else weight
            writer.add_tensor(f"blk.{layer}.{NAMES[inner]}.{suffix}", weight.numpy())
        elif not (outer == "lm_head" and config.tie_word_embeddings):
            writer.add_tensor(f"{OUTER[outer]}.{suffix}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import json

    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].get))
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in bpe["vocab"]])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)


__all__ = ["write_gguf"]
