"""Compare a model that was written with the grafted model that it stands for."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, first_line
from graftlm.export.adapters import TEMPLATE_MODULE
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Graft

_TOKENS = 32
_RELATIVE_ERROR = 1e-4
"""Largest difference of outputs, relative to the largest output, that counts as rounding in float32."""
_SHARE_ERROR = 0.5
"""Largest error of the share of a graft's effect that is in a model in half precision."""


def verify_model(folder: Path, graft: Graft, backbone: Backbone) -> None:
    """Load a model that was written, and compare its output with that of the grafted model.

    The text is one row of 32 tokens from the whole vocabulary. Outputs are logits, or hidden states if the backbone
    has no head.

    Args:
        folder: the model's folder.
        graft: the graft, detached.
        backbone: the backbone that it was trained on.

    Raises:
        ArtifactError: the model can't be loaded, or computes something else than the grafted model.
    """
    difference = _difference(folder, graft, backbone)
    if difference:
        raise ArtifactError(
            f"The exported {backbone.sites.model_type} model does not reproduce the grafted model ({difference}): "
            "load the graft with graftlm, or serve it with graft serve."
        )


@torch.no_grad()
def _difference(folder: Path, graft: Graft, backbone: Backbone) -> str:
    """Describe the difference between the outputs of the saved and of the grafted model, or the error at loading.

    Returns:
        A clause; empty if the outputs are equal except for rounding.
    """
    vocabulary = backbone.config.get_text_config().vocab_size
    ids = torch.arange(1, _TOKENS + 1, device=backbone.device)[None] * vocabulary // (_TOKENS + 1)
    bare = _output(backbone.bare_model, ids)
    with GraftedModel(backbone, {"graft": graft}) as model:
        expected = _output(model.eval(), ids)
    precision = torch.finfo(expected.dtype).eps
    try:
        saved = _load_saved(folder, backbone).to(backbone.device)
        found = _output(saved.eval(), ids)
    except Exception as error:  # The code of a model may raise anything.
        return first_line(error)
    gap = (found - expected).abs().max()
    largest = expected.abs().max()
    share = _share(found.float() - bare.float(), expected.float() - bare.float())
    is_equal = gap <= _RELATIVE_ERROR * largest
    # In half precision, rounding may be as large as the effect of the graft, but not in the effect's direction.
    is_rounding = gap <= 16 * precision * largest and abs(share - 1) <= _SHARE_ERROR
    if is_equal or is_rounding:
        return ""
    return f"outputs differ by {gap:.2g} where the largest is {largest:.2g}, with {share:.0%} of the graft's effect"


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


def _load_saved(folder: Path, backbone: Backbone) -> nn.Module:
    """Load an exported model. The copy of its code that transformers makes in its cache is removed."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import HF_MODULES_CACHE

    if not (folder / f"{TEMPLATE_MODULE}.py").exists():
        return type(backbone.model).from_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    module = sys.modules[type(saved).__module__]
    # The module's name begins with transformers_modules and the name of the copy's folder, which may have subfolders.
    depth = len(module.__name__.split("."))
    copied = Path(str(module.__file__)).parents[depth - 3]
    cache = Path(HF_MODULES_CACHE).resolve()
    if copied.resolve().is_relative_to(cache) and copied.resolve() != cache:
        shutil.rmtree(copied)
    return saved
