"""Memory: a frozen decoder reads with a window, and a trained state remembers all text before.

Each attention of the backbone sees the sinks and the last W tokens (`window.py`). In the chosen layers, with their
input x and output y, and as e the row of the output embeddings that is the token's, less the mean of all rows,

    x, e divided by their root mean squares
    z_t = sum over j < C of m_j * (e_{t-j} W + x_{t-j} U)    z = [q, k], both z / sqrt(|z|^2 + 0.01); initially U = 0
    v = e W_v    b = sigmoid(x w_b + c_b)    g = sigmoid(x w_g + c_g)    log a = -softplus(x w_a + c_a)
    S_t = a_t S_{t-1} + k_t u_t^T,  u_t = b_t (v_t - a_t S_{t-1}^T k_t)           a state S of each head, (K, V)
    y' = y + 30 rms(y) (n * g S_t^T q_t) W_O                                      initially n = 0

Only W, U, W_v, W_O, m, n, w and c are trained; the README has the reasons.

Shape suffixes: B rows, T tokens, D the backbone's width, H heads, K width of a head's keys, V of its values.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone, Call, Site, Sites, Tap, max_sequence_length
from graftlm.backbone.cache import StateLayer, slots
from graftlm.errors import GraftError, RecipeError
from graftlm.grafts.base import Graft, GraftConfig
from graftlm.grafts.memory.window import WindowShape, hidden_keys, window_layers
from graftlm.models.delta_rule import delta_rule, mixed_tokens, unit_length

SCALE = 30.0
"""The share of the stream that a gain of 1 adds: trained gains are some hundredths, about the steps that Adam takes."""


class MemoryConfig(GraftConfig):
    """Config of a memory.

    Args:
        window: W, how many tokens each token of the backbone sees, itself included.
        sinks: how many of a document's first tokens every token sees.
        state: `delta` keeps a state of all text by the gated delta rule; `none` leaves window attention alone.
        layers: the layers with a state: how many, evenly spaced in the last third or in as many as they are, or a list.
        heads: heads of each state.
        head_width: K, the width of keys.
        mixed: C, from how many last tokens a token's query and key are mixed.
        reach: R, below which the distance of a sink stays. Default: the backbone's number of positions.
    """

    kind: Literal["memory"] = "memory"
    window: int = Field(ge=1)
    sinks: int = Field(4, ge=0)
    state: Literal["delta", "none"] = "delta"
    layers: int | list[int] = 2
    heads: int = Field(4, ge=1)
    head_width: int = Field(512, ge=1)
    mixed: int = Field(3, ge=1)
    reach: int | None = Field(None, ge=1)

    def check_rows(self, length: int) -> None:
        if self.state != "none" and length <= self.window + self.sinks:
            raise RecipeError(
                f"Rows of {length:,} tokens are no longer than the window of {self.window:,} and its {self.sinks:,} "
                "sinks, so there is nothing to remember: raise data.length, or lower the graft's window."
            )


class DeltaState(nn.Module):
    """The state of one layer; see the module's equations."""

    def __init__(self, width: int, config: MemoryConfig) -> None:
        super().__init__()
        self.heads, self.offsets = config.heads, max(1, min(config.mixed - 1, config.heads))
        keys, values = config.heads * config.head_width, -(-width // (config.heads // self.offsets)) * config.heads
        self.w_qk = nn.Linear(width, 2 * keys, bias=False)  # from the token
        self.u_qk = nn.Linear(width, 2 * keys, bias=False)  # from the layer's input
        self.w_v = nn.Linear(width, values, bias=False)
        self.w_o = nn.Linear(values, width, bias=False)
        self.mix = nn.Parameter(torch.zeros(config.mixed, 2 * keys))
        self.rates = nn.Linear(width, 3 * config.heads)  # of a, then of b, then of g
        self.gain = nn.Parameter(torch.zeros(values))
        self._initialise(config.window)

    @torch.no_grad()
    def _initialise(self, window: int) -> None:
        """Head h reads what followed when the token h mod `offsets` before was last read, and writes nothing yet."""
        queries, keys = self.w_qk.weight.normal_(0, 1 / math.sqrt(self.w_qk.in_features)).chunk(2)
        keys.copy_(queries)
        self.u_qk.weight.zero_()
        queries_CHK, keys_CHK = (part.unflatten(-1, (self.heads, -1)) for part in self.mix.chunk(2, dim=1))
        values_HVD = self.w_v.weight.unflatten(0, (self.heads, -1))
        for offset in range(self.offsets):
            queries_CHK[offset, offset :: self.offsets] = 1
            keys_CHK[min(offset + 1, len(self.mix) - 1), offset :: self.offsets] = 1
            basis = torch.empty_like(values_HVD[offset :: self.offsets].flatten(0, 1))
            values_HVD[offset :: self.offsets] = nn.init.orthogonal_(basis).view_as(values_HVD[offset :: self.offsets])
        self.w_o.weight.copy_(self.w_v.weight.T)
        self.rates.weight.zero_()
        times = torch.logspace(0, math.log10(128), self.heads).flip(0) * window  # a head forgets in 1 to 128 windows
        self.rates.bias.copy_(torch.cat([torch.log(torch.expm1(1 / times)), torch.zeros(2 * self.heads)]))

    def forward(
        self, x_BTD: Tensor, e_BTD: Tensor, real_BT: Tensor | None, document_BT: Tensor | None, layer: StateLayer | None
    ) -> Tensor:
        """What is added to the layer's output (B, T, D), over its root mean square.

        The cache's layer keeps the state after the last token. Tensors have the dtype of the state, float32 or float64.
        """
        state, before = (layer.keys, layer.values) if layer is not None and layer.is_initialized else (None, None)
        e_BTD = e_BTD if real_BT is None else e_BTD * real_BT[..., None]
        z = _linear(self.w_qk, e_BTD) + _linear(self.u_qk, x_BTD)
        z = z if real_BT is None else z * real_BT[..., None]
        z, before = mixed_tokens(z, self.mix.to(z.dtype), document_BT, before)
        q, k = z.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = unit_length(q), unit_length(k)
        v = _linear(self.w_v, e_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        a, b, g = _linear(self.rates, x_BTD).transpose(1, 2).chunk(3, dim=1)  # (B, H, T)
        read, state = delta_rule(q, k, v, -functional.softplus(a), b.sigmoid(), state, document_BT)
        read = (g.sigmoid()[..., None] * read).transpose(1, 2).flatten(2)
        if layer is not None:
            layer.update(state, before)
        return SCALE * _linear(self.w_o, self.gain.to(read.dtype) * read)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """A Linear in the dtype of its input."""
    bias: Tensor | None = linear.bias
    return functional.linear(x, linear.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class WindowedMemory(Graft):
    """Window attention with sinks on every layer of a backbone, and states in some.

    Its config is a copy with the layers and the reach that result.

    Raises GraftError if the backbone has other positions or windows of its own, or sizes do not fit.
    """

    Config: ClassVar[type[GraftConfig]] = MemoryConfig
    label = "memory"
    config: MemoryConfig
    mean: Tensor
    rows: Tensor | None

    def __init__(self, config: MemoryConfig, backbone: Backbone) -> None:
        super().__init__()
        sites = backbone.sites
        check_backbone(sites)
        layers = chosen_layers(config, sites.n_layers)
        reach = config.reach or int(max_sequence_length(backbone.model))
        self.config = config.model_copy(update={"layers": layers, "reach": reach})
        rotation: Any = sites.body.rotary_emb
        self.shape = WindowShape(config.window, config.sinks, reach, rotation.inv_freq)
        if config.sinks and self.shape.step < 1:
            raise GraftError(
                f"A window of {config.window} tokens and {config.sinks} sinks need more than the {reach} positions of "
                "reach: lower window, or set sinks to 0."
            )
        self._n_layers = sites.n_layers
        self.blocks: Any = nn.ModuleList(DeltaState(sites.width, config) for _ in layers)
        rows = output_embeddings(backbone.model) if layers else None
        quantised = None if rows is None or is_plain(backbone.model) else rows
        self.register_buffer("rows", quantised, persistent=False)
        self.register_buffer("mean", None if rows is None else rows.float().mean(0), persistent=False)
        self.to(backbone.device)

    def taps(self) -> list[Tap]:
        assert isinstance(self.config.layers, list)
        windows = [Tap(Site("attention", layer), "before", "bias", self._window) for layer in range(self._n_layers)]
        reads = enumerate(self.config.layers)
        return [*windows, *(Tap(Site("layer", i), "after", "add", partial(self._read, n)) for n, i in reads)]

    def prepare(self, call: Call) -> None:
        _check_inputs(call)
        layers = window_layers(call.cache, self._n_layers, self.shape)
        call.scratch[self, "layers"] = layers
        self._check_length(call, self.shape.step if layers else 0)
        padding = _cached_padding(call, layers) if layers else None
        for layer in layers:
            layer.padding, layer.unpadded = padding, padding is None
        if call.cache is not None and len(self.blocks):
            indices = slots(call.cache, f"memory {id(self)}", len(self.blocks), self._n_layers, StateLayer)
            call.scratch[self, "states"] = [call.cache.layers[index] for index in indices]

    def _check_length(self, call: Call, longest: int) -> None:
        """Raise `GraftError` for more than `longest` tokens in a pass where sinks would be out of reach."""
        if not self.config.sinks or not (call.count is None or call.count.is_known):
            return
        assert call.input_ids is not None
        length = call.input_ids.shape[1]
        total, reach = call.past() + length, self.shape.reach
        if total > reach and call.document_numbers() is not None:
            positions = call.positions_in_documents()
            total = length if positions is None else int(positions.max()) + 1
        if total > reach and length > longest:
            raise GraftError(
                f"A text of {total:,} tokens is longer than the {reach:,} positions that the sinks reach: give it to a "
                f"dynamic cache in pieces of at most {self.shape.step:,} tokens, or set sinks to 0."
            )

    def _window(self, call: Call, x_BTD: Tensor) -> Tensor | None:
        """(B or 1, 1, T, S) what is added to the scores; None where every token so far is seen."""
        layers, past, length = call.scratch[self, "layers"], call.past(), x_BTD.shape[1]
        if past + length <= self.shape.window or (layers and length == 1):  # all that a window layer holds is seen
            return None
        if (self, "bias") not in call.scratch:
            positions = call.positions_in_documents()
            if positions is None:
                positions = torch.arange(past, past + length, device=x_BTD.device)[None]
            hidden = hidden_keys(layers[0] if layers else None, self.shape, past, positions, _padding(call))
            bias = torch.zeros_like(hidden, dtype=x_BTD.dtype).masked_fill(hidden, torch.finfo(x_BTD.dtype).min)
            call.scratch[self, "bias"] = bias[:, None]
        return call.scratch[self, "bias"]

    def _read(self, number: int, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        layer = call.scratch[self, "states"][number] if call.cache is not None else None
        exact = torch.promote_types(inputs.dtype, torch.float32)  # states stay in float32
        with torch.autocast(inputs.device.type, enabled=False):
            x, size = _normed(inputs.to(exact))[0], _normed(outputs.to(exact))[1]
            update = self.blocks[number](x, self._tokens(call, exact), call.token_mask, call.document_numbers(), layer)
            return (size * update).to(outputs.dtype)

    def _tokens(self, call: Call, dtype: torch.dtype) -> Tensor:
        """(B, T, D) the tokens' output embeddings less the mean of all, over their root mean squares."""
        if (self, "tokens") not in call.scratch:
            assert call.input_ids is not None
            rows = output_embeddings(call.model) if self.rows is None else self.rows
            tokens = functional.embedding(call.input_ids, rows)
            call.scratch[self, "tokens"] = _normed(tokens.to(dtype) - self.mean.to(dtype))[0]
        return call.scratch[self, "tokens"]


def is_plain(model: Any) -> bool:
    """Whether a model's head holds its weights as they are, and not quantised by torchao."""
    return not type(model.get_output_embeddings().weight).__module__.startswith("torchao")


def output_embeddings(model: Any) -> Tensor:
    """(V, D) the vectors whose products with the last state are the logits; those of a quantised head are copies.

    Raises GraftError if the model has no head with a vector for each token, or one of an unknown quantised form.
    """
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if isinstance(weight, Tensor) and not is_plain(model):
        weight = weight.dequantize()
    vocabulary = model.get_input_embeddings().num_embeddings
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.shape[0] < vocabulary:
        form = f"{weight.dtype} of the shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else "no head"
        raise GraftError(
            f"A memory needs an output head with a vector for each of {vocabulary:,} tokens, but found {form}: load "
            "the whole model without this quantisation, or set state to none."
        )
    return weight.detach()


def _check_inputs(call: Call) -> None:
    """Raise `GraftError` for embeddings, and for masks that hide tokens behind a row's first where a cache goes on."""
    if call.input_ids is None:
        raise GraftError("A memory remembers tokens: pass input_ids, not embeddings.")
    mask = call.attention_mask
    if mask is None or call.cache is None or call.input_ids.shape[1] == 1 or torch.compiler.is_compiling():
        return
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise GraftError(
            "The attention mask hides tokens behind a row's first token, but a window counts all of a cache: pad on "
            "the left, and leave no gaps."
        )


def _normed(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor over the root mean squares of its tokens, and these (B, T, 1)."""
    size = (x_BTD.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x_BTD / size, size


def _padding(call: Call) -> Tensor | None:
    """(B,) the columns before each row's first token; None without a mask."""
    mask = call.attention_mask
    return None if mask is None else (mask.cumsum(-1) == 0).sum(-1)


def _cached_padding(call: Call, layers: list[Any]) -> Tensor | None:
    """`_padding`, and None if there is none; a decode step does not look, and knows it from the passes before."""
    padding = _padding(call)
    if padding is None or torch.compiler.is_compiling():
        return padding
    if call.input_ids is not None and call.input_ids.shape[1] == 1:
        return None if layers[0].unpadded else padding
    return padding if bool(padding.any()) else None


def chosen_layers(config: MemoryConfig, n_layers: int) -> list[int]:
    """The numbers of the layers with a state, in order; `GraftError` where the backbone does not have them."""
    if config.state == "none":
        return []
    layers = config.layers
    if isinstance(layers, int):
        depth = max(layers, n_layers // 3)
        layers = [n_layers - depth + (k + 1) * depth // (layers + 1) for k in range(layers)]
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(n_layers)):
        raise GraftError(
            f"layers is {config.layers}, but the backbone has layers 0 to {n_layers - 1}: give the number of layers "
            "with a state, or list some, each once."
        )
    return sorted(layers)


def check_backbone(sites: Sites) -> None:
    """Raise `GraftError` unless every layer of a causal model has full attention with rotary positions."""
    config, problem = sites.config, ""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    rope: Any = getattr(config, "rope_parameters", None) or {}
    if not sites.family.causal:
        problem = "is an encoder"
    elif kinds != {"full_attention"} or window:
        problem = "has layers with a window or a state of their own"
    elif not hasattr(getattr(sites.body, "rotary_emb", None), "inv_freq"):
        problem = "has no rotary positions"
    elif rope.get("rope_type") in ("dynamic", "longrope"):
        problem = "has rotary positions that change with the length of the text"
    elif getattr(config, "kv_lora_rank", None) or not rotates_halves(sites):
        problem = "rotates its keys in another way than Llama"
    if problem:
        raise GraftError(
            f"A memory needs a decoder with full attention and Llama's rotary positions, but this {sites.model_type} "
            f"model {problem}: choose another backbone, such as SmolLM2 or Qwen3."
        )


def rotates_halves(sites: Sites) -> bool:
    """Whether the backbone's own rotation pairs element i of a key with element i + n, as `WindowShape.moved` does."""
    attention = sites.module(Site("attention", 0))[0]
    rotate: Any = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is None:
        return False
    rotation: Any = sites.body.rotary_emb
    shape = WindowShape(1, 0, 3, rotation.inv_freq.cpu().float())
    key = torch.linspace(-1, 1, 2 * len(shape.frequencies))[None, None, None]
    angle = 2 * shape.frequencies.repeat(2)[None, None]
    try:
        return torch.allclose(rotate(key, key, angle.cos(), angle.sin())[1], shape.moved(key, torch.ones(1)), atol=1e-5)
    except (TypeError, RuntimeError, ValueError):
        return False
