"""Trained selectors: a `SentenceSelector` model with its tokenizer or frozen sentence encoder.

A saved selector is a folder: `config.json` and `model.safetensors` as transformers writes them, `tokenizer.json` if the
model reads tokens, and `selector.json` with the record of its training.

Shape suffixes: N sentences, T tokens, v size of sentence embeddings.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from graftlm.backbone import default_device
from graftlm.errors import ArtifactError, BackboneError, GraftError, first_line
from graftlm.files.extras import import_extra
from graftlm.files.writing import staged_folder
from graftlm.models.sentence_selector import SentenceSelector
from graftlm.pipelines.summarize.document import SourceDocument
from graftlm.pipelines.summarize.selection import RankedSentence

RECORD_NAME = "selector.json"
TOKENIZER_NAME = "tokenizer.json"
_ENCODER_BATCH = 64  # sentences in a batch of the encoder


@dataclass(eq=False)
class TrainedSelector:
    """A selector that was trained on extracts.

    Args:
        model: the model.
        tokenizer: its tokenizer; None for a model that reads sentence embeddings.
        name: human-readable name.
        record: JSON record of the training.
    """

    model: SentenceSelector
    tokenizer: PreTrainedTokenizerFast | None = None
    name: str = "a trained selector"
    record: dict[str, object] = field(default_factory=dict)

    def model_inputs(self, sentences: Sequence[str]) -> Tensor:
        """Return the model's inputs: padded token ids, int64, (N, T), or sentence embeddings, float32, (N, v).

        Args:
            sentences: N sentences. At most `max_tokens` tokens of each are kept.

        Raises:
            MissingExtraError: the model reads embeddings, and sentence-transformers is not installed.
            BackboneError: the model reads embeddings, and the encoder can't be loaded.
        """
        config = self.model.config
        if config.input_type == "embeddings":
            assert config.sentence_encoder is not None, "the config of a model of embeddings names an encoder"
            return sentence_embeddings(sentences, config.sentence_encoder, str(self.model.device))
        assert self.tokenizer is not None, "a model of tokens has a tokenizer"
        rows = []
        if sentences:
            encoded = self.tokenizer(list(sentences), add_special_tokens=False)
            rows = [ids[: config.max_tokens] for ids in encoded["input_ids"]]
        width = max((len(row) for row in rows), default=1) or 1
        padding_id = config.vocab_size
        padded = [row + [padding_id] * (width - len(row)) for row in rows]
        inputs = torch.tensor(padded, dtype=torch.long, device=self.model.device)
        return inputs.view(-1, width)

    def rank(self, document: SourceDocument) -> list[RankedSentence]:
        """Return the selectable sentences, best first. A long document is ranked in windows of `max_sentences`.

        Scores of different windows are not comparable. The best sentence of every window therefore comes first, then
        the second best of every window, and so on. Errors are those of `model_inputs`.
        """
        selectable = document.selectable
        size = self.model.config.max_sentences
        rankings = []
        for first in range(0, len(selectable), size):
            window = selectable[first : first + size]
            rankings.append(self._rank_window(document, window))
        ranked: list[RankedSentence] = []
        for candidates in itertools.zip_longest(*rankings):
            ranked.extend(candidate for candidate in candidates if candidate is not None)
        return ranked

    def _rank_window(self, document: SourceDocument, indices: Sequence[int]) -> list[RankedSentence]:
        texts = [document.sentences[index].text for index in indices]
        self.model.eval()
        output = self.model.rank(self.model_inputs(texts))
        pairs = zip(output.indices, output.scores, strict=True)
        return [RankedSentence(indices[position], score) for position, score in pairs]

    def save(self, folder: str | Path) -> Path:
        """Write the selector atomically, and return its folder.

        Args:
            folder: a new or empty folder, or the folder of another selector, which is replaced.

        Raises:
            ArtifactError: the folder has other content, or is a file.
        """
        folder = Path(folder)
        if folder.is_file():
            raise ArtifactError(f"{folder} is a file, but a folder is expected: name an empty or a new folder.")
        is_used = folder.exists() and any(folder.iterdir())
        if is_used and not (folder / RECORD_NAME).is_file():
            raise ArtifactError(
                f"The folder {folder} has files, but no {RECORD_NAME} of a selector: name an empty or a new folder."
            )
        record = json.dumps(self.record, indent=2)
        with staged_folder(folder) as draft:
            self.model.save_pretrained(draft)
            if self.tokenizer is not None:
                self.tokenizer.backend_tokenizer.save(str(draft / TOKENIZER_NAME))
            (draft / RECORD_NAME).write_text(record + "\n", encoding="utf-8")
        return folder


def load_selector(folder: str | Path, *, device: str | None = None) -> TrainedSelector:
    """Load a selector that `TrainedSelector.save` wrote.

    Args:
        folder: the folder.
        device: torch device of the model; None selects the fastest available one.

    Raises:
        ArtifactError: the folder does not exist, or a file in it is missing, damaged or does not fit the others.
    """
    folder = Path(folder)
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        model = _load_model(folder)
        tokenizer = None
        if model.config.input_type == "tokens":
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER_NAME))
    except (MemoryError, AssertionError):
        raise
    except GraftError as error:
        cause = str(error).rstrip(".")
        raise ArtifactError(f"{folder} is not a complete selector ({cause}): train it again.") from None
    except Exception as error:
        # tokenizers raises plain exceptions, and transformers exceptions of many types.
        cause = _cause(error) if folder.exists() else "it does not exist"
        raise ArtifactError(
            f"{folder} is not a complete selector ({cause}): name a folder that train_selector wrote."
        ) from None
    model.to(device or default_device())  # type: ignore[arg-type]  # transformers wraps the method
    return TrainedSelector(model.eval(), tokenizer, str(folder), record)


def _load_model(folder: Path) -> SentenceSelector:
    """Load the model of a folder, or raise `ValueError` if its tensors do not match its config."""
    # The annotation lacks the pair that `output_loading_info` returns.
    from_pretrained: Any = SentenceSelector.from_pretrained
    model, info = from_pretrained(
        folder,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError("its tensors do not match its config")
    return model


def _cause(error: Exception) -> str:
    """Return a short description of an error of loading."""
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing" if error.filename else "a file is missing"
    if isinstance(error, SafetensorError | json.JSONDecodeError):
        return "a file is damaged"
    return first_line(error)


def sentence_embeddings(sentences: Sequence[str], encoder: str, device: str = "cpu") -> Tensor:
    """Embed sentences with a frozen sentence-transformers model.

    Args:
        sentences: N sentences.
        encoder: name or folder of the model.
        device: device of the model and of the result.

    Returns:
        Embeddings in float32, (N, v).

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        BackboneError: the encoder can't be loaded.
    """
    model = _load_encoder(encoder, device)
    embeddings = model.encode(
        list(sentences),
        convert_to_tensor=True,
        show_progress_bar=False,
        batch_size=_ENCODER_BATCH,
    )
    embeddings = embeddings.to(device=device, dtype=torch.float32)
    return embeddings.clone()  # A clone is not an inference tensor, so training can use it.


@cache
def _load_encoder(name: str, device: str) -> Any:
    library = import_extra("routing", "sentence_transformers", "Embedding sentences")
    try:
        return library.SentenceTransformer(name, device=device)
    except (OSError, ValueError) as error:
        raise BackboneError(
            f"The encoder {name} can't be loaded ({_cause(error)}): name a sentence-transformers model, or its folder."
        ) from None
