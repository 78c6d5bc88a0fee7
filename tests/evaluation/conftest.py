"""What several tests of evaluation start from."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tiny import BOS, SPECIAL, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Llama."""
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Its tokenizer."""
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def bos_tokenizer() -> Any:
    """A tokenizer that begins every text with a token of its own."""
    tokenizer = tiny_tokenizer()
    bos = SPECIAL[BOS]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, BOS)])
    return tokenizer
