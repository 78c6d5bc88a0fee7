"""The prediction of a row depends only on the row and its task, on every kind of encoder and on a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from cases import rotated
from conditional_tasks.tools import LENGTHS, OFF, TASK, TASKS, batch, build, host, random_model, real, targets
from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.conditional_tasks.modules import ConditionalBias, RowTasks, TokenPositions
from graftlm.grafts.heads import TaskSpec
from tiny import ENCODERS, tiny_ids, tiny_model, tiny_tokenizer

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def alone(model: GraftedModel, pad: int = 0) -> list[Tensor]:
    """Each row in a batch of its own, without padding."""
    ids, _ = batch(pad=pad)
    actual = []
    for row, size in enumerate(LENGTHS):
        actual += model.predict(ids[row : row + 1, :size], extras={"task": TASK[row : row + 1]})
    return actual


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for first, second in zip(actual, expected, strict=True):
        torch.testing.assert_close(first, second, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(("family", "bottleneck"), rotated([*ENCODERS, "llama"], ["base", "large"]))
def test_a_mixed_batch_equals_the_tasks_one_by_one_whatever_the_padding(family: str, bottleneck: str) -> None:
    pooling = "last" if family == "llama" else "first"
    with random_model(host(family, double=True), bottleneck=bottleneck, pooling=pooling) as model:
        expected = alone(model)
        for side, length in (("right", 13), ("left", 13), ("right", 17), ("left", 29)):
            ids, mask = batch(side, length)
            same(real(model.predict(ids, mask, {"task": TASK}), mask), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deberta-v2", "distilbert", "gpt2", "gemma3n", "block-state", "deepseek_v3"])
def test_each_row_has_its_tasks_lora_in_every_kind_of_layer(family: str) -> None:
    """Transposed and fused Linears, several streams, windows, and Linears that read positions beside tokens."""
    pooling = "first" if family in ENCODERS else "last"
    values = {"lora_rank": 2, "frozen": 1.0, "modulated": 1.0, "pooling": pooling}
    double = family != "deepseek_v3"  # its experts have no double precision
    with random_model(host(family, double=double), **(OFF | values)) as model:
        expected = alone(model)
        ids, mask = batch()
        mixed = real(model.predict(ids, mask, {"task": TASK}), mask)
        for first, second in zip(mixed, expected, strict=True):
            torch.testing.assert_close(first, second, **(CLOSE if double else {"rtol": 1e-3, "atol": 1e-3}))
        with torch.enable_grad():
            model(ids, mask, extras={"task": TASK}, targets=targets()).loss.backward()
        unused = [name for name, p in model.trainable_parameters().items() if ".loras." in name and not p.grad.any()]
        assert not unused, "a LoRA of each Linear and each task acts"
        for name, parameter in model.trainable_parameters().items():
            parameter.mul_(0 if ".loras." in name else 1)
        gaps = [float((a - b).abs().max()) for a, b in zip(alone(model), expected, strict=True)]
        assert min(gaps) > 1e-3, "all rows have a LoRA"


def test_linears_of_a_layer_read_tokens_and_are_no_parts_of_other_linears() -> None:
    layer = "deberta.encoder.layer.0."
    assert [path.removeprefix(layer) for path in host("deberta-v2").sites.linears(0)] == [
        *("intermediate.dense", "output.dense", "attention.self.value_proj", "attention.output.dense"),
    ]
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj", "up_proj"]))
    backbone = Backbone.wrap(adapted.base_model.model, tiny_tokenizer(), "llama")  # type: ignore[arg-type]  # Llama
    assert backbone.sites.linears(1) == host("llama").sites.linears(1)
    assert not any("mlp" in path for path in host("mixtral").sites.linears(0)), "experts read some tokens"


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_layer_has_the_same_graphs_whatever_tasks_a_batch_has() -> None:
    graphs: list[Any] = []
    values = {"lora_rank": 2, "frozen": 1.0, "modulated": 1.0}
    with random_model(host(), **(OFF | values)) as model:
        ids, mask = batch()
        layer: Any = model.backbone.sites.layers[1]
        layer.compile(backend=lambda graph, _: graphs.append(graph) or graph)
        counts = []
        for tasks in ([0] * 6, [0, 1] * 3, [0, 1, 2] * 2, [1, 2] * 3, [4] * 6, [2, 3, 4] * 2, [0, 2, 4] * 2):
            model.encode(ids, mask, extras={"task": torch.tensor(tasks)})
            counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[2:] == [counts[2]] * 5, "one task, two, any number: which ones makes no other graph"


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_no_pooling_reads_padding(pooling: str) -> None:
    with random_model(host(double=True), pooling=pooling) as model:
        expected = alone(model)
        ids, mask = batch("left", 16)
        ids[mask == 0] = 77
        same(real(model.predict(ids, mask, {"task": TASK}), mask), expected)


@torch.no_grad()
def test_a_span_never_lies_in_the_padding() -> None:
    with random_model(host()) as model:
        ids, mask = batch("left", 20)
        start, end = model.predict(ids, mask, {"task": TASK})[4].T
        assert start.softmax(0)[mask[4] == 0].sum() == end.softmax(0)[mask[4] == 0].sum() == 0


def test_the_loss_of_the_heads_comes_in_a_tuple_on_request() -> None:
    with random_model(host(double=True)) as model:
        ids, mask = batch()
        inputs = {"input_ids": ids, "attention_mask": mask, "extras": {"task": TASK}, "targets": targets()}
        output = model(**inputs, return_dict=False)
        assert isinstance(output, tuple)
        torch.testing.assert_close(output[0], model(**inputs).loss)


def test_losses_of_parts_add_up_to_that_of_the_batch() -> None:
    with random_model(host(double=True)) as model:
        ids, mask = batch()
        whole = model(ids, mask, extras={"task": TASK}, targets=targets()).loss
        parts = []
        for first in (0, 2, 4):
            rows = slice(first, first + 2)
            output = model(
                ids[rows],
                mask[rows],
                extras={"task": TASK[rows]},
                targets=targets()[rows],
                totals=torch.tensor([6.0, 58.0]),
            )
            parts.append(output.loss)
        torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", [*ENCODERS, "llama"])
def test_untrained_it_is_the_backbone_to_the_bit(family: str) -> None:
    backbone = host(family)
    ids, mask = batch()
    bare = backbone.model.base_model(input_ids=ids, attention_mask=mask)[0]
    for changes in ({}, {"bottleneck": "large", "frozen": 0.0}, OFF):
        with GraftedModel(backbone, {"graft": build(backbone, **changes)}).eval() as model:
            assert torch.equal(model.encode(ids, mask, {"task": TASK})[mask == 1], bare[mask == 1])


def test_a_tasks_embedding_tells_on_its_rows_alone() -> None:
    with random_model(host()) as model:
        graft: Any = model.grafts["graft"]
        ids, mask = batch()
        with torch.no_grad():
            before = model.predict(ids, mask, {"task": TASK})
            graft.embeddings["task:topics"].add_(1)
            after = model.predict(ids, mask, {"task": TASK})
        for row, task in enumerate(TASK.tolist()):
            assert torch.allclose(before[row], after[row], atol=1e-6) == (task != 0)


def test_a_single_task_is_the_default() -> None:
    tasks = {"topics": TASKS["topics"]}
    with random_model(host(), tasks=tasks) as model:
        ids, mask = batch()
        explicit = model.predict(ids, mask, {"task": torch.zeros(len(ids), dtype=torch.long)})
        assert all(torch.equal(a, b) for a, b in zip(model.predict(ids, mask), explicit, strict=True))


def test_what_a_batch_must_say() -> None:
    with random_model(host()) as model:
        ids, mask = batch()
        with pytest.raises(GraftError) as error:
            model.predict(ids, mask)
        assert "topics, quality" in str(error.value)
        for wrong in (7, -1):
            with pytest.raises(GraftError) as error:
                model.predict(ids, mask, {"task": TASK.clamp(max=3).index_fill(0, torch.tensor([2]), wrong)})
            assert f"task number {wrong}" in str(error.value)
        long = tiny_ids(6, 40)
        ones = torch.ones(6, 40, dtype=torch.long)
        with pytest.raises(GraftError) as error:
            model.predict(long, ones, {"task": TASK})
        assert "40 tokens" in str(error.value)
        ones[:, 30:] = 0
        assert len(model.predict(long, ones, {"task": TASK})) == 6, "padding counts for nothing"
        ones = ones.flip(1)
        assert len(model.predict(long, ones, {"task": TASK})) == 6


def test_a_graft_without_heads_says_so() -> None:
    from graftlm.grafts import build_graft, graft_config

    backbone = host()
    ids, mask = batch()
    with (
        GraftedModel(backbone, {"plain": build_graft(graft_config({"kind": "adapter"}), backbone)}) as model,
        pytest.raises(GraftError) as error,
    ):
        model.predict(ids, mask)
    assert "plain" in str(error.value)
    both = {name: build(backbone, **OFF, frozen=1.0) for name in ("one", "two")}
    with (
        GraftedModel(backbone, both) as model,
        pytest.raises(GraftError) as error,
    ):
        model.predict(ids, mask, {"task": TASK})
    assert "one, two" in str(error.value)


class TestBias:
    """Blocks, windows and places of M(z), by hand."""

    def bias(self) -> ConditionalBias:
        made = ConditionalBias(10, 4, 2)
        with torch.no_grad():
            made.blocks.normal_()
            for parameter in made.film.parameters():
                parameter.normal_()
        return made

    def test_both_ways_give_the_same(self) -> None:
        made = self.bias()
        tasks = RowTasks(torch.tensor([0, 1]), torch.randn(2, 2), torch.tensor([0, 1, 0]))
        for total, queries in ((10, 10), (7, 7), (9, 2), (10, 1)):
            for seen in (slice(0, total), slice(2, total)):
                straight = made(tasks, TokenPositions(total, queries), seen)
                positions = torch.arange(total)[None].expand(3, -1)
                anywhere = made(tasks, TokenPositions(positions, queries), seen)
                assert straight.shape == (3, 1, queries, seen.stop - seen.start)
                torch.testing.assert_close(straight, anywhere)

    def test_blocks_lie_on_the_diagonal_and_the_last_is_cut(self) -> None:
        made = self.bias()
        tasks = RowTasks(torch.tensor([0]), torch.randn(1, 2), None)
        m = made(tasks, TokenPositions(10, 10), slice(0, 10))[0, 0]
        block = torch.arange(10) // 4
        assert (m[block[:, None] != block[None]] == 0).all()
        assert (m[block[:, None] == block[None]] != 0).all()
        torch.testing.assert_close(m[8:, 8:], made.matrices(tasks, 3)[0, 2, :2, :2])

    def test_gradients_are_the_same_both_ways(self) -> None:
        made = self.bias()
        tasks = RowTasks(torch.tensor([0]), torch.randn(1, 2), None)
        w = torch.randn(9, 9)
        actual = []
        for keys in (9, torch.arange(9)[None]):
            loss = (made(tasks, TokenPositions(keys, 9), slice(0, 9))[0, 0] * w).sum()
            actual.append(torch.autograd.grad(loss, list(made.parameters())))
        for first, second in zip(*actual, strict=True):
            torch.testing.assert_close(first, second)


def test_a_task_may_be_called_as_a_modules_own_name() -> None:
    tasks = {name: TaskSpec(type="regression") for name in ("type", "keys", "train", "z b", "a")}
    with random_model(host(), tasks=tasks) as model:
        assert list(model.grafts["graft"].tasks()) == ["type", "keys", "train", "z b", "a"]  # type: ignore[operator]
        assert len(model.predict(tiny_ids(5, 6), extras={"task": torch.arange(5)})) == 5
