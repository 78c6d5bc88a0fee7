"""Configs of new models of transformers, from the keys of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from graftlm.errors import GraftError, RecipeError, did_you_mean, first_line
from graftlm.models import register


def new_config(
    values: Mapping[str, object],
    defaults: Mapping[str, object],
    architectures: Container[type[PreTrainedConfig]],
    purpose: str,
) -> PreTrainedConfig:
    """Return the config of a new model.

    Args:
        values: `model_type` and any other keys of its config.
        defaults: values of keys that `values` lacks; those that the config class does not document are left out.
        architectures: the config classes of the models that serve the purpose.
        purpose: what kind of model is needed, for error messages, such as "a causal language model".

    Raises:
        RecipeError: there is no such architecture, it does not serve the purpose, or a key or value does not fit it.
    """
    register()
    name = str(values["model_type"])
    if name not in CONFIG_MAPPING:
        hint = did_you_mean(name, CONFIG_MAPPING).partition(" (known")[0]  # transformers has hundreds of types.
        raise RecipeError(
            f"There is no architecture with the model_type {name!r}{hint}: name block-state, or an architecture of "
            "transformers such as llama."
        )
    config_class: Any = CONFIG_MAPPING[name]
    if config_class not in architectures:
        raise RecipeError(f"model_type is {name}, but a type with {purpose} is expected: name another, such as llama.")
    known = _config_keys(config_class)
    given = {key: value for key, value in values.items() if key != "model_type"}
    for key in given:
        if key not in known:
            raise RecipeError(
                f"model has the key {key}, which the config of {name} lacks{did_you_mean(key, known)}: rename "
                "or remove it."
            )
    arguments = {key: value for key, value in defaults.items() if key in known}
    arguments.update(given)
    with config_errors(values, Exception):  # Config classes share no class of errors.
        return config_class(**arguments)


@contextmanager
def config_errors(values: Mapping[str, object], *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of the given classes, which transformers raises for unsuitable values, to `RecipeError`."""
    try:
        yield
    except GraftError:
        raise
    except kinds as error:
        name = values["model_type"]
        raise RecipeError(
            f"model: transformers can't build a {name} model from these values ({first_line(error)}): choose values "
            f"that the config of {name} accepts, or leave these keys out to take its defaults."
        ) from None


def _config_keys(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the keys that a config class documents: the arguments of its constructor, and their other names."""
    keys = set(config_class.attribute_map)
    for parameter in inspect.signature(config_class.__init__).parameters.values():
        if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            keys.add(parameter.name)
    return keys - {"self"}
