"""Block-state transformers as Hugging Face models; the baselines share all parts but the compared one.

    h = norm(x)        x = x + [window attention(h) ; cross-attention(h; context states)] O        x = x + FFN(norm(x))

Only the layers of `mixer_layers` have context states; those of `state_space_layers` have no attention.

Shape suffixes: B rows, T columns of a pass, V tokens of the vocabulary, d hidden.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, SequenceClassifierOutput
from transformers.modeling_utils import PreTrainedModel

from graftlm.errors import GraftError, RecipeError
from graftlm.models.block_state.attention import RMSNorm, WindowAttention, concat_features
from graftlm.models.block_state.cache import LayerCache, cache_from_tensors, cache_layers, cache_tensors
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.context import (
    FilterStateAttention,
    RecurrentStateAttention,
    TokenStateAttention,
    TokenStateReadout,
    TokenStates,
)
from graftlm.models.block_state.grid import WindowGrid, check_not_packed
from graftlm.models.block_state.sequence_ssm import DeltaSSM, TokenSSM
from graftlm.models.block_state.state_space import S4DKernel, UnstructuredKernel


class BlockStateMixer(nn.Module):
    """Window attention and, in some layers, cross-attention to context states, with one output projection."""

    def __init__(self, config: BlockStateConfig, layer: int) -> None:
        super().__init__()
        self.attention = WindowAttention(config)
        context = FilterStateAttention if config.context == "mf" else TokenStateAttention
        context = TokenStateReadout if config.kernel == "delta" else context
        context = RecurrentStateAttention if config.mixer == "recurrent" else context
        self.context = context(config) if config.has_context(layer) else None
        self.out = nn.Linear((1 + config.has_context(layer)) * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, d)."""
        outputs, kv = self.attention(x_BTd, grid, cache)
        contexts = [] if self.context is None else [self.context(x_BTd, kv, grid, cache)]
        return self.out(grid.from_grid(concat_features(outputs, *contexts), x_BTd.shape[1]))


class GatedStateSpaceMixer(TokenStates):
    """A gated state-space layer (GSS), in place of attention: out(up(norm(SSM(gelu(in_proj(x))))) * gelu(gate(x)))."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config, 1)
        width = config.hidden_size
        self.up = nn.Linear(config.state_width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTd: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, d)."""
        y = self.outputs(functional.gelu(self.in_proj(x_BTd)), grid, cache)[..., 0]
        return self.out(self.up(self.norm(y)) * functional.gelu(self.gate(x_BTd)))


class FeedForward(nn.Module):
    """W_2 act(W_1 x)."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act = ACT2FN[config.hidden_act]
        if isinstance(self.act, nn.ReLU):
            self.act.inplace = True  # on W_1's output, the largest tensor of a layer
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d)."""
        return self.down(self.act(self.up(x)))


class BlockStateLayer(GradientCheckpointingLayer):
    """Mixer and FFN, each with a norm before it and a residual connection."""

    def __init__(self, config: BlockStateConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config)
        self.mixer = GatedStateSpaceMixer(config) if config.is_state_space(layer) else BlockStateMixer(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTd: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, d)."""
        x_BTd = x_BTd + self.dropout(self.mixer(self.mixer_norm(x_BTd), grid, cache))
        return x_BTd + self.dropout(self.ffn(self.ffn_norm(x_BTd)))


class ZeroInitLinear(nn.Linear):
    """A projection whose weights are zero before training."""


class PositionalSSM(nn.Module):
    """A state-space model behind the embeddings, which encodes positions: x + out_proj(SSM(in_proj(norm(x))))."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config)
        self.in_proj = nn.Linear(config.hidden_size, config.state_width, bias=False)
        self.ssm = TokenSSM(config, 1, "positions")
        self.out_proj = ZeroInitLinear(config.state_width, config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, grid: WindowGrid, cache: LayerCache | None) -> Tensor:
        """(B, T, d)."""
        u_BGE = grid.to_grid(self.in_proj(self.norm(x_BTd)))
        y = grid.from_grid(self.ssm(u_BGE, grid, cache)[..., 0], x_BTd.shape[1])
        return x_BTd + self.out_proj(y.to(x_BTd.dtype))


class BlockStatePreTrainedModel(PreTrainedModel):
    """Shared by all block-state models: config, weight initialisation, and the sites of grafts."""

    graft_sites: ClassVar[dict[str, Any]] = {
        "layers": "layers",
        "embedding": "embed_tokens",
        "norm": "norm",
        "attention": "mixer",
        "ffn": "ffn",
        "ffn_in": ("ffn.up",),
        "ffn_out": "ffn.down",
        "gated": False,
    }
    config_class = BlockStateConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BlockStateLayer"]
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["kernels"]
    _can_compile_fullgraph = False
    _builds_own_masks = True  # the model builds its own masks and takes no additive attention bias
    cache_tensors = staticmethod(cache_tensors)
    cache_from_tensors = staticmethod(cache_from_tensors)

    def parameters_without_decay(self) -> set[str]:
        """Names of the parameters of state-space models, which weight decay would harm."""
        return {name for name, _ in self.named_parameters() if ".kernels." in name}

    def check_lengths(self, trained: int, longest: int) -> None:
        """Check that rows of `trained` tokens span several windows, and that texts of `longest` tokens can be read.

        Raises RecipeError if they don't, or can't.
        """
        config = self.config
        if any(map(config.has_context, range(config.num_hidden_layers))) and trained <= config.window:
            raise RecipeError(
                f"Rows of {trained:,} tokens are no longer than the window of {config.window:,}, so nothing stands "
                "before a window: raise data.length, or lower the model's window."
            )
        has_kernels = bool(config.state_space_layers) or config.mixer in ("block-state", "state-space")
        if has_kernels and config.kernel == "unstructured" and longest > config.kernel_limit:
            raise RecipeError(
                f"Texts of {longest:,} tokens are longer than kernel_limit, the {config.kernel_limit:,} that an "
                "unstructured kernel may be extended to: raise it, lower evaluation.lengths, or take kernel: s4d."
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, S4DKernel | UnstructuredKernel | DeltaSSM):
            module.reset_parameters()
        elif isinstance(module, ZeroInitLinear):
            module.weight.zero_()
        else:
            super()._init_weights(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("initial_states", "final_states"):
                parameter.normal_()
            elif name in ("context_ids", "kv_per_head"):
                parameter.normal_(std=self.config.initializer_range)
            elif name == "gate":
                parameter.fill_(1)


class BlockStateModel(BlockStatePreTrainedModel):
    """Embeddings and layers; the output is hidden states."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positional_ssm = PositionalSSM(config) if config.mixer == "block-state" and config.positional_ssm else None
        self.layers = nn.ModuleList(BlockStateLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)
        self.dropout = nn.Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states (B, T, d) of input ids (B, T), which continue the text in `past_key_values`.

        Positions are counted from each row's first token. `position_ids` are checked, not used.

        Raises GraftError if `attention_mask` or `position_ids` don't fit windows, or the cache is another model's.
        """
        check_not_packed(position_ids, attention_mask)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache, layer_caches = self._caches(past_key_values, use_cache)
        grid = _build_grid(x, attention_mask, layer_caches[0], self.config.window)
        x = self.dropout(x)
        if self.positional_ssm is not None:
            x = self.positional_ssm(x, grid, layer_caches[0])
        hidden: list[Tensor] = []  # kept only on request: hidden states of a long text are large
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            if output_hidden_states:
                hidden.append(x)
            x = layer(x, grid, layer_cache)
        if cache is not None:
            for layer_cache in layer_caches:
                layer_cache.num_columns += x.shape[1]
            layer_caches[0].store("past", torch.tensor(grid.total_lengths))
        out = self.norm(x)
        return BaseModelOutputWithPast(out, cache, (*hidden, out) if output_hidden_states else None)

    def _caches(self, cache: Cache | None, use_cache: bool | None) -> tuple[Cache | None, list[Any]]:
        """The cache and its layers, one for each layer of the model; None without a cache."""
        use_cache = use_cache if use_cache is not None else self.config.use_cache and not self.training
        if cache is None and not use_cache:
            return None, [None] * len(self.layers)
        if self.config.bidirectional:
            raise GraftError("A bidirectional model reads a text as a whole: leave out past_key_values and use_cache.")
        if self.gradient_checkpointing and self.training:
            raise GraftError(
                "Gradient checkpointing runs layers twice, and a cache would be written twice: leave out "
                "past_key_values and use_cache, or turn checkpointing off."
            )
        cache = DynamicCache() if cache is None else cache
        return cache, cache_layers(cache, len(self.layers), detach=self.training)


def _build_grid(x: Tensor, mask: Tensor | None, cache: LayerCache | None, window: int) -> WindowGrid:
    """The grid of (B, T) embeddings; `mask` (B, T or past + T) marks tokens."""
    rows, length = x.shape[:2]
    if mask is not None:
        if mask.dim() != 2:
            raise GraftError(
                f"attention_mask has {mask.dim()} dimensions, and windows need one of (rows, tokens): decode with a "
                "dynamic cache, and give each document a row."
            )
        mask = mask[:, -length:].bool().to(x.device)
        if length > 1 and bool(((mask[:, 1:] & ~mask[:, :-1]).sum(-1) + mask[:, 0] > 1).any()):
            raise GraftError("attention_mask has a gap between a row's tokens: padding stands before or behind them.")
    past = tuple(cache.tensors["past"].tolist()) if cache is not None and cache.tensors else None
    if past is not None and len(past) != rows:
        raise GraftError(f"past_key_values remembers {len(past)} rows, and the input has {rows}: they go together.")
    return WindowGrid.build(x, mask, past, window)


class BlockStateForCausalLM(BlockStatePreTrainedModel, GenerationMixin):
    """A language model: next-token logits."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BlockStateConfig) -> None:
        if config.bidirectional:
            raise GraftError("A language model sees no later tokens: a bidirectional one is a classifier.")
        super().__init__(config)
        self.model = BlockStateModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V); with `labels` (B, T), also the mean cross-entropy of next tokens, ignoring -100."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        outputs = self.model(**inputs, past_key_values=past_key_values, use_cache=use_cache, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep])
        loss: Any = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)


class BlockStateForSequenceClassification(BlockStatePreTrainedModel):
    """A classifier of the mean hidden state of a text's tokens."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config)
        self.model = BlockStateModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels or 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits (B, labels); with `labels`, also the loss that transformers takes for the config's `problem_type`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        outputs = self.model(**inputs, **kwargs | {"use_cache": False})
        hidden = outputs.last_hidden_state
        mask = (torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask).to(hidden)[..., None]
        logits = self.score((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))
        loss: Any = None if labels is None else self.loss_function(labels, logits.float(), self.config)
        return SequenceClassifierOutput(loss, logits, outputs.hidden_states)
