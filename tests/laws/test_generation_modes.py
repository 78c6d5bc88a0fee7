"""Every way to generate equals recomputation for every graft, or is refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, QuantizedCache

from cases import pairwise, rotated
from graftlm.backbone import Backbone
from graftlm.errors import GraftError, TapError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.testing import logits, randomise
from graftlm.testing.laws import NEW_TOKENS, attach_graft, generate, pad_rows, positions_of, recompute
from laws.cover import is_covered, marks
from laws.examples import EXPERTS, Example, augmenting_folder, backbone, examples
from tiny import WINDOW, tiny_ids, tiny_model, tiny_tokenizer

MODES: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},
    "static-beams": {"cache_implementation": "static", "num_beams": 3},
    "chunked-prefill": {"prefill_chunk_size": 5},
    "no-cache": {"use_cache": False},
}
FAMILIES = ("llama", "gemma3", "gpt2", "qwen3", "bloom")
PADDINGS = {"no padding": (12, 12), "left padding": (2 * WINDOW, 5)}


def cases() -> list[Any]:
    """The modes of generation as laws of the pairwise cover.

    The longest row of a padded batch has no padding, so a batch without any padding runs on llama alone.
    """
    params = []
    for example in examples():
        for family in FAMILIES:
            for mode in MODES:
                is_refused = str(example) == "recomputing" and mode.startswith("static")
                if is_refused or example.exception(family):
                    continue
                for padding in PADDINGS if family == "llama" else ("left padding",):
                    case_marks = marks(example, family, f"{mode} {padding}", decoders_only=True)
                    if not case_marks and padding == "no padding":
                        case_marks = [pytest.mark.slow]
                    name = f"{example}-{family}-{mode}-{padding}"
                    params.append(pytest.param(example, family, mode, padding, marks=case_marks, id=name))
    return params


@pytest.mark.parametrize(("example", "family", "mode", "padding"), cases())
def test_generation_equals_recomputation(example: Example, family: str, mode: str, padding: str) -> None:
    ids, mask = pad_rows([tiny_ids(1, length, seed=length)[0] for length in PADDINGS[padding]], "left")
    with attach_graft(backbone(family), example.values()).eval() as model:
        randomise(model, example.spread)
        output = generate(model, ids, mask, do_sample=False, **MODES[mode])
        steps = torch.stack(output.logits, 1)  # (running rows, NEW_TOKENS, V)
        rows = torch.arange(len(steps))[:, None].expand(-1, NEW_TOKENS)
        if "num_beams" in MODES[mode]:
            rows = output.beam_indices[:, :NEW_TOKENS]
        expected = recompute(model, output.sequences, mask)
    torch.testing.assert_close(steps[rows, torch.arange(NEW_TOKENS)], expected, rtol=1e-4, atol=1e-4)


def attention_cases() -> list[Any]:
    """The implementations of attention as laws of the pairwise cover; one example is in the default run."""
    params = []
    for example in examples():
        for family in ("llama", "gemma3"):
            if example.exception(family):
                continue
            for attention in ("eager", "flex_attention"):
                is_default = str(example) == "token-routing" and family == "llama"
                is_slow = is_covered(example, family, attention, decoders_only=True)
                tier = [] if is_default else [pytest.mark.slow if is_slow else pytest.mark.matrix]
                params.append(
                    pytest.param(example, family, attention, marks=tier, id=f"{example}-{family}-{attention}")
                )
    return params


@pytest.mark.parametrize(("example", "family", "attention"), attention_cases())
def test_every_attention_gives_the_logits_of_sdpa(
    example: Example, family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # flex as it is written, without a C++ compiler
    ids, mask = pad_rows([tiny_ids(1, length, seed=length)[0] for length in (2 * WINDOW, 5)], "left")
    other = Backbone.wrap(tiny_model(family, attn_implementation=attention), tiny_tokenizer())
    adds_to_scores = example.kind in ("conditional-tasks", "memory") and str(example) not in ("all-frozen", "loras")
    if adds_to_scores and attention == "flex_attention":
        with pytest.raises(TapError) as error:
            attach_graft(other, example.values())
        assert "flex_attention" in str(error.value)
        return
    with randomise(attach_graft(other, example.values()).eval(), example.spread) as model:
        output = generate(model, ids, mask, do_sample=False)
    with randomise(attach_graft(backbone(family), example.values()).eval(), example.spread) as model:
        expected = recompute(model, output.sequences, mask)
    torch.testing.assert_close(torch.stack(output.logits, 1), expected, rtol=1e-4, atol=1e-4)


GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
ASSISTANTS: dict[str, Callable[[GraftedModel], dict[str, Any]]] = {
    "another": lambda model: {"assistant_model": tiny_model("llama", seed=3)},
    "itself": lambda model: {"assistant_model": model},
    "its live model": lambda model: {"assistant_model": model.model},
    "its first layer": lambda model: {"assistant_early_exit": 1},
}


@pytest.mark.parametrize(("kind", "assistant"), rotated(["token routing", "composition"], ASSISTANTS))
def test_drafts_change_no_token(kind: str, assistant: str) -> None:
    if kind == "composition" and assistant == "its first layer":
        _skip_unless_empty_layers_are_cropped()
    ids = tiny_ids(1, 20)
    config = READS_PROMPT[kind] | ({"refresh": "every"} if kind == "composition" else {})
    with randomise(attach_graft(backbone("llama"), config).eval(), 0.2) as model:
        plain = model.generate(ids, **GREEDY)
        assert model.generate(ids, **GREEDY, **ASSISTANTS[assistant](model)).tolist() == plain.tolist()
        assert model.model.generate(ids, **GREEDY, **ASSISTANTS[assistant](model)).tolist() == plain.tolist()


def _skip_unless_empty_layers_are_cropped() -> None:
    """A draft of the first layers leaves layers of a composition empty."""
    try:
        DynamicLayer().crop(-1)
    except TypeError:
        pytest.skip("this version of transformers crops only layers that were filled")


def test_a_grafted_model_may_write_drafts_for_another() -> None:
    ids, other = tiny_ids(1, 12), tiny_model("llama", seed=3).eval()
    with randomise(attach_graft(backbone("llama"), READS_PROMPT["token routing"]).eval(), 0.2) as model:
        drafted = other.generate(ids, **GREEDY, assistant_model=model)
    assert drafted.tolist() == other.generate(ids, **GREEDY).tolist()


@pytest.mark.parametrize("kind", ["token routing", "composition"])
def test_a_part_of_a_prompt_in_a_cache_is_refused_where_the_whole_counts(kind: str) -> None:
    ids = tiny_ids(1, 12)
    with randomise(attach_graft(backbone("llama"), READS_PROMPT[kind]).eval(), 0.2) as model, torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
        for generate in (model.generate, model.model.generate):
            with pytest.raises(GraftError, match="prefill_chunk_size"):
                generate(ids, past_key_values=copy.deepcopy(cache), **GREEDY)
            with pytest.raises(GraftError, match="prefill_chunk_size"):
                generate(ids, prefill_chunk_size=5, **GREEDY)


@pytest.mark.parametrize("kind", ["neutral-residues", "adapter", "lora", "finetune"])
def test_a_cache_of_the_bare_model_is_refused(kind: str) -> None:
    ids, bare = tiny_ids(1, 12), backbone("llama")
    with torch.no_grad():
        cache = bare.model(ids[:, :7], use_cache=True).past_key_values
    with randomise(attach_graft(bare, {"kind": kind}).eval(), 0.2) as model:
        with pytest.raises(GraftError) as error:
            model(ids[:, 7:], past_key_values=copy.deepcopy(cache))
        assert "7" in str(error.value)
        with pytest.raises(GraftError) as error:
            model.generate(ids, past_key_values=cache, **GREEDY)
        assert "7" in str(error.value)
        own = model.model(ids[:, :7], use_cache=True).past_key_values  # which the model makes itself
        assert model.generate(ids, past_key_values=own, **GREEDY).tolist() == model.generate(ids, **GREEDY).tolist()
        turn = model.generate(ids, **GREEDY, return_dict_in_generate=True)
        longer = torch.cat([turn.sequences, ids], 1)
        kept = model.generate(longer, past_key_values=turn.past_key_values, **GREEDY)
        assert kept.tolist() == model.generate(longer, **GREEDY).tolist()


@pytest.mark.parametrize("ids", ["a text", torch.tensor([4, 5]), torch.zeros(1, 0, dtype=torch.long)], ids=repr)
def test_what_is_no_prompt_is_refused(ids: Any) -> None:
    with attach_graft(backbone("llama"), {"kind": "adapter"}) as model:
        with pytest.raises(GraftError) as error:
            model.generate(ids)
        assert "(rows, tokens)" in str(error.value)
        with pytest.raises(GraftError) as error:
            model.model.generate_batch([[4, 5]])
        assert "graft serve" in str(error.value)
    assert not {"generate", "init_continuous_batching"} & set(vars(model.model))


READS_PROMPT: dict[str, dict[str, Any]] = {
    "token routing": {"kind": "token-routing", "experts": EXPERTS, "prompt": "whole", "every": 2, "temperature": 0.1},
    "composition": {
        "kind": "composition",
        "stride": 1,
        "refresh": "prompt",
        "augmenting": {"one": {"name": augmenting_folder("llama")}},
    },
}


@pytest.mark.parametrize(
    ("kind", "padding", "mode"),
    pairwise(READS_PROMPT, PADDINGS, [{}, {"use_cache": False}, {"cache_implementation": "static"}]),
)
def test_the_prompt_is_that_of_the_generation(kind: str, padding: str, mode: dict[str, Any]) -> None:
    config = READS_PROMPT[kind]
    ids, mask = pad_rows([tiny_ids(1, length, seed=length)[0] for length in PADDINGS[padding]], "left")
    with randomise(attach_graft(backbone("llama"), config).eval(), 0.2) as model:
        output = generate(model, ids, mask, do_sample=False, **mode)
        full = torch.cat([mask, torch.ones(2, NEW_TOKENS, dtype=torch.long)], 1)
        prompt = (torch.arange(full.shape[1]) < ids.shape[1]).expand_as(full)
        inputs = {"attention_mask": full, "position_ids": positions_of(full), "prompt": prompt}
        expected = logits(model, output.sequences, **inputs)[:, -NEW_TOKENS - 1 : -1]
    torch.testing.assert_close(torch.stack(output.logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_drafts_are_no_part_of_the_prompt() -> None:
    ids = tiny_ids(1, 6).repeat(1, 3)
    with randomise(attach_graft(backbone("llama"), READS_PROMPT["token routing"]).eval(), 0.2) as model:
        plain = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        drafted = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, prompt_lookup_num_tokens=3)
    assert drafted.tolist() == plain.tolist()


def test_a_static_cache_of_windows_alone_is_refused_before_a_token_is_written() -> None:
    with (
        attach_graft(backbone("mistral"), {"kind": "neutral-residues"}).eval() as model,
        pytest.raises(TapError) as error,
    ):
        model.generate(tiny_ids(), max_new_tokens=2, cache_implementation="static")
    assert "dynamic cache" in str(error.value)


@pytest.mark.parametrize("config", READS_PROMPT.values(), ids=READS_PROMPT.keys())
def test_a_cache_that_moves_or_rounds_its_layers_is_refused(config: dict[str, Any]) -> None:
    offloaded, quantized = DynamicCache(), QuantizedCache.__new__(QuantizedCache)
    offloaded.offloading = True  # its constructor needs an accelerator, and that of the other a library
    quantized.__dict__.update(vars(DynamicCache()))
    with attach_graft(backbone("llama"), config).eval() as model:
        for cache, way in ((offloaded, "offloads"), (quantized, "quantizes")):
            with pytest.raises(GraftError) as error:
                model(tiny_ids(), past_key_values=cache, use_cache=True)
            assert way in str(error.value)
            assert cache.get_seq_length() == 0, "refused before a token is read"


def test_a_mask_of_four_dimensions_is_refused() -> None:
    ids = tiny_ids()
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    with (
        attach_graft(backbone("llama"), {"kind": "neutral-residues"}).eval() as model,
        pytest.raises(TapError) as error,
    ):
        logits(model, ids, attention_mask=mask)
    assert "attention mask" in str(error.value)


def test_a_static_cache_is_refused_where_its_keys_would_be_replaced() -> None:
    (recomputing,) = (example for example in examples() if str(example) == "recomputing")
    with (
        attach_graft(backbone("llama"), recomputing.values()).eval() as model,
        pytest.raises(GraftError) as error,
    ):
        model.generate(tiny_ids(), max_new_tokens=2, cache_implementation="static")
    assert "set to recompute" in str(error.value)


@pytest.mark.parametrize("below", ["finetune", "conditional-tasks"])
def test_what_recomputes_runs_the_copy_that_another_graft_trains(below: str) -> None:
    ids, configs = tiny_ids(2, 12), {str(example): example for example in examples()}
    grafts = {
        name: build_graft(graft_config(configs[name].values()), backbone("llama")) for name in (below, "recomputing")
    }
    with randomise(GraftedModel(backbone("llama"), grafts).eval(), 0.1) as model:
        output = generate(model, ids, torch.ones_like(ids), do_sample=False)
        expected = recompute(model, output.sequences, torch.ones_like(ids))
    torch.testing.assert_close(torch.stack(output.logits, 1), expected, rtol=1e-4, atol=1e-4)
