"""The laws of grafts as tests, for your own grafts.

Register the graft, and this test file runs all laws on it:

    from graftlm.testing import GraftLaws

    class TestMyGraft(GraftLaws):
        config = {"kind": "my-graft"}

No plugin has to be loaded. `pytest_plugins = ["graftlm.testing"]` in a conftest.py does no harm.
"""

import pytest

pytest.register_assert_rewrite("graftlm.testing.laws")

from graftlm.testing.laws import GraftLaws, decoders_only  # noqa: E402
from graftlm.testing.passes import attach_graft, logits, randomise  # noqa: E402
from graftlm.testing.tiny import tiny_ids, tiny_model, tiny_tokenizer  # noqa: E402
