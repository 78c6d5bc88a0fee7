"""Tiny random models, and a byte-level tokenizer.

Every weight, bias and norm gain is random, and large enough that logits differ clearly between tokens, so that no test
passes because a value is zero or one. Dropout has each family's default.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD = 0
EOS = 1
BOS = 2
MASK = 3
SPECIAL = ["<pad>", "<eos>", "<bos>", "<mask>"]
TOKENS = 300
"""Size of the tokenizer's vocabulary."""
VOCABULARY = 304
"""Size of the models' vocabulary: padded, as in real models."""
WIDTH = 48
HEADS = 4
KV_HEADS = 2
HEAD_WIDTH = 12
FFN_WIDTH = 80
LAYERS = 2
POSITIONS = 512
WINDOW = 8
"""Tokens of a sliding window."""
SPREAD = 0.15
"""Standard deviation of the weights."""
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
FAMILY_CONFIGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, "head_dim": HEAD_WIDTH}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GROUPED,
            "head_dim": HEAD_WIDTH + 4,
            "query_pre_attn_scalar": HEAD_WIDTH + 4,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            **TOKEN_IDS,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": POSITIONS,
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", COMMON),
}
"""By family: names of the config class and the model class in transformers, and the config's values."""
ENCODERS = ("bert", "roberta", "distilbert", "modernbert", "xlm-roberta", "deberta-v2", "electra", "eurobert")


def tiny_model(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Make a random float32 model in evaluation mode.

    Args:
        family: name of the family, which must be a key of `FAMILY_CONFIGS`.
        seed: seed of the weights; the state of torch's CPU generator does not change.
        changes: changed values of the family's config.
    """
    config_class, model_class, values = FAMILY_CONFIGS[family]
    if isinstance(config_class, str):
        config_class = getattr(transformers, config_class)
        model_class = getattr(transformers, model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_class(**{**values, **changes})
        model = model_class(config)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * SPREAD
            # Matrices are replaced by noise, and noise is added to biases and gains.
            parameter.data = noise if parameter.dim() > 1 else parameter.data + noise
    return model.eval()


def tiny_tokenizer(tokens: int = TOKENS) -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer, which encodes and decodes any text.

    Args:
        tokens: size of its vocabulary, at least 260: the bytes and the special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        bos_token=SPECIAL[BOS],
        mask_token=SPECIAL[MASK],
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tiny_ids(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Return random token ids (rows, length) without special tokens.

    Args:
        rows: number of rows.
        length: tokens per row; by default three times a sliding window.
        seed: seed of the ids.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL), TOKENS, (rows, length), generator=generator)
