"""LoRA experts: their factors, new experts, and the folders that PEFT reads.

The update of an expert at a module with input x is s B A x, with A (r, in), B (out, r) and s = alpha / r, or
s = alpha / sqrt(r) for rank-stabilized LoRA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone, Site
from graftlm.backbone.modules import linear_sizes
from graftlm.errors import GraftError, RecipeError
from graftlm.files.adapter_config import ADAPTER_TENSORS
from graftlm.grafts.base import GraftConfig
from graftlm.grafts.sizes import Sizes
from graftlm.grafts.token_routing.config import ExpertConfig, TokenRoutingConfig

_LARGEST = 4
"""The largest size of all new experts, as a multiple of the backbone's weights."""


@dataclass(frozen=True)
class Factors:
    """The LoRA factors of one expert at one module.

    Args:
        a: A, (r, in), where `in` is the size of the vocabulary for an embedding.
        b: the transpose of B, (r, out).
        scale: s, the factor of the update.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertTarget:
    """The sizes of a module that experts change.

    Args:
        inputs: width of the inputs; the size of the vocabulary for an embedding.
        outputs: width of the outputs.
        is_embedding: whether the module is an embedding.
        scale: factor by which an embedding multiplies its output; PEFT multiplies the update as well.
    """

    inputs: int
    outputs: int
    is_embedding: bool = False
    scale: float = 1.0

    @classmethod
    def of(cls, module: nn.Module, path: str) -> ExpertTarget:
        """Return the sizes of a module.

        Args:
            module: the module, or PEFT's layer around it.
            path: path of the module, for error messages.

        Raises:
            GraftError: the module is neither linear nor an embedding.
        """
        base = base_module(module)
        if isinstance(base, nn.Embedding):
            scale = getattr(base, "embed_scale", None)
            return cls(
                inputs=base.num_embeddings,
                outputs=base.embedding_dim,
                is_embedding=True,
                scale=1.0 if scale is None else float(scale),
            )
        sizes = linear_sizes(base)
        if sizes is None:
            raise GraftError(
                f"An expert changes {path}, which is of type {type(base).__name__}, but a linear layer or an embedding "
                "is expected: choose other targets, or an adapter that changes only such modules."
            )
        inputs, outputs = sizes
        return cls(inputs, outputs)


def base_module(module: nn.Module) -> nn.Module:
    """Return the module inside a layer of PEFT, or the module itself if there is no such layer."""
    if isinstance(module, BaseTunerLayer):
        return module.base_layer  # type: ignore[return-value]  # a module, although PEFT does not declare it
    return module


def new_factors(name: str, config: ExpertConfig, backbone: Backbone) -> dict[str, Factors]:
    """Initialize a new expert, which has no effect yet: A as in PEFT, B zero.

    Args:
        name: name of the expert, for error messages.
        config: rank (not None), alpha and targets of the expert.
        backbone: the backbone of the routing.

    Returns:
        Factors by module path.

    Raises:
        GraftError: the backbone has no module that a target names, or the module is neither linear nor an embedding.
        TapError: the target is `ffn`, but an FFN is a mixture of experts.
    """
    assert config.rank is not None
    scale = (config.alpha or config.rank) / config.rank
    factors = {}
    for target in config.targets:
        for path in _target_paths(name, target, backbone):
            sizes = ExpertTarget.of(backbone.model.get_submodule(path), path)
            a = torch.empty(config.rank, sizes.inputs)
            nn.init.kaiming_uniform_(a, a=5**0.5)
            b = torch.zeros(config.rank, sizes.outputs)
            factors[path] = Factors(a, b, scale)
    return factors


def rank_sizes(config: TokenRoutingConfig, backbone: Backbone) -> Sizes:
    """Return the sizes of a routing, in which all new experts have one rank. Existing adapters do not train.

    Args:
        config: the config, whose new experts may have any rank.
        backbone: the backbone of the routing.

    Raises:
        RecipeError: there is no new expert.
        GraftError: the backbone has no module that a target names, or the module is neither linear nor an embedding.
        TapError: the target is `ffn`, but an FFN is a mixture of experts.
    """
    new = {name: expert for name, expert in config.experts.items() if expert.is_new}
    if not new:
        raise RecipeError(
            "capacity is match, but no expert is a new adapter, which alone trains: add an expert with targets, "
            "or leave capacity out."
        )
    per_rank = 0
    for name, expert in new.items():
        smallest = new_factors(name, expert.model_copy(update={"rank": 1}), backbone)
        per_rank += sum(factors.a.numel() + factors.b.numel() for factors in smallest.values())

    def with_rank(rank: int) -> GraftConfig:
        ranked = {name: expert.model_copy(update={"rank": rank}) for name, expert in new.items()}
        return config.model_copy(update={"experts": config.experts | ranked})

    return Sizes(
        key="rank",
        values=range(1, 2 + _LARGEST * backbone.parameter_count // per_rank),
        parameters=lambda rank: per_rank * rank,
        config=with_rank,
    )


def _target_paths(name: str, target: str, backbone: Backbone) -> list[str]:
    """Return the paths of the modules that a target names: a kind of site, a module's path, or its last parts."""
    modules = backbone.model.named_modules()
    if target in ("embedding", "ffn", "attention"):
        chosen = {id(module) for module in _site_modules(target, backbone)}
        paths = [path for path, module in modules if id(module) in chosen]
    else:
        paths = [path for path, _ in modules if f".{path}".endswith(f".{target}")]
    if not paths:
        raise GraftError(
            f"The expert {name} is to change {target!r}, but {backbone.name} has no such module: name attention, ffn, "
            f"embedding, or one of {', '.join(_linear_names(backbone))}."
        )
    return paths


def _site_modules(target: str, backbone: Backbone) -> list[nn.Module]:
    """Return the linear modules of a kind of site in all layers, or the embedding."""
    sites = backbone.sites
    if target == "embedding":
        return [sites.module(Site("embedding"))[0]]
    chosen: list[nn.Module] = []
    for layer in range(sites.n_layers):
        if target == "ffn":
            chosen += sites.ffn_linears(layer)
            continue
        for module in sites.module(Site("attention", layer)):
            chosen += [child for child in module.modules() if _is_linear(child)]
    return chosen


def _linear_names(backbone: Backbone) -> list[str]:
    """Return the last parts of the names of the linear modules of a layer."""
    layer = backbone.sites.layers[0]
    names = {path.rpartition(".")[2] for path, module in layer.named_modules() if _is_linear(module)}
    return sorted(names)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def write_adapter(factors: Mapping[str, Factors], folder: Path, backbone: Backbone) -> Path:
    """Write an expert in the format of PEFT.

    Args:
        factors: factors by module path, of at least one module.
        folder: folder to write to; it is created if it does not exist.
        backbone: the backbone of the routing.

    Returns:
        The folder.
    """
    tensors = {}
    for path, expert in factors.items():
        is_embedding = ExpertTarget.of(backbone.model.get_submodule(path), path).is_embedding
        suffix = "embedding_{}" if is_embedding else "{}.weight"
        key = f"base_model.model.{path}.lora_{suffix}"
        tensors[key.format("A")] = expert.a.detach().cpu().contiguous()
        tensors[key.format("B")] = expert.b.detach().cpu().T.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    _lora_config(factors, backbone).save_pretrained(str(folder))
    return folder


def _lora_config(factors: Mapping[str, Factors], backbone: Backbone) -> LoraConfig:
    """Return the config of PEFT for an expert; the largest rank and alpha are its defaults."""
    ranks = {path: len(expert.a) for path, expert in factors.items()}
    alphas = {path: expert.scale * ranks[path] for path, expert in factors.items()}
    max_rank = max(ranks.values())
    max_alpha = max(alphas.values())
    return LoraConfig(
        r=max_rank,
        lora_alpha=max_alpha,  # type: ignore[arg-type]  # PEFT takes fractions as well
        target_modules=sorted(ranks),
        rank_pattern={re.escape(path): rank for path, rank in ranks.items() if rank != max_rank},
        alpha_pattern={re.escape(path): alpha for path, alpha in alphas.items() if alpha != max_alpha},
        base_model_name_or_path=backbone.name,
        inference_mode=True,
    )
