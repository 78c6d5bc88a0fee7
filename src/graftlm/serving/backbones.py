"""The backbones of a server: their names in requests, their kinds, and their loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from graftlm.backbone import Backbone, BackboneKind, default_device, load_backbone
from graftlm.backbone.formats import quantize_weights
from graftlm.backbone.load import inspect_model, served_kind
from graftlm.backbone.memory import check_memory
from graftlm.errors import GraftError
from graftlm.store.manifest import BackboneRecord, read_manifest
from graftlm.store.names import GRAFT_NAME, graft_in


def load_backbones(
    models: Mapping[str, str],
    given: Mapping[str, str | Path],
    folder: Path | None = None,
    *,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    quantize: str | None = None,
) -> dict[str, Backbone]:
    """Load the backbones of a server.

    A model is loaded as an encoder if it is one, or if the grafts of its architecture were trained on an encoder.
    Grafts with a name have priority over those of the folder. Where the grafts differ, or there are none, the model is
    loaded as a decoder.

    Args:
        models: each model's name on the hub or path, by its name in requests.
        given: folders of grafts by name.
        folder: a folder with further grafts' folders.
        device: device of all models; None selects the fastest available one.
        dtype: precision of the weights, as for `load_backbone`.
        trust_remote_code: run code of the models' repositories, as for `load_backbone`.
        quantize: int8 or int4; None keeps the precision.

    Returns:
        The backbones by the names of `models`.

    Raises:
        ArtifactError: one of the folders in `given` is not a graft.
        BackboneError: a model can't be loaded or quantized, or the weights of all do not fit into the memory.
        MissingExtraError: a model is a GGUF file, and the package gguf is not installed.
    """
    target = device or default_device()
    named_records = [read_manifest(path).backbone for path in given.values()]
    folder_records = _records_of(folder)
    several = len(models) > 1
    kinds: dict[str, BackboneKind] = {}
    sizes: dict[str, int] = {}
    for name, model in models.items():
        kinds[name], sizes[name] = _kind_and_size(
            model,
            named_records,
            folder_records,
            several=several,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
        )
    check_memory(sizes, target, quantized=quantize is not None)
    backbones = {}
    for name, model in models.items():
        backbone = load_backbone(
            model,
            kind=kinds[name],
            dtype=dtype,
            device=target,
            trust_remote_code=trust_remote_code,
        )
        if quantize is not None:
            quantize_weights(backbone.bare_model, quantize, model)
        backbones[name] = backbone
    return backbones


def _kind_and_size(
    model: str,
    named_records: Iterable[BackboneRecord],
    folder_records: Iterable[BackboneRecord],
    *,
    several: bool,
    dtype: str,
    trust_remote_code: bool,
) -> tuple[BackboneKind, int]:
    """Return the kind of a model and the size of its weights in bytes, which is 0 unless there are several models."""
    size = 0
    architecture = None
    if several:
        size, architecture = inspect_model(model, "causal-lm", dtype=dtype, trust_remote_code=trust_remote_code)
    kind = served_kind(model, trust_remote_code=trust_remote_code)
    if kind != "encoder":
        kind_of_grafts = _common_kind(named_records, architecture) or _common_kind(folder_records, architecture)
        kind = kind_of_grafts or kind
    if kind == "encoder" and several:
        size, _ = inspect_model(model, "encoder", dtype=dtype, trust_remote_code=trust_remote_code)
    return kind, size


def _records_of(folder: Path | None) -> list[BackboneRecord]:
    """Return the backbones of the grafts in a folder."""
    records = []
    if folder is not None and folder.is_dir():
        for path in folder.iterdir():
            if not path.name.startswith("."):
                with suppress(GraftError):  # the store reports this error
                    records.append(read_manifest(graft_in(path)).backbone)
    return records


def _common_kind(records: Iterable[BackboneRecord], architecture: str | None) -> BackboneKind | None:
    """Return the common kind of the backbones with an architecture, or of all backbones; None if the kinds differ."""
    kinds = set()
    for record in records:
        if architecture is None or record.fingerprint.get("architecture") == architecture:
            kinds.add(record.kind)
    return kinds.pop() if len(kinds) == 1 else None


def name_models(pairs: Iterable[tuple[str | None, str]]) -> dict[str, str]:
    """Return the models' names on the hub or paths, by their names in requests.

    Args:
        pairs: a name in requests, or None for that of `served_name`, and a model's name on the hub or path.

    Raises:
        GraftError: two models have the same name, or a name can't be used.
    """
    models: dict[str, str] = {}
    for given_name, model in pairs:
        name = checked_name(given_name or served_name(model))
        if name in models:
            raise GraftError(
                f"Two backbones have the name {name}: give them different names with --backbone NAME=MODEL."
            )
        models[name] = model
    return models


def served_name(name: str) -> str:
    """Return the default name of a model in requests: the last part of the path of a folder, else the name itself."""
    path = Path(name)
    return path.absolute().name if path.is_dir() else name


def checked_name(name: str) -> str:
    """Return a name of a backbone unchanged if requests can use it.

    Raises:
        GraftError: a part of the name between slashes has other characters than letters, digits, dots, dashes and
            underscores, does not begin with a letter or digit, or has more than 64 characters.
    """
    if not all(GRAFT_NAME.fullmatch(part) for part in name.split("/")):
        raise GraftError(
            f"The name {name[:200]!r} of the backbone is not usable in requests: choose a name of at most 64 letters, "
            "digits, dots, dashes and underscores (--name, or --backbone NAME=MODEL)."
        )
    return name
