"""Tiny random models, and a byte-level tokenizer.

Every weight, bias and norm gain is random, and large enough that logits differ clearly between tokens: no test passes
because a value is zero or one. Dropout stays at each family's default.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, EOS, BOS, MASK = range(4)
SPECIAL = ["<pad>", "<eos>", "<bos>", "<mask>"]
TOKENS = 300  # of the tokenizer
VOCABULARY = 304  # of the models: padded, as in real models
WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, FFN_WIDTH, LAYERS, POSITIONS, WINDOW = 48, 4, 2, 12, 80, 2, 512, 8
SPREAD = 0.15  # standard deviation of the weights
TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the other dogs run after it through the thin forest. "
    "Le renard brun saute par-dessus le chien paresseux, et les autres chiens courent dans la forêt. "
    "def forward(self, hidden_states): return self.down(self.act(self.gate(hidden_states)) * self.up(hidden_states))"
)

TOKEN_IDS = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": BOS, "vocab_size": VOCABULARY}
COMMON = {
    **TOKEN_IDS,
    "hidden_size": WIDTH,
    "intermediate_size": FFN_WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}
GROUPED = {**COMMON, "num_key_value_heads": KV_HEADS}
# family -> names of the config and model classes in transformers, and the config's values
FAMILY_CONFIGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED | {"head_dim": HEAD_WIDTH}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GROUPED
        | {"head_dim": HEAD_WIDTH + 4, "query_pre_attn_scalar": HEAD_WIDTH + 4, "sliding_window": WINDOW}
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        TOKEN_IDS | {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": POSITIONS},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", COMMON),
}
ENCODERS = ("bert", "roberta", "distilbert", "modernbert", "xlm-roberta", "deberta-v2", "electra", "eurobert")


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of `family` in eval mode; `seed` fixes its bits, and `changes` go to its config."""
    config_class, model_class, values = FAMILY_CONFIGS[family]
    if isinstance(config_class, str):
        config_class, model_class = getattr(transformers, config_class), getattr(transformers, model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**(values | changes)))
        for parameter in model.parameters():  # matrices become noise; biases and gains get noise added
            noise = torch.randn(parameter.shape) * SPREAD
            parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return model.eval()


def tiny_tokenizer(tokens: int = TOKENS) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a vocabulary of `tokens`; decoding gives back any text."""
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    special = zip(("pad_token", "eos_token", "bos_token", "mask_token"), SPECIAL, strict=True)
    options: dict[str, Any] = {"model_max_length": POSITIONS, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **dict(special), **options)


def tiny_ids(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids (rows, length), none of them special. 24 tokens are three times a sliding window."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL), TOKENS, (rows, length), generator=generator)
