"""Training of all weights of a classifier of sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from graftlm.backbone import max_sequence_length
from graftlm.config import Config
from graftlm.data.sequence_batches import PADDING_ID
from graftlm.data.sequence_config import SequenceConfig
from graftlm.data.sequences import SequenceTask
from graftlm.errors import ArtifactError, RecipeError, first_line
from graftlm.files.model_files import CLASSIFIER_RECORD
from graftlm.files.writing import staged_folder
from graftlm.grafted.model import GraftedOutput
from graftlm.models import register
from graftlm.training.new_config import config_errors, new_config

_OF_DATA = ("num_labels", "id2label", "label2id", "problem_type")


class ClassifierRecord(Config):
    """What a saved classifier records, with which rows are read and measured as in training.

    Args:
        data: the data section of the recipe.
        classes: names of the classes, in the order of their numbers.
        commonest: number of the commonest class of the training rows.
    """

    data: SequenceConfig
    classes: list[str]
    commonest: int


class SequenceClassifier(nn.Module):
    """A classifier with the forward signature of the training loop; all of its weights train.

    Args:
        model: a transformers model that classifies sequences; all of its parameters are set to require gradients.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        for parameter in model.parameters():
            parameter.requires_grad_(True)

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor,
        labels: Tensor,
        totals: Tensor | None = None,
    ) -> GraftedOutput:
        """Run one pass.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 at tokens and 0 at padding.
            labels: (B,) numbers of classes.
            totals: (2,); the first entry is the number of rows of the whole step. None counts those of `labels`.

        Returns:
            The loss in nats per row, as a part of the step's mean, the same loss detached as `lm_loss`, and the logits
            (B, classes).
        """
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        rows = len(labels) if totals is None else totals[0]
        loss = functional.cross_entropy(logits.float(), labels, reduction="sum") / rows
        return GraftedOutput(loss=loss, logits=logits, lm_loss=loss.detach())

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


def new_classifier(values: Mapping[str, object], task: SequenceTask, seed: int) -> PreTrainedModel:
    """Make a float32 classifier with random weights. Sets torch's global seed.

    Args:
        values: `model_type` and any other keys of its config, without those that follow from the classes.
        task: the task, whose vocabulary and classes the config gets.
        seed: seed of the weights.

    Raises:
        RecipeError: there is no such architecture for classifiers, a key or value does not fit it, or the model can't
            read the task's tokens or its longest sequence.
    """
    for key in _OF_DATA:
        if key in values:
            raise RecipeError(f"model has the key {key}, which follows from the classes of the data: remove it.")
    config = new_config(
        values,
        {"vocab_size": task.vocab_size, "pad_token_id": PADDING_ID},
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        "a classifier of sequences",
    )
    config.id2label = dict(enumerate(task.classes))
    config.label2id = {name: number for number, name in enumerate(task.classes)}
    config.problem_type = "single_label_classification"
    config.pad_token_id = PADDING_ID
    torch.manual_seed(seed)
    with config_errors(values, ValueError, TypeError, RuntimeError, ImportError, NotImplementedError):
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    _check_fit(model, task)
    return model


def _check_fit(model: PreTrainedModel, task: SequenceTask) -> None:
    """Raise `RecipeError` if a model can't read the sequences of a task."""
    size = getattr(model.config, "vocab_size", task.vocab_size)
    if size < task.vocab_size:
        raise RecipeError(
            f"model.vocab_size is {size}, but the data has {task.vocab_size} tokens: raise it, or leave it out."
        )
    longest = max(task.train.longest, task.test.longest)
    limit = max_sequence_length(model)
    if limit < longest:
        raise RecipeError(
            f"A sequence has {longest:,} tokens, but the model has {limit:,} positions: raise "
            "model.max_position_embeddings, or lower data.length."
        )
    check_lengths = getattr(model, "check_lengths", None)
    if callable(check_lengths):
        check_lengths(task.train.longest, longest)


def save_classifier(model: PreTrainedModel, record: ClassifierRecord, folder: Path) -> None:
    """Write a classifier. On an error, the folder is left unchanged.

    Args:
        model: a transformers model.
        record: how its rows are read.
        folder: the folder to write; an existing one is replaced.

    Raises:
        OSError: the folder can't be written.
    """
    with staged_folder(folder) as draft:
        model.save_pretrained(draft)
        (draft / CLASSIFIER_RECORD).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_classifier(folder: str | Path) -> tuple[PreTrainedModel, ClassifierRecord]:
    """Load a classifier that `save_classifier` wrote, in float32, and its record.

    Args:
        folder: its folder.

    Raises:
        ArtifactError: the folder is not a complete classifier, or its files are damaged.
    """
    path = Path(folder) / CLASSIFIER_RECORD
    remedy = "name the folder model of a finished run of kind: classifier"
    try:
        record = ClassifierRecord.parse(json.loads(path.read_text(encoding="utf-8")), where=str(path))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} can't be read ({first_line(error)}): {remedy}.") from None
    except RecipeError as error:
        raise ArtifactError(f"The record of a classifier can't be used ({first_line(error)}): {remedy}.") from None
    register()
    try:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ArtifactError(f"The classifier {folder} can't be loaded ({first_line(error)}): {remedy}.") from None
    return model, record
