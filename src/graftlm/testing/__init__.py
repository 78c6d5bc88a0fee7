"""The laws of grafts as tests, for grafts of your own.

Register the graft, and a test file runs all laws on it:

    from graftlm.testing import GraftLaws

    class TestMyGraft(GraftLaws):
        config = {"kind": "my-graft"}

No plugin has to be loaded. `pytest_plugins = ["graftlm.testing"]` in a conftest.py does no harm.
"""
# ruff: noqa: E402, F401  # the names of this package, after pytest knows where they are

import pytest

pytest.register_assert_rewrite("graftlm.testing.laws")

from graftlm.testing.laws import GraftLaws, attach_graft, decoders_only, logits, randomise
from graftlm.testing.tiny import tiny_ids, tiny_model, tiny_tokenizer
