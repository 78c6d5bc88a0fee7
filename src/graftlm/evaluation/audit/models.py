"""The two models of an audit, loaded from whatever holds one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftlm.backbone import Backbone, default_device, load_backbone
from graftlm.backbone.formats import Quantization, quantize_weights
from graftlm.backbone.load import load_tokenizer
from graftlm.errors import ArtifactError, BackboneError, EvaluationError, WrongBackboneError, first_line
from graftlm.files.adapter_config import ADAPTER_CONFIG, read_adapter_config
from graftlm.files.hub import fetch_folder, holds
from graftlm.files.model_files import ModelFiles
from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import backbone_of, load_grafts
from graftlm.store.manifest import read_manifest

Auditable = str | Path | Backbone | GraftedModel
_CONVERSATION = (("user", "Where?"), ("assistant", "There."), ("user", "Why?"))
_PROBES = (
    "The 3 cafés cost 1,250.75 €.",
    "def f(x):\n\treturn  x ** 2\n",
    "Ça, Größe, Łódź, Ελλάδα, 東京",
    "<|a|> [b]",
)


@dataclass
class AuditedModel:
    """One of the two models.

    Attributes:
        name: as the user named it.
        backbone: the loaded transformers model, its tokenizer and its structure.
        model: what predicts and generates: the backbone's model, or what is built on it.
        tokenizer: its own, which may differ from the backbone's.
        is_bare: it is the backbone's model as it was loaded, with nothing put on it.
        notes: what the user should know about it, one sentence each.
    """

    name: str
    backbone: Backbone
    model: Any
    tokenizer: Any
    is_bare: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def predictor(self) -> Any:
        """What predicts and generates; that of a bare backbone does not see grafts that are attached to it."""
        return self.backbone.bare_model if self.is_bare else self.model


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
    """Load both models; grafts are detached when the block ends.

    Weights are shared where that is possible: a graft acts on the loaded base, whose own passes don't see it.

    Args:
        quantize: take the tuned model with its weights in fewer bits.
        backbone: where the model below a graft or an adapter is; by default where it was when that was written.
        dtype: precision of models that are loaded; `auto` keeps their own.

    Raises BackboneError if a model can't be loaded, or is no causal language model, and ArtifactError if a graft or an
    adapter can't be loaded, or a folder holds neither, and BackboneError if the quantisation is unknown.
    """
    options = {"backbone": backbone, "device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    with ExitStack() as stack:
        first = _load(base, None, options)
        stack.callback(_detach, first, base)
        same = tuned is base or (isinstance(base, str | Path) and str(base) == str(tuned))
        second = first if same else _load(tuned, first, options)
        if quantize is not None:
            second = _quantize(second, quantize)
        elif second is first:
            second = copy.copy(first)
            second.notes = ["BASE and TUNED are one model, so every difference is zero."]
        stack.callback(_detach, second, tuned)
        yield first, second


def _detach(audited: AuditedModel, given: Auditable) -> None:
    """Take a graft off that was attached here."""
    if isinstance(audited.model, GraftedModel) and audited.model is not given:
        audited.model.detach()


def _load(given: Auditable, base: AuditedModel | None, options: dict[str, Any]) -> AuditedModel:
    if isinstance(given, GraftedModel):
        loaded = AuditedModel("GraftedModel", given.backbone, given, given.backbone.need_tokenizer())
    elif isinstance(given, Backbone):
        loaded = AuditedModel(given.name, given, given.model, given.need_tokenizer(), is_bare=True)
    elif not isinstance(given, str | Path):
        raise BackboneError(
            f"{type(given).__name__} can't be audited: give a name, a folder, a file, a Backbone (Backbone.wrap(model, "
            "tokenizer) makes one) or a GraftedModel."
        )
    elif holds(given, "graft.json"):
        loaded = _load_graft(given, base, options)
    elif holds(given, ADAPTER_CONFIG):
        loaded = _load_adapter(fetch_folder(given, ADAPTER_CONFIG), base, options)
    else:
        loaded = _load_model(str(given), options)
    if not (loaded.backbone.sites.family.causal and loaded.backbone.model.can_generate()):
        raise BackboneError(f"{loaded.name} is no causal language model: an audit compares what two of them predict.")
    return loaded


def _load_model(name: str, options: dict[str, Any]) -> AuditedModel:
    folder = Path(name)
    if folder.is_dir() and not (holds(folder, "config.json") or any(folder.glob("*.gguf"))):
        inner = folder / "graft" if (folder / "graft" / "graft.json").is_file() else "one that does"
        raise ArtifactError(
            f"The folder {name} holds no model (config.json or a GGUF file), no graft (graft.json) and no PEFT adapter "
            f"(adapter_config.json): name {inner}."
        )
    device = options["device"] or default_device()
    dtype, trust = options["dtype"], options["trust_remote_code"]
    backbone = load_backbone(name, device=device, dtype=dtype, trust_remote_code=trust)
    return AuditedModel(name, backbone, backbone.model, backbone.need_tokenizer(), is_bare=True)


def _load_graft(folder: str | Path, base: AuditedModel | None, options: dict[str, Any]) -> AuditedModel:
    """A graft on the base where that is the backbone that it was trained on, else on the backbone that it names."""
    if read_manifest(folder).graft_config().needs_tasks:
        raise ArtifactError(f"The graft {folder} answers by its heads and writes no text: measure it by graft eval.")
    loading = {key: options[key] for key in ("device", "dtype", "trust_remote_code")} | {"name": options["backbone"]}
    backbone = base.backbone if base is not None and base.is_bare else backbone_of(folder, **loading)
    try:
        grafts = load_grafts(folder, backbone)
    except WrongBackboneError:
        if base is None or backbone is not base.backbone:
            raise
        backbone = backbone_of(folder, **loading)
        grafts = load_grafts(folder, backbone)
    return AuditedModel(str(folder), backbone, GraftedModel(backbone, grafts), backbone.need_tokenizer())


def _load_adapter(folder: Path, base: AuditedModel | None, options: dict[str, Any]) -> AuditedModel:
    """A PEFT adapter on a copy of the base; without one, on the model that it names."""
    from peft import PeftConfig, PeftModel

    named = str(read_adapter_config(folder).get("base_model_name_or_path") or "")
    notes = []
    if base is None or not base.is_bare:
        if not (options["backbone"] or named):
            raise ArtifactError(f"The adapter {folder} names no model below it: say where that is (--backbone).")
        on = _load_model(options["backbone"] or named, options).backbone
        model = on.model
    else:
        on, model = base.backbone, copy.deepcopy(base.backbone.bare_model)
        if Path(named).name.lower() != Path(on.name).name.lower():
            notes.append(f"The adapter {folder} names {named or 'no model'} as its model, and is put on {on.name}.")
    try:
        config = PeftConfig.from_pretrained(str(folder))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped: Any = PeftModel.from_pretrained(model, str(folder), config=config, use_safetensors=True)
    except Exception as error:  # PEFT, safetensors and torch share no base class
        raise ArtifactError(
            f"The adapter {folder} does not fit {on.name} ({first_line(error)}): name the model that it was trained on."
        ) from error
    if any("missing adapter keys" in str(warning.message) for warning in caught):
        raise ArtifactError(f"The adapter {folder} lacks weights for {on.name}: name the model that it was trained on.")
    wrapped.eval()
    tokenizer = load_tokenizer(str(folder), ModelFiles(str(folder)), trust_remote_code=False)
    if config.is_prompt_learning:
        wrapped.register_forward_hook(_drop_prompt, with_kwargs=True)
        if base is None:
            raise ArtifactError(f"The adapter {folder} learns a prompt, which BASE can't: name its model as BASE.")
        backbone, model = on, wrapped
    else:
        backbone = Backbone.wrap(wrapped, on.tokenizer, str(folder))
        model = backbone.model
    return AuditedModel(str(folder), backbone, model, tokenizer or on.need_tokenizer(), notes=notes)


def _drop_prompt(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> Any:
    """Leave out the logits of a learned prompt, which stands before the text."""
    output.logits = output.logits[:, -inputs["input_ids"].shape[1] :]
    return output


def _quantize(audited: AuditedModel, quantization: Quantization) -> AuditedModel:
    """A copy of a plain model with the weights of its linear layers in int8 or int4."""
    if not audited.is_bare:
        raise EvaluationError(f"{audited.name} is no plain model, so it can't be quantised here: name a model.")
    model = copy.deepcopy(audited.backbone.bare_model)
    quantize_weights(model, quantization, audited.name)
    backbone = Backbone.wrap(model, audited.backbone.tokenizer, f"{audited.name} in {quantization}")
    return AuditedModel(backbone.name, backbone, backbone.model, audited.tokenizer, is_bare=True)


def tokenizer_difference(base: Any, tuned: Any) -> str | None:
    """In words, why two tokenizers do not give one text the same ids; None when they do.

    Tokens that `tuned` has beyond those of `base` don't count.
    """
    if base is tuned:
        return None
    first, second = base.get_vocab(), tuned.get_vocab()
    moved = sum(second.get(token) != number for token, number in first.items())
    if moved:
        return f"{moved:,} of {len(first):,} tokens have another id or are missing"
    if any(base(text)["input_ids"] != tuned(text)["input_ids"] for text in _PROBES):
        return "one text gets different ids"
    return None


def template_difference(base: Any, tuned: Any) -> str | None:
    """In words, how the chat template of `tuned` differs from that of `base`; None where they render alike."""
    first, second = (_rendered_probe(tokenizer) for tokenizer in (base, tuned))
    if first == second:
        return None
    if first is None or second is None:
        return f"{'BASE' if first is None else 'TUNED'} has none"
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    ours, theirs = (text[max(0, at - 10) : at + 20] for text in (first, second))
    return f"{ours!r} of BASE is {theirs!r} in TUNED"


def _rendered_probe(tokenizer: Any) -> str | None:
    """A short conversation in a tokenizer's chat template; None without one."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": role, "content": content} for role, content in _CONVERSATION]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # of jinja, or raised by the template
        return f"can't be filled: {first_line(error)}"
