"""Block expansion as in LLaMA Pro: copies of some layers train between the frozen ones, and change nothing at first."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from graftlm.backbone import Backbone, Site, Sites
from graftlm.backbone.modules import RUNTIME_FIELDS, linear_sizes
from graftlm.errors import BackboneError, RecipeError, TapConflictError, first_line
from graftlm.grafts.base import Exportable, Graft, GraftConfig, HasTensors, ReplacesModel, check_tensors
from graftlm.grafts.trained_copy import check_plain


class LlamaProConfig(GraftConfig):
    """Config of block expansion; it has either of the two.

    Args:
        blocks: number of new blocks, one behind the last layer of each of so many groups of layers.
        capacity: extra weights as a share of the backbone's, rounded to whole blocks.
    """

    kind: Literal["llama-pro"] = "llama-pro"
    blocks: int | None = Field(None, ge=1)
    capacity: float | None = Field(None, gt=0, le=4)

    def _problems(self) -> Iterator[str]:
        if (self.blocks is None) == (self.capacity is None):
            number = "neither" if self.blocks is None else "both"
            yield f"one of blocks and capacity is expected, and {number} is given; give one"


class LlamaPro(Graft, ReplacesModel, Exportable, HasTensors):
    """Copies of layers behind the last of each group, with output projections of zero; the copies alone train.

    It runs another model of the backbone's class with more layers, which shares the backbone's weights. The copies are
    float32, and keep the residual stream in the backbone's dtype.
    """

    Config: ClassVar[type[GraftConfig]] = LlamaProConfig
    label = "LLaMA Pro"

    def __init__(self, config: LlamaProConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self._copied = copied_layers(backbone.sites.n_layers, _number_of_blocks(config, backbone))
        model, sites = backbone.model, backbone.sites
        for layer in self._copied:  # raises for what can't be copied
            _output_projections(sites, layer)
            sites.module(Site("layer", layer))
            check_plain(dict(sites.layers[layer].named_parameters(f"layer {layer}")), "train another kind of graft")
        deeper = _deeper(model, sites, self._copied)
        # In a list, which no Module registers, as the live model has them.
        self._blocks = [Sites(deeper).layers[position] for position in self._positions()]
        for layer, block in zip(self._copied, self._blocks, strict=True):
            _own_weights(block)
            _zero(_output_projections(sites, layer), sites.layers[layer], block)
            if model.dtype.itemsize < 4:
                block.register_forward_pre_hook(partial(_cast_inputs, dtype=torch.float32), with_kwargs=True)
                block.register_forward_hook(partial(_cast_output, dtype=model.dtype))
        self._live: list[PreTrainedModel] = []
        self._check_start(model, sites)

    def _positions(self) -> list[int]:
        """The places of the new blocks in the deeper model."""
        return [layer + number + 1 for number, layer in enumerate(self._copied)]

    def _expanded(self, model: PreTrainedModel) -> PreTrainedModel:
        """The deeper model with the graft's blocks in it."""
        deeper = _deeper(model, Sites(model), self._copied)
        layers = Sites(deeper).layers
        for position, block in zip(self._positions(), self._blocks, strict=True):
            for module in block.modules():
                if hasattr(module, "config"):  # which says how attention is computed
                    module.config = deeper.config
            layers[position] = block.requires_grad_(True)
        return deeper

    @torch.no_grad()
    def _check_start(self, model: PreTrainedModel, sites: Sites) -> None:
        """Raise `BackboneError` unless the deeper model computes the same; without hooks, which may act on `model`."""
        ids = torch.arange(1, 6, device=model.device)[None]
        plain, deeper = _deeper(model, sites, []), self._expanded(model)
        before, after = (own(input_ids=ids, use_cache=False)[0] for own in (plain, deeper))
        if not torch.equal(before, after):
            raise BackboneError(
                f"Layers of this {sites.model_type} model change the residual stream even with output projections of "
                "zero, as a norm behind the sum does, and new blocks would not begin as the backbone: choose another "
                "kind of graft."
            )

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        self._live = [self._expanded(model)]
        return self._live[0]

    def detach(self, model: PreTrainedModel) -> None:
        if self._live:
            model.to(self._live.pop().device)  # type: ignore[arg-type]  # shared weights moved with the deeper model

    def sites(self, model: PreTrainedModel) -> Sites:
        sites, new = Sites(model), set(self._positions())
        sites.layers = nn.ModuleList(layer for number, layer in enumerate(sites.layers) if number not in new)
        return sites

    def eval_only_modules(self) -> Iterable[nn.Module]:
        return self._live

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        model: Any = copy.deepcopy(self._expanded(backbone.model))
        for module in model.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        return model.to(backbone.model.dtype).eval()

    def tensors(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in nn.ModuleList(self._blocks).named_parameters()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        check_tensors(own := self.tensors(), tensors)
        for name, weight in own.items():
            weight.copy_(tensors[name])

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        return {"copied_layers": list(self._copied)}


def copied_layers(layers: int, blocks: int) -> list[int]:
    """The layers behind which a copy stands: the last of each of `blocks` groups of equal or nearly equal size."""
    return [number * layers // blocks - 1 for number in range(1, blocks + 1)]


def _number_of_blocks(config: LlamaProConfig, backbone: Backbone) -> int:
    layers, blocks = backbone.sites.n_layers, config.blocks
    if blocks is None:
        assert config.capacity is not None, "a config's own check"
        weights = backbone.parameter_count
        in_layers = sum(parameter.numel() for parameter in backbone.sites.layers.parameters())
        blocks = max(1, round(config.capacity * weights * layers / in_layers))
    if blocks > layers:
        raise RecipeError(
            f"{blocks} new blocks are asked for, but each stands behind another layer, and {backbone.name} has "
            f"{layers}: lower blocks or capacity."
        )
    return blocks


def _output_projections(sites: Sites, layer: int) -> list[nn.Module]:
    """The Linears of a layer that write to the residual stream: the attention's and the FFN's."""
    exit_ = sites.module(Site("attention", layer))[1]
    linears = [module for module in exit_.modules() if (linear_sizes(module) or (0, 0))[1] == sites.width]
    return [*linears[-1:], sites.ffn_linears(layer)[-1]]


def _zero(projections: Sequence[nn.Module], layer: nn.Module, block: nn.Module) -> None:
    """Set weights and biases of a block to zero that stand where `projections` do in its original."""
    paths = {module: path for path, module in layer.named_modules()}
    for projection in projections:
        for parameter in block.get_submodule(paths[projection]).parameters():
            nn.init.zeros_(parameter)


def _own_weights(block: nn.Module) -> None:
    """Give a block trainable copies of the weights that it shares, in float32."""
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module._parameters[name] = nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def _deeper(model: PreTrainedModel, sites: Sites, copied: Sequence[int]) -> PreTrainedModel:
    """A model of the same class with each layer of `copied` a second time behind it, on the very same tensors.

    transformers builds it from a config with more layers, so everything that depends on a layer's number is right: its
    place in the cache, its window, its scale. It has no hooks.

    Raises BackboneError if the config can't describe those layers, TapConflictError if the model has PEFT's adapter.
    """
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise TapConflictError(
            "A PEFT adapter is attached to the backbone, and new blocks would copy it: merge or unload that adapter "
            "first."
        )
    order = [layer for layer in range(sites.n_layers) for _ in range(1 + (layer in copied))]
    path = next(name for name, module in model.named_modules() if module is sites.layers)
    modules, depth = dict(model.named_modules()), path.count(".") + 1
    try:
        with torch.device("meta"):
            deeper: Any = type(model)(_deeper_config(model.config, sites, order))
        for name, module in deeper.named_modules():
            parts = name.split(".")
            if name.startswith(f"{path}."):
                parts[depth] = str(order[int(parts[depth])])
            _share(module, modules[".".join(parts)])
    except Exception as error:  # whatever a model's code raises
        raise BackboneError(
            f"The layers {', '.join(map(str, copied))} of this {sites.model_type} model can't be copied, as its config "
            f"does not describe them a second time ({first_line(error)}): choose another number of blocks, or another "
            "kind of graft."
        ) from error
    deeper.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return deeper.eval()


def _deeper_config(config: Any, sites: Sites, order: Sequence[int]) -> Any:
    """A config with a layer for each number of `order`; lists with an item for each layer follow."""
    config = copy.deepcopy(config)
    text = getattr(config, sites.family.text_config or "", config)
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == sites.n_layers and name not in RUNTIME_FIELDS:
            setattr(text, name, [value[layer] for layer in order])
    text.num_hidden_layers = len(order)
    return config


def _share(module: nn.Module, source: nn.Module) -> None:
    """Make a module without values use the tensors of another one; a `ValueError` if they are not alike."""
    shapes = [{name: p.shape for name, p in own.named_parameters(recurse=False)} for own in (module, source)]
    if type(module) is not type(source) or shapes[0] != shapes[1]:
        raise ValueError(f"{type(source).__name__} would be {type(module).__name__} of other sizes")
    module._parameters.update(source._parameters)
    module._buffers.update(source._buffers)
    vars(module).update({name: value for name, value in vars(source).items() if isinstance(value, Tensor)})


def _cast_inputs(module: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    return _cast(args, dtype), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _cast_output(module: nn.Module, args: Any, output: Any, dtype: torch.dtype) -> Any:
    return _cast(output, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of floating point in another dtype, also in tuples."""
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
