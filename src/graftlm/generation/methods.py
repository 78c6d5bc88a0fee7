"""Describe the registered kinds of grafts: `graft methods`."""

from __future__ import annotations

import inspect

from pydantic import JsonValue

from graftlm.config import Config
from graftlm.grafts import Graft, graft_class, kinds
from graftlm.grafts.presets import PRESET


class Method(Config):
    """A registered kind of graft.

    Args:
        kind: the kind, as in recipes.
        label: the method's name in tables.
        summary: the first line of the docstring of its class.
        config: default values of its config by key, without `kind` and `preset`; None for a key that has no default or
            defaults to None.
        presets: the names of its presets.
    """

    kind: str
    label: str
    summary: str
    config: dict[str, JsonValue]
    presets: list[str] = []


def methods() -> list[Method]:
    """Describe every registered kind of graft, in the order of `graftlm.grafts.kinds`."""
    return [_describe_method(kind, graft_class(kind)) for kind in kinds()]


def _describe_method(kind: str, method: type[Graft]) -> Method:
    config: dict[str, JsonValue] = {}
    for name, field in method.Config.model_fields.items():
        if name in ("kind", PRESET):
            continue
        default = None
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
        if isinstance(default, Config):
            default = default.model_dump(mode="json")
        config[name] = default
    documentation = inspect.getdoc(method) or ""
    return Method(
        kind=kind,
        label=method.label or kind,
        summary=documentation.partition("\n")[0],
        config=config,
        presets=list(method.Config.presets),
    )
