"""A causal language model that trains with all of its weights, and its tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from graftlm.backbone import leading_bos, max_sequence_length
from graftlm.data.boundaries import Boundaries, check_boundaries
from graftlm.errors import BackboneError, GraftError, RecipeError, did_you_mean, first_line
from graftlm.files.writing import staged_folder
from graftlm.grafted.losses import language_modelling_loss
from graftlm.grafted.model import GraftedOutput
from graftlm.models import register
from graftlm.training.config import TrainingConfig


class LanguageModel(nn.Module):
    """A causal model with the forward signature of the training loop; all of its weights train.

    With stateful batches (`stream`), the model keeps one cache for each micro-batch; see `training.stateful`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(True)
        self._caches: dict[int, Any] = {}  # by the first stream of a micro-batch

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        totals: Tensor | None = None,
        stream: Tensor | None = None,
        starts: Tensor | None = None,
        **_: Any,
    ) -> GraftedOutput:
        """One pass.

        Args:
            input_ids: (B, T) token ids.
            labels: (B, T) aligned with them, -100 where nothing is predicted.
            attention_mask: (B, T), 1 for real tokens.
            position_ids: (B, T), which restart where documents of a row are kept apart.
            totals: its first entry is the number of targets of the whole step; None counts those of `labels`.
            stream: (B,) index of the text that each row continues; None where rows are independent.
            starts: (B,) whether a row is the first of its text. Either all rows start or none does.
        """
        optional = {"attention_mask": attention_mask, "position_ids": position_ids}
        given = {name: value for name, value in optional.items() if value is not None}
        key = -1 if stream is None else int(stream[0])
        cache = self._caches[key] if starts is not None and not starts.any() else None
        output = self.model(input_ids=input_ids, use_cache=stream is not None, past_key_values=cache, **given)
        if stream is not None:
            self._caches[key] = output.past_key_values
        loss = language_modelling_loss(output.logits, labels, totals)
        return GraftedOutput(loss=loss, logits=output.logits, lm_loss=loss.detach())

    def recurrent_state(self) -> dict[str, Tensor]:
        """The caches that the next step continues, as tensors by name."""
        return {
            f"{key}/{name}": tensor
            for key, cache in self._caches.items()
            for name, tensor in self.model.cache_tensors(cache).items()
        }

    def set_recurrent_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `recurrent_state` gave."""
        by_cache: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, _, inner = name.partition("/")
            by_cache.setdefault(int(key), {})[inner] = tensor.to(self.model.device)
        self._caches = {key: self.model.cache_from_tensors(values) for key, values in by_cache.items()}

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


END_OF_TEXT = "<|eos|>"
MIN_VOCAB_SIZE = 257  # every byte, and end-of-text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, end-of-text included; short texts give fewer.

    It encodes every text, since every byte is a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def new_model(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """A float32 model with random weights for the vocabulary and the special tokens of `tokenizer`.

    `values` are `model_type` and any other keys of its config.

    Raises RecipeError if there is no such architecture for language models, or a key or value does not fit it.
    """
    config = _config(values, tokenizer)
    torch.manual_seed(seed)
    with _fitting(values, ValueError, TypeError, RuntimeError, ImportError, NotImplementedError):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _check_vocabulary(model, tokenizer, str(values["model_type"]))
    return model


@contextmanager
def _fitting(values: Mapping[str, Any], *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except GraftError:
        raise
    except kinds as error:
        name = values["model_type"]
        why = f"model: keys of the model_type {name} don't fit ({first_line(error)}): change them."
        raise RecipeError(why) from None


def read_model(name: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A pretrained model in float32.

    Raises BackboneError if there is none or it is broken, RecipeError if it has fewer tokens than the tokenizer.
    """
    with _loading(f"The model {name}", "name another, or mend its files"):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
    _check_vocabulary(model, tokenizer, name)
    return model


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by name or folder. Raises BackboneError if there is none."""
    remedy = "name a folder that holds one, or learn one, as in tokenizer: {vocab_size: 4096}"
    with _loading(f"The tokenizer {name}", remedy):
        return AutoTokenizer.from_pretrained(name)


@contextmanager
def _loading(what: str, remedy: str) -> Iterator[None]:
    register()
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise BackboneError(f"{what} can't be loaded ({first_line(error)}): {remedy}.") from None


def check_rows(model: Any, *, length: int, longest: int, boundaries: Boundaries) -> None:
    """Check that a model takes rows of `length`, windows of `longest` and document boundaries; RecipeError if not."""
    limit = max_sequence_length(model)
    if limit < max(length, longest):
        what = f"data.length is {length}" if limit < length else f"evaluation.lengths has {longest}"
        why = f"{what}, but the model has {limit} positions: lower it, or raise the model's max_position_embeddings."
        raise RecipeError(why)
    if hasattr(model, "check_lengths"):
        model.check_lengths(length, longest)
    check_boundaries(model, boundaries)


def check_stream(model: Any, config: TrainingConfig) -> None:
    """Check that a model can continue its rows from step to step.

    Raises RecipeError if its state grows with the text, or the run uses gradient checkpointing.
    """
    if not (hasattr(model, "cache_tensors") and hasattr(model, "cache_from_tensors")):
        raise RecipeError(
            f"A model of the type {model.config.model_type} has a cache that grows with the text, so its rows "
            "can't continue from step to step: set data.stream to false, or choose an architecture with a state."
        )
    if config.gradient_checkpointing:
        raise RecipeError(
            "data.stream and training.gradient_checkpointing are both true, but a streaming model reads each row once: "
            "set one of them to false."
        )


def save_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer, all of it or nothing. Raises OSError if the folder can't be written to."""
    with staged_folder(folder) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)


def _config(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    register()
    name = values["model_type"]
    if name not in CONFIG_MAPPING:
        raise RecipeError(f"There is no architecture with the model_type {name!r}{did_you_mean(name, CONFIG_MAPPING)}.")
    kind: Any = CONFIG_MAPPING[name]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecipeError(f"Models of the type {name} are not causal language models: name another.")
    named = inspect.signature(kind.__init__).parameters.values()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = {parameter.name for parameter in named if parameter.kind in kinds} - {"self"} | {*kind.attribute_map}
    given = {key: value for key, value in values.items() if key != "model_type"}
    for key in given:
        if key not in known:
            raise RecipeError(f"model: unknown key {key} for the model_type {name}{did_you_mean(key, known)}.")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    own = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end if pad is None else pad}
    own["bos_token_id"] = leading_bos(tokenizer)
    with _fitting(values, Exception):  # each config class raises its own
        return kind(**({key: value for key, value in own.items() if key in known} | given))


def _check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if size < len(tokenizer):
        raise RecipeError(
            f"The tokenizer has {len(tokenizer):,} tokens, but the model {name} has {size:,}: take a tokenizer that "
            "belongs to it, or leave vocab_size out of a new model."
        )
