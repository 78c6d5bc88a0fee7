"""Laws of decoding: caches change no logit, and a decode step makes the host wait for no accelerator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.testing.accelerator import decode_step_waits
from graftlm.testing.laws.base import LONG, LawsBase, decoders_only
from graftlm.testing.passes import (
    NEW_TOKENS,
    attach_graft,
    generate,
    logits,
    pad_rows,
    positions_of,
    prompts,
    randomise,
    recompute,
    rows_of,
)
from graftlm.testing.tiny import WINDOW

DECODING: dict[str, dict[str, object]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "beam": {"do_sample": False, "num_beams": 3},
}
CHUNKS = (70, 1, 59)
"""Numbers of tokens of the chunks of a prompt of `LONG` tokens."""


class DecodingLaws(LawsBase):
    """Caches change no logit, and a decode step makes the host wait for no accelerator."""

    @decoders_only
    @pytest.mark.parametrize("decoding", DECODING)
    def test_cached_decoding_equals_recomputation(self, family: str, decoding: str) -> None:
        ids, mask = prompts(LONG if decoding == "greedy" else 2 * WINDOW)
        with self.attach(family) as model:
            output = generate(model, ids, mask, **DECODING[decoding])
            expected = recompute(model, output.sequences, mask)
        steps = torch.stack(output.logits, 1)  # (running rows, NEW_TOKENS, V)
        rows = torch.arange(len(steps))[:, None].expand(-1, NEW_TOKENS)
        if decoding == "beam":
            rows = output.beam_indices[:, :NEW_TOKENS]
        actual = steps[rows, torch.arange(NEW_TOKENS)]
        self.assert_close(family, actual, expected, rtol=1e-4, atol=1e-4)

    @decoders_only
    def test_passes_on_one_cache_equal_one_pass(self, family: str) -> None:
        ids, mask = pad_rows(rows_of(LONG, LONG - 30), "left")
        positions = positions_of(mask)
        parts: list[Tensor] = []
        cache = None
        end = 0
        with self.attach(family) as model, torch.no_grad():
            expected = logits(model, ids, attention_mask=mask, position_ids=positions)
            for chunk, position in zip(ids.split(CHUNKS, 1), positions.split(CHUNKS, 1), strict=True):
                end += chunk.shape[1]
                output = model(chunk, mask[:, :end], position, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                parts.append(output.logits)
        actual = torch.cat(parts, 1)
        # Squared activations, as in Nemotron, amplify rounding.
        self.assert_close(family, actual[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-3)

    @decoders_only
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_decode_step_waits_for_no_accelerator(self, family: str, cache: str) -> None:
        own = self.backbone(family)
        # A copy, since it stays on the pretended device.
        copied = Backbone.wrap(copy.deepcopy(own.model), own.tokenizer, family)
        model = randomise(attach_graft(copied, self.config), self.spread).eval()
        assert not decode_step_waits(model, static=cache == "static")
