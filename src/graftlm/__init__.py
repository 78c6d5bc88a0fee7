"""Teach a frozen language model something new, and measure what it forgot.

These are the names that most programs need. Each is imported when it is first used, so `import graftlm` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graftlm.version import __version__

if TYPE_CHECKING:
    from graftlm.artifact import load_graft, load_grafts, save_graft
    from graftlm.backbone import load_backbone, register_family
    from graftlm.errors import GraftError
    from graftlm.evaluation.audit import audit
    from graftlm.export import export_graft
    from graftlm.grafts import Graft, GraftedModel, build_graft, graft_config, register_graft
    from graftlm.runs.recipe import compare_recipe, grow_recipe, load_recipe, run_recipe

_MODULES = {
    "Graft": "graftlm.grafts",
    "GraftError": "graftlm.errors",
    "GraftedModel": "graftlm.grafts",
    "audit": "graftlm.evaluation.audit",
    "build_graft": "graftlm.grafts",
    "compare_recipe": "graftlm.runs.recipe",
    "export_graft": "graftlm.export",
    "graft_config": "graftlm.grafts",
    "grow_recipe": "graftlm.runs.recipe",
    "load_backbone": "graftlm.backbone",
    "load_graft": "graftlm.artifact",
    "load_grafts": "graftlm.artifact",
    "load_recipe": "graftlm.runs.recipe",
    "register_family": "graftlm.backbone",
    "register_graft": "graftlm.grafts",
    "run_recipe": "graftlm.runs.recipe",
    "save_graft": "graftlm.artifact",
}

__all__ = [
    "Graft",
    "GraftError",
    "GraftedModel",
    "__version__",
    "audit",
    "build_graft",
    "compare_recipe",
    "export_graft",
    "graft_config",
    "grow_recipe",
    "load_backbone",
    "load_graft",
    "load_grafts",
    "load_recipe",
    "register_family",
    "register_graft",
    "run_recipe",
    "save_graft",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
