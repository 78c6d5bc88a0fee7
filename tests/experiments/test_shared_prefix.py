"""Continuations of prompts that share a prefix."""

from __future__ import annotations

from pathlib import Path

import torch

from experiments.facts.shared_prefix import SharedPrefix
from graftlm.backbone import load_backbone

PREFIX = [5, 9, 3, 7, 5, 6]
PROMPTS = [[8, 4], [3], [10, 11, 12, 4, 5]]


def alone(model: torch.nn.Module, prompt: list[int], tokens: int) -> list[int]:
    """The greedy continuation of one prompt, which is read anew for every token."""
    ids = [*PREFIX, *prompt]
    for _ in range(tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(PREFIX) + len(prompt) :]


@torch.inference_mode()
def test_rows_continue_as_if_each_were_alone(tiny_chat_model: Path) -> None:
    """Twice, so that nothing of an earlier batch remains in the cache."""
    model = load_backbone(str(tiny_chat_model)).model.double()
    shared = SharedPrefix(model, PREFIX)
    for prompts in (PROMPTS, PROMPTS[::-1]):
        expected = [alone(model, prompt, 7) for prompt in prompts]
        assert shared.continued(prompts, 7, ends=()) == expected


@torch.inference_mode()
def test_a_row_ends_at_its_end_and_others_go_on(tiny_chat_model: Path) -> None:
    model = load_backbone(str(tiny_chat_model)).model.double()
    whole = [alone(model, prompt, 7) for prompt in PROMPTS]
    end = whole[0][2]
    expected = [row[: row.index(end)] if end in row else row for row in whole]
    assert SharedPrefix(model, PREFIX).continued(PROMPTS, 7, ends={end}) == expected
