"""The architecture a second time, slow and literal: one text, token by token, from the equations. For tests.

Of the fast path, only the parameters are used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graftlm.models.block_state.config import BlockStateConfig


def logits(model: Any, ids: list[int]) -> Tensor:
    """(T, V): next-token logits of one text by a `BlockStateForCausalLM`."""
    return hidden_states(model.model, ids) @ model.lm_head.weight.T


def class_scores(model: Any, ids: list[int]) -> Tensor:
    """(labels): logits of one text by a `BlockStateForSequenceClassification`."""
    return hidden_states(model.model, ids).mean(0) @ model.score.weight.T + model.score.bias


def hidden_states(model: Any, ids: list[int]) -> Tensor:
    """(T, d): hidden states of one text by a `BlockStateModel`."""
    config = model.config
    x = torch.stack([model.embed_tokens.weight[i] for i in ids])
    if model.positional_ssm is not None:
        module = model.positional_ssm
        u = _normed(x, module.norm) @ module.in_proj.weight.T
        x = x + _outputs(module.ssm.kernels, u, config)[..., 0, 0] @ module.out_proj.weight.T
    for layer in model.layers:
        h = _normed(x, layer.mixer_norm)
        if hasattr(layer.mixer, "gate"):
            out = _gated_state_space(layer.mixer, h, config)
        else:
            out = _attention(layer.mixer.attention, h, config)
            if layer.mixer.context is not None:
                out = torch.cat([out, _context(layer.mixer, h, config)], dim=-1)
        x = x + out @ layer.mixer.out.weight.T
        inner = torch.relu(_normed(x, layer.ffn_norm) @ layer.ffn.up.weight.T)
        x = x + inner @ layer.ffn.down.weight.T
    return _normed(x, model.norm)


def _gated_state_space(module: Any, h: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d): a state-space model's outputs times a gate."""

    def gelu(x: Tensor) -> Tensor:
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    u = gelu(h @ module.in_proj.weight.T)
    y = _both_directions(module, u, config)
    return _normed(y[..., 0, 0], module.norm) @ module.up.weight.T * gelu(h @ module.gate.weight.T)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _outputs(kernels: Any, u: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, E, M, C): outputs of every system at every token, of inputs (T, E)."""
    if config.kernel != "unstructured":
        return _recurrence(kernels, u)
    return torch.stack([_convolution(kernels, u, number) for number in range(kernels.shape[0])], dim=-1)[:, :, None]


def _recurrence(kernels: Any, u: Tensor) -> Tensor:
    """x_t = a x_{t-1} + b u_t, y_t = 2 Re(c x_t) + d u_t, with a = exp(dt A) and b = (a - 1) / A."""
    a_continuous = torch.complex(-torch.exp(kernels.log_decay), kernels.frequency)
    a = torch.exp(torch.exp(kernels.log_dt)[..., None] * a_continuous)  # (M, E, P)
    b = (a - 1) / a_continuous
    c = torch.complex(kernels.c[..., 0], kernels.c[..., 1])  # (C, M, E, P)
    x, outputs = torch.zeros_like(a), []
    for u_t in u:
        x = a * x + b * u_t[:, None]
        y = 2 * (c * x).sum(-1).real + kernels.d * u_t  # (C, M, E)
        outputs.append(y.permute(2, 1, 0))
    return torch.stack(outputs)


def _convolution(kernels: Any, u: Tensor, number: int) -> Tensor:
    """y_t = sum over j of K_j u_{t-j} + d u_t, K_j = exp(-alpha j / L) FFN(features of j / L) / sqrt(energy)."""
    channels = kernels.shape[1]
    weights = kernels.outer.weight.reshape(kernels.shape[0], channels, -1)[number]
    alpha = torch.exp(kernels.log_alpha)
    scale = torch.sqrt(kernels.length * (1 - torch.exp(-2 * alpha)) / (2 * alpha))
    kernel = []
    for j in range(len(u)):
        time = j / kernels.length
        bands = (kernels.inner.in_features - 1) // 2
        waves = [2 * math.pi * time * k for k in range(1, bands + 1)]
        features = torch.tensor([time, *map(math.sin, waves), *map(math.cos, waves)], dtype=u.dtype)
        inner = torch.sin(kernels.inner.weight @ features + kernels.inner.bias)
        kernel.append(torch.exp(-alpha * time) * (weights @ inner) / scale)
    rows = [sum(kernel[j] * u[t - j] for j in range(t + 1)) + kernels.d[number, 0] * u[t] for t in range(len(u))]
    return torch.stack(rows)


def _attention(module: Any, h: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d): each token's attention to the last tokens, with T5's bias."""
    rows = []
    for t in range(len(h)):
        keys, bias = [], []
        for j in range(len(h)):
            distance = t - j
            visible = -config.window < distance if config.bidirectional else distance >= 0
            if not visible or distance >= config.span:
                continue
            earlier = config.mixer == "memory" and j // config.window < t // config.window
            keys.append(module.kv.weight @ (h[j].detach() if earlier else h[j]))
            bias.append(module.bias.table.weight[_bucket(distance, config)])
        k, v = torch.stack(keys).chunk(2, dim=-1)
        rows.append(_attend(module.q.weight @ h[t], k, v, config.num_attention_heads, torch.stack(bias)))
    return torch.stack(rows)


def _bucket(distance: int, config: BlockStateConfig) -> int:
    buckets, offset = config.relative_buckets, 0
    if config.bidirectional:
        buckets //= 2
        offset = buckets if distance < 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    far = exact + int(math.log(distance / exact) / math.log(config.relative_distance / exact) * (buckets - exact))
    return offset + min(far, buckets - 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """(d): softmax(q . k / sqrt(K) + bias) v of one query, head by head; `bias` (keys, H)."""
    width = len(q) // heads
    outputs = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = k[:, part] @ q[part] / math.sqrt(width)
        scores = scores if bias is None else scores + bias[:, head]
        outputs.append(torch.softmax(scores, dim=0) @ v[:, part])
    return torch.cat(outputs)


def _context(mixer: Any, h: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d): each token's attention to the context states of its window."""
    module = mixer.context
    if config.mixer == "recurrent":
        states = [_normed(state, module.norm) for state in _recurrent_states(mixer, h, config)]
        return _cross_attention(module, h, states, config)
    if config.context == "mf":
        states = [_normed(state @ module.out_proj.weight.T, module.norm) for state in _filter_states(module, h, config)]
        return _cross_attention(module, h, states, config)
    y = _both_directions(module, h @ module.in_proj.weight.T, config)[:, :, 0]  # (T, E, C)
    if config.kernel == "delta":
        return torch.stack([module.value.weight @ _normed(token[:, 0], module.norm) for token in y])
    rows = []
    for t in range(len(h)):
        first = t // config.window * config.window
        last = min(first + config.window, len(h)) if config.bidirectional else t + 1
        keys, values = zip(*(_token_keys(module, y[j], config) for j in range(first, last)), strict=True)
        q = module.q.weight @ h[t]
        rows.append(_attend(q, torch.stack(keys), torch.stack(values), config.num_attention_heads))
    return torch.stack(rows)


def _both_directions(module: Any, u: Tensor, config: BlockStateConfig) -> Tensor:
    if config.kernel == "delta":
        forward = [config.reset_states and t % config.window == 0 for t in range(len(u))]
        y = _delta(module.ssm, u, forward)
        backward = [config.reset_states and (t + 1) % config.window == 0 for t in range(len(u))][::-1]
        return y + _delta(module.backward_ssm, u.flip(0), backward).flip(0) if config.bidirectional else y
    y = _outputs(module.ssm.kernels, u, config)
    return y + _outputs(module.backward_ssm.kernels, u.flip(0), config).flip(0) if config.bidirectional else y


def _delta(module: Any, u: Tensor, anew: list[bool]) -> Tensor:
    """(T, E, 1, 1): what a state answers that each token corrects at its key; it begins `anew` before some tokens."""
    n = (len(module.mix[0]) - u.shape[1]) // 2
    z = u @ module.qkv.weight.T
    state, rows = u.new_zeros(n, u.shape[1]), []
    for t, token in enumerate(u):
        mixed = sum(module.mix[j] * z[t - j] for j in range(len(module.mix)) if j <= t)
        q, k, v = mixed[:n], mixed[n : 2 * n], mixed[2 * n :]
        q, k = q / torch.sqrt((q * q).sum() + 0.01), k / torch.sqrt((k * k).sum() + 0.01)
        forgets, writes = module.rate_weight @ token + module.rate_bias
        state = 0 * state if anew[t] else state / (1 + torch.exp(forgets))  # exp(-softplus(x)) = 1 / (1 + exp(x))
        state = state + torch.outer(k, (v - k @ state) / (1 + torch.exp(-writes)))
        rows.append(q @ state)
    return torch.stack(rows)[:, :, None, None]


def _token_keys(module: Any, y: Tensor, config: BlockStateConfig) -> tuple[Tensor, Tensor]:
    """Key and value (d) of one token's outputs (E, C)."""
    if config.context == "sh":
        k, v = (module.kv.weight @ _normed(y[:, 0], module.norm)).chunk(2)
        return k, v
    heads = range(y.shape[1])
    parts = [(_normed(y[:, head], module.norm) @ module.kv_per_head[head]).chunk(2) for head in heads]
    return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


def _filter_states(module: Any, h: Tensor, config: BlockStateConfig) -> list[Tensor]:
    """(S, E) for each window: outputs at the end of the window before; backwards, at the start of the one after."""
    u = h @ module.in_proj.weight.T
    y = _filter_outputs(module.ssm.kernels, u, config)
    states = [module.initial_states] + [y[end] for end in range(config.window - 1, len(h), config.window)]
    states = states[: -(-len(h) // config.window)]
    if not config.bidirectional:
        return states
    backward = _filter_outputs(module.backward_ssm.kernels, u.flip(0), config).flip(0)
    after = [backward[start] for start in range(config.window, len(h), config.window)] + [module.final_states]
    return [torch.cat(pair) for pair in zip(states, after, strict=True)]


def _filter_outputs(kernels: Any, u: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, S, E)."""
    y = _outputs(kernels, u, config)
    return (y[..., 0] if config.kernel == "s4d" else y[:, :, 0]).transpose(1, 2)


def _recurrent_states(mixer: Any, h: Tensor, config: BlockStateConfig) -> list[Tensor]:
    """(S, d) for each window: the states before it."""
    module, heads = mixer.context, config.num_attention_heads
    gate = torch.sigmoid(module.gate)
    states = [module.initial_states]
    for start in range(0, len(h) - config.window, config.window):
        normed = _normed(states[-1], module.norm) + module.context_ids
        k_self, v_self = (normed @ module.cross_attention.kv.weight.T).chunk(2, dim=-1)
        k, v = (h[start : start + config.window] @ mixer.attention.kv.weight.T).chunk(2, dim=-1)
        rows = []
        for state in normed:
            q_self, q_tokens = (module.q.weight @ state).chunk(2)
            outputs = [_attend(q_self, k_self, v_self, heads), _attend(q_tokens, k, v, heads)]
            rows.append(module.out.weight @ torch.cat(outputs))
        states.append(gate * states[-1] + (1 - gate) * torch.stack(rows))
    return states


def _cross_attention(module: Any, h: Tensor, states: list[Tensor], config: BlockStateConfig) -> Tensor:
    """(T, d): each token's attention to its window's normed states, with context IDs."""
    reader = module.cross_attention
    keys = [((state + module.context_ids) @ reader.kv.weight.T).chunk(2, dim=-1) for state in states]
    rows = []
    for t, token in enumerate(h):
        k, v = keys[t // config.window]
        rows.append(_attend(reader.q.weight @ token, k, v, config.num_attention_heads))
    return torch.stack(rows)
