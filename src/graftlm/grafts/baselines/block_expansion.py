"""Block expansion as in LLaMA Pro: trained copies of some layers, which change nothing at first."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from graftlm.backbone import Backbone, Site, Sites
from graftlm.backbone.modules import linear_sizes
from graftlm.errors import BackboneError, RecipeError
from graftlm.grafts.base import Graft, GraftConfig, HasTensors, ReplacesModel, check_tensors
from graftlm.grafts.baselines.deeper_model import deeper_model
from graftlm.grafts.exports import Exportable
from graftlm.grafts.sizes import HasSizes, Sizes
from graftlm.grafts.trained_copy import check_plain


class LlamaProConfig(GraftConfig):
    """Config of block expansion. Exactly one of the two keys is set.

    Args:
        blocks: number of new blocks. The layers are divided into that many groups, and a block follows the last layer
            of each group.
        capacity: extra weights as a share of the backbone's weights, rounded to whole blocks.
    """

    kind: Literal["llama-pro"] = "llama-pro"
    blocks: int | None = Field(None, ge=1)
    capacity: float | None = Field(None, gt=0, le=4)

    def _problems(self) -> Iterator[str]:
        if self.blocks is None and self.capacity is None:
            yield "neither blocks nor capacity is set, but one of them is expected: set one"
        if self.blocks is not None and self.capacity is not None:
            yield "both blocks and capacity are set, but only one of them is expected: leave one out"


class LlamaPro(Graft, ReplacesModel, Exportable, HasTensors, HasSizes):
    """Trained copies of some layers, each after its original, with output projections of zero at the start.

    The graft runs another model of the backbone's class with more layers, which shares the backbone's weights. The
    copies are float32, and keep the residual stream in the backbone's dtype.

    Args:
        config: number of new blocks.
        backbone: the backbone whose layers are copied.

    Raises:
        BackboneError: the layers are quantized or can't be copied, or copies change the output before training.
        TapError: the FFN of a layer is a mixture of experts, or a layer has several residual streams.
        TapConflictError: the backbone has an adapter of PEFT.
        RecipeError: there are more new blocks than layers.
    """

    Config: ClassVar[type[GraftConfig]] = LlamaProConfig
    label = "LLaMA Pro"
    size_keys: ClassVar[Mapping[str, int]] = {"blocks": 1}

    def __init__(self, config: LlamaProConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        model = backbone.model
        sites = backbone.sites
        self._copied = copied_layers(sites.n_layers, _number_of_blocks(config, backbone))
        for layer in self._copied:
            _check_layer(sites, layer)
        deeper_layers = Sites(deeper_model(model, sites, self._copied)).layers
        # A plain list does not register the blocks as submodules: they are submodules of the live model.
        self._blocks = [deeper_layers[position] for position in self._positions()]
        for layer, block in zip(self._copied, self._blocks, strict=True):
            _own_weights(block)
            _zero(_output_projections(sites, layer), sites.layers[layer], block)
            if model.dtype.itemsize < 4:
                _run_in_float32(block, model.dtype)
        self._live: list[PreTrainedModel] = []
        self._check_start(model, sites)

    @classmethod
    def sizes(cls, config: GraftConfig, backbone: Backbone) -> Sizes:
        sizes_of_layers = [_count(layer) for layer in backbone.sites.layers]

        def parameters(blocks: int) -> int:
            return sum(sizes_of_layers[layer] for layer in copied_layers(len(sizes_of_layers), blocks))

        return Sizes(
            key="blocks",
            values=range(1, len(sizes_of_layers) + 1),
            parameters=parameters,
            config=lambda blocks: config.model_copy(update={"blocks": blocks, "capacity": None}),
        )

    @property
    def decodes_in_one_graph(self) -> bool:
        return True

    def _positions(self) -> list[int]:
        """Return the positions of the new blocks in the deeper model."""
        return [layer + number + 1 for number, layer in enumerate(self._copied)]

    def _expanded(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the deeper model with the graft's blocks in it."""
        deeper = deeper_model(model, Sites(model), self._copied)
        layers = Sites(deeper).layers
        for position, block in zip(self._positions(), self._blocks, strict=True):
            for module in block.modules():
                if hasattr(module, "config"):  # the config selects the implementation of attention
                    module.config = deeper.config
            layers[position] = block.requires_grad_(True)
        return deeper

    @torch.no_grad()
    def _check_start(self, model: PreTrainedModel, sites: Sites) -> None:
        """Raise `BackboneError` unless the deeper model computes the same as the backbone.

        Both models are built without hooks, since hooks on `model` may belong to other grafts.
        """
        ids = torch.arange(1, 6, device=model.device)[None]
        plain = deeper_model(model, sites, [])
        deeper = self._expanded(model)
        before = plain(input_ids=ids, use_cache=False)[0]
        after = deeper(input_ids=ids, use_cache=False)[0]
        if not torch.equal(before, after):
            raise BackboneError(
                f"The layers of this {sites.model_type} model change the residual stream even with output projections "
                "of zero, for example by a norm after the sum, so new blocks would change the output before training: "
                "choose another kind of graft."
            )

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        self._live = [self._expanded(model)]
        return self._live[0]

    def detach(self, model: PreTrainedModel) -> None:
        if self._live:
            deeper = self._live.pop()
            # The shared weights may have moved to another device together with the deeper model.
            model.to(deeper.device)  # type: ignore[arg-type]

    def sites(self, model: PreTrainedModel) -> Sites:
        sites = Sites(model)
        new = set(self._positions())
        own_layers = [layer for number, layer in enumerate(sites.layers) if number not in new]
        sites.layers = nn.ModuleList(own_layers)
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
        blocks = nn.ModuleList(self._blocks)
        return {name: weight.detach() for name, weight in blocks.named_parameters()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.tensors()
        check_tensors(own, tensors)
        for name, weight in own.items():
            weight.copy_(tensors[name])

    def describe(self, backbone: Backbone) -> dict[str, object]:
        return {"copied_layers": list(self._copied)}


def copied_layers(layers: int, blocks: int) -> list[int]:
    """Return the layers that are copied: the last layer of each of `blocks` groups of (nearly) equal size.

    Args:
        layers: number of layers of the backbone.
        blocks: number of groups, from 1 to `layers`.

    Returns:
        Indices of layers, counted from 0, in ascending order.
    """
    return [number * layers // blocks - 1 for number in range(1, blocks + 1)]


def _number_of_blocks(config: LlamaProConfig, backbone: Backbone) -> int:
    """Return the number of new blocks; raise `RecipeError` if it exceeds that of layers."""
    layers = backbone.sites.n_layers
    blocks = config.blocks
    if blocks is None:
        assert config.capacity is not None, "the config has one of the two"
        weights = backbone.parameter_count
        in_layers = _count(backbone.sites.layers)
        blocks = max(1, round(config.capacity * weights * layers / in_layers))
    if blocks > layers:
        raise RecipeError(
            f"The number of new blocks is {blocks}, but at most {layers} is possible, the number of layers of "
            f"{backbone.name}, each of which can be copied once: lower blocks or capacity."
        )
    return blocks


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _check_layer(sites: Sites, layer: int) -> None:
    """Raise a `GraftError` if the projections of a layer can't be found, or its weights are quantized."""
    _output_projections(sites, layer)
    sites.module(Site("layer", layer))
    parameters = dict(sites.layers[layer].named_parameters(f"layer {layer}"))
    check_plain(parameters, "train another kind of graft")


def _output_projections(sites: Sites, layer: int) -> list[nn.Module]:
    """Return the Linears of a layer that write to the residual stream: the attention's and the FFN's."""
    attention = sites.module(Site("attention", layer))[1]
    writing = []
    for module in attention.modules():
        sizes = linear_sizes(module)
        if sizes is not None and sizes[1] == sites.width:
            writing.append(module)
    return [*writing[-1:], sites.ffn_linears(layer)[-1]]


def _zero(projections: Sequence[nn.Module], layer: nn.Module, block: nn.Module) -> None:
    """Set weights and biases of some projections in a block to zero.

    Args:
        projections: the projections in the original layer.
        layer: the original layer.
        block: its copy, which is changed.
    """
    paths = {module: path for path, module in layer.named_modules()}
    for projection in projections:
        for parameter in block.get_submodule(paths[projection]).parameters():
            nn.init.zeros_(parameter)


def _own_weights(block: nn.Module) -> None:
    """Replace the weights that a block shares by trainable copies in float32."""
    for module in block.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = parameter.detach().to(torch.float32, copy=True)
            module._parameters[name] = nn.Parameter(weight)


def _run_in_float32(block: nn.Module, dtype: torch.dtype) -> None:
    """Cast the inputs of a block to float32, and its outputs to the dtype of the residual stream."""
    block.register_forward_pre_hook(partial(_cast_inputs, dtype=torch.float32), with_kwargs=True)
    block.register_forward_hook(partial(_cast_output, dtype=dtype))


def _cast_inputs(
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    dtype: torch.dtype,
) -> tuple[object, dict[str, object]]:
    return _cast(args, dtype), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _cast_output(module: nn.Module, args: object, output: object, dtype: torch.dtype) -> object:
    return _cast(output, dtype)


def _cast(value: object, dtype: torch.dtype) -> object:
    """Cast floating-point tensors, also inside tuples, to another dtype."""
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
