"""Load a backbone by its name on the hub, from a folder or from a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from pydantic import Field, model_serializer

from graftlm.backbone.added_tokens import MOST_TOKENS, AddedTokens
from graftlm.backbone.backbone import Backbone, BackboneKind, default_device, find_sites
from graftlm.backbone.families import FAMILIES, register_family
from graftlm.backbone.fingerprint import fingerprint
from graftlm.backbone.gguf_config import end_tokens, gguf_config, stated_config
from graftlm.backbone.gguf_header import read_header, reading_gguf_once, refused_fact
from graftlm.backbone.gguf_tensors import check_tensors
from graftlm.backbone.gguf_tokenizer import apply_split, check_split
from graftlm.config import Config
from graftlm.errors import BackboneError, GraftError, first_line
from graftlm.files.model_files import ModelFiles, find_model
from graftlm.models import register

# Importing models of transformers takes seconds, so functions import them.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

AttentionImplementation = Literal["sdpa", "eager"]
"""The implementations of attention that keep every mask of this package, and may receive a bias."""

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
    family: str | Mapping[str, object] | None = None,
    attn_implementation: AttentionImplementation | None = None,
) -> Backbone:
    """Load a model and its tokenizer by a name on the Hugging Face hub, from a folder, or from a GGUF file.

    Weights of a GGUF file are dequantized: the model is a plain one in `dtype`, and needs the memory of a plain one.

    Args:
        name: the name on the hub; a folder; the path of a GGUF file, or OWNER/REPOSITORY/FILE.gguf; or
            `smollm2-135m-instruct`, which the extra smollm2 installs.
        kind: the model's head: `causal-lm`, `masked-lm`, or `encoder` for none.
        dtype: dtype of the weights, or its name in torch; `auto` keeps that of the checkpoint.
        device: where to put the model; None leaves it on the CPU.
        trust_remote_code: run model code that comes with the checkpoint.
        tokenizer_required: raise here, rather than when text is first read, if the tokenizer is missing.
        family: where the architecture keeps its modules, as `register_family` takes it; None for known architectures.
        attn_implementation: how attention is computed, `sdpa` or `eager`; None for what transformers chooses.

    Raises:
        BackboneError: the kind, the dtype or the implementation of attention is unknown; the model does not exist, has
            no head of this kind, or its files are broken or pickled; the tokenizer is required but missing; or the
            device can't be used.
        MissingExtraError: the name is a GGUF file, and the package gguf is not installed.
        UnknownFamilyError: the architecture has an unknown structure, or `family` does not fit it. Usually no weights
            have been loaded then.
        TapError: the family names a module that the model does not have.
    """
    name = str(name)
    _check_options(kind, dtype, attn_implementation)
    files = find_model(name)
    with reading_gguf_once() if files.gguf_file else nullcontext():
        config = _gguf_config(name, files)
        if files.gguf_file:
            check_split(name, read_header(name, files))
        _check_structure(name, files, kind, family, config, trust_remote_code=trust_remote_code)
        model = _load_model(name, files, kind, dtype, config, attn_implementation, trust_remote_code=trust_remote_code)
        with stated_config(config):
            tokenizer = load_tokenizer(name, files, trust_remote_code=trust_remote_code)
    backbone = Backbone.wrap(model, tokenizer, name, kind)
    if device is not None:
        backbone.move(device)
    if tokenizer_required:
        backbone.need_tokenizer()
    return backbone


def _check_options(kind: str, dtype: str | torch.dtype, attn_implementation: str | None) -> None:
    """Raise `BackboneError` for a kind, a dtype or an implementation of attention that does not exist."""
    if kind not in _LOADERS:
        raise BackboneError(f"There is no kind of backbone {kind!r}: choose one of {', '.join(_LOADERS)}.")
    implementations = get_args(AttentionImplementation)
    if attn_implementation is not None and attn_implementation not in implementations:
        raise BackboneError(
            f"There is no implementation of attention {attn_implementation!r}: choose {' or '.join(implementations)}, "
            "or omit it."
        )
    if dtype == "auto":
        return
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise BackboneError(f"There is no dtype {dtype!r}: choose auto, float32, bfloat16 or float16.")


def inspect_model(
    name: str, kind: BackboneKind, *, dtype: str = "auto", trust_remote_code: bool = False
) -> tuple[int, str]:
    """Inspect a model by its config, without loading weights.

    Args:
        name: the model, see `load_backbone`.
        kind: the model's head: `causal-lm`, `masked-lm`, or `encoder` for none.
        dtype: dtype in which the weights would be loaded; `auto` for that of the config.
        trust_remote_code: run model code that comes with the checkpoint.

    Returns:
        The size of the weights in bytes, which is 0 for quantized checkpoints, and the architecture of the model's
        fingerprint. If the config can't be read, 0 and an empty string.
    """
    named = getattr(torch, dtype, None)
    try:
        files = find_model(name)
        config, model = _empty_model(files, kind, _gguf_config(name, files), trust_remote_code=trust_remote_code)
    except Exception:  # Loading the weights reports what is wrong.
        return 0, ""
    size = 0
    if getattr(config, "quantization_config", None) is None:
        for tensor in model.parameters():
            element_type = named or tensor.dtype
            size += tensor.numel() * element_type.itemsize
    return size, fingerprint(model).architecture


def has_chat_template(name: str, *, trust_remote_code: bool = False) -> bool | None:
    """Return whether a model comes with a chat template, without loading weights.

    Args:
        name: the model, see `load_backbone`.
        trust_remote_code: run tokenizer code that comes with the checkpoint.

    Returns:
        None if its files can't be read.
    """
    try:
        files = find_model(name)
        if files.gguf_file:  # its tokenizer is slow to build
            return "tokenizer.chat_template" in read_header(name, files).metadata
        tokenizer = load_tokenizer(name, files, trust_remote_code=trust_remote_code)
    except GraftError:  # Loading the weights reports what is wrong.
        return None
    return tokenizer is not None and bool(tokenizer.chat_template)


def served_kind(name: str, *, trust_remote_code: bool = False, **_: object) -> BackboneKind:
    """Return the kind of backbone that a server loads a model as.

    Args:
        name: the model, see `load_backbone`.
        trust_remote_code: run model code that comes with the checkpoint.
        _: further fields of a `BackboneConfig`, which are ignored.

    Returns:
        `encoder` for models that predict masked tokens from both sides, `causal-lm` for others and for models whose
        config can't be read.
    """
    import transformers

    register()
    try:
        files = find_model(name)
        if files.gguf_file:  # slow to read, and always a decoder
            return "causal-lm"
        config: Any = transformers.AutoConfig.from_pretrained(files.source, trust_remote_code=trust_remote_code)
    except Exception:  # Loading the weights reports what is wrong.
        return "causal-lm"
    family = FAMILIES.get(config.model_type)
    is_causal = family is not None and family.causal
    is_decoder = config.is_encoder_decoder or getattr(config, "is_decoder", False)
    predicts_masked_tokens = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    if predicts_masked_tokens and not is_decoder and not is_causal:
        return "encoder"
    return "causal-lm"


def load_tokenizer(name: str, files: ModelFiles, *, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer among a model's files.

    Args:
        name: name of the model in messages.
        files: where the files are.
        trust_remote_code: run tokenizer code that comes with the checkpoint.

    Returns:
        The tokenizer; None if a folder contains no files of one.

    Raises:
        BackboneError: the tokenizer can't be loaded.
    """
    from transformers import AutoTokenizer

    if files.is_local and not files.gguf_file:
        folder = Path(files.source)
        has_files = any(folder.glob("*token*")) or any(folder.glob("*.model"))
        if not has_files:
            return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(files.source, trust_remote_code=trust_remote_code, **files.options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackboneError(f"The tokenizer of {name} can't be loaded ({_tokenizer_problem(error)}.") from error
    if files.gguf_file:
        apply_split(tokenizer, read_header(name, files))
    return tokenizer


def _tokenizer_problem(error: Exception) -> str:
    """Return why a tokenizer can't be loaded and what to do."""
    text = str(error)
    if "custom code" in text:
        return "it contains custom code): set trust_remote_code if you trust that code, or name another model"
    if "sentencepiece or tiktoken" in text:
        return "its files must be converted): install sentencepiece or tiktoken, or restore its tokenizer.json"
    return f"{first_line(error)}): restore its files, or name another model"


def _gguf_config(name: str, files: ModelFiles) -> PreTrainedConfig | None:
    """Return the config of a model in a GGUF file; None for a model in the format of transformers."""
    import transformers

    if files.gguf_file is None:
        return None
    made = gguf_config(name, read_header(name, files))
    return made or transformers.AutoConfig.from_pretrained(files.source, **files.options)


def _empty_model(
    files: ModelFiles, kind: BackboneKind, config: PreTrainedConfig | None, *, trust_remote_code: bool
) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """Return a model's config, and the model without weights. Without a config, that of the files is read."""
    import transformers

    register()
    if config is None:
        config = transformers.AutoConfig.from_pretrained(files.source, trust_remote_code=trust_remote_code)
    loader = getattr(transformers, _LOADERS[kind])
    with torch.device("meta"):
        model = loader.from_config(config, trust_remote_code=trust_remote_code)
    return config, model


def _check_structure(
    name: str,
    files: ModelFiles,
    kind: BackboneKind,
    family: str | Mapping[str, object] | None,
    gguf_config: PreTrainedConfig | None,
    *,
    trust_remote_code: bool,
) -> None:
    """Find the sites of a model without weights, made from its config. A family that does not fit is removed again.

    The tensors of a GGUF file are compared with the model's weights.
    """
    try:
        config, model = _empty_model(files, kind, gguf_config, trust_remote_code=trust_remote_code)
    except Exception:  # Loading the weights reports what is wrong.
        return
    if gguf_config is not None:
        check_tensors(name, read_header(name, files), model)
    registered = FAMILIES.get(config.model_type)
    try:
        if family is not None:
            register_family(config.model_type, family)
        find_sites(model, files.source)
    except BaseException:
        if registered is not None:
            FAMILIES[config.model_type] = registered
        else:
            FAMILIES.pop(config.model_type, None)
        raise


def _load_model(
    name: str,
    files: ModelFiles,
    kind: BackboneKind,
    dtype: str | torch.dtype,
    gguf_config: PreTrainedConfig | None,
    attn_implementation: str | None,
    *,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """Return a model with its weights, after a check that the checkpoint has all of them."""
    import transformers

    register()  # makes the Auto classes of transformers load our own architectures
    options: dict[str, object] = {
        "dtype": dtype,
        "use_safetensors": True,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
        **files.options,
    }
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if gguf_config is not None:
        options["config"] = gguf_config
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        _silence_gguf_bars()
    loader = getattr(transformers, _LOADERS[kind])
    try:
        model, info = loader.from_pretrained(files.source, **options)
    except Exception as error:  # transformers, safetensors and the hub share no base class.
        raise _loading_error(name, files, kind, error) from error
    # transformers fills missing weights with random numbers. Only the pooler of an encoder may be missing: nothing
    # reads it.
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise BackboneError(
            f"The checkpoint {name} lacks weights of the model ({len(missing)} in all, such as {missing[0]}): restore "
            f"its files, or load it as another kind than {kind}."
        )
    if gguf_config is not None and info["unexpected_keys"]:
        raise refused_fact(name, f"the tensor {min(info['unexpected_keys'])}", "an unknown weight")
    if gguf_config is not None and model.generation_config is not None:
        model.generation_config.eos_token_id = end_tokens(read_header(name, files)) or None
    return model


def _silence_gguf_bars() -> None:
    """Make the progress bars of GGUF files silent where transformers' other bars are."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    modeling_gguf_pytorch_utils.tqdm = logging.tqdm


def _loading_error(name: str, files: ModelFiles, kind: BackboneKind, error: Exception) -> BackboneError:
    """Return the error that tells why a model can't be loaded, and what to do."""
    problem = f"The model {name} can't be loaded"
    if files.gguf_file:
        remedy = "the file is truncated or damaged; copy it again, or name another model"
    elif not files.is_local and isinstance(error, OSError):
        problem = f"The hub has no model {name}"
        remedy = "name another, connect to the hub, or name a folder"
    elif "custom code" in str(error):
        problem = f"The model {name} contains custom code"
        remedy = "set trust_remote_code if you trust that code, or name another model"
    elif "Unrecognized configuration class" in str(error):
        return BackboneError(f"The model {name} has no head of the kind {kind}: load it as another kind.")
    else:
        remedy = "restore its files, or name another model"
    return BackboneError(f"{problem} ({first_line(error)}): {remedy}.")


class LearnedTokensConfig(Config):
    """How tokens are learned from the new text."""

    learn: int = Field(ge=1, le=MOST_TOKENS, description="Number of tokens.")
    characters: int = Field(20_000_000, ge=1, description="Maximum number of characters of text to learn them from.")


class BackboneConfig(Config):
    """A frozen model to load, and how to load it."""

    name: str = Field(
        min_length=1,
        description="A name on the Hugging Face hub, a folder, a GGUF file, or smollm2-135m-instruct (extra smollm2).",
    )
    gguf_file: str | None = Field(None, description="The GGUF file in that folder or repository.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = Field(None, description="Such as cuda; the accelerator by default.")
    trust_remote_code: bool = Field(False, description="Run model code that comes with the checkpoint.")
    family: str | dict[str, Any] | None = Field(
        None,
        description="Where a model of an unknown family keeps its modules: another model type, or the fields of a "
        "family.",
    )
    attn_implementation: AttentionImplementation | None = Field(
        None,
        description="How attention is computed; transformers' choice by default.",
    )
    add_tokens: list[str] | LearnedTokensConfig | None = Field(
        None,
        description="Tokens whose rows belong to the graft: a list of texts, or `{learn: 2000}` for as many that are "
        "learned from data.new.",
    )

    def _problems(self) -> Iterator[str]:
        if isinstance(self.add_tokens, list):
            try:
                AddedTokens(tuple(self.add_tokens)).check()
            except BackboneError as error:
                yield str(error).rstrip(".")

    @model_serializer(mode="wrap")
    def _keep_tags(self, serialize: Callable[[object], dict[str, object]]) -> dict[str, object]:
        """Leave out later fields without a value, so that earlier runs keep their keys."""
        values = serialize(self)
        for name in ("add_tokens", "attn_implementation"):
            if values.get(name) is None:
                values.pop(name, None)
        return values

    @property
    def without_tokens(self) -> BackboneConfig:
        """The config of the backbone alone."""
        return self.model_copy(update={"add_tokens": None}) if self.add_tokens is not None else self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def load(self, kind: BackboneKind = "causal-lm") -> Backbone:
        """Load the backbone, without added tokens.

        Args:
            kind: the model's head: `causal-lm`, `masked-lm`, or `encoder` for none.

        Raises:
            GraftError: see `load_backbone`.
        """
        name = f"{self.name.rstrip('/')}/{self.gguf_file}" if self.gguf_file else self.name
        return load_backbone(
            name,
            kind=kind,
            dtype=self.dtype,
            device=self.device or default_device(),
            trust_remote_code=self.trust_remote_code,
            family=self.family,
            attn_implementation=self.attn_implementation,
        )
