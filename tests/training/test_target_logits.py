"""Training computes logits only before targets, a few at a time.

Its losses and gradients are those of all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.data.rows import Batch
from graftlm.grafted import chunked_losses
from graftlm.grafted.losses import IGNORED
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft, build_graft, graft_config
from graftlm.testing.passes import randomise
from graftlm.training import TrainingConfig, train
from graftlm.training.distributed import LossModule
from graftlm.training.language_model import LanguageModel
from graftlm.training.stateful import StatefulModel
from laws import examples
from tiny import FAMILY_CONFIGS, tiny_ids, tiny_model, tiny_tokenizer

EXPERTS = {
    "english": {"rank": 4, "targets": ["attention", "lm_head"], "texts": ["The quick brown fox"]},
    "code": {"rank": 2, "targets": ["lm_head"], "texts": ["def forward(self)"]},
}
GRAFTS: dict[str, dict[str, Any]] = {
    "neutral-residues": {"kind": "neutral-residues", "alpha": 0},
    "lora": {"kind": "lora"},
    "finetune": {"kind": "finetune"},
    "llama-pro": {"kind": "llama-pro", "blocks": 1},
    "memory": {"kind": "memory", "window": 6, "sinks": 1, "layers": 2, "heads": 2, "head_width": 8},
    "experts on the head": {"kind": "token-routing", "experts": EXPERTS},
    "LoRA on the head": {
        "kind": "peft",
        "method": "LORA",
        "options": {"r": 4, "target_modules": ["lm_head", "q_proj"]},
    },
}
MIXTURES = [example for example in examples.EXAMPLES["composition"] if example.name in ("mixture", "readout-alone")]
GRAFTS |= {example.name: example.values() for example in MIXTURES}
FAMILIES = [
    pytest.param(family, marks=() if family in ("gemma2", "granite", "opt", "bert") else pytest.mark.slow)
    for family in FAMILY_CONFIGS
    if family != "mamba2"  # It has no attention, so Backbone refuses it.
]
"""Some scale logits or cap them; OPT's head calls a module inside its base model, and BERT's is not its last module."""


def batch(**changes: Tensor) -> dict[str, Any]:
    """Rows of which one is padded, one has no target, and two are old."""
    ids = tiny_ids(5, 16)
    labels = torch.full_like(ids, IGNORED)
    labels[0, 3:5] = ids[0, 3:5]
    labels[0, 14:] = ids[0, 14:]
    labels[1, 1:7] = ids[1, 1:7]
    labels[3] = ids[3]
    labels[4, 9] = ids[4, 9]
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask, "domain": torch.tensor([0, 1, 1, 0, 1])}
    return inputs | changes


TARGETS = 4 + 6 + 15 + 1  # The first token of a row is never predicted.
CHUNK = 5
ACTS_AFTER_BODY = {"experts on the head", *(example.name for example in MIXTURES)}
"""Grafts whose logits before targets are computed together."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a chunk have `CHUNK` tokens."""
    monkeypatch.setattr(chunked_losses, "chunk_size", lambda vocabulary, device: CHUNK)


def grafted(config: Mapping[str, Any], family: str = "llama", **options: Any) -> GraftedModel:
    backbone = Backbone.wrap(tiny_model(family, tie_word_embeddings=False), tiny_tokenizer(), "tiny")
    torch.manual_seed(0)
    graft = build_graft(graft_config(dict(config)), backbone)
    return randomise(GraftedModel(backbone, {"graft": graft}, **options), spread=0.05).train()


def reference_loss(model: GraftedModel, inputs: Mapping[str, Any], taught: Tensor | None = None) -> Tensor:
    """The loss by its definition, from the logits of all tokens."""
    output = model(**inputs)
    total = torch.zeros(())
    labels = inputs["labels"]
    for row, column in (labels[:, 1:] != IGNORED).nonzero().tolist():
        log_q = functional.log_softmax(output.logits[row, column].float(), -1)
        if taught is not None and inputs["domain"][row] == 0:
            log_p = functional.log_softmax(taught[row, column].float(), -1)
            total = total + (log_p.exp() * (log_p - log_q)).sum()
        else:
            total = total - log_q[labels[row, column + 1]]
    return total / int((labels[:, 1:] != IGNORED).sum())


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


@contextmanager
def head_inputs(model: Any) -> Iterator[list[int]]:
    """Collect the number of tokens in each call of an output layer."""
    counts: list[int] = []
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # the layer that an adapter wraps
    handle = head.register_forward_hook(lambda module, args, output: counts.append(output[..., 0].numel()))
    try:
        yield counts
    finally:
        handle.remove()


def check_equal(model: GraftedModel, inputs: Mapping[str, Any], taught: Tensor | None = None) -> None:
    """Compare loss and gradients with those of all logits. Dropout draws the same numbers in both passes."""
    torch.manual_seed(1)
    expected = reference_loss(model, inputs, taught)
    torch.manual_seed(1)
    with head_inputs(model.model) as counts:
        output = model(**inputs, return_logits=False)
    assert sum(counts) == int((inputs["labels"][:, 1:] != IGNORED).sum())
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=1e-6)
    actual_gradients = gradients_of(output.loss, model)
    expected_gradients = gradients_of(expected, model)
    assert actual_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(actual_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("graft", GRAFTS)
def test_losses_and_gradients_are_those_of_all_logits(graft: str) -> None:
    with grafted(GRAFTS[graft]) as model:
        with head_inputs(model.model) as counts:
            check_equal(model, batch())
        all_tokens, *chunks = counts
        assert all_tokens == 5 * 16
        assert max(chunks) == TARGETS if graft in ACTS_AFTER_BODY else max(chunks) <= CHUNK


@pytest.mark.parametrize("family", FAMILIES)
def test_it_holds_in_every_family(family: str) -> None:
    with grafted(GRAFTS["neutral-residues"], family) as model:
        check_equal(model, batch())


@pytest.mark.parametrize("graft", ["neutral-residues", "lora", "finetune", "mixture"])
def test_old_rows_follow_the_backbone_before_their_targets_only(graft: str) -> None:
    inputs = batch()
    with grafted(GRAFTS[graft], old_objective="distil") as model:
        teacher = model.backbone.bare_model
        with torch.no_grad():
            taught = teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        with head_inputs(teacher) as counts:
            check_equal(model, inputs, taught)
        assert sum(counts) == 2 * (4 + 15)  # in both passes the targets of old rows
        if graft not in ACTS_AFTER_BODY:
            assert max(counts[1:]) <= CHUNK


def test_an_auxiliary_loss_is_added() -> None:
    inputs = batch()
    with grafted({"kind": "neutral-residues", "alpha": 1.0}) as model:
        expected = model(**inputs)
        actual = model(**inputs, return_logits=False)
        assert actual.auxiliary_loss is not None
        assert actual.auxiliary_loss.item() == expected.auxiliary_loss.item()
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
        actual_gradients = gradients_of(actual.loss, model)
        for name, gradient in gradients_of(expected.loss, model).items():
            torch.testing.assert_close(actual_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_packed_documents_need_no_mask() -> None:
    positions = torch.tensor([[*range(6), *range(10)]]).expand(5, -1)
    inputs = batch(position_ids=positions)
    del inputs["attention_mask"]
    with grafted(GRAFTS["neutral-residues"], old_objective="distil") as model:
        with torch.no_grad():
            taught = model.backbone.bare_model(
                input_ids=inputs["input_ids"],
                position_ids=positions,
                use_cache=False,
            ).logits
        check_equal(model, inputs, taught)


def test_a_batch_without_targets_has_no_loss() -> None:
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], IGNORED)
    for objective in ("replay", "distil"):
        with grafted(GRAFTS["lora"], old_objective=objective) as model:
            loss = model(**inputs, return_logits=False).loss
            assert loss.item() == 0
            assert all(gradient.count_nonzero() == 0 for gradient in gradients_of(loss, model).values())


def test_micro_batches_add_up_by_the_counts_of_the_step() -> None:
    inputs = batch()
    totals = torch.tensor([TARGETS, 32, 39])
    with grafted(GRAFTS["finetune"], old_objective="distil") as model:
        expected = model(**inputs, totals=totals, return_logits=False).loss
        losses = []
        for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
            part = {name: value[rows] for name, value in inputs.items()}
            losses.append(model(**part, totals=totals, return_logits=False).loss)
    torch.testing.assert_close(torch.stack(losses).sum(), expected, rtol=1e-5, atol=1e-6)


class DoublesLogits(Graft):
    """Acts on the output layer, and reads values of the pass by column there."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def taps(self) -> list[Tap]:
        return [Tap(Site("head"), "after", "add", self._add)]

    def _add(self, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor:
        assert call.input_ids is not None
        return self.gain * outputs * (call.input_ids % 2)[..., None]


def test_a_tap_of_the_head_receives_all_tokens_unless_it_takes_a_selection() -> None:
    inputs = batch()
    model = GraftedModel(Backbone.wrap(tiny_model("llama")), {"graft": DoublesLogits()}).train()
    with head_inputs(model.model) as counts:
        actual = model(**inputs, return_logits=False).loss
    assert counts == [5 * 16]
    torch.testing.assert_close(actual, reference_loss(model, inputs))


@pytest.mark.parametrize("family", ["llama", "gemma2", "block-state"])
def test_all_weights_train_with_the_same_loss(family: str) -> None:
    inputs = batch()
    model = LanguageModel(tiny_model(family)).train()
    losses = []
    gradients = []
    for return_logits in (True, False):
        torch.manual_seed(1)
        with head_inputs(model.model) as counts:
            loss = model(**inputs, return_logits=return_logits).loss
        assert sum(counts) == (5 * 16 if return_logits else TARGETS)
        losses.append(loss)
        gradients.append(gradients_of(loss, model))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_training_loop_needs_no_other_logits(tmp_path: Path) -> None:
    rows = batch()
    with grafted(GRAFTS["neutral-residues"]) as model:
        with head_inputs(model.model) as counts:
            summary = train(
                model,
                OneBatch(rows),
                TrainingConfig(steps=2, batch_size=5, keep_checkpoints=0),
                tmp_path,
                progress=False,
            )
        assert summary.steps == 2
        assert sum(counts) == 2 * TARGETS
    model = LanguageModel(tiny_model("llama")).train()
    with head_inputs(model.model) as counts:
        LossModule(model, tie=False)(rows, torch.tensor([TARGETS]))
    assert sum(counts) == TARGETS


class OneBatch:
    """The same rows in every step."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self._batch = Batch(position_ids=None, **rows)

    def batch(self, step: int) -> Batch:
        return self._batch

    def fingerprint(self) -> str:
        return "one batch"

    def snapshot(self) -> Callable[[], dict[str, object]]:
        return dict


def test_a_stream_needs_no_other_logits() -> None:
    inputs = batch(stream=torch.arange(5), starts=torch.ones(5, dtype=torch.bool))
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    graft = build_graft(graft_config(GRAFTS["lora"]), backbone)
    with StatefulModel(backbone, {"graft": graft}) as model:
        model.train()
        expected = model(**inputs)
        with head_inputs(model.model) as counts:
            actual = model(**inputs, return_logits=False)
    assert sum(counts) == TARGETS
    torch.testing.assert_close(actual.loss, expected.loss)


def test_a_caller_who_asks_for_logits_gets_all() -> None:
    inputs = batch()
    with grafted(GRAFTS["lora"], old_objective="distil") as model:
        assert model(**inputs).logits.shape[:2] == (5, 16)
        del inputs["labels"]
        assert model(**inputs, return_logits=False).logits is None


@pytest.mark.parametrize("graft", GRAFTS)
@torch.no_grad()
def test_the_logits_of_some_tokens_are_those_of_all(graft: str) -> None:
    inputs = batch()
    is_selected = inputs["labels"] != IGNORED
    with grafted(GRAFTS[graft]) as model:
        model.eval()
        texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        expected = model(**texts).logits[is_selected]
        with head_inputs(model.model) as counts:
            actual = model.logits_at(is_selected, **texts)
    assert counts == [is_selected.sum()]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
