"""The registry of grafts: a class for each kind, which is imported when it is first needed."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from graftlm.backbone import Backbone, need_backbone
from graftlm.errors import GraftError, RecipeError, did_you_mean
from graftlm.grafts.base import Graft, GraftConfig

# The group of the entry points by which installed packages add grafts: kind = "module:Class".
_GROUP = "graftlm.grafts"
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
    """Add a method to the recipes, artifacts and command line of this process.

    Args:
        kind: the name in recipes, which is the only value of `Config.kind` of the class.
        graft: the class, or `"module:Class"`, which is imported when it is first needed.

    Raises:
        GraftError: another class has the kind, or `graft` is neither the class of a graft with a config of this kind
            nor of the form `"module:Class"`. A class given in this form is checked when it is imported.
    """
    if kind in REGISTRY and _path(REGISTRY[kind]) != _path(graft):
        raise GraftError(
            f"The kind {kind!r} already belongs to {_path(REGISTRY[kind])}: register your graft under another name."
        )
    if isinstance(graft, type):
        _check_class(kind, graft)
    elif not all(graft.partition(":")):
        raise GraftError(
            f"The graft class is given as {graft!r}, but the form 'module:Class' is expected, such as "
            "'my_package.my_graft:MyGraft'."
        )
    REGISTRY[kind] = graft


def _path(graft: str | type[Graft]) -> str:
    if isinstance(graft, str):
        return graft
    return f"{graft.__module__}:{graft.__qualname__}"


def _check_class(kind: str, graft: object) -> type[Graft]:
    """Return `graft`; raise GraftError unless it is the class of a graft with a config of this kind."""
    if not (isinstance(graft, type) and issubclass(graft, Graft) and hasattr(graft, "Config")):
        raise GraftError(
            f"{graft!r} is registered as {kind!r}, but a subclass of Graft with a Config is expected: register such a "
            "class."
        )
    field = graft.Config.model_fields["kind"]
    if field.default != kind:
        found = "no default kind" if field.is_required() else f"the kind {field.default!r}"
        raise GraftError(
            f"{graft.__name__} is registered as {kind!r}, but its config has {found}: write "
            f'`kind: Literal["{kind}"] = "{kind}"` in {graft.Config.__name__}.'
        )
    return graft


def kinds() -> list[str]:
    """Return the kinds of grafts, which are their names in recipes."""
    return list(REGISTRY)


def graft_class(kind: str) -> type[Graft]:
    """Return the class of a kind, which is imported if necessary.

    Args:
        kind: a registered kind, or the name of an entry point of the group `graftlm.grafts` in an installed package.

    Raises:
        RecipeError: there is no such kind.
        GraftError: the registered class can't be imported, or is not the class of a graft with a config of this kind.
    """
    graft = REGISTRY.get(kind) or _installed(kind)
    if graft is None:
        raise RecipeError(
            f"There is no graft of the kind {kind!r}{did_you_mean(kind, REGISTRY)}. To add one, call register_graft in "
            f"its module, or declare an entry point of the group {_GROUP} in its package."
        )
    if isinstance(graft, str):
        return _import(kind, graft)
    return graft


def _installed(kind: str) -> str | None:
    """Return the path of the class that an installed package declares for a kind."""
    for entry_point in entry_points(group=_GROUP, name=kind):
        return entry_point.value
    return None


def _import(kind: str, path: str) -> type[Graft]:
    """Import the class of a kind from "module:Class", and check it."""
    module, _, name = path.partition(":")
    try:
        graft = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise GraftError(
            f"The graft {kind} is registered as {path}, which can't be imported ({error}): install its package, or "
            "register the existing module and class."
        ) from error
    return _check_class(kind, graft)


def graft_config(values: dict[str, object], where: str = "graft") -> GraftConfig:
    """Parse a recipe's `graft` section.

    Args:
        values: the section.
        where: the name of the section; error messages begin with it.

    Raises:
        RecipeError: `values` is not a dict, the kind is missing or unknown, or a value is invalid.
        GraftError: the registered class of the kind can't be imported.
    """
    if not isinstance(values, dict):
        raise RecipeError(
            f"{where} is of type {type(values).__name__}, but a mapping with the key kind is expected: write kind and "
            f"the other keys below {where}."
        )
    kind = values.get("kind")
    if not isinstance(kind, str):
        found = repr(kind) if "kind" in values else "missing"
        raise RecipeError(f"{where}: the key kind is {found}: set it to one of {', '.join(REGISTRY)}.")
    return graft_class(kind).Config.parse(values, where=where)


def default_config(kind: str) -> GraftConfig | None:
    """Return the config of a kind with default values, or None if the kind needs values or labeled tasks.

    Args:
        kind: the kind of the graft.

    Raises:
        RecipeError: there is no such kind.
        GraftError: the registered class of the kind can't be imported.
    """
    config = graft_class(kind).Config
    if config.needs_tasks:
        return None
    try:
        return config()  # type: ignore[call-arg]  # the configs of methods have a default for `kind`
    except RecipeError:
        return None


def build_graft(config: GraftConfig, backbone: Backbone) -> Graft:
    """Build an untrained graft, which is not yet attached. Random values come from torch's default generator.

    Args:
        config: the graft's config.
        backbone: the backbone to build it for, which does not change.

    Raises:
        GraftError: `config` is not a `GraftConfig`, the constructor of the graft raised one, for example since the
            config does not fit the backbone, or the backbone has added tokens that the graft does not accept.
        BackboneError: `backbone` is not a `Backbone`.
    """
    if not isinstance(config, GraftConfig):
        raise GraftError(
            f"The graft's config is of type {type(config).__name__}, but a GraftConfig is expected: pass "
            "graft_config({'kind': ...})."
        )
    graft = new_graft(config, need_backbone(backbone))
    graft._fingerprint = backbone.fingerprint
    return graft


def new_graft(config: GraftConfig, backbone: Backbone) -> Graft:
    """Build an untrained graft as `build_graft` does, without reading the backbone's weights for a fingerprint.

    Args:
        config: the graft's config.
        backbone: the backbone to build it for. If it has added tokens, the graft has their rows.

    Raises:
        GraftError: the constructor of the graft raised one, or the graft does not accept added tokens.
    """
    graft = config.graft_class(config, backbone)
    graft.add_token_rows(backbone)
    return graft
