"""Embedders of the text so far: the backbone's own hidden states, its rare words, or a sentence-transformers model.

Shape suffixes: B rows, T tokens of this pass, S tokens so far, d embedding width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, max_sequence_length
from graftlm.backbone.cache import slots
from graftlm.backbone.cache_joining import join_columns
from graftlm.errors import BackboneError, GraftError, first_line
from graftlm.files.extras import import_extra
from graftlm.grafts.token_routing.config import WORDS, EmbedderConfig
from graftlm.grafts.token_routing.routing_state import RouteSpans, RunningSum, prefix_texts
from graftlm.grafts.token_routing.silent_pass import SilentPass
from graftlm.grafts.token_routing.word_embedder import WordEmbedder

PROBE = "The quick brown fox asks how much 12 + 30 is."
"""A text whose embedding is saved next to the centroids, in order to detect another embedder."""


class Embedder(Protocol):
    """Turns texts into vectors."""

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Embed texts.

        Args:
            texts: the texts, at least one. Embedders of the backbone's states embed a text without tokens as zero.

        Returns:
            (texts, d) float32 embeddings.
        """
        ...

    def examples(self, texts: Sequence[str]) -> Tensor:
        """Embed the examples of an expert.

        Args:
            texts: the examples, at least one.

        Returns:
            (vectors, d) float32 embeddings, by default one vector for each text.
        """
        return self.texts(texts)

    def notes_on(self, texts: Sequence[str]) -> list[str]:
        """Return what the user should know about examples of an expert, as sentences; empty if all is well.

        Args:
            texts: the examples.
        """
        return []

    def scores(
        self,
        call: Call,
        spans: RouteSpans,
        running_sum: RunningSum | None,
        score: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Score the experts for prefixes: at each route update, the document up to and including that token.

        Args:
            call: the pass; an embedder may keep layers in its cache.
            spans: the spans of the pass.
            running_sum: sums that are kept from step to step of a generation; None without a cache.
            score: returns the scores of the experts, (..., E), for embeddings (..., d).

        Returns:
            (B, T, E) float32 scores; they are arbitrary where `spans.updates` is False.
        """
        ...


class _PrefixEmbedder(Embedder):
    """Embeds each prefix as one vector."""

    def scores(
        self,
        call: Call,
        spans: RouteSpans,
        running_sum: RunningSum | None,
        score: Callable[[Tensor], Tensor],
    ) -> Tensor:
        return score(self.prefixes(call, spans, running_sum))

    @abstractmethod
    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        """Return the embeddings (B, T, d) of the prefixes of `scores`, in float32."""


class _BackboneEmbedder(_PrefixEmbedder):
    """Means of vectors of the backbone's own tokens, without special tokens."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        special = [] if backbone.tokenizer is None else backbone.tokenizer.all_special_ids
        self._special = torch.tensor(special, dtype=torch.long, device=backbone.device)

    def _not_special(self, ids: Tensor) -> Tensor:
        """Return a mask that is False at special tokens, which carry no content."""
        self._special = self._special.to(ids.device)
        return torch.isin(ids, self._special, invert=True)

    def _means(self, spans: RouteSpans, vectors_BSd: Iterable[Tensor]) -> Tensor:
        """Compute the mean over the prefix of each update.

        Args:
            spans: the spans of the pass.
            vectors_BSd: vectors (S, d) of the tokens of each row.

        Returns:
            (B, T, d) means.
        """
        content_BS = self._not_special(spans.ids)
        if spans.end.shape[1] == 1:
            return _newest_means(spans, vectors_BSd, content_BS)
        columns = torch.arange(spans.ids.shape[1], device=spans.ids.device)
        window = spans.window or columns.numel()
        rows = []
        for row, (updates_T, vectors_Sd) in enumerate(zip(spans.updates, vectors_BSd, strict=True)):
            last = columns[spans.past :][updates_T]
            first = torch.maximum(spans.start[row][updates_T], last + 1 - window)
            is_after_first = columns >= first[:, None]
            is_before_last = columns <= last[:, None]
            mask = (is_after_first & is_before_last & content_BS[row]).float()
            counts = mask.sum(-1, keepdim=True).clamp(min=1)
            means = (mask @ vectors_Sd.float()) / counts
            empty_Td = means.new_zeros(len(updates_T), means.shape[-1])
            rows.append(empty_Td.masked_scatter(updates_T[:, None], means))
        return torch.stack(rows)


def _newest_means(spans: RouteSpans, vectors_BSd: Iterable[Tensor], content_BS: Tensor) -> Tensor:
    """Compute the means (B, 1, d) of a decode step.

    No tokens are selected by a mask, because the size of the selection would have to be read from the GPU.
    """
    columns = torch.arange(spans.ids.shape[1], device=spans.ids.device)
    window = spans.window or columns.numel()
    first = spans.start.clamp(min=columns.numel() - window)
    mask_BS = ((columns >= first) & content_BS).float()
    sums = []
    for mask_S, vectors_Sd in zip(mask_BS, vectors_BSd, strict=True):
        sums.append(mask_S @ vectors_Sd.float())
    counts_B1 = mask_BS.sum(-1, keepdim=True).clamp(min=1)
    means_Bd = torch.stack(sums) / counts_B1
    return means_Bd[:, None]


class TokenEmbedder(_BackboneEmbedder):
    """The mean of the backbone's token embeddings, which is a running sum in a generation.

    Args:
        backbone: the backbone.
    """

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokenizer = self._backbone.need_tokenizer()
        embeddings = []
        for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
            tokens = torch.tensor(ids, dtype=torch.long, device=self._backbone.device)
            content = self._not_special(tokens).float()
            total = content @ self._embed(tokens)
            embeddings.append(total / content.sum().clamp(min=1))
        return torch.stack(embeddings)

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        is_decode_step = spans.end.shape[1] == 1
        if running_sum is not None and spans.window is None and is_decode_step:
            return self._from_running_sum(spans, running_sum)[:, None]
        return self._means(spans, (self._embed(row) for row in spans.ids))

    def _from_running_sum(self, spans: RouteSpans, running_sum: RunningSum) -> Tensor:
        """Return the mean (B, d) up to the newest token, and update `running_sum`."""
        new = spans.ids[:, running_sum.length :]
        columns = torch.arange(running_sum.length, spans.ids.shape[1], device=new.device)
        in_document = columns >= spans.start[:, -1:]
        mask = (in_document & self._not_special(new)).float()
        new_sums = mask[:, None] @ self._embed(new)
        sums = new_sums[:, 0] + running_sum.sums
        counts = mask.sum(-1, keepdim=True) + running_sum.counts
        running_sum.length = spans.ids.shape[1]
        running_sum.sums = sums
        running_sum.counts = counts
        return sums / counts.clamp(min=1)

    def _embed(self, ids: Tensor) -> Tensor:
        embedding = self._backbone.sites.module(Site("embedding"))[0]
        weight = embedding.get_parameter("weight")
        vectors = functional.embedding(ids.to(weight.device), weight)
        return vectors.detach().float().to(ids.device)


class _EmbedderCacheLayer(DynamicLayer):
    """Keys and values, or hidden states, of the embedder's own pass, which may lag behind the generation."""

    def join(self, layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
        """Join the rows of several layers, as `backbone.cache_joining.join` requires.

        Columns that one of the generations has not computed are dropped from all of them, and computed again.

        Args:
            layers: one layer for each generation, including this one; they are cropped in place.
            paddings: number of columns of padding before each layer.

        Returns:
            The layer of all rows.
        """
        lengths = []
        for layer, padding in zip(layers, paddings, strict=True):
            lengths.append(layer.get_seq_length() + padding)
        common = min(lengths)
        new_paddings = []
        for layer, padding in zip(layers, paddings, strict=True):
            kept = max(0, common - padding)  # at most the length of the layer
            layer.crop(kept - layer.get_seq_length())
            new_paddings.append(common - kept)
        return join_columns(layers, new_paddings)


class HiddenStateEmbedder(_BackboneEmbedder):
    """The mean of the bare backbone's hidden states after its n-th layer.

    The states are computed by a `SilentPass` without any route, so that state i depends only on tokens up to i. In a
    generation, the keys and values of that pass, and the states, are layers of the generation's cache. Therefore each
    token passes the n layers once, and beam search and cropping apply to them.

    Args:
        backbone: the backbone.
        layers: n, at least 1.

    Raises:
        BackboneError: another library has replaced the forward methods of the backbone's modules.
    """

    def __init__(self, backbone: Backbone, layers: int) -> None:
        super().__init__(backbone)
        self._silent_pass = SilentPass(backbone, layers)
        self._layers = layers
        self._causal = backbone.sites.family.causal

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokenizer = self._backbone.need_tokenizer()
        limit = max_sequence_length(self._backbone, tokenizer)
        embeddings = []
        for tokens in tokenizer(list(texts), verbose=False)["input_ids"]:
            kept = tokens[:limit]
            ids = torch.tensor([kept], dtype=torch.long, device=self._backbone.device)
            embeddings.append(self._mean_state(ids))
        return torch.stack(embeddings)

    def _mean_state(self, ids_1S: Tensor) -> Tensor:
        content_S = self._not_special(ids_1S[0])
        if not content_S.any():
            return torch.zeros(self._backbone.sites.width, device=ids_1S.device)
        states_1Sd = self._silent_pass.states(ids_1S, mask_BS=None, positions_BT=None, cache=None)
        return states_1Sd[0][content_S].float().mean(0)

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        if call.cache is None:
            states_BSd = self._run(call, spans)
        else:
            states_BSd = self._run_cached(call, spans, call.cache)
        return self._means(spans, states_BSd)

    def _run_cached(self, call: Call, spans: RouteSpans, cache: Cache) -> Tensor:
        """Return the states of all tokens so far, (B, S, d); only those absent from the cache are computed."""
        indices = slots(
            cache,
            owner=f"states {id(self)}",
            count=self._layers + 1,
            backbone_layers=self._backbone.sites.n_layers,
            make=_EmbedderCacheLayer,
        )
        layers = [cache.layers[index] for index in indices]
        states_layer = layers.pop()
        assert isinstance(states_layer, DynamicLayer)
        own_cache = Cache(layers=layers)
        states_BSd = self._run(call, spans, own_cache, known=states_layer.get_seq_length())
        for index, layer in zip(indices, own_cache.layers, strict=False):
            cache.layers[index] = layer  # the backbone may have replaced a layer by one of another class
        no_values = states_BSd.new_empty(len(states_BSd), 1, states_BSd.shape[1], 0)
        states_layer.update(states_BSd[:, None], no_values)
        assert states_layer.keys is not None
        return states_layer.keys[:, 0]

    def _run(self, call: Call, spans: RouteSpans, own_cache: Cache | None = None, known: int = 0) -> Tensor:
        """Compute the states of the tokens after the first `known`; they are zero at special tokens and padding.

        A decode step without a route update skips this pass; its token is computed at the next update.

        Args:
            call: the pass.
            spans: the spans of the pass.
            own_cache: cache of the silent pass; None without one.
            known: number of tokens whose states are in the cache.

        Returns:
            (B, S - known, d) states.
        """
        mask = call.attention_mask
        positions: Tensor | None = None
        if mask is not None and self._causal:
            all_positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            positions = all_positions[:, known:]
        elif not spans.past:
            positions = call.position_ids
        new = spans.ids[:, known:]
        states = self._silent_pass.states(new, mask, positions, own_cache)
        content = self._not_special(new)
        if mask is not None:
            real = mask[:, known:].bool()
            content = content & real.to(new.device)
        return states.masked_fill(~content[..., None], 0)  # states of padding may be NaN


class SentenceEmbedder(_PrefixEmbedder):
    """A sentence-transformers model, which reads the whole text so far at each update.

    Args:
        config: name of the model, and whether its own code may run.
        backbone: the backbone, whose tokenizer decodes the text.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        BackboneError: the model can't be loaded, or the backbone has no tokenizer.
    """

    def __init__(self, config: EmbedderConfig, backbone: Backbone) -> None:
        library = import_extra("routing", "sentence_transformers", "A sentence embedder")
        try:
            self._model = library.SentenceTransformer(
                config.name,
                device=str(backbone.device),
                trust_remote_code=config.trust_remote_code,
                model_kwargs={"use_safetensors": True},  # pickles are never read
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise BackboneError(
                f"The embedder {config.name} can't be loaded ({first_line(error)}): set embedder.name to a "
                "sentence-transformers model, its folder, or backbone."
            ) from None
        self._tokenizer = backbone.need_tokenizer()
        self._width = len(self.texts([PROBE])[0])

    def texts(self, texts: Sequence[str]) -> Tensor:
        embeddings = self._model.encode(
            list(texts),
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        return embeddings.float()

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        embeddings = torch.zeros(*spans.updates.shape, self._width, device=spans.ids.device)
        texts = prefix_texts(spans, self._tokenizer)
        if texts:
            embeddings[spans.updates] = self.texts(texts).to(embeddings.device)
        return embeddings


def load_embedder(config: EmbedderConfig, backbone: Backbone) -> Embedder:
    """Build the embedder of a config.

    Args:
        config: configuration of the embedder.
        backbone: the backbone of the routing.

    Raises:
        GraftError: the backbone does not have the hidden states that `layers` selects.
        MissingExtraError: the embedder needs a package that is not installed.
        BackboneError: a sentence-transformers model can't be loaded, the backbone has no tokenizer although the
            embedder reads text, or its layers can't run outside of the model.
    """
    if config.name == WORDS:
        return WordEmbedder(backbone)
    if config.name != "backbone":
        return SentenceEmbedder(config, backbone)
    n_layers = backbone.sites.n_layers
    layers = config.layers
    if not -n_layers - 1 <= layers <= n_layers:
        raise GraftError(
            f"embedder.layers is {layers}, but {backbone.name} has hidden states from 0 (token embeddings) to "
            f"{n_layers} (after its last layer): set embedder.layers to one of them, or to -1."
        )
    if layers < 0:
        layers += n_layers + 1
    if layers == 0:
        return TokenEmbedder(backbone)
    return HiddenStateEmbedder(backbone, layers)
