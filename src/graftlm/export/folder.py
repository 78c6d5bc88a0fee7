"""Write the folder of an exported model: weights, code, tokenizer and card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template

from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig

from graftlm.backbone import Backbone
from graftlm.errors import ArtifactError, first_line
from graftlm.export.adapters import save_with_adapters
from graftlm.export.code import add_older_rope_keys, copy_code, is_own, save_unchanged
from graftlm.export.shared import summed_adapters
from graftlm.export.turn_ends import add_turn_ends
from graftlm.export.verifying import verify_model, verify_unchanged
from graftlm.export.vllm import Server, check_server
from graftlm.files.model_files import names_gguf_file
from graftlm.files.writing import staged_folder
from graftlm.grafts import Exportable, ExportedAdapter, ExportsAdapter, Graft
from graftlm.grafts.stack import Stack
from graftlm.models import register

_CARD = Path(__file__).with_name("card.md")


def export_graft(graft: Graft, backbone: Backbone, folder: str | Path, *, target: Server | None = None) -> Path:
    """Write the backbone with a graft as one model that needs only transformers, with its tokenizer and a card.

    The written model is loaded again, and its output for a short text is compared with that of the grafted model.

    Args:
        graft: the graft, detached; its kind must be `Exportable` or `ExportsAdapter`, as those of all grafts of a
            `Stack` must be the latter.
        backbone: the backbone that it was trained on; it is left unchanged.
        folder: a new or empty folder.
        target: the server that the export is for, if it must run there.

    Returns:
        The folder.

    Raises:
        ArtifactError: a model of transformers can't express the graft, the server can't run the model, the backbone is
            quantized or has a PEFT adapter, the written model computes something else, or the folder contains files or
            can't be written.
        TapConflictError: the backbone is part of a `GraftedModel` that is not detached.
        WrongBackboneError: the graft was built for another backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    adapter = _adapter_of(graft, backbone)
    if adapter is None and not isinstance(graft, Exportable):
        raise ArtifactError(
            f"A graft of the kind {graft.config.kind} adds modules that {type(backbone.model).__name__} of transformers"
            " lacks: load it with graftlm, or serve it with graft serve."
        )
    check_weights(backbone)
    if adapter is not None or is_own(type(backbone.model)):
        check_server(backbone, target=target)
    with new_model(Path(folder), backbone, f"a graft of the kind {graft.config.kind}") as draft:
        if adapter is not None:
            save_with_adapters(adapter, backbone, draft)
        elif isinstance(graft, Exportable):
            _save_merged(graft, backbone, draft)
        add_older_rope_keys(draft)
        verify_model(draft, graft, backbone)
    return Path(folder)


def _adapter_of(graft: Graft, backbone: Backbone) -> ExportedAdapter | None:
    """Return the module that a graft, or the sum of a stack, puts next to each FFN; None for other kinds."""
    if isinstance(graft, ExportsAdapter):
        return graft.exported_adapter(backbone)
    if not isinstance(graft, Stack):
        return None
    return summed_adapters(graft.grafts(), backbone)


def _save_merged(graft: Exportable, backbone: Backbone, folder: Path) -> None:
    """Write the backbone into whose weights a graft is merged. The merged model is gone when the function returns."""
    model = graft.merged(backbone)
    model.save_pretrained(folder)
    copy_code(model, folder)


def export_model(backbone: Backbone, folder: str | Path, *, target: Server | None = None) -> Path:
    """Write a model that transformers can't load otherwise: one of GraftLM's architectures, or a GGUF file.

    A model of GraftLM is written with its code, which needs only transformers. The weights of a GGUF file are written
    as they were loaded: dequantized. The written model is loaded again, and its output for a short text is compared.

    Args:
        backbone: the model, with its tokenizer, if it has one.
        folder: a new or empty folder.
        target: the server that the export is for, if it must run there.

    Returns:
        The folder.

    Raises:
        ArtifactError: the model is in the format of transformers, and its architecture is transformers' own; only a
            part of it was loaded; the server can't run it; the written model computes something else; or the folder
            contains files or can't be written.
    """
    is_gguf = names_gguf_file(backbone.name)
    if not is_gguf:
        _check_own(backbone.name, backbone.config)
    if is_own(type(backbone.model)):
        check_server(backbone, target=target)
    content = "its dequantized weights" if is_gguf else "the code of its architecture"
    with new_model(Path(folder), backbone, content) as draft:
        save_unchanged(backbone.model, draft)
        copy_code(backbone.model, draft)
        add_older_rope_keys(draft)
        verify_unchanged(draft, backbone)
    return Path(folder)


def export_plain(backbone: Backbone, folder: Path) -> None:
    """Write a backbone as it was loaded, in the format of transformers.

    Args:
        backbone: the backbone.
        folder: a new folder.

    Raises:
        ArtifactError: the folder can't be written.
    """
    with new_model(folder, backbone, "its weights as they were loaded") as draft:
        save_unchanged(backbone.model, draft)
        copy_code(backbone.model, draft)
        add_older_rope_keys(draft)


def check_model(name: str, *, trust_remote_code: bool = False) -> None:
    """Check that `export_model` can write a model, before its weights are loaded.

    Args:
        name: the model, see `load_backbone`. If its config can't be read, nothing is checked.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        ArtifactError: the model is in the format of transformers, and its architecture is transformers' own.
    """
    from transformers import AutoConfig

    if names_gguf_file(name):
        return
    register()
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception:  # Loading the weights reports what is wrong.
        return
    _check_own(name, config)


def _check_own(name: str, config: PreTrainedConfig) -> None:
    if not is_own(type(config)):
        raise ArtifactError(
            f"{name} is a {config.model_type} model of transformers, which already loads without graftlm: name the "
            "folder of a graft."
        )


def check_weights(backbone: Backbone) -> None:
    """Raise `ArtifactError` if a backbone's weights are not plain tensors of its own modules."""
    is_packed = getattr(backbone.model, "is_quantized", False)
    if any(isinstance(module, BaseTunerLayer) for module in backbone.model.modules()):
        raise ArtifactError(
            "The backbone has a PEFT adapter, which the exported model would lack: merge it first (merge_and_unload)."
        )
    for weight in backbone.model.parameters():
        if is_packed or type(weight.data) is not Tensor or weight.is_quantized:
            raise ArtifactError(
                f"The backbone has weights of the type {type(weight.data).__name__} and dtype {weight.dtype}, as after "
                "quantization, but a graft can be added to plain tensors only: load the backbone without quantization."
            )


def check_new_folder(folder: Path) -> None:
    """Raise `ArtifactError` if a folder is in use."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArtifactError(f"{folder} exists and is not an empty folder, so it is left unchanged: name a new folder.")


def _check_head(backbone: Backbone) -> None:
    """Raise `ArtifactError` if the head of a model of our own was not loaded."""
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
def new_model(folder: Path, backbone: Backbone, content: str) -> Iterator[Path]:
    """Yield the draft of a model's folder; tokenizer and card are added when the block has succeeded.

    Args:
        folder: the folder of the model.
        backbone: the backbone, for its tokenizer and names.
        content: content of the folder in addition to the backbone's weights, for the card.
    """
    check_new_folder(folder)
    _check_head(backbone)
    try:
        with staged_folder(folder) as draft:
            draft.mkdir()
            yield draft
            if backbone.tokenizer is not None:
                backbone.tokenizer.save_pretrained(draft)
                add_turn_ends(draft, backbone.tokenizer)
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
