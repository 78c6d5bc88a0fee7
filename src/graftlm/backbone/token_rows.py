"""The rows of added tokens, which belong to a graft: their embeddings, and their rows of the output layer.

The backbone's modules keep their weights. The embedding reads another id in place of each added token, and its output
there is replaced by the token's own row. The output layer's logits get a logit of each added token.

Shape suffixes: B rows, T tokens, N selected tokens, K added tokens, V tokens of the backbone, d hidden width.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.backbone.added_tokens import ExtendedVocabulary
from graftlm.backbone.call import Call
from graftlm.backbone.sites import Site, Sites
from graftlm.backbone.taps import Tap
from graftlm.errors import BackboneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenRows(nn.Module):
    """The trainable rows of added tokens.

    Each begins as the mean of the rows of the old tokens that spell the token.

    Args:
        model: the backbone's model, which does not change.
        sites: its sites.
        extended: the added tokens.

    Attributes:
        extended: the added tokens.
        embedding: an embedding of the backbone's class, whose weight (K, d) also has the rows of the output layer if
            the backbone's are tied.
        head: (K, d); None if the backbone's are tied.
        bias: (K,); None if the output layer has no bias.
    """

    head: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, model: PreTrainedModel, sites: Sites, extended: ExtendedVocabulary) -> None:
        super().__init__()
        self.extended = extended
        embedding, head = _ends(sites)
        self.embedding = _embedding_like(embedding, _means(embedding.weight, extended))
        is_tied = head.weight is embedding.weight
        self.register_parameter("head", None if is_tied else _means(head.weight, extended))
        self.register_parameter("bias", None if head.bias is None else _means(head.bias, extended))

    @property
    def output_rows(self) -> nn.Parameter:
        """The rows of the output layer, (K, d)."""
        return cast("nn.Parameter", self.embedding.weight) if self.head is None else self.head

    @property
    def after_body(self) -> list[nn.Parameter]:
        """The parameters that act on the output layer."""
        return [self.output_rows] if self.bias is None else [self.output_rows, self.bias]

    def input_taps(self) -> list[Tap]:
        """Return the taps of the embedding, which come before those of other grafts."""
        site = Site("embedding")
        return [Tap(site, "before", "replace", self._hide), Tap(site, "after", "replace", self._embed)]

    def output_taps(self) -> list[Tap]:
        """Return the tap of the output layer, which comes after those of other grafts."""
        return [Tap(Site("head"), "after", "replace", self._append, takes_selection=True, reads_call=False)]

    def _hide(self, call: Call, ids_BT: Tensor) -> Tensor:
        """Replace the ids of added tokens by one that the embedding has."""
        number_BT = ids_BT - self.extended.first
        is_new_BT = (number_BT >= 0) & (number_BT < self.extended.count)
        call.scratch[self] = (is_new_BT, number_BT.clamp(0, self.extended.count - 1))
        return ids_BT.masked_fill(is_new_BT, 0)

    def _embed(self, call: Call, ids_BT: Tensor, hidden_BTd: Tensor) -> Tensor | None:
        """Return the embeddings with those of added tokens."""
        found = call.scratch.pop(self, None)
        if found is None:  # The embedding runs outside a pass of the model.
            return None
        is_new_BT, number_BT = found
        new_BTd = self.embedding(number_BT)
        return torch.where(is_new_BT[..., None], new_BTd.to(hidden_BTd.dtype), hidden_BTd)

    def _append(self, call: Call, states_BTd: Tensor, logits_BTV: Tensor) -> Tensor:
        """Return the logits with those of added tokens at the places of their ids."""
        bias = None if self.bias is None else self.bias.to(states_BTd.dtype)
        new_BTK = functional.linear(states_BTd, self.output_rows.to(states_BTd.dtype), bias)
        first, count = self.extended.first, self.extended.count
        # The vocabulary of a model is often padded, so that the backbone has logits of ids without a token.
        parts = [logits_BTV[..., :first], new_BTK.to(logits_BTV.dtype), logits_BTV[..., first + count :]]
        return torch.cat(parts, dim=-1)


def check_rows(model: PreTrainedModel, sites: Sites, extended: ExtendedVocabulary, name: str) -> None:
    """Check that rows can be added to a model.

    Args:
        model: the model.
        sites: its sites.
        extended: the added tokens.
        name: name of the backbone in messages.

    Raises:
        BackboneError: the model does not continue text, has fewer embeddings than the tokenizer has tokens, embeds
            tokens in each layer, or its embeddings or output layer are quantized.
    """
    if not sites.family.causal or model.get_output_embeddings() is None:
        raise BackboneError(
            f"Tokens are added to models that continue text, but {name} is a {sites.model_type} model without an "
            "output layer of that kind: leave out add_tokens, or name a causal language model."
        )
    if getattr(sites.config, "hidden_size_per_layer_input", 0):
        raise BackboneError(
            f"{name} has embeddings of tokens in each layer, of which an added token would have none: leave out "
            "add_tokens, or use another backbone."
        )
    embedding, head = _ends(sites)
    plain = ((embedding, "embeddings", nn.Embedding), (head, "output layer", nn.Linear))
    for module, part, kind in plain:
        weight = module._parameters.get("weight")
        is_plain = isinstance(module, kind) and type(weight) is nn.Parameter and weight.is_floating_point()
        if not is_plain or weight is None:
            found = f"{type(module).__name__} with weights of the type {type(weight).__name__}"
            raise BackboneError(
                f"The {part} of {name} are a {found}, as after quantization, but rows can be added to plain "
                "floating-point weights only: load the backbone without quantization."
            )
        if weight.shape[0] < extended.first:
            raise BackboneError(
                f"The tokenizer of {name} has {extended.first:,} ids, but its {part} have {weight.shape[0]:,} rows: "
                "pass the model's own tokenizer."
            )


def _ends(sites: Sites) -> tuple[nn.Embedding, nn.Linear]:
    """Return the modules of the token embeddings and of the output layer, see `check_rows`."""
    embedding, _ = sites.module(Site("embedding"))
    head, _ = sites.module(Site("head"))
    return cast("nn.Embedding", embedding), cast("nn.Linear", head)


@torch.no_grad()
def _means(weight: Tensor, extended: ExtendedVocabulary) -> nn.Parameter:
    """Return for each added token the mean of the weight's rows that spell it, in float32."""
    means = [weight[list(spelling)].float().mean(0) for spelling in extended.spellings]
    return nn.Parameter(torch.stack(means))


def _embedding_like(module: nn.Embedding, weight: nn.Parameter) -> nn.Embedding:
    """Return an embedding of the same class, which may scale its rows, with other rows and without hooks."""
    embedding = copy.copy(module)
    own = vars(embedding)
    for name, value in own.items():
        if isinstance(value, OrderedDict):  # hooks
            own[name] = OrderedDict()
    own["_parameters"] = {"weight": weight}
    own["_buffers"] = dict(module._buffers)
    embedding.num_embeddings = len(weight)
    embedding.padding_idx = None
    return embedding
