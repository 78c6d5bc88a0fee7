"""Load a frozen model and its tokenizer, by hub name, from a folder or a GGUF file; identify it by a fingerprint."""

from __future__ import annotations

import base64
import hashlib
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from unittest import mock

import psutil
import torch
from pydantic import Field
from torch import Tensor, nn

from graftlm.backbone.families import FAMILIES, Sites, architecture, register_family
from graftlm.backbone.taps import left_padded
from graftlm.config import Config
from graftlm.errors import BackboneError, MissingExtraError, WrongBackboneError, first_line
from graftlm.io import ModelFiles, find_model
from graftlm.models import register

# transformers' models take seconds to import, so functions import them.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BackboneKind = Literal["causal-lm", "masked-lm", "encoder"]
Quantization = Literal["int8", "int4"]
UNLIMITED = sys.maxsize
_INT4_GROUP = 32
_LOADERS: dict[BackboneKind, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "encoder": "AutoModel",
}
_SAMPLED_TENSORS = 24
_SAMPLES_PER_TENSOR = 4
_TOLERANCE = 0.02
_Module = TypeVar("_Module", bound=nn.Module)
_PATCHING = threading.RLock()  # one load at a time changes the module gguf


@dataclass
class Backbone:
    """A frozen pretrained model and its tokenizer, if any; never modified, never saved.

    `name` is the hub name or path, and `kind` the head, by which it can be loaded again; `sites` locate its modules.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    sites: Sites
    kind: BackboneKind = "causal-lm"

    @classmethod
    def wrap(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        kind: BackboneKind | None = None,
    ) -> Backbone:
        """Make a backbone from a model in memory: plain, quantised, compiled, or with PEFT adapters attached.

        The model's class decides on `kind` where it is None.

        Raises BackboneError if `model` is not a transformers model, UnknownFamilyError if its structure is unknown.
        """
        live = _unwrap(model).eval()
        if kind is None and live.base_model is live:
            kind = "encoder"
        elif kind is None:
            kind = "masked-lm" if type(live).__name__.endswith("ForMaskedLM") else "causal-lm"
        name = name or live.config.name_or_path or "in memory"
        return cls(live, tokenizer, name, _sites(live, name), kind)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The model's fingerprint; computed once, as the weights never change."""
        return fingerprint(self.model)

    @property
    def parameter_count(self) -> int:
        """The number of the checkpoint's parameters, also where quantisation has untied the head."""
        return sum(parameter.numel() for parameter in _checkpoint_parameters(self.model))

    @cached_property
    def bare_model(self) -> PreTrainedModel:
        """The model as it is without grafts, in evaluation mode, also while some are attached; it shares all weights.

        Raises BackboneError if another library has replaced the forward methods of the model's modules.
        """
        clone = clone_without_hooks(self.model, self.name)
        for attribute in ("generate", "init_continuous_batching"):  # which attached grafts replace
            vars(clone).pop(attribute, None)
        return clone.eval()

    def check_graft(self, name: str, built_for: Fingerprint | None) -> None:
        """Raise `WrongBackboneError` if a graft was built for another backbone and no copy of this one."""
        if difference := built_for and built_for.difference(self.fingerprint):
            raise WrongBackboneError(
                f"The graft {name} was built for another backbone than {self.name} ({difference}): give the one that "
                "it was built for, or build it again."
            )

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    def move(self, device: str | torch.device | None = None) -> None:
        """Move the model to a device, by default to `default_device()`.

        Raises BackboneError if the device does not exist, or its memory is too small.
        """
        move(self.model, device or default_device())

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises BackboneError if the backbone has no tokenizer."""
        if self.tokenizer is None:
            raise BackboneError(
                f"The backbone {self.name} has no tokenizer, but text needs one: put tokenizer.json and "
                "tokenizer_config.json beside its weights, or pass a tokenizer."
            )
        return self.tokenizer


def clone_without_hooks(module: _Module, name: str) -> _Module:
    """A module tree without hooks that shares the dictionaries of parameters and buffers of the original.

    Modules that are put around or in place of the original's later, as PEFT does, do not appear in the clone.

    Raises BackboneError if another library has replaced the forward methods of modules of the model, called `name`.
    """
    if "forward" in vars(module) and any(True for _ in module.children()):
        raise BackboneError(
            f"Another library replaced the forward of modules of {name}, as accelerate does to spread a model over "
            "devices, so the bare model can't run beside its hooks: load it on one device."
        )
    clone = object.__new__(type(module))
    for key, value in vars(module).items():
        is_hooks = key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict)
        vars(clone)[key] = {} if is_hooks else value
    vars(clone).pop("_compiled_call_impl", None)  # it would call the original module
    vars(clone)["_modules"] = {
        key: child if child is None else clone_without_hooks(child, name) for key, child in module._modules.items()
    }
    return cast("_Module", clone)


def need_backbone(value: Any) -> Backbone:
    """`value`, or `BackboneError` where it is something else than a backbone."""
    if isinstance(value, Backbone):
        return value
    why = f"{type(value).__name__} is no Backbone: load one with load_backbone, or make one with Backbone.wrap(model)."
    raise BackboneError(why)


def move(model: nn.Module, device: str | torch.device) -> None:
    """Move a model to a device. Raises BackboneError if the device does not exist, or its memory is too small."""
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(". ")[0]
        raise BackboneError(f"The device {device} can't be used ({reason}): name another, such as cpu.") from error


def default_device() -> torch.device:
    """The current accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def padding_id(tokenizer: Any) -> int:
    """The id that fills padded positions: the padding token's, else EOS, else 0. No model attends to or predicts it."""
    ids = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    return next((value for value in ids if isinstance(value, int)), 0)


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end a text: those of the model's generation config, and the tokenizer's EOS."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = (*(own if isinstance(own, list | tuple) else [own]), tokenizer.eos_token_id)
    return {token for token in ids if isinstance(token, int)}


def generate_rows(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], ends: Collection[int], **options: Any
) -> list[list[int]]:
    """The tokens that `model.generate` adds to each prompt, up to and with the first of `ends`; `options` are its."""
    inputs = left_padded(prompts, padding_id(tokenizer), model.device)
    output = model.generate(**inputs, eos_token_id=sorted(ends) or None, **options)
    rows = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1] for row in rows]


def token_texts(tokenizer: Any, ids: Sequence[int] | Tensor, **options: Any) -> list[str]:
    """The text that each token adds; a character of several tokens belongs to the last. `options` are of `decode`."""
    texts, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:end], **options))
        if end < len(ids):
            text = text.removesuffix("\ufffd")
        texts.append(text[len(shown) :])
        shown = max(shown, text, key=len)
    return texts


def leading_bos(tokenizer: Any) -> int | None:
    """The BOS id that the tokenizer puts before every text, or None.

    Models that were trained with a leading BOS predict badly without it. Documents therefore begin with it in training,
    in scoring and in generation alike.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def max_sequence_length(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Maximum sequence length in tokens, by a model's config and a tokenizer; `UNLIMITED` where neither sets one.

    RoBERTa-style models reserve `pad_token_id + 1` positions.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        limit = UNLIMITED
    elif getattr(FAMILIES.get(getattr(config, "model_type", "")), "counts_positions", False):
        limit -= (config.pad_token_id or 0) + 1
    return limit if tokenizer is None else min(limit, int(tokenizer.model_max_length))


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


@contextmanager
def _read_once() -> Iterator[None]:
    """Read the header of a GGUF file once, which transformers reads four times, with a map of its names per module."""
    import gguf
    import numpy
    from transformers import modeling_gguf_pytorch_utils as reading

    with _PATCHING:  # and the originals are looked up while no other load has replaced them

        class Reader(gguf.GGUFReader):
            """A reader that cuts a header into plain arrays, in a third of the time of memory-mapped ones."""

            data: Any = property(
                lambda self: self._data, lambda self, data: setattr(self, "_data", numpy.asarray(data))
            )

        values: dict[int, tuple[Any, Any]] = {}  # by the address of the part, which is kept with its value
        parse: Any = reading._gguf_parse_value

        def parse_once(part: Any, types: Any) -> Any:
            if id(part) not in values:
                values[id(part)] = part, parse(part, types)
            return values[id(part)][1]

        once: Any = {"GGUFReader": cache(Reader), "get_tensor_name_map": cache(gguf.get_tensor_name_map)}
        with mock.patch.multiple(gguf, **once), mock.patch.object(reading, "_gguf_parse_value", parse_once):
            yield


def quantize_weights(model: nn.Module, quantization: str, name: str) -> None:
    """Put the weights of a model's linear layers into int8 or int4, in place; `name` is the model's in errors.

    Raises MissingExtraError without torchao, and BackboneError if the kind is unknown or does not fit the weights.
    """
    try:
        from torchao import quantization as torchao
    except ImportError:
        raise MissingExtraError("torchao", "quantised", "Quantising a model") from None
    configs = {
        "int8": lambda: torchao.Int8WeightOnlyConfig(),
        "int4": lambda: torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]  # which torch's stubs lack
            granularity=torchao.PerGroup(_INT4_GROUP),
        ),
    }
    if quantization not in configs:
        raise BackboneError(f"There is no quantisation {quantization!r}: int8 and int4 are known.")
    try:
        torchao.quantize_(model, configs[quantization]())
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # of widths that its kernels don't take
        why = f"{name} can't be quantised to {quantization} ({first_line(error)}): leave --quantize out."
        raise BackboneError(why) from error


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


def check_memory(sizes: Mapping[str, int], device: str | torch.device, *, quantized: bool = False) -> None:
    """Raise `BackboneError` if weights of these bytes, by model, do not fit into a device's free memory together.

    Of quantised ones the largest counts whole, and the others by an eighth: nothing that might fit is refused.
    """
    free = psutil.virtual_memory().available
    if str(device).startswith("cuda") and torch.cuda.is_available():
        free = torch.cuda.mem_get_info(device)[0]
    largest, total = max(sizes.values()), sum(sizes.values())
    if (largest + (total - largest) / 8 if quantized else total) > free:
        each = " + ".join(f"{name} {size / 1e9:,.1f}" for name, size in sizes.items())
        raise BackboneError(
            f"The weights take {total / 1e9:,.1f} GB ({each}), and {device} has {free / 1e9:,.1f} GB free: name fewer "
            "or smaller models, or a smaller dtype."
        )


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


def _sites(model: PreTrainedModel, name: str) -> Sites:
    """A model's sites; `BackboneError` for one that generates text with attention to later tokens."""
    sites = Sites(model)
    if model.can_generate() and not (sites.family.causal or getattr(model.config, "is_decoder", False)):
        raise BackboneError(
            f"{name} is a {model.config.model_type} model, whose tokens see later ones, so it can't continue text: "
            "name a causal language model, or load this one as masked-lm or encoder."
        )
    return sites


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


def _unwrap(model: Any) -> PreTrainedModel:
    """The live transformers model inside a compiled or PEFT wrapper."""
    from transformers import PreTrainedModel

    model = getattr(model, "_orig_mod", model)
    if isinstance(getattr(model, "backbone", None), Backbone):
        raise BackboneError("This model is a GraftedModel: pass the model below, `GraftedModel.detach().model`.")
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        why = f"{type(model).__name__} is not a transformers model: pass a PreTrainedModel, or a PEFT or compiled one."
        raise BackboneError(why)
    return model


@dataclass(frozen=True)
class Fingerprint:
    """Identifies a backbone by a hash of its config and by sampled weights.

    `samples` are base64 of bfloat16, so one checkpoint has the same fingerprint in float32, bfloat16 and float16.
    Weights that a quantiser packed are NaN and don't count.
    """

    architecture: str
    samples: str

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, for messages."""
        return hashlib.sha256((self.architecture + self.samples).encode()).hexdigest()[:12]

    def difference(self, other: Fingerprint) -> str | None:
        """The difference to `other` in words; None when both identify the same backbone."""
        if self.architecture != other.architecture:
            return "its architecture differs"
        own, others = _decode_samples(self.samples), _decode_samples(other.samples)
        if own.shape != others.shape:
            return "it has other weights"
        known = ~(own.isnan() | others.isnan())
        gap = (own - others).abs() - _TOLERANCE * torch.maximum(own.abs(), others.abs())
        return "its weights differ" if bool((gap[known] > 1e-6).any()) else None


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Compute a model's fingerprint; reads about a hundred weights of a model of any size."""
    digest = hashlib.sha256(architecture(model.config).encode()).hexdigest()
    parameters = _checkpoint_parameters(model)
    count = min(_SAMPLED_TENSORS, len(parameters))
    flat = torch.cat([torch.zeros(0), *(_sample(parameters[i * len(parameters) // count]) for i in range(count))])
    samples = base64.b64encode(flat.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).decode()
    return Fingerprint(digest, samples)


def _checkpoint_parameters(model: PreTrainedModel) -> list[Tensor]:
    """The checkpoint's parameters, sorted by name.

    Excluded are PEFT's parameters, and the second name of tied weights, which a quantiser unties.
    """
    wrapped = {
        f"{name}.": f"{inner}."
        for name, module in model.named_modules()
        for inner in ("base_layer", "original_module")
        if hasattr(module, inner)
    }
    named = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        within = [(outer, inner) for outer, inner in wrapped.items() if name.startswith(outer)]
        if all(name.startswith(outer + inner) for outer, inner in within):
            for outer, inner in sorted(within, reverse=True):
                name = outer + name.removeprefix(outer + inner)
            named[name] = tensor
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return [named[name] for name in sorted(named) if name not in tied]


def _sample(tensor: Tensor) -> Tensor:
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point()
    if not plain or tensor.numel() == 0 or tensor.is_meta:
        return torch.full((_SAMPLES_PER_TENSOR,), float("nan"))
    flat = tensor.detach().reshape(-1)
    last = flat.numel() - 1  # int64: float32 can't index 2^24 numbers exactly
    index = torch.arange(_SAMPLES_PER_TENSOR, device=flat.device) * last // (_SAMPLES_PER_TENSOR - 1)
    return flat[index].float().cpu()


def _decode_samples(samples: str) -> Tensor:
    raw = bytearray(base64.b64decode(samples))
    return torch.frombuffer(raw, dtype=torch.bfloat16).float() if raw else torch.zeros(0)


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
