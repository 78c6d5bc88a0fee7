"""The registry: the kind of a graft -> its class, which is imported when it is first needed."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from graftlm.backbone import Backbone, need_backbone
from graftlm.errors import GraftError, RecipeError, did_you_mean
from graftlm.grafts.base import Graft, GraftConfig

_GROUP = "graftlm.grafts"  # entry points of installed packages: kind = "module:Class"
REGISTRY: dict[str, str | type[Graft]] = {
    "composition": "graftlm.grafts.composition:Composition",
    "neutral-residues": "graftlm.grafts.neutral_residues:NeutralResidues",
    "adapter": "graftlm.grafts.neutral_residues:VanillaAdapter",
    "conditional-tasks": "graftlm.grafts.conditional_tasks:ConditionalTasks",
    "token-routing": "graftlm.grafts.token_routing:TokenRouting",
    "memory": "graftlm.grafts.memory:WindowedMemory",
    "lora": "graftlm.grafts.baselines:LoRABaseline",
    "finetune": "graftlm.grafts.baselines:FineTuning",
    "peft": "graftlm.grafts.baselines:PeftGraft",
    "llama-pro": "graftlm.grafts.baselines:LlamaPro",
}


def register_graft(kind: str, graft: str | type[Graft]) -> None:
    """Make a method of your own known to recipes, artefacts and the command line of this process.

    Args:
        kind: the name in recipes; `Config.kind` of the class has it as its one value.
        graft: the class, or `"module:Class"`, which is imported when it is first needed.

    Raises GraftError if another class has the kind, or `graft` is no class of a graft with a config of this kind.
    """
    if kind in REGISTRY and _path(REGISTRY[kind]) != _path(graft):
        raise GraftError(f"The kind {kind!r} belongs to {_path(REGISTRY[kind])}: register your graft by another name.")
    if isinstance(graft, type):
        _check_class(kind, graft)
    elif not all(graft.partition(":")):
        raise GraftError(f"{graft!r} is not of the form module:Class, such as my_package.my_graft:MyGraft: correct it.")
    REGISTRY[kind] = graft


def _path(graft: str | type[Graft]) -> str:
    return graft if isinstance(graft, str) else f"{graft.__module__}:{graft.__qualname__}"


def _check_class(kind: str, graft: Any) -> None:
    if not (isinstance(graft, type) and issubclass(graft, Graft) and hasattr(graft, "Config")):
        raise GraftError(f"{graft!r} is registered as {kind!r}, but is no subclass of Graft with a Config: give one.")
    default = graft.Config.model_fields["kind"].default
    if default != kind:
        raise GraftError(
            f"The config of {graft.__name__} has the kind {default!r}, but is registered as {kind!r}: write "
            f'`kind: Literal["{kind}"] = "{kind}"` in {graft.Config.__name__}.'
        )


def kinds() -> list[str]:
    """The kinds of grafts, as recipes name them."""
    return list(REGISTRY)


def graft_class(kind: str) -> type[Graft]:
    """The class of a kind, imported now.

    Raises RecipeError if there is no such kind, and GraftError if the registered name is not that of a graft's class.
    """
    graft = REGISTRY.get(kind) or next((p.value for p in entry_points(group=_GROUP, name=kind)), None)
    if graft is None:
        raise RecipeError(
            f"There is no graft of the kind {kind!r}{did_you_mean(kind, REGISTRY)}. One of your own is known once its "
            f"module has called register_graft, or by an entry point of the group {_GROUP} in its package."
        )
    if isinstance(graft, str):
        module, _, name = graft.partition(":")
        try:
            graft = getattr(import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise GraftError(
                f"The graft {kind} can't be imported from {graft} ({error}): install or correct it."
            ) from error
        _check_class(kind, graft)
    return graft


def graft_config(values: dict[str, Any], where: str = "graft") -> GraftConfig:
    """The config of a recipe's `graft` section; RecipeError if the kind is missing or unknown, or a value is wrong."""
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise RecipeError(f"{where}: the key kind is missing or not a word; one of {', '.join(REGISTRY)} is expected.")
    return graft_class(kind).Config.parse(values, where=where)


def default_config(kind: str) -> GraftConfig | None:
    """The config of a kind with default values; None for a kind that has required values."""
    config = graft_class(kind).Config
    try:
        return None if config.needs_tasks else config()  # type: ignore[call-arg]  # methods' configs default `kind`
    except RecipeError:
        return None


def build_graft(config: GraftConfig, backbone: Backbone) -> Graft:
    """A fresh graft for a backbone; its random values come from torch's generator."""
    if not isinstance(config, GraftConfig):
        raise GraftError(f"A graft's config has the type {type(config).__name__}: give graft_config({{'kind': ...}}).")
    graft = config.graft_class(config, need_backbone(backbone))
    graft._fingerprint = backbone.fingerprint
    return graft
