"""Write the folder of an exported model: weights, code, tokenizer and card."""

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
from graftlm.export.adapters import save_with_adapters
from graftlm.export.code import copy_code, is_own, save_unchanged
from graftlm.files.writing import staged_folder
from graftlm.grafts import Exportable, ExportsAdapter, Graft

_CARD = Path(__file__).with_name("card.md")


def export_graft(graft: Graft, backbone: Backbone, folder: str | Path) -> Path:
    """Write the backbone with a graft as one model that needs only transformers, with its tokenizer and a card.

    Args:
        graft: the graft, detached; its kind must be `Exportable` or `ExportsAdapter`.
        backbone: the backbone that it was trained on; it is left unchanged.
        folder: a new or empty folder.

    Returns:
        The folder.

    Raises:
        ArtifactError: a model of transformers can't express the graft, the backbone is quantized or has a PEFT
            adapter, or the folder contains files or can't be written.
        WrongBackboneError: the graft was built for another backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    if not isinstance(graft, Exportable | ExportsAdapter):
        raise ArtifactError(
            f"A graft of the kind {graft.config.kind} adds modules that {type(backbone.model).__name__} of transformers"
            " lacks: load it with graftlm, or serve it with graft serve."
        )
    _check_weights(backbone)
    with _new_model(Path(folder), backbone, f"a graft of the kind {graft.config.kind}") as draft:
        if isinstance(graft, Exportable):
            model = graft.merged(backbone)
            model.save_pretrained(draft)
            copy_code(model, draft)
        else:
            save_with_adapters(graft, backbone, draft)
    return Path(folder)


def export_model(backbone: Backbone, folder: str | Path) -> Path:
    """Write a model whose architecture is defined in GraftLM with its code, which needs only transformers.

    Args:
        backbone: the model, with its tokenizer, if it has one.
        folder: a new or empty folder.

    Returns:
        The folder.

    Raises:
        ArtifactError: the architecture is defined in transformers, only a part of the model was loaded, or the folder
            contains files or can't be written.
    """
    with _new_model(Path(folder), backbone, "the code of its architecture") as draft:
        save_unchanged(backbone.model, draft)
        if not copy_code(backbone.model, draft):
            raise ArtifactError(
                f"{backbone.name} is a {backbone.sites.model_type} model of transformers, which already loads without "
                "graftlm: name the folder of a graft."
            )
    return Path(folder)


def _check_weights(backbone: Backbone) -> None:
    """Raise `ArtifactError` if a backbone's weights are not plain tensors of its own modules."""
    if any(isinstance(module, BaseTunerLayer) for module in backbone.model.modules()):
        raise ArtifactError(
            "The backbone has a PEFT adapter, which the exported model would lack: merge it first (merge_and_unload)."
        )
    for weight in backbone.model.parameters():
        if type(weight.data) is not Tensor or weight.is_quantized:
            raise ArtifactError(
                "The backbone is quantized, but a graft can't be added to packed weights: load the backbone without "
                "quantization."
            )


def _check_target(folder: Path, backbone: Backbone) -> None:
    """Raise `ArtifactError` if the folder is in use, or the head of a model of our own was not loaded."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} exists and is not an empty folder, so it is left unchanged: name a new folder.")
    model = type(backbone.model)
    if not is_own(model):
        return
    for name in backbone.model.config.architectures or ():
        if name != model.__name__:
            raise ArtifactError(
                f"The checkpoint of {backbone.name} is a {name}, but it was loaded as a {model.__name__}, so the "
                "exported model would lack its head: load the graft with graftlm instead of exporting it."
            )


@contextmanager
def _new_model(folder: Path, backbone: Backbone, content: str) -> Iterator[Path]:
    """Yield the draft of a model's folder; tokenizer and card are added when the block has succeeded.

    Args:
        folder: the folder of the model.
        backbone: the backbone, for its tokenizer and names.
        content: content of the folder in addition to the backbone's weights, for the card.
    """
    _check_target(folder, backbone)
    try:
        with staged_folder(folder) as draft:
            draft.mkdir()
            yield draft
            if backbone.tokenizer is not None:
                backbone.tokenizer.save_pretrained(draft)
            has_code = any(draft.glob("*.py"))
            card = Template(_CARD.read_text(encoding="utf-8")).substitute(
                name=backbone.name,
                content=content,
                loader="AutoModelForCausalLM" if has_code else type(backbone.model).__name__,
                option=", trust_remote_code=True" if has_code else "",
            )
            (draft / "README.md").write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"The model could not be written to {folder} ({first_line(error)}): free some space or name another folder."
        ) from error
