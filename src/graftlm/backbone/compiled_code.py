"""Compiled code and hooks: torch.compile has to notice where grafts came and went."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

import torch

_VERSIONS = 4096


def guard_hooks() -> None:
    """Let torch.compile check the hooks of modules before it runs code that it compiled for other modules.

    By default it checks no hooks, and runs the code of the bare model for a grafted one of the same class and shapes.
    """
    from torch._dynamo import config  # takes a second to import

    config.skip_nnmodule_hook_guards = False


def forget_compiled() -> None:
    """Drop all compiled code, since hooks have come or gone."""
    if "torch._dynamo" in sys.modules:
        guard_hooks()
        torch.compiler.reset()


def many_versions() -> AbstractContextManager[None]:
    """Let torch.compile keep more versions of one function than by default: of a step for several models and sizes."""
    return torch._dynamo.config.patch(recompile_limit=_VERSIONS, accumulated_recompile_limit=_VERSIONS)
