"""Experts that are read from PEFT folders, after a check that they are plain LoRA of the backbone.

`adapters.yaml` lists which adapters are plain LoRA, and what to do with the others.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor, nn

from graftlm.backbone import Backbone
from graftlm.config import read_yaml
from graftlm.errors import ArtifactError, WrongBackboneError, first_line, shorten
from graftlm.files.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    preparation,
    read_adapter_config,
    saved_ends,
)
from graftlm.files.digests import file_digest
from graftlm.files.hub import fetch_folder
from graftlm.files.model_files import named_model
from graftlm.grafts.token_routing.config import ExpertConfig
from graftlm.grafts.token_routing.experts import ExpertTarget, Factors, base_module

_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?:embedding_(?P<embedding>[AB])|(?P<linear>[AB])\.weight)")
_KEY_PREFIX = "base_model.model."
_CHOOSE_NO_MODULES = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "peft_version",
)
_TARGETS: WeakKeyDictionary[nn.Module, dict[str, frozenset[str]]] = WeakKeyDictionary()
"""The modules to which PEFT gives factors, by backbone and by what an adapter's config has to say about them."""


def _by_name(remedies: Mapping[str, str]) -> dict[str, str]:
    """Invert a table of names by remedy."""
    return {name: remedy for remedy, names in remedies.items() for name in names.split()}


_ADAPTERS = read_yaml(Path(__file__).with_name("adapters.yaml"))
PLAIN_FIELDS = frozenset(_ADAPTERS["plain_fields"].split())
"""Fields of `LoraConfig` that may have any value."""
_PLAIN_INITS = frozenset(_ADAPTERS["plain_inits"].split())
_REMEDY_BY_TYPE = _by_name(_ADAPTERS["types"])
_REMEDY_BY_INIT = _by_name(_ADAPTERS["inits"])


def read_adapter(name: str, config: ExpertConfig, backbone: Backbone | None) -> tuple[dict[str, Factors], str]:
    """Read an expert from the folder of a PEFT adapter.

    Args:
        name: name of the expert, for error messages.
        config: path of the adapter, and the SHA-256 that its tensor file must have, if any.
        backbone: the backbone of the routing; None checks what can be checked without one, and returns no factors.

    Returns:
        The factors by module path, and the SHA-256 of the tensor file.

    Raises:
        ArtifactError: the adapter is damaged, pickled, not plain LoRA, or not the one that the config names.
        WrongBackboneError: the adapter belongs to another backbone.
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
    factors = {}
    for path, pair in pairs.items():
        factors[path] = _checked_factors(name, path, pair, peft_config, backbone)
    _check_targets(name, folder, peft_config, pairs, backbone)
    _warn_of_other_base(name, peft_config, backbone)
    return factors, digest


def parse_factors(name: str, folder: Path, data: bytes, scales: Mapping[str, float]) -> dict[str, Factors]:
    """Return the factors in the bytes of an adapter's tensor file, which `read_adapter` has checked before.

    Args:
        name: name of the expert, for error messages.
        folder: folder of the adapter, for error messages.
        data: the bytes of the file.
        scales: factor of the update at each module, by path.

    Returns:
        The factors by module path, on the CPU.

    Raises:
        ArtifactError: the bytes are no safetensors file, or a factor is missing.
    """
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise _unreadable_tensors(name, folder, error) from None
    pairs = _pair_factors(name, folder, tensors, None)
    return {path: Factors(pair["A"], pair["B"].T.contiguous(), scales[path]) for path, pair in pairs.items()}


def _warn_of_other_base(name: str, peft_config: LoraConfig, backbone: Backbone) -> None:
    """Warn if the adapter names another base than the backbone."""
    base = named_model(peft_config.base_model_name_or_path or "")
    if not base:
        return
    # Only the last parts are compared, because folders are moved, but rarely renamed.
    if Path(base).name.lower() != Path(backbone.name).name.lower():
        warnings.warn(
            f"The expert {name} was trained on {base}, but the backbone is {backbone.name}, whose shapes are the same: "
            "use an adapter of this backbone, unless the backbone has only been renamed.",
            stacklevel=3,
        )


# The config


def _read_config(name: str, folder: Path) -> LoraConfig:
    """Read the config of an adapter; raises `ArtifactError` unless the adapter is plain LoRA."""
    values = read_adapter_config(folder, f"expert {name}")
    kind = values.get("peft_type")
    if kind != "LORA":
        remedy = _remedy(_REMEDY_BY_TYPE.get(str(kind), "train"), folder)
        found = "no peft_type" if kind is None else f"the peft_type {kind}"
        raise ArtifactError(f"The expert {name} in {folder} has {found}, but LORA is expected: {remedy}.")
    _check_variants(name, folder, values)
    _check_initialization(name, folder, values)
    known = {key: value for key, value in values.items() if key in LoraConfig.__dataclass_fields__}
    try:
        for patterns in _patterns(values):
            for pattern in patterns:
                re.compile(pattern)
        _check_types(name, folder, values)
        return LoraConfig(**known)
    except (TypeError, ValueError, re.error) as error:
        raise _unreadable(name, folder, error) from None


def _check_variants(name: str, folder: Path, values: Mapping[str, object]) -> None:
    """Raise `ArtifactError` if a field is set that makes the update another one than s B A x."""
    default = LoraConfig()
    for key in (*_ADAPTERS["variants"], *values):
        if not values.get(key) or key in PLAIN_FIELDS:
            continue
        if key not in LoraConfig.__dataclass_fields__:
            raise ArtifactError(
                f"The expert {name} in {folder} has the setting {key} = {shorten(repr(values[key]))}, which the "
                f"installed peft {version('peft')} does not have: upgrade peft, or {_remedy('train', folder)}."
            )
        if values[key] != getattr(default, key):
            unknown = ("a setting that GraftLM does not support", "train")
            variant, remedy = _ADAPTERS["variants"].get(key, unknown)
            raise _unmixable(name, folder, f"{variant} ({key})", remedy)


def _check_initialization(name: str, folder: Path, values: Mapping[str, object]) -> None:
    """Raise `ArtifactError` if the initialization may have changed the base's weights."""
    init = values.get("init_lora_weights", True)
    init_name = str(init).lower()
    if init_name in _PLAIN_INITS:
        return
    remedy = "train"
    for start, start_remedy in _REMEDY_BY_INIT.items():
        if init_name.startswith(start):
            remedy = start_remedy
            break
    variant = f"an initialization that may have changed the base's weights (init_lora_weights={init})"
    raise _unmixable(name, folder, variant, remedy)


def _patterns(values: Mapping[str, Any]) -> list[dict[str, object]]:
    """Return the rank and the alpha of modules, by regular expressions."""
    return [dict(values.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")]


def _check_types(name: str, folder: Path, values: Mapping[str, object]) -> None:
    """Raise `ArtifactError` if a value that determines the factors' weights has a wrong type or size."""
    ranks, alphas = _patterns(values)
    numbers = {
        "r": [values.get("r", 8)],
        "lora_alpha": [values.get("lora_alpha", 8)],
        "rank_pattern": list(ranks.values()),
        "alpha_pattern": list(alphas.values()),
    }
    wrong: list[tuple[str, object, str]] = []
    for key, found in numbers.items():
        wrong += [(key, value, "a number below 1e9") for value in found if not _is_number(value)]
    targets = values.get("target_modules")
    if isinstance(targets, list):
        wrong += [("target_modules", target, "a name") for target in targets if not isinstance(target, str)]
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        wrong.append(("base_model_name_or_path", base, "a name"))
    if wrong:
        key, value, expected = wrong[0]
        problem = f"{key} contains {shorten(repr(value))}, but {expected} is expected"
        raise _unreadable(name, folder, ValueError(problem))


def _is_number(value: object) -> bool:
    """Return whether a value is a number of a size that a rank or an alpha can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _unreadable(name: str, folder: Path, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"{folder / ADAPTER_CONFIG} is not a valid config of the expert {name} ({first_line(error)}): copy the expert "
        "again with its config."
    )


def _unmixable(name: str, folder: Path, variant: str, remedy: str = "train") -> ArtifactError:
    """Return an error for an adapter that is not plain LoRA.

    Args:
        name: name of the expert.
        folder: folder of the adapter.
        variant: what makes it another method.
        remedy: key of the remedy in `adapters.yaml`.
    """
    return ArtifactError(
        f"The expert {name} in {folder} has {variant}, which is not a sum of LoRA products: {_remedy(remedy, folder)}."
    )


def _remedy(key: str, folder: Path) -> str:
    remedy: str = _ADAPTERS["remedies"][key]
    statements = preparation(saved_ends(folder))
    if statements and "PeftModel" in remedy:
        remedy = f"prepare the model ({'; '.join(statements)}), and {remedy}"
    return remedy.replace("FOLDER", repr(str(folder)))


# The tensors


def _read_tensors(name: str, folder: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of an adapter, and the SHA-256 of their file."""
    path = folder / ADAPTER_TENSORS
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable_tensors(name, folder, error) from None
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(
                f"The tensor {key} of the expert {name} in {path} contains NaN or infinity: train the expert again."
            )
    return tensors, file_digest(path)


def _unreadable_tensors(name: str, folder: Path, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"{folder / ADAPTER_TENSORS} can't be read as a safetensors file ({first_line(error)}): copy the expert {name} "
        "again."
    )


def _pair_factors(
    name: str,
    folder: Path,
    tensors: Mapping[str, Tensor],
    backbone: Backbone | None,
) -> dict[str, dict[str, Tensor]]:
    """Return A (r, in) and B (out, r) by module path.

    PEFT saves copies of the backbone's tensors next to the factors of an embedding; they are left out. Without a
    backbone, all tensors that are not factors are assumed to be copies of the backbone's.

    Raises:
        ArtifactError: a tensor is neither a LoRA factor nor a copy of the backbone's, or a factor is missing.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    parameters: dict[str, nn.Parameter] = {}
    modules: dict[str, nn.Module] = {}
    if backbone is not None:
        parameters = dict(backbone.model.named_parameters(remove_duplicate=False))
        # Including modules inside another adapter.
        modules = {path: base_module(module) for path, module in backbone.model.named_modules()}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match:
            path = match["path"]
            is_embedding = match["embedding"] is not None
            if tensor.dim() != 2:
                raise _unmixable(name, folder, f"the tensor {key} {tuple(tensor.shape)}")
            if path in modules and is_embedding != isinstance(modules[path], nn.Embedding):
                raise _unmixable(name, folder, f"the tensor {key}, of another kind of layer")
            factor = match["embedding"] or match["linear"]
            pairs.setdefault(path, {})[factor] = tensor
        elif backbone is not None:
            _check_copy(name, folder, key, tensor, parameters)
    for path, pair in pairs.items():
        _check_pair(name, folder, path, pair)
    if not pairs:
        raise ArtifactError(f"The expert {name} in {folder} has no factors: copy it again.")
    return pairs


def _check_copy(
    name: str,
    folder: Path,
    key: str,
    tensor: Tensor,
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """Raise `ArtifactError` unless a tensor of an adapter is an equal copy of a parameter of the backbone."""
    path = key.removeprefix(_KEY_PREFIX).replace(".base_layer.", ".")
    inner_path = path.removesuffix(".weight") + ".base_layer.weight"
    own = parameters.get(path, parameters.get(inner_path))
    if own is not None and own.shape == tensor.shape:
        is_quantized = type(own.data) is not Tensor
        if not is_quantized and torch.equal(own.cpu(), tensor.to(own.dtype)):
            return
    raise ArtifactError(
        f"The expert {name} in {folder} has its own weights {path} of shape {tuple(tensor.shape)}, but only LoRA "
        "products can be mixed: save it with save_embedding_layers=False if they are a copy of the backbone's, or "
        f"{_remedy('train', folder)}."
    )


def _check_pair(name: str, folder: Path, path: str, pair: Mapping[str, Tensor]) -> None:
    """Raise `ArtifactError` unless both factors of a module exist and have the same rank."""
    missing = {"A", "B"} - pair.keys()
    if missing:
        raise ArtifactError(
            f"The expert {name} in {folder} lacks the factor {' and '.join(sorted(missing))} of {path}, but A and B "
            "are expected: copy the expert again."
        )
    rank = pair["A"].shape[0]
    other = pair["B"].shape[1]
    if rank != other or rank == 0:
        raise ArtifactError(
            f"The expert {name} in {folder} has factors of the ranks {rank} and {other} at {path}, but equal ranks "
            "above 0 are expected: copy the expert again."
        )


# The modules


def _check_targets(
    name: str,
    folder: Path,
    peft_config: LoraConfig,
    paths: Iterable[str],
    backbone: Backbone | None,
) -> None:
    """Raise `ArtifactError` unless the modules that have factors are those to which PEFT would give factors.

    PEFT silently ignores other factors, and initializes missing ones. Without a backbone, only the names in the config
    are compared.
    """
    found = set(paths)
    try:
        if backbone is not None:
            expected = _peft_targets(peft_config, backbone)
        elif _depends_on_model(peft_config):
            return
        else:
            expected = {path for path in found if check_target_module_exists(peft_config, path)}
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise _unreadable(name, folder, error) from None
    unnamed = sorted(found - expected)
    if unnamed:
        raise ArtifactError(
            f"The expert {name} in {folder} has factors of {unnamed[0]}, but its {ADAPTER_CONFIG} does not name that "
            "module: copy the expert again with its config."
        )
    lacking = sorted(expected - found)
    if lacking:
        raise ArtifactError(
            f"The expert {name} in {folder} lacks the factors of {lacking[0]}, which its {ADAPTER_CONFIG} names: copy "
            "it again."
        )


def _depends_on_model(peft_config: LoraConfig) -> bool:
    """Return whether the modules that a config names can only be found with the model."""
    targets = str(peft_config.target_modules).lower()
    return targets in ("none", "all-linear") or bool(peft_config.ensure_weight_tying)


def _peft_targets(peft_config: LoraConfig, backbone: Backbone) -> frozenset[str]:
    """Return the paths of the modules to which PEFT gives factors.

    They are found once for all adapters that differ only in what does not choose modules.
    """
    values = peft_config.to_dict()
    chosen = {key: value for key, value in values.items() if key not in _CHOOSE_NO_MODULES}
    key = json.dumps(
        chosen, sort_keys=True, default=lambda value: sorted(value) if isinstance(value, set) else str(value)
    )
    known = _TARGETS.setdefault(backbone.model, {})
    if key not in known:
        known[key] = frozenset(_find_targets(peft_config, backbone))
    return known[key]


def _find_targets(peft_config: LoraConfig, backbone: Backbone) -> set[str]:
    """Return the targets of `_peft_targets`, found on a copy of the model without weights."""
    model = backbone.model
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skeleton = type(model)(deepcopy(model.config))
        try:
            adapted: Any = get_peft_model(skeleton, deepcopy(peft_config), low_cpu_mem_usage=True)
        except ValueError:  # the model has none of the named modules
            return set()
    modules = adapted.base_model.model.named_modules()
    return {path for path, module in modules if isinstance(module, BaseTunerLayer)}


def _checked_factors(
    name: str,
    path: str,
    pair: Mapping[str, Tensor],
    peft_config: LoraConfig,
    backbone: Backbone,
) -> Factors:
    """Return the factors of a module; raises `WrongBackboneError` unless they fit the backbone's module."""
    a = pair["A"]
    b = pair["B"]
    rank = len(a)
    try:
        target = ExpertTarget.of(backbone.model.get_submodule(path), path)
    except AttributeError:
        reason = f"there is no module {path}"
    else:
        if (a.shape[1], b.shape[0], b.shape[1]) == (target.inputs, target.outputs, rank):
            scale = _scale(name, path, rank, peft_config)
            return Factors(a, b.T.contiguous(), scale)
        reason = f"{path} has {target.inputs} inputs and {target.outputs} outputs, not {a.shape[1]} and {b.shape[0]}"
    base = peft_config.base_model_name_or_path or "an unnamed base"
    raise WrongBackboneError(
        f"The expert {name} was trained on {base}, but in {backbone.name} {reason}: use adapters of this backbone."
    )


def _scale(name: str, path: str, rank: int, peft_config: LoraConfig) -> float:
    """Return PEFT's factor of the update of a module whose tensors have this rank."""
    named_rank = _value_for(path, peft_config.rank_pattern, peft_config.r)
    alpha = _value_for(path, peft_config.alpha_pattern, peft_config.lora_alpha)
    if named_rank != rank:
        raise ArtifactError(
            f"The expert {name} has tensors of rank {rank} at {path}, but its {ADAPTER_CONFIG} has rank "
            f"{named_rank!r}: copy the expert again with its config."
        )
    if not isinstance(alpha, int | float):
        raise ArtifactError(
            f"The {ADAPTER_CONFIG} of the expert {name} has alpha {alpha!r} for {path}, but a number is expected: copy "
            "the expert again with its config."
        )
    return alpha / (rank**0.5 if peft_config.use_rslora else rank)


def _value_for(path: str, patterns: Mapping[str, object] | None, default: object) -> object:
    """Return the value of the first pattern that matches a module's path, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default
