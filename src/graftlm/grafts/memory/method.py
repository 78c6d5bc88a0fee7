"""Memory: a frozen decoder reads the text in a window, and trained states remember the text before it.

Each attention of the backbone sees the sinks and the last W tokens (`window.py`). In the chosen layers, x is the
layer's input, y its output, and e the token's row of the output embeddings less the mean of all rows:

    x, e divided by their root mean squares
    z_t = sum over j < C of m_j * (e_{t-j} W + x_{t-j} U)    z = [q, k], both z / sqrt(|z|^2 + 0.01); initially U = 0
    v = e W_v    b = sigmoid(x w_b + c_b)    g = sigmoid(x w_g + c_g)    log a = -softplus(x w_a + c_a)
    S_t = a_t S_{t-1} + k_t u_t^T,  u_t = b_t (v_t - a_t S_{t-1}^T k_t)           a state S of each head, (K, V)
    y' = y + 30 rms(y) (n * g S_t^T q_t) W_O                                      initially n = 0

Only W, U, W_v, W_O, m, n, w and c are trained.

Shape suffixes: B rows, T tokens, D the backbone's width, H heads, C mixed tokens, K width of a head's keys, V of its
values.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone, Call, Site, Tap, max_sequence_length
from graftlm.backbone.attention_bias import static_columns
from graftlm.backbone.cache import StateLayer, slots
from graftlm.errors import GraftError, RecipeError
from graftlm.grafts.base import Graft, GraftConfig
from graftlm.grafts.memory.requirements import check_backbone, is_plain, output_embeddings
from graftlm.grafts.memory.window import WindowLayer, WindowShape, hidden_columns, hidden_keys, window_layers
from graftlm.models.delta_rule import delta_rule, mixed_tokens, unit_length

_FIRST = Site("attention", 0)

SCALE = 30.0
"""Factor of the update, chosen so that trained gains are some hundredths, about the size of Adam's steps."""


class MemoryConfig(GraftConfig):
    """Configuration of a memory.

    Args:
        window: number of tokens W that each token of the backbone sees, including itself.
        sinks: number of a document's first tokens that every token sees.
        state: `delta` keeps a state of the whole text by the gated delta rule; `none` only restricts attention to the
            window and the sinks.
        layers: the layers with a state: a list, or a number n of layers, which are evenly spaced in the backbone's last
            third, or are its last n layers if n is more than a third.
        heads: number of heads of each state.
        head_width: width of keys K.
        mixed: number of last tokens C from which a token's query and key are mixed.
        reach: number of positions R within which the distance of a sink stays; by default, all of the backbone's
            positions.
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
                f"data.length gives rows of {length:,} tokens, all of which the window ({self.window:,}) and the sinks "
                f"({self.sinks:,}) of the graft can hold, so there is nothing to remember: raise data.length, or lower "
                "the graft's window."
            )


class DeltaState(nn.Module):
    """The state of one layer, which the module's equations define.

    Args:
        width: the backbone's width D.
        config: config of the memory.
    """

    def __init__(self, width: int, config: MemoryConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.offsets = max(1, min(config.mixed - 1, config.heads))
        heads_per_offset = config.heads // self.offsets
        value_width = -(-width // heads_per_offset)
        keys = config.heads * config.head_width
        values = config.heads * value_width
        self.w_qk = nn.Linear(width, 2 * keys, bias=False)  # mixes the embeddings
        self.u_qk = nn.Linear(width, 2 * keys, bias=False)  # mixes the layer's inputs
        self.w_v = nn.Linear(width, values, bias=False)
        self.w_o = nn.Linear(values, width, bias=False)
        self.mix = nn.Parameter(torch.zeros(config.mixed, 2 * keys))
        self.rates = nn.Linear(width, 3 * config.heads)  # rows of a, then of b, then of g
        self.gain = nn.Parameter(torch.zeros(values))
        self._initialize(config.window)

    @torch.no_grad()
    def _initialize(self, window: int) -> None:
        """Initialize head h to read the last successor of the token h mod `offsets` before, with an update of zero."""
        queries, keys = self.w_qk.weight.normal_(0, 1 / math.sqrt(self.w_qk.in_features)).chunk(2)
        keys.copy_(queries)
        self.u_qk.weight.zero_()
        query_mix, key_mix = self.mix.chunk(2, dim=1)
        queries_CHK = query_mix.unflatten(-1, (self.heads, -1))
        keys_CHK = key_mix.unflatten(-1, (self.heads, -1))
        values_HVD = self.w_v.weight.unflatten(0, (self.heads, -1))
        for offset in range(self.offsets):
            heads = slice(offset, None, self.offsets)
            key_offset = min(offset + 1, len(self.mix) - 1)
            queries_CHK[offset, heads] = 1
            keys_CHK[key_offset, heads] = 1
            basis = torch.empty_like(values_HVD[heads].flatten(0, 1))
            values_HVD[heads] = nn.init.orthogonal_(basis).view_as(values_HVD[heads])
        self.w_o.weight.copy_(self.w_v.weight.T)
        self.rates.weight.zero_()
        # Heads forget in 1 to 128 windows.
        times = torch.logspace(0, math.log10(128), self.heads).flip(0) * window
        decay_bias = torch.log(torch.expm1(1 / times))
        self.rates.bias.copy_(torch.cat([decay_bias, torch.zeros(2 * self.heads)]))

    def forward(
        self,
        x_BTD: Tensor,
        e_BTD: Tensor,
        real_BT: Tensor | None,
        document_BT: Tensor | None,
        layer: StateLayer | None,
    ) -> Tensor:
        """Compute the update of the layer's output.

        All tensors have the dtype of the state, float32 or float64.

        Args:
            x_BTD: the layer's inputs (B, T, D), divided by their root mean squares.
            e_BTD: the tokens' embeddings (B, T, D), divided by their root mean squares.
            real_BT: bool (B, T), False for padding; None without padding.
            document_BT: (B, T), the number of each token's document. Documents have separate states. None for one
                document in each row.
            layer: cache layer of the state after the last token, which is updated; None without a cache.

        Returns:
            The addend of the layer's output (B, T, D), divided by the output's root mean square.
        """
        state = None
        before = None
        if layer is not None and layer.is_initialized:
            state = layer.keys
            before = layer.values
        if real_BT is not None:
            e_BTD = e_BTD * real_BT[..., None]
        z = _linear(self.w_qk, e_BTD) + _linear(self.u_qk, x_BTD)
        if real_BT is not None:
            z = z * real_BT[..., None]
        z, before = mixed_tokens(z, self.mix.to(z.dtype), document_BT, before)
        q, k = z.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        v = _linear(self.w_v, e_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        a, b, g = _linear(self.rates, x_BTD).transpose(1, 2).chunk(3, dim=1)  # (B, H, T)
        read, state = delta_rule(
            q_BHTK=unit_length(q),
            k_BHTK=unit_length(k),
            v_BHTV=v,
            log_a_BHT=-functional.softplus(a),
            b_BHT=b.sigmoid(),
            state_BHKV=state,
            document_BT=document_BT,
        )
        read = (g.sigmoid()[..., None] * read).transpose(1, 2).flatten(2)
        if layer is not None:
            layer.update(state, before)
        return SCALE * _linear(self.w_o, self.gain.to(read.dtype) * read)


def _linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """Apply a Linear in the dtype of its input."""
    bias: Tensor | None = linear.bias
    if bias is not None:
        bias = bias.to(x.dtype)
    return functional.linear(x, linear.weight.to(x.dtype), bias)


class WindowedMemory(Graft):
    """Window attention with sinks in every layer of a backbone, and states in some layers.

    The `config` of the graft is a copy with the resolved layers and reach.

    Args:
        config: config of the memory.
        backbone: a decoder with rotary positions and full attention in every layer.

    Raises:
        GraftError: the backbone is an encoder, has other positions or windows, or for a state no usable output head;
            it does not have the layers of the config; or window and sinks exceed the reach.
    """

    Config: ClassVar[type[GraftConfig]] = MemoryConfig
    accepts_added_tokens: ClassVar[bool] = False
    has_decode_state = True
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
        self.shape = WindowShape(
            window=config.window,
            sinks=config.sinks,
            reach=reach,
            frequencies=rotation.inv_freq,
        )
        if config.sinks and self.shape.step < 1:
            raise GraftError(
                f"window is {config.window} and sinks is {config.sinks}, but their sum must be less than reach, which "
                f"is {reach}: lower window, or set sinks to 0."
            )
        self._n_layers = sites.n_layers
        self.blocks = nn.ModuleList(DeltaState(sites.width, config) for _ in layers)
        self._register_embeddings(backbone)
        self.to(backbone.device)

    def _register_embeddings(self, backbone: Backbone) -> None:
        """Keep the mean of the output embeddings, and a dequantized copy of them if the head is quantized."""
        mean = None
        copied_rows = None
        if len(self.blocks):
            rows = output_embeddings(backbone.model)
            mean = rows.float().mean(0)
            if not is_plain(backbone.model):
                copied_rows = rows
        self.register_buffer("rows", copied_rows, persistent=False)
        self.register_buffer("mean", mean, persistent=False)

    @property
    def decodes_in_one_graph(self) -> bool:
        return True

    @property
    def max_static_columns(self) -> int | None:
        return self.shape.reach if self.config.sinks else None

    def taps(self) -> list[Tap]:
        assert isinstance(self.config.layers, list)
        taps = [Tap(Site("attention", layer), "before", "bias", self._window) for layer in range(self._n_layers)]
        for number, layer in enumerate(self.config.layers):
            taps.append(Tap(Site("layer", layer), "after", "add", partial(self._read, number)))
        return taps

    def prepare(self, call: Call) -> None:
        _check_inputs(call)
        layers = window_layers(call.cache, self._n_layers, self.shape)
        call.scratch[self, "layers"] = layers
        self._check_length(call, longest=self.shape.step if layers else 0)
        padding = _cached_padding(call, layers[0]) if layers else None
        for layer in layers:
            layer.padding = padding
            layer.unpadded = padding is None
        if call.cache is not None and len(self.blocks):
            indices = slots(
                call.cache,
                owner=f"memory {id(self)}",
                count=len(self.blocks),
                backbone_layers=self._n_layers,
                make=StateLayer,
            )
            call.scratch[self, "states"] = [call.cache.layers[index] for index in indices]

    def _check_length(self, call: Call, longest: int) -> None:
        """Check that a pass leaves all sinks within reach.

        Args:
            call: the pass.
            longest: maximum number of new tokens if the text exceeds the reach.

        Raises:
            GraftError: the pass has more tokens.
        """
        assert call.input_ids is not None
        length = call.input_ids.shape[1]
        reach = self.shape.reach
        columns = static_columns(call, _FIRST, length)
        ends_within_reach = columns is not None and columns <= reach
        if not self.config.sinks or ends_within_reach:
            return
        total = call.past() + length
        if total > reach and call.document_numbers() is not None:
            positions = call.positions_in_documents()
            total = length if positions is None else int(positions.max()) + 1
        if total > reach and length > longest:
            raise GraftError(
                f"A text has {total:,} tokens, but with sinks at most {reach:,} positions can be read in one pass: "
                f"pass the text with a dynamic cache in pieces of at most {self.shape.step:,} tokens, or set sinks to "
                "0."
            )

    def _window(self, call: Call, x_BTD: Tensor) -> Tensor | None:
        """Return the addend (B or 1, 1, T, S) of the scores, which masks hidden keys; None if every key is visible."""
        layers = call.scratch[self, "layers"]
        length = x_BTD.shape[1]
        decodes_in_window = bool(layers) and length == 1
        if decodes_in_window or (call.past_is_known and call.past() + length <= self.shape.window):
            return None
        if (self, "bias") not in call.scratch:
            hidden = self._hidden(call, length, x_BTD.device)
            bias = torch.zeros_like(hidden, dtype=x_BTD.dtype)
            bias = bias.masked_fill(hidden, torch.finfo(x_BTD.dtype).min)
            call.scratch[self, "bias"] = bias[:, None]
        return call.scratch[self, "bias"]

    def _hidden(self, call: Call, length: int, device: torch.device) -> Tensor:
        """Return bool (B or 1, T, S), True at the keys that are hidden from the T = `length` tokens of a pass."""
        columns = static_columns(call, _FIRST, length)
        if columns is not None and call.count is not None:
            return hidden_columns(self.shape, columns, call.count.columns(device), call.padding())
        past = call.past()
        positions = call.positions_in_documents()
        if positions is None:
            positions = torch.arange(past, past + length, device=device)[None]
        layers = call.scratch[self, "layers"]
        layer = layers[0] if layers else None
        return hidden_keys(layer, self.shape, past, positions, call.padding())

    def _read(
        self,
        number: int,
        call: Call,
        inputs: Tensor,
        outputs: Tensor,
    ) -> Tensor:
        """Return the update (B, T, D) of a layer's output by its state."""
        layer = None
        if call.cache is not None:
            layer = call.scratch[self, "states"][number]
        exact = torch.promote_types(inputs.dtype, torch.float32)  # states remain in float32
        with torch.autocast(inputs.device.type, enabled=False):
            x, _ = _normed(inputs.to(exact))
            _, size = _normed(outputs.to(exact))
            tokens = self._tokens(call, exact)
            update = self.blocks[number](x, tokens, call.token_mask, call.document_numbers(), layer)
            return (size * update).to(outputs.dtype)

    def _tokens(self, call: Call, dtype: torch.dtype) -> Tensor:
        """Return the tokens' output embeddings (B, T, D) less the mean of all, divided by their root mean squares."""
        if (self, "tokens") not in call.scratch:
            assert call.input_ids is not None
            rows = self.rows
            if rows is None:
                rows = output_embeddings(call.model)
            tokens = functional.embedding(call.input_ids, rows)
            normed, _ = _normed(tokens.to(dtype) - self.mean.to(dtype))
            call.scratch[self, "tokens"] = normed
        return call.scratch[self, "tokens"]


def chosen_layers(config: MemoryConfig, n_layers: int) -> list[int]:
    """Return the sorted indices of the layers with a state.

    Args:
        config: config of the memory.
        n_layers: number of the backbone's layers.

    Returns:
        The indices, counted from 0; an empty list if `state` is `none`.

    Raises:
        GraftError: the backbone does not have these layers, there is none, or one occurs twice.
    """
    if config.state == "none":
        return []
    layers = config.layers
    if isinstance(layers, int):
        layers = _spaced_layers(layers, n_layers)
    unique = set(layers)
    if not layers or len(unique) < len(layers) or not unique <= set(range(n_layers)):
        raise GraftError(
            f"layers is {config.layers}, but a number from 1 to {n_layers}, or a list of different layers from 0 to "
            f"{n_layers - 1} is expected: set layers to one of these."
        )
    return sorted(layers)


def _spaced_layers(count: int, n_layers: int) -> list[int]:
    """Space layers evenly in the last third of the backbone, or in the last `count` layers if these are more."""
    depth = max(count, n_layers // 3)
    first = n_layers - depth
    return [first + (k + 1) * depth // (count + 1) for k in range(count)]


def _check_inputs(call: Call) -> None:
    """Raise `GraftError` without token ids, or if there is a cache and a token after a row's first one is hidden."""
    if call.input_ids is None:
        raise GraftError("The pass has embeddings as inputs, but a memory reads token ids: pass input_ids.")
    if call.cache is None or call.input_ids.shape[1] == 1 or torch.compiler.is_compiling():
        return
    mask = call.attention_mask
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise GraftError(
            "The attention mask hides tokens after a row's first token, but a window counts all columns of a cache: "
            "pad on the left, without gaps."
        )


def _normed(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Divide a tensor by the root mean squares of its tokens; returns the result and these (B, T, 1)."""
    size = (x_BTD.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return x_BTD / size, size


def _cached_padding(call: Call, layer: WindowLayer) -> Tensor | None:
    """Return `Call.padding`, or None if there is no padding.

    A decode step uses the result of the passes before, as reading the tensor would wait for the device.
    """
    padding = call.padding()
    if padding is None or torch.compiler.is_compiling():
        return padding
    if call.input_ids is not None and call.input_ids.shape[1] == 1:
        return None if layer.unpadded else padding
    return padding if bool(padding.any()) else None
