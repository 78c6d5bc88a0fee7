"""Fixtures of the routing tests."""

from __future__ import annotations

import pytest

from token_routing.tools import write_adapters


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PEFT adapter folders of a tiny Llama, by name."""
    return write_adapters("llama", tmp_path_factory.mktemp("adapters"))
