"""Trained selectors: a `SentenceSelector` model with its tokenizer or frozen sentence encoder.

A saved selector is a folder: `config.json` and `model.safetensors` as transformers writes them, `tokenizer.json` if the
model reads tokens, and `selector.json` with the record of its training.
"""

from __future__ import annotations

import itertools
import json
import shutil
import uuid
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from graftlm.backbone import default_device
from graftlm.errors import ArtifactError, BackboneError, GraftError, MissingExtraError
from graftlm.io import put_in_place, sync
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import RankedSentence

RECORD_NAME, TOKENIZER_NAME = "selector.json", "tokenizer.json"


class TrainedSelector:
    """A selector that was trained on extracts.

    Args:
        model: the model.
        tokenizer: tokenizer of a model that reads tokens.
        name: name for people.
        record: JSON record of the training.
    """

    def __init__(
        self,
        model: SentenceSelector,
        tokenizer: PreTrainedTokenizerFast | None = None,
        name: str = "a trained selector",
        record: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name, self.record = model, tokenizer, name, record or {}

    def model_inputs(self, sentences: Sequence[str]) -> Tensor:
        """Return the model's inputs: padded token ids, (N, T), or sentence embeddings, (N, v)."""
        config = self.model.config
        if config.input_type == "embeddings":
            assert config.sentence_encoder is not None, "the config of a selector of embeddings names their encoder"
            return sentence_embeddings(sentences, config.sentence_encoder, str(self.model.device))
        assert self.tokenizer is not None, "a selector of tokens has a tokenizer"
        rows = self.tokenizer(list(sentences), add_special_tokens=False)["input_ids"] if sentences else []
        rows = [row[: config.max_tokens] for row in rows]
        ids = torch.full((len(rows), max(map(len, rows), default=1) or 1), config.vocab_size)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, dtype=torch.long)
        return ids.to(self.model.device)

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Rank all selectable sentences. A long document is ranked in windows of `max_sentences`.

        Scores of different windows are not comparable. The best sentence of every window therefore comes first, then
        the second best of every window, and so on.
        """
        selectable, size = document.selectable, self.model.config.max_sentences
        windows = [selectable[first : first + size] for first in range(0, len(selectable), size)]
        rounds = itertools.zip_longest(*(self._rank_window(document, window) for window in windows))
        return [ranked for candidates in rounds for ranked in candidates if ranked is not None]

    def _rank_window(self, document: SourceDocument, indices: Sequence[int]) -> list[RankedSentence]:
        self.model.eval()
        output = self.model.rank(self.model_inputs([document.sentences[index].text for index in indices]))
        return [RankedSentence(indices[i], score) for i, score in zip(output.indices, output.scores, strict=True)]

    def save(self, folder: str | Path) -> Path:
        """Write the selector to a folder, completely or not at all.

        Raises:
            ArtifactError: the folder holds something else.
        """
        folder = Path(folder)
        if folder.exists() and any(folder.iterdir()) and not (folder / RECORD_NAME).is_file():
            raise ArtifactError(f"{folder} holds something that is no selector: name an empty or a new folder.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            self.model.save_pretrained(draft)
            if self.tokenizer is not None:
                self.tokenizer.backend_tokenizer.save(str(draft / TOKENIZER_NAME))
            (draft / RECORD_NAME).write_text(json.dumps(self.record, indent=2) + "\n", encoding="utf-8")
            for path in [*draft.iterdir(), draft]:
                sync(path)
            put_in_place(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return folder


def load_selector(folder: str | Path, *, device: str | None = None) -> TrainedSelector:
    """Load a selector that `TrainedSelector.save` wrote.

    Raises:
        ArtifactError: the folder holds no complete selector.
    """
    folder = Path(folder)
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        model = _load_model(folder)
        tokenizer = _load_tokenizer(folder) if model.config.input_type == "tokens" else None
    except GraftError as error:
        raise ArtifactError(f"{folder} is no whole selector ({str(error).rstrip('.')}): train it again.") from None
    except Exception as error:  # tokenizers raises plain exceptions, and transformers many kinds
        if isinstance(error, MemoryError | AssertionError):
            raise
        cause = "it does not exist" if not folder.exists() else _cause(error)
        raise ArtifactError(
            f"{folder} is no whole selector ({cause}): name a folder that train_selector wrote."
        ) from None
    model.to(device or default_device())
    return TrainedSelector(model.eval(), tokenizer, str(folder), record)


def _load_model(folder: Path) -> SentenceSelector:
    config = SentenceSelectorConfig.from_pretrained(folder)
    from_pretrained: Any = SentenceSelector.from_pretrained  # returns a pair with output_loading_info
    model, info = from_pretrained(
        folder, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError("its tensors are not those of its config")
    return model


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER_NAME), clean_up_tokenization_spaces=False)


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing" if error.filename else "a file is missing"
    if isinstance(error, SafetensorError | json.JSONDecodeError):
        return "a file is damaged"
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def sentence_embeddings(sentences: Sequence[str], encoder: str, device: str = "cpu") -> Tensor:
    """Embed sentences with a frozen sentence-transformers model; returns (N, v) in float32.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        BackboneError: the encoder can't be loaded.
    """
    embeddings = _load_encoder(encoder, device).encode(
        list(sentences), convert_to_tensor=True, show_progress_bar=False, batch_size=64
    )
    return embeddings.to(device=device, dtype=torch.float32).clone()  # a clone is no inference tensor


@cache
def _load_encoder(name: str, device: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError:
        raise MissingExtraError("sentence-transformers", "routing", "A selector on sentence vectors") from None
    try:
        return SentenceTransformer(name, device=device)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise BackboneError(f"The encoder {name} can't be loaded ({cause}): name another.") from None
