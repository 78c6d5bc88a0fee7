"""Tiny random backbones of every family, and a byte-level tokenizer, for tests: `from tiny import tiny_model`.

Every weight, bias and norm gain is random, and large enough that logits differ clearly between tokens: a test can't
pass because something is zero, or one. Dropout stays at each family's default, so forgetting `eval()` shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from graftlm.models import block_state

PAD, EOS, BOS, MASK = range(4)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<mask>"]
TOKENS = 300  # of the tokenizer
VOCABULARY = 304  # of the models: padded, as real ones are
WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, FFN_WIDTH, LAYERS, POSITIONS, WINDOW = 48, 4, 2, 12, 80, 2, 512, 8
SPREAD = 0.15  # standard deviation of the weights
TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the other dogs run after it through the thin forest. "
    "Le renard brun saute par-dessus le chien paresseux, et les autres chiens courent dans la forêt. "
    "def forward(self, hidden_states): return self.down(self.act(self.gate(hidden_states)) * self.up(hidden_states))"
)

_IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS, "vocab_size": VOCABULARY}
_COMMON = {
    **_IDS,
    "hidden_size": WIDTH,
    "intermediate_size": FFN_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}
_GROUPED = {**_COMMON, "num_key_value_heads": KV_HEADS}
_GEMMA = {**_GROUPED, "head_dim": HEAD_WIDTH + 4}  # heads wider together than the residual stream, as in the real ones
_GEMMA2 = {**_GEMMA, "query_pre_attn_scalar": HEAD_WIDTH + 4, "sliding_window": WINDOW}

# family -> names of the config and model classes in transformers, and the config's values
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED | {"head_dim": HEAD_WIDTH}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED | {"head_dim": HEAD_WIDTH, "sliding_window": WINDOW}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _GEMMA),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA2),  # layers: sliding, full
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _GEMMA2 | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": HEAD_WIDTH + 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", _COMMON | {"hidden_size": 64}),  # rotates half of each head
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        _IDS | {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _COMMON | {"hidden_size": 64}),  # rotates a quarter
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _GROUPED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    "block-state": (
        "BlockStateConfig",
        "BlockStateForCausalLM",
        {**_COMMON, "window": WINDOW, "mixer_layers": [0, 1], "state_size": 4, "dropout": 0.1},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _COMMON),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _COMMON),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        _IDS | {"dim": WIDTH, "hidden_dim": FFN_WIDTH, "n_layers": LAYERS, "n_heads": HEADS},
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        _COMMON | {"local_attention": WINDOW, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}
ENCODERS = ("bert", "roberta", "distilbert", "modernbert")
DECODERS = tuple(family for family in _FAMILIES if family not in ENCODERS)
FAMILIES = DECODERS + ENCODERS
LAW_DECODERS = (
    "llama",
    "gemma3",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "block-state",
)  # one of each make, where all would take too long


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of `family` in eval mode; `seed` fixes its bits, and `changes` go to its config."""
    config_name, model_name, values = _FAMILIES[family]
    home = transformers if hasattr(transformers, config_name) else block_state
    config = getattr(home, config_name)(**(values | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(home, model_name)(config)
        _randomise(model)
    return model.eval()


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Matrices: normal with spread `SPREAD`. Vectors (biases, gains): what they were, plus as much noise."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape) * SPREAD
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)


def tiny_tokenizer(tokens: int = TOKENS) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of so many tokens: any text goes there and back without loss."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer(tokens)),
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        bos_token=SPECIAL[BOS],
        mask_token=SPECIAL[MASK],
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _trained_tokenizer(tokens: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


def tiny_ids(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids, (rows, length), none of them special. 24 tokens cross the sliding windows three times."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL), TOKENS, (rows, length), generator=generator)


def save_tiny_backbone(folder: str | Path, family: str, seed: int = 0, *, tokenizer: bool = True) -> Path:
    """Write model and tokenizer to `folder` as `save_pretrained` does; gives the folder."""
    tiny_model(family, seed).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return Path(folder)


BackboneFolder = Callable[[str], Path]
"""The type of the fixture `tiny_backbone`: family -> folder."""
