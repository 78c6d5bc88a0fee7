"""Every place and every option of a PEFT adapter: one expert equals PEFT's own model, or is refused with a remedy."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import config as lora
from safetensors.torch import load_file, save_file
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, RecipeError, TapError
from graftlm.generation.adapters import inspect_adapter
from graftlm.grafted.graft_set import GraftSet, MultiGraftModel
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.token_routing.adapters import PLAIN_FIELDS
from graftlm.store.artifact import load_graft, save_graft
from tiny import tiny_ids, tiny_model, tiny_tokenizer
from token_routing.tools import change_config

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::RuntimeWarning"
)  # PEFT's, and on names of bases
MERGE, CONVERT, SUBTRACT, TRAIN = "merge", "convert", "subtract", "train"
SENTENCE = {
    MERGE: r"merge it into a backbone of its own \(PeftModel.from_pretrained\(model, '(.+)'\).merge_and_unload\(\)",
    CONVERT: r"convert it \(peft.save_as_lora\(NEW, PeftModel.from_pretrained\(model, '(.+)'\), rank=R\)\)",
    SUBTRACT: r"convert it \(peft_model.save_pretrained\(NEW, path_initial_model_for_weight_conversion=START\)",
    TRAIN: "train it as plain LoRA",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A PEFT adapter: its backbone's family, the options of its config, and changes to the backbone's config."""

    options: dict[str, Any]
    family: str = "llama"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def model(self) -> Any:
        return tiny_model(self.family, **self.changes).to(self.dtype)

    def adapter(self, folder: Path) -> PeftModel:
        """The adapter on its backbone with random weights, also written to `folder`; START is the one before."""
        values = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "fan_in_fan_out": self.family == "gpt2"}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = get_peft_model(self.model(), LoraConfig(**(values | self.options)))
        init, model.peft_config["default"].init_lora_weights = model.peft_config["default"].init_lora_weights, True
        model.save_pretrained(str(folder / "START"))
        model.peft_config["default"].init_lora_weights = init
        return written(model, folder)


def written(model: PeftModel, folder: Path) -> PeftModel:
    """Add noise to what trains, and save."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "indices" not in name:
                parameter += (torch.randn(parameter.shape, generator=generator) * 0.2).to(parameter.dtype)
    model.save_pretrained(str(folder))
    return model.eval()


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_BOTH = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
PLACES = {
    "`lm_head`": Case({"target_modules": ["lm_head", "q_proj"]}, changes=UNTIED),
    "`lm_head`, tied to the embedding": Case({"target_modules": ["lm_head"]}, changes=TIED),
    "`embed_tokens`": Case({"target_modules": ["embed_tokens"]}, changes=UNTIED),
    "`embed_tokens`, tied to the head": Case({"target_modules": ["embed_tokens"]}, changes=TIED),
    "`ensure_weight_tying`": Case(_BOTH, changes=TIED),
    "`ensure_weight_tying`, scaled embedding (Gemma)": Case(_BOTH, "gemma3", TIED),
    "`all-linear`": Case({"target_modules": "all-linear"}),
    "GPT-2's `Conv1D` (`fan_in_fan_out`) and its head": Case({"target_modules": ["c_attn", "c_fc", "lm_head"]}, "gpt2"),
    "OPT's head, which calls the decoder": Case({"target_modules": ["lm_head", "fc1"]}, "opt"),
    "BERT's `cls.predictions.transform.dense`": Case({"target_modules": ["cls.predictions.transform.dense"]}, "bert"),
    "BERT's `cls.predictions.decoder`": Case({"target_modules": ["cls.predictions.decoder", "query"]}, "bert"),
    "RoBERTa's `lm_head.dense` and `lm_head.decoder`": Case(
        {"target_modules": ["lm_head.dense", "decoder"]}, "roberta"
    ),
    "DistilBERT's `vocab_transform` and `vocab_projector`": Case(
        {"target_modules": ["vocab_transform", "vocab_projector"]}, "distilbert"
    ),
    "ModernBERT's `head.dense` and `decoder`": Case({"target_modules": ["head.dense", "decoder"]}, "modernbert"),
    "ELECTRA's `generator_predictions.dense` and `generator_lm_head`": Case(
        {"target_modules": ["generator_predictions.dense", "generator_lm_head"]}, "electra"
    ),
}
OPTIONS = {
    "`r`, `lora_alpha`, `target_modules`": Case({"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"]}),
    "`use_rslora`": Case({"use_rslora": True}),
    "`rank_pattern`": Case({"rank_pattern": {"layers.1.self_attn.q_proj": 6}}),
    "`alpha_pattern`": Case({"alpha_pattern": {"layers.1.self_attn.q_proj": 3}}),
    "`exclude_modules`": Case({"exclude_modules": ["model.layers.0.self_attn.q_proj"]}),
    "`layers_to_transform`, `layers_pattern`": Case({"layers_to_transform": [1], "layers_pattern": "layers"}),
    "`lora_dropout`, which acts in PEFT's training alone": Case({"lora_dropout": 0.5}),
    "`init_lora_weights`: `gaussian`": Case({"init_lora_weights": "gaussian"}),
    "`init_lora_weights`: `orthogonal`": Case({"init_lora_weights": "orthogonal"}),
    "`init_lora_weights`: `eva` (`eva_config`)": Case({"init_lora_weights": "eva", "eva_config": peft.EvaConfig()}),
    "`init_lora_weights`: `mica`": Case({"init_lora_weights": "mica"}),
    "`init_lora_weights`: false": Case({"init_lora_weights": False}),
}
ACTS = {**PLACES, **OPTIONS}
_DOWN_EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
REFUSED = {
    "`init_lora_weights`: `pissa`": (Case({"init_lora_weights": "pissa"}), SUBTRACT),
    "`init_lora_weights`: `olora`": (Case({"init_lora_weights": "olora"}), SUBTRACT),
    "`use_dora`": (Case({"use_dora": True, "target_modules": ["q_proj", "lm_head"]}, changes=UNTIED), MERGE),
    "`bias`: `all`": (Case({"bias": "all", "target_modules": ["c_attn"]}, "gpt2"), MERGE),
    "`bias`: `lora_only`": (Case({"bias": "lora_only", "target_modules": ["c_attn"]}, "gpt2"), MERGE),
    "`lora_bias`": (Case({"lora_bias": True}), TRAIN),
    "`modules_to_save`": (Case({"modules_to_save": ["lm_head"]}, changes=UNTIED), MERGE),
    "`trainable_token_indices`": (Case({"trainable_token_indices": [5, 6]}), MERGE),
    "`target_parameters`": (Case(_DOWN_EXPERTS, "mixtral"), MERGE),
    "`layer_replication`": (Case({"layer_replication": [(0, 2), (1, 2)]}), TRAIN),
    "`alora_invocation_tokens`": (Case({"alora_invocation_tokens": [5]}), TRAIN),
    "`use_bdlora`": (Case({"use_bdlora": lora.BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2)}), MERGE),
    "`kasa_config`": (Case({"kasa_config": lora.KasaConfig()}), MERGE),
    "`velora_config`": (Case({"velora_config": lora.VeloraConfig()}), CONVERT),
    "`monteclora_config`": (Case({"monteclora_config": lora.MontecloraConfig()}), CONVERT),
    "`use_qalora`": (Case({"use_qalora": True}), CONVERT),
}
# Made from another row by its config, where PEFT needs bitsandbytes, Megatron, data or further adapters.
REFUSED_BY_CONFIG = {
    "`init_lora_weights`: `corda`": ({"init_lora_weights": "corda"}, SUBTRACT),
    "`init_lora_weights`: `lora_ga`": ({"init_lora_weights": "lora_ga"}, SUBTRACT),
    "`init_lora_weights`: `loftq`": ({"init_lora_weights": "loftq"}, MERGE),
    "`init_lora_weights`: one that GraftLM does not know": ({"init_lora_weights": "newinit"}, TRAIN),
    "`megatron_config`": ({"megatron_config": {"hidden_size": 48}}, TRAIN),
    "`arrow_config`": ({"arrow_config": {"top_k": 1}}, "name the adapters that it routes as experts"),
}
# Fields that say nothing of the update: where the adapter comes from, how PEFT runs it, how an initialisation was made.
_INERT = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core "
    "qalora_group_size runtime_config loftq_config corda_config lora_ga_config"
)


# Rows like others, which only `-m ''` runs.
_LONGER = re.compile(
    "Distil|ELECTRA|ModernBERT|RoBERTa|scaled|gaussian|orthogonal|false|dropout|exclude|lora_only|pissa|velora|qalora"
)


def params(rows: Any) -> list[Any]:
    return [pytest.param(row, marks=[pytest.mark.slow] if _LONGER.search(row) else []) for row in rows]


def logits_of(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def routed(case: Case, folder: Path | str, model: Any = None) -> GraftedModel:
    """The routing with this adapter as its one expert, which then has the weight 1 at every token."""
    backbone = Backbone.wrap(model or case.model(), tiny_tokenizer(), "tiny")
    values = {"kind": "token-routing", "experts": {"one": {"path": str(folder)}}}
    return GraftedModel(backbone, {"graft": build_graft(graft_config(values), backbone)}).eval()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """To a share of the largest number: float32 sums of other orders differ by about 1e-6 of it."""
    gap = (actual - expected).abs().max() / expected.abs().max()
    assert gap < tolerance, f"a gap of {gap:.1e} of the largest"


def factor_gradients(parameters: Any) -> dict[str, Tensor]:
    """PEFT's gradients by `PATH.a` and `PATH.b`, of the shapes that experts have here."""
    found = {}
    for name, parameter in parameters:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])\.default(?:\.weight)?", name)
        if match is not None and parameter.grad is not None:  # MiCA freezes B
            found[f"{match[1]}.{match[2].lower()}"] = parameter.grad if match[2] == "A" else parameter.grad.T
    return found


@pytest.mark.parametrize("row", params(ACTS))
def test_one_expert_equals_peft(row: str, tmp_path: Path) -> None:
    case, ids = ACTS[row], tiny_ids()
    case.adapter(tmp_path)
    theirs = PeftModel.from_pretrained(case.model(), str(tmp_path), is_trainable=True).eval()
    expected = theirs(input_ids=ids).logits
    expected.square().mean().backward()
    with routed(case, tmp_path) as model:
        for parameter in model.grafts.parameters():
            parameter.requires_grad_(True)
        actual = model(ids).logits
        actual.square().mean().backward()
        graft: Any = model.grafts["graft"]
        own = {f"{path}.{f}": getattr(mix, f)[0].grad for path, mix in graft._mixtures_by_path() for f in "ab"}
    assert_close(actual, expected)
    assert (expected - logits_of(case.model(), ids)).abs().max() > 0.1  # the adapter does something
    gradients = factor_gradients(theirs.named_parameters(remove_duplicate=False))
    assert gradients.keys() <= own.keys()
    assert len(gradients) * 2 >= len(own)
    if not case.options.get("ensure_weight_tying"):  # PEFT shares those factors, so their gradients are sums
        for name, gradient in gradients.items():
            assert_close(own[name], gradient, 1e-4)


@pytest.mark.parametrize("family", ["llama", pytest.param("opt", marks=pytest.mark.slow), "bert"])
def test_a_new_expert_of_the_head_trains_as_in_peft_and_is_read_by_peft(family: str, tmp_path: Path) -> None:
    """One expert of head and embedding: PEFT reads what was written, with equal logits and gradients."""
    head = "cls.predictions.transform.dense" if family == "bert" else "lm_head"
    backbone, ids = Backbone.wrap(tiny_model(family), tiny_tokenizer(), "tiny"), tiny_ids()
    values = {"kind": "token-routing", "experts": {"one": {"rank": 2, "alpha": 3, "targets": [head, "embedding"]}}}
    graft: Any = build_graft(graft_config(values), backbone)
    with GraftedModel(backbone, {"graft": graft}) as model:
        optimizer = torch.optim.SGD(model.trainable_parameters().values(), lr=0.3)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            losses.append(loss := model.train()(ids, labels=ids).loss)
            loss.backward()
            optimizer.step()
        assert losses[-1] < losses[0]
        assert all(expert.b.any() for expert in graft.factors("one").values())
        graft.zero_grad()
        expected = model.eval()(ids).logits
        expected.square().mean().backward()
        own = {f"{path}.{f}": getattr(mix, f)[0].grad for path, mix in graft._mixtures_by_path() for f in "ab"}
        save_graft(graft, backbone, tmp_path / "graft")
        graft.write_adapter("one", tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(tiny_model(family), str(tmp_path / "adapter"), is_trainable=True).eval()
    actual = theirs(input_ids=ids).logits
    actual.square().mean().backward()
    assert_close(actual, expected)
    gradients = factor_gradients(theirs.named_parameters())
    assert own.keys() == gradients.keys()
    for name, gradient in own.items():
        assert_close(gradient, gradients[name], 1e-4)
    with GraftedModel(backbone, {"graft": load_graft(tmp_path / "graft", backbone)}) as model:
        assert_close(logits_of(model, ids), expected)


def test_a_half_precision_backbone_keeps_float32_factors_as_peft_does(tmp_path: Path) -> None:
    """Both are as far from the float32 result: the rounding of the backbone's states alone."""
    options, ids = {"target_modules": ["q_proj", "lm_head"]}, tiny_ids()
    case, exact = Case(options, changes=UNTIED, dtype=torch.bfloat16), Case(options, changes=UNTIED)
    theirs = case.adapter(tmp_path)
    assert {parameter.dtype for name, parameter in theirs.named_parameters() if "lora_" in name} == {torch.float32}
    rounded = exact.model()
    rounded.load_state_dict(case.model().state_dict())
    truth = logits_of(PeftModel.from_pretrained(rounded, str(tmp_path)).eval(), ids)
    with routed(case, tmp_path) as model:
        assert {parameter.dtype for parameter in model.grafts.parameters()} == {torch.float32}
        ours = (logits_of(model, ids) - truth).square().mean().sqrt()
    assert ours < 1.2 * (logits_of(theirs, ids) - truth).square().mean().sqrt()


def test_rows_of_one_batch_have_their_own_heads(tmp_path: Path) -> None:
    """The engine's batches: each row's logits are those of its expert alone, and of the bare backbone without one."""
    case, ids = PLACES["`lm_head`"], tiny_ids(2, 9)
    case.adapter(tmp_path)
    prompts = ids.tolist()
    with routed(case, tmp_path) as model, torch.no_grad():
        expected = model(ids).logits[:, -2:]
        bare = logits_of(case.model(), ids)[:, -2:]
        graft: Any = model.grafts["graft"]
    multi = MultiGraftModel(Backbone.wrap(case.model(), tiny_tokenizer(), "tiny"))
    expert, none = GraftSet((("one", graft),)), GraftSet()
    multi.wire([expert, none])
    batch, first = multi.prefill(expert, [prompt[:-1] for prompt in prompts], ["a", "b"])
    assert_close(first, expected[:, 0])
    other, first = multi.prefill(none, [prompts[0][:-1]], ["c"])
    assert_close(first[0], bare[0, 0])
    assert batch.join(other)
    logits = multi.decode(batch, [prompts[0][-1], prompts[1][-1], prompts[0][-1]])
    assert_close(logits, torch.stack([*expected[:, 1], bare[0, 1]]))
    multi.detach()


def test_the_tensor_logits_to_keep_is_refused_and_a_number_is_the_last_tokens(tmp_path: Path) -> None:
    case, ids = PLACES["`lm_head`"], tiny_ids()
    case.adapter(tmp_path)
    with routed(case, tmp_path) as model, torch.no_grad():
        expected = model(ids).logits
        assert_close(model(ids, logits_to_keep=3).logits, expected[:, -3:])
        with pytest.raises(TapError):
            model(ids, logits_to_keep=torch.tensor([1, 2]))
        assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("change", [{"r": 0}, {"rank_pattern": {"q_proj": 7}}, {"lora_alpha": None}, {"r": -4}])
def test_a_config_that_is_not_of_its_tensors_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    case = Case({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
    case.adapter(tmp_path)
    routed(case, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "copy the expert again with its config" in refusal(case, tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target_modules": ["k_proj"]}, "has factors of model.layers.0.self_attn.q_proj"),
        ({"target_modules": ["q_proj", "up_proj"]}, "lacks the factors of model.layers.0.mlp.up_proj, which its"),
        ({"layers_to_transform": [0]}, "has factors of model.layers.1.self_attn.q_proj"),
        ({"layers_to_transform": ["x"]}, "has factors of model.layers.0.self_attn.q_proj"),
        ({"target_modules": 5}, "adapter_config.json"),
        ({"target_modules": "q_proj("}, "adapter_config.json"),
        ({"alpha_pattern": {"q_proj(": 4}}, "adapter_config.json"),
        ({"alpha_pattern": [1]}, "adapter_config.json"),
    ],
)
def test_modules_that_a_config_does_not_name_are_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """PEFT would leave their factors out, or make new ones for a module that lacks them."""
    case = Case({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
    case.adapter(tmp_path)
    routed(case, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert sentence in refusal(case, tmp_path)


LAYER = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("settings", "change", "sentence"),
    [
        ({"target_modules": ["q_proj"]}, {"ensure_weight_tying": True}, None),
        ({"target_modules": "all-linear"}, {"exclude_modules": ["q_proj"]}, "has factors of model.layers.0.self_attn."),
        ({"target_modules": "All-Linear"}, {}, None),
        (
            {"target_modules": ["q_proj", "k_proj"]},
            {"target_modules": None},
            "has factors of model.layers.0.self_attn.",
        ),
        ({"target_modules": ["q_proj"]}, {"base_model_name_or_path": 5}, "base_model_name_or_path"),
        ({"target_modules": ["q_proj"]}, {"lora_alpha": 10**400}, "lora_alpha"),
        ({"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", None]}, "target_modules"),
    ],
)
def test_a_config_is_read_as_peft_reads_it(
    settings: dict[str, Any], change: dict[str, Any], sentence: str | None, tmp_path: Path
) -> None:
    case = Case({"r": 4, "lora_alpha": 8} | settings)
    case.adapter(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if sentence is None:
        routed(case, tmp_path)
    else:
        assert sentence in refusal(case, tmp_path)


@pytest.mark.parametrize("change", ["prefix", "kind", "stray"])
def test_tensors_that_peft_does_not_load_are_refused(change: str, tmp_path: Path) -> None:
    case = Case({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "ensure_weight_tying": True})
    case.adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    if change == "stray":
        tensors |= {LAYER.format(0, "k", part): tensors[LAYER.format(0, "q", part)].clone() for part in "AB"}
    else:
        old, new = {"prefix": ("base_model.model.", ""), "kind": ("lora_A.weight", "lora_embedding_A")}[change]
        tensors = {key.replace(old, new, 1): tensor for key, tensor in tensors.items()}
    save_file(tensors, path)
    refusal(case, tmp_path)


def test_factors_of_two_ranks_are_refused_without_a_backbone(tmp_path: Path) -> None:
    Case({"r": 4, "target_modules": ["q_proj"]}).adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[LAYER.format(0, "q", "B")] = tensors[LAYER.format(0, "q", "B")][:, :3].contiguous()
    save_file(tensors, path)
    assert "has factors of the ranks 4 and 3 at model.layers.0" in inspect_adapter(tmp_path).refusals["token-routing"]


def test_a_layer_without_factors_is_refused(tmp_path: Path) -> None:
    case = Case({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})
    case.adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(path).items() if ".layers.1." not in key}, path)
    assert "lacks the factors of model.layers.1.self_attn.q_proj" in refusal(case, tmp_path)


def refusal(case: Case, folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        routed(case, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("row", params(REFUSED))
def test_a_refusal_names_a_remedy_that_works(row: str, tmp_path: Path) -> None:
    (case, remedy), ids = REFUSED[row], tiny_ids()
    expected = logits_of(adapted := case.adapter(tmp_path), ids)
    message = refusal(case, tmp_path)
    match = re.search(SENTENCE[remedy], message)
    assert match, message
    assert row.split("`")[1] in message
    if remedy == SUBTRACT:
        start = str(tmp_path / "START")
        adapted.save_pretrained(str(tmp_path / "NEW"), path_initial_model_for_weight_conversion=start)
    if remedy in (SUBTRACT, CONVERT):
        convert_or_merge(case, CONVERT if remedy == CONVERT else "", tmp_path, expected)
    elif remedy == MERGE:
        assert match[1] == str(tmp_path)
        convert_or_merge(case, MERGE, tmp_path, expected)


def convert_or_merge(case: Case, remedy: str, folder: Path, expected: Tensor) -> None:
    """Type what the sentence says, and compare."""
    if remedy == MERGE:
        merged: Any = PeftModel.from_pretrained(case.model(), str(folder)).merge_and_unload()
        with GraftedModel(Backbone.wrap(merged, tiny_tokenizer(), "merged")) as model:
            return assert_close(logits_of(model, tiny_ids()), expected)
    if remedy == CONVERT:  # at the full rank, with which a conversion is exact
        peft.save_as_lora(str(folder / "NEW"), PeftModel.from_pretrained(case.model(), str(folder)), rank=48)
    with routed(case, folder / "NEW") as model:
        return assert_close(logits_of(model, tiny_ids()), expected, 1e-4)  # through a decomposition


@pytest.mark.parametrize("row", REFUSED_BY_CONFIG)
def test_a_config_is_refused_with_a_remedy(row: str, tmp_path: Path) -> None:
    Case({}).adapter(tmp_path)
    values, remedy = REFUSED_BY_CONFIG[row]
    change_config(str(tmp_path), **values)
    message = refusal(Case({}), tmp_path)
    assert re.search(SENTENCE.get(remedy, remedy), message), message
    assert next(iter(values)) in message


def test_every_field_of_peft_has_a_row_or_is_refused(tmp_path: Path) -> None:
    """A field that a later PEFT adds fails here, and is refused by then unless it has its default."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    in_rows = {option for case in ACTS.values() for option in case.options} | {"fan_in_fan_out"}
    assert fields >= PLAIN_FIELDS
    assert in_rows | set(_INERT.split()) == PLAIN_FIELDS
    rows = {option for case, _ in REFUSED.values() for option in case.options}
    rows |= {option for values, _ in REFUSED_BY_CONFIG.values() for option in values}
    assert fields - PLAIN_FIELDS <= rows, "fields without a row"
    Case({}).adapter(tmp_path)
    own = (tmp_path / "adapter_config.json").read_text()
    for field in fields - PLAIN_FIELDS:
        change_config(str(tmp_path), **{field: ["other"]})
        assert f"({field})" in refusal(Case({}), tmp_path)
        (tmp_path / "adapter_config.json").write_text(own)


def test_a_new_field_of_peft_is_refused_unless_it_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Case({}).adapter(tmp_path)
    later = dataclasses.make_dataclass("LoraConfig", [("use_later", int, 1)], bases=(LoraConfig,))
    monkeypatch.setattr("graftlm.grafts.token_routing.adapters.LoraConfig", later)
    change_config(str(tmp_path), use_later=1)
    routed(Case({}), tmp_path).detach()
    change_config(str(tmp_path), use_later=2)
    assert "(use_later)" in refusal(Case({}), tmp_path)


# Other methods of PEFT. Those that convert and merge are tried; prompts and the like can only be trained anew.
_NUMBERS = {"target_modules": ["q_proj", "up_proj"]}
CONVERTED = {
    "C3A": {"block_size": 16},
    "DELORA": {},
    "FOURIERFT": {},
    "GRALORA": {},
    "LOHA": {},
    "LOKR": {},
    "MISS": {"r": 4},
    "PSOFT": {},
    "RANDLORA": {},
    "TINYLORA": {},
    "UNILORA": {},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "VERA": {},
    "WAVEFT": {"n_frequency": 100},
}
MERGED = {
    "ADALORA": {"total_step": 10},
    "ADAMSS": {},
    "BOFT": {},
    "DEFT": {},
    "FROD": {},
    "GLORA": {},
    "HIRA": {},
    "HRA": {},
    "IA3": {"feedforward_modules": ["up_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {},
    "OSF": {},
    "PEANUT": {},
    "PVERA": {},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "SUPERTUNING": {},
    "TRAINABLE_TOKENS": {"token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]},
}
TRAINED_ANEW = (
    "ADAPTION_PROMPT BEFT CARTRIDGE CPT LILY MULTITASK_PROMPT_TUNING POLY PREFIX_TUNING PROMPT_TUNING P_TUNING SHADOW"
)


def test_every_other_method_of_peft_is_refused_with_a_remedy(tmp_path: Path) -> None:
    kinds = {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - {"LORA"}
    assert kinds == {*CONVERTED, *MERGED, *TRAINED_ANEW.split(), "XLORA"}
    Case({}).adapter(tmp_path)
    for kind in (*kinds, "A_LATER_METHOD"):
        remedy = CONVERT if kind in CONVERTED else MERGE if kind in MERGED else TRAIN
        change_config(str(tmp_path), peft_type=kind)
        message = refusal(Case({}), tmp_path)
        assert f"has the peft_type {kind}, but LORA is expected: " in message
        assert re.search("as experts" if kind == "XLORA" else SENTENCE[remedy], message), message


def try_other_method(kind: str, options: dict[str, Any], remedy: str, folder: Path) -> None:
    config_class = next(value for key, value in PEFT_TYPE_TO_CONFIG_MAPPING.items() if key.value == kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = config_class(task_type="CAUSAL_LM", **(_NUMBERS | options))
        adapted = written(get_peft_model(tiny_model("llama"), config), folder)
    convert_or_merge(Case({}), remedy, folder, logits_of(adapted, tiny_ids()))


@pytest.mark.parametrize(("kind", "remedy"), [("LOHA", CONVERT), ("IA3", MERGE)])
def test_what_the_refusal_of_another_method_says_works(kind: str, remedy: str, tmp_path: Path) -> None:
    try_other_method(kind, (CONVERTED | MERGED)[kind], remedy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CONVERTED, *MERGED])
def test_what_the_refusal_of_any_other_method_says_works(kind: str, tmp_path: Path) -> None:
    try_other_method(kind, (CONVERTED | MERGED)[kind], CONVERT if kind in CONVERTED else MERGE, tmp_path)


def test_the_baseline_refuses_targets_by_name() -> None:
    """LoRA as a baseline is on the FFN alone."""
    for key in ("targets", "target_modules"):
        with pytest.raises(RecipeError) as caught:
            graft_config({"kind": "lora", "rank": 2, key: ["lm_head"]})
        assert key in str(caught.value)
