"""Uses of a graft on a backbone, one cell for each: right, refused with a message, or wrong."""

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
    """One use of a graft on a backbone.

    Attributes:
        verdict: result of the check.
        why: message of a refusal, or description of a fault.
    """

    verdict: Verdict
    why: str = ""


def compatibility(
    backbone: Backbone,
    config: Mapping[str, Any],
    *,
    spread: float = 0.2,
    learning_rate: float = 1e-2,
) -> dict[str, Cell]:
    """Check all uses of a graft on a backbone.

    Args:
        backbone: a small float32 backbone; it runs some dozens of times.
        config: config of the graft, as in a recipe.
        spread: standard deviation of the noise that replaces training.
        learning_rate: learning rate at which the loss of one batch falls within 8 steps.

    Returns:
        The verdicts, by the names in `CELLS`.
    """
    trial = _Trial(backbone, config, spread, learning_rate)
    return {name: trial.cell(name, check) for name, check in CELLS.items()}


class _Trial:
    """One graft on one backbone."""

    def __init__(self, backbone: Backbone, config: Mapping[str, Any], spread: float, learning_rate: float) -> None:
        self.backbone = backbone
        self.config = config
        self.spread = spread
        self.learning_rate = learning_rate
        self.bare = logits(backbone.model, tiny_ids())

    def cell(self, name: str, check: Callable[[_Trial], None]) -> Cell:
        """Return the verdict of one check, which must also leave the backbone unchanged."""
        if name in ("cached", "static") and not self.backbone.model.can_generate():
            return Cell("not applicable", "an encoder does not generate")
        before = state_of(self.backbone.model)
        try:
            check(self)
            result = Cell("right")
        except GraftError as error:
            result = Cell("refused", str(error))
        except Exception as error:  # errors of a model, torch or transformers are not refusals of ours
            result = Cell("wrong", f"{type(error).__name__}: {first_line(error)}")
        after = state_of(self.backbone.model)
        changed = [key for key in before if after[key] != before[key]]
        if changed:
            return Cell("wrong", f"the backbone's {', '.join(changed)} changed")
        return result

    def graft(self, *, trained: bool = True) -> GraftedModel:
        """Attach the graft to its backbone, with noise that replaces training."""
        model = attach_graft(self.backbone, self.config).eval()
        if trained:
            return randomise(model, self.spread)
        return model

    def attach(self) -> None:
        """An untrained graft changes no logit, and a graft with random weights runs and changes some."""
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
        static = output.past_key_values.is_compileable  # as the caches that `generate` makes for "static" are
        _check(static == bool(decoding), f"the cache is {'' if static else 'not '}static")
        _compare(torch.stack(output.logits, 1), expected, **DECODING_CLOSE)

    def compile(self) -> None:
        """With its last layer compiled, taps included, a model gives the logits of the eager one."""
        torch.compiler.reset()  # code that an earlier cell compiled must not be reused
        with self.graft() as model:
            expected = logits(model, tiny_ids())
            layer = Sites(model.model).layers[-1]
            graphs: list[Any] = []

            def run_unchanged(graph: Any, _: Any) -> Any:
                graphs.append(graph)
                return graph.forward

            layer.compile(backend=run_unchanged)
            try:
                actual = logits(model, tiny_ids())
            finally:
                layer._compiled_call_impl = None  # restores the eager layer
        _check(bool(graphs), "nothing was compiled")
        _compare(actual, expected, **COMPILED_CLOSE)

    def train(self) -> None:
        """Optimiser steps change only the graft, and its loss falls."""
        own = tensors_of(self.backbone.model)
        before = digest(own)
        losses = []
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
        """Return the loss of one batch: of a graft's heads, of the next tokens, or of an encoder's own tokens."""
        ids = tiny_ids()
        alternating = torch.arange(len(ids)) % 2
        if any(isinstance(graft, HasHeads) for graft in model.grafts.values()):
            return model(ids, targets=list(alternating)).loss
        output = model(ids, labels=ids, domain=alternating)
        if self.backbone.model.can_generate():
            return output.loss
        return functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())

    def describe(self) -> None:
        """The quantities of a report are finite, and a graft that is saved and loaded gives the same logits."""
        with TemporaryDirectory() as temporary:
            folder = Path(temporary) / "graft"
            with self.graft() as model:
                graft: Any = model.grafts["graft"]
                expected = logits(model, tiny_ids())
                observed = model.observe(input_ids=tiny_ids())["graft"]
                described = graft.describe(self.backbone)
                save_graft(graft, self.backbone, folder)
            json.dumps(described, allow_nan=False)
            for values in observed.values():
                _check(bool(values.isfinite().all()), "a quantity is not finite")
            written = len(list(read_tensors(folder)))
            _check(read_manifest(folder).tensors == written > 0, "the saved graft has other tensors")
            loaded = load_graft(folder, self.backbone)
            with GraftedModel(self.backbone, {"graft": loaded}) as model:
                _compare(logits(model.eval(), tiny_ids()), expected, **COMPILED_CLOSE)


CELLS: dict[str, Callable[[_Trial], None]] = {
    "attach": _Trial.attach,
    "detach": _Trial.detach,
    "cached": _Trial.cached,
    "static": _Trial.static,
    "compile": _Trial.compile,
    "train": _Trial.train,
    "describe": _Trial.describe,
}


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise AssertionError(problem)


def _compare(actual: Tensor, expected: Tensor, *, rtol: float, atol: float) -> None:
    difference = (actual - expected).abs()
    close = bool((difference <= atol + rtol * expected.abs()).all())  # false for NaN
    _check(close, f"logits differ by {difference.max():.2g}")
