"""The architecture by its equations, slow and literal: a single text, token by token.

Only the parameters of the tested models are used.
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
        y = _outputs(module.ssm.kernels, u, config)[..., 0, 0]
        x = x + y @ module.out_proj.weight.T
    for layer in model.layers:
        mixed = _mixed(layer.mixer, _normed(x, layer.mixer_norm), config)
        x = x + mixed @ layer.mixer.out.weight.T
        inner = torch.relu(_normed(x, layer.ffn_norm) @ layer.ffn.up.weight.T)
        x = x + inner @ layer.ffn.down.weight.T
    return _normed(x, model.norm)


def _mixed(mixer: Any, h: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d or 2d): the outputs of a mixer before its last projection."""
    if hasattr(mixer, "gate"):
        return _gated_state_space(mixer, h, config)
    out = _attention(mixer.attention, h, config)
    if mixer.context is None:
        return out
    return torch.cat([out, _context(mixer, h, config)], dim=-1)


def _gated_state_space(module: Any, h: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d): a state-space model's outputs times a gate."""
    u = _gelu(h @ module.in_proj.weight.T)
    y = _both_directions(module, u, config)[..., 0, 0]
    gate = _gelu(h @ module.gate.weight.T)
    return _normed(y, module.norm) @ module.up.weight.T * gate


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _normed(x: Tensor, norm: Any) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _outputs(kernels: Any, u: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, E, M, C): outputs of every system at every token, for inputs (T, E)."""
    if config.kernel != "unstructured":
        return recurrence(kernels, u)
    outputs = [_convolution(kernels, u, number) for number in range(kernels.shape[0])]
    return torch.stack(outputs, dim=-1)[:, :, None]


def recurrence(kernels: Any, u: Tensor) -> Tensor:
    """(T, E, M, C): x_t = a x_{t-1} + b u_t, y_t = 2 Re(c x_t) + d u_t, with a = exp(dt A) and b = (a - 1) / A."""
    a_continuous = torch.complex(-torch.exp(kernels.log_decay), kernels.frequency)
    a = torch.exp(torch.exp(kernels.log_dt)[..., None] * a_continuous)  # (M, E, P)
    b = (a - 1) / a_continuous
    c = torch.complex(kernels.c[..., 0], kernels.c[..., 1])  # (C, M, E, P)
    x = torch.zeros_like(a)
    outputs = []
    for u_t in u:
        x = a * x + b * u_t[:, None]
        y = 2 * (c * x).sum(-1).real + kernels.d * u_t  # (C, M, E)
        outputs.append(y.permute(2, 1, 0))
    return torch.stack(outputs)


def _convolution(kernels: Any, u: Tensor, number: int) -> Tensor:
    """y_t = sum over j of K_j u_{t-j} + d u_t, K_j = exp(-alpha j / L) FFN(features of j / L) / sqrt(energy)."""
    d = kernels.d[number, 0]
    kernel = [_kernel(kernels, number, j, u.dtype) for j in range(len(u))]
    rows = []
    for t in range(len(u)):
        convolved = sum(kernel[j] * u[t - j] for j in range(t + 1))
        rows.append(convolved + d * u[t])
    return torch.stack(rows)


def _kernel(kernels: Any, number: int, j: int, dtype: torch.dtype) -> Tensor:
    """(E): K_j."""
    outputs, channels = kernels.shape
    weights = kernels.outer.weight.reshape(outputs, channels, -1)[number]
    alpha = torch.exp(kernels.log_alpha)
    scale = torch.sqrt(kernels.length * (1 - torch.exp(-2 * alpha)) / (2 * alpha))
    time = j / kernels.length
    bands = (kernels.inner.in_features - 1) // 2
    waves = [2 * math.pi * time * k for k in range(1, bands + 1)]
    sines = [math.sin(wave) for wave in waves]
    cosines = [math.cos(wave) for wave in waves]
    features = torch.tensor([time, *sines, *cosines], dtype=dtype)
    inner = torch.sin(kernels.inner.weight @ features + kernels.inner.bias)
    return torch.exp(-alpha * time) * (weights @ inner) / scale


def _attention(module: Any, h: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d): each token's attention to the last tokens, with T5's bias."""
    rows = []
    for t in range(len(h)):
        keys = []
        bias = []
        for j in range(len(h)):
            distance = t - j
            visible = -config.window < distance if config.bidirectional else distance >= 0
            if not visible or distance >= config.span:
                continue
            is_earlier = j // config.window < t // config.window
            hidden = h[j].detach() if config.mixer == "memory" and is_earlier else h[j]
            keys.append(module.kv.weight @ hidden)
            bias.append(module.bias.table.weight[_bucket(distance, config)])
        k, v = torch.stack(keys).chunk(2, dim=-1)
        q = module.q.weight @ h[t]
        rows.append(_attend(q, k, v, config.num_attention_heads, torch.stack(bias)))
    return torch.stack(rows)


def _bucket(distance: int, config: BlockStateConfig) -> int:
    buckets = config.relative_buckets
    offset = 0
    if config.bidirectional:
        buckets //= 2
        offset = buckets if distance < 0 else 0
        distance = abs(distance)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    ratio = math.log(distance / exact) / math.log(config.relative_distance / exact)
    far = exact + int(ratio * (buckets - exact))
    return offset + min(far, buckets - 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """(d): softmax(q . k / sqrt(K) + bias) v of one query, head by head; `bias` (keys, H)."""
    width = len(q) // heads
    outputs = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = k[:, part] @ q[part] / math.sqrt(width)
        if bias is not None:
            scores = scores + bias[:, head]
        outputs.append(torch.softmax(scores, dim=0) @ v[:, part])
    return torch.cat(outputs)


def _context(mixer: Any, h: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d): each token's attention to the context states of its window."""
    module = mixer.context
    if config.mixer == "recurrent":
        states = [_normed(state, module.norm) for state in _recurrent_states(mixer, h, config)]
        return _cross_attention(module, h, states, config)
    if config.context == "mf":
        projected = [state @ module.out_proj.weight.T for state in _filter_states(module, h, config)]
        states = [_normed(state, module.norm) for state in projected]
        return _cross_attention(module, h, states, config)
    y = _both_directions(module, h @ module.in_proj.weight.T, config)[:, :, 0]  # (T, E, C)
    if config.kernel == "delta":
        return torch.stack([module.value.weight @ _normed(token[:, 0], module.norm) for token in y])
    return _token_state_attention(module, h, y, config)


def _token_state_attention(module: Any, h: Tensor, y: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, d): each token's attention to the outputs y (T, E, C) at the tokens of its window."""
    pairs = [_token_keys(module, y_t, config) for y_t in y]
    rows = []
    for t in range(len(h)):
        first = t // config.window * config.window
        last = min(first + config.window, len(h)) if config.bidirectional else t + 1
        keys = torch.stack([key for key, _ in pairs[first:last]])
        values = torch.stack([value for _, value in pairs[first:last]])
        q = module.q.weight @ h[t]
        rows.append(_attend(q, keys, values, config.num_attention_heads))
    return torch.stack(rows)


def _both_directions(module: Any, u: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, E, M, C): the sum of the outputs of both directions, or those of the only one."""
    if config.kernel == "delta":
        starts = [t % config.window == 0 for t in range(len(u))]
        ends = [(t + 1) % config.window == 0 for t in range(len(u))]
        y = _delta(module.ssm, u, [config.reset_states and start for start in starts])
        if config.bidirectional:
            resets = [config.reset_states and end for end in reversed(ends)]
            y = y + _delta(module.backward_ssm, u.flip(0), resets).flip(0)
        return y
    y = _outputs(module.ssm.kernels, u, config)
    if config.bidirectional:
        y = y + _outputs(module.backward_ssm.kernels, u.flip(0), config).flip(0)
    return y


def _delta(module: Any, u: Tensor, resets: list[bool]) -> Tensor:
    """(T, E, 1, 1): outputs of the gated delta rule, whose state is reset before the tokens with `resets`."""
    values = u.shape[1]
    keys = (len(module.mix[0]) - values) // 2
    z = u @ module.qkv.weight.T
    state = u.new_zeros(keys, values)
    rows = []
    for t, token in enumerate(u):
        mixed = sum(module.mix[j] * z[t - j] for j in range(len(module.mix)) if j <= t)
        q, k, v = mixed.split([keys, keys, values])
        q = q / torch.sqrt((q * q).sum() + 0.01)
        k = k / torch.sqrt((k * k).sum() + 0.01)
        rate_a, rate_b = module.rate_weight @ token + module.rate_bias
        if resets[t]:
            state = 0 * state
        else:
            state = state / (1 + torch.exp(rate_a))  # exp(-softplus(x)) = 1 / (1 + exp(x))
        state = state + torch.outer(k, (v - k @ state) / (1 + torch.exp(-rate_b)))
        rows.append(q @ state)
    return torch.stack(rows)[:, :, None, None]


def _token_keys(module: Any, y: Tensor, config: BlockStateConfig) -> tuple[Tensor, Tensor]:
    """Key and value (d) of one token's outputs (E, C)."""
    if config.context == "sh":
        k, v = (module.kv.weight @ _normed(y[:, 0], module.norm)).chunk(2)
        return k, v
    keys = []
    values = []
    for head in range(y.shape[1]):
        k, v = (_normed(y[:, head], module.norm) @ module.kv_per_head[head]).chunk(2)
        keys.append(k)
        values.append(v)
    return torch.cat(keys), torch.cat(values)


def _filter_states(module: Any, h: Tensor, config: BlockStateConfig) -> list[Tensor]:
    """(S, E) for each window: outputs at the end of the window before, and at the start of the window after."""
    u = h @ module.in_proj.weight.T
    y = _filter_outputs(module.ssm.kernels, u, config)
    windows = math.ceil(len(h) / config.window)
    ends = range(config.window - 1, len(h), config.window)
    states = [module.initial_states, *(y[end] for end in ends)][:windows]
    if not config.bidirectional:
        return states
    backward = _filter_outputs(module.backward_ssm.kernels, u.flip(0), config).flip(0)
    starts = range(config.window, len(h), config.window)
    after = [*(backward[start] for start in starts), module.final_states]
    return [torch.cat(pair) for pair in zip(states, after, strict=True)]


def _filter_outputs(kernels: Any, u: Tensor, config: BlockStateConfig) -> Tensor:
    """(T, S, E)."""
    y = _outputs(kernels, u, config)
    y = y[:, :, 0] if config.kernel == "unstructured" else y[..., 0]
    return y.transpose(1, 2)


def _recurrent_states(mixer: Any, h: Tensor, config: BlockStateConfig) -> list[Tensor]:
    """(S, d) for each window: the states before it."""
    module = mixer.context
    heads = config.num_attention_heads
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
    contexts = [state + module.context_ids for state in states]
    keys = [(context @ reader.kv.weight.T).chunk(2, dim=-1) for context in contexts]
    rows = []
    for t, token in enumerate(h):
        k, v = keys[t // config.window]
        rows.append(_attend(reader.q.weight @ token, k, v, config.num_attention_heads))
    return torch.stack(rows)
