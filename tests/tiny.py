"""Tiny random backbones of many families: those of `graftlm.testing`, and more. `from tiny import tiny_model`."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graftlm.models import block_state
from graftlm.testing.tiny import (
    BOS,
    COMMON,
    ENCODERS,
    EOS,
    FAMILY_CONFIGS,
    FFN_WIDTH,
    GROUPED,
    HEAD_WIDTH,
    HEADS,
    LAYERS,
    MASK,
    PAD,
    SPECIAL,
    SPREAD,
    TEXT,
    TOKEN_IDS,
    TOKENS,
    VOCABULARY,
    WINDOW,
    tiny_ids,
    tiny_tokenizer,
)
from graftlm.testing.tiny import tiny_model as built_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GEMMA = {**GROUPED, "head_dim": HEAD_WIDTH + 4}  # the heads together are wider than the residual stream

FAMILY_CONFIGS |= {
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        {**GROUPED, "head_dim": HEAD_WIDTH, "sliding_window": WINDOW},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _GEMMA),
    "gemma2": (  # layers: sliding, full
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**_GEMMA, "query_pre_attn_scalar": HEAD_WIDTH + 4, "sliding_window": WINDOW},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH + 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", COMMON | {"hidden_size": 64}),  # rotates half of each head
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", COMMON | {"hidden_size": 64}),  # rotates a quarter
    "olmo": ("OlmoConfig", "OlmoForCausalLM", GROUPED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED),
    "block-state": (
        block_state.BlockStateConfig,
        block_state.BlockStateForCausalLM,
        {**COMMON, "window": WINDOW, "mixer_layers": [0, 1], "state_size": 4, "dropout": 0.1},
    ),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", COMMON),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            **TOKEN_IDS,
            "dim": COMMON["hidden_size"],
            "hidden_dim": FFN_WIDTH,
            "n_layers": LAYERS,
            "use_cache": True,
            "n_heads": HEADS,
        },
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**COMMON, "local_attention": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}
# Most of the following families have no row in the table of families, so their structure is detected. The sizes of
# attention, FFN and experts are unusual on purpose.
_MOE = {
    **GROUPED,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
}
_WINDOWED = {
    **GROUPED,
    "head_dim": HEAD_WIDTH,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
MORE_FAMILY_CONFIGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GROUPED),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", GROUPED),
    "granite": ("GraniteConfig", "GraniteForCausalLM", GROUPED | {"residual_multiplier": 0.5}),
    "falcon": ("FalconConfig", "FalconForCausalLM", COMMON),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", GROUPED | {"hidden_size": 64}),
    "cohere": ("CohereConfig", "CohereForCausalLM", GROUPED | {"logit_scale": 1.0}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _WINDOWED | {"logit_scale": 1.0}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", _WINDOWED),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", GROUPED),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _WINDOWED),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", _WINDOWED),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH}),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", GROUPED),
    "helium": ("HeliumConfig", "HeliumForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH}),
    "bitnet": ("BitNetConfig", "BitNetForCausalLM", GROUPED),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _MOE),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", _MOE | {"shared_expert_intermediate_size": 36}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _MOE | {"head_dim": HEAD_WIDTH, "mlp_only_layers": [0]}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_MOE, **_WINDOWED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_MOE,
            "num_key_value_heads": HEADS,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 12,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **_WINDOWED,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": FFN_WIDTH,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 6,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        COMMON | {"ffn_dim": FFN_WIDTH, "word_embed_proj_dim": COMMON["hidden_size"]},
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {**TOKEN_IDS, "hidden_size": 48, "n_layer": LAYERS, "n_head": HEADS},
    ),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {
            **TOKEN_IDS,
            "d_model": 48,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "max_seq_len": 512,
            "expansion_ratio": 4,
            "use_cache": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_MOE,
            "head_dim": HEAD_WIDTH,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 36,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        GROUPED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            **TOKEN_IDS,
            "hidden_size": 48,
            "num_hidden_layers": LAYERS,
            "num_heads": 8,
            "head_dim": 12,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", COMMON),
    "deberta-v2": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {
            **COMMON,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", COMMON | {"embedding_size": 40}),
    "eurobert": ("EuroBertConfig", "EuroBertForMaskedLM", GROUPED),
}
ALL_ENCODERS = ENCODERS
ENCODERS = tuple(family for family in ENCODERS if family in FAMILY_CONFIGS)
DECODERS = tuple(family for family in FAMILY_CONFIGS if family not in ENCODERS)
FAMILIES = DECODERS + ENCODERS
FAMILY_CONFIGS |= MORE_FAMILY_CONFIGS
# No graft acts on Mamba 2.
MORE_FAMILIES = tuple(family for family in MORE_FAMILY_CONFIGS if family != "mamba2")
# For tests that would take too long with all families.
LAW_DECODERS = ("llama", "gemma3", "qwen3", "gpt2", "gpt_neox", "block-state")
USUAL = ("llama", "gemma3", "gpt2", "bert", "block-state")


class _Template:
    """A model of which copies are made, in a fifth of the time of `copy.deepcopy`: only tensors are copied singly.

    Args:
        model: the model, which must not change.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        file = io.BytesIO()
        pickler = _TensorPickler(file)
        pickler.dump(model)
        self._tensors = pickler.tensors
        self._structure = file.getvalue()

    def copy(self) -> Any:
        """Return a copy that shares nothing with the model or another copy."""
        unpickler = _TensorUnpickler(io.BytesIO(self._structure))
        unpickler.tensors = copy.deepcopy(self._tensors)
        return unpickler.load()


class _TensorPickler(pickle.Pickler):
    """Pickles an object but its tensors, for which it writes their indices in `tensors`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._indices:
            self._indices[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._indices[id(obj)]


class _TensorUnpickler(pickle.Unpickler):
    """Reads what `_TensorPickler` wrote, with other tensors."""

    tensors: list[Tensor]

    def persistent_load(self, pid: int) -> Tensor:
        return self.tensors[pid]


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """The model of `graftlm.testing.tiny`: a copy of one that is built once."""
    if any(isinstance(value, list | dict) for value in changes.values()):
        return built_model(family, seed, **changes)
    return _template(family, seed, **changes).copy()


@functools.lru_cache(maxsize=256)
def _template(family: str, seed: int, **changes: Any) -> _Template:
    return _Template(built_model(family, seed, **changes))


BackboneFolder = Callable[[str], Path]
"""The type of the fixture `tiny_backbone`, which returns the folder of a family."""


def save_tiny_backbone(folder: str | Path, family: str, seed: int = 0, *, tokenizer: bool = True) -> Path:
    """Write a tiny model and its tokenizer to a folder, and return the folder."""
    tiny_model(family, seed).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


__all__ = [
    "ALL_ENCODERS",
    "BOS",
    "DECODERS",
    "ENCODERS",
    "EOS",
    "FAMILIES",
    "LAW_DECODERS",
    "MASK",
    "MORE_FAMILIES",
    "PAD",
    "SPECIAL",
    "SPREAD",
    "TEXT",
    "TOKENS",
    "USUAL",
    "VOCABULARY",
    "WINDOW",
    "BackboneFolder",
    "save_tiny_backbone",
    "tiny_ids",
    "tiny_model",
    "tiny_tokenizer",
]
