"""What turns the text so far into a vector: the backbone's own token embeddings, or a sentence-transformers model.

Shape suffixes: B rows, T tokens of this pass, S tokens so far, d the vector's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from graftlm.backbone import Backbone, Site
from graftlm.errors import BackboneError, MissingExtraError
from graftlm.grafts.token_routing.config import EmbedderConfig
from graftlm.grafts.token_routing.reading import Reading

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

    def prefixes(self, reading: Reading, wanted_BT: Tensor, window: int | None, memo: Memo | None) -> Tensor:
        """(B, T, d) float32: of each wanted token's document up to it, or of its last `window` tokens.

        `memo` is what a generation keeps from step to step.
        """
        ...


class OfBackbone:
    """The mean of the backbone's token embeddings, without special tokens: no second model, no way back to text."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        tokenizer = backbone.tokenizer
        special = sorted(set(tokenizer.all_special_ids)) if tokenizer is not None else []
        self._special = torch.tensor(special, dtype=torch.long, device=backbone.device)

    def texts(self, texts: Sequence[str]) -> Tensor:
        tokenizer = self._backbone.need_tokenizer()
        found = []
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens = torch.tensor(ids, dtype=torch.long, device=self._backbone.device)
            found.append((self._embed(tokens) * self._said(tokens)[:, None]).sum(0) / max(1, len(ids)))
        return torch.stack(found)

    def prefixes(self, reading: Reading, wanted_BT: Tensor, window: int | None, memo: Memo | None) -> Tensor:
        if memo is not None and window is None and wanted_BT.shape[1] == 1:
            return self._from_running_sums(reading, memo)[:, None]
        ids = reading.ids
        columns = torch.arange(ids.shape[1], device=ids.device)
        said_BS = self._said(ids)
        rows = []
        for row, wanted_T in enumerate(wanted_BT):
            own = columns[reading.past :][wanted_T]
            start = reading.start[row][wanted_T]
            first = start if window is None else torch.maximum(start, own - window + 1)
            read = ((columns >= first[:, None]) & (columns <= own[:, None]) & said_BS[row]).float()
            means = (read @ self._embed(ids[row])) / read.sum(-1, keepdim=True).clamp(min=1)
            rows.append(means.new_zeros(len(wanted_T), means.shape[-1]).masked_scatter(wanted_T[:, None], means))
        return torch.stack(rows)

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
        weight: Tensor = self._backbone.sites.module(Site("embedding"))[0].weight  # type: ignore[assignment]
        return functional.embedding(ids.to(weight.device), weight).detach().float().to(ids.device)

    def _said(self, ids: Tensor) -> Tensor:
        """False at special tokens, which say nothing about what a text is about."""
        if self._special.device != ids.device:
            self._special = self._special.to(ids.device)
        return torch.isin(ids, self._special, invert=True)


class OfSentences:
    """A sentence-transformers model, which reads the text so far again each time."""

    def __init__(self, config: EmbedderConfig, backbone: Backbone) -> None:
        self._model = _load(config, backbone.device)
        self._tokenizer = backbone.need_tokenizer()

    def texts(self, texts: Sequence[str]) -> Tensor:
        found = self._model.encode(list(texts), convert_to_tensor=True, show_progress_bar=False)
        return found.float()

    def prefixes(self, reading: Reading, wanted_BT: Tensor, window: int | None, memo: Memo | None) -> Tensor:
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
