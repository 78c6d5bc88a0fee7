"""Rivals that are trained on the training documents: the package's trained selectors, and two small writers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.summarize.corpora import DocumentRun, Part, Sample
from experiments.summarize.pointer_generator import PointerGenerator, Vocabulary, encode_example, tokens_of, train
from graftlm.config import Config
from graftlm.evaluation import Row
from graftlm.io import write_atomically
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize import (
    DefaultSelector,
    SelectorExample,
    SelectorTrainingConfig,
    oracle_extract,
    train_selector,
)
from graftlm.pipelines.summarize.ranking import RankingModel, sentence_features
from graftlm.pipelines.summarize.selector import EncodedExample, fit_selector
from graftlm.pipelines.summarize.text import ngrams, split_words
from graftlm.runs.run import Measurement, RunContext

PARTS: tuple[Part, ...] = ("train", "validation", "test")
FIRST = 100  # sentences of a document that selectors learn from
SOURCE_WORDS, SUMMARY_WORDS = 400, 100  # tokens that writers read and write
LONGEST = 10  # n-grams of copy curves
ORACLE = "oracle_extracts"
VECTORS, OUTPUT = "vectors.safetensors", "output.json"
_FEATURES = ("first", "relative", "near_2", "near_6", "near_15", "near_50", "centrality")


def _texts(sample: Sample, count: int | None = None) -> list[str]:
    return [sample.document.sentences[index].text for index in sample.document.selectable[:count]]


def read_output(folder: Path) -> Any:
    """What a run of this module wrote, by document."""
    return json.loads((folder / OUTPUT).read_text(encoding="utf-8"))


def _write_output(folder: Path, values: Any) -> None:
    write_atomically(folder / OUTPUT, json.dumps(values).encode())


class OracleExtractRun(DocumentRun):
    """The targets of selectors: for each sentence of an abstract the two nearest of the first sentences."""

    def artefacts(self) -> tuple[str, ...]:
        return (OUTPUT,)

    def measure(self, context: RunContext) -> Measurement:
        samples = [*self.parts["train"], *self.parts["validation"]]
        _write_output(context.folder, {s.id: oracle_extract(_texts(s, FIRST), s.abstract) for s in samples})
        return Measurement(Row(id=self.id, label=self.id, metrics={"documents": len(samples)}))


class VectorsRun(DocumentRun):
    """Vectors of the sentences of one part by MiniLM in bfloat16: the test's whole documents, the others' beginnings.

    Args:
        part: whose documents are read.
        encoder: folder of the encoder.
    """

    part: Part
    encoder: str

    def artefacts(self) -> tuple[str, ...]:
        return (VECTORS,)

    def measure(self, context: RunContext) -> Measurement:
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(self.encoder, device="cpu", model_kwargs={"dtype": torch.bfloat16})
        encoder.max_seq_length = 64
        rows = {sample.id: _texts(sample, None if self.part == "test" else FIRST) for sample in self.parts[self.part]}
        texts = [text for row in rows.values() for text in row]
        vectors = encoder.encode(texts, batch_size=64, convert_to_tensor=True, show_progress_bar=False)
        parts = vectors.split([len(row) for row in rows.values()])
        context.folder.mkdir(parents=True, exist_ok=True)
        save_file({name: part.clone() for name, part in zip(rows, parts, strict=True)}, context.folder / VECTORS)
        return Measurement(Row(id=self.id, label=self.id, metrics={"sentences": len(texts)}))


class SelectorRun(DocumentRun):
    """A trained selector's rankings of the test documents. It learns from the beginnings of all training documents.

    `modern` reads vectors of MiniLM, their similarity to the document's mean vector, and features of position and
    centrality, scaled by their means and deviations in training.

    Args:
        training: kind, seed and hyperparameters.
    """

    training: SelectorTrainingConfig

    def artefacts(self) -> tuple[str, ...]:
        return (OUTPUT,)

    def measure(self, context: RunContext) -> Measurement:
        gold = read_output(context.dependencies[ORACLE])
        if self.training.kind == "modern":
            rankings, losses = self._modern(gold, list(context.dependencies.values())[1:])
        else:
            train_rows, validation = (
                [SelectorExample(tuple(_texts(s, FIRST)), tuple(gold[s.id])) for s in self.parts[part]]
                for part in ("train", "validation")
            )
            selector = train_selector(train_rows, validation, self.training)
            losses = selector.record["losses"]
            rankings = {s.id: [row.index for row in selector.rank(s.document)] for s in self.parts["test"]}
        _write_output(context.folder, rankings)
        best = min(losses, key=lambda line: line[2])
        metrics = {"updates": losses[-1][0], "best_update": best[0], "validation_loss": best[2]}
        return Measurement(Row(id=self.id, label=self.id, metrics=metrics), {"losses": losses})

    def _modern(self, gold: dict[str, list[int]], folders: Sequence[Path]) -> tuple[dict[str, list[int]], Any]:
        inputs = [modern_inputs(self.parts[part], folder) for part, folder in zip(PARTS, folders, strict=True)]
        everything = torch.cat(list(inputs[0].values()))
        mean, scale = everything.mean(0), everything.std(0).clamp(min=1e-6)
        scaled = [{name: (rows - mean) / scale for name, rows in part.items()} for part in inputs]
        torch.manual_seed(self.training.seed)
        config = SentenceSelectorConfig(
            input_type="embeddings", document_encoder="transformer", head="classifier", hidden_size=96, dropout=0.2,
            sentence_embedding_size=len(mean), max_sentences=2000,
        )  # fmt: skip
        model = SentenceSelector(config)
        examples = [
            [EncodedExample(rows, torch.tensor(gold[name])) for name, rows in part.items() if gold[name]]
            for part in scaled[:2]
        ]
        losses = fit_selector(model, *examples, self.training)
        return {
            s.id: [s.document.selectable[position] for position in model.rank(scaled[2][s.id]).indices]
            for s in self.parts["test"]
        }, losses


def modern_inputs(samples: Sequence[Sample], folder: Path) -> dict[str, Tensor]:
    """By document, (N, v + 8): vectors, their cosine with the mean vector, position and centrality."""
    cached, rows = load_file(folder / VECTORS), {}
    for sample in samples:
        vectors = cached[sample.id].float()
        features, _ = sentence_features(sample.document)
        chosen = np.stack([features[name][: len(vectors)] for name in _FEATURES], axis=1)
        near = torch.cosine_similarity(vectors, vectors.mean(0, keepdim=True))
        rows[sample.id] = torch.cat([vectors, near[:, None], torch.from_numpy(chosen).float()], dim=1)
    return rows


class WriterSize(Config):
    """Size and training of a writer.

    Args:
        vocab_size: words of its vocabulary.
        size: of word vectors and of the states of each LSTM.
        epochs: over the training documents.
        batch_size: documents of an update.
        learning_rate: of Adam.
    """

    vocab_size: int = Field(10_000, ge=10)
    size: int = Field(64, ge=1)
    epochs: int = Field(4, ge=1)
    batch_size: int = Field(16, ge=1)
    learning_rate: float = Field(2e-3, gt=0)


class WriterRun(DocumentRun):
    """A small LSTM writer: a pointer-generator, or without copying a sequence-to-sequence model.

    A pointer-generator depends on the run of the default selector's weights. It writes a second time, copying only
    from the sentences that this selector picks (Bottom-up).

    Args:
        writer: size and training.
        seed: of the first weights and the order of documents.
        has_copy: it may copy.
    """

    writer: WriterSize
    seed: int
    has_copy: bool

    def artefacts(self) -> tuple[str, ...]:
        return (OUTPUT,)

    def measure(self, context: RunContext) -> Measurement:
        parts = {part: [(source_words(s), tokens_of(s.summary)) for s in self.parts[part]] for part in PARTS}
        vocabulary = Vocabulary((words for pair in parts["train"] for words in pair), self.writer.vocab_size)
        rows = {
            part: [encode_example(vocabulary, *pair, SUMMARY_WORDS) for pair in pairs] for part, pairs in parts.items()
        }
        torch.manual_seed(self.seed)
        model = PointerGenerator(len(vocabulary.words), self.writer.size, has_copy=self.has_copy)
        sizes = self.writer.model_dump(include={"epochs", "batch_size", "learning_rate"})
        losses = train(model, rows["train"], rows["validation"], seed=self.seed, **sizes)
        written = {"pointer_generator" if self.has_copy else "seq2seq": rows["test"]}
        if self.has_copy:
            (folder,) = context.dependencies.values()
            weights = (folder / f"default_s{self.seed}.json").read_text(encoding="utf-8")
            selector = DefaultSelector(RankingModel.model_validate_json(weights))
            pairs = zip(rows["test"], self.parts["test"], strict=True)
            written["bottom_up"] = [row._replace(allowed=selected_words(s, selector)) for row, s in pairs]
        names = [sample.id for sample in self.parts["test"]]
        texts = {
            name: dict(zip(names, model.write_texts(vocabulary.words, examples, SUMMARY_WORDS), strict=True))
            for name, examples in written.items()
        }
        _write_output(context.folder, texts)
        counts = {"parameters": sum(weight.numel() for weight in model.parameters()), "validation_loss": losses[-1][2]}
        return Measurement(Row(id=self.id, label=self.id, metrics=counts), {"losses": losses})


def _source(sample: Sample) -> list[tuple[str, int]]:
    """The words that a writer reads, each with the index of its sentence."""
    sentences = ((index, sample.document.sentences[index].text) for index in sample.document.selectable)
    return [(word, index) for index, text in sentences for word in tokens_of(text)][:SOURCE_WORDS]


def source_words(sample: Sample) -> list[str]:
    """The words that a writer reads."""
    return [word for word, _ in _source(sample)]


def selected_words(sample: Sample, selector: DefaultSelector) -> list[bool]:
    """Which words that a writer reads are of the selector's best sentences there, until those have 100 words."""
    source, chosen = [index for _, index in _source(sample)], set[int]()
    for ranked in selector.rank(sample.document):
        if sum(index in chosen for index in source) < SUMMARY_WORDS:
            chosen.add(ranked.index)
    return [index in chosen for index in source]


def copy_curve(samples: Sequence[Sample], texts: Mapping[str, str]) -> dict[str, list[float]]:
    """Percent of the n-grams of texts, n from 1: `read` are in the words that writers read, `rest` elsewhere."""
    shares: dict[str, list[list[float]]] = {"read": [[] for _ in range(LONGEST)], "rest": [[] for _ in range(LONGEST)]}
    for sample in samples:
        words, read, whole = map(split_words, (texts[sample.id], " ".join(source_words(sample)), sample.document.text))
        for n in range(1, min(LONGEST, len(words)) + 1):
            own, near = ngrams(words, n), {*ngrams(read, n)}
            far = {*ngrams(whole, n)} - near
            for name, known in (("read", near), ("rest", far)):
                shares[name][n - 1].append(100 * sum(gram in known for gram in own) / len(own))
    return {name: [round(fmean(values), 2) for values in rows if values] for name, rows in shares.items()}
