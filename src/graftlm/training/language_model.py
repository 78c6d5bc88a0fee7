"""A language model that trains with all of its weights: made from a recipe, and as the loop takes it."""

from __future__ import annotations

import inspect
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from graftlm.backbone import leading_bos, max_sequence_length
from graftlm.data.batch import check_apart
from graftlm.data.packing import Boundaries
from graftlm.errors import BackboneError, GraftError, RecipeError, did_you_mean
from graftlm.grafts.model import GraftedOutput, language_modelling_loss
from graftlm.io import put_in_place, sync
from graftlm.models import register
from graftlm.training.config import TrainingConfig


class LanguageModel(nn.Module):
    """A causal model as the training loop takes it: all of its weights train.

    Where rows go on from step to step (`lane`), the model keeps a recurrent state of each; see `training.lanes`.

    Args:
        model: a transformers model with a language-modelling head.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(True)
        self._caches: dict[int, Any] = {}  # by the first lane of the rows that a cache is of

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        totals: Tensor | None = None,
        lane: Tensor | None = None,
        begins: Tensor | None = None,
        **_: Any,
    ) -> GraftedOutput:
        """One pass.

        Args:
            input_ids: (B, T) token ids.
            labels: (B, T) aligned with them, -100 where nothing is predicted.
            attention_mask: (B, T), 1 for real tokens.
            position_ids: (B, T), which restart where documents of a row are kept apart.
            totals: its first entry is the number of targets of the whole step; None counts those of `labels`.
            lane: (B,) which text each row goes on with; None where rows stand for themselves.
            begins: (B,) whether it is the first row of its text; all rows begin, or none does.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        said = {name: value for name, value in given.items() if value is not None}
        key = -1 if lane is None else int(lane[0])
        cache = self._caches[key] if begins is not None and not begins.any() else None
        output = self.model(input_ids=input_ids, use_cache=lane is not None, past_key_values=cache, **said)
        logits = output.logits
        if lane is not None:
            self._caches[key] = output.past_key_values
        loss = language_modelling_loss(logits, labels, totals)
        return GraftedOutput(loss=loss, logits=logits, lm_loss=loss.detach())

    def recurrent_state(self) -> dict[str, Tensor]:
        """The tensors of all caches, by name: the state that the next step continues from."""
        return {
            f"{key}/{name}": tensor
            for key, cache in self._caches.items()
            for name, tensor in self.model.cache_tensors(cache).items()
        }

    def set_recurrent_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state that `recurrent_state` returned."""
        caches: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, _, inner = name.partition("/")
            caches.setdefault(int(key), {})[inner] = tensor.to(self.model.device)
        self._caches = {key: self.model.cache_from_tensors(tensors) for key, tensors in caches.items()}

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


def new_model(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """A model of a config's shape with random weights in float32, for the tokens of `tokenizer`.

    Args:
        values: `model_type` and any keys of its config; vocabulary and special tokens are the tokenizer's.
        seed: of the weights.

    Raises:
        RecipeError: there is no such architecture for language models, or a key or value does not fit it.
    """
    config = _config(values, tokenizer)
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except GraftError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError, NotImplementedError) as error:
        raise RecipeError(_misfit(values, error)) from None
    _check_vocabulary(model, tokenizer, str(values["model_type"]))
    return model


def read_model(name: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A model to go on from, in float32.

    Raises:
        BackboneError: there is none, or its files are broken.
        RecipeError: it has fewer tokens than the tokenizer.
    """
    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise BackboneError(
            f"The model {name} can't be loaded ({_first_line(error)}): name another, or mend its files."
        ) from None
    _check_vocabulary(model, tokenizer, name)
    return model


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by name or folder.

    Raises:
        BackboneError: there is none.
    """
    register()
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise BackboneError(
            f"The tokenizer {name} can't be loaded ({_first_line(error)}): name a folder that holds one, "
            "or learn one, as in tokenizer: {pieces: 4096}."
        ) from None


def check_rows(model: Any, *, length: int, longest: int, boundaries: Boundaries) -> None:
    """Make sure that a model takes rows of `length`, windows of `longest`, and documents apart where they are to be.

    Raises:
        RecipeError: it does not.
    """
    limit = max_sequence_length(model)
    if limit < max(length, longest):
        what = f"data.length is {length}" if limit < length else f"evaluation.lengths has {longest}"
        raise RecipeError(
            f"{what}, but the model has {limit} positions: lower it, or raise the model's max_position_embeddings."
        )
    if hasattr(model, "check_lengths"):
        model.check_lengths(length, longest)
    check_apart(model, boundaries)


def check_stream(model: Any, config: TrainingConfig) -> None:
    """Make sure that a model can go on from step to step.

    Raises:
        RecipeError: it keeps no state of fixed size, or the run is one in which it can't.
    """
    if not (hasattr(model, "cache_tensors") and hasattr(model, "cache_from_tensors")):
        raise RecipeError(
            f"A model of the type {model.config.model_type} remembers every token, so its rows can't go on from "
            "step to step: set data.stream to false, or take an architecture that keeps a state."
        )
    if config.gradient_checkpointing:
        raise RecipeError("Rows that go on are read once: set training.gradient_checkpointing or data.stream to false.")
    if PartialState().num_processes > 1:
        raise RecipeError("Rows that go on are read by one process: start one alone, or set data.stream to false.")


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer by `save_pretrained`: all of it or nothing, even when the process is killed.

    Raises:
        OSError: the folder can't be written to.
    """
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        for path in [*draft.iterdir(), draft]:
            sync(path)
        put_in_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _config(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    """The config of a new model."""
    register()
    name = values["model_type"]
    if name not in CONFIG_MAPPING:
        raise RecipeError(f"There is no architecture with the model_type {name!r}{did_you_mean(name, CONFIG_MAPPING)}.")
    kind: Any = CONFIG_MAPPING[name]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecipeError(f"Models of the type {name} do not read text from left to right: name another.")
    known = _known_keys(kind)
    given = {key: value for key, value in values.items() if key != "model_type"}
    for key in given:
        if key not in known:
            raise RecipeError(f"model: unknown key {key} for the model_type {name}{did_you_mean(key, known)}.")
    own = {key: value for key, value in _tokens(tokenizer).items() if key in known}
    try:
        return kind(**(own | given))
    except GraftError:
        raise
    except Exception as error:  # each config class raises its own
        raise RecipeError(_misfit(values, error)) from None


def _known_keys(kind: Any) -> set[str]:
    """The keys of a config class, without those that it says nothing about."""
    named = inspect.signature(kind.__init__).parameters.values()
    names = {one.name for one in named if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)} - {"self"}
    return names | set(kind.attribute_map)


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a config has to know of its tokenizer."""
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": end,
        "pad_token_id": end if pad is None else pad,
        "bos_token_id": leading_bos(tokenizer),
    }


def _check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if size < len(tokenizer):
        raise RecipeError(
            f"The tokenizer has {len(tokenizer):,} tokens, but the model {name} has {size:,}: take a tokenizer that "
            "belongs to it, or leave vocab_size out of a new model."
        )


def _misfit(values: Mapping[str, Any], error: Exception) -> str:
    return f"model: the keys of the model_type {values['model_type']} don't fit ({_first_line(error)}): change them."


def _first_line(error: Exception) -> str:
    """What an error says; of a validator's, what it found rather than which field it looked at."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    words = lines[1] if len(lines) > 1 and lines[0].endswith(":") else (lines or [type(error).__name__])[0]
    return words.rstrip(".:")[:200]
