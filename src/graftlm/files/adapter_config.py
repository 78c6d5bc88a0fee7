"""Read the config of a PEFT adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graftlm.errors import ArtifactError

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"  # files of a PEFT adapter


def read_adapter_config(folder: Path, what: str = "PEFT adapter") -> dict[str, Any]:
    """`adapter_config.json` of a PEFT adapter whose weights are in safetensors; `what` names it in messages.

    Raises ArtifactError if a file is missing or broken, or the weights are pickled.
    """
    path = folder / ADAPTER_CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        inner = next(folder.glob(f"*/{ADAPTER_CONFIG}"), None)  # an adapter's own name is a folder
        remedy = f"name {inner.parent}" if inner else "name a folder that PEFT's save_pretrained wrote"
        raise ArtifactError(f"The {what} has no {ADAPTER_CONFIG} in {folder}: {remedy}.") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path} is not a readable JSON object, so the {what} is damaged: copy it again.")
    for key, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            why = f"{path} has {value} as {key}, but finite numbers are expected: correct it, or copy the {what} again."
            raise ArtifactError(why) from None
    if not (folder / ADAPTER_TENSORS).exists():
        pickled = (folder / "adapter_model.bin").exists()
        content = "only a pickled adapter_model.bin, which is never read" if pickled else f"no {ADAPTER_TENSORS}"
        remedy = "save it again with safe_serialization=True" if pickled else "copy it again"
        raise ArtifactError(f"The {what} in {folder} has {content}: {remedy}.")
    return values
