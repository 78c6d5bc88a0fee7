"""Block-state transformers as Hugging Face models, and their baselines, which share all but the difference.

Shape suffixes: B rows, T columns of a pass, V tokens of the vocabulary, d hidden.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel

from graftlm.errors import GraftError, RecipeError
from graftlm.models.block_state.attention import Norm
from graftlm.models.block_state.config import BlockStateConfig
from graftlm.models.block_state.context import FilterContext, TokenContext
from graftlm.models.block_state.layers import BlockStateLayer, Positions, Silent
from graftlm.models.block_state.memory import LayerMemory, memories, restored, saved
from graftlm.models.block_state.passes import Pass, refuse_packed
from graftlm.models.block_state.recurrent import RecurrentContext
from graftlm.models.block_state.state_space import Structured, Unstructured


class BlockStatePreTrainedModel(PreTrainedModel):
    """What all models of this architecture share: their config, fresh weights, and where grafts find their parts."""

    graft_sites: ClassVar[dict[str, Any]] = {
        "layers": "layers",
        "embedding": "embed_tokens",
        "norm": "norm",
        "attention": "mixing",
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
    _windows_of_its_own = True  # attention makes its own masks, and takes none of numbers

    def parameters_without_decay(self) -> set[str]:
        """Names of the parameters that weight decay would draw to a wrong place: those of state spaces."""
        kernels = {name for name, module in self.named_modules() if isinstance(module, Structured | Unstructured)}
        return {f"{name}.{own}" for name in kernels for own, _ in self.get_submodule(name).named_parameters()}

    def check_lengths(self, trained: int, longest: int) -> None:
        """Make sure that rows of `trained` tokens teach what lies beyond a window, and texts of `longest` can be read.

        Raises:
            RecipeError: they don't, or can't.
        """
        config = self.config
        if any(map(config.mixes, range(config.num_hidden_layers))) and trained <= config.window:
            raise RecipeError(
                f"Rows of {trained:,} tokens are no longer than the window of {config.window:,}, so nothing stands "
                "before a window: raise data.length, or lower the model's window."
            )
        if config.mixer == "block-state" and config.kernel == "unstructured" and longest > config.kernel_limit:
            raise RecipeError(
                f"Texts of {longest:,} tokens are longer than kernel_limit, the {config.kernel_limit:,} that an "
                "unstructured kernel may be extended to: raise it, lower evaluation.lengths, or take kernel: s4d."
            )

    @staticmethod
    def cache_tensors(cache: Cache) -> dict[str, Tensor]:
        """All that a cache of this architecture remembers, by name: for a checkpoint in the middle of a text."""
        return saved(cache)

    @staticmethod
    def cache_from_tensors(tensors: dict[str, Tensor]) -> Cache:
        """The cache that `cache_tensors` wrote down."""
        return restored(tensors)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, Structured | Unstructured):
            module.reset_parameters()
        elif isinstance(module, Silent):
            module.weight.zero_()
        elif isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(1)
        elif isinstance(module, TokenContext) and module.multi:
            module.per_head.normal_(std=std)
        elif isinstance(module, FilterContext):
            for one in (module.first, module.last):
                if one is not None:
                    one.normal_()
            module.ids.normal_(std=std)
        elif isinstance(module, RecurrentContext):
            module.first.normal_()
            module.ids.normal_(std=std)
            module.gate.fill_(1)


class BlockStateModel(BlockStatePreTrainedModel):
    """Embeddings and layers, to hidden states."""

    def __init__(self, config: BlockStateConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        positional = config.mixer == "block-state" and config.positional_ssm
        self.positions = Positions(config) if positional else None
        self.layers = nn.ModuleList(BlockStateLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config)
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
        **rest: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states (B, T, d) of input ids (B, T), behind what `past_key_values` remembers.

        Positions are counted from each row's first token; `position_ids` may say the same, and are not read.

        Raises:
            GraftError: a pass can't be laid out (`attention_mask`, `position_ids`), or a cache is another model's.
        """
        refuse_packed(position_ids, attention_mask)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache, own = self._memories(past_key_values, use_cache)
        now = _lay_out(x, attention_mask, own, self.config.window)
        x = self.dropout(x)
        if self.positions is not None:
            x = self.positions(x, now, own[0])
        seen: list[Tensor] = []  # kept only where they are asked for: those of a long text are large
        for layer, memory in zip(self.layers, own, strict=True):
            if output_hidden_states:
                seen.append(x)
            x = layer(x, now, memory)
        _count(own, now, x.shape[1])
        out = self.norm(x)
        states = (*seen, out) if output_hidden_states else None
        return BaseModelOutputWithPast(last_hidden_state=out, past_key_values=cache, hidden_states=states)

    def _memories(
        self, cache: Cache | None, use_cache: bool | None
    ) -> tuple[Cache | None, list[LayerMemory] | list[None]]:
        wanted = use_cache if use_cache is not None else self.config.use_cache and not self.training
        if cache is None and not wanted:
            return None, [None] * len(self.layers)
        if self.config.bidirectional:
            raise GraftError("A bidirectional model reads a text as a whole: leave out past_key_values and use_cache.")
        if self.gradient_checkpointing and self.training:
            raise GraftError(
                "Gradient checkpointing runs layers twice, and a cache would be written twice: leave out "
                "past_key_values and use_cache, or turn checkpointing off."
            )
        cache = DynamicCache() if cache is None else cache
        return cache, memories(cache, len(self.layers))


def _lay_out(x: Tensor, mask: Tensor | None, own: list[LayerMemory] | list[None], window: int) -> Pass:
    """The pass over (B, T, d) embeddings; `mask` (B, T or past + T) marks tokens."""
    rows, length = x.shape[:2]
    if mask is not None:
        if mask.dim() != 2:
            raise GraftError(
                f"attention_mask has {mask.dim()} dimensions; one of (rows, tokens) is expected: packed documents and "
                "4D masks are not built for windows."
            )
        mask = mask[:, -length:].bool().to(x.device)
        if length > 1 and bool(((mask[:, 1:] & ~mask[:, :-1]).sum(-1) + mask[:, 0] > 1).any()):
            raise GraftError(
                "attention_mask has a gap between the tokens of a row: padding stands before or behind them."
            )
    memory = own[0]
    past = tuple(memory.tensors["past"].tolist()) if memory is not None and memory.tensors else None
    if past is not None and len(past) != rows:
        raise GraftError(f"past_key_values remembers {len(past)} rows, and the input has {rows}: they go together.")
    return Pass.over((rows, length), mask, past, window).to(x.device)


def _count(own: list[LayerMemory] | list[None], now: Pass, columns: int) -> None:
    """Remember how many tokens each row has had."""
    for memory in own:
        if memory is not None:
            memory.columns += columns
    if own and own[0] is not None:
        own[0].keep("past", torch.tensor(now.total), detach=False)


class BlockStateForCausalLM(BlockStatePreTrainedModel, GenerationMixin):
    """A language model: next-token scores for hidden states."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BlockStateConfig) -> None:
        if config.bidirectional:
            raise GraftError("A language model sees no later tokens: leave bidirectional at false.")
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
        **rest: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), and with `labels` (B, T) the mean cross-entropy of each next token; -100 is left out."""
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **rest,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **rest)
        return CausalLMOutputWithPast(
            loss=cast("Any", loss),
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
        )


class BlockStateForSequenceClassification(BlockStatePreTrainedModel):
    """A classifier: scores of the mean hidden state of a text's tokens."""

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
        **rest: Any,
    ) -> SequenceClassifierOutput:
        """Scores (B, labels), and with `labels` (B) their mean cross-entropy."""
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        hidden = self.model(**given, use_cache=False).last_hidden_state
        mask = torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        mask = mask.to(hidden)[..., None]
        logits = self.score((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))
        loss = None if labels is None else functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=cast("Any", loss), logits=logits)


def register() -> None:
    """Make the architecture known to transformers' Auto classes."""
    AutoConfig.register(BlockStateConfig.model_type, BlockStateConfig, exist_ok=True)
    AutoModel.register(BlockStateConfig, BlockStateModel, exist_ok=True)
    AutoModelForCausalLM.register(BlockStateConfig, BlockStateForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(BlockStateConfig, BlockStateForSequenceClassification, exist_ok=True)


__all__ = [
    "BlockStateForCausalLM",
    "BlockStateForSequenceClassification",
    "BlockStateModel",
    "register",
]
