"""What a graft can do on a backbone, one cell for each use: right, refused in one sentence, or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.backbone import Backbone, Sites
from graftlm.backbone.cache import is_static_layer
from graftlm.errors import GraftError, first_line
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import HasHeads
from graftlm.store.artifact import load_graft, read_tensors, save_graft
from graftlm.store.manifest import read_manifest
from graftlm.testing.laws import (
    attach_graft,
    digest,
    generate,
    logits,
    prompts,
    randomise,
    recompute,
    state_of,
    tensors_of,
)
from graftlm.testing.tiny import tiny_ids

Verdict = Literal["right", "refused", "wrong", "not applicable"]
STEPS = 8
DECODING_CLOSE = {"rtol": 1e-3, "atol": 1e-3}  # some families round activations to eight bits, or square them
COMPILED_CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # the same operations, which a compiler may fuse or reorder


class Cell(NamedTuple):
    """One use of a graft on a backbone; `why` is the sentence of a refusal, or what is wrong."""

    verdict: Verdict
    why: str = ""


def compatibility(
    backbone: Backbone, config: Mapping[str, Any], *, spread: float = 0.2, learning_rate: float = 1e-2
) -> dict[str, Cell]:
    """What a graft can do on a backbone, by the names in `CELLS`.

    Args:
        backbone: a small float32 one: it runs some dozens of times.
        config: the graft's, as a recipe writes it.
        spread: standard deviation of the noise that replaces training.
        learning_rate: a rate at which the loss of one batch falls within 8 steps.
    """
    trial = _Trial(backbone, config, spread, learning_rate)
    return {name: trial.cell(name, check) for name, check in CELLS.items()}


class _Trial:
    """One graft on one backbone."""

    def __init__(self, backbone: Backbone, config: Mapping[str, Any], spread: float, learning_rate: float) -> None:
        self.backbone, self.config, self.spread, self.learning_rate = backbone, config, spread, learning_rate
        self.bare = logits(backbone.model, tiny_ids())

    def cell(self, name: str, check: Callable[[_Trial], None]) -> Cell:
        """The verdict of one check, which also has to leave the backbone as it was."""
        if name in ("cached", "static") and not self.backbone.model.can_generate():
            return Cell("not applicable", "an encoder does not generate")
        before = state_of(self.backbone.model)
        try:
            check(self)
            result = Cell("right")
        except GraftError as error:
            result = Cell("refused", str(error))
        except Exception as error:  # whatever a model, torch or transformers raises is no refusal of ours
            result = Cell("wrong", f"{type(error).__name__}: {first_line(error)}")
        after = state_of(self.backbone.model)
        changed = [key for key in before if after[key] != before[key]]
        return Cell("wrong", f"the backbone's {', '.join(changed)} changed") if changed else result

    def graft(self, *, trained: bool = True) -> GraftedModel:
        """The graft on its backbone, with noise in place of training."""
        model = attach_graft(self.backbone, self.config).eval()
        return randomise(model, self.spread) if trained else model

    def attach(self) -> None:
        """An untrained graft changes no logit, and one with random weights runs and acts."""
        with self.graft(trained=False) as model:
            _check(torch.equal(logits(model, tiny_ids()), self.bare), "an untrained graft changes logits")
            acting = logits(randomise(model, self.spread), tiny_ids())
        _check(bool(acting.isfinite().all()), "logits are not finite")
        _check(not torch.equal(acting, self.bare), "a graft with random weights changes no logit")

    def detach(self) -> None:
        """A detached graft leaves no bit of the logits changed."""
        with self.graft() as model:
            logits(model, tiny_ids())
        _check(torch.equal(logits(self.backbone.model, tiny_ids()), self.bare), "a detached graft changes logits")

    def cached(self) -> None:
        """Greedy decoding with a growing cache equals recomputation; one row is padded on the left."""
        self._decode()

    def static(self) -> None:
        """The same with a static cache."""
        self._decode(cache_implementation="static")

    def _decode(self, **decoding: Any) -> None:
        ids, mask = prompts()
        with self.graft() as model:
            output = generate(model, ids, mask, do_sample=False, **decoding)
            expected = recompute(model, output.sequences, mask)
        static = any(map(is_static_layer, output.past_key_values.layers))
        _check(static == bool(decoding), f"the cache is {'' if static else 'not '}static")
        _compare(torch.stack(output.logits, 1), expected, **DECODING_CLOSE)

    def compile(self) -> None:
        """With its last layer compiled, taps included, a model gives the logits of the eager one."""
        torch.compiler.reset()  # compiled code of one cell is not for the next
        with self.graft() as model:
            expected, layer = logits(model, tiny_ids()), Sites(model.model).layers[-1]
            graphs: list[Any] = []

            def run_as_it_is(graph: Any, _: Any) -> Any:
                graphs.append(graph)
                return graph.forward

            layer.compile(backend=run_as_it_is)
            try:
                actual = logits(model, tiny_ids())
            finally:
                layer._compiled_call_impl = None  # the layer as it was
        _check(bool(graphs), "nothing was compiled")
        _compare(actual, expected, **COMPILED_CLOSE)

    def train(self) -> None:
        """Optimiser steps change the graft alone, and its loss falls."""
        own = tensors_of(self.backbone.model)
        before, losses = digest(own), []
        with self.graft(trained=False) as model:
            parameters = model.train().trainable_parameters()
            first = digest(parameters)
            optimiser = torch.optim.AdamW(parameters.values(), lr=self.learning_rate)
            for _ in range(STEPS):
                torch.manual_seed(0)
                loss = self._loss(model)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            _check(digest(parameters) != first, "no parameter of the graft changes")
        _check(digest(own) == before, "the backbone's weights change")
        _check(losses[-1] < losses[0], f"the loss does not fall: {losses[0]:.3f} to {losses[-1]:.3f}")

    def _loss(self, model: GraftedModel) -> Tensor:
        """The loss of one batch: of a graft's heads, of the next tokens, or of an encoder's own tokens."""
        ids = tiny_ids()
        if any(isinstance(graft, HasHeads) for graft in model.grafts.values()):
            return model(ids, targets=[torch.tensor(row % 2) for row in range(len(ids))]).loss
        output = model(ids, labels=ids, domain=torch.arange(len(ids)) % 2)
        if self.backbone.model.can_generate():
            return output.loss
        return functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())

    def describe(self) -> None:
        """A report's quantities are finite; the saved graft is read, and loaded again it gives the same logits."""
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "graft"
            with self.graft() as model:
                graft: Any = model.grafts["graft"]
                expected, observed = logits(model, tiny_ids()), model.observe(input_ids=tiny_ids())["graft"]
                described = graft.describe(self.backbone)
                save_graft(graft, self.backbone, folder)
            json.dumps(described, allow_nan=False)
            _check(all(bool(values.isfinite().all()) for values in observed.values()), "a quantity is not finite")
            manifest = read_manifest(folder)
            _check(manifest.tensors == len(list(read_tensors(folder))) > 0, "the saved graft has other tensors")
            with GraftedModel(self.backbone, {"graft": load_graft(folder, self.backbone)}) as model:
                _compare(logits(model.eval(), tiny_ids()), expected, **COMPILED_CLOSE)


CELLS: dict[str, Callable[[_Trial], None]] = {
    name: getattr(_Trial, name) for name in ("attach", "detach", "cached", "static", "compile", "train", "describe")
}


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise AssertionError(problem)


def _compare(actual: Tensor, expected: Tensor, *, rtol: float, atol: float) -> None:
    difference = (actual - expected).abs()
    close = bool((difference <= atol + rtol * expected.abs()).all())  # false for NaN
    _check(close, f"logits differ by {difference.max():.2g}")
