"""A tiny Llama with a memory, token by token, by `reference.py`."""

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
    """A memory on its backbone, with noise in place of training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        graft = WindowedMemory(MemoryConfig(**{**SIZES, **config}), backbone)
    return randomise(GraftedModel(backbone, {"graft": graft}).eval(), spread)


def memory_of(model: GraftedModel) -> WindowedMemory:
    graft = model.grafts["graft"]
    assert isinstance(graft, WindowedMemory)
    return graft


def weights_of(block: Any) -> Any:
    """The same leaves that the graft trains."""
    matrices: Any = [linear.weight.T for linear in (block.w_qk, block.u_qk, block.w_v, block.w_o)]
    rates: Any = [*block.rates.weight.T.chunk(3, -1), *block.rates.bias.chunk(3)]
    leaves: list[Any] = [*matrices, block.mix, block.gain, *rates]
    return reference.StateWeights(*leaves)


def slow_logits(backbone: Backbone, graft: WindowedMemory, ids_T: Tensor) -> Tensor:
    """(T, V): Llama's equations for one document, with reference windows and states."""
    model: Any = backbone.model
    x, head = model.model.embed_tokens.weight[ids_T], model.lm_head.weight.detach()
    e = head[ids_T] - head.mean(0)
    blocks = dict(zip(graft.config.layers, graft.blocks, strict=True))  # type: ignore[arg-type]
    for number, layer in enumerate(model.model.layers):
        h = _rms(x, layer.input_layernorm)
        y = x + _attention(h, layer.self_attn, model.config, graft.config)
        h, mlp = _rms(y, layer.post_attention_layernorm), layer.mlp
        gate = h @ mlp.gate_proj.weight.T
        y = y + (gate * torch.sigmoid(gate) * (h @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
        if number in blocks:
            y = y + reference.update(x, y, e, weights_of(blocks[number]), graft.config.heads)
        x = y
    return _rms(x, model.model.norm) @ model.lm_head.weight.T


def _attention(h_TD: Tensor, attention: Any, model: Any, memory: MemoryConfig) -> Tensor:
    width, shared = model.head_dim, model.num_attention_heads // model.num_key_value_heads
    q, k, v = (h_TD @ getattr(attention, f"{name}_proj").weight.T for name in "qkv")
    base, sizes = model.rope_parameters["rope_theta"], (memory.window, memory.sinks)
    assert memory.reach is not None
    heads = []
    for head in range(model.num_attention_heads):
        own, other = (slice(n * width, (n + 1) * width) for n in (head, head // shared))
        rows = []
        for t in range(len(h_TD)):
            query = _rotated(q[t, own], t, base)
            seen = reference.visible(t, *sizes)
            keys = [_rotated(k[s, other], reference.key_position(t, s, *sizes, memory.reach), base) for s in seen]
            shares = torch.softmax(torch.stack([query @ key for key in keys]) / width**0.5, 0)
            rows.append(sum(share * v[s, other] for share, s in zip(shares, seen, strict=True)))
        heads.append(torch.stack(rows))
    return torch.cat(heads, -1) @ attention.o_proj.weight.T


def _rotated(x_K: Tensor, position: int, base: float) -> Tensor:
    half = len(x_K) // 2
    angle = torch.tensor([position * base ** (-i / half) for i in range(half)])
    a, b = x_K[:half], x_K[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def _rms(x_TD: Tensor, norm: Any) -> Tensor:
    return x_TD / torch.sqrt((x_TD * x_TD).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
