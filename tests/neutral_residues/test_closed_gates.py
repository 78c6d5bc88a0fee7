"""Closed gates run no adapter, and the logits are those of the backbone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import rotated
from graftlm.backbone import Backbone
from graftlm.errors import RecipeError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.neutral_residues import GatedAdapter, NeutralResidues, NeutralResiduesConfig
from tiny import DECODERS, FAMILIES, tiny_ids, tiny_model


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call of an adapter."""
    counts: list[int] = []
    adapt = GatedAdapter.adapt

    def counting(self: GatedAdapter, x_ND: Tensor) -> Tensor:
        counts.append(len(x_ND))
        return adapt(self, x_ND)

    monkeypatch.setattr(GatedAdapter, "adapt", counting)
    return counts


def random_graft(host: Backbone, **config: Any) -> NeutralResidues:
    graft = NeutralResidues(NeutralResiduesConfig(**config), host)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.normal_(0, 0.2)
    return graft


SCORES = ["zero scores", "negative scores"]


@pytest.fixture
def closed(request: pytest.FixtureRequest, family: str) -> Iterator[tuple[GraftedModel, Backbone]]:
    """A random graft whose gates are all closed, attached."""
    host = Backbone.wrap(tiny_model(family))
    graft = random_graft(host)
    with torch.no_grad():
        for block in graft.blocks:
            block.gate.weight.zero_()
            block.gate.bias.fill_(0.0 if request.param == "zero scores" else -1.0)
    with GraftedModel(host, {"graft": graft}) as model:
        yield model.eval(), host


@pytest.mark.parametrize(("family", "closed"), rotated(FAMILIES, SCORES), indirect=["closed"])
def test_closed_gates_give_the_backbones_bits_and_run_no_adapter(
    family: str, closed: tuple[GraftedModel, Backbone], adapted: list[int]
) -> None:
    model, _ = closed
    with torch.no_grad():
        bare = tiny_model(family)(tiny_ids()).logits
        assert torch.equal(model(tiny_ids()).logits, bare)
        assert torch.equal(model.train()(tiny_ids()).logits, bare)
    assert adapted == []


@pytest.mark.parametrize(("family", "closed"), rotated(DECODERS, SCORES), indirect=["closed"])
def test_closed_gates_generate_what_the_backbone_generates(
    family: str, closed: tuple[GraftedModel, Backbone], adapted: list[int]
) -> None:
    model, _ = closed
    decoding = {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    actual = model.generate(tiny_ids(), **decoding)
    expected = tiny_model(family).generate(tiny_ids(), **decoding)
    # In torch 2.13, the pass over the prompt may round otherwise.
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits), rtol=1e-5, atol=1e-5)
    assert adapted == []


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("closed", SCORES, indirect=True)
def test_closed_gates_leave_no_loss_and_no_gradient(family: str, closed: tuple[GraftedModel, Backbone]) -> None:
    model, _ = closed
    output = model.train()(tiny_ids(), labels=tiny_ids(), domain=torch.tensor([0, 0]))
    assert output.auxiliary_loss is None
    assert not output.loss.requires_grad


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_only_open_tokens_are_computed(family: str, adapted: list[int]) -> None:
    host = Backbone.wrap(tiny_model(family))
    graft = random_graft(host)
    with GraftedModel(host, {"graft": graft}) as model:
        heads: list[object] = []
        model.model.get_output_embeddings().register_forward_pre_hook(lambda head, _: heads.append(head))
        shares = model.observe(input_ids=tiny_ids())["graft"]["open_share"]
    assert adapted == [round(share * tiny_ids().numel()) for share in shares.tolist()]
    assert all(0 < share < 1 for share in shares), shares
    assert not heads, "logits were computed"


def test_one_open_token_changes_only_its_own_logits() -> None:
    """One token opens a gate in the last layer; all other logits are those of the backbone, bit for bit."""
    host = Backbone.wrap(tiny_model("llama"))
    graft = random_graft(host)
    with torch.no_grad():
        for block in graft.blocks[:-1]:
            block.gate.weight.zero_()
            block.gate.bias.zero_()
        bare = host.model(tiny_ids(1)).logits
        with GraftedModel(host, {"graft": graft}) as model:
            seen: list[Tensor] = []
            host.sites.layers[-1].mlp.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
            model(tiny_ids(1))
            scores = graft.blocks[-1].scores(seen[0][0])[:, 0]
            graft.blocks[-1].gate.bias -= scores.topk(2).values.mean()  # only the highest score stays above zero
            logits = model(tiny_ids(1)).logits
    changed = (logits != bare).any(-1)[0]
    assert changed.sum() == 1
    assert changed[scores.argmax()]


def test_a_cross_entropy_needs_a_gate() -> None:
    with pytest.raises(RecipeError) as error:
        NeutralResiduesConfig.parse({"gate": "none", "local_loss": "cross-entropy"})
    assert "cross-entropy" in str(error.value)
