"""A graft as a plain model: a folder that transformers loads where graftlm is not installed."""

from __future__ import annotations

from pathlib import Path

from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, first_line
from graftlm.grafts import Exportable, Graft
from graftlm.io import staged_folder


def export_graft(graft: Graft, backbone: Backbone, folder: str | Path) -> Path:
    """Write the backbone with a graft as one model of transformers' own classes, with its tokenizer and a card.

    Args:
        graft: the graft, detached; its kind must be `Exportable`.
        backbone: the backbone that it was trained on, which stays as it is.
        folder: a new or empty folder.

    Raises:
        ArtifactError: a plain model can't express the graft, the backbone is quantised or has an adapter of its own, or
            the folder holds other files or can't be written.
        WrongBackboneError: the graft was built for another backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    folder, kind = Path(folder), graft.config.kind
    if not isinstance(graft, Exportable):
        raise ArtifactError(
            f"A graft of the kind {kind} adds modules that {type(backbone.model).__name__} of transformers lacks: load"
            " it with graftlm, or serve it with graft serve."
        )
    if any(isinstance(module, BaseTunerLayer) for module in backbone.model.modules()):
        raise ArtifactError(
            "The backbone carries a PEFT adapter, which would not be in the exported model: merge it first "
            "(merge_and_unload)."
        )
    if any(type(weight.data) is not Tensor or weight.is_quantized for weight in backbone.model.parameters()):
        raise ArtifactError(
            "The backbone is quantised, and a graft can't be added to packed weights: load the backbone without "
            "quantisation."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} is not an empty folder, so it is left alone: name a new one.")
    model = graft.merged(backbone)
    try:
        with staged_folder(folder) as draft:
            model.save_pretrained(draft)
            if backbone.tokenizer is not None:
                backbone.tokenizer.save_pretrained(draft)
            (draft / "README.md").write_text(_card(kind, backbone), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"The model could not be written to {folder} ({first_line(error)}): free space or name another folder."
        ) from error
    return folder


def _card(kind: str, backbone: Backbone) -> str:
    return (
        f"---\nlibrary_name: transformers\nbase_model: {backbone.name}\n---\n\n# {backbone.name} with a graft\n\n"
        f"The weights of {backbone.name} with a graft of the kind {kind} in them. Needs transformers alone:\n\n"
        f"```python\nfrom transformers import {type(backbone.model).__name__}\n\n"
        f'model = {type(backbone.model).__name__}.from_pretrained("this-folder")\n```\n'
    )
