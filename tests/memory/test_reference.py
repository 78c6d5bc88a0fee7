"""Law 9: the fast path equals `reference.py`, in outputs and gradients, for any cut of a text and beyond its reach."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from graftlm.grafted.model import GraftedModel
from graftlm.grafts.memory.window import WindowLayer, WindowShape
from graftlm.models.delta_rule import delta_rule
from graftlm.testing import logits
from graftlm.testing.laws import gradients, pad_rows, positions_of
from memory.tools import REACH, live, memory_model, memory_of, slow_logits
from tiny import tiny_ids

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
CUTS = {"pieces of 7": range(0, 61, 7), "tokens": range(51), "uneven": (0, 3, 10, 11, 19, 20, 28, 36, 37, 45, 50)}


def in_pieces(model: GraftedModel, ids: Tensor, ends: Any, mask: Tensor | None = None) -> Tensor:
    """(B, T, V) from passes on one cache."""
    outputs = []
    cache = None
    for start, end in pairwise(ends):
        end = min(end, ids.shape[1])
        inputs = {}
        if mask is not None:
            inputs = {"attention_mask": mask[:, :end], "position_ids": positions_of(mask)[:, start:end]}
        with torch.no_grad():
            output = model(ids[:, start:end], past_key_values=cache, use_cache=True, **inputs)
        cache = output.past_key_values
        outputs.append(output.logits)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("sinks", [0, 2])
def test_one_pass_equals_the_reference_in_logits_and_gradients(sinks: int) -> None:
    backbone = live()
    ids = tiny_ids(1, 15)
    with memory_model(backbone, sinks=sinks) as model:
        parameters = model.trainable_parameters()
        slow = slow_logits(backbone, memory_of(model), ids[0])
        torch.testing.assert_close(logits(model, ids)[0], slow, **CLOSE)
        loss = torch.nn.functional.cross_entropy(slow[:-1], ids[0, 1:])
        slow_gradients = torch.autograd.grad(loss, list(parameters.values()))
        expected = dict(zip(parameters, slow_gradients, strict=True))
        actual = gradients(model.train(), input_ids=ids, labels=ids)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_passes_beyond_the_reach_equal_the_reference() -> None:
    backbone = live()
    ids = tiny_ids(1, 50)
    with memory_model(backbone, reach=REACH) as model:
        expected = slow_logits(backbone, memory_of(model), ids[0])
        for name, cut in CUTS.items():
            actual = in_pieces(model, ids, cut)[0]
            torch.testing.assert_close(actual, expected, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_padded_rows_beyond_the_reach_equal_the_reference(cut: str) -> None:
    backbone = live()
    rows = [tiny_ids(1, length, seed=length)[0] for length in (50, 49, 46, 24, 13, 3)]
    ids, mask = pad_rows(rows, "left")
    with memory_model(backbone, reach=REACH) as model:
        actual = in_pieces(model, ids, CUTS[cut], mask)
        for number, row in enumerate(rows):
            expected = slow_logits(backbone, memory_of(model), row)
            torch.testing.assert_close(actual[number, -len(row) :], expected, **CLOSE)


def test_generation_beyond_the_reach_equals_the_reference() -> None:
    backbone = live()
    ids = tiny_ids(1, 12)
    decoding = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    with memory_model(backbone, reach=REACH) as model:
        output: Any = model.generate(ids, **decoding, return_dict_in_generate=True, output_logits=True)
        expected = slow_logits(backbone, memory_of(model), output.sequences[0])[11:-1]
    torch.testing.assert_close(torch.cat(output.logits), expected, **CLOSE)


def test_sinks_are_rotated_when_they_move_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a decode step into a new block rotates the sinks, in both layers."""
    calls: list[int] = []
    rotate = WindowShape.moved

    def counted(*args: Any) -> Tensor:
        calls.append(length)
        return rotate(*args)

    ids = tiny_ids(2, REACH - 2)
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        monkeypatch.setattr(WindowShape, "moved", counted)
        output = model(ids, attention_mask=torch.ones_like(ids), use_cache=True)
        for length in range(REACH - 1, REACH + 18):
            mask = torch.ones(2, length, dtype=torch.long)
            output = model(ids[:, :1], attention_mask=mask, past_key_values=output.past_key_values, use_cache=True)
    assert calls == [REACH + 1, REACH + 1, REACH + 9, REACH + 9, REACH + 17, REACH + 17]


def test_rows_that_change_places_beyond_the_reach_keep_their_sinks() -> None:
    ids = tiny_ids(2, 30)
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        expected = in_pieces(model, ids.flip(0), range(0, 31, 6))[:, -2:]
        cache: Any = model(ids[:, :12], use_cache=True).past_key_values
        for position in range(12, 28):
            model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([1, 0]))
        actual = [
            model(ids.flip(0)[:, position : position + 1], past_key_values=cache, use_cache=True).logits
            for position in (28, 29)
        ]
    torch.testing.assert_close(torch.cat(actual, 1), expected, **CLOSE)


@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_that_is_reset_or_saved_knows_nothing_of_the_text_before(padded: bool) -> None:
    first, second = tiny_ids(2, 20), tiny_ids(2, 20, seed=5)
    mask = torch.ones_like(second)
    mask[0, :3] = 1 - padded
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        expected = in_pieces(model, second, range(21), mask)
        cache: Any = model(first[:, :12], use_cache=True).past_key_values
        for position in range(12, 20):
            model(first[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = pickle.loads(pickle.dumps(cache))
        cache.reset()
        rows = {"past_key_values": cache, "use_cache": True}
        positions = positions_of(mask)
        actual = [
            model(second[:, t : t + 1], attention_mask=mask[:, : t + 1], position_ids=positions[:, t : t + 1], **rows)
            for t in range(20)
        ]
    torch.testing.assert_close(torch.cat([output.logits for output in actual], 1)[:, 3:], expected[:, 3:], **CLOSE)


def test_an_untrained_memory_is_transformers_own_sliding_window() -> None:
    backbone = live()
    ids = tiny_ids(2, 40)
    values = backbone.model.config.to_dict() | {"sliding_window": 6, "model_type": "mistral"}
    windowed = MistralForCausalLM(MistralConfig(**values)).eval()
    windowed.load_state_dict(backbone.model.state_dict())
    with memory_model(backbone, spread=0, sinks=0) as model:
        torch.testing.assert_close(logits(model, ids), logits(windowed, ids), rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(in_pieces(model, ids, range(41)), logits(windowed, ids), rtol=1e-5, atol=5e-5)
    with memory_model(backbone, spread=0, state="none", sinks=0) as model:
        torch.testing.assert_close(logits(model, ids), logits(windowed, ids), rtol=1e-5, atol=5e-5)
        assert not model.trainable_parameters()


def test_the_cache_has_a_constant_size_and_what_left_it_does_not_matter() -> None:
    sizes = []
    with memory_model(live(), reach=REACH) as model, torch.no_grad():
        cache: Any = None
        for step in range(40):
            cache = model(tiny_ids(2, 5, seed=step), past_key_values=cache, use_cache=True).past_key_values
            tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
            sizes.append(sum(tensor.numel() for tensor in tensors))
    assert len(set(sizes[2:])) == 1, sizes
    windows = [layer for layer in cache.layers if isinstance(layer, WindowLayer)]
    assert {layer.keys.shape[-2] for layer in windows} == {2 + 6 - 1}  # type: ignore[union-attr]
    assert cache.get_seq_length() == 200


def test_a_state_tells_what_no_window_reaches() -> None:
    ids = tiny_ids(1, 40)
    other = ids.clone()
    other[:, 3] = (other[:, 3] + 1) % 250 + 4  # beyond two layers of windows, and no sink
    for state, reaches in (("delta", True), ("none", False)):
        with memory_model(live(), state=state) as model:
            difference = (logits(model, ids) - logits(model, other))[:, 20:].abs().max()
            assert (difference > 1e-3) == reaches, state


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_the_delta_rule_is_its_recurrence(chunk: int, packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 150, n, generator=generator, dtype=torch.float64) for n in (8, 8, 5))
    k = torch.nn.functional.normalize(k, dim=-1)
    a, b = (torch.rand(2, 3, 150, generator=generator, dtype=torch.float64) for _ in range(2))
    document = torch.zeros(2, 150, dtype=torch.long)
    if packed:
        document[0, 40:] = 1
        document[0, 100:] = 2
        document[1, 70:] = 1
    expected, expected_state = recurrence(q, k, v, a, b, document)
    actual, state = delta_rule(q, k, v, a.log(), b, None, document if packed else None, chunk)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, expected_state, rtol=1e-9, atol=1e-10)


def recurrence(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, document: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, T, V) and the last state (B, H, K, V) of the delta rule, token by token."""
    rows, heads, length, width = q.shape
    state = torch.zeros(rows, heads, width, v.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(length):
        if t:
            same_document = document[:, t] == document[:, t - 1]
            state = state * same_document[:, None, None, None]
        state = a[..., t, None, None] * state
        read = (state.transpose(-1, -2) @ k[:, :, t, :, None])[..., 0]
        correction = b[..., t, None] * (v[:, :, t] - read)
        state = state + k[:, :, t, :, None] * correction[:, :, None]
        outputs.append((state.transpose(-1, -2) @ q[:, :, t, :, None])[..., 0])
    return torch.stack(outputs, 2), state
