"""Heads, losses and uncertainty, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from graftlm.errors import GraftError, RecipeError
from graftlm.grafts.heads import Heads, TaskSpec, pooled, row_losses, uncertainty

TASKS = {
    "topics": TaskSpec(type="classification", labels=["a", "b", "c"]),
    "names": TaskSpec(type="tagging", labels=["O", "B"]),
    "moods": TaskSpec(type="multi-label", labels=["x", "y"]),
    "marks": TaskSpec(type="regression"),
    "answers": TaskSpec(type="span"),
}


def test_pooling_reads_the_real_tokens() -> None:
    hidden = torch.arange(12.0).view(2, 3, 2)
    mask = torch.tensor([[False, True, True], [True, False, False]])
    assert pooled(hidden, mask, "first").tolist() == [[2, 3], [6, 7]]
    assert pooled(hidden, mask, "last").tolist() == [[4, 5], [6, 7]]
    assert pooled(hidden, mask, "mean").tolist() == [[3, 4], [6, 7]]


def test_every_row_goes_to_its_head() -> None:
    heads = Heads(TASKS, 4).eval()
    hidden = torch.randn(6, 5, 4)
    task = torch.tensor([4, 0, 3, 1, 2, 0])
    actual = heads(hidden, None, task)
    assert [tuple(prediction.shape) for prediction in actual] == [(5, 2), (3,), (), (5, 2), (2,), (3,)]
    linear = heads.linear("topics")
    torch.testing.assert_close(actual[5], linear(hidden[5, 0]))
    torch.testing.assert_close(actual[3], heads.linear("names")(hidden[3]))
    with pytest.raises(GraftError) as error:
        heads(hidden, None, task + 1)
    assert "task number 5" in str(error.value)


def test_only_heads_of_rows_have_gradients() -> None:
    heads = Heads(TASKS, 4)
    heads(torch.randn(2, 5, 4), None, torch.tensor([0, 0]))[0].sum().backward()
    assert {name for name, p in heads.named_parameters() if p.grad is not None} == {
        "linears.task:topics.weight",
        "linears.task:topics.bias",
    }


def test_dropout_is_in_training_alone() -> None:
    heads = Heads(TASKS, 4, dropout=0.5)
    hidden = torch.randn(1, 5, 4)
    task = torch.tensor([0])
    assert not torch.equal(heads(hidden, None, task)[0], heads(hidden, None, task)[0])
    heads.eval()
    assert torch.equal(heads(hidden, None, task)[0], heads(hidden, None, task)[0])


def test_losses_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    actual = row_losses(TASKS["topics"], logits, torch.tensor([1, 2]))
    total = math.e + math.e**2 + 1
    assert actual.tolist() == pytest.approx([math.log(total) - 2, math.log(3)])
    assert row_losses(TASKS["marks"], torch.tensor([1.0]), torch.tensor([3.0])).tolist() == [4.0]
    moods = row_losses(TASKS["moods"], torch.tensor([[0.0, 2.0]]), torch.tensor([[1, 0]]))
    assert moods.item() == pytest.approx((math.log(2) + math.log(1 + math.e**2)) / 2)
    tags = torch.zeros(2, 3, 2)
    actual = row_losses(TASKS["names"], tags, torch.tensor([[-100, 0, 1], [-100, -100, -100]]))
    assert actual.tolist() == pytest.approx([math.log(2), 0]), "a row without labels loses nothing"
    span = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    actual = row_losses(TASKS["answers"], span, torch.tensor([[0, 1]]))
    assert actual.item() == pytest.approx((math.log(2) + math.log(math.e + 1)) / 2)


def test_losses_keep_the_rows_order() -> None:
    heads = Heads(TASKS, 4).eval()
    task = torch.tensor([0, 3, 0, 3])
    predictions = heads(torch.randn(4, 5, 4), None, task)
    targets = [torch.tensor(2), torch.tensor(1.0), torch.tensor(0), torch.tensor(-1.0)]
    actual = heads.losses(predictions, targets, task)
    assert actual[2].item() == pytest.approx(functional.cross_entropy(predictions[2], targets[2]).item())
    assert actual[3].item() == pytest.approx(((predictions[3] + 1) ** 2).item())


def test_uncertainty_by_hand() -> None:
    sure, unsure = torch.tensor([50.0, 0.0, 0.0]), torch.zeros(3)
    half = torch.tensor([0.0, 0.0, -50.0])
    predictions = [sure, unsure, half, torch.tensor(0.3), torch.zeros(4, 2)]
    specs = [TASKS[name] for name in ("topics", "topics", "topics", "marks", "answers")]
    actual = uncertainty(predictions, specs)
    assert actual[3] is None
    assert actual[4] is None
    assert [float(value) for value in actual[:3]] == pytest.approx([0, 1, math.log(2) / math.log(3)], abs=1e-6)  # type: ignore[arg-type]
    moods = uncertainty([torch.tensor([0.0, 50.0])], [TASKS["moods"]])[0]
    assert float(moods) == pytest.approx(0.5)  # type: ignore[arg-type]


def test_uncertainty_of_tags_is_that_of_the_most_uncertain_labelled_token() -> None:
    """A single uncertain word makes a sentence uncertain, however many certain words outside entities it has."""
    tags = torch.tensor([[math.log(8.0), 0.0], [50.0, 0.0], [0.0, 0.0]])  # 8/9 and 1/9, certain, even
    names = [TASKS["names"]]
    entropy_of_first = 0.5032
    cases = [
        ([0, 1, -100], entropy_of_first),
        ([-100, 0, 1], 1.0),
        ([-100, 0, -100], 0.0),
    ]
    for targets, wanted in cases:
        (value,) = uncertainty([tags], names, [torch.tensor(targets)])
        assert float(value) == pytest.approx(wanted, abs=1e-3)  # type: ignore[arg-type]
    assert float(uncertainty([tags], names)[0]) == pytest.approx(1)  # type: ignore[arg-type]


def test_the_uncertainty_of_numbers_is_their_error_over_the_range() -> None:
    grades = TaskSpec(type="regression", range=(1.0, 5.0))
    predictions = [torch.tensor(3.0), torch.tensor(9.0)]
    targets = [torch.tensor(4.0), torch.tensor(2.0)]
    values = uncertainty(predictions, [grades, grades], targets)
    assert [float(value) for value in values] == [0.25, 1.0]  # type: ignore[arg-type]


def test_scaled_losses_are_1_at_chance() -> None:
    """Even predictions of classes, and uniform targets around the middle of the range, lose 1 on average."""
    tasks = {
        "many": TaskSpec(type="classification", labels=[f"{n}" for n in range(150)]),
        "grades": TaskSpec(type="regression", range=(1.0, 5.0)),
        "moods": TASKS["moods"],
    }
    heads = Heads(tasks, 4)
    grades = torch.linspace(1, 5, 1001)
    predictions = [torch.zeros(150), torch.zeros(2), *torch.full((1001,), 3.0)]
    targets = [torch.tensor(7), torch.tensor([0.0, 1.0]), *grades]
    losses = torch.stack(heads.losses(predictions, targets, torch.tensor([0, 2] + [1] * 1001), scaled=True))
    assert losses[:2].tolist() == pytest.approx([1, 1])
    assert float(losses[2:].mean()) == pytest.approx(1, abs=0.01)


def test_a_number_is_predicted_within_the_range_of_training() -> None:
    """The head's 0 and 1 are the lowest and the highest target."""
    heads = Heads({"grades": TaskSpec(type="regression", range=(1.0, 5.0))}, 4).eval()
    with torch.no_grad():
        heads.linear("grades").bias.fill_(0.5)
    (value,) = heads(torch.zeros(1, 3, 4), None, None)
    assert value.item() == pytest.approx(3)
    with pytest.raises(RecipeError) as error:
        TaskSpec(type="regression", range=(5.0, 1.0))
    assert "[5.0, 1.0]" in str(error.value)


@pytest.mark.parametrize("name", ["topics", "a.b", ""])
def test_names_that_no_head_can_have(name: str) -> None:
    with pytest.raises(GraftError) as error:
        Heads(TASKS, 4).add(name, TASKS["topics"])
    assert repr(name) in str(error.value)
