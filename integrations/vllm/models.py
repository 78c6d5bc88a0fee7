"""Tiny random models that vLLM's attention on a CPU accepts, with random grafts, and what they generate."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone
from graftlm.export import export_graft, export_model
from graftlm.export.code import is_own
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft
from graftlm.testing import attach_graft, logits, randomise, tiny_ids, tiny_tokenizer
from integrations.vllm.comparison import Continuation, continuation

TESTS = Path(__file__).parents[2] / "tests"
STEPS = 12
LENGTHS = (5, 9, 17, 24)
"""Lengths of the prompts; a sliding window has 8 tokens."""
PROMPTS: list[list[int]] = [tiny_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
EFFECT = 0.05
"""Smallest change of a log-probability that shows that a graft acts: 50 times the tolerance."""

_WIDTH = 128
_HEAD_WIDTH = 32  # the smallest of vLLM's attention on a CPU
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), _WIDTH),
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar"), _HEAD_WIDTH),
}
_MORE_SIZES: dict[str, dict[str, Any]] = {
    # vLLM's latent attention has the sizes of DeepSeek alone.
    "deepseek_v3": {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
    "mixtral": {"moe_intermediate_size": 80},  # its experts have the intermediate size, but vLLM reads this key first
    "qwen3_next": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}


def families() -> tuple[str, ...]:
    """Return the names of all tiny causal language models of the tests on which a graft acts."""
    tiny = _tiny()
    return tuple(dict.fromkeys(f for f in (*tiny.DECODERS, *tiny.MORE_FAMILIES) if f not in tiny.ALL_ENCODERS))


def tiny_backbone(family: str, **changes: Any) -> Backbone:
    """Return a tiny random backbone of sizes that vLLM accepts.

    Args:
        family: name of a family of the tests.
        changes: further changed values of its config.
    """
    tiny = _tiny()
    _, _, values = tiny.FAMILY_CONFIGS[family]
    sizes = {name: size for name, size in _SIZES.items() if name in values}
    model = tiny.built_model(family, **{**sizes, **_MORE_SIZES.get(family, {}), **changes})
    return Backbone.wrap(model, tiny_tokenizer())


def random_graft(config: Mapping[str, Any], backbone: Backbone, seed: int = 1) -> Graft:
    """Return a detached graft with random weights, which change the outputs clearly."""
    with randomise(attach_graft(backbone, config).eval(), 0.2, seed) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft


class Exported(NamedTuple):
    """An exported model.

    Attributes:
        folder: the model's folder.
        expected: the continuation of each prompt in this process.
        effect: the largest change of the first token's log-probability by the graft; 0 without a graft, and of several
            grafts the smallest.
        prompts: the prompts, (N) lists of token ids.
        names: a name for each prompt, for reports; None numbers them.
        loras: the folder of an adapter for each prompt, or None; None if no prompt has one.
        engine: further options of vLLM's engine.
        note: what was left out.
    """

    folder: Path
    expected: list[Continuation]
    effect: float
    prompts: Sequence[Sequence[int]] = PROMPTS
    names: Sequence[str] | None = None
    loras: Sequence[str | None] | None = None
    engine: Mapping[str, Any] = MappingProxyType({})
    note: str = ""


def exported_bare(backbone: Backbone, folder: Path) -> Exported:
    """Write a backbone without a graft, and continue the prompts."""
    if is_own(type(backbone.model)):
        export_model(backbone, folder)
    else:
        backbone.model.save_pretrained(folder)
    return Exported(folder, continuations(backbone.model), 0.0)


def exported_graft(
    graft: Graft, backbone: Backbone, folder: Path, prompts: Sequence[Sequence[int]] = PROMPTS
) -> Exported:
    """Export a graft, and continue prompts with the grafted model.

    Raises:
        ArtifactError: the graft can't be exported.
    """
    export_graft(graft, backbone, folder)
    bare = first_logprobs(backbone.model)
    with GraftedModel(backbone, {"graft": graft}) as model:
        model.eval()
        grafted = first_logprobs(model)
        expected = continuations(model, prompts)
    return Exported(folder, expected, float((grafted - bare).abs().max()), prompts)


def first_logprobs(model: nn.Module) -> Tensor:
    """Return the log-probabilities (V,) of the first token after the longest of the prompts."""
    return logits(model, torch.tensor(PROMPTS[-1:]))[0, -1].log_softmax(-1)


def continuations(model: nn.Module, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Continuation]:
    """Continue prompts greedily with a model of transformers or a grafted model."""
    return [continuation(lambda ids: logits(model, ids), prompt, STEPS) for prompt in prompts]


def _tiny() -> Any:
    """Return the tests' module of tiny models."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return __import__("tiny")
