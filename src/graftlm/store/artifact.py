"""Save and load grafts as folders with `graft.json`, `graft.safetensors` and `README.md`.

A folder is written next to its place, synced and renamed, so that it is complete or absent. No pickle is ever read.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from graftlm.backbone import Backbone, BackboneKind, load_backbone, need_backbone
from graftlm.config import parse_overridden
from graftlm.errors import ArtifactError, BackboneError, WrongBackboneError, first_line
from graftlm.files.hub import fetch_folder, holds, hub_name
from graftlm.files.model_files import PACKAGED_MODELS, packaged_model
from graftlm.files.writing import staged_folder
from graftlm.grafts import Graft, HasTensors, ReadsModels, build_graft, graft_config
from graftlm.grafts.base import check_tensors
from graftlm.store.manifest import CARD_NAME, JSON_NAME, TENSORS_NAME, BackboneRecord, Manifest, read_manifest
from graftlm.version import __version__


def save_graft(
    graft: Graft, backbone: Backbone, folder: str | Path, *, training: Mapping[str, Any] | None = None, card: str = ""
) -> Path:
    """Write a graft; what stood at `folder` is replaced only once the new one is whole.

    Args:
        graft: the graft; only its own tensors are written.
        backbone: the backbone that it was trained on: its name and fingerprint are written, its weights never.
        training: a summary of the run, plain JSON.
        card: the model card (Markdown); a short one is made when it is empty.

    Raises ArtifactError if the disk is full, the folder holds something else, or tensors are missing or not finite, and
    WrongBackboneError if the graft was built for another backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in graft_tensors(graft).items()}
    if isinstance(graft, HasTensors) and not tensors:
        raise ArtifactError(
            f"This {graft.config.kind} gets its tensors when it is attached, and it never was: make a GraftedModel of "
            "it before you save it."
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(
                f"The tensor {name} holds NaN or infinity, so the graft is not written: "
                "train with a lower learning rate."
            )
    manifest = Manifest(
        kind=graft.config.kind,
        config=graft.config.model_dump(mode="json"),
        library=__version__,
        backbone=BackboneRecord.of(backbone),
        frozen_models={name: BackboneRecord.of(model) for name, model in _frozen_models(graft).items()},
        tensors=len(tensors),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        training=dict(training or {}),
    )
    if not card:
        text = f"Kind: {manifest.kind}, {manifest.parameters:,} parameters. "
        text += "The backbone's weights are not in this folder and were never changed."
        card = model_card(backbone.name, "A graft", text, kind=backbone.kind)
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file, and a folder is to be written there: name another place.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / JSON_NAME).exists():
        raise ArtifactError(f"{folder} holds other files and no graft, and is left alone: name an empty or new folder.")
    try:
        with staged_folder(folder) as draft:
            draft.mkdir()
            save_file(tensors, draft / TENSORS_NAME, metadata={"format": "pt", "kind": manifest.kind})
            values = manifest.model_dump(mode="json")
            (draft / JSON_NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            shutil.copymode(draft / JSON_NAME, draft / TENSORS_NAME)  # safetensors' own lets nobody else read it
            (draft / CARD_NAME).write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
        why = "the disk is full" if full else str(error)
        raise ArtifactError(
            f"The graft could not be written to {folder} ({why}): free space or name another folder."
        ) from error
    return folder


def save_into(graft: Graft, backbone: Backbone, folder: Path) -> None:
    """Write a graft into a folder that may hold other files, such as a trainer's; `save_graft` says what it raises."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".") as draft:
        for file in save_graft(graft, backbone, Path(draft) / "graft").iterdir():
            file.replace(folder / file.name)


def load_graft(folder: str | Path, backbone: Backbone, changes: Sequence[str] = ()) -> Graft:
    """The graft in a folder, built for `backbone` and not yet attached.

    Args:
        folder: the graft's folder, or OWNER/NAME on the hub.
        backbone: the one that it was trained on.
        changes: of the graft's config, as `KEY=VALUE`, such as where another model that it reads lies now.

    Raises WrongBackboneError if it was trained on another backbone, or beside other models, and ArtifactError if the
    folder is damaged or foreign, and RecipeError if a change does not fit.
    """
    manifest = read_manifest(folder)
    if difference := manifest.backbone.matches(need_backbone(backbone)):
        raise WrongBackboneError(
            f"The graft {folder} was trained on {manifest.backbone.name}, but {backbone.name} was given and "
            f"{difference}: pass the backbone that it was trained on."
        )
    config = manifest.graft_config()
    if changes:
        values = config.model_dump(mode="json")
        config = parse_overridden(lambda values: graft_config(values, where=JSON_NAME), values, changes, JSON_NAME)
    graft = build_graft(config, backbone)
    for name, live in _frozen_models(graft).items():
        record = manifest.frozen_models.get(name)
        if difference := record.matches(live) if record else "it was not there then":
            raise WrongBackboneError(
                f"The graft {folder} was trained with {record.name if record else 'no model'} as {name}, but "
                f"{live.name} was found and {difference}: pass the model that it was trained with."
            )
    tensors = dict(read_tensors(folder))
    try:
        if isinstance(graft, HasTensors):
            graft.load_tensors(tensors)
        else:
            check_tensors(graft.state_dict(), tensors)
            graft.load_state_dict(tensors)
    except ArtifactError as error:
        if not changes:
            raise
        problem = str(error).partition(":")[0]
        raise ArtifactError(
            f"With {', '.join(changes)} the trained tensors don't fit ({problem}): leave out what changes their shapes."
        ) from error
    return graft.eval()


def load_grafts(folder: str | Path, backbone: Backbone, changes: Sequence[str] = ()) -> dict[str, Graft]:
    """The graft in a folder, named `graft`, behind those that `graft grow` had attached while it was trained.

    They act together, so `GraftedModel(backbone, load_grafts(folder, backbone))` is the model that was measured. The
    others are read from where `graft grow` wrote them: beside the folder's parent, in STAGE/graft.

    Raises ArtifactError if one of them is not there; and what `load_graft` raises.
    """
    folder, earlier = Path(folder), {}
    for name in read_manifest(folder).trained_after:
        beside = folder.absolute().parent.parent / name / "graft"
        is_name = name.replace("-", "_").isidentifier()  # of a stage, and no path of a foreign file's choice
        if not (is_name and folder.is_dir() and (beside / JSON_NAME).is_file()):
            raise ArtifactError(
                f"The graft {folder} was trained beside {name}, which is not in {beside}: put it there, as graft grow "
                "did."
            )
        earlier[name] = load_graft(beside, backbone)
    return {**earlier, "graft": load_graft(folder, backbone, changes)}


def graft_tensors(graft: Graft) -> dict[str, Tensor]:
    """The tensors that an artefact holds of a graft, by name."""
    return graft.tensors() if isinstance(graft, HasTensors) else dict(graft.state_dict())


def _frozen_models(graft: Graft) -> Mapping[str, Backbone]:
    return graft.frozen_models() if isinstance(graft, ReadsModels) else {}


def backbone_of(
    folder: str | Path,
    name: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Backbone:
    """The backbone that a graft was trained on, loaded by the name and with the head that the graft remembers.

    Args:
        folder: the graft's folder; or a model's own, for that model.
        name: where the backbone is now, when that is elsewhere.
        device: where to put it; None takes the fastest there is.
        dtype: `auto` keeps the checkpoint's.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises ArtifactError if the folder is not a graft, and BackboneError if the backbone can't be loaded.
    """
    record = None if is_model(folder) else read_manifest(folder).backbone
    remembered, kind = (record.name, record.kind) if record else (str(folder), "causal-lm")
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "family": record.family if record else None}
    try:
        backbone = load_backbone(name or remembered, kind=kind, **options)
    except BackboneError as error:
        if name is not None or is_model(folder):
            raise
        raise BackboneError(
            f"{str(error).rstrip('.')}; the graft {folder} was trained on that backbone, so say where it is now "
            "(--backbone)."
        ) from error
    backbone.move(device)
    return backbone


def is_model(folder: str | Path) -> bool:
    """Whether a folder or a repository of the hub holds a model and no graft; or the path is that of a GGUF file."""
    if packaged_model(str(folder)) or Path(folder).suffix.lower() == ".gguf":
        return True
    return holds(folder, "config.json") and not holds(folder, JSON_NAME)


def model_card(backbone: str, title: str, text: str, *, kind: BackboneKind = "causal-lm", several: bool = False) -> str:
    """A graft's card: what it is, and how to load it, with `several` beside those that it was trained with."""
    name = hub_name(PACKAGED_MODELS.get(backbone.lower(), ("", backbone))[1])
    base = f"base_model: {name}\n" if name else ""  # the hub refuses one that is none of its own
    options = "" if kind == "causal-lm" else f", kind={kind!r}"
    loader = "load_grafts" if several else "load_graft"
    loaded = f'{loader}("this-folder", backbone)'
    grafts = loaded if several else f'{{"graft": {loaded}}}'
    return (
        f"---\nlibrary_name: graftlm\n{base}---\n\n# {title} for {backbone}\n\n{text}\n\n"
        f"```python\nfrom graftlm import GraftedModel, load_backbone, {loader}\n\n"
        f"backbone = load_backbone({backbone!r}{options})\nmodel = GraftedModel(backbone, {grafts})\n```\n"
    )


def read_tensors(folder: str | Path, name: str = TENSORS_NAME) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a graft's folder, or of another file in a folder, by name; they are read one by one.

    Raises ArtifactError if their file is missing or damaged.
    """
    path = fetch_folder(folder, JSON_NAME) / name
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield name, file.get_tensor(name)
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing, so the graft is not whole: copy or train it again.") from None
    except (SafetensorError, OSError, ValueError) as error:
        why = f"{path} is not a whole safetensors file ({first_line(error)}): copy it again, or train again."
        raise ArtifactError(why) from None
