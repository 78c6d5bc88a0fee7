"""Law 9: the fast path equals `reference.py`, in outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import thinned
from composition import reference
from composition.tools import OTHER_TOKENS, attached, composition, live
from graftlm.backbone import Backbone
from graftlm.grafts.composition import Composition
from graftlm.testing.laws import positions_of
from tiny import tiny_ids

IDS = tiny_ids(2, 7)
MASKS = {
    "no padding": None,
    "left": torch.tensor([[1] * 7, [0] * 3 + [1] * 4]),
    "right": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
}
# Each padding and each kind of positions is in the default run once; the other pairs run with -m "".
PADDINGS_AND_POSITIONS = [
    pytest.param(padding, kind, marks=[] if number == index else pytest.mark.slow)
    for number, padding in enumerate(MASKS)
    for index, kind in enumerate(("none", "rotary", "local"))
]
VisibleTokens = list[list[int]]
Plan = dict[str, list[tuple[list[int], VisibleTokens]]]
# Per model and row: the tokens it reads, and which of them each anchor token sees.


def weights_of(graft: Composition, name: str, number: int) -> reference.PairWeights:
    """The same leaves that the graft trains."""
    block: Any = graft.blocks[name][number]
    gains = [getattr(norm, "weight", None) for norm in (block.norm_q, block.norm_kv)]
    matrices = [linear.weight.T for linear in (block.project, block.w_q, block.w_k, block.w_v, block.w_o)]
    biases = [0.0 if linear.bias is None else linear.bias for linear in (block.w_q, block.w_k)]
    heads = [getattr(norm, "weight", None) for norm in (block.norm_head_q, block.norm_head_k)]
    return reference.PairWeights(*matrices, *gains, *biases, *heads)


class Slow:
    """The anchor with `reference.cross` added after its layers by plain hooks, row by row."""

    def __init__(self, anchor: Backbone, graft: Composition, plan: Plan, heads: int) -> None:
        self.anchor, self.graft, self.plan, self.heads = anchor, graft, plan, heads
        self.rotary = graft.config.positions != "none"
        self.states = {name: [self._read(name, tokens) for tokens, _ in rows] for name, rows in plan.items()}

    @torch.no_grad()
    def _read(self, name: str, paths: list[int]) -> list[Tensor]:
        """Every layer's output for one row's tokens."""
        model = self.graft.frozen_models()[name]
        outputs: list[Tensor] = []

        def record(_module: Any, _inputs: Any, output: Any) -> None:
            outputs.append(first(output))

        handles = [layer.register_forward_hook(record) for layer in model.sites.layers]
        model.model(torch.tensor([paths]), use_cache=False)
        for handle in handles:
            handle.remove()
        return [output[0] for output in outputs]

    def logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        self.position_ids = position_ids(ids, mask).tolist()
        with self._hooks():
            return self.anchor.model(
                ids, attention_mask=mask, position_ids=position_ids(ids, mask), use_cache=False
            ).logits

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = [layer.register_forward_hook(self._add(j)) for j, layer in enumerate(self.anchor.sites.layers)]
        yield
        for handle in handles:
            handle.remove()

    def _add(self, layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> Any:
            hidden = first(output)
            written = torch.stack([self._row(layer, b, row) for b, row in enumerate(hidden)])
            return (hidden + written, *output[1:]) if isinstance(output, tuple) else hidden + written

        return hook

    def _row(self, layer: int, b: int, hidden: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for name in self.graft.config.augmenting:
            for number, (i, j) in enumerate(self.graft.pairs(name)):
                if j == layer:
                    weights = weights_of(self.graft, name, number)
                    tokens, visible = self.plan[name][b]
                    positions = (self.position_ids[b], range(len(tokens))) if self.rotary else None
                    states = self.states[name][b][i]
                    total = total + reference.cross(hidden, states, weights, self.heads, visible, positions)
        return total


def position_ids(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Positions that count real tokens."""
    return positions_of(torch.ones_like(ids) if mask is None else mask)


def first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def by_position(ids: Tensor, mask: Tensor | None) -> list[tuple[list[int], VisibleTokens]]:
    """One tokenizer. Padding is cut off what the augmenting model reads, so that it can't matter."""
    rows = []
    for b, row in enumerate(ids):
        real = [True] * len(row) if mask is None else mask[b].bool().tolist()
        shift = real.index(True)
        visible = [[s - shift for s in seen] for seen in reference.visible_by_position(real)]
        visible = [seen if real[t] else [] for t, seen in enumerate(visible)]
        rows.append((row[torch.tensor(real)].tolist(), visible))
    return rows


ONE_TOKENIZER = [
    *(
        pytest.param("llama", "pre", *param.values, marks=pytest.mark.slow if "local" in param.values else param.marks)
        for param in PADDINGS_AND_POSITIONS
    ),
    *(
        pytest.param(family, norm, *param.values, marks=pytest.mark.slow)
        for family, norm in (("llama", "none"), ("gpt2", "none"), ("gemma3", "pre"))
        for param in PADDINGS_AND_POSITIONS
        if not param.marks
    ),
]


def compare(anchor: Backbone, graft: Composition, slow: Slow, ids: Tensor, mask: Tensor | None) -> None:
    """Logits of real tokens, and the gradients of a random function of them."""
    parameters = list(graft.parameters())
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    direction = torch.randn(int(real.sum()), anchor.sites.config.vocab_size, dtype=torch.float64)
    expected = slow.logits(ids, mask)[real]
    expected_gradients = torch.autograd.grad((expected * direction).sum(), parameters)
    with attached(anchor, graft) as model:
        actual = model(ids, attention_mask=mask, position_ids=position_ids(ids, mask)).logits[real]
        actual_gradients = torch.autograd.grad((actual * direction).sum(), parameters)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(actual_gradients, expected_gradients, rtol=1e-6, atol=1e-6)


def double(*models: Backbone) -> None:
    for model in models:
        model.model.double()


@pytest.mark.parametrize(("family", "norm", "padding", "positions"), ONE_TOKENIZER)
def test_one_tokenizer(family: str, norm: str, padding: str, positions: str) -> None:
    anchor, augmenting, augmenting_2 = live(family), live("llama", 1), live("gpt2", 2)
    double(anchor, augmenting, augmenting_2)
    graft = composition(
        anchor, {"one": augmenting, "two": augmenting_2}, norm=norm, positions=positions, pairs=[(1, 0), (0, 1)]
    )
    graft.double()
    mask = MASKS[padding]
    plan = {"one": by_position(IDS, mask), "two": by_position(IDS, mask)}
    compare(anchor, graft, Slow(anchor, graft, plan, anchor.sites.config.num_attention_heads), IDS, mask)


@pytest.mark.parametrize("positions", thinned(["none", "rotary", "local"], {"local"}))
def test_heads_that_are_normalised(positions: str) -> None:
    anchor, augmenting = live("llama"), live("llama", 1)
    double(anchor, augmenting)
    graft = composition(anchor, {"one": augmenting}, positions=positions, qk_norm=True).double()
    plan = {"one": by_position(IDS, None)}
    compare(anchor, graft, Slow(anchor, graft, plan, anchor.sites.config.num_attention_heads), IDS, None)


class SlowTwoTokenizers(Slow):
    """With two tokenizers: the text so far of every anchor token is read on its own, from its beginning."""

    def _row(self, layer: int, b: int, hidden: Tensor) -> Tensor:
        written = []
        for t, (paths, births) in enumerate(self.texts[b]):
            total = torch.zeros_like(hidden[t])
            for number, (i, j) in enumerate(self.graft.config.augmenting["one"].pairs or ()):
                if j == layer and paths:
                    states = self._read("one", paths)[i]
                    visible = [list(range(len(paths)))]
                    weights = weights_of(self.graft, "one", number)
                    where = ([self.position_ids[b][t]], births) if self.rotary else None
                    total = total + reference.cross(hidden[t : t + 1], states, weights, self.heads, visible, where)[0]
            written.append(total)
        return torch.stack(written)

    def tokenise(self, ids: Tensor, mask: Tensor | None) -> None:
        """For each row and token, the augmenting tokens so far, and the anchor token with which each was first read."""
        tokenizer = self.anchor.need_tokenizer()
        augmenting = self.graft.frozen_models()["one"].need_tokenizer()
        self.texts: list[list[tuple[list[int], list[int]]]] = []
        for b, row in enumerate(ids.tolist()):
            texts: list[tuple[list[int], list[int]]] = []
            so_far: list[int] = []
            first_read: dict[tuple[int, ...], int] = {}
            for t, token in enumerate(row):
                tokens: list[int] = []
                if mask is None or mask[b, t]:
                    so_far.append(token)
                    text = str(tokenizer.decode(so_far)).rstrip("\ufffd")
                    tokens = reference.tokens_of_text(text, augmenting)
                starts = [tuple(tokens[: n + 1]) for n in range(len(tokens))]
                texts.append((tokens, [first_read.setdefault(start, len(so_far) - 1) for start in starts]))
            self.texts.append(texts)


@pytest.mark.parametrize(
    ("padding", "positions"),
    [
        pytest.param(*param.values, marks=param.marks if "local" in param.values else pytest.mark.slow)
        for param in PADDINGS_AND_POSITIONS
    ],
)
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_two_tokenizers(family: str, padding: str, positions: str) -> None:
    anchor, augmenting = live("llama"), live(family, 1, tokens=OTHER_TOKENS)
    double(anchor, augmenting)
    graft = composition(anchor, {"one": augmenting}, positions=positions).double()
    ids = words(anchor)
    slow = SlowTwoTokenizers(anchor, graft, {}, anchor.sites.config.num_attention_heads)
    slow.tokenise(ids, MASKS[padding])
    compare(anchor, graft, slow, ids, MASKS[padding])


def words(anchor: Backbone) -> Tensor:
    """Two rows of seven tokens of real text, whose words the two tokenizers cut in different places."""
    tokenizer = anchor.need_tokenizer()
    texts = ("the quick forest jumps over", "les chiens paresseux dans la forêt")
    return torch.tensor([tokenizer(text)["input_ids"][:7] for text in texts])
