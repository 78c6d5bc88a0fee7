"""The config of a graft that is a method of PEFT, and the accepted methods and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import peft
from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from pydantic import Field, JsonValue

from graftlm.config import read_yaml
from graftlm.errors import did_you_mean, first_line
from graftlm.grafts.base import GraftConfig

# A name that is accepted in addition to PEFT's own: the method, and the fields that the name fixes.
_ALIASES: dict[str, tuple[str, dict[str, bool]]] = {"DORA": ("LORA", {"use_dora": True})}
_LIMITS = read_yaml(Path(__file__).with_name("peft.yaml"))
_PROMPT = "it puts trained states before the text, so that positions and cache would differ from the backbone's"
_BOOKKEEPING = {field.name for field in dataclasses.fields(PeftConfig)}  # fields in which PEFT stores files and tasks


def is_traceable(config: PeftConfig) -> bool:
    """Return whether torch.compile can trace the modules of a method.

    Args:
        config: PEFT's own config of the method.
    """
    return PeftType(config.peft_type).name not in _LIMITS["eager"]


class PeftGraftConfig(GraftConfig):
    """Config of a method of PEFT.

    Args:
        method: the name of the method in PEFT, such as OFT, OSF, IA3, VERA or LOHA, in upper or lower case; DORA is
            LoRA with `use_dora`.
        options: fields of PEFT's own config. By default `target_modules` is every Linear of the FFNs, and for LN_TUNING
            the norms of the layers. Dropout must be 0, since it has no effect in a frozen backbone.

    Raises:
        RecipeError: PEFT does not have the method or an option, or it can't be used for a graft.
    """

    kind: Literal["peft"] = "peft"
    method: str
    options: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.method.upper()

    def peft_config(self, **defaults: Any) -> PeftConfig:
        """Return PEFT's own config.

        Args:
            **defaults: values of fields that the options do not set. Fields that the method does not have are ignored.
        """
        cls, fixed = config_class(self.method)
        fields = option_names(cls)
        values = {name: value for name, value in defaults.items() if name in fields}
        return cls(**{**values, **self.options, **fixed})

    def _problems(self) -> Iterator[str]:
        cls, _ = config_class(self.method)
        known = option_names(cls)
        for key in sorted(self.options.keys() - known):
            yield f"options: unknown key {key}{did_you_mean(key, known)}"
        targets = {"target_modules": ["a"], "feedforward_modules": ["a"]}
        try:
            config = self.peft_config(**({} if "target_modules" in self.options else targets))
        except Exception as error:  # PEFT may raise anything
            yield f"options: PEFT accepts other values only ({first_line(error)}): change the options that it names"
            return
        for key, value in vars(config).items():
            allowed, reason = _limit(key, value)
            if value not in allowed:
                yield f"options: {key} is {value!r}, which {reason}: set it to {allowed[-1]!r}"


def _limit(key: str, value: object) -> tuple[tuple[object, ...], str]:
    """Return the accepted values of an option, and why other values are refused."""
    if "dropout" in key:
        return (None, 0), "has no effect, since a frozen backbone stays in evaluation mode"
    if key in _LIMITS["options"]:
        allowed, reason = _LIMITS["options"][key]
        return tuple(allowed), reason
    return (value,), ""


def config_class(method: str) -> tuple[type[PeftConfig], dict[str, bool]]:
    """Return PEFT's config class of a method, and the fields that an alias fixes.

    Args:
        method: the name of the method in PEFT or an alias, in upper or lower case.

    Raises:
        ValueError: PEFT does not have the method, or the method can't be a graft.
    """
    name, fixed = _ALIASES.get(method.upper(), (method.upper(), {}))
    known = {kind.value: cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if name not in known:
        raise ValueError(f"PEFT {peft.__version__} has no method {method}{did_you_mean(name, {*known, *_ALIASES})}")
    reason = _refusal(name)
    if reason:
        raise ValueError(f"the method {name} can't be a graft, since {reason}: choose another, such as LORA or OFT")
    return known[name], fixed


@dataclasses.dataclass(frozen=True)
class SizeOption:
    """The option of a method that sets its size.

    Attributes:
        key: its name.
        divides: whether it must divide the widths of the modules.
        squared: whether it counts weights of a matrix, and not of a row.
        grows: whether the number of parameters grows with it.
        step: it must be a multiple of this number.
        others: other options that set the size.
    """

    key: str
    divides: bool = False
    squared: bool = False
    grows: bool = True
    step: int = 1
    others: tuple[str, ...] = ()


def option_of_size(method: str) -> SizeOption | None:
    """Return the option that sets the size of a method; None if there is none.

    Args:
        method: the name of the method in PEFT or an alias, in upper or lower case.
    """
    cls, _ = config_class(method)
    name = _ALIASES.get(method.upper(), (method.upper(), {}))[0]
    if name in _LIMITS["sizes"]:
        values = _LIMITS["sizes"][name]
        return SizeOption(**{**values, "others": tuple(values.get("others", ()))}) if values else None
    return SizeOption("r") if "r" in option_names(cls) else None


def _refusal(name: str) -> str:
    """Return why a method of PEFT can't be a graft; an empty string if it can."""
    if name in _LIMITS["methods"]:
        return _LIMITS["methods"][name]
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(name)  # type: ignore[call-overload]  # its keys are strings as well
    is_layer_tuner = isinstance(tuner, type) and issubclass(tuner, BaseTuner)
    return "" if is_layer_tuner else _PROMPT


def option_names(cls: type[PeftConfig]) -> set[str]:
    """Return the fields of a PEFT config that options can set, which excludes fields for objects of PEFT.

    Args:
        cls: the class of the config.
    """
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    return {name for name in names - _BOOKKEEPING if not name.endswith("_config")}
