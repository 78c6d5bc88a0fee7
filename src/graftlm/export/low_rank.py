"""Updates of low rank: weighted, joined, and written as an adapter of PEFT.

The update of a module with the weight W is B A x, with A (rank, inputs) and B (outputs, rank).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from graftlm.files.adapter_config import ADAPTER_TENSORS
from graftlm.grafts import LowRankUpdate

Updates = Mapping[str, LowRankUpdate]
"""The update of each module that changes, by the path of the module."""


def weighted(updates: Updates, weight: float) -> dict[str, LowRankUpdate]:
    """Return the updates, multiplied by a weight."""
    return {path: LowRankUpdate(update.a, weight * update.b) for path, update in updates.items()}


def joined(parts: Sequence[Updates]) -> dict[str, LowRankUpdate]:
    """Return the sum of updates. The rank of a module's update is the sum of the ranks."""
    by_path: dict[str, list[LowRankUpdate]] = {}
    for part in parts:
        for path, update in part.items():
            by_path.setdefault(path, []).append(update)
    result = {}
    for path, updates in by_path.items():
        result[path] = LowRankUpdate(
            a=torch.cat([update.a for update in updates]),
            b=torch.cat([update.b for update in updates], dim=1),
        )
    return result


def largest_rank(updates: Updates) -> int:
    """Return the largest rank of a module's update."""
    return max(len(update.a) for update in updates.values())


def write_peft(updates: Updates, folder: Path, base: str) -> None:
    """Write updates as an adapter of PEFT, with scales of 1.

    Args:
        updates: updates of at least one module.
        folder: a new folder.
        base: name of the model to which the adapter is added.

    Raises:
        OSError: the folder can't be written.
    """
    tensors: dict[str, Tensor] = {}
    for path, update in updates.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = _plain(update.a)
        tensors[f"base_model.model.{path}.lora_B.weight"] = _plain(update.b)
    folder.mkdir()
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    _config(updates, base).save_pretrained(str(folder))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _config(updates: Updates, base: str) -> LoraConfig:
    """Return PEFT's config, in which alpha is the rank of each module."""
    largest = largest_rank(updates)
    others = {re.escape(path): len(update.a) for path, update in updates.items() if len(update.a) != largest}
    return LoraConfig(
        r=largest,
        lora_alpha=largest,
        target_modules=sorted(updates),
        rank_pattern=others,
        alpha_pattern=dict(others),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
