"""Teach a frozen language model something new, and measure what it forgot.

These are the names that most programs need. Each is imported when it is first used, so `import graftlm` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graftlm.version import __version__

if TYPE_CHECKING:
    from graftlm.backbone import load_backbone, register_family
    from graftlm.errors import GraftError
    from graftlm.evaluation.audit import audit
    from graftlm.export import export_graft
    from graftlm.grafted.model import GraftedModel
    from graftlm.grafts import Graft, build_graft, graft_config, register_graft
    from graftlm.runs.recipe import compare_recipe, grow_recipe, load_recipe, run_recipe
    from graftlm.store.artifact import backbone_of, load_graft, load_grafts, save_graft

_NAMES = {
    "graftlm.store.artifact": ("backbone_of", "load_graft", "load_grafts", "save_graft"),
    "graftlm.backbone": ("load_backbone", "register_family"),
    "graftlm.errors": ("GraftError",),
    "graftlm.evaluation.audit": ("audit",),
    "graftlm.export": ("export_graft",),
    "graftlm.grafted.model": ("GraftedModel",),
    "graftlm.grafts": ("Graft", "build_graft", "graft_config", "register_graft"),
    "graftlm.runs.recipe": ("compare_recipe", "grow_recipe", "load_recipe", "run_recipe"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]  # it reads the imports above


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
