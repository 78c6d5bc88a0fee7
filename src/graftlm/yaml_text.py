"""YAML 1.2 by ruamel.yaml: parse text to plain values, and write text that means the same in YAML 1.1 and 1.2."""

from __future__ import annotations

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver

_TEXT = "tag:yaml.org,2002:str"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
# YAML folds these characters like line feeds.
_LINE_BREAKS = ("\x85", "\u2028", "\u2029")


class _Constructor(SafeConstructor):
    """Leaves dates as text: configs have no dates, and a name that looks like a date needs no quotes."""


_Constructor.add_constructor(_TIMESTAMP, SafeConstructor.construct_yaml_str)


class _Representer(SafeRepresenter):
    """Quotes text that a reader of YAML 1.1 or 1.2 would take for another type."""

    def represent_text(self, text: str) -> ScalarNode:
        """Return the YAML node of a string, in double quotes where a plain one would have another type."""
        tags = {_resolved_tag(text, version) for version in ("1.1", "1.2")}
        is_ambiguous = tags != {_TEXT}
        has_breaks = any(mark in text for mark in _LINE_BREAKS)
        style = '"' if is_ambiguous or has_breaks else None
        return self.represent_scalar(_TEXT, text, style=style)


_Representer.add_representer(str, _Representer.represent_text)


def _resolved_tag(text: str, version: str) -> str:
    """Return the tag that a plain scalar has in a version of YAML."""
    resolver = VersionedResolver(version=version, loader=YAML(typ="safe", pure=True))
    tag = resolver.resolve(ScalarNode, text, (True, False))
    return str(tag)


def load_yaml(text: str) -> Any:
    """Parse a YAML text into mappings, lists, strings, numbers, booleans and None. Dates are strings.

    Raises:
        YAMLError: the text is not valid YAML, is nested too deeply, or has a key twice in one mapping.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        return yaml.load(text)
    except RecursionError:
        raise YAMLError("it is nested too deeply") from None
    except (ValueError, AttributeError, TypeError) as error:  # ruamel does not wrap the errors of constructors
        raise YAMLError(f"a value does not fit its tag ({error})") from None


def dump_yaml(values: Any) -> str:
    """Return mappings, lists, strings, numbers, booleans and None as YAML text, with keys in their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # typed as None
    stream = io.StringIO()
    yaml.dump(values, stream)
    return stream.getvalue()
