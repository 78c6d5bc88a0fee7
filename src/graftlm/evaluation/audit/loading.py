"""Load the two models of an audit: plain models, PEFT adapters and grafts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from graftlm.backbone import Backbone, default_device, load_backbone
from graftlm.backbone.formats import Quantization, quantize_weights
from graftlm.backbone.load import load_tokenizer
from graftlm.errors import (
    ArtifactError,
    BackboneError,
    EvaluationError,
    WrongBackboneError,
    first_line,
    shorten,
)
from graftlm.evaluation.inference import LanguageModel
from graftlm.files.adapter_config import ADAPTER_CONFIG, read_adapter_config, saved_ends
from graftlm.files.hub import fetch_folder, holds
from graftlm.files.model_files import ModelFiles
from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import backbone_of, load_grafts
from graftlm.store.manifest import read_manifest

if TYPE_CHECKING:
    from peft import PeftModel

Auditable = str | Path | Backbone | GraftedModel
Change = Literal["trained", "quantized", "unknown"]
"""How a model was made from another one."""


@dataclass
class AuditedModel:
    """One of the two models.

    Attributes:
        name: its name as the user gave it.
        backbone: the loaded transformers model, its tokenizer and its structure.
        model: the backbone's model, or the model that is built on it.
        tokenizer: the model's tokenizer, which may differ from the backbone's.
        is_bare: whether the model is the backbone's as it was loaded, with nothing attached.
        change: how it was made from the other model, as far as that is known.
        notes: what the user should know about it, one sentence per note.
    """

    name: str
    backbone: Backbone
    model: Any
    tokenizer: PreTrainedTokenizerBase
    is_bare: bool = False
    change: Change = "unknown"
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_backbone(cls, name: str, backbone: Backbone) -> AuditedModel:
        """Return the bare model of a backbone."""
        return cls(name, backbone, backbone.model, backbone.need_tokenizer(), is_bare=True)

    @property
    def predictor(self) -> LanguageModel:
        """The model that predicts and generates. Grafts that are attached to a bare backbone don't act in it."""
        return self.backbone.bare_model if self.is_bare else self.model


@dataclass(frozen=True)
class _Options:
    """How models are loaded; see `load_pair`."""

    backbone: str | None
    device: str | None
    dtype: str
    trust_remote_code: bool

    def load(self, name: str) -> Backbone:
        return load_backbone(
            name,
            device=self.device or default_device(),
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )

    def backbone_of(self, graft: str | Path) -> Backbone:
        return backbone_of(
            graft,
            self.backbone,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )


@contextmanager
def load_pair(
    base: Auditable,
    tuned: Auditable,
    *,
    quantize: Quantization | None = None,
    backbone: str | None = None,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Iterator[tuple[AuditedModel, AuditedModel]]:
    """Load both models of an audit, and detach grafts when the `with` block ends.

    Weights are shared where that is possible: a graft acts on the loaded base, whose own forward passes don't see it.

    Args:
        base: the model before.
        tuned: the model after.
        quantize: quantize the weights of the tuned model.
        backbone: where the model below a graft or an adapter is; by default where it was when that was written.
        device: where to put models that are loaded; None takes the accelerator, if there is one.
        dtype: precision of models that are loaded; `auto` keeps their own.
        trust_remote_code: run model code that comes with a model.

    Raises:
        BackboneError: a model can't be loaded or is not a causal language model, or the quantization is unknown.
        ArtifactError: a graft or an adapter can't be loaded, or a folder contains neither.
        EvaluationError: a model to quantize is not a plain model.
    """
    options = _Options(backbone=backbone, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    with ExitStack() as stack:
        first = _load(base, None, options)
        stack.callback(_detach, first, base)
        same_name = isinstance(base, str | Path) and str(base) == str(tuned)
        second = first if tuned is base or same_name else _load(tuned, first, options)
        if quantize is not None:
            quantized = _quantize(second, quantize)
            quantized.change = "quantized" if second is first else "unknown"
            second = quantized
        elif second is first:
            second = copy.copy(first)
            second.notes = ["BASE and TUNED are one model, so every difference is zero."]
        stack.callback(_detach, second, tuned)
        yield first, second


def _detach(audited: AuditedModel, given: Auditable) -> None:
    """Detach a graft that was attached here."""
    if isinstance(audited.model, GraftedModel) and audited.model is not given:
        audited.model.detach()


def _load(given: Auditable, base: AuditedModel | None, options: _Options) -> AuditedModel:
    if isinstance(given, GraftedModel):
        loaded = AuditedModel("GraftedModel", given.backbone, given, given.backbone.need_tokenizer(), change="trained")
    elif isinstance(given, Backbone):
        loaded = AuditedModel.of_backbone(given.name, given)
    elif not isinstance(given, str | Path):
        raise BackboneError(
            f"{type(given).__name__} can't be audited: pass a name, a folder, a file, a GraftedModel or a Backbone "
            "(Backbone.wrap(model, tokenizer) makes one)."
        )
    elif holds(given, "graft.json"):
        loaded = _load_graft(given, base, options)
    elif holds(given, ADAPTER_CONFIG):
        loaded = _load_adapter(fetch_folder(given, ADAPTER_CONFIG), base, options)
    else:
        loaded = _load_model(str(given), options)
    is_causal = loaded.backbone.sites.family.causal and loaded.backbone.model.can_generate()
    if not is_causal:
        raise BackboneError(
            f"{loaded.name} is not a causal language model, but an audit compares the predictions of two of them: "
            "name another model."
        )
    return loaded


def _load_model(name: str, options: _Options) -> AuditedModel:
    folder = Path(name)
    has_model = not folder.is_dir() or holds(folder, "config.json") or any(folder.glob("*.gguf"))
    if not has_model:
        inner = folder / "graft" if (folder / "graft" / "graft.json").is_file() else "one that does"
        raise ArtifactError(
            f"The folder {name} holds no model (config.json or a GGUF file), no graft (graft.json) and no PEFT adapter "
            f"(adapter_config.json): name {inner}."
        )
    return AuditedModel.of_backbone(name, options.load(name))


def _load_graft(folder: str | Path, base: AuditedModel | None, options: _Options) -> AuditedModel:
    """Load a graft on the base if it was trained on it, else on the backbone that the graft's folder names."""
    if read_manifest(folder).graft_config().needs_tasks:
        raise ArtifactError(
            f"The graft {folder} answers with task heads and generates no text: measure it with graft eval."
        )
    if base is not None and base.is_bare:
        with suppress(WrongBackboneError):
            return _with_graft(folder, base.backbone)
    return _with_graft(folder, options.backbone_of(folder))


def _with_graft(folder: str | Path, backbone: Backbone) -> AuditedModel:
    grafts = load_grafts(folder, backbone)
    model = GraftedModel(backbone, grafts)
    return AuditedModel(str(folder), backbone, model, backbone.need_tokenizer(), change="trained")


def _load_adapter(folder: Path, base: AuditedModel | None, options: _Options) -> AuditedModel:
    """Load a PEFT adapter on a copy of the base, or without a base on the model that the adapter names."""
    named = str(read_adapter_config(folder).get("base_model_name_or_path") or "")
    notes = []
    if base is None or not base.is_bare:
        name = options.backbone or named
        if not name:
            raise ArtifactError(f"The adapter {folder} does not name its base model: name it with --backbone.")
        backbone = _load_model(name, options).backbone
        model: nn.Module = backbone.model
    else:
        backbone = base.backbone
        model = copy.deepcopy(backbone.bare_model)
        if Path(named).name.lower() != Path(backbone.name).name.lower():
            notes.append(
                f"The adapter {folder} names {named or 'no model'} as its base, and is loaded on {backbone.name}."
            )
    tokenizer = load_tokenizer(str(folder), ModelFiles(str(folder)), trust_remote_code=False)
    _resize_vocabulary(model, folder, tokenizer)
    adapted = _adapted_model(model, folder, backbone.name)
    if tokenizer is None:
        tokenizer = backbone.need_tokenizer()
    if not adapted.active_peft_config.is_prompt_learning:
        wrapped = Backbone.wrap(adapted, backbone.tokenizer, str(folder))
        return AuditedModel(str(folder), wrapped, wrapped.model, tokenizer, change="trained", notes=notes)
    if base is None:
        raise ArtifactError(
            f"The adapter {folder} learns a prompt, which is not supported for BASE: name its base model as BASE."
        )
    adapted.register_forward_hook(_drop_prompt, with_kwargs=True)
    return AuditedModel(str(folder), backbone, adapted, tokenizer, change="trained", notes=notes)


def _resize_vocabulary(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Give a model the vocabulary that an adapter was trained with.

    Args:
        model: the model, which is changed.
        folder: the adapter's folder. If it contains no embeddings, the model is left unchanged.
        tokenizer: the tokenizer in the folder; None if there is none.

    Raises:
        ArtifactError: the adapter has other embeddings than the model, but no tokenizer that goes with them, or not all
            of their rows.
    """
    saved = saved_ends(folder)
    rows = max(saved.values(), default=0)
    embeddings = model.get_input_embeddings()
    own = next(embeddings.parameters()).shape[0]
    if not saved or rows == own:
        return
    head = model.get_output_embeddings()
    ends = [embeddings]
    if head is not None and head.weight is not embeddings.weight:
        ends.append(head)
    paths = {path for path, module in model.named_modules() if any(module is end for end in ends)}
    if rows > own and not paths <= set(saved):
        raise ArtifactError(
            f"The adapter {folder} was trained on {rows} tokens, but lacks the new rows of "
            f"{', '.join(sorted(paths - set(saved)))}: merge it where it was trained, and name the merged model."
        )
    if tokenizer is None or len(tokenizer) > rows:
        found = "no tokenizer" if tokenizer is None else f"a tokenizer of {len(tokenizer)} tokens"
        raise ArtifactError(
            f"The adapter {folder} has embeddings of {rows} tokens and {found}, but its base has {own}: save the "
            "tokenizer that it was trained with to its folder (tokenizer.save_pretrained)."
        )
    model.resize_token_embeddings(rows, mean_resizing=False)


def _adapted_model(model: nn.Module, folder: Path, name: str) -> PeftModel:
    """Load an adapter on a model.

    Args:
        model: the model; PEFT changes it.
        folder: the adapter's folder.
        name: the model's name in messages.
    """
    from peft import PeftConfig, PeftModel

    try:
        config = PeftConfig.from_pretrained(str(folder))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapted: Any = PeftModel.from_pretrained(model, str(folder), config=config, use_safetensors=True)
    except Exception as error:  # PEFT, safetensors and torch share no base class.
        raise ArtifactError(
            f"The adapter {folder} can't be loaded on {name} ({first_line(error)}): name the model that it was trained "
            "on, or repair its files."
        ) from error
    for warning in caught:
        if "missing adapter keys" in str(warning.message):
            raise ArtifactError(
                f"The adapter {folder} lacks weights that {name} needs ({shorten(str(warning.message), 200)}): name "
                "the model that it was trained on, or copy the adapter again if its files are incomplete."
            )
    return adapted.eval()


def _drop_prompt(_: nn.Module, __: tuple[object, ...], inputs: Mapping[str, Tensor], output: Any) -> object:
    """Drop the logits of a learned prompt, which precedes the text."""
    length = inputs["input_ids"].shape[1]
    output.logits = output.logits[:, -length:]
    return output


def _quantize(audited: AuditedModel, quantization: Quantization) -> AuditedModel:
    """Return a copy of a plain model with the weights of its linear layers in int8 or int4."""
    if not audited.is_bare:
        raise EvaluationError(f"{audited.name} is not a plain model, so it can't be quantized here: name a model.")
    model = copy.deepcopy(audited.backbone.bare_model)
    quantize_weights(model, quantization, audited.name)
    backbone = Backbone.wrap(model, audited.backbone.tokenizer, f"{audited.name} in {quantization}")
    return AuditedModel(backbone.name, backbone, backbone.model, audited.tokenizer, is_bare=True)
