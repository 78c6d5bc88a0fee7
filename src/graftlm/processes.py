"""The processes of a run that a launcher started, such as torchrun or `accelerate launch`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import PartialState


def is_launched() -> bool:
    """Return whether a launcher started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Return whether this process is the only one, or the first of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def on_cpu_only() -> bool:
    """Return whether launched processes must work together on the CPU, because there is no accelerator."""
    import torch

    return is_launched() and not torch.accelerator.is_available()


def process_state() -> PartialState:
    """Return Accelerate's state of the processes, which connects them on first use."""
    from accelerate import PartialState

    # Without `cpu`, each process on a machine without accelerators would take itself for the only one.
    return PartialState(cpu=on_cpu_only())
