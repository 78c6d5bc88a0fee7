"""What turns the text so far into a vector: the backbone's own token embeddings, or a sentence-transformers model.

Shape suffixes: B rows, T tokens of this pass, S tokens so far, d the vector's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.backbone import Backbone, Site
from graftlm.errors import BackboneError, MissingExtraError
from graftlm.grafts.token_routing.config import EmbedderConfig
from graftlm.grafts.token_routing.reading import Reading

PROBE = "The quick brown fox asks how much 12 + 30 is."


class Embedder(Protocol):
    """Turns texts into vectors."""

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(texts, d) float32."""
        ...

    def prefixes(self, reading: Reading, wanted_BT: Tensor, window: int | None) -> Tensor:
        """(B, T, d) float32: of each wanted token's document up to it, or of its last `window` tokens."""
        ...


class OfBackbone:
    """The mean of the backbone's token embeddings, without special tokens: no second model, no way back to text."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        tokenizer = backbone.tokenizer
        self._special = sorted(set(tokenizer.all_special_ids)) if tokenizer is not None else []

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokenizer = self._backbone.need_tokenizer()
        found = []
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = torch.tensor(ids, dtype=torch.long, device=self._backbone.device)
            found.append((self._embed(tokens) * self._said(tokens)[:, None]).sum(0) / max(1, len(ids)))
        return torch.stack(found)

    def prefixes(self, reading: Reading, wanted_BT: Tensor, window: int | None) -> Tensor:
        ids, start = reading.ids_BS, reading.start_BT
        columns = torch.arange(ids.shape[1], device=ids.device)
        own = columns[reading.past :]
        first = start if window is None else torch.maximum(start, own - window + 1)
        read_BTS = (columns >= first[..., None]) & (columns <= own[:, None]) & wanted_BT[..., None]
        read = (read_BTS & self._said(ids)[:, None]).float()
        read = read / read.sum(-1, keepdim=True).clamp(min=1)
        return read @ self._embed(ids)

    def _embed(self, ids: Tensor) -> Tensor:
        weight: Tensor = self._backbone.sites.module(Site("embedding"))[0].weight  # type: ignore[assignment]
        return functional.embedding(ids.to(weight.device), weight).float().to(ids.device)

    def _said(self, ids: Tensor) -> Tensor:
        """False at special tokens, which say nothing about what a text is about."""
        if not self._special:
            return torch.ones_like(ids, dtype=torch.bool)
        return torch.isin(ids, torch.tensor(self._special, device=ids.device), invert=True)


class OfSentences:
    """A sentence-transformers model, which reads the text so far again each time."""

    def __init__(self, config: EmbedderConfig, backbone: Backbone) -> None:
        self._model = _load(config, backbone.device)
        self._tokenizer = backbone.need_tokenizer()

    def texts(self, texts: Sequence[str]) -> Tensor:
        found = self._model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        return found.float()

    def prefixes(self, reading: Reading, wanted_BT: Tensor, window: int | None) -> Tensor:
        places = wanted_BT.nonzero().tolist()
        texts = []
        for row, token in places:
            start, stop = int(reading.start_BT[row, token]), reading.past + token + 1
            first = start if window is None else max(start, stop - window)
            ids = reading.ids_BS[row, first:stop]
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
    """
    return OfBackbone(backbone) if config.name == "backbone" else OfSentences(config, backbone)


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
