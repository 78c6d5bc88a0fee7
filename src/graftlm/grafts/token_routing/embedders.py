"""What turns the text so far into a vector: the backbone's own states, or a sentence-transformers model.

Shape suffixes: B rows, T tokens of this pass, S tokens so far, d the vector's width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer

from graftlm.backbone import Backbone, Call, Site, max_sequence_length
from graftlm.backbone.cache import joined_columns, slots
from graftlm.errors import BackboneError, GraftError, MissingExtraError
from graftlm.grafts.token_routing.config import EmbedderConfig
from graftlm.grafts.token_routing.reading import Reading
from graftlm.grafts.token_routing.silent import Silent

PROBE = "The quick brown fox asks how much 12 + 30 is."


@dataclass
class Memo:
    """Sums over the tokens that were read so far, (B, d) and (B, 1), and how many columns they cover."""

    length: int = 0
    sums: Tensor | None = None
    counts: Tensor | None = None


class Embedder(Protocol):
    """Turns texts into vectors."""

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(texts, d) float32."""
        ...

    def prefixes(
        self, call: Call, reading: Reading, wanted_BT: Tensor, window: int | None, memo: Memo | None
    ) -> Tensor:
        """(B, T, d) float32: of each wanted token's document up to it, or of its last `window` tokens.

        `memo` is what a generation keeps from step to step; more of it may lie in the call's cache.
        """
        ...


class _OfBackbone:
    """Means of vectors of the backbone's own tokens, without special ones: no second model, no way back to text."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        tokenizer = backbone.tokenizer
        special = sorted(set(tokenizer.all_special_ids)) if tokenizer is not None else []
        self._special = torch.tensor(special, dtype=torch.long, device=backbone.device)

    def _said(self, ids: Tensor) -> Tensor:
        """False at special tokens, which say nothing about what a text is about."""
        if self._special.device != ids.device:
            self._special = self._special.to(ids.device)
        return torch.isin(ids, self._special, invert=True)

    def _means(self, reading: Reading, wanted_BT: Tensor, window: int | None, rows: Iterable[Tensor]) -> Tensor:
        """(B, T, d) the mean of what each wanted token's route reads, of (S, d) vectors for each row."""
        columns = torch.arange(reading.ids.shape[1], device=reading.ids.device)
        said_BS = self._said(reading.ids)
        found = []
        for row, (wanted_T, vectors_Sd) in enumerate(zip(wanted_BT, rows, strict=True)):
            own = columns[reading.past :][wanted_T]
            start = reading.start[row][wanted_T]
            first = start if window is None else torch.maximum(start, own - window + 1)
            read = ((columns >= first[:, None]) & (columns <= own[:, None]) & said_BS[row]).float()
            means = (read @ vectors_Sd.float()) / read.sum(-1, keepdim=True).clamp(min=1)
            found.append(means.new_zeros(len(wanted_T), means.shape[-1]).masked_scatter(wanted_T[:, None], means))
        return torch.stack(found)


class OfTokens(_OfBackbone):
    """The mean of the backbone's token embeddings; in generation, a running sum."""

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokenizer = self._backbone.need_tokenizer()
        found = []
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = torch.tensor(ids, dtype=torch.long, device=self._backbone.device)
            found.append((self._embed(tokens) * self._said(tokens)[:, None]).sum(0) / max(1, len(ids)))
        return torch.stack(found)

    def prefixes(
        self, call: Call, reading: Reading, wanted_BT: Tensor, window: int | None, memo: Memo | None
    ) -> Tensor:
        if memo is not None and window is None and wanted_BT.shape[1] == 1:
            return self._from_running_sums(reading, memo)[:, None]
        return self._means(reading, wanted_BT, window, (self._embed(row) for row in reading.ids))

    def _from_running_sums(self, reading: Reading, memo: Memo) -> Tensor:
        """(B, d) the mean up to the newest token, of sums that are kept from step to step."""
        new = reading.ids[:, memo.length :]
        columns = torch.arange(memo.length, reading.ids.shape[1], device=new.device)
        counted = ((columns >= reading.start[:, -1:]) & self._said(new)).float()
        sums, counts = (counted[:, None] @ self._embed(new))[:, 0], counted.sum(-1, keepdim=True)
        if memo.sums is not None and memo.counts is not None:
            sums, counts = sums + memo.sums, counts + memo.counts
        memo.length, memo.sums, memo.counts = reading.ids.shape[1], sums, counts
        return sums / counts.clamp(min=1)

    def _embed(self, ids: Tensor) -> Tensor:
        weight = self._backbone.sites.module(Site("embedding"))[0].get_parameter("weight")
        return functional.embedding(ids.to(weight.device), weight).detach().float().to(ids.device)


class _Read(DynamicLayer):
    """Keys and values, or states, of the tokens that were read so far, which may be some fewer than there are."""

    def join(self, layers: Sequence[DynamicLayer], paddings: Sequence[int]) -> DynamicLayer:
        """One layer of the rows of several, see `backbone.cache.join`: what one has not read, all read once more."""
        lengths = [layer.get_seq_length() for layer in layers]
        known = min(length + by for length, by in zip(lengths, paddings, strict=True))
        kept = [min(length, max(0, known - by)) for length, by in zip(lengths, paddings, strict=True)]
        for layer, length, count in zip(layers, lengths, kept, strict=True):
            layer.crop(count - length)
        return joined_columns(layers, [known - count for count in kept])


class OfStates(_OfBackbone):
    """The mean of the bare backbone's hidden states after its n-th layer.

    They come from a pass of its own over the text, in which no route acts: state i depends on tokens up to i alone, and
    never on how routes fell. In generation its keys and values, and the states, are layers of the generation's cache,
    so that each token goes once through the n layers, and beams and crops reach them.
    """

    def __init__(self, backbone: Backbone, layers: int) -> None:
        super().__init__(backbone)
        self._silent = Silent(backbone, layers)
        self._layers = layers
        self._causal = backbone.sites.family.causal

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokenizer = self._backbone.need_tokenizer()
        longest = max_sequence_length(self._backbone, tokenizer)
        found = []
        for text in texts:
            ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"][:longest]], dtype=torch.long)
            found.append(self._mean(ids.to(self._backbone.device)))
        return torch.stack(found)

    def prefixes(
        self, call: Call, reading: Reading, wanted_BT: Tensor, window: int | None, memo: Memo | None
    ) -> Tensor:
        states_BSd = self._run(call, reading) if call.cache is None else self._continue(call, reading, call.cache)
        return self._means(reading, wanted_BT, window, states_BSd)

    def _mean(self, ids_1T: Tensor) -> Tensor:
        """(d,) of one text; zero for one that says nothing."""
        said = self._said(ids_1T[0])
        if not said.any():
            return torch.zeros(self._backbone.sites.width, device=ids_1T.device)
        return self._silent.states(ids_1T, None, None, None)[0][said].float().mean(0)

    def _continue(self, call: Call, reading: Reading, cache: Cache) -> Tensor:
        """(B, S, d) the states of all tokens so far; those in the cache are not computed again."""
        taken = slots(cache, f"states {id(self)}", self._layers + 1, self._backbone.sites.n_layers, _Read)
        *own, last = (cache.layers[index] for index in taken)
        assert isinstance(last, DynamicLayer)
        silent = Cache(layers=own)
        states_BSd = self._run(call, reading, silent, last.get_seq_length())
        for index, layer in zip(taken, silent.layers, strict=False):
            cache.layers[index] = layer  # a backbone may have put in layers of its own kind
        last.update(states_BSd[:, None], states_BSd.new_empty(len(states_BSd), 1, states_BSd.shape[1], 0))
        assert last.keys is not None
        return last.keys[:, 0]

    def _run(self, call: Call, reading: Reading, own: Cache | None = None, known: int = 0) -> Tensor:
        """(B, S - known, d) the states of tokens that are not known yet, zero where nothing is said.

        A step at which no route is renewed leaves its token to the next one that asks.
        """
        mask, places = call.attention_mask, None
        if mask is not None and self._causal:
            places = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, known:]
        elif not reading.past:
            places = call.position_ids
        new = reading.ids[:, known:]
        states = self._silent.states(new, mask, places, own)
        said = self._said(new) if mask is None else self._said(new) & mask[:, known:].bool().to(new.device)
        return states.masked_fill(~said[..., None], 0)  # a state of padding may be no number


class OfSentences:
    """A sentence-transformers model, which reads the text so far again each time."""

    def __init__(self, config: EmbedderConfig, backbone: Backbone) -> None:
        self._model = _load(config, backbone.device)
        self._tokenizer = backbone.need_tokenizer()

    def texts(self, texts: Sequence[str]) -> Tensor:
        found = self._model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        return found.float()

    def prefixes(
        self, call: Call, reading: Reading, wanted_BT: Tensor, window: int | None, memo: Memo | None
    ) -> Tensor:
        places = wanted_BT.nonzero().tolist()
        texts = []
        for row, token in places:
            start, stop = int(reading.start[row, token]), reading.past + token + 1
            first = start if window is None else max(start, stop - window)
            ids = reading.ids[row, first:stop]
            texts.append(self._tokenizer.decode(ids, skip_special_tokens=True))
        vectors = self.texts(texts).to(wanted_BT.device)
        found = vectors.new_zeros(*wanted_BT.shape, vectors.shape[-1])
        found[wanted_BT] = vectors
        return found


def load_embedder(config: EmbedderConfig, backbone: Backbone) -> Embedder:
    """The embedder that a config names.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        BackboneError: there is no such model.
        GraftError: the backbone has no such layer.
    """
    if config.name != "backbone":
        return OfSentences(config, backbone)
    layers = _counted(config.layers, backbone)
    return OfStates(backbone, layers) if layers else OfTokens(backbone)


def _counted(layers: int, backbone: Backbone) -> int:
    """How many layers lie below some hidden states; negative numbers count from the end."""
    most = backbone.sites.n_layers
    if not -most - 1 <= layers <= most:
        raise GraftError(
            f"The embedder is to read the hidden states number {layers}, and {backbone.name} has those from 0, its "
            f"token embeddings, to {most}, after its last layer: set embedder.layers to one of them, or to -1."
        )
    return layers if layers >= 0 else most + 1 + layers


def _load(config: EmbedderConfig, device: torch.device) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise MissingExtraError("sentence-transformers", "routing", "A sentence embedder") from None
    try:
        return SentenceTransformer(
            config.name,
            device=str(device),
            trust_remote_code=config.trust_remote_code,
            model_kwargs={"use_safetensors": True},  # no pickle is read
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise BackboneError(
            f"The embedder {config.name} can't be loaded ({str(error).strip().splitlines()[0]}): name a "
            "sentence-transformers model or its folder, or backbone."
        ) from None
