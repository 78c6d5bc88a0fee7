"""Rivals that learn from the training documents: the package's trained selectors, and two small writers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.summarize.corpora import CorpusSizes, DocumentRun, Part, Sample, load
from experiments.summarize.pointer_generator import PointerGenerator, encode_examples, frequent_words, tokens_of, train
from graftlm.evaluation import Row
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import write_atomically
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize import SelectorExample, SelectorTrainingConfig, oracle_extract, train_selector
from graftlm.pipelines.summarize.default_selector import sentence_features
from graftlm.pipelines.summarize.selector_training import EncodedExample, fit_selector
from graftlm.pipelines.summarize.text import ngrams, split_words
from graftlm.runs.run import RunContext

PARTS: tuple[Part, ...] = ("train", "validation", "test")
FIRST = 100  # sentences of a document from which selectors learn
SOURCE_TOKENS = 400  # tokens that writers read
SUMMARY_TOKENS = 100  # tokens that writers write
LONGEST = 10  # n-grams of copy curves
VECTORS = "vectors.safetensors"
OUTPUT = "output.json"
_FEATURES = ("first", "relative", "near_2", "near_6", "near_15", "near_50", "centrality")
_WRITER_RATE = 2e-3

Vectors = dict[str, Tensor]  # output by document


@lru_cache(maxsize=1)
def _targets(longdocs: str, sizes: CorpusSizes) -> dict[str, list[int]]:
    """Return the oracle extract among the first sentences of each document."""
    parts = load(longdocs, sizes)
    samples = [*parts["train"], *parts["validation"]]
    return {sample.id: oracle_extract(sample.sentence_texts(FIRST), sample.abstract) for sample in samples}


class VectorsRun(DocumentRun):
    """Embeddings of the sentences of a part, computed by MiniLM in bfloat16.

    Test documents are embedded as a whole, the others up to the first `FIRST` sentences.

    Args:
        part: the part.
        encoder: folder of MiniLM.
    """

    part: Part
    encoder: str

    def artefacts(self) -> tuple[str, ...]:
        return (VECTORS,)

    def measure(self, context: RunContext) -> Measurement:
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(
            self.encoder,
            device="cpu",
            model_kwargs={"dtype": torch.bfloat16},
        )
        encoder.max_seq_length = 64
        count = None if self.part == "test" else FIRST
        rows = {sample.id: sample.sentence_texts(count) for sample in self.parts[self.part]}
        texts = [text for row in rows.values() for text in row]
        vectors = encoder.encode(
            texts,
            batch_size=64,
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        parts = vectors.split([len(row) for row in rows.values()])
        tensors = {name: part.clone() for name, part in zip(rows, parts, strict=True)}
        context.folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, context.folder / VECTORS)
        row = Row(id=self.id, label=self.id, metrics={"sentences": len(texts)})
        return Measurement(row)


class LearnedRun(DocumentRun):
    """A run that learns, and writes its output for each test document to a JSON file."""

    def artefacts(self) -> tuple[str, ...]:
        return (OUTPUT,)

    def keep(self, context: RunContext, output: Mapping[str, Any], losses: Any) -> Measurement:
        """Write the output by document; the measurement has only the losses of training."""
        write_atomically(context.folder / OUTPUT, json.dumps(output).encode())
        row = Row(id=self.id, label=self.id, metrics={"documents": len(output)})
        return Measurement(row, {"losses": losses})


class SelectorRun(LearnedRun):
    """The rankings of a trained selector, which learns from the first sentences of all training documents.

    `modern` reads embeddings, their similarity to the mean embedding of the document, position and centrality,
    standardized by means and deviations of the training documents. It depends on the runs of the embeddings.

    Args:
        training: configuration of the training.
    """

    training: SelectorTrainingConfig

    def measure(self, context: RunContext) -> Measurement:
        targets = _targets(self.longdocs, self.sizes)
        if self.training.kind == "modern":
            return self._measure_modern(context, targets)
        parts = self.parts
        selector = train_selector(
            _selector_examples(parts["train"], targets),
            _selector_examples(parts["validation"], targets),
            self.training,
        )
        rankings = {}
        for sample in parts["test"]:
            ranking = selector.rank(sample.document)
            rankings[sample.id] = [ranked.index for ranked in ranking]
        return self.keep(context, rankings, selector.record["losses"])

    def _measure_modern(self, context: RunContext, targets: Mapping[str, list[int]]) -> Measurement:
        train_rows, validation_rows, test_rows = _standardized(self._modern_inputs(context))
        torch.manual_seed(self.training.seed)
        width = next(iter(train_rows.values())).shape[1]
        config = SentenceSelectorConfig(
            input_type="embeddings",
            document_encoder="transformer",
            head="classifier",
            sentence_embedding_size=width,
            hidden_size=96,
            dropout=0.2,
        )
        model = SentenceSelector(config)
        losses = fit_selector(
            model,
            _encoded_examples(train_rows, targets),
            _encoded_examples(validation_rows, targets),
            self.training,
        )
        rankings = {}
        for sample in self.parts["test"]:
            indices = sample.document.selectable
            ranking = model.rank(test_rows[sample.id])
            rankings[sample.id] = [indices[position] for position in ranking.indices]
        return self.keep(context, rankings, losses)

    def _modern_inputs(self, context: RunContext) -> list[Vectors]:
        """Return the inputs of the documents of each part."""
        inputs = []
        for part, folder in zip(PARTS, context.dependencies.values(), strict=True):
            vectors = load_file(folder / VECTORS)
            inputs.append(_with_features(self.parts[part], vectors))
        return inputs


def _selector_examples(samples: Sequence[Sample], targets: Mapping[str, list[int]]) -> list[SelectorExample]:
    examples = []
    for sample in samples:
        example = SelectorExample(
            sentences=tuple(sample.sentence_texts(FIRST)),
            extract=tuple(targets[sample.id]),
        )
        examples.append(example)
    return examples


def _encoded_examples(rows: Vectors, targets: Mapping[str, list[int]]) -> list[EncodedExample]:
    """Return the documents that have a target."""
    examples = []
    for name, inputs in rows.items():
        if targets[name]:
            examples.append(EncodedExample(inputs, torch.tensor(targets[name])))
    return examples


def _with_features(samples: Sequence[Sample], vectors: Mapping[str, Tensor]) -> Vectors:
    """Return embeddings, similarity to the mean embedding, and features of each document, (N, v + 8)."""
    rows = {}
    for sample in samples:
        embeddings = vectors[sample.id].float()
        mean = embeddings[:FIRST].mean(0, keepdim=True)
        columns = [torch.cosine_similarity(embeddings, mean)]
        features, _ = sentence_features(sample.document)
        for name in _FEATURES:
            column = features[name][: len(embeddings)]
            columns.append(torch.from_numpy(column).float())
        rows[sample.id] = torch.cat([embeddings, torch.stack(columns, dim=1)], dim=1)
    return rows


def _standardized(parts: Sequence[Vectors]) -> list[Vectors]:
    """Standardize the columns by means and deviations of the first part."""
    reference = torch.cat(list(parts[0].values()))
    mean = reference.mean(0)
    scale = reference.std(0).clamp(min=1e-6)
    return [{name: (rows - mean) / scale for name, rows in part.items()} for part in parts]


class WriterRun(LearnedRun):
    """The texts of a writer. It makes no choices on the validation documents.

    Args:
        seed: seed of initialization and order.
        has_copy: whether it is a pointer-generator; otherwise it is a sequence-to-sequence model without copying.
        vocab_size: size of the vocabulary.
        size: size of word vectors and of each LSTM.
        epochs: number of epochs.
    """

    seed: int
    has_copy: bool
    vocab_size: int = 10_000
    size: int = 64
    epochs: int = 4

    def measure(self, context: RunContext) -> Measurement:
        train_pairs = _token_pairs(self.parts["train"])
        test_pairs = _token_pairs(self.parts["test"])
        train_texts = (text for pair in train_pairs for text in pair)
        words = frequent_words(train_texts, self.vocab_size)
        train_rows = encode_examples(words, train_pairs, SUMMARY_TOKENS)
        test_rows = encode_examples(words, test_pairs, SUMMARY_TOKENS)
        torch.manual_seed(self.seed)
        model = PointerGenerator(len(words), self.size, has_copy=self.has_copy)
        losses = train(model, train_rows, epochs=self.epochs, rate=_WRITER_RATE, seed=self.seed)
        texts = model.write(words, test_rows, SUMMARY_TOKENS)
        names = [sample.id for sample in self.parts["test"]]
        return self.keep(context, dict(zip(names, texts, strict=True)), losses)


def _token_pairs(samples: Sequence[Sample]) -> list[tuple[list[str], list[str]]]:
    """Return the tokens that writers read of each document, and those of its abstract."""
    return [(read_tokens(sample), tokens_of(sample.summary)) for sample in samples]


def read_tokens(sample: Sample) -> list[str]:
    """Return the tokens of a document that a writer reads."""
    tokens: list[str] = []
    for text in sample.sentence_texts(SOURCE_TOKENS):
        tokens.extend(tokens_of(text))
    return tokens[:SOURCE_TOKENS]


def copy_curve(samples: Sequence[Sample], texts: Mapping[str, str]) -> dict[str, list[float]]:
    """Return the percentage of the n-grams of texts that occur in their documents, for n from 1.

    Args:
        samples: the documents.
        texts: text for each document.

    Returns:
        `read`: n-grams that occur in the tokens that writers read; `rest`: those that occur only elsewhere.
    """
    read_shares: list[list[float]] = [[] for _ in range(LONGEST)]
    rest_shares: list[list[float]] = [[] for _ in range(LONGEST)]
    for sample in samples:
        words = split_words(texts[sample.id])
        read = split_words(" ".join(read_tokens(sample)))
        whole = split_words(sample.document.text)
        for n in range(1, min(LONGEST, len(words)) + 1):
            written = ngrams(words, n)
            near = set(ngrams(read, n))
            rest = set(ngrams(whole, n)) - near
            read_shares[n - 1].append(_percentage(written, near))
            rest_shares[n - 1].append(_percentage(written, rest))
    return {"read": _means(read_shares), "rest": _means(rest_shares)}


def _percentage(items: Sequence[tuple[str, ...]], known: set[tuple[str, ...]]) -> float:
    return 100 * sum(item in known for item in items) / len(items)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(fmean(values), 2) for values in rows if values]
