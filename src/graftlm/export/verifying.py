"""Compare a model that was written with the model in memory that it stands for."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, first_line
from graftlm.export.adapters import TEMPLATE_MODULE
from graftlm.export.code import is_own
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft

_TOKENS = 32
_ROWS = 8
"""Number of rows that are tried until a graft has an effect on one."""
_RELATIVE_ERROR = 1e-4
"""Largest difference of outputs, relative to the largest output, that counts as rounding in float32."""
_SHARE_ERROR = 0.5
"""Largest error of the share of a graft's effect that is in a model in half precision."""

_NO_EFFECT = (
    "The graft of the kind %s changed nothing in %d rows of %d tokens from the whole vocabulary, so that its effect in "
    "the export could not be checked: compare both on text that the graft was trained for."
)

_log = logging.getLogger(__name__)


class _Probe(NamedTuple):
    """A row of text, and the outputs that models in memory have for it.

    Attributes:
        ids: (1, T) token ids.
        bare: outputs of the backbone alone.
        expected: outputs of the model that was written.
    """

    ids: Tensor
    bare: Tensor
    expected: Tensor

    @property
    def has_effect(self) -> bool:
        """Whether outputs without the graft would count as another model's."""
        effect = (self.expected - self.bare).abs().max()
        return bool(effect > _RELATIVE_ERROR * self.expected.abs().max())


def verify_model(folder: Path, graft: Graft, backbone: Backbone) -> None:
    """Load a model that was written, and compare its output with that of the grafted model.

    The text is a row of 32 tokens from the whole vocabulary. If the graft has no effect on it, other rows are tried; if
    it has none on any, a warning is logged. Outputs are logits, or hidden states if the backbone has no head.

    Args:
        folder: the model's folder.
        graft: the graft, detached.
        backbone: the backbone that it was trained on.

    Raises:
        ArtifactError: the model can't be loaded, or computes something else than the grafted model.
    """
    probe = _probe_of_graft(graft, backbone)
    difference = _difference(lambda: _loaded(folder, backbone), probe)
    if difference:
        raise ArtifactError(
            f"The exported {backbone.sites.model_type} model does not reproduce the grafted model ({difference}): "
            "load the graft with graftlm, or serve it with graft serve."
        )
    if not probe.has_effect:
        _log.warning(_NO_EFFECT, graft.config.kind, _ROWS, _TOKENS)


@torch.no_grad()
def verify_merged(merged: nn.Module, graft: Graft, backbone: Backbone) -> None:
    """Compare the output of a model in memory with that of the grafted model; see `verify_model`.

    Args:
        merged: the model into which the graft was merged.
        graft: the graft, detached.
        backbone: the backbone that it was trained on.

    Raises:
        ArtifactError: the model computes something else than the grafted model.
    """
    probe = _probe_of_graft(graft, backbone)
    difference = _difference(lambda: nullcontext(merged), probe)
    if difference:
        raise ArtifactError(
            f"The merged {backbone.sites.model_type} model does not reproduce the grafted model ({difference}): "
            "load the graft with graftlm, or serve it with graft serve."
        )
    if not probe.has_effect:
        _log.warning(_NO_EFFECT, graft.config.kind, _ROWS, _TOKENS)


@torch.no_grad()
def verify_same(saved: nn.Module, model: nn.Module, backbone: Backbone) -> None:
    """Compare the output of a model that was written and loaded again with that of the model in memory.

    Args:
        saved: the loaded model.
        model: the model in memory, in the same precision.
        backbone: the backbone, for its vocabulary and names.

    Raises:
        ArtifactError: the outputs differ by more than rounding in float32.
    """
    ids = _rows(backbone)[:1]
    expected = _output(model, ids)
    difference = _difference(lambda: nullcontext(saved), _Probe(ids=ids, bare=expected, expected=expected))
    if difference:
        raise ArtifactError(
            f"The file of the {backbone.sites.model_type} model does not reproduce it ({difference}): export it as a "
            "folder (--to FOLDER), or load the graft with graftlm."
        )


@torch.no_grad()
def verify_adapters(folder: Path, carrier: Path | None, grafts: Mapping[str, Graft], backbone: Backbone) -> None:
    """Load adapters of PEFT that were written, and compare the output of each with that of its graft.

    Args:
        folder: the folder with the adapters' folders.
        carrier: the folder of the model to which they are added; None for the backbone.
        grafts: the graft of each adapter by the name of the adapter's folder.
        backbone: the backbone that the grafts were trained on; it is left unchanged.

    Raises:
        ArtifactError: PEFT can't load an adapter, or the model computes something else than its graft.
    """
    probes = {name: _probe_of_graft(graft, backbone) for name, graft in grafts.items()}
    model = copy.deepcopy(backbone.model) if carrier is None else _load_saved(carrier, backbone)
    model = _ready(model, backbone)
    for name, probe in probes.items():
        difference = _difference(lambda name=name: _with_adapter(model, folder / name), probe)
        if difference:
            raise ArtifactError(
                f"PEFT's adapter of the graft {name} does not reproduce it ({difference}): export the graft alone "
                "(graft export GRAFT --to FOLDER), or serve it with graft serve."
            )
        if not probe.has_effect:
            _log.warning(_NO_EFFECT, grafts[name].config.kind, _ROWS, _TOKENS)


@contextmanager
def _with_adapter(model: nn.Module, folder: Path) -> Iterator[nn.Module]:
    """Yield a model with an adapter of PEFT, which is removed afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about a name that PEFT uses
        adapted = PeftModel.from_pretrained(model, str(folder))
    try:
        yield adapted.eval()
    finally:
        adapted.unload()


@torch.no_grad()
def verify_unchanged(folder: Path, backbone: Backbone) -> None:
    """Load a model that was written without a graft, and compare its output for 32 tokens with that of the backbone.

    Args:
        folder: the model's folder.
        backbone: the model that was written.

    Raises:
        ArtifactError: the model can't be loaded, or computes something else.
    """
    ids = _rows(backbone)[:1]
    bare = _output(backbone.bare_model, ids)
    difference = _difference(lambda: _loaded(folder, backbone), _Probe(ids=ids, bare=bare, expected=bare))
    if difference:
        raise ArtifactError(
            f"The exported {backbone.sites.model_type} model does not reproduce {backbone.name} ({difference}): load "
            f"{backbone.name} with graftlm, or serve it with graft serve."
        )


@torch.no_grad()
def _probe_of_graft(graft: Graft, backbone: Backbone) -> _Probe:
    """Return the first row on which a graft has an effect, or the last row if it has none."""
    for ids in _rows(backbone).split(1):
        bare = _output(backbone.bare_model, ids)
        with GraftedModel(backbone, {"graft": graft}) as model:
            expected = _output(model.eval(), ids)
        probe = _Probe(ids=ids, bare=bare, expected=expected)
        if probe.has_effect:
            break
    return probe


def _rows(backbone: Backbone) -> Tensor:
    """Return rows of token ids, (R, T): the first is evenly spaced over the vocabulary, the others are random."""
    vocabulary = backbone.config.get_text_config().vocab_size
    even = torch.arange(1, _TOKENS + 1)[None] * vocabulary // (_TOKENS + 1)
    drawn = torch.randint(vocabulary, (_ROWS - 1, _TOKENS), generator=torch.Generator().manual_seed(0))
    return torch.cat([even, drawn]).to(backbone.device)


@torch.no_grad()
def _difference(load: Callable[[], AbstractContextManager[nn.Module]], probe: _Probe) -> str:
    """Describe the difference between the outputs of a saved and the expected model, or the error at loading.

    Args:
        load: loads the saved model.
        probe: the text, and the outputs of the expected model.

    Returns:
        A clause; empty if the outputs are equal except for rounding.
    """
    expected = probe.expected
    precision = torch.finfo(expected.dtype).eps
    try:
        with load() as saved:
            found = _output(saved, probe.ids)
    except Exception as error:  # The code of a model may raise anything.
        return first_line(error)
    gap = (found - expected).abs().max()
    largest = expected.abs().max()
    share = _share(found.float() - probe.bare.float(), expected.float() - probe.bare.float())
    is_equal = gap <= _RELATIVE_ERROR * largest
    # In half precision, rounding may be as large as the effect of the graft, but not in the effect's direction.
    is_rounding = gap <= 16 * precision * largest and abs(share - 1) <= _SHARE_ERROR
    if is_equal or is_rounding:
        return ""
    clause = f"outputs differ by {gap:.2g} where the largest is {largest:.2g}"
    return f"{clause}, with {share:.0%} of the graft's effect" if probe.has_effect else clause


def _share(found: Tensor, expected: Tensor) -> float:
    """Return how much of an expected change is in a change that was found: 1 for all of it, 0 for none."""
    size = expected.square().sum()
    if not size:
        return 1.0
    return float((found * expected).sum() / size)


def _output(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of a model, or its hidden states if it has no head."""
    output: Any = model(input_ids=ids)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@contextmanager
def _loaded(folder: Path, backbone: Backbone) -> Iterator[nn.Module]:
    """Yield an exported model on the backbone's device."""
    yield _ready(_load_saved(folder, backbone), backbone)


def _ready(model: nn.Module, backbone: Backbone) -> nn.Module:
    """Return a model in evaluation mode on the backbone's device."""
    return model.to(backbone.device).eval()


def _load_saved(folder: Path, backbone: Backbone) -> nn.Module:
    """Load an exported model. The copy of its code that transformers makes in its cache is removed."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.utils import HF_MODULES_CACHE

    has_our_code = is_own(type(backbone.model)) or (folder / f"{TEMPLATE_MODULE}.py").exists()
    if not has_our_code:
        return type(backbone.model).from_pretrained(folder)
    classes = json.loads((folder / "config.json").read_text(encoding="utf-8"))["auto_map"]
    # The Auto classes would load the installed code of GraftLM's architectures instead of the copy in the folder.
    loaded: Any = get_class_from_dynamic_module(classes["AutoModelForCausalLM"], str(folder))
    module = sys.modules[loaded.__module__]
    try:
        return loaded.from_pretrained(folder)
    finally:
        # The module's name begins with transformers_modules and the name of the copy's folder, which may have
        # subfolders.
        depth = len(module.__name__.split("."))
        copied = Path(str(module.__file__)).parents[depth - 3]
        cache = Path(HF_MODULES_CACHE).resolve()
        if copied.resolve().is_relative_to(cache) and copied.resolve() != cache:
            shutil.rmtree(copied)
