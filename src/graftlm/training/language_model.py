"""Training of all weights of a causal language model, and of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from graftlm.backbone import OutputLayer, Sites, leading_bos, max_sequence_length
from graftlm.data.boundaries import Boundaries, check_boundaries
from graftlm.errors import BackboneError, RecipeError, UnknownFamilyError, first_line
from graftlm.files.writing import staged_folder
from graftlm.grafted.chunked_losses import loss_of_targets, predict_targets
from graftlm.grafted.losses import Targets, language_modelling_loss
from graftlm.grafted.model import GraftedOutput
from graftlm.models import register
from graftlm.training.config import TrainingConfig
from graftlm.training.new_config import config_errors, new_config


class LanguageModel(nn.Module):
    """A causal model with the forward signature of the training loop; all of its weights train.

    With stateful batches (`stream`), the model keeps a cache for each micro-batch; see `training.stateful`.

    Args:
        model: a transformers model with a language-modeling head; all of its parameters are set to require gradients.
            For stateful batches it also needs the methods `cache_tensors` and `cache_from_tensors`.
    """

    can_omit_logits: ClassVar[bool] = True
    """Whether `forward` takes `return_logits`, for the training loop, which needs only the loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(True)
        self._output_layer = _output_layer(model)
        self._caches: dict[int, Any] = {}
        """By the first stream of a micro-batch."""

    @property
    def body(self) -> nn.Module:
        """The model below its output layer."""
        return self.model.base_model

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
        return_logits: bool = True,
        **_: object,
    ) -> GraftedOutput:
        """Run one pass, and keep its cache for the next step if `stream` is given.

        Args:
            input_ids: (B, T) token ids.
            labels: (B, T) aligned with `input_ids`, -100 for tokens that are not predicted.
            attention_mask: (B, T), 1 for real tokens.
            position_ids: (B, T), which restart where separate documents of a row begin.
            totals: (1 + domains,); the first entry is the number of targets of the whole step. None counts those of
                `labels`.
            stream: (B,) index of the stream that each row belongs to; None where rows are independent.
            starts: (B,) bool, True where a row is the first of its stream. Either all rows start or none does; the
                others continue the last pass with the same first stream.
            return_logits: False returns only the loss, and the output layer runs only for the tokens before targets.
            _: further values of a batch, which are ignored.

        Returns:
            The loss in nats per token, the same loss detached as `lm_loss`, and the logits (B, T, V) or None.
        """
        optional = {"attention_mask": attention_mask, "position_ids": position_ids}
        given = {name: value for name, value in optional.items() if value is not None}
        key = None if stream is None else int(stream[0])
        cache = None
        if key is not None and starts is not None and not starts.any():
            cache = self._caches[key]
        inputs = {"input_ids": input_ids, "use_cache": key is not None, "past_key_values": cache, **given}
        logits = None
        if return_logits:
            output = self.model(**inputs)
            logits = output.logits
            loss = language_modelling_loss(logits, labels, totals)
        else:
            targets = Targets(labels)
            output, predictions = predict_targets(self.model, self._output_layer, targets, inputs)
            loss = loss_of_targets(predictions, targets, totals)
        if key is not None:
            self._caches[key] = output["past_key_values"]
        return GraftedOutput(loss=loss, logits=logits, lm_loss=loss.detach())

    def recurrent_state(self) -> dict[str, Tensor]:
        """Return the caches that the next step continues, as tensors by name."""
        tensors: dict[str, Tensor] = {}
        for key, cache in self._caches.items():
            for name, tensor in self.model.cache_tensors(cache).items():
                tensors[f"{key}/{name}"] = tensor
        return tensors

    def set_recurrent_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the caches by those that `recurrent_state` returned."""
        by_cache: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            key, _, inner = name.partition("/")
            by_cache.setdefault(int(key), {})[inner] = tensor.to(self.model.device)
        self._caches = {key: self.model.cache_from_tensors(values) for key, values in by_cache.items()}

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


def _output_layer(model: PreTrainedModel) -> OutputLayer | None:
    """Return the output layer of a model; None if its structure is unknown."""
    try:
        return OutputLayer.of(model, Sites(model))
    except UnknownFamilyError:
        return None


END_OF_TEXT = "<|eos|>"
MIN_VOCAB_SIZE = 257
"""One token for every byte, and the end-of-text token."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE tokenizer. It encodes every text, since every byte is a token.

    Args:
        texts: the training texts, each of which is read once.
        vocab_size: maximum number of tokens, including the end-of-text token; short texts yield fewer. At least
            `MIN_VOCAB_SIZE`, below which the tokenizer has that many tokens all the same.

    Returns:
        The tokenizer, whose end-of-text token also serves as padding.
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


def new_model(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """Make a float32 model with random weights. Sets torch's global seed.

    Args:
        values: `model_type` and any other keys of its config.
        tokenizer: the tokenizer whose vocabulary size and special tokens the config gets where `values` lacks them.
        seed: seed of the weights.

    Raises:
        RecipeError: there is no such architecture for language models, a key or value does not fit it, or `vocab_size`
            is smaller than the tokenizer's vocabulary.
    """
    config = _config(values, tokenizer)
    torch.manual_seed(seed)
    with config_errors(values, ValueError, TypeError, RuntimeError, ImportError, NotImplementedError):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _check_vocabulary(model, tokenizer, str(values["model_type"]))
    return model


def read_model(name: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load a pretrained model in float32.

    Args:
        name: a name on the hub, or a folder.
        tokenizer: the tokenizer that the model is trained with.

    Raises:
        BackboneError: there is no such model, it is not a causal language model in safetensors format, or its files are
            damaged.
        RecipeError: the model has fewer tokens than the tokenizer.
    """
    remedy = "name a causal language model on the hub, or a folder that contains one in safetensors format"
    with _load_errors(f"The model {name}", remedy):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
    _check_vocabulary(model, tokenizer, name)
    return model


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer.

    Args:
        name: a name on the hub, or a folder.

    Raises:
        BackboneError: there is no such tokenizer, or its files are damaged.
    """
    remedy = "name a folder that contains one, or learn one, as in tokenizer: {vocab_size: 4096}"
    with _load_errors(f"The tokenizer {name}", remedy):
        return AutoTokenizer.from_pretrained(name)


@contextmanager
def _load_errors(what: str, remedy: str) -> Iterator[None]:
    """Register GraftLM's architectures, and convert errors of loading in the block to `BackboneError`."""
    register()
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise BackboneError(f"{what} can't be loaded ({first_line(error)}): {remedy}.") from None


def check_rows(model: Any, *, length: int, longest: int, boundaries: Boundaries) -> None:
    """Check that a model can read the rows of a run.

    Args:
        model: a transformers model. If it has a method `check_lengths(length, longest)`, that is called too.
        length: tokens of a training row.
        longest: tokens of the longest window of the evaluation.
        boundaries: how documents share rows.

    Raises:
        RecipeError: the model has fewer positions than `length` or `longest`, `check_lengths` rejects them, or the
            model can't keep the documents of a row separate.
    """
    limit = max_sequence_length(model)
    if limit < max(length, longest):
        what = f"data.length is {length}" if limit < length else f"evaluation.lengths has {longest}"
        raise RecipeError(
            f"{what}, but the model has {limit} positions: lower it to {limit} or less, or choose a model with "
            "a larger max_position_embeddings."
        )
    if hasattr(model, "check_lengths"):
        model.check_lengths(length, longest)
    check_boundaries(model, boundaries, "use boundaries joined, or a model with position ids")


def check_stream(model: PreTrainedModel, config: TrainingConfig) -> None:
    """Check that a model can continue its rows from step to step.

    Args:
        model: a transformers model.
        config: the training section.

    Raises:
        RecipeError: the model lacks `cache_tensors` or `cache_from_tensors`, which models with a state of fixed size
            have, or the run uses gradient checkpointing.
    """
    if not (hasattr(model, "cache_tensors") and hasattr(model, "cache_from_tensors")):
        raise RecipeError(
            f"The cache of a {model.config.model_type} model can't be stored as a state of fixed size (the model lacks "
            "cache_tensors or cache_from_tensors), so its rows can't continue from step to step: set data.stream to "
            "false, or choose an architecture that has both."
        )
    if config.gradient_checkpointing:
        raise RecipeError(
            "data.stream and training.gradient_checkpointing are both true, but a streaming model reads each row once: "
            "set one of them to false."
        )


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer. On an error, the folder is left unchanged.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
        folder: the folder to write; an existing one is replaced.

    Raises:
        OSError: the folder can't be written.
    """
    with staged_folder(folder) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)


def _config(values: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the config of a new model; keys that `values` lacks are taken from the tokenizer."""
    end = tokenizer.eos_token_id
    padding = tokenizer.pad_token_id
    of_tokenizer = {
        "vocab_size": len(tokenizer),
        "eos_token_id": end,
        "pad_token_id": end if padding is None else padding,
        "bos_token_id": leading_bos(tokenizer),
    }
    return new_config(values, of_tokenizer, MODEL_FOR_CAUSAL_LM_MAPPING, "a causal language model")


def _check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if size < len(tokenizer):
        raise RecipeError(
            f"The tokenizer has {len(tokenizer):,} tokens, but the model {name} has {size:,}: name the tokenizer of a "
            "pretrained model, or leave vocab_size out of a new one."
        )
