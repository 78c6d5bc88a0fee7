"""Block-state transformers as Hugging Face models; the baselines differ from them only in the compared part.

    h = norm(x)        x = x + [window attention(h) ; cross-attention(h; context states)] O        x = x + FFN(norm(x))

Only the layers of `mixer_layers` have context states; those of `state_space_layers` have no attention.

Shape suffixes: B rows, T columns of a pass, V tokens of the vocabulary, d hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

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
from graftlm.models.block_state.attention import WindowAttention
from graftlm.models.block_state.cache import (
    LayerCache,
    cache_from_tensors,
    cache_layers,
    cache_tensors,
    compileable_cache,
)
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.context import (
    FilterStateAttention,
    RecurrentStateAttention,
    TokenStateAttention,
    TokenStateReadout,
    TokenStates,
)
from graftlm.models.block_state.delta_ssm import DeltaSSM
from graftlm.models.block_state.grid import Grid, StepGrid, WindowGrid, check_not_packed
from graftlm.models.block_state.layout import concat_features
from graftlm.models.block_state.norm import RMSNorm
from graftlm.models.block_state.sequence_ssm import TokenSSM
from graftlm.models.block_state.state_space import S4DKernel, UnstructuredKernel


class BlockStateMixer(nn.Module):
    """Window attention and, in some layers, cross-attention to context states, with a joint output projection.

    Args:
        config: config of the model.
        layer: index of the layer.
    """

    def __init__(self, config: BlockStateConfig, layer: int) -> None:
        super().__init__()
        self.attention = WindowAttention(config)
        self.context = _context_module(config) if config.has_context(layer) else None
        parts = 1 if self.context is None else 2
        self.out = nn.Linear(parts * config.attention_width, config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Mix the tokens of a pass.

        Args:
            x_BTd: hidden states (B, T, d).
            grid: grid of the pass.
            cache: the layer's cache, which is updated; None without a cache.

        Returns:
            Mixed states (B, T, d).
        """
        outputs, kv = self.attention(x_BTd, grid, cache)
        parts = [outputs]
        if self.context is not None:
            parts.append(self.context(x_BTd, kv, grid, cache))
        return self.out(grid.from_grid(concat_features(*parts), x_BTd.shape[1]))


def _context_module(config: BlockStateConfig) -> nn.Module:
    if config.mixer == "recurrent":
        return RecurrentStateAttention(config)
    if config.kernel == "delta":
        return TokenStateReadout(config)
    if config.context == "mf":
        return FilterStateAttention(config)
    return TokenStateAttention(config)


class GatedStateSpaceMixer(TokenStates):
    """A gated state-space layer (GSS), used instead of attention.

        out(up(norm(SSM(gelu(in_proj(x))))) * gelu(gate(x)))

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config, outputs=1)
        width = config.hidden_size
        self.up = nn.Linear(config.state_width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTd: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Mix the tokens of a pass, with the arguments and the result of `BlockStateMixer.forward`."""
        u = functional.gelu(self.in_proj(x_BTd))
        y = self.outputs(u, grid, cache)[..., 0]
        gate = functional.gelu(self.gate(x_BTd))
        return self.out(self.up(self.norm(y)) * gate)


class FeedForward(nn.Module):
    """A feed-forward network, W_2 act(W_1 x).

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act = ACT2FN[config.hidden_act]
        if isinstance(self.act, nn.ReLU):
            # The output of W_1 is the largest tensor of a layer.
            self.act.inplace = True
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to hidden states (..., d)."""
        return self.down(self.act(self.up(x)))


class BlockStateLayer(GradientCheckpointingLayer):
    """A mixer and an FFN, both with a norm before them and a residual connection.

    Args:
        config: config of the model.
        layer: index of the layer.
    """

    def __init__(self, config: BlockStateConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config)
        if config.is_state_space(layer):
            self.mixer = GatedStateSpaceMixer(config)
        else:
            self.mixer = BlockStateMixer(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config)
        self.ffn = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTd: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Apply the layer, with the arguments and the result of `BlockStateMixer.forward`."""
        mixed = self.mixer(self.mixer_norm(x_BTd), grid, cache)
        x_BTd = x_BTd + self.dropout(mixed)
        return x_BTd + self.dropout(self.ffn(self.ffn_norm(x_BTd)))


class ZeroInitLinear(nn.Linear):
    """A projection whose weights are initialized to zero."""


class PositionalSSM(nn.Module):
    """A state-space model after the embeddings, which encodes positions: x + out_proj(SSM(in_proj(norm(x)))).

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config)
        self.in_proj = nn.Linear(config.hidden_size, config.state_width, bias=False)
        self.ssm = TokenSSM(config, outputs=1, name="positions")
        self.out_proj = ZeroInitLinear(config.state_width, config.hidden_size, bias=False)

    def forward(self, x_BTd: Tensor, grid: Grid, cache: LayerCache | None) -> Tensor:
        """Add positions to embeddings, with the arguments and the result of `BlockStateMixer.forward`."""
        u_BGE = grid.to_grid(self.in_proj(self.norm(x_BTd)))
        y_BGE = self.ssm(u_BGE, grid, cache)[..., 0]
        y_BTE = grid.from_grid(y_BGE, x_BTd.shape[1])
        return x_BTd + self.out_proj(y_BTE.to(x_BTd.dtype))


class BlockStatePreTrainedModel(PreTrainedModel):
    """The base class of all block-state models: config, weight initialization, and the sites of grafts."""

    graft_sites: ClassVar[Mapping[str, object]] = {
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
    _builds_own_masks = True  # the model accepts no additive attention bias
    cache_tensors = staticmethod(cache_tensors)
    cache_from_tensors = staticmethod(cache_from_tensors)

    def parameters_without_decay(self) -> set[str]:
        """Return the names of the parameters of S4D and unstructured kernels, which weight decay would harm."""
        return {name for name, _ in self.named_parameters() if ".kernels." in name}

    def learning_rate_scales(self) -> dict[str, float]:
        """Return factors on the learning rate of the parameters of structured kernels, by name."""
        rates = {
            "log_decay": self.config.a_rate,
            "frequency": self.config.a_rate,
            "c": self.config.c_rate,
            "log_dt": self.config.dt_rate,
        }
        scales: dict[str, float] = {}
        for prefix, module in self.named_modules():
            if isinstance(module, S4DKernel):
                for name, rate in rates.items():
                    scales[f"{prefix}.{name}"] = rate
        return scales

    def check_lengths(self, trained: int, longest: int) -> None:
        """Check that training rows span several windows, and that the longest texts can be read.

        Args:
            trained: number of tokens in a training row.
            longest: number of tokens in the longest text.

        Raises:
            RecipeError: the rows are too short, or the texts too long.
        """
        config = self.config
        layers = range(config.num_hidden_layers)
        has_context = any(config.has_context(layer) for layer in layers)
        if has_context and trained <= config.window:
            raise RecipeError(
                f"The training rows have at most {trained:,} tokens, which is not more than the model's window of "
                f"{config.window:,}, so no window has a context: raise data.length, or lower the window."
            )
        if config.has_unstructured_kernels and longest > config.kernel_limit:
            raise RecipeError(
                f"A text has {longest:,} tokens, but kernel_limit allows unstructured kernels of at most "
                f"{config.kernel_limit:,}: raise it, shorten the texts or evaluation.lengths, or set kernel to s4d."
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
    """Embeddings and layers, whose output is hidden states.

    Args:
        config: config of the model.
    """

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        has_positions = config.mixer == "block-state" and config.positional_ssm
        self.positional_ssm = PositionalSSM(config) if has_positions else None
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
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Compute the hidden states of a pass.

        Args:
            input_ids: token ids (B, T), which continue the texts in `past_key_values`.
            attention_mask: (B, T or past + T), nonzero at tokens; None if all columns are tokens.
            past_key_values: cache of the texts so far, which is updated.
            inputs_embeds: embeddings (B, T, d), instead of `input_ids`.
            use_cache: whether to return a cache; by default, the config's value if the model is not in training.
            output_hidden_states: whether to return the hidden states before each layer and after the last norm.
            position_ids: positions (B, T), which are checked for several documents in a row but not used, since
                positions are counted from each row's first token.
            **kwargs: ignored.

        Returns:
            Hidden states (B, T, d), and the cache.

        Raises:
            GraftError: `attention_mask` has other dimensions or a gap between tokens; `position_ids` restart within a
                row; the cache is another model's or has another number of rows; or a cache is to be used by a
                bidirectional model, or in training with gradient checkpointing.
        """
        check_not_packed(position_ids, attention_mask)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        caches: list[LayerCache] = []
        if cache is not None:
            caches = cache_layers(cache, len(self.layers), detach=self.training)
        grid = _build_grid(x, attention_mask, caches[0] if caches else None, self.config.window)
        x, hidden = self._apply_layers(self.dropout(x), grid, caches, keep_hidden=bool(output_hidden_states))
        if caches:
            for layer_cache in caches:
                layer_cache.num_columns += x.shape[1]
            caches[0].store("past", grid.total_counts)
        out = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=out,
            past_key_values=cache,
            hidden_states=(*hidden, out) if output_hidden_states else None,
        )

    def _apply_layers(
        self,
        x_BTd: Tensor,
        grid: Grid,
        caches: Sequence[LayerCache],
        *,
        keep_hidden: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Apply the positional model and all layers.

        Args:
            x_BTd: embeddings (B, T, d).
            grid: grid of the pass.
            caches: the layers' caches; empty without a cache.
            keep_hidden: whether to return the hidden states before each layer, which are large for a long text.

        Returns:
            Hidden states (B, T, d) after the last layer, and those before each layer.
        """
        layer_caches: Sequence[LayerCache | None] = caches or [None] * len(self.layers)
        if self.positional_ssm is not None:
            x_BTd = self.positional_ssm(x_BTd, grid, layer_caches[0])
        hidden: list[Tensor] = []
        for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
            if keep_hidden:
                hidden.append(x_BTd)
            x_BTd = layer(x_BTd, grid, layer_cache)
        return x_BTd, hidden

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the given cache, or a new cache if the pass uses one."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and not use_cache:
            return None
        if self.config.bidirectional:
            raise GraftError(
                "A cache was requested, but a bidirectional model must read a whole text in one pass: omit "
                "past_key_values and use_cache."
            )
        if self.gradient_checkpointing and self.training:
            raise GraftError(
                "A cache was requested, but gradient checkpointing runs layers twice and would write the cache twice: "
                "omit past_key_values and use_cache, or turn checkpointing off."
            )
        return DynamicCache() if cache is None else cache


def _build_grid(
    x: Tensor,
    mask: Tensor | None,
    cache: LayerCache | None,
    window: int,
) -> Grid:
    """Build the grid of a pass.

    Args:
        x: embeddings (B, T, d).
        mask: attention mask (B, T or past + T), nonzero at tokens.
        cache: cache of the first layer.
        window: window length W.
    """
    rows, length = x.shape[:2]
    if mask is not None:
        mask = _token_mask(mask, length, x.device)
    if cache is None or not cache.tensors:
        return WindowGrid.build(x, mask, None, window)
    past_counts = cache.tensors["past"].to(x.device)
    if len(past_counts) != rows:
        raise GraftError(
            f"The number of rows is {len(past_counts)} in past_key_values, but {rows} in the input: pass the same rows."
        )
    if length == 1:
        return StepGrid.build(mask, past_counts, window)
    return WindowGrid.build(x, mask, tuple(past_counts.tolist()), window)


def _token_mask(mask: Tensor, length: int, device: torch.device) -> Tensor:
    """Return the attention mask (B, T), bool, of the T = `length` columns of a pass, without gaps between tokens."""
    if mask.dim() != 2:
        raise GraftError(
            f"The argument attention_mask has the shape {tuple(mask.shape)}, but (rows, tokens) is expected: pass a "
            "mask of tokens, and put each document in a row of its own."
        )
    mask = mask[:, -length:].bool().to(device)
    if length > 1:
        starts = (mask[:, 1:] & ~mask[:, :-1]).sum(-1) + mask[:, 0]
        if bool((starts > 1).any()):
            raise GraftError(
                "The argument attention_mask has a gap between the tokens of a row: put padding before or after all "
                "tokens."
            )
    return mask


class BlockStateForCausalLM(BlockStatePreTrainedModel, GenerationMixin):
    """A causal language model.

    Args:
        config: config of the model.

    Raises:
        GraftError: the config is bidirectional.
    """

    has_decode_state = True  # read by `compiled_decoding`
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BlockStateConfig) -> None:
        if config.bidirectional:
            raise GraftError(
                "bidirectional is true, but a language model must not see later tokens: use "
                "BlockStateForSequenceClassification, or set bidirectional to false."
            )
        super().__init__(config)
        self.model = BlockStateModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def decodes_in_one_graph(self) -> bool:
        """Whether a decode step compiles as one graph; the inputs that unstructured kernels keep grow with the text."""
        return not self.config.has_unstructured_kernels

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **kwargs: object) -> Tensor | None:
        """Return the attention mask (B, past + T) as it is, where `generate` would make one for a static cache.

        Args:
            attention_mask: (B, past + T), nonzero at tokens; None if all columns are tokens.
            **kwargs: not used.
        """
        return attention_mask

    def _prepare_static_cache(self, *args: object, **kwargs: object) -> Cache:
        """Return what `generate` uses as a static cache: this model's own cache, whose size is constant anyway."""
        return compileable_cache(self.config.num_hidden_layers)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        """Compute next-token logits, and the loss if there are labels.

        Args:
            input_ids: token ids (B, T).
            attention_mask: (B, T or past + T), nonzero at tokens.
            past_key_values: cache of the texts so far.
            inputs_embeds: embeddings (B, T, d), instead of `input_ids`.
            labels: token ids (B, T); the loss is the mean cross-entropy of next tokens, ignoring -100.
            use_cache: whether to return a cache.
            logits_to_keep: number of last columns, or indices of the columns, to compute logits of; 0 for all.
            **kwargs: further arguments of `BlockStateModel.forward` and of the loss.

        Returns:
            Logits (B, T, V) of the kept columns, and the loss, the cache and the hidden states where they are
            requested.

        Raises:
            GraftError: as in `BlockStateModel.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        columns = logits_to_keep
        if isinstance(logits_to_keep, int):
            columns = slice(-logits_to_keep, None)
        logits = self.lm_head(outputs.last_hidden_state[:, columns])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


class BlockStateForSequenceClassification(BlockStatePreTrainedModel):
    """A classifier of texts, by the mean hidden state of their tokens.

    Args:
        config: config of the model.
    """

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
        **kwargs: object,
    ) -> SequenceClassifierOutput:
        """Compute the logits of the classes, and the loss if there are labels.

        Args:
            input_ids: token ids (B, T).
            attention_mask: (B, T), 1 at tokens and 0 elsewhere.
            inputs_embeds: embeddings (B, T, d), instead of `input_ids`.
            labels: labels (B, ...) as transformers expects them for the config's `problem_type`.
            **kwargs: further arguments of `BlockStateModel.forward`; `use_cache` has no effect.

        Returns:
            Logits (B, num_labels), and the loss and the hidden states where they are requested.

        Raises:
            GraftError: as in `BlockStateModel.forward`.
        """
        options = {**kwargs, "use_cache": False}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **options,
        )
        hidden = outputs.last_hidden_state
        mask = attention_mask
        if mask is None:
            mask = torch.ones(hidden.shape[:2])
        weights = mask.to(hidden)[..., None]
        mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
        logits = self.score(mean)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits.float(), self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
