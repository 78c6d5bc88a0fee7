"""Any method of PEFT as a graft: PEFT puts its modules into the live model, and takes them out again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import peft
import torch
from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, cast_adapter_dtype
from peft.utils.other import AuxiliaryTrainingWrapper
from pydantic import Field, JsonValue
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone
from graftlm.config import read_yaml
from graftlm.errors import ArtifactError, BackboneError, TapConflictError, did_you_mean, first_line
from graftlm.grafts.base import Exportable, Graft, GraftConfig, HasTensors, ReplacesModel, check_tensors

_ADAPTER = "graft"
_PREFIX = "base_model."  # before every name of a `PeftModel`
_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {"DORA": ("LORA", {"use_dora": True})}
_PROMPT = "it puts trained states before the text, whose positions and cache would no longer be the backbone's"
_NOT_SET = {field.name for field in dataclasses.fields(PeftConfig)}  # what PEFT keeps about files and tasks
_LIMITS = read_yaml(Path(__file__).with_name("peft.yaml"))
_START_TOLERANCE = 1e-4  # of the largest logit, for what is equal but for rounding; in half precision 16 roundings


class PeftGraftConfig(GraftConfig):
    """Config of a method of PEFT.

    Args:
        method: its name in PEFT, such as OFT, OSF, IA3, VERA or LOHA, in any case; DORA is LoRA with `use_dora`.
        options: fields of PEFT's own config. `target_modules` is by default every Linear of the FFNs, for LN_TUNING the
            layers' norms. Dropout has no effect in a frozen backbone, and must be 0.
    """

    kind: Literal["peft"] = "peft"
    method: str
    options: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.method.upper()

    def peft_config(self, **defaults: Any) -> PeftConfig:
        """PEFT's own config; `defaults` stand in for fields that are not among the options."""
        cls, fixed = _config_class(self.method)
        return cls(**{name: v for name, v in defaults.items() if name in _fields(cls)} | self.options | fixed)

    def _problems(self) -> Iterator[str]:
        cls, _ = _config_class(self.method)
        for key in self.options.keys() - _fields(cls):
            yield f"options: unknown key {key}{did_you_mean(key, _fields(cls))}"
        names = {} if "target_modules" in self.options else {"target_modules": ["a"], "feedforward_modules": ["a"]}
        try:
            values = vars(self.peft_config(**names))
        except Exception as error:  # whatever PEFT raises
            yield f"options: PEFT refuses them ({first_line(error)}); correct them"
            return
        for key, value in values.items():
            allowed, reason = _LIMITS["options"].get(key, ((value,), ""))
            if "dropout" in key:
                allowed, reason = (None, 0), "has no effect, as a frozen backbone stays in evaluation mode"
            if value not in allowed:
                yield f"options: {key} is {value!r}, which {reason}; set it to {allowed[-1]!r}"


def _config_class(method: str) -> tuple[Any, dict[str, Any]]:
    """PEFT's config class of a method, and the fields that an alias fixes; `ValueError` for one that is no graft."""
    name, fixed = _ALIASES.get(method.upper(), (method.upper(), {}))
    known = {kind.value: cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if name not in known:
        raise ValueError(f"PEFT {peft.__version__} has no method {method}{did_you_mean(name, {*known, *_ALIASES})}")
    tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING.get(name)  # type: ignore[call-overload]  # its keys are strings
    reason = _LIMITS["methods"].get(name, "" if isinstance(tuner, type) and issubclass(tuner, BaseTuner) else _PROMPT)
    if reason:
        raise ValueError(f"the method {name} can't be a graft, since {reason}; choose another, such as LORA or OFT")
    return known[name], fixed


def _fields(config_class: Any) -> set[str]:
    """The fields that options set; those that take an object of PEFT's are none of them."""
    names = {field.name for field in dataclasses.fields(config_class) if field.init} - _NOT_SET
    return {name for name in names if not name.endswith("_config")}


def _mend_after_cast(layer: Any) -> None:
    """Set right what a cast to float32 leaves behind: hooks on the old parameters, and magnitudes of rounded norms."""
    if hasattr(layer, "_attach_hooks"):
        layer._detach_hooks()
        layer._attach_hooks(_ADAPTER)
    if _ADAPTER in getattr(layer, "lora_magnitude_vector", ()) and _ADAPTER in layer.lora_A:
        factors = {"lora_A": layer.lora_A[_ADAPTER].weight, "lora_B": layer.lora_B[_ADAPTER].weight}
        base, scaling = layer.get_base_layer(), layer.scaling[_ADAPTER]
        layer.lora_magnitude_vector[_ADAPTER].update_layer(base_layer=base, scaling=scaling, **factors)


class _Adapted(nn.Module):
    """A model with PEFT's modules in it, under the names that a `PeftModel` would have, without its side effects."""

    def __init__(self, model: PreTrainedModel, config: PeftConfig) -> None:
        super().__init__()
        tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[cast("Any", config.peft_type)]
        self.base_model: BaseTuner = tuner(model, copy.deepcopy(config), _ADAPTER)
        self.peft_config = self.base_model.peft_config
        cast_adapter_dtype(model, _ADAPTER)  # to float32, as PEFT trains on half-precision models
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                _mend_after_cast(module)

    def trained(self) -> list[Tensor]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def tensors(self) -> dict[str, Tensor]:
        """What PEFT saves, by the names that it has without a `PeftModel`."""
        tensors = get_peft_model_state_dict(self, adapter_name=_ADAPTER, save_embedding_layers=False)
        return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        set_peft_model_state_dict(self, {_PREFIX + name: t for name, t in tensors.items()}, adapter_name=_ADAPTER)


class PeftGraft(Graft, ReplacesModel, Exportable, HasTensors):
    """A method of PEFT on Linears of the live model. PEFT adds its modules, and unloads them again."""

    Config: ClassVar[type[GraftConfig]] = PeftGraftConfig
    label = "a method of PEFT"

    def __init__(self, config: GraftConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config, self._label = config, config.label
        self._peft = self._peft_config(backbone)
        self._expected = self._tensors_without_values(backbone.model)
        self._live: list[_Adapted] = []
        self._pending: dict[str, Tensor] | None = None

    def _peft_config(self, backbone: Backbone) -> PeftConfig:
        config = cast("PeftGraftConfig", self.config)
        if "target_modules" in config.options or config.label == "TRAINABLE_TOKENS":
            return config.peft_config(fan_in_fan_out=_has_conv1d(backbone))
        return config.peft_config(**default_targets(config.method, backbone))

    def _tensors_without_values(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The tensors that PEFT will create: without storage, or, as some methods need values, on the same weights."""
        try:
            with torch.device("meta"):
                return _Adapted(type(model)(copy.deepcopy(model.config)), self._peft).tensors()
        except Exception:  # whatever the method does without values; what is the user's mistake comes again below
            flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
            shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
            try:
                with torch.random.fork_rng(devices=[]):
                    return self._adapt(copy.deepcopy(model, shared)).tensors()
            finally:
                for parameter, flag in flags:
                    parameter.requires_grad_(flag)

    def _adapt(self, model: PreTrainedModel) -> _Adapted:
        """Put PEFT's modules into a model; `BackboneError` where that fails, and the model is as before."""
        use = f"{self._label} on this {model.config.model_type} model"
        with _as_before_on_errors(model) as weights:
            try:
                adapted = _Adapted(model, self._peft)
            except Exception as error:  # whatever PEFT raises
                problem = first_line(error).partition(". ")[0]
                raise BackboneError(
                    f"PEFT can't put {use} ({problem}): choose other options, such as target_modules, or another "
                    "method."
                ) from error
            if problem := _problem(adapted, weights):
                raise BackboneError(f"{use} {problem}: choose other options, or another method.")
        return adapted

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise TapConflictError(
                "A PEFT adapter is attached to the backbone already, and that of this graft would be unloaded together "
                "with it: merge or unload that adapter first."
            )
        bare = _logits(model) if self._pending is None else None
        self._live = [self._adapt(model)]
        try:
            if bare is not None:
                self._check_start(model, bare)
            elif self._pending is not None:
                self._live[0].load(self._pending)
        except BaseException:
            self._live.pop().base_model.unload()
            raise
        self._pending = None
        return model

    def _check_start(self, model: PreTrainedModel, bare: Tensor) -> None:
        """Raise `BackboneError` unless an untrained adapter leaves logits (1, 5, V) as they are, but for rounding."""
        try:
            change = (_logits(model) - bare).abs().max()
        except Exception as error:  # whatever a method's code raises
            raise BackboneError(
                f"{self._label} can't run on this {model.config.model_type} model ({first_line(error)}): choose other "
                "options, or another method."
            ) from error
        if not change <= max(_START_TOLERANCE, 16 * torch.finfo(bare.dtype).eps) * bare.abs().max():
            raise BackboneError(
                f"{self._label} changes the logits of the backbone by {change:.2g} before training, and a graft begins "
                "as its backbone: set its initial weights to zero by PEFT's options (such as init_weights), or choose "
                "another method."
            )

    def detach(self, model: PreTrainedModel) -> None:
        if self._live:
            self._pending = {name: tensor.clone() for name, tensor in self.tensors().items()}
            self._live.pop().base_model.unload()

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        adapted = self._adapt(copy.deepcopy(backbone.model)).eval()
        adapted.load(self.tensors())
        try:
            model: Any = adapted.base_model.merge_and_unload()
        except Exception as error:  # as methods say that they can't
            raise ArtifactError(
                f"PEFT can't merge {self._label} into the backbone's weights ({first_line(error)}): load the "
                "graft with graftlm."
            ) from error
        return model

    def tensors(self) -> dict[str, Tensor]:
        return self._live[0].tensors() if self._live else dict(self._pending or {})

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        check_tensors(self._expected, tensors)
        if self._live:
            self._live[0].load(tensors)
        else:
            self._pending = dict(tensors)


def default_targets(method: str, backbone: Backbone) -> dict[str, Any]:
    """PEFT's fields for the Linears of the FFNs, by full names; for the layers' norms where the method trains those."""
    sites = backbone.sites
    layers = range(sites.n_layers)
    if method.upper() == "LN_TUNING":
        return {"target_modules": [site.path for layer in layers for site in sites.norms(layer)]}
    flags = {"fan_in_fan_out": _has_conv1d(backbone)}
    paths = {module: path for path, module in backbone.model.named_modules()}
    weights = [weight for layer in layers for weight in sites.ffn_weights(layer)]
    if any(map(sites.is_mixture, layers)) and "target_parameters" in _fields(_config_class(method)[0]):
        # PEFT takes the Linears of a mixture for those of older checkpoints, so parameters are named instead.
        return flags | {"target_modules": [], "target_parameters": [f"{paths[m]}.{name}" for m, name in weights]}
    outputs = [paths[sites.ffn_linears(layer)[-1]] for layer in layers]  # whose input IA3 scales
    return flags | {"target_modules": [paths[module] for module, _ in weights], "feedforward_modules": outputs}


def _has_conv1d(backbone: Backbone) -> bool:
    """Whether the backbone has GPT-2's transposed Linears."""
    return any(isinstance(module, Conv1D) for module in backbone.model.modules())


def _problem(adapted: _Adapted, weights: Sequence[tuple[nn.Parameter, Tensor]]) -> str:
    """What makes an adapter in a model unfit for a graft, as the end of a sentence; `weights` are the backbone's."""
    trained, inside = adapted.trained(), {id(parameter) for parameter in adapted.base_model.model.parameters()}
    own = {id(parameter) for parameter, _ in weights}
    if not trained:
        return "finds no module that it can train"
    if any(id(parameter) in own for parameter in trained) or any(_moved(*weight) for weight in weights):
        return "changes the backbone's own weights"
    if any(id(parameter) not in inside for parameter in trained):
        return "keeps weights outside the model, where they would not be trained"
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in adapted.modules()):
        return "trains copies of whole modules (modules_to_save and the like), which PEFT does not take out again"
    return ""


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """(1, 5, V) of five tokens, or the last hidden states of a model without a head; without compiled code."""
    size = model.config.get_text_config().vocab_size
    return model.forward(input_ids=torch.arange(1, 6, device=model.device)[None] * size // 6, use_cache=False)[0]


@contextmanager
def _as_before_on_errors(model: nn.Module) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Put modules and weights of a model back if the block raises; yields its parameters and their storage."""
    children = {module: dict(module._modules) for module in model.modules()}
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield weights
    except BaseException:
        for module, modules in children.items():
            module._modules.clear()
            module._modules.update(modules)
        for parameter, data in weights:
            if _moved(parameter, data):
                parameter.data = data
        vars(model).pop("peft_config", None)
        raise


def _moved(parameter: nn.Parameter, data: Tensor) -> bool:
    """Whether a plain parameter has other storage; quantised ones have none of their own."""
    return type(data) is Tensor and parameter.data_ptr() != data.data_ptr()
