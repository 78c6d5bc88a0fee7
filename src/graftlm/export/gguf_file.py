"""Export a backbone with a graft as one GGUF file, for llama.cpp and the programs that use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import ArtifactError, MissingExtraError, first_line
from graftlm.export.added_rows import write_rows
from graftlm.export.folder import check_weights
from graftlm.export.gguf_facts import Facts, FileForm, check_facts, facts_of, form_of
from graftlm.export.gguf_source import Value
from graftlm.export.gguf_tokens import check_tokenizer, token_facts
from graftlm.export.gguf_weights import (
    WeightType,
    default_type,
    file_tensors,
    rounded_copy,
    shapes_of,
    stored,
    stored_type,
)
from graftlm.export.verifying import verify_merged, verify_same
from graftlm.files.writing import staged_file
from graftlm.grafts import Exportable, Graft

# The package gguf is an extra, so functions import it.
if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedModel

SUFFIX = ".gguf"
_FILE_TYPES: dict[WeightType, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""llama.cpp's numbers of the types of most weights."""
_QUANTIZATION_VERSION = 2


def export_gguf(graft: Graft, backbone: Backbone, file: str | Path, *, weight_type: WeightType | None = None) -> Path:
    """Write the backbone with a graft in its weights as one GGUF file, with its tokenizer and chat template.

    The logits of the merged model for a short text are compared with those of the grafted model. The written file is
    loaded again, and compared with the merged model, whose weights are rounded as in the file.

    Args:
        graft: the graft, detached; its kind must be `Exportable`.
        backbone: the backbone that it was trained on; it is left unchanged.
        file: a new file, whose name ends in `.gguf`.
        weight_type: type of the matrices: f32, f16, bf16 or q8_0; None keeps the dtype of the merged model.

    Returns:
        The file.

    Raises:
        ArtifactError: the graft can't be merged into the backbone's weights, a GGUF file can't express the model or its
            tokenizer, the backbone is quantized or has a PEFT adapter, the written file computes something else, or the
            file exists or can't be written.
        MissingExtraError: the package gguf is not installed.
        TapConflictError: the backbone is part of a `GraftedModel` that is not detached.
        WrongBackboneError: the graft was built for another backbone.
    """
    backbone.check_graft(graft.config.kind, graft._fingerprint)
    if not isinstance(graft, Exportable):
        raise ArtifactError(
            f"A graft of the kind {graft.config.kind} can't be merged into the backbone's weights, and a GGUF file has "
            "nothing else: export it as a folder if graft export can (--to FOLDER), or serve it with graft serve."
        )
    file = Path(file)
    _check_file(file, weight_type)
    form_of(backbone.config)
    check_weights(backbone)
    tokens = token_facts(backbone)
    merged = graft.merged(backbone)
    if graft.token_rows is not None:
        write_rows(merged, graft.token_rows)
    verify_merged(merged, graft, backbone)
    return _write(merged, backbone, file, tokens, weight_type)


def export_model_gguf(backbone: Backbone, file: str | Path, *, weight_type: WeightType | None = None) -> Path:
    """Write a model without a graft as one GGUF file, see `export_gguf`.

    Args:
        backbone: the model, with its tokenizer; it is left unchanged.
        file: a new file, whose name ends in `.gguf`.
        weight_type: type of the matrices; None keeps the dtype of the model.

    Returns:
        The file.

    Raises:
        ArtifactError: a GGUF file can't express the model or its tokenizer, the model is quantized, its tokenizer has
            added tokens, the written file computes something else, or the file exists or can't be written.
        MissingExtraError: the package gguf is not installed.
    """
    file = Path(file)
    _check_file(file, weight_type)
    if backbone.extended is not None:
        raise ArtifactError(
            f"The tokenizer has {backbone.extended.count:,} added tokens, whose embeddings belong to a graft, but none "
            "is exported: use export_gguf with the graft, or load the backbone without add_tokens."
        )
    form_of(backbone.config)
    check_weights(backbone)
    return _write(backbone.bare_model, backbone, file, token_facts(backbone), weight_type)


def _check_file(file: Path, weight_type: WeightType | None) -> None:
    """Raise an error if a file can't be written, before the backbone is merged."""
    if weight_type is not None and weight_type not in _FILE_TYPES:
        raise ArtifactError(
            f"weight_type is {weight_type!r}, but one of {', '.join(_FILE_TYPES)} is expected: choose one of them."
        )
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise MissingExtraError("gguf", "gguf", "Writing a GGUF file") from None
    if file.suffix.lower() != SUFFIX:
        raise ArtifactError(f"The name {file} has another ending than .gguf: name a file such as {file}.gguf.")
    if file.exists():
        raise ArtifactError(f"{file} exists, so it is left unchanged: name a new file.")


def _write(
    model: PreTrainedModel,
    backbone: Backbone,
    file: Path,
    tokens: Mapping[str, Value],
    weight_type: WeightType | None,
) -> Path:
    """Write and check the file of a model, which is left unchanged."""
    form = form_of(model.config)
    kind = weight_type or default_type(model.dtype)
    facts = facts_of(model.config, form)
    check_facts(model.config, form, facts, shapes_of(model, form))
    try:
        with staged_file(file) as draft:
            _fill(draft, model, form, {**_general_facts(backbone, kind), **facts}, tokens, kind)
            _verify(draft, model, backbone, form, kind)
    except OSError as error:
        raise ArtifactError(
            f"The model could not be written to {file} ({first_line(error)}): free some space or name another file."
        ) from error
    return file


def _general_facts(backbone: Backbone, weight_type: WeightType) -> Facts:
    return {
        "general.type": "model",
        "general.name": Path(backbone.name).name,
        "general.file_type": _FILE_TYPES[weight_type],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


def _fill(
    file: Path,
    model: PreTrainedModel,
    form: FileForm,
    facts: Facts,
    tokens: Mapping[str, Value],
    weight_type: WeightType,
) -> None:
    """Write a file. One tensor at a time is in memory."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(file), form.architecture)
    for key, value in facts.items():
        _add(writer, key, value)
    for key, token_value in tokens.items():
        token_value.add_to(writer, key)
    for name, shape in shapes_of(model, form).items():
        kind = stored_type(name, shape, weight_type)
        size = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in file_tensors(model, form):
            kind = stored_type(name, tuple(tensor.shape), weight_type)
            writer.write_tensor_data(stored(tensor, kind))
    finally:
        writer.close()


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, str(value))


@torch.no_grad()
def _verify(file: Path, model: PreTrainedModel, backbone: Backbone, form: FileForm, weight_type: WeightType) -> None:
    """Raise `ArtifactError` if a file's model or tokenizer is another one than that which was written."""
    loaded = load_backbone(file, dtype="float32", device=backbone.device)
    check_tokenizer(loaded.need_tokenizer(), backbone)
    verify_same(loaded.model, rounded_copy(model, form, weight_type), backbone)
