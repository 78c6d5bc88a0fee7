"""A tiny Llama with a memory, computed token by token with `reference.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.memory import MemoryConfig, WindowedMemory
from graftlm.testing import randomise
from memory import reference
from tiny import tiny_model, tiny_tokenizer

SIZES: dict[str, Any] = {"window": 6, "sinks": 2, "layers": [0, 1], "heads": 2, "head_width": 8}
REACH = 16  # so that sinks move by 8 positions at a time


def live(family: str = "llama", **changes: Any) -> Backbone:
    """A tiny model in memory."""
    return Backbone.wrap(tiny_model(family, **changes), tiny_tokenizer(), family)


def memory_model(backbone: Backbone, *, spread: float = 0.2, **config: Any) -> GraftedModel:
    """A memory on its backbone, with random noise instead of trained weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        graft = WindowedMemory(MemoryConfig(**{**SIZES, **config}), backbone)
    return randomise(GraftedModel(backbone, {"graft": graft}).eval(), spread)


def memory_of(model: GraftedModel) -> WindowedMemory:
    graft = model.grafts["graft"]
    assert isinstance(graft, WindowedMemory)
    return graft


def weights_of(block: Any) -> reference.StateWeights:
    """The same leaves that the graft trains."""
    rate_a, rate_b, rate_g = block.rates.weight.T.chunk(3, -1)
    bias_a, bias_b, bias_g = block.rates.bias.chunk(3)
    return reference.StateWeights(
        w_qk=block.w_qk.weight.T,
        u_qk=block.u_qk.weight.T,
        w_v=block.w_v.weight.T,
        w_o=block.w_o.weight.T,
        mix=block.mix,
        gain=block.gain,
        rate_a=rate_a,
        rate_b=rate_b,
        rate_g=rate_g,
        bias_a=bias_a,
        bias_b=bias_b,
        bias_g=bias_g,
    )


def slow_logits(backbone: Backbone, graft: WindowedMemory, ids_T: Tensor) -> Tensor:
    """(T, V): Llama's equations for one document, with reference windows and states."""
    model: Any = backbone.model
    head = model.lm_head.weight.detach()
    x = model.model.embed_tokens.weight[ids_T]
    e = head[ids_T] - head.mean(0)
    blocks = dict(zip(graft.config.layers, graft.blocks, strict=True))  # type: ignore[arg-type]
    for number, layer in enumerate(model.model.layers):
        h = _rms(x, layer.input_layernorm)
        y = x + _attention(h, layer.self_attn, model.config, graft.config)
        h = _rms(y, layer.post_attention_layernorm)
        gate = h @ layer.mlp.gate_proj.weight.T
        up = h @ layer.mlp.up_proj.weight.T
        y = y + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
        if number in blocks:
            y = y + reference.update(x, y, e, weights_of(blocks[number]), graft.config.heads)
        x = y
    return _rms(x, model.model.norm) @ model.lm_head.weight.T


def _attention(h_TD: Tensor, attention: Any, model: Any, memory: MemoryConfig) -> Tensor:
    width = model.head_dim
    shared = model.num_attention_heads // model.num_key_value_heads
    q = h_TD @ attention.q_proj.weight.T
    k = h_TD @ attention.k_proj.weight.T
    v = h_TD @ attention.v_proj.weight.T
    base = model.rope_parameters["rope_theta"]
    heads = []
    for head in range(model.num_attention_heads):
        of_queries = slice(head * width, (head + 1) * width)
        group = head // shared
        of_keys = slice(group * width, (group + 1) * width)
        heads.append(_attention_head(q[:, of_queries], k[:, of_keys], v[:, of_keys], base, memory))
    return torch.cat(heads, -1) @ attention.o_proj.weight.T


def _attention_head(q_TK: Tensor, k_TK: Tensor, v_TK: Tensor, base: float, memory: MemoryConfig) -> Tensor:
    assert memory.reach is not None
    rows = []
    for t in range(len(q_TK)):
        query = _rotated(q_TK[t], t, base)
        seen = reference.visible(t, memory.window, memory.sinks)
        scores = []
        for s in seen:
            position = reference.key_position(t, s, memory.window, memory.sinks, memory.reach)
            scores.append(query @ _rotated(k_TK[s], position, base))
        weights = torch.softmax(torch.stack(scores) / q_TK.shape[1] ** 0.5, 0)
        rows.append(weights @ v_TK[seen])
    return torch.stack(rows)


def _rotated(x_K: Tensor, position: int, base: float) -> Tensor:
    half = len(x_K) // 2
    angle = torch.tensor([position * base ** (-i / half) for i in range(half)])
    a = x_K[:half]
    b = x_K[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def _rms(x_TD: Tensor, norm: Any) -> Tensor:
    return x_TD / torch.sqrt((x_TD * x_TD).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
