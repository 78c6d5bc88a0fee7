"""LoRA experts: read from PEFT folders, or initialised here.

The update of an expert at a module with input x is s B A x, with A (r, in), B (out, r) and s = alpha / r, or
s = alpha / sqrt(r) for rank-stabilised LoRA.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone, Site
from graftlm.backbone.modules import linear_sizes
from graftlm.config import read_yaml
from graftlm.errors import ArtifactError, GraftError, WrongBackboneError, first_line
from graftlm.files.adapter_config import ADAPTER_CONFIG, ADAPTER_TENSORS, read_adapter_config
from graftlm.files.digests import file_digest
from graftlm.files.hub import fetch_folder
from graftlm.files.model_files import named_model
from graftlm.grafts.token_routing.config import ExpertConfig

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_([AB])|([AB])\.weight)")
_ADAPTERS: dict[str, Any] = read_yaml(Path(__file__).with_name("adapters.yaml"))
PLAIN_FIELDS = frozenset(_ADAPTERS["plain_fields"].split())
_TYPES, _INITS = (
    {name: remedy for remedy, names in _ADAPTERS[key].items() for name in names.split()} for key in ("types", "inits")
)


@dataclass(frozen=True)
class Factors:
    """The LoRA factors of one expert at one module: A (r, in), B transposed (r, out), and s.

    For an embedding, in is the vocabulary size.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertTarget:
    """The sizes of a module that experts change; `scale` is what an embedding multiplies its output by."""

    inputs: int
    outputs: int
    is_embedding: bool = False
    scale: float = 1.0

    @classmethod
    def of(cls, module: nn.Module, path: str) -> ExpertTarget:
        """The sizes of a module. Raises GraftError if it is neither linear nor an embedding."""
        base = module.base_layer if isinstance(module, BaseTunerLayer) else module
        if isinstance(base, nn.Embedding):
            scale = getattr(base, "embed_scale", None)  # PEFT scales the update as well
            return cls(base.num_embeddings, base.embedding_dim, True, 1.0 if scale is None else float(scale))
        if sizes := linear_sizes(base):  # type: ignore[arg-type]  # a module, though PEFT does not say so
            return cls(*sizes)
        raise GraftError(
            f"An expert changes {path}, a {type(base).__name__}, but linear layers and embeddings are expected: "
            "train it on those."
        )


def read_adapter(name: str, config: ExpertConfig, backbone: Backbone | None) -> tuple[dict[str, Factors], str]:
    """An expert's factors by module path, and the SHA-256 of its tensor file; without a backbone, checks alone.

    Raises ArtifactError if the adapter is damaged, pickled, not plain LoRA, or not the one that the config names, and
    WrongBackboneError if it belongs to another backbone.
    """
    folder = fetch_folder(Path(config.path or "").expanduser(), ADAPTER_CONFIG)
    peft_config = _read_config(name, folder)
    tensors, digest = _read_tensors(name, folder)
    if config.sha256 not in (None, digest):
        raise ArtifactError(
            f"The expert {name} in {folder} is not the one that the graft was made with (its {ADAPTER_TENSORS} has "
            "another SHA-256): restore that adapter, or build the graft again."
        )
    pairs = _pair_factors(name, folder, tensors, backbone)
    if backbone is None:
        _check_targets(name, folder, peft_config, pairs, None)
        for path, pair in pairs.items():
            _scale(name, path, len(pair["A"]), peft_config)
        return {}, digest
    factors = {
        path: _checked_factors(name, path, pair["A"], pair["B"], peft_config, backbone) for path, pair in pairs.items()
    }
    _check_targets(name, folder, peft_config, pairs, backbone)
    base = named_model(peft_config.base_model_name_or_path or "")
    if base and Path(base).name.lower() != Path(backbone.name).name.lower():  # folders move, names stay
        warnings.warn(
            f"The expert {name} names {base} as its base, and the backbone is {backbone.name}: the shapes fit, but an "
            "adapter is valid only for the base it was trained on.",
            stacklevel=2,
        )
    return factors, digest


def new_factors(name: str, config: ExpertConfig, backbone: Backbone) -> dict[str, Factors]:
    """A new expert without effect: A initialised as in PEFT, B zero."""
    assert config.rank is not None
    scale = (config.alpha or config.rank) / config.rank
    factors = {}
    for target in config.targets:
        paths = _target_paths(target, backbone)
        if not paths:
            layer = backbone.sites.layers[0]
            linears = sorted({path.rpartition(".")[2] for path, module in layer.named_modules() if _is_linear(module)})
            raise GraftError(
                f"The expert {name} is to change {target!r}, and {backbone.name} has no such module: name attention, "
                f"ffn, embedding, or one of {', '.join(linears)}."
            )
        for path in paths:
            sizes = ExpertTarget.of(backbone.model.get_submodule(path), path)
            a = torch.empty(config.rank, sizes.inputs)
            nn.init.kaiming_uniform_(a, a=5**0.5)
            factors[path] = Factors(a, torch.zeros(config.rank, sizes.outputs), scale)
    return factors


def _target_paths(target: str, backbone: Backbone) -> list[str]:
    """The paths of the modules that a target names: a kind of site, a module's path, or its last parts."""
    sites = backbone.sites
    if target == "embedding":
        chosen = {id(sites.module(Site("embedding"))[0])}
    elif target == "ffn":
        chosen = {id(linear) for layer in range(sites.n_layers) for linear in sites.ffn_linears(layer)}
    elif target == "attention":
        spans = [sites.module(Site(target, layer)) for layer in range(sites.n_layers)]
        chosen = {id(child) for span in spans for module in span for child in module.modules() if _is_linear(child)}
    else:
        return [path for path, _ in backbone.model.named_modules() if f".{path}".endswith(f".{target}")]
    return [path for path, module in backbone.model.named_modules() if id(module) in chosen]


def write_adapter(factors: Mapping[str, Factors], folder: Path, backbone: Backbone) -> Path:
    """Write an expert in PEFT's format; returns the folder."""
    ranks = {path: len(expert.a) for path, expert in factors.items()}
    alphas = {path: expert.scale * ranks[path] for path, expert in factors.items()}
    max_rank, max_alpha = max(ranks.values()), max(alphas.values())
    config = LoraConfig(
        r=max_rank,
        lora_alpha=max_alpha,  # type: ignore[arg-type]  # PEFT takes fractions as well
        target_modules=sorted(ranks),
        rank_pattern={re.escape(path): rank for path, rank in ranks.items() if rank != max_rank},
        alpha_pattern={re.escape(path): alpha for path, alpha in alphas.items() if alpha != max_alpha},
        base_model_name_or_path=backbone.name,
        inference_mode=True,
    )
    tensors = {}
    for path, expert in factors.items():
        is_embedding = ExpertTarget.of(backbone.model.get_submodule(path), path).is_embedding
        key = f"base_model.model.{path}.lora_" + ("embedding_{}" if is_embedding else "{}.weight")
        tensors[key.format("A")] = expert.a.detach().cpu().contiguous()
        tensors[key.format("B")] = expert.b.detach().cpu().T.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    return folder


def _read_config(name: str, folder: Path) -> LoraConfig:
    values = read_adapter_config(folder, f"expert {name}")
    if (kind := values.get("peft_type")) != "LORA":
        remedy = _remedy(_TYPES.get(str(kind), "train"), folder)
        raise ArtifactError(f"The expert {name} in {folder} is of the type {kind}, but LORA is expected: {remedy}.")
    default = LoraConfig()
    for key in (key for key in (*_ADAPTERS["variants"], *values) if values.get(key) and key not in PLAIN_FIELDS):
        if key not in LoraConfig.__dataclass_fields__:
            raise _unmixable(name, folder, f"the unknown setting {key}", "train", "upgrade peft, or ")
        if values[key] != getattr(default, key):
            variant, remedy = _ADAPTERS["variants"].get(key, ("a setting that GraftLM does not know", "train"))
            raise _unmixable(name, folder, f"{variant} ({key})", remedy)
    init = values.get("init_lora_weights", True)
    if str(init).lower() not in _ADAPTERS["plain_inits"].split():
        remedies = (remedy for start, remedy in _INITS.items() if str(init).lower().startswith(start))
        variant = f"an initialisation that may have changed the base's weights (init_lora_weights={init})"
        raise _unmixable(name, folder, variant, next(remedies, "train"))
    known = {key: value for key, value in values.items() if key in LoraConfig.__dataclass_fields__}
    try:
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in dict(values.get(key) or {}):
                re.compile(pattern)
        _check_types(name, folder, values)
        return LoraConfig(**known)
    except (TypeError, ValueError, re.error) as error:
        raise _unreadable(name, folder, error) from None


def _check_types(name: str, folder: Path, values: Mapping[str, Any]) -> None:
    """Raise an `ArtifactError` if a value that the factors' weights follow from is of a wrong type."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9

    patterns = [value for key in ("rank_pattern", "alpha_pattern") for value in dict(values.get(key) or {}).values()]
    numbers = [values.get("r", 8), values.get("lora_alpha", 8), *patterns]
    wrong = [value for value in numbers if not is_number(value)]
    named = values.get("target_modules")
    wrong += [part for part in (named if isinstance(named, list) else []) if not isinstance(part, str)]
    wrong += [base] if not isinstance(base := values.get("base_model_name_or_path"), str | None) else []
    if wrong:
        raise _unreadable(name, folder, ValueError(f"{str(wrong[0])[:40]} is of a wrong type or size"))


def _unreadable(name: str, folder: Path, error: Exception) -> ArtifactError:
    return ArtifactError(f"{folder / ADAPTER_CONFIG} can't be read ({error}): copy the expert again with its config.")


def _unmixable(name: str, folder: Path, variant: str, remedy: str = "train", before: str = "") -> ArtifactError:
    remedy = before + _remedy(remedy, folder)
    return ArtifactError(f"The expert {name} in {folder} has {variant}, which is not a sum of LoRA products: {remedy}.")


def _remedy(remedy: str, folder: Path) -> str:
    return _ADAPTERS["remedies"][remedy].replace("FOLDER", repr(str(folder)))


def _read_tensors(name: str, folder: Path) -> tuple[dict[str, Tensor], str]:
    path = folder / ADAPTER_TENSORS
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is not a whole safetensors file ({first_line(error)}): copy the expert {name} again."
        ) from None
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(f"The tensor {key} of the expert {name} holds NaN or infinity: train it again.")
    return tensors, file_digest(path)


def _pair_factors(
    name: str, folder: Path, tensors: Mapping[str, Tensor], backbone: Backbone | None
) -> dict[str, dict[str, Tensor]]:
    """A (r, in) and B (out, r) by module path, without the backbone's tensors, which PEFT saves beside an embedding's.

    Without a backbone, all other tensors are taken for its own.

    Raises ArtifactError if a tensor is neither a LoRA factor nor a copy of the backbone's, or a factor is missing.
    """
    parameters = dict(backbone.model.named_parameters(remove_duplicate=False)) if backbone else {}
    named = backbone.model.named_modules() if backbone else ()  # those below another adapter included
    modules = {
        path: module.base_layer if isinstance(module, BaseTunerLayer) else module  # type: ignore[misc]  # PEFT has no type
        for path, module in named
    }
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _KEY.fullmatch(key):
            if tensor.dim() != 2:
                raise _unmixable(name, folder, f"the tensor {key} {tuple(tensor.shape)}")
            if match[1] in modules and bool(match[2]) != isinstance(modules[match[1]], nn.Embedding):
                raise _unmixable(name, folder, f"the tensor {key}, of another kind of layer")
            pairs.setdefault(match[1], {})[match[2] or match[3]] = tensor
            continue
        if backbone is None:
            continue  # only a backbone tells
        path = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        own = parameters.get(path, parameters.get(path.removesuffix(".weight") + ".base_layer.weight"))
        is_plain = own is not None and own.shape == tensor.shape and type(own.data) is Tensor  # not quantised
        if own is None or not is_plain or not torch.equal(own.cpu(), tensor.to(own.dtype)):
            before = "save it with save_embedding_layers=False if this is a copy of the backbone's, or "
            raise _unmixable(name, folder, f"weights {path} of its own {tuple(tensor.shape)}", before=before)
    for path, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise ArtifactError(f"The expert {name} in {folder} lacks a factor of {path}: copy it again.")
        rank, other = pair["A"].shape[0], pair["B"].shape[1]
        if rank != other or not rank:
            raise ArtifactError(
                f"The expert {name} in {folder} has factors of the ranks {rank} and {other} at {path}, and one rank "
                "above 0 is expected: copy it again."
            )
    if not pairs:
        raise ArtifactError(f"The expert {name} in {folder} has no factors: copy it again.")
    return pairs


def _check_targets(
    name: str, folder: Path, peft_config: LoraConfig, paths: Iterable[str], backbone: Backbone | None
) -> None:
    """Raise an `ArtifactError` unless the modules that have factors are those that PEFT would give them to.

    PEFT leaves out other factors in silence, and makes new ones where they lack. Without a backbone, only the names in
    the config are compared.
    """
    try:
        if backbone is not None:
            expected = _peft_targets(peft_config, backbone)
        elif str(peft_config.target_modules).lower() in ("none", "all-linear") or peft_config.ensure_weight_tying:
            return  # only a model tells
        else:
            expected = {path for path in paths if check_target_module_exists(peft_config, path)}
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise _unreadable(name, folder, error) from None
    if unnamed := sorted({*paths} - expected):
        raise ArtifactError(
            f"The expert {name} in {folder} has factors of {unnamed[0]}, and its {ADAPTER_CONFIG} does not name that "
            "module: copy the expert again with its config."
        )
    if lacking := sorted(expected - {*paths}):
        raise ArtifactError(
            f"The expert {name} in {folder} lacks the factors of {lacking[0]}, which its {ADAPTER_CONFIG} names: copy "
            "it again."
        )


def _peft_targets(peft_config: LoraConfig, backbone: Backbone) -> set[str]:
    """The paths of the modules that PEFT gives factors, found on a copy of the model without weights."""
    model: Any = backbone.model
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skeleton = type(model)(deepcopy(model.config))
        try:
            adapted: Any = get_peft_model(skeleton, deepcopy(peft_config), low_cpu_mem_usage=True)
        except ValueError:  # none of the named modules is there
            return set()
    modules = adapted.base_model.model.named_modules()
    return {path for path, module in modules if isinstance(module, BaseTunerLayer)}


def _checked_factors(
    name: str, path: str, a: Tensor, b: Tensor, peft_config: LoraConfig, backbone: Backbone
) -> Factors:
    rank = len(a)
    try:
        target = ExpertTarget.of(backbone.model.get_submodule(path), path)
    except AttributeError:
        reason = f"there is no module {path}"
    else:
        if (a.shape[1], b.shape[0], b.shape[1]) == (target.inputs, target.outputs, rank):
            return Factors(a, b.T.contiguous(), _scale(name, path, rank, peft_config))
        reason = f"{path} has {target.inputs} inputs and {target.outputs} outputs, not {a.shape[1]} and {b.shape[0]}"
    base = peft_config.base_model_name_or_path or "an unnamed base"
    raise WrongBackboneError(
        f"The expert {name} was trained on {base}, and in {backbone.name} {reason}: use adapters of this backbone."
    )


def _scale(name: str, path: str, rank: int, peft_config: LoraConfig) -> float:
    """PEFT's factor of a module's update, whose tensors have this rank."""
    named, alpha = (
        next((value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", path)), default)
        for patterns, default in (
            (peft_config.rank_pattern, peft_config.r),
            (peft_config.alpha_pattern, peft_config.lora_alpha),
        )
    )
    if named != rank or not isinstance(alpha, int | float):
        raise ArtifactError(
            f"The expert {name} has tensors of rank {rank} at {path}, and its {ADAPTER_CONFIG} says rank {named!r} and "
            f"alpha {alpha!r}: copy the expert again with its config."
        )
    return alpha / (rank**0.5 if peft_config.use_rslora else rank)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)
