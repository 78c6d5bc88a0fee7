"""Law 6: decoding with a cache equals computing everything again, on logits; and generations do not mix."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from laws.examples import Example
from laws.tools import NEW, generate, prompts, recomputed
from tiny import tiny_ids

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "beam": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_cached_decoding_equals_recomputation(example: Example, name: str, way: str, attach: Any) -> None:
    model = attach(example, name)
    ids, mask = prompts()
    out = generate(model, ids, mask, **WAYS[way])
    steps = torch.stack(out.logits, 1)  # (running rows, NEW, V)
    rows = torch.arange(len(steps))[:, None].expand(-1, NEW)
    if "num_beams" in WAYS[way]:
        rows = out.beam_indices[:, :NEW]
    cached = steps[rows, torch.arange(NEW)]
    wanted = recomputed(model, out.sequences, mask)
    torch.testing.assert_close(cached, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.law("taken back")
def test_speculative_decoding_crops_the_cache(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name)
    ids = tiny_ids(1, 6).repeat(1, 3)  # a repetitive prompt, so that its tokens are drafts worth trying
    plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    lengths: list[int] = []
    embedding = model.model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _module, inputs, _output: lengths.append(inputs[0].shape[1]))
    drafted = model.generate(ids, max_new_tokens=NEW, do_sample=False, prompt_lookup_num_tokens=3)
    handle.remove()
    assert plain.tolist() == drafted.tolist()
    assert lengths[0] > ids.shape[1] or max(lengths[1:]) > 1, "no draft was tried"


def steps(model: Any, ids: Tensor) -> Iterator[int]:
    """Greedy decoding, one token each time that it is asked."""
    cache = None
    while True:
        with torch.no_grad():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        yield int(ids)


def test_two_generators_take_turns(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name)
    starts = [tiny_ids(1, 9, seed=1), tiny_ids(1, 14, seed=2)]
    alone = [[token for token, _ in zip(steps(model, start), range(NEW), strict=False)] for start in starts]
    generations = [steps(model, start) for start in starts]
    turns = [[next(generation) for generation in generations] for _ in range(NEW)]
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == alone


def test_threads_do_not_mix(example: Example, name: str, attach: Any) -> None:
    model = attach(example, name)
    starts = [tiny_ids(1, 9 + 4 * i, seed=i) for i in range(2)]
    how = {"do_sample": False, "min_new_tokens": NEW // 2, "max_new_tokens": NEW // 2}
    alone = [model.generate(start, **how).tolist() for start in starts]
    together: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, start=start: together.update({i: model.generate(start, **how).tolist()}))
        for i, start in enumerate(starts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together.get(i) for i in range(len(starts))] == alone
