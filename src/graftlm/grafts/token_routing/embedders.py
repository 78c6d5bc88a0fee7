"""Embedders of the text so far: the backbone's own hidden states, or a sentence-transformers model.

Shape suffixes: B rows, T tokens of this pass, S tokens so far, d embedding width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, max_sequence_length
from graftlm.backbone.backbone import clone_without_hooks
from graftlm.backbone.cache import slots
from graftlm.backbone.cache_joining import join_columns
from graftlm.errors import BackboneError, GraftError, first_line
from graftlm.files.extras import import_extra
from graftlm.grafts.token_routing.config import EmbedderConfig
from graftlm.grafts.token_routing.routing_state import RouteSpans, RunningSum

PROBE = "The quick brown fox asks how much 12 + 30 is."
"""Its embedding is saved beside the centroids, to detect another embedder."""


class Embedder(Protocol):
    """Turns texts into vectors."""

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(texts, d) float32 embeddings."""
        ...

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        """(B, T, d) float32 embeddings of prefixes: the document of each update up to and including that token.

        Args:
            call: the pass; an embedder may keep layers in its cache.
            spans: of the pass. Where `updates` is False, the result is arbitrary.
            running_sum: kept from step to step of a generation; None without a cache.
        """
        ...


class _BackboneEmbedder:
    """Means of vectors of the backbone's own tokens, special tokens excluded."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        special = [] if backbone.tokenizer is None else backbone.tokenizer.all_special_ids
        self._special = torch.tensor(special, dtype=torch.long, device=backbone.device)

    def _not_special(self, ids: Tensor) -> Tensor:
        """False at special tokens, which carry no content."""
        self._special = self._special.to(ids.device)
        return torch.isin(ids, self._special, invert=True)

    def _means(self, spans: RouteSpans, vectors_BSd: Iterable[Tensor]) -> Tensor:
        """(B, T, d) the mean over the prefix of each update, of one matrix (S, d) per row."""
        columns = torch.arange(spans.ids.shape[1], device=spans.ids.device)
        content_BS = self._not_special(spans.ids)
        if spans.end.shape[1] == 1:  # a decode step, which selects no tokens: that would wait for a GPU
            first = spans.start.clamp(min=columns.numel() - (spans.window or columns.numel()))
            mask_BS = ((columns >= first) & content_BS).float()
            sums_Bd = torch.stack([mask_S @ row.float() for mask_S, row in zip(mask_BS, vectors_BSd, strict=True)])
            return (sums_Bd / mask_BS.sum(-1, keepdim=True).clamp(min=1))[:, None]
        rows = []
        for row, (updates_T, vectors_Sd) in enumerate(zip(spans.updates, vectors_BSd, strict=True)):
            last = columns[spans.past :][updates_T]
            first = torch.maximum(spans.start[row][updates_T], last + 1 - (spans.window or columns.numel()))
            mask = ((columns >= first[:, None]) & (columns <= last[:, None]) & content_BS[row]).float()
            means = (mask @ vectors_Sd.float()) / mask.sum(-1, keepdim=True).clamp(min=1)
            rows.append(means.new_zeros(len(updates_T), means.shape[-1]).masked_scatter(updates_T[:, None], means))
        return torch.stack(rows)


class TokenEmbedder(_BackboneEmbedder):
    """The mean of the backbone's token embeddings; in generation, a running sum."""

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokenizer = self._backbone.need_tokenizer()
        embeddings = []
        for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]:
            tokens = torch.tensor(ids, dtype=torch.long, device=self._backbone.device)
            content = self._not_special(tokens).float()
            embeddings.append((content @ self._embed(tokens)) / content.sum().clamp(min=1))
        return torch.stack(embeddings)

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        if running_sum is not None and spans.window is None and spans.end.shape[1] == 1:
            return self._from_running_sum(spans, running_sum)[:, None]
        return self._means(spans, (self._embed(row) for row in spans.ids))

    def _from_running_sum(self, spans: RouteSpans, running_sum: RunningSum) -> Tensor:
        """(B, d) the mean up to the newest token; `running_sum` is updated."""
        new = spans.ids[:, running_sum.length :]
        columns = torch.arange(running_sum.length, spans.ids.shape[1], device=new.device)
        mask = ((columns >= spans.start[:, -1:]) & self._not_special(new)).float()
        sums, counts = (mask[:, None] @ self._embed(new))[:, 0], mask.sum(-1, keepdim=True)
        sums, counts = sums + running_sum.sums, counts + running_sum.counts
        running_sum.length, running_sum.sums, running_sum.counts = spans.ids.shape[1], sums, counts
        return sums / counts.clamp(min=1)

    def _embed(self, ids: Tensor) -> Tensor:
        weight = self._backbone.sites.module(Site("embedding"))[0].get_parameter("weight")
        return functional.embedding(ids.to(weight.device), weight).detach().float().to(ids.device)


class _EmbedderCacheLayer(DynamicLayer):
    """Keys and values, or hidden states, of the embedder's own pass, which may lag behind the generation."""

    def join(self, layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
        """One layer with the rows of several, see `backbone.cache.join`.

        Columns that one generation has not computed are dropped from all, and computed again.
        """
        common = min(layer.get_seq_length() + padding for layer, padding in zip(layers, paddings, strict=True))
        kept = [max(0, common - padding) for padding in paddings]  # at most the layer's length
        for layer, count in zip(layers, kept, strict=True):
            layer.crop(count - layer.get_seq_length())
        return join_columns(layers, [common - count for count in kept])


class HiddenStateEmbedder(_BackboneEmbedder):
    """The mean of the bare backbone's hidden states after its n-th layer.

    The states come from a `SilentPass` in which no route acts, so state i depends on tokens up to i only. In generation
    the keys and values of that pass, and the states, are layers of the generation's cache: each token passes the n
    layers once, and beam search and cropping apply.
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
            ids = torch.tensor([tokens[:limit]], dtype=torch.long, device=self._backbone.device)
            content = self._not_special(ids[0])
            if content.any():
                embeddings.append(self._silent_pass.states(ids, None, None, None)[0][content].float().mean(0))
            else:
                embeddings.append(torch.zeros(self._backbone.sites.width, device=ids.device))
        return torch.stack(embeddings)

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        states_BSd = self._run(call, spans) if call.cache is None else self._run_cached(call, spans, call.cache)
        return self._means(spans, states_BSd)

    def _run_cached(self, call: Call, spans: RouteSpans, cache: Cache) -> Tensor:
        """(B, S, d) the states of all tokens so far; only those absent from the cache are computed."""
        owner, first = f"states {id(self)}", self._backbone.sites.n_layers
        indices = slots(cache, owner, self._layers + 1, first, _EmbedderCacheLayer)
        *layers, states_layer = (cache.layers[index] for index in indices)
        assert isinstance(states_layer, DynamicLayer)
        own_cache = Cache(layers=layers)
        states_BSd = self._run(call, spans, own_cache, states_layer.get_seq_length())
        for index, layer in zip(indices, own_cache.layers, strict=False):
            cache.layers[index] = layer  # the backbone may have replaced a layer by one of another class
        states_layer.update(states_BSd[:, None], states_BSd.new_empty(len(states_BSd), 1, states_BSd.shape[1], 0))
        assert states_layer.keys is not None
        return states_layer.keys[:, 0]

    def _run(self, call: Call, spans: RouteSpans, own_cache: Cache | None = None, known: int = 0) -> Tensor:
        """(B, S - known, d) the states of the tokens after the first `known`; zero at special tokens and padding.

        A decode step without a route update skips this pass; its token is computed at the next update.
        """
        mask, positions = call.attention_mask, None
        if mask is not None and self._causal:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, known:]
        elif not spans.past:
            positions = call.position_ids
        new = spans.ids[:, known:]
        states = self._silent_pass.states(new, mask, positions, own_cache)
        content = self._not_special(new)
        if mask is not None:
            content = content & mask[:, known:].bool().to(new.device)
        return states.masked_fill(~content[..., None], 0)  # states of padding may be NaN


class SilentPass:
    """A pass of the bare backbone up to its n-th layer, with its live weights and without any hook.

    It may run inside a pass of the grafted model: no tap acts, and no graft is notified.

    Args:
        backbone: never changed; parameters and buffers are shared, also after `to`.
        layers: n, at least 1. After the last layer, the backbone's final norm is applied.

    Raises GraftError if another library has replaced the forward methods of the backbone's modules.
    """

    def __init__(self, backbone: Backbone, layers: int) -> None:
        family = backbone.sites.family
        self._model: Any = clone_without_hooks(backbone.model.base_model, backbone.name).eval()
        self._layers = nn.ModuleList(list(self._model.get_submodule(family.layers))[:layers])
        self._model.set_submodule(family.layers, self._layers)
        if layers < backbone.sites.n_layers and family.norm is not None:
            self._model.set_submodule(family.norm, nn.Identity())

    @torch.no_grad()
    def states(
        self, ids_BT: Tensor, mask_BS: Tensor | None, positions_BT: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """(B, T, d) hidden states, in the backbone's own precision.

        Args:
            mask_BS: 1 for tokens, 0 for padding, cached columns included; None for no padding.
            positions_BT: positions; None to count from the end of the cache.
            cache: of these layers; it grows by this pass.

        Raises GraftError if the backbone's weights are sharded over processes.
        """
        if isinstance(next(self._layers.parameters()), DTensor):
            raise GraftError(
                "The backbone is sharded over processes, where its hidden states can't be read for routes: train with "
                "training.sharded at false, or set embedder.layers to 0."
            )
        with torch.autocast(ids_BT.device.type, enabled=False):
            inputs: dict[str, Any] = {"input_ids": ids_BT, "attention_mask": mask_BS, "position_ids": positions_BT}
            cached = {} if cache is None else {"past_key_values": cache}
            return self._model(**inputs, **cached, use_cache=cache is not None).last_hidden_state


class SentenceEmbedder:
    """A sentence-transformers model, which reads the whole text so far at each update.

    Raises MissingExtraError if sentence-transformers is not installed, and BackboneError if the model can't be loaded.
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
                f"The embedder {config.name} can't be loaded ({first_line(error)}): name a "
                "sentence-transformers model or its folder, or backbone."
            ) from None
        self._tokenizer = backbone.need_tokenizer()

    def texts(self, texts: Sequence[str]) -> Tensor:
        return self._model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False).float()

    def prefixes(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        texts = []
        for row, token in spans.updates.nonzero().tolist():
            stop = spans.past + token + 1
            first = max(int(spans.start[row, token]), stop - (spans.window or stop))
            texts.append(self._tokenizer.decode(spans.ids[row, first:stop], skip_special_tokens=True))
        vectors = self.texts(texts).to(spans.ids.device)
        embeddings = vectors.new_zeros(*spans.updates.shape, vectors.shape[-1])
        embeddings[spans.updates] = vectors
        return embeddings


def load_embedder(config: EmbedderConfig, backbone: Backbone) -> Embedder:
    """The embedder that a config names."""
    if config.name != "backbone":
        return SentenceEmbedder(config, backbone)
    layers, n_layers = config.layers, backbone.sites.n_layers
    if not -n_layers - 1 <= layers <= n_layers:
        raise GraftError(
            f"embedder.layers is {layers}, but {backbone.name} has hidden states from 0 (token embeddings) to "
            f"{n_layers} (after its last layer): set embedder.layers to one of them, or to -1."
        )
    layers = layers if layers >= 0 else n_layers + 1 + layers
    return HiddenStateEmbedder(backbone, layers) if layers else TokenEmbedder(backbone)
