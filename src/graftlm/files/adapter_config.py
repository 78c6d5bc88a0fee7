"""Read the config of a PEFT adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from graftlm.errors import ArtifactError, first_line, shorten

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"

_ENDS = ("embed_tokens", "embed_in", "embed_out", "lm_head", "tok_embeddings", "word_embeddings", "wte")
"""Names of token embeddings and output heads."""


def read_adapter_config(folder: Path, what: str = "PEFT adapter") -> dict[str, Any]:
    """Read `adapter_config.json` of a PEFT adapter whose weights are in safetensors.

    Args:
        folder: the adapter's folder.
        what: name of the adapter in messages, without an article.

    Raises:
        ArtifactError: `adapter_config.json` is missing, can't be read, is not a JSON object or has a number that is not
            finite, or the folder has no weights in safetensors.
    """
    values = _read_json(folder, what)
    for key, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ArtifactError(
                f"{folder / ADAPTER_CONFIG} has {shorten(str(value))} as {key}, but finite numbers are expected: set "
                f"{key} to one, or copy the {what} again."
            ) from None
    _check_weights(folder, what)
    return values


def _read_json(folder: Path, what: str) -> dict[str, object]:
    path = folder / ADAPTER_CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        nested = next(folder.glob(f"*/{ADAPTER_CONFIG}"), None)  # PEFT saves named adapters in subfolders.
        remedy = f"name {nested.parent}" if nested else "name a folder that PEFT's save_pretrained wrote"
        raise ArtifactError(f"The {what} has no {ADAPTER_CONFIG} in {folder}: {remedy}.") from None
    except OSError as error:
        raise ArtifactError(f"{path} can't be read ({first_line(error)}): make it readable.") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not valid JSON ({first_line(error)}): copy the {what} again.") from None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} contains no JSON object, but one is expected: copy the {what} again.")
    return values


def _check_weights(folder: Path, what: str) -> None:
    """Raise `ArtifactError` unless the adapter's weights are in safetensors."""
    if (folder / ADAPTER_TENSORS).exists():
        return
    if (folder / "adapter_model.bin").exists():
        raise ArtifactError(
            f"The {what} in {folder} has only a pickled adapter_model.bin, which is never read: save it again with "
            "safe_serialization=True."
        )
    raise ArtifactError(f"The {what} in {folder} has no {ADAPTER_TENSORS}: copy it again.")


def saved_ends(folder: Path) -> dict[str, int]:
    """Return the whole embeddings and heads that an adapter contains.

    PEFT saves them if the vocabulary was resized before training, or if they were trained as whole modules.

    Args:
        folder: the adapter's folder.

    Returns:
        The number of rows by the path of the module; empty if the file of tensors can't be read.
    """
    pattern = re.compile(
        rf"base_model\.model\.((?:.*\.)?(?:{'|'.join(_ENDS)}))(?:\.modules_to_save|\.base_layer)?\.weight"
    )
    ends = {}
    try:
        with safe_open(folder / ADAPTER_TENSORS, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # safetensors' file is not a mapping
                match = pattern.fullmatch(key)
                if match:
                    ends[match[1]] = int(file.get_slice(key).get_shape()[0])
    except (SafetensorError, OSError):
        return {}
    return ends


def preparation(ends: Mapping[str, int]) -> list[str]:
    """Return Python statements that prepare `model`, a model of transformers, for an adapter.

    Args:
        ends: the embeddings and heads that the adapter contains, see `saved_ends`.
    """
    if not ends:
        return []
    return [f"model.resize_token_embeddings({max(ends.values())})"]
