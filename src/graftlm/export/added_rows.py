"""Write the rows of added tokens into the embeddings and the output layer of an exported model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graftlm.backbone import Backbone, Sites, TokenRows
from graftlm.errors import ArtifactError


@torch.no_grad()
def write_rows(model: PreTrainedModel, rows: TokenRows) -> None:
    """Write rows of added tokens into a model, whose vocabulary grows if they do not fit into its padding.

    Args:
        model: the model, which is changed.
        rows: the rows.
    """
    first = rows.extended.first
    last = first + rows.extended.count
    if last > _weight(model.get_input_embeddings()).shape[0]:
        model.resize_token_embeddings(last, mean_resizing=False)
    head = model.get_output_embeddings()
    written = [
        (_weight(model.get_input_embeddings()), rows.embedding.weight),
        (_weight(head), rows.output_rows),
    ]
    if rows.bias is not None:
        written.append((_weight(head, "bias"), rows.bias))
    for weight, values in written:
        weight[first:last] = values.to(weight.dtype)


def _weight(module: nn.Module | None, name: str = "weight") -> Tensor:
    return cast("Tensor", getattr(module, name))


def with_rows(backbone: Backbone, rows: TokenRows) -> Backbone:
    """Return a copy of a backbone whose own embeddings and output layer have the rows of added tokens.

    Args:
        backbone: the backbone, which does not change.
        rows: the rows.
    """
    model = copy.deepcopy(backbone.model)
    write_rows(model, rows)
    return replace(backbone, model=model, sites=Sites(model), extended=None, plain=None)


def check_no_rows(backbone: Backbone, form: str) -> None:
    """Raise `ArtifactError` if a backbone has added tokens, whose rows a form of export lacks.

    Args:
        backbone: the backbone.
        form: the form, as the subject of a clause.
    """
    if backbone.extended is not None:
        raise ArtifactError(
            f"The graft has rows of {backbone.extended.count:,} added tokens, which {form} lacks: export the graft "
            "alone as a model (graft export GRAFT --to FOLDER)."
        )
