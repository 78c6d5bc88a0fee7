"""Facts of GGUF files: the model of the file has the logits of the one that was written, or the key is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backbone.gguf_files import llama3_factors, write_gguf
from cases import thinned
from cli.tools import invoke
from graftlm.backbone import load_backbone
from graftlm.backbone.gguf_config import gguf_config
from graftlm.backbone.gguf_header import GgufHeader
from graftlm.backbone.gguf_keys import ARCHITECTURES, Expected, Read
from graftlm.errors import BackboneError
from tiny import HEAD_WIDTH, WINDOW, tiny_ids, tiny_model, tiny_tokenizer

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 128,
    "attention_factor": 1.3,
    "partial_rotary_factor": 1.0,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GEMMA3 = {"layer_types": None, "num_hidden_layers": 7}
"""Its sixth layer attends to all tokens."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads and a large epsilon": ("llama", {"head_dim": 20, "rms_norm_eps": 1e-2}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "llama 3.1 as published": (
        "llama",
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 8192}},
    ),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn with all constants": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 0.8}},
    ),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-3}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "rms_norm_eps": 1e-3}),
    "qwen2 moe": ("qwen2_moe", {}),
    "qwen3 moe": ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 with low caps": (
        "gemma2",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, "rms_norm_eps": 1e-3},
    ),
    "gemma3": ("gemma3", GEMMA3),
    "gemma3 with a cap": ("gemma3", GEMMA3 | {"final_logit_softcapping": 2.0}),
    "gemma3 for long texts": (
        "gemma3",
        GEMMA3
        | {
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            }
        },
    ),
    "phi3": ("phi3", {}),
    "phi3 with a window": ("phi3", {"sliding_window": WINDOW}),
    "phi3 for long texts": ("phi3", {"rope_parameters": LONG}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "rope_parameters": PARTIAL, "layer_norm_eps": 1e-3}),
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "nemotron": ("nemotron", {"norm_eps": 1e-2}),
    "falcon": ("falcon", {"multi_query": True, "num_kv_heads": 1, "layer_norm_epsilon": 1e-2}),
    "gpt2": ("gpt2", {}),
    "bloom": ("bloom", {"layer_norm_epsilon": 1e-2}),
}


REPEATED = {"llama 3.1", "llama yarn", "qwen2 yarn", "qwen3", "gemma2", "gemma3", "phi3", "stablelm in parallel"}
"""What another case has too, among other facts."""


@pytest.mark.parametrize("name", thinned(MODELS, MODELS.keys() - REPEATED))
@torch.no_grad()
def test_the_logits_are_those_of_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    backbone = load_backbone(write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer()))
    ids = tiny_ids(1, 200)
    torch.testing.assert_close(backbone.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_scaling_of_llama_3_is_recognized(tmp_path: Path) -> None:
    family, changes = MODELS["llama 3.1 as published"]
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(family, **changes), tiny_tokenizer())
    rope = load_backbone(file).config.rope_parameters
    assert {key: rope[key] for key in LLAMA3} == pytest.approx(changes["rope_parameters"])


APPLIED: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "the end of a turn": ("llama", {"tokenizer.ggml.eot_token_id": 7}, "generation.eos_token_id", [1, 7]),
    "heads that a file does not count": (
        "llama",
        {"attention.head_count_kv": 4, "attention.key_length": None, "attention.value_length": None},
        "head_dim",
        HEAD_WIDTH,
    ),
    "a factor without a type": ("qwen2", {"rope.scaling.factor": 4.0}, "rope_parameters.rope_type", "linear"),
    "an older key of a factor": ("qwen2", {"rope.scale_linear": 4.0}, "rope_parameters.factor", 4.0),
    "no base of frequencies": ("qwen2", {"rope.freq_base": None}, "rope_parameters.rope_theta", 10_000.0),
    "a window of zero tokens": ("phi3", {"attention.sliding_window": 0}, "sliding_window", None),
    "layers with windows, one by one": (
        "gemma2",
        {"attention.sliding_window_pattern": [False, True]},
        "layer_types",
        ["full_attention", "sliding_attention"],
    ),
    "all layers with windows": (
        "gemma2",
        {"attention.sliding_window_pattern": 0},
        "layer_types",
        ["sliding_attention"] * 2,
    ),
    "caps that a file does not state": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        "attn_logit_softcapping",
        50.0,
    ),
    "gemma 3 without a window": (
        "gemma3",
        {"attention.sliding_window": None},
        "layer_types",
        ["full_attention"] * 3,
    ),
    "weights of experts that are not normalized": (
        "qwen3_moe",
        {"expert_weights_norm": False},
        "norm_topk_prob",
        False,
    ),
}


@pytest.mark.parametrize("case", APPLIED)
def test_a_fact_is_applied(case: str, tmp_path: Path) -> None:
    family, changes, field, expected = APPLIED[case]
    options: dict[str, Any] = {"num_key_value_heads": 4} if "attention.head_count_kv" in changes else {}
    options |= {"sliding_window": WINDOW} if family == "phi3" else {}
    options |= {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    model = tiny_model(family, **options)
    backbone = load_backbone(write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), changes))
    found: Any = backbone.model.generation_config if field.startswith("generation.") else backbone.config
    for part in field.removeprefix("generation.").split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == expected


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
@pytest.mark.parametrize("is_largest", [True, False])
def test_the_largest_gemmas_scale_attention_by_the_width_per_head(
    is_largest: bool, architecture: str, layers: int
) -> None:
    facts = {
        "block_count": layers if is_largest else layers - 1,
        "embedding_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    header = GgufHeader(
        architecture=architecture,
        metadata={f"{architecture}.{key}": value for key, value in facts.items()},
        shapes={"token_embd.weight": (304, 48)},
        factors={},
    )
    config = gguf_config("tiny", header)
    assert config is not None
    assert config.query_pre_attn_scalar == (12 if is_largest else 8)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "rope.scaling.alpha": ("llama", {"rope.scaling.alpha": 1000.0}),
    "rope.scaling.type": ("llama", {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}),
    "rope.scaling.yarn_ext_factor": ("llama", {"rope.scaling.yarn_ext_factor": 0.5}),
    "rope.dimension_count": ("llama", {"rope.dimension_count": 6}),
    "expert_count": ("llama", {"expert_count": 8}),
    "attention.sliding_window": ("qwen2", {"attention.sliding_window": 4}),
    "attention.value_length": ("qwen3", {"attention.value_length": 8}),
    "attention.scale": ("llama", {"attention.scale": 0.5}),
    "logit_scale": ("llama", {"logit_scale": 0.25}),
    "attention.causal": ("qwen2", {"attention.causal": False}),
    "expert_gating_func": ("qwen3_moe", {"expert_gating_func": 2}),
    "a_key_of_tomorrow": ("llama", {"a_key_of_tomorrow": 1}),
    "attention.head_count_kv": ("falcon", {"attention.head_count_kv": 2}),
    "attention.sliding_window_pattern": ("gemma2", {"attention.sliding_window_pattern": [True]}),
    "blk.0.attn_q_norm.weight": ("llama", {"blk.0.attn_q_norm.weight": torch.ones(HEAD_WIDTH)}),
    "blk.0.ffn_down.scale": ("llama", {"blk.0.ffn_down.scale": torch.ones(1)}),
    "rope_freqs.weight": ("llama", {"rope_freqs.weight": torch.ones(3)}),
    "layer_norm_rms_epsilon": ("llama", {"attention.layer_norm_rms_epsilon": None}),
    "block_count": ("llama", {"block_count": None}),
    "llama.block_count": ("llama", {"block_count": True}),
    "tokenizer.ggml.pre": ("llama", {"tokenizer.ggml.pre": "a-split-of-tomorrow"}),
    "'adapter'": ("llama", {"general.type": "adapter"}),
    "llama-gguf-split": ("llama", {"split.count": 3}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_a_fact_that_the_model_cannot_have_is_named_before_weights_are_read(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = REFUSED[named]
    options: dict[str, Any] = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    options |= {"multi_query": True, "num_kv_heads": 1} if family == "falcon" else {}
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(family, **options), tiny_tokenizer(), changes)
    monkeypatch.setattr("graftlm.backbone.load._load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(BackboneError) as error:
        load_backbone(file)
    assert named in str(error.value)


def rope_of(facts: dict[str, Any], factors: dict[str, list[float]]) -> dict[str, Any]:
    """Return the rope parameters of a tiny Llama with these keys and tensors of factors."""
    sizes = {
        "context_length": 256,
        "block_count": 2,
        "embedding_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    header = GgufHeader(
        architecture="llama",
        metadata={f"llama.{key}": value for key, value in (sizes | facts).items()},
        shapes={"token_embd.weight": (304, 48)},
        factors=factors,
    )
    config = gguf_config("tiny", header)
    assert config is not None
    return config.rope_parameters


UNSCALED: dict[str, Any] = {}
FACTOR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN_FACTS = FACTOR | {"rope.scaling.type": "yarn"}
NO_FACTORS: dict[str, list[float]] = {}
LONG_FACTORS = {
    "rope_factors_long.weight": LONG["long_factor"],
    "rope_factors_short.weight": LONG["short_factor"],
}
LLAMA3_FACTORS = {"rope_freqs.weight": llama3_factors(LLAMA3 | {"original_max_position_embeddings": 8192}, 12).tolist()}
NOT_APPLIED: dict[str, tuple[dict[str, Any], dict[str, list[float]], dict[str, Any]]] = {
    "a magnitude without scaling": (UNSCALED, NO_FACTORS, {"rope.scaling.attn_factor": 3.0}),
    "a magnitude of YaRN without scaling": (UNSCALED, NO_FACTORS, {"rope.scaling.yarn_attn_factor": 3.0}),
    "a mix of YaRN without scaling": (UNSCALED, NO_FACTORS, {"rope.scaling.yarn_ext_factor": 1.0}),
    "a magnitude without a type": (
        {"rope.scaling.type": "none"},
        NO_FACTORS,
        {"rope.scaling.attn_factor": 3.0},
    ),
    "a magnitude beside a factor": (FACTOR, NO_FACTORS, {"rope.scaling.attn_factor": 3.0}),
    "a magnitude beside YaRN": (YARN_FACTS, NO_FACTORS, {"rope.scaling.attn_factor": 3.0}),
    "a magnitude beside Llama 3's scaling": (UNSCALED, LLAMA3_FACTORS, {"rope.scaling.attn_factor": 3.0}),
    "a factor beside factors": ({"rope.scaling.type": "longrope"}, LONG_FACTORS, {"rope.scaling.factor": 4.0}),
    "a factor beside factors without a type": (UNSCALED, LONG_FACTORS, {"rope.scaling.factor": 4.0}),
    "an older factor beside factors": (UNSCALED, LONG_FACTORS, {"rope.scale_linear": 4.0}),
    "a magnitude of YaRN beside factors": (UNSCALED, LONG_FACTORS, {"rope.scaling.yarn_attn_factor": 4.0}),
    "another type beside factors": (UNSCALED, LONG_FACTORS, {"rope.scaling.type": "dynamic"}),
}


@pytest.mark.parametrize("case", NOT_APPLIED)
def test_a_fact_of_the_rotation_that_its_type_does_not_apply_is_named(case: str) -> None:
    facts, factors, added = NOT_APPLIED[case]
    rope_of(facts, factors)
    with pytest.raises(BackboneError) as error:
        rope_of(facts | added, factors)
    assert next(iter(added)) in str(error.value)


@pytest.mark.parametrize(
    ("facts", "factors", "added"),
    [
        (UNSCALED, NO_FACTORS, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        (UNSCALED, NO_FACTORS, {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0}),
        (UNSCALED, NO_FACTORS, {"rope.scaling.yarn_ext_factor": -1.0, "rope.scaling.yarn_beta_fast": 20.0}),
        (YARN_FACTS, NO_FACTORS, {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}),
        (UNSCALED, LONG_FACTORS, {"rope.scaling.factor": 1.0, "rope.scaling.type": "longrope"}),
    ],
)
def test_a_fact_of_the_rotation_without_effect_changes_nothing(
    facts: dict[str, Any], factors: dict[str, list[float]], added: dict[str, Any]
) -> None:
    assert rope_of(facts | added, factors) == rope_of(facts, factors)


def test_a_magnitude_beside_factors_is_applied() -> None:
    assert rope_of({"rope.scaling.attn_factor": 1.5}, LONG_FACTORS)["attention_factor"] == 1.5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_table_names_fields_of_the_config(architecture: str) -> None:
    from transformers import CONFIG_MAPPING

    row = ARCHITECTURES[architecture]
    config = CONFIG_MAPPING[row.model_type]()
    read = {use.field for use in row.keys.values() if isinstance(use, Read)}
    missing = {field for field in (*read, *row.tensors) if not hasattr(config, field)}
    assert missing <= {"full_attention_interval"}
    assert all(use.values or row.by_transformers for use in row.keys.values() if isinstance(use, Expected))


def test_a_graft_finds_the_file_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graftlm.grafts import build_graft, graft_config
    from graftlm.store.artifact import backbone_of, save_graft

    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tiny_tokenizer())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    backbone = load_backbone("tiny.gguf")
    graft = build_graft(graft_config({"kind": "adapter", "width": 4}), backbone)
    torch.nn.init.normal_(next(graft.parameters()))
    save_graft(graft, backbone, tmp_path / "graft")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert backbone_of(tmp_path / "graft", device="cpu").name == str(tmp_path / "tiny.gguf")


@torch.no_grad()
def test_a_file_is_exported_as_a_folder_of_transformers(tmp_path: Path) -> None:
    model = tiny_model("llama", rope_parameters=LLAMA3)
    file = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer())
    outcome = invoke("export", str(file), "--to", str(tmp_path / "model"))
    assert outcome.code == 0, outcome.err
    plain = load_backbone(tmp_path / "model")
    torch.testing.assert_close(plain.model(tiny_ids()).logits, model(tiny_ids()).logits, rtol=1e-4, atol=1e-4)
    assert plain.need_tokenizer()("the fox").input_ids == tiny_tokenizer()("the fox").input_ids


def test_a_backbone_is_printed_in_a_line(tmp_path: Path) -> None:
    printed = repr(load_backbone(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tiny_tokenizer())))
    assert "tiny.gguf" in printed
    assert len(printed.splitlines()) == 1
