"""A graft as a plain model: a folder that transformers loads where graftlm is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template

from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, first_line
from graftlm.export.code import copy_code, save_unchanged, save_with_adapters
from graftlm.grafts import Exportable, ExportsAdapter, Graft
from graftlm.io import staged_folder

_CARD = Template(Path(__file__).with_name("card.txt").read_text(encoding="utf-8"))


def export_graft(graft: Graft, backbone: Backbone, folder: str | Path) -> Path:
    """Write the backbone with a graft as one model that needs transformers alone, with its tokenizer and a card.

    Args:
        graft: the graft, detached; its kind must be `Exportable` or `ExportsAdapter`.
        backbone: the backbone that it was trained on, which stays as it is.
        folder: a new or empty folder.

    Raises ArtifactError if a plain model can't express the graft, the backbone is quantised or has an adapter of its
    own, or the folder holds other files or can't be written, and WrongBackboneError if the graft was built for another
    backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    if not isinstance(graft, Exportable | ExportsAdapter):
        raise ArtifactError(
            f"A graft of the kind {graft.config.kind} adds modules that {type(backbone.model).__name__} of transformers"
            " lacks: load it with graftlm, or serve it with graft serve."
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
    with _new_model(Path(folder), backbone, f"a graft of the kind {graft.config.kind}") as draft:
        if isinstance(graft, Exportable):
            model = graft.merged(backbone)
            model.save_pretrained(draft)
            copy_code(model, draft)
        else:
            save_with_adapters(graft, backbone, draft)
    return Path(folder)


def export_model(backbone: Backbone, folder: str | Path) -> Path:
    """Write a model of one of GraftLM's own architectures with its code, so that it needs transformers alone.

    Raises ArtifactError if the model is one of transformers', or the folder holds other files or can't be written.
    """
    with _new_model(Path(folder), backbone, "the code of its architecture") as draft:
        save_unchanged(backbone.model, draft)
        if not copy_code(backbone.model, draft):
            raise ArtifactError(
                f"{backbone.name} is a {backbone.sites.model_type} model of transformers, which loads without graftlm "
                "as it is: name the folder of a graft."
            )
    return Path(folder)


@contextmanager
def _new_model(folder: Path, backbone: Backbone, content: str) -> Iterator[Path]:
    """Yield the draft of a model's folder; tokenizer and card are added at the end, when all of it takes its place."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} is not an empty folder, so it is left alone: name a new one.")
    try:
        with staged_folder(folder) as draft:
            draft.mkdir()
            yield draft
            if backbone.tokenizer is not None:
                backbone.tokenizer.save_pretrained(draft)
            values = {"name": backbone.name, "content": content, "loader": type(backbone.model).__name__, "option": ""}
            if any(draft.glob("*.py")):
                values |= {"loader": "AutoModelForCausalLM", "option": ", trust_remote_code=True"}
            (draft / "README.md").write_text(_CARD.substitute(values), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"The model could not be written to {folder} ({first_line(error)}): free space or name another folder."
        ) from error
