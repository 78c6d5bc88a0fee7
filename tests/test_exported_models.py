"""Exported folders work where graftlm is not installed, and keep to what vLLM's backend for transformers asks for."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import ApertusConfig, ApertusForCausalLM, AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import exported_probe
from cases import thinned
from cli.tools import invoke
from graftlm.backbone import Backbone, Sites, load_backbone, register_family
from graftlm.errors import ArtifactError, RecipeError, UnknownFamilyError
from graftlm.export import export_graft, export_model
from graftlm.export import folder as export_folder
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import ExportedAdapter, Graft, graft_config
from graftlm.grafts.neutral_residues import NeutralResidues
from graftlm.models.block_state import BlockStateConfig, BlockStateForSequenceClassification
from graftlm.testing import attach_graft, logits, randomise
from laws.examples import EXPERTS
from tiny import GROUPED, BackboneFolder, save_tiny_backbone, tiny_ids, tiny_model, tiny_tokenizer

FAMILIES = ("llama", "mistral", "qwen3", "gemma3", "gpt2")
USUAL = ("llama", "gemma3", "gpt2")  # in the default run; the others nearly have Llama's code
OWN: dict[str, dict[str, Any]] = {  # GraftLM's own architecture
    "single-head": {},
    "multi-filter": {"context": "mf", "kernel": "unstructured"},
    "recurrent": {"mixer": "recurrent"},
}
MORE = ("gemma2", "olmo2", "glm4", "phi", "phi3", "gpt_neox", "mixtral", "gpt_oss", "lfm2")
TWO = {name: EXPERTS[name] for name in ("english", "code")}
KINDS: dict[str, dict[str, Any]] = {
    "neutral-residues": {"kind": "neutral-residues", "width": 7},
    "adapter": {"kind": "adapter", "width": 7},
    "lora": {"kind": "lora", "rank": 4},
    "peft": {"kind": "peft", "method": "DORA", "options": {"r": 4}},
    "llama-pro": {"kind": "llama-pro", "blocks": 1},
    "finetune": {"kind": "finetune"},
    "token-routing": {"kind": "token-routing", "experts": TWO, "fixed": {"english": 0.7, "code": 0.2}},
}
WITH_CODE = ("neutral-residues", "adapter")
ALL_CHECKS = ["static", "saved_again", "checkpointed"]
ROUNDING = 1e-5  # of the largest logit: two orders of the same float32 sums
MERGED = 1e-4  # a product of matrices is rounded into the weights


class Export(NamedTuple):
    """An exported folder, and a file of what the grafted model computes."""

    folder: Path
    expected: Path


def exported(config: Mapping[str, Any], backbone: Backbone, folder: Path) -> Export:
    """Export a graft with random weights."""
    ids = tiny_ids(2, 12)
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        values = {"ids": ids, "logits": logits(model, ids)}
        values["tokens"] = torch.tensor(exported_probe.generation(model, ids))
        graft = model.grafts["graft"]
    assert not torch.allclose(values["logits"], logits(backbone.model, ids), rtol=0.1), "the graft does nothing"
    folder.mkdir(parents=True)
    torch.save(values, folder / "expected.pt")
    assert isinstance(graft, Graft)
    return Export(export_graft(graft, backbone, folder / "model"), folder / "expected.pt")


def tiny(family: str, **changes: Any) -> Backbone:
    return Backbone.wrap(tiny_model(family, **changes), tiny_tokenizer())


def probe(exports: Mapping[Any, Export], checks: Mapping[Any, list[str]], folder: Path) -> dict[Any, dict[str, Any]]:
    """What a process that can't import graftlm measures of each export."""
    jobs = [
        {"folder": str(own.folder), "expected": str(own.expected), "checks": checks.get(key, [])}
        for key, own in exports.items()
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, exported_probe.__file__, str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(exports, json.loads(done.stdout.splitlines()[-1]), strict=True))


def exported_own(changes: Mapping[str, Any], folder: Path) -> Export:
    """Export a block-state model by the command line."""
    model, ids = tiny_model("block-state", **changes), tiny_ids(2, 20)
    model.save_pretrained(folder / "trained")
    tiny_tokenizer().save_pretrained(folder / "trained")
    values = {"ids": ids, "logits": logits(model, ids)}
    torch.save(values | {"tokens": torch.tensor(exported_probe.generation(model, ids))}, folder / "expected.pt")
    outcome = invoke("export", str(folder / "trained"), "--to", str(folder / "model"), "--json")
    assert json.loads(outcome.out) == {"folder": str(folder / "model")}, outcome.err
    return Export(folder / "model", folder / "expected.pt")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What a process without graftlm measures of one kind on each family and of our own architecture."""
    folder = tmp_path_factory.mktemp("exported")
    pairs = [("neutral-residues", family) for family in USUAL]
    pairs += [("neutral-residues", "block-state"), ("lora", "block-state")]
    exports = {(kind, family): exported(KINDS[kind], tiny(family), folder / kind / family) for kind, family in pairs}
    exports |= {("own", name): exported_own(changes, folder / name) for name, changes in OWN.items()}
    checks = {("neutral-residues", family): ALL_CHECKS for family in USUAL}
    return probe(exports, checks | {("own", name): ["saved_again", "checkpointed"] for name in OWN}, folder)


@pytest.fixture(scope="module")
def measured_more(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What a process without graftlm measures of each kind on each family."""
    folder = tmp_path_factory.mktemp("exported")
    pairs = [(kind, family) for kind in KINDS for family in FAMILIES]
    exports = {(kind, family): exported(KINDS[kind], tiny(family), folder / kind / family) for kind, family in pairs}
    checks = {(kind, family): ["static"] for kind, family in pairs}
    checks |= {("neutral-residues", family): ["compiled", *ALL_CHECKS] for family in FAMILIES}
    return probe(exports, checks, folder)


@pytest.fixture(params=thinned(FAMILIES, USUAL))
def result(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a process without graftlm measures of neutral residues on a family."""
    results = request.getfixturevalue("measured" if request.param in USUAL else "measured_more")
    return results["neutral-residues", request.param]


def test_a_process_without_graftlm_computes_the_same(result: dict[str, Any]) -> None:
    check_probed(result, "neutral-residues")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "neutral-residues"])
def test_a_process_without_graftlm_computes_the_same_with_every_kind(
    measured_more: Any, kind: str, family: str
) -> None:
    check_probed(measured_more[kind, family], kind)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_compiles(measured_more: Any, family: str) -> None:
    assert measured_more["neutral-residues", family]["compiled"] < ROUNDING


def check_probed(result: Mapping[str, Any], kind: str) -> None:
    assert result["class"].startswith("Grafted") == (kind in WITH_CODE)
    assert result["logits"] < (ROUNDING if kind in WITH_CODE else MERGED)
    assert result["dynamic"]
    assert result["static"]
    assert result["tokens"] == tiny_tokenizer()("The quick brown fox")["input_ids"]


def test_an_exported_model_trains_and_is_saved_again(result: dict[str, Any]) -> None:
    assert result["saved_again"]["gap"] == 0
    assert "AutoModelForCausalLM" in result["saved_again"]["auto_map"]
    assert result["checkpointed"]["gap"] < ROUNDING
    assert result["checkpointed"]["adapters"]
    assert min(result["checkpointed"]["adapters"]) > 0


@pytest.fixture(params=thinned(FAMILIES, ("llama", "gpt2")))
def own(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Export]:
    """A family, and an export of neutral residues on it."""
    return request.param, exported(KINDS["neutral-residues"], tiny(request.param), tmp_path / "own")


def auto_model(folder: Path, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, trust_remote_code=True, **options).eval()


class TestRequirementsOfVLLM:
    """What vLLM's documentation asks of a custom model ("Writing custom models" of its supported models)."""

    def test_config_names_base_model_and_it_takes_attention_backends(self, own: tuple[str, Export]) -> None:
        config = json.loads((own[1].folder / "config.json").read_text())
        assert {"AutoConfig", "AutoModel", "AutoModelForCausalLM"} == config["auto_map"].keys()
        assert type(auto_model(own[1].folder)).is_backend_compatible()
        assert type(auto_model(own[1].folder))._supports_attention_backend

    def test_the_base_model_has_all_that_differs(self, own: tuple[str, Export]) -> None:
        """vLLM puts a head of its own on the base model."""
        values = torch.load(own[1].expected, weights_only=True)
        head: Any = exported_probe.load(own[1].folder).get_output_embeddings()
        with torch.no_grad():
            actual = head(auto_model(own[1].folder)(values["ids"], use_cache=False).last_hidden_state)
        assert exported_probe.gap(actual, values["logits"]) < ROUNDING

    def test_arguments_reach_the_attention_interface(self, own: tuple[str, Export]) -> None:
        layers: list[int] = []

        def attention(module: Any, *args: Any, attention_instances: Any, **kwargs: Any) -> Any:
            layers.append(attention_instances[module.layer_idx])
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS.register("probe", attention)
        model = auto_model(own[1].folder)
        expected = logits_of(model)
        model.config._attn_implementation = "probe"
        instances = {number: 10 + number for number in range(model.config.num_hidden_layers)}
        try:
            torch.testing.assert_close(logits_of(model, attention_instances=instances), expected)
        finally:
            del ALL_ATTENTION_FUNCTIONS._global_mapping["probe"]
        assert layers == list(instances.values())

    def test_plans_name_modules_and_split_them_as_the_mathematics_allows(self, own: tuple[str, Export]) -> None:
        model = auto_model(own[1].folder)
        modules = dict(model.named_modules())
        plain = FAMILY_PLANS.get(own[0], "layers.*.mlp.")
        plan = type(model.config).base_model_tp_plan
        for pattern in plan or {}:
            expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            assert any(expression.fullmatch(name) for name in modules), pattern
        for name in type(model.config).base_model_pp_plan or {}:
            assert name in dict(model.named_children())
        if plan is not None:
            assert {k.removeprefix(f"{plain}adapter."): v for k, v in plan.items() if "adapter" in k} == {
                "w_i": "colwise",
                "w_g": "colwise",
                "w_o": "rowwise",
            }
            assert f"{plain}ffn.down_proj" in plan
            assert f"{plain}down_proj" not in plan

    def test_halves_of_an_adapter_add_up(self, own: tuple[str, Export]) -> None:
        """Columns of the first matrices and rows of the last, on two devices: a sum puts them together."""
        adapter = next(m for name, m in auto_model(own[1].folder).named_modules() if name.endswith(".adapter"))
        x = torch.randn(3, adapter.w_o.out_features)
        expected, parts = adapter(x), []
        weights = {name: module.weight.detach().clone() for name, module in adapter.named_children() if "w_" in name}
        for half in (slice(0, 32), slice(32, None)):  # the second half is padding
            for name, weight in weights.items():
                getattr(adapter, name).weight.data = weight[:, half] if name == "w_o" else weight[half]
            parts.append(adapter(x))
        torch.testing.assert_close(sum(parts), expected)


FAMILY_PLANS = {"gpt2": "h.*.mlp."}


@torch.no_grad()
def logits_of(model: Any, **kwargs: Any) -> torch.Tensor:
    return model(tiny_ids(1, 8), use_cache=False, **kwargs).last_hidden_state


@pytest.mark.slow
def test_more_families(tmp_path: Path) -> None:
    exports = {family: exported(KINDS["neutral-residues"], tiny(family), tmp_path / family) for family in MORE}
    checks = {family: ["saved_again", "checkpointed"] for family in MORE}
    for family, result in probe(exports, checks, tmp_path).items():
        assert result["logits"] < ROUNDING, family
        assert result["dynamic"], family
        assert result["saved_again"]["gap"] == 0, family
        assert result["checkpointed"]["gap"] < ROUNDING, family


@pytest.mark.parametrize("changes", [{"gate": "sigmoid"}, {"gate": "none"}, {"gate_init": "random"}], ids=str)
def test_every_gate(changes: dict[str, Any], tmp_path: Path) -> None:
    own = exported({**KINDS["neutral-residues"], **changes}, tiny("llama"), tmp_path / "own")
    values = torch.load(own.expected, weights_only=True)
    assert exported_probe.gap(logits(exported_probe.load(own.folder), values["ids"]), values["logits"]) < ROUNDING


def test_an_activation_with_parameters_of_its_own(tmp_path: Path) -> None:
    """Apertus learns the slopes of its activation."""
    model = ApertusForCausalLM(ApertusConfig(**GROUPED)).float().eval()
    own = exported(KINDS["neutral-residues"], Backbone.wrap(model, tiny_tokenizer()), tmp_path / "own")
    values = torch.load(own.expected, weights_only=True)
    assert exported_probe.gap(logits(exported_probe.load(own.folder), values["ids"]), values["logits"]) < ROUNDING


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adapters_stay_float32_on_a_backbone_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    backbone = Backbone.wrap(tiny_model("llama").to(dtype), tiny_tokenizer())  # type: ignore[arg-type]
    own = exported(KINDS["neutral-residues"], backbone, tmp_path / "own")
    model, values = exported_probe.load(own.folder), torch.load(own.expected, weights_only=True)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtypes[name] for name in dtypes if ".adapter." in name} == {torch.float32}
    assert {dtypes[name] for name in dtypes if ".adapter." not in name} == {dtype}
    # The same numbers in the same order, but for the batch: a few roundings of the largest logit.
    assert exported_probe.gap(logits(model, values["ids"]), values["logits"]) < 4 * torch.finfo(dtype).eps


def test_adapters_in_the_backbones_precision_compute_nearly_the_same(tmp_path: Path) -> None:
    """As in vLLM, which has one precision for all weights."""
    backbone = Backbone.wrap(tiny_model("llama").to(torch.bfloat16), tiny_tokenizer())  # type: ignore[arg-type]
    own = exported(KINDS["neutral-residues"], backbone, tmp_path / "own")
    model, values = exported_probe.load(own.folder), torch.load(own.expected, weights_only=True)
    model.to(torch.bfloat16)
    assert exported_probe.gap(logits(model, values["ids"]), values["logits"]) < 16 * torch.finfo(torch.bfloat16).eps


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    own = exported(KINDS["neutral-residues"], tiny("llama", tie_word_embeddings=True), tmp_path / "own")
    model, values = exported_probe.load(own.folder), torch.load(own.expected, weights_only=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert exported_probe.gap(logits(model, values["ids"]), values["logits"]) < ROUNDING


@pytest.mark.parametrize(
    "family",
    thinned([*FAMILIES, "phi3", "mixtral", "block-state"], {"llama", "gemma3", "gpt2", "mixtral", "block-state"}),
)
def test_graftlm_loads_what_it_exports_as_a_backbone(family: str, tmp_path: Path) -> None:
    folder = exported(KINDS["neutral-residues"], tiny(family), tmp_path / "own").folder
    backbone = load_backbone(folder, trust_remote_code=True)
    bare = logits(backbone.model, tiny_ids())
    plain = tiny_model(family)
    assert _kinds_of_norms(backbone.model) == _kinds_of_norms(plain)
    second = detached({**KINDS["neutral-residues"], "width": 5}, backbone)
    with GraftedModel(backbone, {"graft": second}) as model:
        assert not torch.allclose(logits(model.eval(), tiny_ids()), bare, rtol=0.1)
    assert torch.equal(logits(backbone.model, tiny_ids()), bare)
    with pytest.raises(ArtifactError) as error:
        export_graft(second, backbone, tmp_path / "again")
    assert "grafted_" in str(error.value)


def _kinds_of_norms(model: Any) -> list[str]:
    sites = Sites(model)
    return [type(sites.module(site)[0]).__name__ for site in sites.norms(0)]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_graft_on_an_exported_model_acts_where_it_acts_on_the_plain_one(family: str, tmp_path: Path) -> None:
    backbone = tiny(family)
    with randomise(attach_graft(backbone, KINDS["neutral-residues"]), 0.2) as model:
        first = model.grafts["graft"]
    with randomise(attach_graft(backbone, {"kind": "adapter", "width": 5}), 0.2) as model:
        second = model.grafts["graft"]
    with GraftedModel(backbone, {"first": first, "second": second}) as model:
        expected = logits(model.eval(), tiny_ids())
    folder = export_graft(first, backbone, tmp_path / "own")
    exported_backbone = load_backbone(folder, trust_remote_code=True)
    moved = detached({"kind": "adapter", "width": 5}, exported_backbone)
    moved.load_state_dict(second.state_dict())
    with GraftedModel(exported_backbone, {"second": moved}) as model:
        assert exported_probe.gap(logits(model.eval(), tiny_ids()), expected) < ROUNDING


def test_without_trust_nothing_is_loaded_in_its_place(tmp_path: Path) -> None:
    """A plain Llama without the adapters would be another model."""
    own = exported(KINDS["neutral-residues"], tiny("llama"), tmp_path / "own")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(own.folder, trust_remote_code=False)
    assert AutoConfig.from_pretrained(own.folder, trust_remote_code=True).adapter_width == 64, "7, and padding"


def test_another_major_version_of_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers 4, seven of 40 tiny families silently computed something else."""
    code = (
        exported(KINDS["neutral-residues"], tiny("llama"), tmp_path / "own").folder / "modeling_grafted.py"
    ).read_text()
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(ImportError):
        exec(compile(code, "modeling_grafted.py", "exec"), {"__name__": "modeling_grafted"})


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"rope_theta": 10000.0}),
        ("phi", {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
        ("gemma3", {}),
        ("gpt2", {}),
    ],
)
def test_configs_have_the_keys_of_rotary_positions_that_transformers_4_reads(
    family: str, keys: dict[str, float], tmp_path: Path
) -> None:
    folder = exported(KINDS["lora"], tiny(family), tmp_path / "own").folder
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config} == keys


def test_scaled_rotary_positions_have_the_keys_of_both_versions(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    folder = exported(KINDS["lora"], tiny("llama", rope_parameters=rope), tmp_path / "own").folder
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert AutoConfig.from_pretrained(folder).rope_parameters == rope


def test_vllm_does_not_pack_the_matrices_of_an_adapter(tmp_path: Path) -> None:
    """It packs act(A x) * B x under the name that the FFN's packed matrices have, if the product is one expression."""
    code = (
        exported(KINDS["neutral-residues"], tiny("llama"), tmp_path / "own").folder / "modeling_grafted.py"
    ).read_text()
    (adapter,) = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef) and node.name == "Adapter"]
    products = [node for node in ast.walk(adapter) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)]
    assert products
    assert not any("self.activation" in ast.unparse(product) for product in products)


def test_the_file_is_readable_code_without_hooks(tmp_path: Path) -> None:
    folder = exported(KINDS["neutral-residues"], tiny("qwen3"), tmp_path / "own").folder
    code = (folder / "modeling_grafted.py").read_text()
    assert max(map(len, code.splitlines())) <= 120
    assert len(code.splitlines()) < 120
    assert not re.search("hook|import graftlm|from graftlm", code)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert "trust_remote_code=True" in (folder / "README.md").read_text()


# GraftLM's own architecture


@pytest.mark.parametrize("name", OWN)
def test_a_block_state_model_takes_its_code_along(measured: Any, name: str) -> None:
    result = measured["own", name]
    assert result["class"] == "BlockStateForCausalLM"
    assert result["logits"] < ROUNDING
    assert result["dynamic"]
    assert result["saved_again"]["gap"] == 0
    assert result["checkpointed"]["gap"] < ROUNDING


@pytest.mark.parametrize("kind", ["neutral-residues", "lora"])
def test_a_graft_on_a_block_state_model_takes_both_codes_along(measured: Any, kind: str) -> None:
    result = measured[kind, "block-state"]
    assert result["logits"] < MERGED
    assert result["dynamic"]


# Routing


@pytest.mark.parametrize("combination", ["exact", "linear"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_fixed_mixture_is_merged(family: str, combination: str, tmp_path: Path) -> None:
    """With an embedding among the changed modules, and one whose output the model scales."""
    experts = {name: {"rank": 3, "targets": ["embedding", "attention", "ffn"]} for name in ("one", "two")}
    config = {"kind": "token-routing", "experts": experts, "fixed": {"one": 0.5, "two": 0.25}}
    untied = {"tie_word_embeddings": False}
    own = exported({**config, "combination": combination}, tiny(family, **untied), tmp_path / "own")
    values = torch.load(own.expected, weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(own.folder)
    assert exported_probe.gap(logits(model, values["ids"]), values["logits"]) < MERGED


def test_one_expert_is_a_fixed_mixture_unless_a_threshold_turns_it_off(tmp_path: Path) -> None:
    config = {"kind": "token-routing", "experts": {"one": {"rank": 3, "targets": ["ffn"]}}}
    own = exported(config, tiny("llama"), tmp_path / "own")
    values = torch.load(own.expected, weights_only=True)
    assert exported_probe.gap(logits(exported_probe.load(own.folder), values["ids"]), values["logits"]) < MERGED


def test_a_mixture_is_fixed_at_its_export(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    from graftlm.store.artifact import load_graft, save_graft

    backbone = load_backbone(tiny_backbone("llama"))
    with randomise(attach_graft(backbone, {"kind": "token-routing", "experts": TWO}).eval(), 0.2) as model:
        save_graft(model.grafts["graft"], backbone, tmp_path / "graft")  # type: ignore[arg-type]
    fix = "fixed={english: 0.25, code: 0.75}"
    outcome = invoke("export", str(tmp_path / "graft"), "--to", str(tmp_path / "model"))
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert "The weights of the experts change with the text" in outcome.err
    assert "--set 'fixed={english: 0.5, code: 0.5}'" in outcome.err
    assert not (tmp_path / "model").exists()
    outcome = invoke("export", str(tmp_path / "graft"), "--to", str(tmp_path / "model"), "--set", fix)
    assert outcome.code == 0, outcome.err
    with GraftedModel(backbone, {"graft": load_graft(tmp_path / "graft", backbone, [fix])}) as model:
        expected = logits(model.eval(), tiny_ids())
    assert exported_probe.gap(logits(exported_probe.load(tmp_path / "model"), tiny_ids()), expected) < MERGED


@pytest.mark.parametrize(
    ("fixed", "named"),
    [
        ({"englsh": 0.5}, "englsh"),
        ({"english": 0.8, "code": 0.3}, "at most 1"),
        ({"english": -0.1}, "fixed"),
    ],
)
def test_a_mixture_that_is_none(fixed: dict[str, float], named: str) -> None:
    with pytest.raises(RecipeError) as error:
        graft_config({"kind": "token-routing", "experts": TWO, "fixed": fixed})
    assert named in str(error.value)


# Mistakes


def detached(config: Mapping[str, Any], backbone: Backbone) -> Graft:
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft


@pytest.mark.parametrize(
    ("family", "problem"),
    [
        ("opt", "fc1 to fc2"),
        ("bloom", "bloom"),
        ("modernbert", "masked-lm"),
    ],
)
def test_a_family_without_a_place_for_adapters(family: str, problem: str, tmp_path: Path) -> None:
    backbone = tiny(family)
    graft = detached(KINDS["neutral-residues"], backbone)
    with pytest.raises(ArtifactError) as caught:
        export_graft(graft, backbone, tmp_path / "model")
    assert problem in str(caught.value)
    assert "graft serve" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_backbone_with_code_of_its_own(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    backbone = tiny("llama")
    backbone.model.__class__ = type("MyLlama", (LlamaForCausalLM,), {"__module__": "transformers_modules.mine"})
    graft = detached(KINDS["neutral-residues"], backbone)
    with pytest.raises(ArtifactError) as error:
        export_graft(graft, backbone, tmp_path / "model")
    assert "transformers'" in str(error.value)


@pytest.mark.parametrize("kind", ["composition", "conditional-tasks"])
def test_other_kinds_name_the_server(kind: str, tmp_path: Path) -> None:
    save_tiny_backbone(tmp_path / "augmenting", "llama")
    values = {
        "composition": {"augmenting": {"one": {"name": str(tmp_path / "augmenting")}}, "stride": 1},
        "conditional-tasks": {"tasks": {"topics": {"type": "classification", "labels": ["a", "b"]}}},
    }
    backbone = tiny("llama")
    graft = detached({"kind": kind, **values[kind]}, backbone)
    with pytest.raises(ArtifactError) as error:
        export_graft(graft, backbone, tmp_path / "model")
    assert kind in str(error.value)
    assert "graft serve" in str(error.value)


def test_a_plain_model_needs_no_export(tmp_path: Path) -> None:
    save_tiny_backbone(tmp_path / "plain", "llama")
    outcome = invoke("export", str(tmp_path / "plain"), "--to", str(tmp_path / "model"))
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1)
    assert "llama" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


@pytest.mark.parametrize("option", [("--backbone", "another"), ("--set", "rank=2")])
def test_a_model_is_exported_as_it_is(option: tuple[str, str], tmp_path: Path) -> None:
    save_tiny_backbone(tmp_path / "model", "block-state")
    outcome = invoke("export", str(tmp_path / "model"), "--to", str(tmp_path / "plain"), *option)
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1), outcome.err
    name, _ = option
    assert name in outcome.err


def test_the_folder_of_a_run_names_the_model_in_it(tmp_path: Path) -> None:
    save_tiny_backbone(tmp_path / "run" / "model", "block-state")
    outcome = invoke("export", str(tmp_path / "run"), "--to", str(tmp_path / "plain"))
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1), outcome.err
    assert f"so it is not a graft: name {tmp_path / 'run' / 'model'}." in outcome.err


def test_a_classifier_is_not_written_without_its_head(tmp_path: Path) -> None:
    config = BlockStateConfig(
        vocab_size=304, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mixer_layers=[1]
    )
    BlockStateForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    tiny_tokenizer().save_pretrained(tmp_path / "classifier")
    outcome = invoke("export", str(tmp_path / "classifier"), "--to", str(tmp_path / "model"))
    assert (outcome.code, len(outcome.err.strip().splitlines())) == (2, 1), outcome.err
    assert "BlockStateForSequenceClassification" in outcome.err
    backbone = load_backbone(str(tmp_path / "classifier"))
    with pytest.raises(ArtifactError) as error:
        export_graft(detached(KINDS["lora"], backbone), backbone, tmp_path / "model")
    assert "BlockStateForCausalLM" in str(error.value)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("kind", ["neutral-residues", "lora"])
def test_an_older_export_is_left_alone(kind: str, tmp_path: Path) -> None:
    backbone = tiny("llama")
    graft = detached(KINDS[kind], backbone)
    folder = export_graft(graft, backbone, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ArtifactError):
        export_graft(graft, backbone, folder)
    with pytest.raises(ArtifactError):
        export_model(tiny("block-state"), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_that_computes_something_else_is_not_written(monkeypatch: Any, tmp_path: Path) -> None:
    whole = NeutralResidues.exported_adapter

    def without_gate(graft: NeutralResidues, backbone: Backbone) -> ExportedAdapter:
        adapter = whole(graft, backbone)
        return replace(adapter, source=adapter.source.replace("self.gate(x).relu() * ", ""))

    monkeypatch.setattr(NeutralResidues, "exported_adapter", without_gate)
    backbone = tiny("llama")
    with pytest.raises(ArtifactError):
        export_graft(detached(KINDS["neutral-residues"], backbone), backbone, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_is_left_out_shows_in_half_precision_too(monkeypatch: Any, tmp_path: Path) -> None:
    whole = NeutralResidues.exported_adapter

    def without_effect(graft: NeutralResidues, backbone: Backbone) -> ExportedAdapter:
        adapter = whole(graft, backbone)
        return replace(adapter, source=adapter.source.replace("return adapted", "return 0 * adapted"))

    monkeypatch.setattr(NeutralResidues, "exported_adapter", without_effect)
    backbone = Backbone.wrap(tiny_model("llama").to(torch.bfloat16), tiny_tokenizer())  # type: ignore[arg-type]
    with randomise(attach_graft(backbone, KINDS["neutral-residues"]).eval(), 0.05) as model:
        graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    with pytest.raises(ArtifactError):
        export_graft(graft, backbone, tmp_path / "model")


@pytest.mark.parametrize("name", ["layers", "activation", "reads_positions", "ffn"])
def test_a_family_from_a_file_puts_no_code_into_the_export(name: str) -> None:
    code = '", __import__("os").abort(), "'
    row = asdict(Sites(tiny_model("llama")).family)
    with pytest.raises(UnknownFamilyError):
        register_family("never", row | {name: ["x", code] if name == "reads_positions" else code})


def test_a_full_disk_leaves_nothing(monkeypatch: Any, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(export_folder, "save_with_adapters", full)
    backbone = tiny("llama")
    with pytest.raises(ArtifactError) as error:
        export_graft(detached(KINDS["neutral-residues"], backbone), backbone, tmp_path / "model")
    assert "No space left" in str(error.value)
    assert not list(tmp_path.iterdir())
