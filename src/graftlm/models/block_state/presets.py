"""The published sizes of block-state transformers (thesis, section 5.4.1 and Table 5.1).

The published layers are counted from 1, here from 0. The vocabulary is that of the tokenizer, so it is not among the
sizes. S4 is `s4d` here.
"""

from __future__ import annotations

from graftlm.errors import RecipeError, did_you_mean

_SMALL: dict[str, object] = {
    "mixer": "block-state",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "head_dim": 128,
    "intermediate_size": 4096,
    "hidden_act": "relu",
    "window": 512,
    "mixer_layers": (0, 6, 8),
    "state_size": 16,
    "filters": 32,
    "kernel_length": 4096,
    "positional_ssm": True,
}
_LARGE: dict[str, object] = _SMALL | {
    "num_attention_heads": 12,
    "intermediate_size": 8192,
    "mixer_layers": (0, 4, 6, 8),
    "filters": 64,
}
_SINGLE_HEAD = {"context": "sh", "kernel": "s4d"}
_MULTI_HEAD = {"context": "mh", "kernel": "s4d"}
_MULTI_FILTER = {"context": "mf", "kernel": "s4d"}
_UNSTRUCTURED = {"kernel": "unstructured"}

PRESETS: dict[str, dict[str, object]] = {
    "bst-sh-s": _SMALL | _SINGLE_HEAD,
    "bst-mh-s": _SMALL | _MULTI_HEAD,
    "bst-mf-s": _SMALL | _MULTI_FILTER,
    "bst-sh-unstruct-s": _SMALL | _SINGLE_HEAD | _UNSTRUCTURED,
    "bst-mf-unstruct-s": _SMALL | _MULTI_FILTER | _UNSTRUCTURED,
    "bst-sh-l": _LARGE | _SINGLE_HEAD,
    "bst-mf-l": _LARGE | _MULTI_FILTER,
    "bst-sh-unstruct-l": _LARGE | _SINGLE_HEAD | _UNSTRUCTURED,
    "bst-mf-unstruct-l": _LARGE | _MULTI_FILTER | _UNSTRUCTURED,
}
"""Values of a config's keys, by the name of a published model."""


def preset_values(name: object) -> dict[str, object]:
    """Return the values of a preset.

    Args:
        name: name of the preset; None for no values.

    Raises:
        RecipeError: no preset has the name.
    """
    if name is None:
        return {}
    if not isinstance(name, str) or name not in PRESETS:
        suggestion = did_you_mean(str(name), PRESETS)
        raise RecipeError(
            f"block-state: preset is {name!r}, but one of {', '.join(PRESETS)} is expected{suggestion}: "
            "choose one of them, or leave the key out."
        )
    return dict(PRESETS[name])
