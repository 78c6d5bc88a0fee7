"""LoRA experts: read from the folders that PEFT writes, or new.

The update of an expert at a module with input x is  s B A x,  with A (r, in), B (out, r) and s = alpha / r, or
alpha / sqrt(r) for rank-stabilised LoRA.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone, Site
from graftlm.errors import ArtifactError, GraftError, WrongBackboneError
from graftlm.grafts.token_routing.config import ExpertConfig

CONFIG_NAME, TENSORS_NAME, PICKLE_NAME = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
# Of a LoraConfig: what makes an adapter something else than s B A x on some modules.
_VARIANTS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias in B",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "modules_to_save": "whole modules beside the factors",
    "trainable_token_indices": "trained rows of the embedding",
    "layer_replication": "replicated layers",
    "target_parameters": "parameters instead of modules",
}
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Factors:
    """One expert at one module.

    Attributes:
        a: (r, in); for an embedding, in is the number of tokens.
        b: (r, out), B transposed.
        scale: s.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Place:
    """A module that an expert can change."""

    inputs: int
    outputs: int
    embedding: bool = False
    scale: float = 1.0


def place_of(module: nn.Module, path: str) -> Place:
    """The sizes of a module.

    Raises:
        GraftError: it is neither linear nor an embedding.
    """
    bare = module.base_layer if isinstance(module, BaseTunerLayer) else module
    if isinstance(bare, nn.Embedding):
        scale = getattr(bare, "embed_scale", None)  # as PEFT does for embeddings that scale what they give
        return Place(bare.num_embeddings, bare.embedding_dim, True, 1.0 if scale is None else float(scale))
    if isinstance(bare, Conv1D):
        return Place(int(bare.weight.shape[0]), int(bare.nf))
    if hasattr(bare, "in_features") and hasattr(bare, "out_features"):
        return Place(int(bare.in_features), int(bare.out_features))  # type: ignore[arg-type]  # any library's Linear
    raise GraftError(
        f"An expert changes {path}, a {type(bare).__name__}, but linear layers and embeddings are expected: "
        "train it on those."
    )


def read_adapter(name: str, config: ExpertConfig, backbone: Backbone) -> tuple[dict[str, Factors], str]:
    """An expert's factors by module path, and the SHA-256 of its tensor file.

    Raises:
        ArtifactError: the folder is no whole LoRA adapter, is pickled, or is of a variant that can't be mixed.
        WrongBackboneError: it was trained on another backbone.
    """
    folder = Path(config.path or "").expanduser()
    peft = _read_config(name, folder)
    tensors, digest = _read_tensors(name, folder)
    if config.sha256 not in (None, digest):
        raise ArtifactError(
            f"The expert {name} in {folder} is not the one that the graft was made with (its {TENSORS_NAME} has "
            "another SHA-256): put that one back, or make the graft anew."
        )
    base = str(peft.base_model_name_or_path or "a base that it does not name")
    factors = {key: one for key, one in tensors.items() if not _is_a_copy(name, folder, key, one, backbone)}
    found = {
        path: _factors(name, path, a, b, peft, base, backbone) for path, (a, b) in _pairs(name, folder, factors).items()
    }
    _compare_names(name, base, backbone)
    return found, digest


def new_factors(name: str, config: ExpertConfig, backbone: Backbone) -> dict[str, Factors]:
    """A new expert, which changes nothing yet: A as PEFT starts it, B zero.

    Raises:
        GraftError: the backbone has no module of one of the names.
    """
    assert config.rank is not None
    scale = (config.alpha or config.rank) / config.rank
    found = {}
    for target in config.targets:
        paths = _paths_of(target, backbone)
        if not paths:
            raise GraftError(
                f"The expert {name} is to change {target!r}, and {backbone.name} has no such module: name attention, "
                f"ffn, embedding, or one of {', '.join(_names_of_linears(backbone))}."
            )
        for path in paths:
            place = place_of(backbone.model.get_submodule(path), path)
            a = torch.empty(config.rank, place.inputs)
            nn.init.kaiming_uniform_(a, a=5**0.5)
            found[path] = Factors(a, torch.zeros(config.rank, place.outputs), scale)
    return found


def _paths_of(target: str, backbone: Backbone) -> list[str]:
    """The modules that a word names: a kind of site, a module's path, or its path's last parts."""
    sites = backbone.sites
    if target == "embedding":
        chosen = {id(sites.module(Site("embedding"))[0])}
    elif target in ("attention", "ffn"):
        spans = [sites.module(Site(target, layer)) for layer in range(sites.n_layers)]
        ffn = {id(one) for layer in range(sites.n_layers) for one in sites.ffn_linears(layer)}
        inside = {id(one) for span in spans for module in span for one in module.modules() if _is_linear(one)}
        chosen = ffn if target == "ffn" else inside
    else:
        return [path for path, _ in backbone.model.named_modules() if f".{path}".endswith(f".{target}")]
    return [path for path, module in backbone.model.named_modules() if id(module) in chosen]


def write_adapter(factors: Mapping[str, Factors], folder: Path, base: str) -> Path:
    """Write an expert as PEFT does; gives the folder."""
    ranks = {path: found.a.shape[0] for path, found in factors.items()}
    alphas = {path: found.scale * ranks[path] for path, found in factors.items()}
    most, alpha = max(ranks.values()), max(alphas.values())
    config = LoraConfig(
        r=most,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT takes fractions as well
        target_modules=sorted(ranks),
        rank_pattern={re.escape(path): rank for path, rank in ranks.items() if rank != most},
        alpha_pattern={re.escape(path): one for path, one in alphas.items() if one != alpha},
        base_model_name_or_path=base,
        inference_mode=True,
    )
    tensors = {}
    for path, found in factors.items():
        key = f"base_model.model.{path}.lora_"
        tensors[f"{key}A.weight"] = found.a.detach().cpu().contiguous()
        tensors[f"{key}B.weight"] = found.b.detach().cpu().T.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    return folder


def _read_config(name: str, folder: Path) -> LoraConfig:
    path = folder / CONFIG_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"The expert {name} has no {CONFIG_NAME} in {folder}: name a folder that PEFT's save_pretrained wrote."
        ) from None
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise ArtifactError(f"{path} is not readable JSON, so the expert {name} is damaged: copy it again.") from None
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        kind = values.get("peft_type") if isinstance(values, dict) else type(values).__name__
        raise ArtifactError(f"The expert {name} in {folder} is of the type {kind}, but LORA is expected.")
    known = {key: value for key, value in values.items() if key in LoraConfig.__dataclass_fields__}
    for key, variant in _VARIANTS.items():
        if values.get(key):
            raise _unmixable(name, folder, f"{variant} ({key})", "train it as plain LoRA")
    if foreign := [key for key in values if key not in known and values[key]]:
        raise _unmixable(name, folder, f"the unknown setting {foreign[0]}", "upgrade peft, or train it as plain LoRA")
    if known.get("bias", "none") != "none":
        raise _unmixable(name, folder, f"biases (bias={known['bias']})", "train it with bias='none'")
    if str(known.get("init_lora_weights")).lower().startswith(_CHANGED_BASES):
        start = known["init_lora_weights"]
        raise _unmixable(
            name,
            folder,
            f"a start that changed the base's weights (init_lora_weights={start})",
            "convert it with save_pretrained(path_initial_model_for_weight_conversion=…)",
        )
    try:
        return LoraConfig(**known)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{path} can't be read ({error}): copy the expert {name} again.") from None


def _unmixable(name: str, folder: Path, variant: str, remedy: str) -> ArtifactError:
    return ArtifactError(
        f"The expert {name} in {folder} has {variant}, which is no sum of products that could be mixed: {remedy}."
    )


def _read_tensors(name: str, folder: Path) -> tuple[dict[str, Tensor], str]:
    path = folder / TENSORS_NAME
    if not path.exists():
        pickled = (folder / PICKLE_NAME).exists()
        found = f"only a pickled {PICKLE_NAME}, which is never read" if pickled else f"no {TENSORS_NAME}"
        remedy = "save it again with safe_serialization=True" if pickled else "copy it again"
        raise ArtifactError(f"The expert {name} in {folder} has {found}: {remedy}.")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is not a whole safetensors file ({str(error).splitlines()[0]}): copy the expert {name} again."
        ) from None
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ArtifactError(f"The tensor {key} of the expert {name} holds NaN or infinity: train it again.")
    return tensors, hashlib.sha256(path.read_bytes()).hexdigest()


def _is_a_copy(name: str, folder: Path, key: str, tensor: Tensor, backbone: Backbone) -> bool:
    """Whether a tensor is the backbone's own, which PEFT saves beside the factors of embeddings.

    Raises:
        ArtifactError: it stands for one of the backbone's, and is another.
    """
    if _KEY.fullmatch(key):
        return False
    path = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
    own = dict(backbone.model.named_parameters(remove_duplicate=False))
    live = own.get(path, own.get(path.removesuffix(".weight") + ".base_layer.weight"))
    if live is not None and live.shape == tensor.shape and torch.equal(live.cpu(), tensor.to(live.dtype)):
        return True
    raise _unmixable(name, folder, f"weights {path} of its own {tuple(tensor.shape)}", "train it as plain LoRA")


def _pairs(name: str, folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B as PEFT keeps them, by module path; those of embeddings turned to (r, tokens) and (out, r)."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise _unmixable(name, folder, f"the tensor {key} {tuple(tensor.shape)}", "train it as plain LoRA")
        halves.setdefault(match[1], {})[match[3]] = tensor
    for path, found in halves.items():
        if found.keys() != {"A", "B"}:
            raise ArtifactError(f"The expert {name} in {folder} lacks a factor of {path}: copy it again.")
    if not halves:
        raise ArtifactError(f"The expert {name} in {folder} has no factors at all: copy it again.")
    return {path: (found["A"], found["B"]) for path, found in halves.items()}


def _factors(name: str, path: str, a: Tensor, b: Tensor, peft: LoraConfig, base: str, backbone: Backbone) -> Factors:
    try:
        place = place_of(backbone.model.get_submodule(path), path)
    except AttributeError:
        raise _of_another(name, base, backbone, f"there is no module {path}") from None
    rank = a.shape[0]
    if (a.shape[1], b.shape[0]) != (place.inputs, place.outputs) or b.shape[1] != rank:
        raise _of_another(
            name,
            base,
            backbone,
            f"{path} takes {place.inputs} and gives {place.outputs} numbers, not {a.shape[1]} and {b.shape[0]}",
        )
    return Factors(a, b.T.contiguous(), _scale(path, rank, peft))


def _scale(path: str, rank: int, peft: LoraConfig) -> float:
    """s, as PEFT computes it: patterns match the end of a module's path."""
    alpha = next(
        (value for key, value in (peft.alpha_pattern or {}).items() if re.match(rf"(.*\.)?({key})$", path)),
        peft.lora_alpha,
    )
    return alpha / (rank**0.5 if peft.use_rslora else rank)


def _of_another(name: str, base: str, backbone: Backbone, why: str) -> WrongBackboneError:
    return WrongBackboneError(
        f"The expert {name} was trained on {base}, and in {backbone.name} {why}: name adapters of this backbone."
    )


def _compare_names(name: str, base: str, backbone: Backbone) -> None:
    """Warn of an adapter that fits but names another base; folders move, so it may be the same one."""
    own, other = (Path(one).name.lower() for one in (backbone.name, base))
    if own != other and not base.startswith("a base"):
        warnings.warn(
            f"The expert {name} names {base} as its base, and the backbone is {backbone.name}: its shapes fit, but "
            "what it learned holds for its own base alone.",
            stacklevel=2,
        )


def _names_of_linears(backbone: Backbone) -> list[str]:
    layer = backbone.sites.layers[0]
    return sorted({path.rpartition(".")[2] for path, module in layer.named_modules() if _is_linear(module)})


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)
