"""Read the header of a GGUF file: its metadata, and the names and shapes of its tensors."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from graftlm.backbone.patching import replaced_attributes
from graftlm.errors import BackboneError, first_line, shorten
from graftlm.files.model_files import ModelFiles

# The package gguf is an extra, and transformers takes seconds to import, so functions import both.
if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFValueType
    from gguf.gguf_reader import ReaderTensor
    from numpy.typing import NDArray

    FieldParts = tuple[int, list[NDArray], list[int], list[GGUFValueType]]

GgufValue = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]
"""A value of the metadata."""

_LONG = 10_000
"""Arrays with more values, such as a vocabulary, are left out of the metadata."""

_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 8: 0, 10: 8, 11: 8, 12: 8}
"""Bytes of an item by the format's number of its type; 0 for strings, which begin with their length in 8 bytes."""

_PATCHING = threading.RLock()
"""Held while functions of the package gguf are replaced: loads in other threads wait."""


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        metadata: values by key; arrays of more than 10,000 values are missing.
        shapes: shape of each tensor by its name, in torch's order.
        factors: values of the tensors that scale the frequencies of rotary embeddings, by the tensor's name.
    """

    architecture: str
    metadata: Mapping[str, GgufValue]
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, Sequence[float]]

    def value(self, key: str) -> GgufValue | None:
        """Return the value of a key of the architecture, such as `block_count`; None if it is missing."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str) -> int:
        """Return the integer at a key of the architecture.

        Raises:
            BackboneError: the key is missing, or its value is not an integer.
        """
        found = self.value(key)
        if found is None:
            raise BackboneError(
                f"The GGUF file has no {self.architecture}.{key}, but an integer is expected: name the model's "
                "safetensors checkpoint."
            )
        if not isinstance(found, int) or isinstance(found, bool):
            raise BackboneError(
                f"The GGUF file has {shorten(repr(found))} at {self.architecture}.{key}, but an integer is expected: "
                "name the model's safetensors checkpoint."
            )
        return found


def refused_fact(name: str, key: str, value: object) -> BackboneError:
    """Return the error for a fact of a GGUF file that the model can't have.

    Args:
        name: name of the model.
        key: the key or the tensor in the file.
        value: its value or its shape.
    """
    shown = f"{value[:3]!r} and more" if isinstance(value, list) and len(value) > 3 else repr(value)
    return BackboneError(
        f"The GGUF file {name} has {key} = {shown}, which the model of transformers can't express: name the model's "
        "safetensors checkpoint."
    )


def read_header(name: str, files: ModelFiles) -> GgufHeader:
    """Read the header of a GGUF file, which is downloaded first if it is on the hub.

    Args:
        name: name of the model in messages.
        files: where the file is; its `gguf_file` must not be None.

    Raises:
        BackboneError: the file does not exist or is truncated, or contains something else than a whole model.
    """
    path = local_path(name, files)
    status = path.stat()
    try:
        header = _read_once(path, status.st_mtime_ns, status.st_size)
    except BackboneError:
        raise
    except Exception as error:  # The reader raises errors of numpy, struct and its own.
        raise BackboneError(
            f"The GGUF file {name} is truncated or damaged ({first_line(error)}): copy it again, or name another model."
        ) from error
    _check_content(name, header)
    return header


def local_path(name: str, files: ModelFiles) -> Path:
    """Return the real path of a GGUF file. A file on the hub is downloaded to the cache.

    Args:
        name: name of the model in messages.
        files: where the file is; its `gguf_file` must not be None.

    Raises:
        BackboneError: the file does not exist.
    """
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(files.source, str(files.gguf_file))
    except OSError as error:
        raise BackboneError(
            f"The hub has no model {name} ({first_line(error)}): name another, connect to the hub, or name a file."
        ) from error
    return Path(str(path)).resolve()


@lru_cache(maxsize=4)
def _read_once(path: Path, modified: int, size: int) -> GgufHeader:
    """Read a header. Time and size of the file are parts of the cache's key only."""
    with reading_gguf_once():
        import gguf

        reader = gguf.GGUFReader(str(path))
    metadata: dict[str, GgufValue] = {}
    for key, field in reader.fields.items():
        if field.data:
            metadata[key] = cast("GgufValue", field.contents())
    factors = {}
    shapes = {}
    for tensor in reader.tensors:
        shapes[tensor.name] = tuple(int(length) for length in reversed(tensor.shape))
        if tensor.name.startswith("rope_"):
            factors[tensor.name] = [float(value) for value in tensor.data]
    return GgufHeader(
        architecture=str(metadata.get("general.architecture", "")),
        metadata=metadata,
        shapes=shapes,
        factors=factors,
    )


@contextmanager
def reading_gguf_once() -> Iterator[None]:
    """Read the header of a GGUF file once while the block runs, and leave out what takes long.

    transformers reads it several times, takes a vocabulary of 262,144 tokens apart token by token each time, and
    builds the map of tensor names once per module, which takes a minute. The block needs the package gguf; blocks of
    other threads wait for its end.
    """
    import gguf

    # The originals are looked up under the lock, when no other load has replaced them.
    with _PATCHING:
        if not isinstance(gguf.GGUFReader, type):  # The block around this one has replaced it.
            yield
            return
        reader_class = _reader_class(gguf.GGUFReader)
        readers: dict[Path, GGUFReader] = {}

        def read(path: str) -> GGUFReader:
            real = Path(path).resolve()
            if real not in readers:
                readers[real] = reader_class(path)
                readers[real].tensors = [_flat_gate(tensor) for tensor in readers[real].tensors]
            return readers[real]

        cached_names = cache(gguf.get_tensor_name_map)
        with replaced_attributes(gguf, GGUFReader=read, get_tensor_name_map=cached_names):
            yield


def _flat_gate(tensor: ReaderTensor) -> ReaderTensor:
    """Return the gate of shared experts as a vector, as transformers expects it; other tensors are unchanged."""
    if "ffn_gate_inp_shexp" not in tensor.name:
        return tensor
    return tensor._replace(data=tensor.data.reshape(-1))


def _reader_class(base: type[GGUFReader]) -> Callable[[str], GGUFReader]:
    """Return a class of readers that skip long arrays of the metadata, which have no values then."""
    from gguf import GGUFValueType

    class Reader(base):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> FieldParts:
            if raw_type == GGUFValueType.ARRAY and self.byte_order == "I":
                item_type, count = struct.unpack_from("<IQ", self.data.data, orig_offs)
                if count > _LONG and item_type in _ITEM_BYTES:
                    size = _array_bytes(self.data.data, orig_offs + 12, item_type, count)
                    return 12 + size, [], [], [GGUFValueType.ARRAY, GGUFValueType(item_type)]
            return super()._get_field_parts(orig_offs, raw_type)

    return Reader


def _array_bytes(data: memoryview, start: int, item_type: int, count: int) -> int:
    """Return the number of bytes of an array's items."""
    width = _ITEM_BYTES[item_type]
    if width:
        return width * count
    position = start
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, position)
        position += 8 + length
    return position - start


def _check_content(name: str, header: GgufHeader) -> None:
    """Raise `BackboneError` if a file contains no model, or a part of one."""
    content = header.metadata.get("general.type", "model")
    parts = header.metadata.get("split.count", 0)
    if content != "model":
        raise BackboneError(
            f"The GGUF file {name} contains a part of the type {content!r}, but a model is expected: name the file of "
            "the model that it belongs to."
        )
    if isinstance(parts, int) and parts > 1:
        raise BackboneError(
            f"The GGUF file {name} is one of {parts} parts of a model: join them with llama-gguf-split --merge, and "
            "name the joined file."
        )
