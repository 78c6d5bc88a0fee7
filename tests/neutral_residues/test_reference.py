"""Law 9: the fast path equals `reference.py`, in outputs, losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from cases import pairwise
from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts.neutral_residues import NeutralResidues, NeutralResiduesConfig
from neutral_residues import reference
from tiny import tiny_ids, tiny_model

IDS = tiny_ids(2, 10)
MASK = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
LABELS = IDS.masked_fill(MASK == 0, -100)
TOTALS = torch.tensor([31.0, 22.0, 13.0])  # of an optimizer step of which this batch is a part
# Where the FFN begins and ends: a gated linear unit, a plain FFN, and one that a norm follows.
FAMILIES = {
    "llama": ("mlp", "mlp"),
    "gpt2": ("mlp", "mlp"),
    "gemma2": ("mlp", "post_feedforward_layernorm"),
}
CASES = [
    {"gate": gate, "local_loss": loss, "gate_init": "open" if gate == "sigmoid" else "random", "alpha": 0.7, "width": 6}
    for gate in ("relu", "sigmoid", "none")
    for loss in ("l1", "cross-entropy", "none")
    if (gate, loss) != ("none", "cross-entropy")
]


def case_name(value: Any) -> str:
    return f"{value['gate']}-{value['local_loss']}" if isinstance(value, dict) else str(value)


def build(family: str, **config: Any) -> tuple[Backbone, NeutralResidues]:
    """A backbone and a graft in double precision, every tensor of the graft random."""
    host = Backbone.wrap(tiny_model(family).double())
    graft = NeutralResidues(NeutralResiduesConfig(**config), host).double()
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.normal_(0, 0.3)
    return host, graft


def weights_of(graft: NeutralResidues) -> list[reference.Weights]:
    """The same leaves that the graft trains."""
    return [
        reference.Weights(
            block.w_i.weight,
            block.w_o.weight,
            None if block.w_g is None else block.w_g.weight,
            None if block.gate is None else block.gate.weight[0],
            None if block.gate is None or block.gate.bias is None else block.gate.bias[0],
        )
        for block in graft.blocks
    ]


class SlowModel:
    """The backbone with `reference.residue` added by plain hooks to each FFN's output, or to its norm's."""

    def __init__(self, host: Backbone, graft: NeutralResidues) -> None:
        self.host, self.kind, self.weights = host, graft.config.gate, weights_of(graft)
        self.activation = ACT2FN[host.sites.activation]
        self.inputs: list[Tensor] = []
        self.residues: list[Tensor] = []

    def logits(self) -> Tensor:
        with self._hooks():
            return self.host.model(IDS, attention_mask=MASK, use_cache=False).logits

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        entry, exit_ = FAMILIES[self.host.sites.model_type]
        handles = []
        for number, layer in enumerate(self.host.sites.layers):
            handles.append(layer.get_submodule(entry).register_forward_pre_hook(self._read))
            handles.append(layer.get_submodule(exit_).register_forward_hook(self._add(number)))
        yield
        for handle in handles:
            handle.remove()

    def _read(self, _module: Any, inputs: tuple[Tensor]) -> None:
        self.inputs.append(inputs[0])

    def _add(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
            self.residues.append(reference.residue(self.inputs[-1], self.weights[layer], self.activation, self.kind))
            return output + self.residues[-1]

        return hook

    def local_loss(self, kind: str, domain: Tensor, totals: Tensor | None) -> Tensor | None:
        if kind == "l1":
            tokens = None if totals is None else float(totals[1])
            return reference.l1_loss(self.residues, MASK, domain, tokens)
        if kind == "cross-entropy":
            tokens = None if totals is None else float(totals[1] + totals[2])
            return reference.cross_entropy_loss(self.inputs, self.weights, MASK, domain, tokens)
        return None


def _of(name: str) -> Any:
    return lambda text: f"{name}: {text}"


def compare_outputs(host: Backbone, graft: NeutralResidues) -> Tensor:
    """Compare logits and their gradients with the slow model; returns the open tokens of each layer, (layers, B, T)."""
    direction = torch.randn(2, 10, host.config.vocab_size, dtype=torch.float64) * MASK[..., None]
    slow = SlowModel(host, graft)
    expected = slow.logits()
    leaves = dict(graft.named_parameters())
    expected_gradients = torch.autograd.grad((expected * direction).sum(), list(leaves.values()))
    with GraftedModel(host, {"graft": graft}) as model:
        logits = model(IDS, attention_mask=MASK).logits
        (logits * direction).sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    for (name, leaf), gradient in zip(leaves.items(), expected_gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-8, atol=1e-8, msg=_of(name))
    return torch.stack([residue.abs().sum(-1) > 0 for residue in slow.residues])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("gate", ["relu", "sigmoid", "none"])
def test_outputs_and_their_gradients(family: str, gate: str) -> None:
    opened = compare_outputs(*build(family, gate=gate, width=6))
    if gate == "relu":
        assert opened.any()
        assert not opened.all(), "no token skipped its adapter"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_open_gates_scale_outputs_and_have_gradients(family: str) -> None:
    """Training starts with open gates, and many tokens that are all open take a path of their own."""
    host, graft = build(family, width=6)
    with torch.no_grad():
        for block in graft.blocks:
            block.gate.weight.mul_(0.1)
            block.gate.bias.fill_(3)
    assert IDS.numel() > 16, "few tokens are not selected at all"
    assert compare_outputs(host, graft).all()


def test_the_share_of_open_gates_is_that_of_real_tokens() -> None:
    host, graft = build("llama", width=6)
    slow = SlowModel(host, graft)
    with torch.no_grad():
        slow.logits()
    opened = torch.stack([residue.abs().sum(-1) > 0 for residue in slow.residues]).double()
    with GraftedModel(host, {"graft": graft}) as model:
        shares = model.observe(input_ids=IDS, attention_mask=MASK)["graft"]["open_share"].double()
    expected = opened[:, MASK.bool()].mean(-1)
    torch.testing.assert_close(shares, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(expected, opened.mean((1, 2)), atol=1e-3), "padding has another share"


@pytest.mark.parametrize(
    ("config", "domain", "is_total_given"), pairwise(CASES, [[0, 1], [0, 0], [1, 1]], [False, True]), ids=case_name
)
def test_losses_and_their_gradients(config: dict[str, Any], domain: list[int], is_total_given: bool) -> None:
    totals = TOTALS if is_total_given else None
    host, graft = build("llama", **config)
    slow = SlowModel(host, graft)
    targets = None if totals is None else float(totals[0])
    lm = reference.language_modelling_loss(slow.logits(), LABELS, targets)
    local = slow.local_loss(config["local_loss"], torch.tensor(domain), totals)
    expected = lm if local is None else lm + config["alpha"] * local
    leaves = dict(graft.named_parameters())
    expected_gradients = torch.autograd.grad(expected, list(leaves.values()), allow_unused=True)
    with GraftedModel(host, {"graft": graft}) as model:
        output = model(IDS, attention_mask=MASK, labels=LABELS, domain=torch.tensor(domain), totals=totals)
        output.loss.backward()
    expected_auxiliary = 0.0 if local is None else config["alpha"] * local.item()
    assert output.lm_loss.item() == pytest.approx(lm.item(), rel=1e-5)
    assert (0.0 if output.auxiliary_loss is None else output.auxiliary_loss.item()) == pytest.approx(
        expected_auxiliary, rel=1e-5
    )
    for (name, leaf), gradient in zip(leaves.items(), expected_gradients, strict=True):
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        torch.testing.assert_close(
            leaf.grad, gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_padding_never_counts() -> None:
    """The local losses of a padded batch are those of its rows alone, weighted by their tokens."""
    for config in CASES:
        host, graft = build("llama", **config)
        with GraftedModel(host, {"graft": graft}) as model:
            together = model(IDS, attention_mask=MASK, labels=LABELS, domain=torch.tensor([0, 0])).auxiliary_loss
            rows = [IDS[:1], IDS[1:, :6]]
            alone = [model(row, labels=row, domain=torch.tensor([0])).auxiliary_loss for row in rows]
        if config["local_loss"] == "none":
            assert together is None
        else:
            mean = (alone[0] * 10 + alone[1] * 6) / 16
            torch.testing.assert_close(together, mean, rtol=1e-5, atol=1e-7)
