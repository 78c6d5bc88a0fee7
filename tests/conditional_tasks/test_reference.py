"""Law 9: the fast path equals `reference.py`, in predictions, losses and gradients, with every module on and off."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from conditional_tasks import reference
from conditional_tasks.tools import LENGTHS, OFF, TASK, TASKS, batch, host, random_model, real, targets
from experiments.conditional_tasks.runs import covariance_similarity
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.conditional_tasks.modules import Bottleneck, FiLM
from graftlm.grafts.heads import task_key

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-10}
CASES: dict[str, dict[str, Any]] = {
    "nothing": OFF,
    "attention": OFF | {"attention": "blocks"},
    "full attention": OFF | {"attention": "full"},
    "alignment": OFF | {"alignment": True},
    "alignment before the first layer that trains": OFF | {"alignment": True, "aligned": "trained"},
    "norm": OFF | {"norm": True},
    "bottleneck": OFF | {"bottleneck": "base"},
    "bottleneck with a norm": OFF | {"bottleneck": "base", "bottleneck_norm": True},
    "large bottleneck": OFF | {"bottleneck": "large"},
    "LoRA": OFF | {"lora_rank": 2, "frozen": 1.0, "modulated": 1.0},
    "all": {"modulated": 1.0},
    "all, large": {"bottleneck": "large", "bottleneck_norm": True, "frozen": 1.0},
    "all, nothing frozen": {"frozen": 0.0, "pooling": "mean"},
}


def film_of(film: FiLM) -> reference.Film:
    return film.scale, film.shift


def neck_of(neck: Bottleneck) -> reference.BottleneckWeights:
    norm = None
    if neck.norm is not None:
        affine = neck.norm.norm
        norm = (affine.weight, affine.bias, affine.eps, film_of(neck.norm.film))
    return reference.BottleneckWeights(
        neck.down.weight, neck.up.weight, film_of(neck.inner_film), film_of(neck.outer_film), norm
    )


def modules_of(graft: Any, task: int) -> reference.ConditionalWeights:
    """The same leaves that the graft trains."""
    places = {key: key.removeprefix("bert/encoder/layer/").partition("/") for key in graft.loras}
    alignment = graft.alignment and (graft.alignment.matrix, film_of(graft.alignment.film))
    return reference.ConditionalWeights(
        alignment,
        {int(layer): (bias.blocks, film_of(bias.film)) for layer, bias in graft.biases.items()},
        {int(layer): [film_of(film) for film in films] for layer, films in graft.norms.items()},
        {int(layer): neck_of(neck) for layer, neck in graft.bottlenecks.items()},
        graft.config.bottleneck == "large",
        1 if graft.config.aligned == "trained" else 0,
        {
            (int(layer), path.replace("/", ".")): (graft.loras[key].a[task].T, graft.loras[key].b[task].T)
            for key, (layer, _, path) in places.items()
        },
    )


def slow(model: GraftedModel) -> list[Tensor]:
    """Each row's prediction, row by row and without padding."""
    graft: Any = model.grafts["graft"]
    base: Any = model.model.base_model
    activation = ACT2FN[model.backbone.sites.activation]
    ids, _ = batch()
    actual = []
    for row, size in enumerate(LENGTHS):
        name = list(TASKS)[TASK[row]]
        v = graft.embeddings[task_key(name)]
        x = base.embeddings(ids[row : row + 1, :size])[0]
        h = reference.encode(x, base.encoder.layer, modules_of(graft, int(TASK[row])), v, activation)
        head = graft.heads.linear(name)
        of_row = h.mean(0) if graft.config.pooling == "mean" else h[0]
        out = (h if TASKS[name].of_tokens else of_row) @ head.weight.T + head.bias
        actual.append(out.squeeze(-1) if TASKS[name].type == "regression" else out)
    return actual


def slow_rows(predictions: list[Tensor]) -> list[Tensor]:
    """Losses of rows by hand, for `TASK` and `targets()`."""
    tags, topic, quality, moods, answer, second = predictions
    reference_predictions = targets()
    p = torch.sigmoid(moods)
    return [
        -torch.stack([tags[t].log_softmax(-1)[reference_predictions[0][t]] for t in range(1, 6)]).mean(),
        -topic.log_softmax(-1)[2],
        (quality - 0.7) ** 2,
        -(torch.log(p[0]) + torch.log(1 - p[1])) / 2,
        -(answer[:, 0].log_softmax(0)[3] + answer[:, 1].log_softmax(0)[6]) / 2,
        -second.log_softmax(-1)[0],
    ]


def slow_loss(predictions: list[Tensor]) -> Tensor:
    """The mean of rows."""
    rows = slow_rows(predictions)
    return sum(row.float() for row in rows) / len(rows)  # type: ignore[return-value]  # losses are computed in float32


def gradients(model: GraftedModel, loss: Tensor) -> dict[str, Tensor]:
    parameters = model.trainable_parameters()
    actual = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, actual, strict=True) if g is not None}


@pytest.mark.parametrize("case", CASES)
def test_predictions_losses_and_gradients_are_those_of_the_reference(case: str) -> None:
    with random_model(host(double=True), **CASES[case]) as model:
        ids, mask = batch()
        inputs = {"input_ids": ids, "attention_mask": mask, "extras": {"task": TASK}}
        reference_predictions = slow(model)
        for first, second in zip(real(model.predict(**inputs), mask), reference_predictions, strict=True):
            torch.testing.assert_close(first, second, **CLOSE)
        loss = model(**inputs, targets=targets()).loss
        torch.testing.assert_close(loss, slow_loss(reference_predictions), rtol=1e-5, atol=1e-6)
        actual, expected = gradients(model, loss), gradients(model, slow_loss(reference_predictions))
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_scaled_losses_are_those_over_the_losses_at_chance() -> None:
    """The rows' tasks have tags, 3 topics, a number from 0 to 1, two labels, an answer (as it is) and 3 topics."""
    chances = [math.log(2), math.log(3), 1 / 12, math.log(2), 1, math.log(3)]
    ids, mask = batch()
    inputs = {"input_ids": ids, "attention_mask": mask, "extras": {"task": TASK}, "targets": targets()}
    with random_model(host(double=True), scaled_losses=True) as model:
        rows = [row.float() / chance for row, chance in zip(slow_rows(slow(model)), chances, strict=True)]
        torch.testing.assert_close(model(**inputs).loss, torch.stack(rows).mean(), rtol=1e-5, atol=1e-6)


def test_every_module_takes_part_and_has_gradients() -> None:
    with random_model(host(double=True), modulated=1.0) as model:
        ids, mask = batch()
        loss = model(ids, mask, extras={"task": TASK}, targets=targets()).loss
        assert gradients(model, loss).keys() == model.trainable_parameters().keys()


def test_an_untrained_modules_film_learns() -> None:
    """At the start gamma has a gradient, so that all of it can leave its neutral place."""
    from conditional_tasks.tools import build

    with GraftedModel(host(), {"graft": build(host(), modulated=1.0)}) as model:
        ids, mask = batch()
        actual = gradients(model, model(ids, mask, extras={"task": TASK}, targets=targets()).loss)
        for name in ("alignment.matrix", "alignment.film.scale", "norms.1.0.scale", "bottlenecks.1.up.weight"):
            assert actual[f"grafts.graft.{name}"].abs().max() > 0, name
        assert actual["grafts.graft.biases.1.film.shift"].abs().max() > 0


def test_the_printed_alignment_differs_by_the_sum_of_the_input() -> None:
    x, r, gamma, beta = torch.randn(4), torch.randn(4, 4), torch.randn(4), torch.randn(4)
    printed = reference.literal_alignment(x, r, gamma, beta)
    torch.testing.assert_close(printed, (x @ r) * gamma + x.sum() * beta)


def test_the_printed_norm_is_one_of_ours() -> None:
    """gamma = gamma_printed + beta' / gamma', and what beta' then adds goes into beta."""
    a, own, gamma, beta = torch.randn(6), (torch.randn(6) + 3, torch.randn(6)), torch.randn(6), torch.randn(6)
    printed = reference.literal_norm(a, own, gamma, beta, 1e-5)
    ours = gamma + own[1] / own[0]
    norm = reference.normalised(a, 1e-5) * own[0] + own[1]
    torch.testing.assert_close(norm * ours + beta - own[1] * ours, printed)


def test_covariance_similarity_by_hand() -> None:
    """X^T X has the eigenvalues 9 and 1 along x and y, and 4 and 4 along both; the last third of a percent is cut."""
    first = torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.05]])
    second = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 2.0]])
    # F_i = diag(3, 1), F_j = 2 along y and z: F_i^T F_j holds 1 * 2 alone
    assert covariance_similarity(first, second) == pytest.approx(2 / (10**0.5 * 8**0.5))
    assert covariance_similarity(first, 7 * first) == pytest.approx((81 + 1) ** 0.5 / 10)
    assert covariance_similarity(first[:1], 2 * first[:1]) == pytest.approx(1)
    assert covariance_similarity(first[:1], second) == 0


def test_reference_softmax_is_torchs() -> None:
    q, k, v, m = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 5)
    torch.testing.assert_close(
        reference.attend(q, k, v, m), functional.scaled_dot_product_attention(q, k, v, attn_mask=m)
    )
