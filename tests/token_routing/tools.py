"""PEFT adapters with random factors, on tiny backbones."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from tiny import tiny_model, tiny_tokenizer

# Module names of attention, FFN, embedding and output layer, for PEFT.
NAMES = {
    "llama": (["q_proj", "v_proj"], ["down_proj"], ["embed_tokens"], ["lm_head"]),
    "gemma3": (["q_proj", "v_proj"], ["down_proj"], ["embed_tokens"], ["lm_head"]),
    "gpt2": (["c_attn"], ["c_fc"], ["wte"], ["lm_head"]),
    "gpt_neox": (["query_key_value"], ["dense_h_to_4h"], ["embed_in"], ["lm_head"]),
    "qwen3": (["k_proj", "o_proj"], ["up_proj"], ["embed_tokens"], ["lm_head"]),
}
FAMILIES = tuple(NAMES)


def settings(family: str) -> dict[str, dict[str, Any]]:
    """Three adapters of several ranks, scales and targets; one uses patterns, one is rank-stabilised."""
    attention, ffn, embedding, head = NAMES[family]
    return {
        "one": {"r": 4, "lora_alpha": 16, "target_modules": attention},
        "two": {"r": 3, "lora_alpha": 2, "target_modules": attention + ffn + head, "use_rslora": True},
        "three": {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ffn + embedding,
            "rank_pattern": {ffn[0]: 5},
            "alpha_pattern": {ffn[0]: 7},
        },
    }


@functools.cache
def backbone(family: str) -> Backbone:
    """A tiny backbone, shared by the session."""
    return Backbone.wrap(tiny_model(family), tiny_tokenizer(), f"tiny-{family}")


def write_adapters(family: str, root: Path, chosen: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, str]:
    """Adapters with random factors in folders under `root`; returns the folders by name."""
    folders = {}
    for number, (name, values) in enumerate((chosen or settings(family)).items()):
        model = get_peft_model(
            tiny_model(family),  # type: ignore[arg-type]  # PEFT's own stub is too narrow
            LoraConfig(**{"fan_in_fan_out": family == "gpt2"} | dict(values), base_model_name_or_path=f"tiny-{family}"),
        )
        randomise(model, seed=number)
        model.save_pretrained(str(root / name))
        folders[name] = str(root / name)
    return folders


def change_config(folder: str, **values: Any) -> None:
    """Change the config of an adapter's folder."""
    path = Path(folder) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Set all LoRA parameters to random numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def peft_logits(family: str, folder: str, ids: Tensor) -> Tensor:
    """PEFT's logits with one unmerged adapter."""
    model = PeftModel.from_pretrained(tiny_model(family), folder).eval()
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def summed_logits(family: str, folders: Mapping[str, str], weights: Mapping[str, float], ids: Tensor) -> Tensor:
    """The literal sum: W + w_1 dW_1 + w_2 dW_2 + …, with every dW computed by PEFT and added to the weights."""
    model = tiny_model(family)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # PEFT changes an embedding, but not the tied head
    for name, folder in folders.items():
        adapted = PeftModel.from_pretrained(tiny_model(family), folder)
        for path, module in adapted.base_model.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                delta = module.get_delta_weight("default")
                model.get_submodule(path).weight.data += weights[name] * delta
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def routing(family: str, folders: Mapping[str, str], **more: Any) -> GraftedModel:
    """An attached routing between adapters."""
    texts = ["The quick brown fox", "Le renard brun saute", "def forward(self): return"]
    experts = {
        name: {"path": folder, "texts": [texts[number % 3] + " " * (number // 3)]}
        for number, (name, folder) in enumerate(folders.items())
    }
    config = graft_config({"kind": "token-routing", "experts": experts, "prompt": "causal", "temperature": 0.1, **more})
    return GraftedModel(backbone(family), {"graft": build_graft(config, backbone(family))})


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest logit, in float32."""
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference < 1e-5, f"difference: {difference:.1e} of the largest logit"


NEW = 9  # tokens that `generate` produces


def generate(model: GraftedModel, ids: Tensor, **how: Any) -> Any:
    """`model.generate`, greedy by default, with logits."""
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, return_dict_in_generate=True, output_logits=True, **fixed, **how)


def recomputed(model: GraftedModel, sequences: Tensor, prompt: int) -> Tensor:
    """(B, NEW, V) the logits of each new token, from one pass that knows where the prompt ends."""
    marks = (torch.arange(sequences.shape[1]) < prompt).expand_as(sequences)
    with torch.no_grad():
        return model(sequences, prompt=marks, use_cache=False).logits[:, prompt - 1 : -1]
