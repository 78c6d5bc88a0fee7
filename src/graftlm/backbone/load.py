"""Load a backbone by its name on the hub, from a folder or from a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from graftlm.backbone.families import FAMILIES, register_family
from graftlm.config import Config
from graftlm.errors import BackboneError, first_line
from graftlm.files.model_files import ModelFiles, find_model
from graftlm.models import register

# transformers' models take seconds to import, so functions import them.
if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
from graftlm.backbone.backbone import Backbone, BackboneKind, _sites, default_device
from graftlm.backbone.fingerprint import fingerprint
from graftlm.backbone.formats import _read_once

_LOADERS: dict[BackboneKind, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "encoder": "AutoModel",
}


def load_backbone(
    name: str | Path,
    *,
    kind: BackboneKind = "causal-lm",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    tokenizer_required: bool = True,
    family: str | Mapping[str, Any] | None = None,
) -> Backbone:
    """Load a model and its tokenizer: by a name on the Hugging Face hub, from a folder, or from a GGUF file.

    Weights of a GGUF file are dequantised: the model is a plain one in `dtype`, and needs the memory of one.

    Args:
        name: the name, the folder, the file's path (or OWNER/REPOSITORY/FILE.gguf), or `smollm2-135m-instruct`, which
            the extra smollm2 brings.
        dtype: `auto` keeps the checkpoint's.
        device: where to put the model; None leaves it on the CPU.
        trust_remote_code: run model code that comes with the checkpoint.
        tokenizer_required: raise here, rather than when text is read, where the tokenizer is missing.
        family: where the architecture keeps its parts, as `register_family` takes it; None where GraftLM knows.

    Raises BackboneError if the model does not exist, its files are broken or pickled, or the tokenizer is missing, and
    MissingExtraError for a GGUF file without the package gguf, and UnknownFamilyError before any weights are loaded if
    its architecture has an unknown structure.
    """
    if kind not in _LOADERS:
        raise BackboneError(f"There is no kind of backbone {kind!r}: give one of {', '.join(_LOADERS)}.")
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not isinstance(named, torch.dtype):
        raise BackboneError(f"There is no dtype {dtype!r}: give auto, float32, bfloat16 or float16.")
    files = find_model(name := str(name))
    with _read_once() if files.gguf_file else nullcontext():
        _check_structure(files, kind, trust_remote_code, family)
        model = _load_model(name, files, kind, dtype, trust_remote_code)
        tokenizer = load_tokenizer(name, files, trust_remote_code=trust_remote_code)
    backbone = Backbone.wrap(model, tokenizer, name, kind)
    if device is not None:
        backbone.move(device)
    if tokenizer_required:
        backbone.need_tokenizer()
    return backbone


def _empty_model(files: ModelFiles, kind: BackboneKind, trust_remote_code: bool) -> tuple[Any, Any]:
    """A model's config, and the model without weights."""
    import transformers

    register()
    options = files.options | {"trust_remote_code": trust_remote_code}
    config = transformers.AutoConfig.from_pretrained(files.source, **options)
    with torch.device("meta"):
        return config, getattr(transformers, _LOADERS[kind]).from_config(config, trust_remote_code=trust_remote_code)


def inspect_model(
    name: str, kind: BackboneKind, *, dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[int, str]:
    """The bytes of a model's weights, and its fingerprint's architecture; 0 and "" where its config doesn't tell."""
    named = getattr(torch, dtype, None)
    try:
        config, model = _empty_model(find_model(name), kind, trust_remote_code)
    except Exception:  # loading the weights says what is wrong
        return 0, ""
    packed = getattr(config, "quantization_config", None) is not None
    size = sum(tensor.numel() * (named or tensor.dtype).itemsize for tensor in model.parameters())
    return 0 if packed else size, fingerprint(model).architecture


def served_kind(name: str, *, trust_remote_code: bool = False, **_: Any) -> BackboneKind:
    """`encoder` for a model whose masked tokens are predicted from both sides; else, or if unknown, `causal-lm`."""
    import transformers

    register()
    try:
        if (files := find_model(name)).gguf_file:  # slow to read, and decoders
            return "causal-lm"
        config: Any = transformers.AutoConfig.from_pretrained(files.source, trust_remote_code=trust_remote_code)
    except Exception:  # loading the weights says what is wrong
        return "causal-lm"
    family, decodes = FAMILIES.get(config.model_type), config.is_encoder_decoder or getattr(config, "is_decoder", False)
    encodes = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not decodes
    return "encoder" if encodes and not (family and family.causal) else "causal-lm"


def _check_structure(files: ModelFiles, kind: BackboneKind, trust_remote_code: bool, family: Any) -> None:
    """Find the sites of a model without weights, made from its config."""
    try:
        config, model = _empty_model(files, kind, trust_remote_code)
    except Exception:  # loading the weights says what is wrong
        return
    row = FAMILIES.get(config.model_type)
    try:
        if family is not None:
            register_family(config.model_type, family)
        _sites(model, files.source)
    except BaseException:
        if row is not None:
            FAMILIES[config.model_type] = row
        else:
            FAMILIES.pop(config.model_type, None)
        raise


def _load_model(
    name: str, files: ModelFiles, kind: BackboneKind, dtype: str | torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    import transformers

    register()  # transformers' Auto classes load our own architectures
    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    options |= {"output_loading_info": True, **files.options}
    if files.gguf_file:
        from transformers import modeling_gguf_pytorch_utils
        from transformers.utils import logging

        modeling_gguf_pytorch_utils.tqdm = logging.tqdm  # which is silent where transformers' other bars are
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model, info = getattr(transformers, _LOADERS[kind]).from_pretrained(files.source, **options)
    except Exception as error:  # transformers, safetensors and the hub share no base class
        problem, remedy = f"The model {name} can't be loaded", "restore its files, or name another model"
        if files.gguf_file and "not supported" in str(error):
            remedy = "transformers reads no GGUF file of this architecture; name the model's safetensors checkpoint"
        elif files.gguf_file:
            remedy = "the file is cut off or damaged; copy it again, or name another model"
        elif not files.is_local and isinstance(error, OSError):
            problem, remedy = f"The hub has no model {name}", "check name and connection, or give a folder"
        elif "Unrecognized configuration class" in str(error):
            raise BackboneError(f"The model {name} has no head of the kind {kind}: load it as another kind.") from error
        raise BackboneError(f"{problem} ({first_line(error)}): {remedy}.") from error
    # transformers fills missing weights with random numbers. Only an encoder's pooler may be missing: nothing reads it.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise BackboneError(
            f"The model {name} lacks the weight {missing[0]} (and {len(missing) - 1} more): restore its files, or load "
            f"it as another kind than {kind}."
        )
    return model


def load_tokenizer(name: str, files: ModelFiles, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer among a model's files, or None. Raises BackboneError if its files are broken."""
    from transformers import AutoTokenizer

    folder = Path(files.source)
    has_files = bool(files.gguf_file) or any(folder.glob("*token*")) or any(folder.glob("*.model"))
    if files.is_local and not has_files:
        return None
    try:
        return AutoTokenizer.from_pretrained(files.source, trust_remote_code=trust_remote_code, **files.options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackboneError(f"{name}'s tokenizer can't be loaded ({first_line(error)}): restore its files.") from error


class BackboneConfig(Config):
    """Which frozen model to load."""

    name: str = Field(
        min_length=1,
        description="A name on the Hugging Face hub, a folder, a GGUF file, or smollm2-135m-instruct (extra smollm2).",
    )
    gguf_file: str | None = Field(None, description="The GGUF file in that folder or in that repository of the hub.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = Field(None, description="Such as cuda; by default the fastest there is.")
    trust_remote_code: bool = Field(False, description="Run model code that comes with the checkpoint.")
    family: str | dict[str, Any] | None = Field(
        None, description="Where a model of an unknown family keeps its parts: another's model type, or a row's fields."
    )

    def load(self, kind: BackboneKind = "causal-lm") -> Backbone:
        """The backbone, with the head that `kind` names."""
        values: dict[str, Any] = dict(self) | {"device": self.device or default_device()}
        if file := values.pop("gguf_file"):
            values["name"] = f"{self.name.rstrip('/')}/{file}"
        return load_backbone(**values, kind=kind)
