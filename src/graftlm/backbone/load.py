"""Load a frozen model with its tokenizer, by name on the hub or by path."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from graftlm.backbone.fingerprint import Fingerprint, fingerprint
from graftlm.backbone.sites import FAMILIES, Sites
from graftlm.errors import BackboneError
from graftlm.models import register

BackboneKind = Literal["causal-lm", "masked-lm", "encoder"]
UNLIMITED = sys.maxsize
_LOADERS: dict[BackboneKind, Any] = {
    "causal-lm": AutoModelForCausalLM,
    "masked-lm": AutoModelForMaskedLM,
    "encoder": AutoModel,
}


@dataclass
class Backbone:
    """A frozen pretrained model and its tokenizer; never modified, never saved.

    Attributes:
        model: the live transformers model.
        tokenizer: its tokenizer, or None where none is needed.
        name: the name or path that it was loaded by.
        sites: where its layers and their parts live.
        kind: which head it has, so that it can be loaded in the same form again.
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
        """A backbone from a model already built: plain, quantised, compiled, or with PEFT adapters attached.

        Its `kind` is read off the model's class where it is not given.

        Raises:
            BackboneError: `model` is not a transformers model.
            UnknownFamilyError: no row describes its architecture.
        """
        live = _unwrap(model)
        live.eval()
        return cls(
            live, tokenizer, name or live.config.name_or_path or "in memory", Sites(live), kind or _kind_of(live)
        )

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a graft remembers of this backbone (read once: the weights never change)."""
        return fingerprint(self.model)

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    def move(self, device: str | torch.device | None = None) -> None:
        """Move the model to a device, by default to `default_device()`.

        Raises:
            BackboneError: the device does not exist, or its memory is too small.
        """
        device = device or default_device()
        try:
            self.model.to(device)  # type: ignore[arg-type]  # its decorator hides the overloads
        except (RuntimeError, AssertionError) as error:
            reason = _first_line(error).partition(". ")[0]
            raise BackboneError(f"The device {device} can't be used ({reason}): name another, such as cpu.") from error

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            BackboneError: there is none.
        """
        if self.tokenizer is None:
            raise BackboneError(
                f"The backbone {self.name} has no tokenizer, and text is to be read: put tokenizer.json and "
                "tokenizer_config.json beside its weights, or pass a tokenizer."
            )
        return self.tokenizer


def default_device() -> torch.device:
    """The current accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def padding_id(tokenizer: Any) -> int:
    """The id that fills padded positions: the padding token's, else EOS, else 0. No model attends to or predicts it."""
    ids = (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None))
    return next((value for value in ids if isinstance(value, int)), 0)


def leading_bos(tokenizer: Any) -> int | None:
    """The BOS id that the tokenizer puts before every text, or None.

    Models that were trained with a leading BOS predict badly without it. Documents therefore begin with it in training,
    in scoring and in generation alike.
    """
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return None
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return int(bos) if ids and ids[0] == bos else None


def max_sequence_length(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Maximum sequence length in tokens; `UNLIMITED` where neither config nor tokenizer sets one.

    RoBERTa-style models reserve `pad_token_id + 1` positions.

    Args:
        model: a backbone or a model; its config may name `max_position_embeddings`.
        tokenizer: also apply the limit of this tokenizer.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    limit = getattr(config, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else UNLIMITED
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is not None and family.counts_positions and limit != UNLIMITED:
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
) -> Backbone:
    """Load a model and its tokenizer.

    Args:
        name: a name on the Hugging Face hub, or a folder.
        kind: which head to load.
        dtype: `auto` keeps the checkpoint's; otherwise as transformers takes it.
        device: where to put it; None leaves it where transformers puts it (the CPU).
        trust_remote_code: run model code that comes with the checkpoint. Off unless you ask for it.
        tokenizer_required: whether a missing tokenizer is an error here rather than when text is read.

    Raises:
        BackboneError: there is no such model, its files are broken or pickled, or the tokenizer is missing.
        UnknownFamilyError: no row describes its architecture.
    """
    name = str(name)
    register()
    _refuse_foreign_folder(name)
    model = _load_model(name, kind, dtype, trust_remote_code)
    tokenizer = _load_tokenizer(name, trust_remote_code)
    backbone = Backbone.wrap(model, tokenizer, name, kind)
    if device is not None:
        backbone.move(device)
    if tokenizer_required:
        backbone.need_tokenizer()
    return backbone


def _load_model(name: str, kind: BackboneKind, dtype: str | torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    how = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    try:
        model, found = _LOADERS[kind].from_pretrained(name, output_loading_info=True, **how)
    except Exception as error:  # transformers, safetensors and the hub each raise their own
        raise BackboneError(_why_not(name, error)) from error
    # transformers would go on with random numbers; only an encoder's pooler may be missing, as nothing reads it
    if missing := sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
        raise BackboneError(
            f"The model {name} lacks the weight {missing[0]} (and {len(missing) - 1} more): restore its files, or load "
            f"it as another kind than {kind}."
        )
    return model


def _load_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    folder = Path(name)
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("*.model")):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackboneError(
            f"The tokenizer of {name} can't be loaded ({_first_line(error)}): restore its files."
        ) from error


def _refuse_foreign_folder(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir():
        if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise BackboneError(f"There is no folder {name}: give a model's folder, or its name on the hub.")
        return
    if (folder / "graft.json").exists():
        raise BackboneError(
            f"{name} is a graft, but a backbone is expected here: pass the model that it was trained on."
        )
    if not (folder / "config.json").exists():
        raise BackboneError(f"{name} has no config.json, so it is not a transformers model: name a model's folder.")
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise BackboneError(
            f"{name} has pickled weights (.bin) only, which GraftLM never reads: convert them to safetensors first."
        )


def _why_not(name: str, error: Exception) -> str:
    reason = _first_line(error)
    if not Path(name).is_dir() and isinstance(error, OSError):
        return f"The hub does not give the model {name} ({reason}): check name and connection, or give a folder."
    return f"The model {name} can't be loaded ({reason}): restore its files, or name another model."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".:")[:200]


def _kind_of(model: PreTrainedModel) -> BackboneKind:
    """Which head a model has, by its class."""
    if model.base_model is model:
        return "encoder"
    return "masked-lm" if type(model).__name__.endswith("ForMaskedLM") else "causal-lm"


def _unwrap(model: Any) -> PreTrainedModel:
    """The live transformers model inside a compiled or PEFT wrapper."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise BackboneError(
            f"{type(model).__name__} is not a transformers model: pass a PreTrainedModel, or a PEFT or compiled one."
        )
    return model
