"""The law of mixed batches: a row's logits are what they are alone, whoever stands beside it, comes or leaves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from graftlm.backbone import Call, Site, Tap
from graftlm.errors import GraftError, TapConflictError
from graftlm.grafted.graft_set import GraftSet, MultiGraftModel, RowGroupError, latest_traces
from graftlm.grafted.model import GraftedModel
from graftlm.grafted.row_groups import MixedBatch
from graftlm.grafted.traces import trace_values
from graftlm.grafts import Graft
from laws.examples import EXAMPLES, Example
from laws.tools import graft_onto
from serving.engines import backbone, prompt, trained
from tiny import LAW_DECODERS, tiny_ids

BIASED = Example(
    "conditional-tasks",
    {
        "tasks": {"topics": {"type": "classification", "labels": ["sport", "politics"]}},
        "task_width": 4,
        "frozen": 1.0,
        "attention": "blocks",
        "block": 5,
        "max_length": 128,
        "bottleneck": "large",
    },
    name="biased",
    spread=0.1,
)
REREADING = Example(
    "token-routing", EXAMPLES["token-routing"][0].config | {"prompt": "whole", "every": 2}, name="whole"
)
PROMPT_ONLY = Example(
    "composition", EXAMPLES["composition"][0].config | {"refresh": "prompt"}, name="once", spread=0.05
)
MOST = 5  # rows of an example


def _examples(family: str) -> list[Example]:
    every = [one for kind in ("composition", "neutral-residues", "token-routing") for one in EXAMPLES[kind]]
    every += [REREADING, PROMPT_ONLY, *([] if family == "block-state" else [BIASED])]
    every += [example for example in EXAMPLES["memory"] if family in example.hosts]
    # What exchanges the backbone's keys and values can't do so for some rows where there are states instead.
    return [one for one in every if one.name != "recomputing" or family != "block-state"]


@functools.cache
def graft_sets(family: str) -> list[GraftSet]:
    """The bare backbone, every kind of graft with random weights, and two of them together."""
    grafts = [trained(family, example) for example in _examples(family)]
    alone = [GraftSet(((str(example), graft),)) for example, graft in zip(_examples(family), grafts, strict=True)]
    return [GraftSet(), *alone, GraftSet((("a", grafts[5]), ("b", grafts[7])))]


@dataclass(frozen=True)
class Row:
    """A row of a test: who complete, how long its prompt is, how many tokens follow, and when it comes."""

    graft_set: int
    length: int
    new: int
    comes: int


ROWS = st.builds(Row, st.integers(0, 99), st.integers(1, 20), st.integers(1, 10), st.integers(0, 6))


@functools.cache
@torch.inference_mode()
def alone(family: str, graft_set: GraftSet, length: int, new: int) -> Tensor:
    """(new, V) logits of a greedy continuation by itself."""
    model, found = GraftedModel(backbone(family), dict(graft_set.grafts)).eval(), []
    cache, ids = DynamicCache(config=model.config), torch.tensor([prompt(length)])
    try:
        for _ in range(new):
            found.append(model(input_ids=ids, past_key_values=cache).logits[0, -1])
            ids = found[-1].argmax()[None, None]
    finally:
        model.detach()
    return torch.stack(found)


def together(model: MultiGraftModel, rows: Sequence[Row], owners: Sequence[GraftSet], in_one: bool) -> list[Tensor]:
    """Each row's logits when all of them share batches, as far as batches join, prompts `in_one` pass or by owner."""
    found: list[list[Tensor]] = [[] for _ in rows]
    batches: list[MixedBatch] = []
    for turn in range(100):
        for graft_set in [None] if in_one else dict.fromkeys(owners):
            new = [n for n, row in enumerate(rows) if row.comes == turn and graft_set in (None, owners[n])]
            new.sort(key=lambda n: owners.index(owners[n]))
            if new:
                prompts = [prompt(rows[n].length) for n in new]
                batch, logits = model.prefill([owners[n] for n in new], prompts, new)
                _note(batch, logits, rows, found)
                if len(batch) and not any(other.join(batch) for other in batches):
                    batches.append(batch)
        for batch in batches:
            _note(batch, model.decode(batch, [int(found[n][-1].argmax()) for n in batch.tags]), rows, found)
        batches = [batch for batch in batches if len(batch)]
    return [torch.stack(one) for one in found]


def _note(batch: MixedBatch, logits: Tensor, rows: Sequence[Row], found: list[list[Tensor]]) -> None:
    for row, n in enumerate(batch.tags):
        found[n].append(logits[row])
    batch.keep([row for row, n in enumerate(batch.tags) if len(found[n]) < rows[n].new])
    assert batch.lengths == batch.mask.sum(1).tolist()


def _tolerance(graft_set: GraftSet) -> float:
    """Models are in float64; routing weights are in float32 by definition, and rounded by the shape of the batch."""
    return 1e-4 if any(graft.config.kind == "token-routing" for _, graft in graft_set.grafts) else 1e-9


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "llama" else pytest.mark.slow) for name in LAW_DECODERS]
)
def test_a_row_is_what_it_is_alone(family: str) -> None:
    known = graft_sets(family)

    @settings(max_examples=3)
    @given(st.lists(ROWS, min_size=2, max_size=MOST), st.booleans())
    def law(rows: list[Row], in_one: bool) -> None:
        owners = [known[row.graft_set % len(known)] for row in rows]
        expected = [alone(family, graft_set, row.length, row.new) for graft_set, row in zip(owners, rows, strict=True)]
        model = MultiGraftModel(backbone(family))
        try:
            logits = together(model, rows, owners, in_one)
        finally:
            model.detach()
        for row, mixed, single in zip(rows, logits, expected, strict=True):
            tolerance = _tolerance(known[row.graft_set % len(known)])
            torch.testing.assert_close(
                mixed, single, atol=tolerance, rtol=tolerance, msg=lambda text, row=row: f"{row}: {text}"
            )

    law()


@pytest.mark.parametrize("family", ["llama", pytest.param("block-state", marks=pytest.mark.slow)])
def test_the_prompts_of_all_graft_sets_are_read_in_one_pass(family: str) -> None:
    known, model = graft_sets(family), MultiGraftModel(backbone(family))
    rows = [Row(n, 17 + 7 * n % 5, 2 + n % 3, comes=0) for n in range(len(known))]
    passes: list[int] = []
    handle = model._model.register_forward_hook(lambda *_: passes.append(1))
    try:
        logits = together(model, rows, known, in_one=True)
    finally:
        handle.remove()
        model.detach()
    assert len(passes) <= 5, "one for all prompts, and one for each further token"
    for row, mixed, graft_set in zip(rows, logits, known, strict=True):
        single, tolerance = alone(family, graft_set, row.length, row.new), _tolerance(graft_set)
        torch.testing.assert_close(
            mixed, single, atol=tolerance, rtol=tolerance, msg=lambda text, of=graft_set: f"{of}: {text}"
        )


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_longer_neighbour_that_leaves_ends_nobody(family: str) -> None:
    """Own columns begin in its padding, and a layer that had read nothing can't lose columns any more."""
    by_name = {str(graft_set): graft_set for graft_set in graft_sets(family)}
    owners = [by_name["the bare backbone"], by_name["two-tokenizers"], by_name["neutral-residues"]]
    rows = [Row(0, 20, 2, comes=0), Row(0, 1, 8, comes=0), Row(0, 12, 8, comes=0)]
    model = MultiGraftModel(backbone(family))
    try:
        logits = together(model, rows, owners, in_one=True)
    finally:
        model.detach()
    for row, owner, mixed in zip(rows, owners, logits, strict=True):
        torch.testing.assert_close(mixed, alone(family, owner, row.length, row.new), atol=1e-9, rtol=1e-9)


def test_rows_of_one_backbone_stay_in_one_batch_and_lose_the_columns_of_those_that_leave() -> None:
    known, model = graft_sets("gemma3"), MultiGraftModel(backbone("gemma3"))
    batch, _ = model.prefill(known[6], [prompt(15), prompt(3)], ["long", "short"])
    other, _ = model.prefill(known[0], [prompt(5)], ["bare"])
    third, _ = model.prefill(known[6], [prompt(4)], ["third"])
    assert batch.join(other)
    assert batch.join(third)
    assert batch.tags == ["long", "short", "third", "bare"]
    assert [group.size for group in batch.groups] == [3, 1]
    model.decode(batch, [7, 7, 7, 7])
    batch.keep([1, 2])
    assert batch.mask.tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert batch.cache.get_seq_length() == 5
    assert [group.size for group in batch.groups] == [2]
    model.detach()


def test_a_batch_that_all_rows_have_left_takes_no_other() -> None:
    graft_set, model = graft_sets("llama")[0], MultiGraftModel(backbone("llama"))
    gone, _ = model.prefill(graft_set, [prompt(5)], ["gone"])
    gone.keep([])
    batch, _ = model.prefill(graft_set, [prompt(3), prompt(4)], ["a", "b"])
    assert not gone.join(batch)
    alone, _ = model.prefill(graft_set, [prompt(3), prompt(4)], ["a", "b"])
    torch.testing.assert_close(model.decode(batch, [7, 7]), model.decode(alone, [7, 7]))
    model.detach()


def test_traces_are_those_of_the_row_alone() -> None:
    host, known = backbone("llama"), graft_sets("llama")
    routed, gated, both = known[8], known[6], known[-1]
    model = MultiGraftModel(host)
    batch, _ = model.prefill(routed, [prompt(9), prompt(4)], [0, 1])
    batch.groups[0].separate = True  # so that rows of one owner are in two places
    for graft_set, tag in ((gated, 2), (both, 3), (GraftSet(), 4), (routed, 5)):
        assert batch.join(model.prefill(graft_set, [prompt(6)], [tag])[0])
    model.decode(batch, [8] * 6)
    found = latest_traces(batch, range(6))
    model.detach()
    rows = {0: (routed, 9), 1: (routed, 4), 2: (gated, 6), 3: (both, 6), 5: (routed, 6)}
    for row, (graft_set, length) in rows.items():
        with GraftedModel(host, dict(graft_set.grafts)) as single, torch.inference_mode():
            cache = DynamicCache(config=single.config)
            for ids in ([prompt(length)], [[8]]):
                _, traces = single.forward_traces(input_ids=torch.tensor(ids), past_key_values=cache, use_cache=True)
        expected = trace_values(traces, 0)
        assert expected
        assert found[row] == pytest.approx(expected, abs=1e-5)
    assert set(found[3]) == {"a: open", "b: english", "b: code", "b: french", "b: none"}
    assert 4 not in found or found[4] == {}


class Fuse(Graft):
    """Adds to one layer; raises at a chosen token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def taps(self) -> list[Tap]:
        return [Tap(Site("ffn", 1), "after", "add", self._add)]

    def _add(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        assert call.input_ids is not None
        if (call.input_ids == self.token).any():
            raise ZeroDivisionError
        return inputs * 0.5


def test_a_failed_pass_leaves_the_batch_as_it_was() -> None:
    known = graft_sets("gemma3")
    fused, model = GraftSet((("fuse", Fuse(9)),)), MultiGraftModel(backbone("gemma3"))
    batch, _ = model.prefill(known[8], [prompt(12)], ["routed"])
    assert batch.join(model.prefill(fused, [prompt(3), prompt(4)], ["a", "b"])[0])
    with pytest.raises(RowGroupError) as caught:
        model.decode(batch, [7, 7, 9])
    assert caught.value.group == 1
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    batch.split(1)
    assert [group.size for group in batch.groups] == [1, 1, 1]
    with pytest.raises(RowGroupError) as caught:
        model.decode(batch, [7, 7, 9])
    assert caught.value.group == 2
    batch.keep([0, 1])
    found = model.decode(batch, [7, 7])
    again, _ = model.prefill(known[8], [prompt(12)], ["routed"])
    torch.testing.assert_close(found[:1], model.decode(again, [7]), atol=1e-9, rtol=1e-9)
    again, _ = model.prefill(fused, [prompt(3)], ["a"])
    torch.testing.assert_close(found[1:], model.decode(again, [7]), atol=1e-9, rtol=1e-9)
    model.detach()


def test_the_backbone_is_given_back_bit_for_bit() -> None:
    host, graft_set = backbone("gpt2"), graft_sets("gpt2")[6]
    ids = tiny_ids()
    before = host.model(input_ids=ids).logits
    model = MultiGraftModel(host)
    model.prefill(graft_set, [prompt(4)], [0])
    with pytest.raises(TapConflictError):
        MultiGraftModel(host)
    assert torch.equal(host.model(input_ids=ids).logits, before)  # a pass that is announced by nobody is bare
    model.detach()
    assert torch.equal(host.model(input_ids=ids).logits, before)
    assert not [hook for module in host.model.modules() for hook in module._forward_hooks]


@pytest.mark.parametrize("kind", ["lora", "finetune"])
def test_what_brings_modules_of_its_own_is_refused(kind: str) -> None:
    graft_set = GraftSet((("own", _untrained(kind)),))
    model = MultiGraftModel(backbone("llama"))
    with pytest.raises(GraftError):
        model.wire([graft_set])
    model.detach()


def _untrained(kind: str) -> Graft:
    model = graft_onto(backbone("llama"), EXAMPLES[kind][0])
    model.detach()
    graft = model.grafts["graft"]
    assert isinstance(graft, Graft)
    return graft
