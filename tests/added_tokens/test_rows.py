"""The rows of added tokens: compared with a resized model of transformers, saved, exported, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from backbone.gguf_files import write_gguf
from graftlm.backbone import Backbone, compiled_decoding, load_backbone
from graftlm.data.learned_tokens import learn_tokens
from graftlm.errors import ArtifactError, BackboneError, GraftError, TapConflictError, WrongBackboneError
from graftlm.evaluation.audit.loading import load_pair
from graftlm.export import export_gguf, export_graft, export_many, export_peft
from graftlm.generation.generate import Decoding, generate_text, load_model
from graftlm.grafted import chunked_losses
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.serving.registry import ModelRegistry
from graftlm.serving.store import GraftStore
from graftlm.store.artifact import backbone_of, load_graft, save_graft
from graftlm.testing import attach_graft, logits, randomise
from tiny import TOKENS, save_tiny_backbone, tiny_ids, tiny_model, tiny_tokenizer

NEW = [" fyrtårnet", " rødt", " havnen", "<tool>", " lyset", " byen"]
MARKERS = ["<tool>", "havnen", "<a>", "<b>", "<c>", "<d>"]
COUNT = len(NEW)
IDS = torch.tensor([[5, 300, 17, 305, 301, 9, 40, 302], [7, 8, 9, 10, 304, 11, 303, 12]])
NOTHING: dict[str, Any] = {"kind": "neutral-residues", "alpha": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "gemma3": {"tie_word_embeddings": True},
    "gpt2": {},
    "phi": {},  # its output layer has a bias
    "gemma2": {"final_logit_softcapping": 5.0},
}


def tiny(family: str = "llama", **changes: Any) -> Backbone:
    return Backbone.wrap(tiny_model(family, **{**FAMILIES[family], **changes}), tiny_tokenizer(), family)


def resized(backbone: Backbone) -> PreTrainedModel:
    """Return the model that transformers makes of the backbone, with the mean of old rows in each new one."""
    own = tiny_model(backbone.name, **FAMILIES[backbone.name])
    own.load_state_dict(backbone.model.state_dict())
    first = TOKENS
    own.resize_token_embeddings(first + COUNT, mean_resizing=False)
    head = own.get_output_embeddings()
    with torch.no_grad():
        for number, text in enumerate(NEW):
            spelled = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
            for weight in {own.get_input_embeddings().weight, head.weight}:
                weight[first + number] = weight[spelled].mean(0)
            if head.bias is not None:
                head.bias[first + number] = head.bias[spelled].mean(0)
    return own


def loss_of(values: Tensor) -> Tensor:
    return functional.cross_entropy(values[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_a_resized_model(family: str) -> None:
    backbone = tiny(family)
    expected = resized(backbone)
    with attach_graft(backbone.with_tokens(NEW), NOTHING) as model:
        rows = model.grafts["graft"].token_rows
        assert rows is not None
        pairs = [(rows.embedding.weight, expected.get_input_embeddings().weight)]
        pairs += [(rows.head, expected.get_output_embeddings().weight)] if rows.head is not None else []
        pairs += [(rows.bias, expected.get_output_embeddings().bias)] if rows.bias is not None else []
        for step in range(2):
            for own in (model, expected):
                own.zero_grad()
            given = model(IDS, return_logits=step == 0, labels=IDS)
            loss = loss_of(expected(input_ids=IDS).logits)
            if step == 0:
                torch.testing.assert_close(given.logits, logits(expected, IDS), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(given.loss, loss, rtol=1e-5, atol=1e-5)
            given.loss.backward()
            loss.backward()
            for actual, full in pairs:
                gradient = full.grad[TOKENS : TOKENS + COUNT]
                assert gradient.abs().max() > 1e-5
                torch.testing.assert_close(actual.grad, gradient, rtol=1e-3, atol=1e-6)
                with torch.no_grad():
                    actual.sub_(0.5 * actual.grad)
                    full[TOKENS : TOKENS + COUNT] -= 0.5 * gradient


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_loss_in_chunks_is_that_of_all_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_losses, "CHUNK_BYTES", {"cpu": 4 * 310 * 3})
    with attach_graft(tiny(family).with_tokens(NEW), NOTHING) as model:
        assert model._output_layer is not None
        own = model.grafts["graft"].token_rows.parameters()  # type: ignore[union-attr]
        parameters = list(own)
        expected = torch.autograd.grad(loss_of(model(IDS).logits), parameters)
        chunked = torch.autograd.grad(model(IDS, labels=IDS, return_logits=False).loss, parameters)
    for actual, wanted in zip(chunked, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-6)


def test_the_backbone_keeps_its_bits_and_its_vocabulary() -> None:
    plain = tiny()
    before = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    bare = logits(plain.model, tiny_ids())
    backbone = plain.with_tokens(NEW)
    assert backbone.model is plain.model
    assert backbone.fingerprint == plain.fingerprint
    with randomise(attach_graft(backbone, NOTHING), 0.3) as model:
        changed = logits(model, IDS)
        assert changed.shape[-1] == TOKENS + COUNT
        with pytest.raises(ZeroDivisionError), model.model.lm_head.register_forward_hook(_fail):  # type: ignore[union-attr]
            logits(model, IDS)
        assert torch.equal(logits(model, IDS), changed)
    assert torch.equal(logits(plain.model, tiny_ids()), bare)
    assert plain.config.vocab_size == 304
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def _fail(*_: object) -> None:
    raise ZeroDivisionError


KINDS: dict[str, dict[str, Any]] = {
    "adapter": {"kind": "adapter"},
    "lora": {"kind": "lora", "rank": 3},
    "rows and lora": {"kind": "peft", "method": "LORA", "options": {"target_modules": ["embed_tokens", "lm_head"]}},
    "finetune": {"kind": "finetune"},
    "llama-pro": {"kind": "llama-pro", "blocks": 1},
}


def trained(backbone: Backbone, config: dict[str, Any]) -> tuple[Graft, Tensor]:
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        graft = model.grafts["graft"]
        assert isinstance(graft, Graft)
        return graft, logits(model, IDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ties", [True, False], ids=["tied", "untied"])
def test_a_graft_is_saved_and_exported_with_its_rows(kind: str, ties: bool, tmp_path: Path) -> None:
    backbone = tiny(tie_word_embeddings=ties).with_tokens(NEW)
    graft, expected = trained(backbone, KINDS[kind])
    save_graft(graft, backbone, tmp_path / "graft")
    with GraftedModel(backbone, {"graft": load_graft(tmp_path / "graft", backbone)}) as model:
        torch.testing.assert_close(logits(model, IDS), expected)
    export_graft(graft, backbone, tmp_path / "model")
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    torch.testing.assert_close(logits(plain, IDS), expected, rtol=1e-3, atol=1e-3)
    assert plain.config.vocab_size == TOKENS + COUNT
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer(NEW[0], add_special_tokens=False)["input_ids"] == [TOKENS]


def test_the_bias_of_an_output_layer_is_exported(tmp_path: Path) -> None:
    backbone = tiny("phi").with_tokens(NEW)
    graft, expected = trained(backbone, KINDS["lora"])
    export_graft(graft, backbone, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logits(plain, IDS), expected, rtol=1e-3, atol=1e-3)


def test_a_folder_gives_the_extended_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_backbone(tmp_path / "backbone", "llama")
    backbone = load_backbone(folder).with_tokens(NEW)
    graft, expected = trained(backbone, KINDS["lora"])
    save_graft(graft, backbone, tmp_path / "graft")
    loaded = backbone_of(tmp_path / "graft")
    with GraftedModel(loaded, {"graft": load_graft(tmp_path / "graft", loaded)}) as model:
        torch.testing.assert_close(logits(model, IDS), expected)
    model, tokenizer = load_model(tmp_path / "graft", device="cpu")
    text = generate_text(model, tokenizer, f"The keeper{NEW[0]}", Decoding(max_new_tokens=8))
    assert text.tokens >= 1
    bare, tokenizer = load_model(tmp_path / "graft", device="cpu", bare=True)
    assert len(tokenizer) == TOKENS
    assert bare is not model
    assert "added_tokens" in json.loads((tmp_path / "graft" / "graft.json").read_text())


@pytest.mark.parametrize("decoding", [{"num_beams": 3}, {"do_sample": True}, {"cache_implementation": "static"}, {}])
def test_new_tokens_are_generated(decoding: dict[str, Any]) -> None:
    with attach_graft(tiny().with_tokens(NEW), NOTHING).eval() as model:
        rows = model.grafts["graft"].token_rows
        with torch.no_grad():
            rows.head.mul_(9)  # type: ignore[union-attr]
        found = model.generate(IDS, max_new_tokens=12, min_new_tokens=12, **decoding)
        cached = found[:, IDS.shape[1] :]
        assert (cached >= TOKENS).any()
        if not decoding:
            full = logits(model, found)[:, IDS.shape[1] - 1 : -1]
            assert torch.equal(full.argmax(-1), cached)


@pytest.mark.slow
def test_a_decode_step_with_new_tokens_is_one_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    generated: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    torch.compiler.reset()
    with attach_graft(tiny().with_tokens(NEW), NOTHING).eval() as model:
        eager = model.generate(IDS, **generated)
        options = compiled_decoding(model, generated, prompt_tokens=IDS.shape[1], wanted=True)
        config = options["compile_config"]
        config.backend, config.mode, config.fullgraph = backend, None, True
        assert torch.equal(model.generate(IDS, **generated, **options), eager)
    torch.compiler.reset()
    assert 1 <= len(graphs) <= 3


# Refusals


def test_a_graft_needs_the_backbone_with_its_tokens(tmp_path: Path) -> None:
    plain = tiny()
    backbone = plain.with_tokens(NEW)
    graft = build_graft(graft_config(dict(NOTHING)), backbone)
    save_graft(graft, backbone, tmp_path / "graft")
    for other in (plain, plain.with_tokens(NEW[:2])):
        with pytest.raises(WrongBackboneError):
            GraftedModel(other, {"graft": graft})
        with pytest.raises(WrongBackboneError) as error:
            load_graft(tmp_path / "graft", other)
        assert NEW[0] in str(error.value)


def test_exactly_one_graft_has_the_rows(tmp_path: Path) -> None:
    plain = tiny()
    backbone = plain.with_tokens(NEW)
    own = build_graft(graft_config(dict(NOTHING)), backbone)
    without = build_graft(graft_config(dict(NOTHING)), plain)
    again = build_graft(graft_config(dict(NOTHING)), backbone)
    for grafts in ({}, {"without": without}, {"own": own, "again": again}):
        with pytest.raises(TapConflictError):
            GraftedModel(backbone, grafts)
    save_graft(without, plain, tmp_path / "graft")
    with pytest.raises(WrongBackboneError):
        load_graft(tmp_path / "graft", backbone)
    with GraftedModel(backbone, {"own": own, "without": without}) as model:
        assert logits(model, IDS).shape[-1] == TOKENS + COUNT


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "memory", "window": 8},
        {"kind": "token-routing", "experts": {"one": {"rank": 3, "targets": ["ffn"]}}},
    ],
)
def test_a_graft_that_looks_up_ids_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(GraftError) as error:
        build_graft(graft_config(config), tiny().with_tokens(NEW))
    assert config["kind"] in str(error.value)


def test_a_server_takes_only_the_exported_model(tmp_path: Path) -> None:
    plain = tiny()
    backbone = plain.with_tokens(NEW)
    graft = build_graft(graft_config(dict(NOTHING)), backbone)
    save_graft(graft, backbone, tmp_path / "graft")
    with pytest.raises(ArtifactError) as error:
        GraftStore({"tiny": plain}, {"new": tmp_path / "graft"}).open()
    assert NEW[0] in str(error.value)
    registry = ModelRegistry(plain, {}, "tiny")
    with pytest.raises(GraftError) as error:
        registry.replace("new", graft)
    assert "new" in str(error.value)


def test_an_audit_reads_each_model_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny_backbone(tmp_path / "backbone", "llama")
    backbone = load_backbone(folder).with_tokens(NEW)
    graft, _ = trained(backbone, KINDS["lora"])
    save_graft(graft, backbone, tmp_path / "graft")
    with load_pair(str(folder), str(tmp_path / "graft"), device="cpu") as (base, tuned):
        assert len(base.tokenizer) == TOKENS
        assert len(tuned.tokenizer) == TOKENS + COUNT


def test_a_gguf_backbone_learns_tokens_and_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tokenizer = tiny_tokenizer()
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tokenizer)
    backbone = load_backbone(file)
    backbone = backbone.with_tokens(learn_tokens(backbone.need_tokenizer(), ["fyrtårnet er rødt. " * 9], 8))
    graft, _ = trained(backbone, {"kind": "adapter"})
    with GraftedModel(backbone, {"graft": graft}) as model:
        ids = torch.tensor([backbone.need_tokenizer()("et fyrtårn er rødt", add_special_tokens=False)["input_ids"]])
        assert ids.max() >= TOKENS
        expected = logits(model.eval(), ids)
    folder = export_graft(graft, backbone, tmp_path / "model")
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    torch.testing.assert_close(logits(plain, ids), expected, rtol=1e-3, atol=1e-3)
    saved = AutoTokenizer.from_pretrained(folder)
    assert saved("et fyrtårn er rødt", add_special_tokens=False)["input_ids"] == ids[0].tolist()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_a_gguf_file_has_the_added_tokens(learned: bool, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    plain = tiny(tie_word_embeddings=tied)
    tokens = learn_tokens(plain.need_tokenizer(), ["fyrtårnet er rødt. " * 9], 8) if learned else MARKERS
    backbone = plain.with_tokens(tokens)
    graft, _ = trained(backbone, KINDS["lora"])
    text = "et fyrtårnet er<tool> rødt havnen"
    ids = torch.tensor([backbone.need_tokenizer()(text, add_special_tokens=False)["input_ids"]])
    assert ids.max() >= TOKENS
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected = logits(model.eval(), ids)
    written = load_backbone(export_gguf(graft, backbone, tmp_path / "model.gguf", weight_type="f32"))
    assert written.need_tokenizer()(text, add_special_tokens=False)["input_ids"] == ids[0].tolist()
    torch.testing.assert_close(logits(written.model, ids), expected, rtol=1e-3, atol=1e-3)


def test_listed_tokens_that_are_not_read_from_a_gguf_file_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    backbone = tiny().with_tokens(NEW)
    graft, _ = trained(backbone, KINDS["lora"])
    with pytest.raises(ArtifactError) as error:
        export_gguf(graft, backbone, tmp_path / "model.gguf")
    assert repr(NEW[0]) in str(error.value)
    assert "learn" in str(error.value)
    assert not (tmp_path / "model.gguf").exists()


def test_forms_without_rows_are_refused(tmp_path: Path) -> None:
    backbone = tiny().with_tokens(NEW)
    graft = build_graft(graft_config(dict(KINDS["lora"])), backbone)
    with pytest.raises(ArtifactError):
        export_many({"one": graft}, backbone, tmp_path / "many")
    with pytest.raises(ArtifactError):
        export_peft(graft, backbone, tmp_path / "peft")


def test_a_backbone_that_can_not_have_rows_is_refused() -> None:
    encoder = Backbone.wrap(tiny_model("bert"), tiny_tokenizer(), "bert")
    per_layer = Backbone.wrap(tiny_model("gemma3n"), tiny_tokenizer(), "gemma3n")
    without_tokenizer = Backbone.wrap(tiny_model("llama"), None, "llama")
    small = Backbone.wrap(tiny_model("llama", vocab_size=290), tiny_tokenizer(), "small")
    packed = tiny()
    packed.model.lm_head = torch.ao.nn.quantized.dynamic.Linear(48, 304)
    twice = tiny().with_tokens(NEW)
    for backbone in (encoder, per_layer, without_tokenizer, small, packed, twice):
        with pytest.raises(BackboneError) as error:
            backbone.with_tokens(NEW)
        assert backbone.name in str(error.value)
