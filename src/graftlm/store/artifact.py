"""Save and load grafts as folders with `graft.json`, `graft.safetensors` and `README.md`.

A folder is written next to its place, synced and renamed, so that it is either complete or absent. Pickles are never
read.
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
from graftlm.errors import ArtifactError, BackboneError, RecipeError, WrongBackboneError, first_line
from graftlm.files.hub import fetch_folder, holds
from graftlm.files.model_files import names_gguf_file
from graftlm.files.writing import staged_folder
from graftlm.grafts import Graft, GraftConfig, HasTensors, ReadsModels, build_graft, graft_config
from graftlm.grafts.base import ROWS_NAME, check_tensors
from graftlm.grafts.presets import PRESET
from graftlm.store.card import model_card
from graftlm.store.manifest import (
    CARD_NAME,
    JSON_NAME,
    TENSORS_NAME,
    AddedTokensRecord,
    BackboneRecord,
    Manifest,
    read_manifest,
)
from graftlm.version import __version__

_ROWS_PREFIX = f"{ROWS_NAME}."


def save_graft(
    graft: Graft, backbone: Backbone, folder: str | Path, *, training: Mapping[str, Any] | None = None, card: str = ""
) -> Path:
    """Write a graft to a folder.

    The folder of an older graft is replaced with all of its files, once the new one is complete.

    Args:
        graft: the graft; only its own tensors are written.
        backbone: the backbone that it was trained on. Its name and fingerprint are written, its weights are not.
        folder: an empty or new folder, or the folder of another graft.
        training: a summary of the run as JSON values, for graft.json.
        card: the model card in Markdown; a short one is made if it is empty.

    Returns:
        The folder.

    Raises:
        ArtifactError: the folder can't be written, is a file, or contains files but no graft; or the graft has no
            tensors yet, or a tensor has NaN or infinity.
        WrongBackboneError: the graft was built for another backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in graft_tensors(graft).items()}
    _check_saved_tensors(graft, tensors)
    manifest = _manifest_of(graft, backbone, tensors, training or {})
    if not card:
        card = _short_card(manifest, backbone)
    _check_target(folder)
    try:
        with staged_folder(folder) as draft:
            draft.mkdir()
            _write_files(draft, tensors, manifest, card)
    except (OSError, SafetensorError) as error:
        is_full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
        reason = "the disk is full" if is_full else str(error)
        raise ArtifactError(
            f"The graft could not be written to {folder} ({reason}): free some space or name another folder."
        ) from error
    return folder


def _check_saved_tensors(graft: Graft, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ArtifactError` if a graft has no tensors yet, or one is not finite."""
    if isinstance(graft, HasTensors) and not tensors:
        raise ArtifactError(
            f"This graft of the kind {graft.config.kind} gets its tensors when it is attached, but it never was: make "
            "a GraftedModel of it before you save it."
        )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(
                f"The tensor {name} contains NaN or infinity, so the graft is not written: train with a lower learning "
                "rate."
            )


def _manifest_of(
    graft: Graft, backbone: Backbone, tensors: Mapping[str, Tensor], training: Mapping[str, Any]
) -> Manifest:
    frozen_models = {name: BackboneRecord.of(model) for name, model in _frozen_models(graft).items()}
    return Manifest(
        kind=graft.config.kind,
        config=graft.config.model_dump(mode="json"),
        library=__version__,
        backbone=BackboneRecord.of(backbone),
        frozen_models=frozen_models,
        tensors=len(tensors),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        training=dict(training),
        added_tokens=AddedTokensRecord.of(backbone),
    )


def _short_card(manifest: Manifest, backbone: Backbone) -> str:
    text = (
        f"Kind: {manifest.kind}, {manifest.parameters:,} parameters. "
        "The backbone's weights are not in this folder and were never changed."
    )
    return model_card(
        backbone.name,
        "A graft",
        text,
        kind=backbone.kind,
        with_tokens=backbone.extended is not None,
    )


def _check_target(folder: Path) -> None:
    """Raise `ArtifactError` if a graft can't be written to `folder` without losing other files."""
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file, but the graft is written to a folder: name another place.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / JSON_NAME).exists():
        raise ArtifactError(
            f"{folder} contains other files and no graft, so it is left unchanged: name an empty or new folder."
        )


def _write_files(folder: Path, tensors: Mapping[str, Tensor], manifest: Manifest, card: str) -> None:
    metadata = {"format": "pt", "kind": manifest.kind}
    save_file(dict(tensors), folder / TENSORS_NAME, metadata=metadata)
    text = json.dumps(manifest.to_json(), indent=2) + "\n"
    (folder / JSON_NAME).write_text(text, encoding="utf-8")
    shutil.copymode(folder / JSON_NAME, folder / TENSORS_NAME)  # safetensors gives no read permission to others.
    (folder / CARD_NAME).write_text(card, encoding="utf-8")


def save_into(graft: Graft, backbone: Backbone, folder: Path) -> None:
    """Write a graft into a folder that may contain other files, such as a checkpoint of a trainer.

    Files of an older graft are replaced one after another.

    Raises:
        ArtifactError: the graft can't be written, see `save_graft`.
        WrongBackboneError: the graft was built for another backbone.
        OSError: the folder can't be created, or a file in it can't be replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".") as draft:
        written = save_graft(graft, backbone, Path(draft) / "graft")
        for file in written.iterdir():
            file.replace(folder / file.name)


def load_graft(folder: str | Path, backbone: Backbone, changes: Sequence[str] = ()) -> Graft:
    """Load the graft in a folder.

    Args:
        folder: the graft's folder, or OWNER/NAME on the hub.
        backbone: the backbone that it was trained on.
        changes: changes of the graft's config as `KEY=VALUE`, such as the new path of another model that it reads.

    Returns:
        The graft in eval mode. It is built for `backbone` and not attached to it.

    Raises:
        WrongBackboneError: the graft was trained on another backbone, with other added tokens, or with other frozen
            models than those that its config names now.
        ArtifactError: the folder is damaged or is not a graft, or a change gives the tensors other shapes.
        BackboneError: `backbone` is not a `Backbone`, or another model that the graft reads can't be loaded.
        RecipeError: a change does not fit the config.
    """
    manifest = read_manifest(folder)
    difference = manifest.backbone.difference(need_backbone(backbone))
    if difference:
        raise WrongBackboneError(
            f"The graft {folder} was trained on {manifest.backbone.name}, but {backbone.name} was given and "
            f"{difference}: pass the backbone that it was trained on."
        )
    manifest.check_added_tokens(folder, backbone)
    config = manifest.graft_config()
    if changes:
        config = _changed_config(config, changes)
    graft = build_graft(config, backbone)
    manifest.check_format(folder, graft, backbone)
    _check_frozen_models(graft, manifest, folder)
    tensors = dict(read_tensors(folder))  # errors of the file have nothing to do with the changes
    try:
        _load_tensors(graft, tensors)
    except ArtifactError as error:
        if not changes:
            raise
        reason = str(error).rstrip(".")
        raise ArtifactError(
            f"The trained tensors don't fit the config after the changes {', '.join(changes)} ({reason}): leave out "
            "changes of their shapes."
        ) from error
    return graft.eval()


def _changed_config(config: GraftConfig, changes: Sequence[str]) -> GraftConfig:
    def parse(values: dict[str, object]) -> GraftConfig:
        if values.get(PRESET) is not None:
            raise RecipeError(
                f"{JSON_NAME}: {PRESET} gives defaults to a new graft, but the config of a trained graft has a value "
                f"for every key: leave {PRESET} out, and change the keys themselves."
            )
        return graft_config(values, where=JSON_NAME)

    return parse_overridden(parse, config.model_dump(mode="json"), changes, JSON_NAME)


def _check_frozen_models(graft: Graft, manifest: Manifest, folder: str | Path) -> None:
    """Raise `WrongBackboneError` unless the models that a graft reads are those that it was trained with."""
    for name, model in _frozen_models(graft).items():
        record = manifest.frozen_models.get(name)
        if record is None:
            raise WrongBackboneError(
                f"The graft {folder} was trained without a model {name}, but {model.name} was found: remove {name} "
                "from the graft's config."
            )
        difference = record.difference(model)
        if difference:
            raise WrongBackboneError(
                f"The graft {folder} was trained with {record.name} as {name}, but {model.name} was found and "
                f"{difference}: pass the model that it was trained with."
            )


def _load_tensors(graft: Graft, tensors: dict[str, Tensor]) -> None:
    if isinstance(graft, HasTensors):
        graft.load_tensors(_without_rows(graft, tensors))
        return
    check_tensors(graft.state_dict(), tensors)
    graft.load_state_dict(tensors)


def _without_rows(graft: HasTensors, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Load the rows of added tokens, and return the tensors that the graft loads itself.

    Raises:
        ArtifactError: names or shapes of the rows differ.
    """
    assert isinstance(graft, Graft), "the tensors are those of a graft"
    rows = _row_tensors(graft)
    check_tensors(rows, {name: tensor for name, tensor in tensors.items() if name.startswith(_ROWS_PREFIX)})
    if not rows:
        return tensors
    for name, tensor in rows.items():
        tensor.copy_(tensors[name])
    own = graft.tensors()
    return {name: tensor for name, tensor in tensors.items() if name in own or name not in rows}


def load_grafts(folder: str | Path, backbone: Backbone, changes: Sequence[str] = ()) -> dict[str, Graft]:
    """Load the graft in a folder together with those that `graft grow` had attached while it was trained.

    The grafts act together, so `GraftedModel(backbone, load_grafts(folder, backbone))` is the model that was measured.
    The others are read from where `graft grow` wrote them: next to the folder's parent, in STAGE/graft.

    Args:
        folder: the graft's folder.
        backbone: the backbone that all were trained on.
        changes: changes of the config of the graft in `folder`, see `load_graft`.

    Returns:
        Grafts by name, in the order of the stages. The graft in `folder` comes last and is named `graft`.

    Raises:
        ArtifactError: one of them is missing, or can't be loaded. See `load_graft` for its other errors.
    """
    folder = Path(folder)
    grafts: dict[str, Graft] = {}
    for name in read_manifest(folder).trained_after:
        earlier = folder.absolute().parent.parent / name / "graft"
        if not (is_stage_name(name) and folder.is_dir() and (earlier / JSON_NAME).is_file()):
            raise ArtifactError(
                f"The graft {folder} was trained together with {name}, which is expected in {earlier} but was not "
                "found there: copy the folders of all stages next to each other, as graft grow wrote them."
            )
        grafts[name] = load_graft(earlier, backbone)
    grafts["graft"] = load_graft(folder, backbone, changes)
    return grafts


def is_stage_name(name: str) -> bool:
    """Return whether a name can be that of a stage, rather than an arbitrary path from an untrusted file."""
    return name.replace("-", "_").isidentifier()


def graft_tensors(graft: Graft) -> dict[str, Tensor]:
    """Return the tensors of a graft that `save_graft` writes, by name."""
    if isinstance(graft, HasTensors):
        return {**graft.tensors(), **_row_tensors(graft)}
    return dict(graft.state_dict())


def _row_tensors(graft: Graft) -> dict[str, Tensor]:
    """Return the rows of added tokens by their names in a graft's file; none without added tokens."""
    rows = graft.token_rows
    return {} if rows is None else dict(rows.state_dict(prefix=_ROWS_PREFIX))


def _frozen_models(graft: Graft) -> Mapping[str, Backbone]:
    """Return the other frozen models that a graft reads, by name."""
    if isinstance(graft, ReadsModels):
        return graft.frozen_models()
    return {}


def backbone_of(
    folder: str | Path,
    name: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Backbone:
    """Load the backbone that a graft was trained on, with the head and the added tokens that the graft records.

    Args:
        folder: the graft's folder. If it is a model instead, this model is loaded as a causal language model.
        name: the present name or path of the backbone; None uses the recorded one.
        device: device of the backbone; None selects the accelerator, if there is one, else the CPU.
        dtype: dtype of the weights; `auto` keeps that of the checkpoint.
        trust_remote_code: run model code that comes with the checkpoint.

    Raises:
        ArtifactError: the folder is neither a graft nor a model.
        BackboneError: the backbone can't be loaded, or the device can't be used.
        MissingExtraError: the backbone is a GGUF file, and the package gguf is not installed.
    """
    recorded_name = str(folder)
    kind: BackboneKind = "causal-lm"
    family = None
    manifest = None if is_model(folder) else read_manifest(folder)
    if manifest is not None:
        record = manifest.backbone
        recorded_name = record.name
        kind = record.kind
        family = record.family
    try:
        backbone = load_backbone(
            name or recorded_name, kind=kind, dtype=dtype, trust_remote_code=trust_remote_code, family=family
        )
    except BackboneError as error:
        if name is not None or manifest is None:
            raise
        reason = str(error).rstrip(".")
        raise BackboneError(
            f"{reason}; the graft {folder} was trained on that backbone: name its present path (--backbone)."
        ) from error
    backbone.move(device)
    return backbone if manifest is None else manifest.added_to(backbone)


def backbone_name(folder: str | Path, name: str | Path | None = None) -> str:
    """Return the name of the model that `backbone_of` loads.

    Args:
        folder: the folder of a graft or of a model.
        name: the present name or path of the backbone; None uses the recorded one.

    Raises:
        ArtifactError: the folder is neither a graft nor a model.
    """
    if name is not None:
        return str(name)
    return str(folder) if is_model(folder) else read_manifest(folder).backbone.name


def is_model(folder: str | Path) -> bool:
    """Return whether a folder, a repository on the hub or a GGUF file is a model rather than a graft."""
    if names_gguf_file(str(folder)):
        return True
    return holds(folder, "config.json") and not holds(folder, JSON_NAME)


def read_tensors(folder: str | Path, name: str = TENSORS_NAME) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each entry of a safetensors file, read one at a time on the CPU.

    The file is opened when the iteration begins, which is also when errors are raised.

    Args:
        folder: the graft's folder, or OWNER/NAME on the hub.
        name: name of the safetensors file in it.

    Raises:
        ArtifactError: the file is missing or damaged, or the repository can't be downloaded.
    """
    path = fetch_folder(folder, JSON_NAME) / name
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # safetensors' file is not a mapping
                yield key, file.get_tensor(key)
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing, so the folder is incomplete: copy it again, or train again.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} can't be read as a safetensors file ({first_line(error)}): copy it again, or train again."
        ) from None
