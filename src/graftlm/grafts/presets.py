"""Presets: named sets of values for the keys of a config, such as the form in which a paper published a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from graftlm.config import Config
from graftlm.errors import shorten

PRESET = "preset"
"""The key that names a preset."""


class PresetConfig(Config):
    """A config that may take the defaults of its keys from a preset.

    Args:
        preset: a named form, such as the published one. Its values replace defaults, and are stored instead of the
            name.

    Attributes:
        presets: the values of each preset by the names of presets and keys; a subclass declares its own.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    preset: str | None = Field(None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: object) -> object:
        if not isinstance(values, dict) or PRESET not in values:
            return values
        given = {key: value for key, value in values.items() if key != PRESET}
        name = values[PRESET]
        if name is None:
            return given
        if not cls.presets:
            raise ValueError(f"{PRESET} is {shorten(repr(name))}, but this kind has no presets: leave {PRESET} out")
        preset = cls.presets.get(name) if isinstance(name, str) else None
        if preset is None:
            known = ", ".join(cls.presets)
            raise ValueError(
                f"{PRESET} is {shorten(repr(name))}, but there is no such preset (known: {known}): choose a known one, "
                "or leave it out"
            )
        return _merged(preset, given)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema, in which `preset` has the names of the presets as its values."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        if not cls.presets:
            properties.pop(PRESET, None)
        elif PRESET in properties:
            properties[PRESET] = {"title": "Preset", "enum": list(cls.presets)}
        return schema


def _merged(preset: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a preset with those that were given in their place.

    Args:
        preset: the values of the preset by key.
        given: the given values by key. Where both have a mapping, it is merged key by key.
    """
    values = {**preset, **given}
    for key in preset.keys() & given.keys():
        default = preset[key]
        value = given[key]
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            values[key] = _merged(default, value)
    return values
