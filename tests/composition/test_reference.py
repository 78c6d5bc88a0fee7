"""Law 9: the fast path equals `reference.py`, in outputs and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from composition.tools import OTHER_TOKENS, attached, composition, live
from graftlm.backbone import Backbone
from graftlm.grafts.composition import Composition, reference
from graftlm.grafts.composition.spelling import _LONGEST_WORD, Spelling
from laws.tools import positions as positions_of
from tiny import tiny_ids

IDS = tiny_ids(2, 9)
MASKS = {
    "no padding": None,
    "left": torch.tensor([[1] * 9, [0] * 4 + [1] * 5]),
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4]),
}
Seen = list[list[int]]
Plan = dict[str, list[tuple[list[int], Seen]]]  # of each model and row: the tokens it reads, and who sees which


def weights_of(graft: Composition, name: str, number: int) -> reference.Weights:
    """The same leaves that the graft trains."""
    block: Any = graft.blocks[name][number]
    gains = [None if norm is None else norm.weight for norm in (block.norm_q, block.norm_kv)]
    matrices = [linear.weight.T for linear in (block.project, block.w_q, block.w_k, block.w_v, block.w_o)]
    biases = [0.0 if linear.bias is None else linear.bias for linear in (block.w_q, block.w_k)]
    return reference.Weights(*matrices, *gains, *biases)


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
        self.places = places(ids, mask).tolist()
        with self._hooks():
            return self.anchor.model(ids, attention_mask=mask, position_ids=places(ids, mask), use_cache=False).logits

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
        for name, chosen in self.graft.config.augmenting.items():
            for number, (i, j) in enumerate(chosen.pairs or ()):
                if j == layer:
                    weights = weights_of(self.graft, name, number)
                    tokens, sees = self.plan[name][b]
                    places = (self.places[b], range(len(tokens))) if self.rotary else None
                    total = total + reference.cross(hidden, self.states[name][b][i], weights, self.heads, sees, places)
        return total


def places(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Positions that count real tokens."""
    return positions_of(torch.ones_like(ids) if mask is None else mask)


def first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def by_position(ids: Tensor, mask: Tensor | None) -> list[tuple[list[int], Seen]]:
    """One tokenizer. Padding is cut off what the augmenting model reads, so that it can't matter."""
    rows = []
    for b, row in enumerate(ids):
        real = [True] * len(row) if mask is None else mask[b].bool().tolist()
        shift = real.index(True)
        sees = [[s - shift for s in seen] for seen in reference.sees_by_position(real)]
        sees = [seen if real[t] else [] for t, seen in enumerate(sees)]
        rows.append((row[torch.tensor(real)].tolist(), sees))
    return rows


def compare(anchor: Backbone, graft: Composition, slow: Slow, ids: Tensor, mask: Tensor | None) -> None:
    """Logits of real tokens, and the gradients of a random function of them."""
    parameters = list(graft.parameters())
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    direction = torch.randn(int(real.sum()), anchor.sites.config.vocab_size, dtype=torch.float64)
    wanted = slow.logits(ids, mask)[real]
    wanted_gradients = torch.autograd.grad((wanted * direction).sum(), parameters)
    with attached(anchor, graft) as model:
        found = model(ids, attention_mask=mask, position_ids=places(ids, mask)).logits[real]
        found_gradients = torch.autograd.grad((found * direction).sum(), parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found_gradients, wanted_gradients, rtol=1e-6, atol=1e-6)


def double(*models: Backbone) -> None:
    for model in models:
        model.model.double()


@pytest.mark.parametrize("positions", ["none", "rotary", "local"])
@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize(("family", "norm"), [("llama", "none"), ("llama", "pre"), ("gpt2", "none"), ("gemma3", "pre")])
def test_one_tokenizer(family: str, padding: str, norm: str, positions: str) -> None:
    anchor, one, two = live(family), live("llama", 1), live("gpt2", 2)
    double(anchor, one, two)
    graft = composition(anchor, {"one": one, "two": two}, norm=norm, positions=positions, pairs=[(1, 0), (0, 1)])
    graft.double()
    mask = MASKS[padding]
    plan = {"one": by_position(IDS, mask), "two": by_position(IDS, mask)}
    compare(anchor, graft, Slow(anchor, graft, plan, anchor.sites.config.num_attention_heads), IDS, mask)


class SlowSpelled(Slow):
    """With two tokenizers: the text so far of every anchor token is read on its own, from its beginning."""

    def _row(self, layer: int, b: int, hidden: Tensor) -> Tensor:
        written = []
        for t, (paths, births) in enumerate(self.texts[b]):
            total = torch.zeros_like(hidden[t])
            for number, (i, j) in enumerate(self.graft.config.augmenting["one"].pairs or ()):
                if j == layer and paths:
                    states = self._read("one", paths)[i]
                    sees = [list(range(len(paths)))]
                    weights = weights_of(self.graft, "one", number)
                    where = ([self.places[b][t]], births) if self.rotary else None
                    total = total + reference.cross(hidden[t : t + 1], states, weights, self.heads, sees, where)[0]
            written.append(total)
        return torch.stack(written)

    def spell(self, ids: Tensor, mask: Tensor | None, tokenise: Any) -> None:
        """For each row and token, the augmenting tokens so far, and the anchor token with which each was first read."""
        tokenizer = self.anchor.need_tokenizer()
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
                    tokens = reference.tokens_so_far(text, tokenise, _LONGEST_WORD)
                starts = [tuple(tokens[: n + 1]) for n in range(len(tokens))]
                texts.append((tokens, [first_read.setdefault(start, len(so_far) - 1) for start in starts]))
            self.texts.append(texts)


@pytest.mark.parametrize("positions", ["none", "rotary", "local"])
@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_two_tokenizers(family: str, padding: str, positions: str) -> None:
    anchor, one = live("llama"), live(family, 1, tokens=OTHER_TOKENS)
    double(anchor, one)
    graft = composition(anchor, {"one": one}, positions=positions).double()
    ids = words(anchor)
    spelling = Spelling(anchor.need_tokenizer(), one.need_tokenizer(), prompt_only=False, name="one")
    slow = SlowSpelled(anchor, graft, {}, anchor.sites.config.num_attention_heads)
    slow.spell(ids, MASKS[padding], spelling.tokens_of)
    compare(anchor, graft, slow, ids, MASKS[padding])


def words(anchor: Backbone) -> Tensor:
    """Two rows of nine tokens of real text, whose words the two tokenizers cut in different places."""
    tokenizer = anchor.need_tokenizer()
    texts = ("the quick forest jumps over", "les chiens paresseux dans la forêt")
    return torch.tensor([tokenizer(text)["input_ids"][:9] for text in texts])
