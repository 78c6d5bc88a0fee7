"""Trained selectors: a model that ranks sentences, and what turns sentences into its inputs.

On disk a folder as transformers writes it (`config.json`, `model.safetensors`), with a `tokenizer.json` where it reads
tokens, and `selector.json`, which says what it was trained on.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
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
        tokenizer: where it reads tokens.
        name: as it is told to the user.
        record: what it was trained on, as JSON.
    """

    def __init__(
        self,
        model: SentenceSelector,
        tokenizer: PreTrainedTokenizerFast | None = None,
        name: str = "a trained selector",
        record: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name, self.record = model, tokenizer, name, record or {}

    def inputs(self, sentences: Sequence[str]) -> Tensor:
        """What the model reads: token ids, (N, T), or vectors, (N, v)."""
        config = self.model.config
        if config.reads == "vectors":
            assert config.encoder is not None, "a selector that reads vectors names their encoder"
            return sentence_embeddings(sentences, config.encoder, str(self.model.device))
        assert self.tokenizer is not None, "a selector that reads tokens has a tokenizer"
        rows = self.tokenizer(list(sentences), add_special_tokens=False)["input_ids"] if sentences else []
        cut = [row[: config.max_tokens] for row in rows]
        ids = torch.full((len(cut), max(map(len, cut), default=1) or 1), config.vocab_size)
        for place, row in enumerate(cut):
            ids[place, : len(row)] = torch.tensor(row, dtype=torch.long)
        return ids.to(self.model.device)

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """All sentences that may be taken; of a document longer than the model reads, piece by piece.

        The first of every piece comes before the second of any, and so on, as scores of different pieces don't compare.
        """
        selectable, size = document.selectable, self.model.config.max_sentences
        pieces = [selectable[first : first + size] for first in range(0, len(selectable), size)]
        ranked = [self._rank(document, piece) for piece in pieces]
        longest = max(map(len, ranked), default=0)
        return [piece[place] for place in range(longest) for piece in ranked if place < len(piece)]

    def _rank(self, document: SourceDocument, indices: Sequence[int]) -> list[RankedSentence]:
        self.model.eval()
        choice = self.model.choose(self.inputs([document.sentences[index].text for index in indices]))
        return [
            RankedSentence(indices[place], score) for place, score in zip(choice.indices, choice.scores, strict=True)
        ]

    def save(self, folder: str | Path) -> Path:
        """Write it: all of it or nothing.

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
    """A selector that `TrainedSelector.save` wrote.

    Raises:
        ArtifactError: the folder is no whole selector.
    """
    folder = Path(folder)
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        config = SentenceSelectorConfig.from_pretrained(folder)
        loading: Any = SentenceSelector.from_pretrained  # a pair, with output_loading_info
        model, found = loading(
            folder, config=config, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
        if found["missing_keys"] or found["unexpected_keys"] or found["mismatched_keys"]:
            raise ValueError("its tensors are not those of its config")
        tokenizer = None
        if config.reads == "tokens":
            tokenizer = as_tokenizer(Tokenizer.from_file(str(folder / TOKENIZER_NAME)))
    except GraftError as error:
        raise ArtifactError(f"{folder} is no whole selector ({str(error).rstrip('.')}): train it again.") from None
    except Exception as error:  # tokenizers raises nothing narrower, and transformers many things
        if isinstance(error, MemoryError | AssertionError):
            raise
        cause = "it does not exist" if not folder.exists() else _cause(error)
        raise ArtifactError(
            f"{folder} is no whole selector ({cause}): name a folder that train_selector wrote."
        ) from None
    model.to(device or default_device())
    return TrainedSelector(model.eval(), tokenizer, str(folder), record)


def _cause(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing" if error.filename else "a file is missing"
    if isinstance(error, SafetensorError | json.JSONDecodeError):
        return "a file is damaged"
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def as_tokenizer(pieces: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer without special tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=pieces, clean_up_tokenization_spaces=False)


def sentence_embeddings(sentences: Sequence[str], encoder: str, device: str = "cpu") -> Tensor:
    """Vectors of sentences by a frozen sentence-transformers model, (N, v) float32.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        BackboneError: the encoder can't be loaded.
    """
    model = _encoder(encoder, device)
    found = model.encode(list(sentences), convert_to_tensor=True, show_progress_bar=False, batch_size=64)
    return found.to(device=device, dtype=torch.float32).clone()  # of inference mode no more


@cache
def _encoder(name: str, device: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError:
        raise MissingExtraError("sentence-transformers", "routing", "A selector on sentence vectors") from None
    try:
        return SentenceTransformer(name, device=device)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0].rstrip(".")
        raise BackboneError(f"The encoder {name} can't be loaded ({cause}): name another.") from None


def vector_size(encoder: str) -> int:
    """Width of an encoder's vectors."""
    return sentence_embeddings(["one"], encoder).shape[1]
