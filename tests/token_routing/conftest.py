"""Fixtures of the routing tests."""

from __future__ import annotations

from collections.abc import Iterator

import peft
import pytest

from token_routing.tools import write_adapters


@pytest.fixture(autouse=True, scope="package")
def _no_cards() -> Iterator[None]:
    """PEFT compiles a template for the README of each adapter that it saves, and nothing here reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft.PeftModel, "create_or_update_model_card", lambda _model, _folder: None)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PEFT adapter folders of a tiny Llama, by name."""
    return write_adapters("llama", tmp_path_factory.mktemp("adapters"))
