"""Each family's row of sites, proven on a tiny model: what a tap sees, and what it does, worked out by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import thinned
from graftlm.backbone import FAMILIES as ROWS
from graftlm.backbone import Call, Site, Sites, Tap, TapHooks, register_family
from graftlm.backbone.families import PROVEN_FAMILIES, Sublayer
from graftlm.backbone.load import BackboneConfig
from graftlm.errors import TapConflictError, TapError, UnknownFamilyError
from tiny import (
    DECODERS,
    FAMILIES,
    FAMILY_CONFIGS,
    GROUPED,
    MORE_FAMILIES,
    USUAL,
    VOCABULARY,
    save_tiny_backbone,
    tiny_ids,
    tiny_model,
)

IDS = tiny_ids(2, 12)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Where the attention of each family writes its output.
ATTENTION_OUT = {
    "phi": "self_attn.dense",
    "gpt2": "attn.c_proj",
    "gpt_neox": "attention.dense",
    "block-state": "mixer.out",
}
ATTENTION_OUT |= dict.fromkeys(("bert", "roberta"), "attention.output.dense")
ATTENTION_OUT |= {"distilbert": "attention.out_lin", "modernbert": "attn.Wo"}
FUSED = ("modernbert",)  # one Linear for both halves of the gated linear unit


@functools.cache
def model(family: str) -> Any:
    return tiny_model(family)


@torch.no_grad()
def logits(live: Any, **inputs: Any) -> Tensor:
    return live(**(inputs or {"input_ids": IDS}), use_cache=False).logits


@torch.no_grad()
def tapped(family: str, *taps: Tap) -> Tensor:
    """Logits with taps in place."""
    live = model(family)
    wiring = TapHooks(live, Sites(live), {"test": list(taps)}, lambda call: None)
    try:
        return logits(live)
    finally:
        wiring.remove()


def changed(family: str, *paths: str) -> Tensor:
    """Logits of a copy in which the Linears at these paths of every layer write zeros."""
    live = copy.deepcopy(model(family))
    for layer in Sites(live).layers:
        for path in paths:
            for parameter in layer.get_submodule(path).parameters():
                parameter.data.zero_()
    return logits(live)


def every_layer(family: str, kind: Any, function: Any, when: Any = "after", act: Any = "replace") -> list[Tap]:
    return [Tap(Site(kind, layer), when, act, function) for layer in range(Sites(model(family)).n_layers)]


def zeros(call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
    return torch.zeros_like(outputs)


SITES = [Site("embedding"), Site("layer", 0), Site("attention", 1), Site("ffn", 1), Site("norm"), Site("head")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_taps_see_tensors_of_the_right_shape(family: str, site: Site) -> None:
    sites = Sites(model(family))
    if site.kind == "norm" and sites.family.norm is None:
        pytest.skip("encoders normalise inside each layer")
    seen: dict[str, tuple[int, ...]] = {}

    def before(call: Call, inputs: Tensor) -> None:
        seen["before"] = tuple(inputs.shape)

    def after(call: Call, inputs: Tensor, outputs: Tensor) -> None:
        seen["inputs"], seen["after"] = tuple(inputs.shape), tuple(outputs.shape)

    same = tapped(family, Tap(site, "before", "add", before), Tap(site, "after", "add", after))
    assert torch.equal(same, logits(model(family))), "taps that return None changed bits"
    first = tuple(IDS.shape) if site.kind == "embedding" else (*IDS.shape, sites.width)
    assert seen["before"] == seen["inputs"] == first
    assert seen["after"] == (*IDS.shape, VOCABULARY if site.kind == "head" else sites.width)


@pytest.mark.parametrize("family", FAMILIES)
def test_linears_of_the_ffn(family: str) -> None:
    sites = Sites(model(family))
    row = sites.family
    assert sites.n_layers == len(sites.layers) >= 2
    for layer in range(sites.n_layers):
        *readers, writer = sites.ffn_linears(layer)
        assert len(readers) == (2 if row.gated and family not in FUSED else 1)
        inner = _features(writer)[0] * (2 if family in FUSED else 1)
        assert all(_features(reader) == (sites.width, inner) for reader in readers)
        assert _features(writer)[1] == sites.width


def _features(linear: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a Linear or of GPT-2's transposed one."""
    rows, columns = linear.weight.shape  # type: ignore[union-attr, misc]
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


@pytest.mark.parametrize("family", FAMILIES)
def test_gating_matrix_goes_through_the_activation(family: str) -> None:
    """With the gating matrix at zero a gated FFN says nothing, and a plain one the same of every token: its biases."""
    live = copy.deepcopy(model(family))
    sites = Sites(live)
    gate = sites.ffn_linears(0)[0]
    gate.weight.data.zero_()  # type: ignore[union-attr, operator]
    seen: list[Tensor] = []
    _, leave = sites.module(Site("ffn", 0))
    leave.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits(live)
    assert (seen[0] - seen[0][:1, :1]).abs().max() < 1e-6
    plain = getattr(gate, "bias", None) is not None
    assert (seen[0].abs().max() < 1e-6) == (sites.family.gated or not plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_is_the_ffns_own(family: str) -> None:
    from transformers.activations import ACT2FN

    sites = Sites(model(family))
    own = [type(module) for name, module in sites.layers[0].named_modules() if "act" in name.rsplit(".", 1)[-1]]
    assert type(ACT2FN[sites.activation]) in own


@pytest.mark.parametrize("family", FAMILIES)
def test_silent_ffn_equals_zeroed_weights(family: str) -> None:
    wanted = changed(family, Sites(model(family)).family.ffn_out)
    torch.testing.assert_close(tapped(family, *every_layer(family, "ffn", zeros)), wanted, **CLOSE)
    minus = every_layer(family, "ffn", lambda call, inputs, outputs: -outputs, act="add")
    torch.testing.assert_close(tapped(family, *minus), wanted, **CLOSE)
    assert (wanted - logits(model(family))).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_silent_attention_equals_zeroed_weights(family: str) -> None:
    wanted = changed(family, ATTENTION_OUT.get(family, "self_attn.o_proj"))
    torch.testing.assert_close(tapped(family, *every_layer(family, "attention", zeros)), wanted, **CLOSE)
    assert (wanted - logits(model(family))).abs().max() > 0.1


@pytest.mark.parametrize("family", DECODERS)
def test_skipped_layers_equal_layers_that_write_nothing(family: str) -> None:
    wanted = changed(family, Sites(model(family)).family.ffn_out, ATTENTION_OUT.get(family, "self_attn.o_proj"))
    skipped = every_layer(family, "layer", lambda call, inputs, outputs: inputs)
    torch.testing.assert_close(tapped(family, *skipped), wanted, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_input_of_the_ffn_is_what_a_tap_before_it_makes(family: str) -> None:
    """Before, `replace` gives the FFN zeros: then it says FFN(0), computed by its own modules."""
    live = model(family)
    sites = Sites(live)
    enter, leave = sites.module(Site("ffn", 0))
    said: list[Tensor] = []
    handle = leave.register_forward_hook(lambda _module, _inputs, output: said.append(output))
    tapped(family, Tap(Site("ffn", 0), "before", "replace", lambda call, inputs: torch.zeros_like(inputs)))
    with torch.no_grad():
        middle = enter(torch.zeros(*IDS.shape, sites.width))
        wanted = middle if enter is leave else leave(middle)
    handle.remove()
    torch.testing.assert_close(said[0], wanted, **CLOSE)


@pytest.mark.parametrize("family", thinned(FAMILIES, USUAL))
def test_input_of_attention_may_come_as_a_keyword(family: str) -> None:
    """Adding v before attention and taking it off again before it leaves the bits nearly alone; adding it does not."""
    taps = [
        Tap(Site("attention", 0), "before", "add", lambda call, inputs: torch.ones_like(inputs)),
        Tap(Site("attention", 0), "before", "replace", lambda call, inputs: inputs - 1),
    ]
    torch.testing.assert_close(tapped(family, *taps), logits(model(family)), rtol=1e-4, atol=1e-4)
    assert (tapped(family, taps[0]) - logits(model(family))).abs().max() > 1e-2


@pytest.mark.parametrize("family", thinned(FAMILIES, USUAL))
def test_embedding_equals_embeddings_given(family: str) -> None:
    live = model(family)
    embedding, _ = Sites(live).module(Site("embedding"))
    shift = torch.linspace(-1, 1, Sites(live).width)
    with torch.no_grad():
        wanted = logits(live, inputs_embeds=embedding(IDS) + shift)
    taps = Tap(Site("embedding"), "after", "add", lambda call, inputs, outputs: shift.expand_as(outputs))
    torch.testing.assert_close(tapped(family, taps), wanted, **CLOSE)


@pytest.mark.parametrize("family", DECODERS)
def test_norm_and_head_are_what_logits_are_made_of(family: str) -> None:
    live = model(family)
    head, _ = Sites(live).module(Site("head"))
    seen: list[Tensor] = []
    tap = Tap(Site("norm"), "after", "replace", lambda call, inputs, outputs: seen.append(2 * outputs) or seen[-1])
    found = tapped(family, tap)
    with torch.no_grad():
        torch.testing.assert_close(found, _capped(live, head(seen[0])), **CLOSE)
    plus = Tap(Site("head"), "after", "add", lambda call, inputs, outputs: torch.ones_like(outputs))
    with torch.no_grad():
        torch.testing.assert_close(tapped(family, tap, plus), _capped(live, head(seen[0]) + 1), **CLOSE)


def _capped(live: Any, raw: Tensor) -> Tensor:
    cap = getattr(live.config, "final_logit_softcapping", None)
    return raw if cap is None else cap * torch.tanh(raw / cap)


@pytest.mark.parametrize("family", thinned(FAMILIES, USUAL))
def test_any_module_is_a_site_by_its_path(family: str) -> None:
    sites = Sites(model(family))
    name = next(name for name, module in model(family).named_modules() if module is sites.ffn_linears(0)[-1])
    by_path = tapped(family, Tap(Site("module", path=name), "after", "replace", zeros))
    by_site = tapped(family, Tap(Site("ffn", 0), "after", "replace", zeros))
    torch.testing.assert_close(by_path, by_site, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "olmo2", "glm4", "exaone4"])
def test_what_is_added_to_an_ffn_joins_the_residual_stream(family: str) -> None:
    """A norm between the two would scale it."""
    change = torch.randn(tiny_ids(2, 12).shape[1], Sites(model(family)).width)

    def add(call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        return change.expand_as(outputs)

    def stream(*taps: Tap) -> Tensor:
        seen: list[Tensor] = []

        def look(call: Call, inputs: Tensor, outputs: Tensor) -> None:
            seen.append(outputs)

        tapped(family, *taps, Tap(Site("layer", 0), "after", "add", look))
        return seen[0]

    added = stream(Tap(Site("ffn", 0), "after", "add", add)) - stream()
    torch.testing.assert_close(added, change.expand_as(added), **CLOSE)


def test_the_residual_stream_of_one_layer_among_several_streams() -> None:
    sites = Sites(model("gemma3n"))
    assert sites.module(Site("ffn", 1))[1] is sites.layers[1].post_feedforward_layernorm


def test_a_norm_acts_before_what_is_added_to_its_ffn() -> None:
    """In either order of the grafts."""
    norm = Tap(
        site=Sites(model("gemma2")).norms(0)[-1],
        when="after",
        act="replace",
        function=lambda call, inputs, outputs: 3 * outputs,
    )
    residue = Tap(site=Site("ffn", 0), when="after", act="add", function=lambda call, inputs, outputs: inputs)
    torch.testing.assert_close(tapped("gemma2", norm, residue), tapped("gemma2", residue, norm), **CLOSE)


def test_a_norm_in_some_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo Hybrid has norms before the sublayers of some layers, and after those of others."""
    changes = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    config = ("OlmoHybridConfig", "OlmoHybridForCausalLM", GROUPED | changes)
    monkeypatch.setitem(FAMILY_CONFIGS, "olmo_hybrid", config)
    live = tiny_model("olmo_hybrid")
    sites = Sites(live)
    before, after = [sites.module(Site("ffn", layer))[1] for layer in range(2)]
    assert before is sites.layers[0].mlp
    assert after is sites.layers[1].post_feedforward_layernorm
    monkeypatch.setitem(ROWS, "olmo_hybrid", sites.family)
    assert Sites(live).family == sites.family, "repeated by a user"


def test_negative_layers_count_from_the_end() -> None:
    last = tapped("llama", Tap(Site("ffn", -1), "after", "replace", zeros))
    assert torch.equal(last, tapped("llama", Tap(Site("ffn", 1), "after", "replace", zeros)))


def test_a_layers_input_is_the_last_ones_output() -> None:
    seen: list[Tensor] = []

    def look(call: Call, inputs: Tensor, outputs: Tensor) -> None:
        seen.extend([inputs, outputs])

    tapped("bert", *every_layer("bert", "layer", look))
    assert torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "block-state"])
def test_norms_of_a_layer_are_all_that_run_over_its_width(family: str) -> None:
    sites = Sites(model(family))
    ran: list[nn.Module] = []
    for module in sites.layers[1].modules():
        name = type(module).__name__
        if name.endswith("Norm"):
            module.register_forward_hook(lambda module, _inputs, output: ran.append(module))
    logits(model(family))
    wide = [module for module in ran if _width(module) in (sites.width, None)]
    if family == "olmo2":
        wide = [module for module in wide if module is not sites.layers[1].self_attn.q_norm]
    assert [sites.module(site)[0] for site in sites.norms(1)] == wide
    assert wide
    for module in ran:
        module._forward_hooks.clear()


def _width(norm: nn.Module) -> int | None:
    weight = getattr(norm, "weight", None)
    return None if weight is None else weight.shape[0]


def test_positions_count_real_tokens() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert Sites(model("bert")).positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]  # type: ignore[union-attr]
    assert Sites(model("roberta")).positions(mask) is None, "it counts from its ids"


@pytest.mark.parametrize(
    ("site", "named"),
    [
        (Site("ffn", 2), "layer 2"),
        (Site("ffn"), "ffn"),
        (Site("module", path="model.layers.0.mpl"), "'model.layers.0.mpl'"),
    ],
)
def test_missing_sites(site: Site, named: str) -> None:
    with pytest.raises(TapError) as error:
        tapped("llama", Tap(site, "after", "replace", zeros))
    assert named in str(error.value)
    assert not any(module._forward_pre_hooks for module in model("llama").modules()), "hooks stayed after the error"


def test_encoders_have_no_last_norm() -> None:
    with pytest.raises(TapError) as error:
        tapped("bert", Tap(Site("norm"), "after", "replace", zeros))
    assert "no norm" in str(error.value)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_structure_that_is_found_equals_the_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[model(family).config.model_type]
    monkeypatch.delitem(ROWS, model(family).config.model_type)
    assert Sites(model(family)).family == row


MISFITS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "layers": ({"layers": "norm"}, ["layers is norm"]),
    "no path": ({"layers": "blocks"}, ["layers is 'blocks'"]),
    "span": ({"ffn": "feed"}, ["ffn is 'feed'"]),
    "norm": ({"norm": "rotary_emb"}, ["norm is rotary_emb"]),
    "outside": ({"ffn_in": ["self_attn.k_proj"], "gated": False}, ["'self_attn.k_proj'", "mlp"]),
    "end": ({"ffn": {"entry": "mlp", "exit": "mlp.out"}}, ["'mlp.out'"]),
    "end before": ({"ffn": {"entry": "mlp", "exit": "input_layernorm"}}, ["input_layernorm", "before"]),
    "no text": ({"ffn": {"entry": "mlp", "exit": None}}, ["'exit': None"]),
    "no entry": ({"ffn": {"exit": "mlp"}}, ["'exit': 'mlp'", "entry"]),
    "list": ({"ffn": ["mlp", "mlp"]}, ["'mlp', 'mlp'"]),
    "no linear": ({"ffn_out": "mlp.out"}, ["'mlp.out'"]),
    "order": ({"ffn_in": ["mlp.up_proj", "mlp.gate_proj"]}, ["('mlp.gate_proj', 'mlp.up_proj')"]),
    "gated": ({"gated": False}, ["gated is False", "True"]),
    "embedding": ({"embedding": "norm"}, ["embedding is 'norm'", "'embed_tokens'"]),
    "body": ({"body": "layers.0"}, ["body is 'layers.0'"]),
    "causal": ({"causal": False}, ["causal is False", "True"]),
    "positions": ({"counts_positions": True}, ["counts_positions is True", "False"]),
    "norms": ({"norms": ["input_layernorm"]}, ["norms is", "'post_attention_layernorm'"]),
    "text": ({"text_config": "text_config"}, ["text_config is 'text_config'", "None"]),
    "no attention": ({"attention": "mlp"}, ["attention is mlp"]),
    "half an attention": ({"attention": "self_attn.o_proj"}, ["attention", "self_attn.o_proj"]),
    "activation": ({"activation": "gelu"}, ["activation is gelu", "SiLU"]),
    "no activation": ({"activation": "hidden_function"}, ["activation is hidden_function"]),
    "field": ({"act": "gelu"}, ["unexpected keyword argument 'act'"]),
}
"""Changes of a row, and what the error names."""


def test_frequencies_that_depend_on_positions_do_not_hide_the_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ROWS, "llama")
    plain = Sites(tiny_model("llama"))
    live = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0})
    assert Sites(live).family == plain.family


@pytest.mark.parametrize("name", MISFITS)
def test_a_row_that_does_not_fit_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, named = MISFITS[name]
    monkeypatch.setitem(ROWS, "qwen3", ROWS["qwen3"])  # restored after the test
    with pytest.raises(UnknownFamilyError) as error:  # noqa: PT012
        register_family("qwen3", _fields() | changes)
        Sites(model("qwen3"))
    assert all(text in str(error.value) for text in named), error.value


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in (*FAMILIES[1:], *MORE_FAMILIES))]
)
def test_a_row_that_a_user_repeats_is_taken(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live = tiny_model(family)
    row = Sites(live).family
    monkeypatch.setitem(ROWS, live.config.model_type, row)  # a copy, which is therefore checked
    monkeypatch.delitem(PROVEN_FAMILIES, live.config.model_type, raising=False)
    assert dataclasses.replace(Sites(live).family, separates_documents=row.separates_documents) == row


@pytest.mark.parametrize("end", ["", "mlp", "mlp.down_proj"])
def test_a_row_that_ends_before_a_norm_is_refused(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Sites(tiny_model("olmo2")).family
    monkeypatch.setitem(ROWS, "olmo2", dataclasses.replace(row, ffn=Sublayer("mlp", end)))
    with pytest.raises(UnknownFamilyError) as error:
        Sites(tiny_model("olmo2"))
    assert "exit: post_feedforward_layernorm" in str(error.value)


def test_swapped_sublayers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {"attention": "mlp", "ffn": "self_attn", "ffn_in": ["self_attn.q_proj"], "ffn_out": "self_attn.o_proj"}
    monkeypatch.setitem(ROWS, "olmo", ROWS["olmo"])
    with pytest.raises(UnknownFamilyError) as error:  # noqa: PT012
        register_family("olmo", _fields() | swapped | {"gated": False})
        Sites(model("olmo"))
    assert "attention is mlp" in str(error.value)


def test_positions_that_begin_behind_the_padding_are_not_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "roberta", dataclasses.replace(ROWS["bert"]))
    with pytest.raises(UnknownFamilyError) as error:
        Sites(tiny_model("roberta"))
    assert "counts_positions is False" in str(error.value)


def _fields() -> dict[str, Any]:
    """The row of the tiny Qwen 3, as a recipe writes it."""
    lists = {"ffn_in": ["mlp.gate_proj", "mlp.up_proj"], "attention": "self_attn", "ffn": "mlp"}
    return {name: getattr(ROWS["qwen3"], name) for name in ("layers", "embedding", "norm", "ffn_out", "gated")} | lists


def test_a_row_whose_head_reads_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Sites(tiny_model("opt")).family
    assert row.body == "decoder"
    monkeypatch.setitem(ROWS, "opt", dataclasses.replace(row, body=""))
    with pytest.raises(UnknownFamilyError) as error:
        Sites(tiny_model("opt"))
    assert "body is OPTModel" in str(error.value)


def test_a_recipe_describes_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "qwen3", ROWS["qwen3"])
    folder, fields = save_tiny_backbone(tmp_path, "qwen3"), _fields()
    for family in ("llama", fields):
        loaded = BackboneConfig(name=str(folder), device="cpu", family=family).load()
        assert loaded.sites.family.ffn_in == ROWS["llama"].ffn_in
    with pytest.raises(UnknownFamilyError) as error:
        BackboneConfig(name=str(folder), device="cpu", family="lama").load()
    assert "'lama'" in str(error.value)


@pytest.mark.parametrize(("mine", "yours"), [(Site("ffn", 1), Site("ffn", 1)), (Site("ffn", 1), Site("ffn", -1))])
def test_two_grafts_that_replace_at_one_site_are_named(mine: Site, yours: Site) -> None:
    live = model("llama")
    taps = {"danish": [Tap(mine, "after", "replace", zeros)], "legal": [Tap(yours, "after", "replace", zeros)]}
    with pytest.raises(TapConflictError) as error:
        TapHooks(live, Sites(live), taps, lambda call: None)
    assert "'danish' and 'legal'" in str(error.value)
    assert "after ffn" in str(error.value)


def test_several_grafts_may_add_at_one_site() -> None:
    live = model("llama")
    one = Tap(Site("ffn", 1), "after", "add", lambda call, inputs, outputs: -outputs / 2)
    taps = {"danish": [one], "legal": [Tap(Site("ffn", 1), "after", "add", lambda call, inputs, outputs: -outputs)]}
    wiring = TapHooks(live, Sites(live), taps, lambda call: None)
    found = logits(live)
    wiring.remove()
    torch.testing.assert_close(found, tapped("llama", Tap(Site("ffn", 1), "after", "replace", zeros)), **CLOSE)
