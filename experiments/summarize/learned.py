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
from graftlm.pipelines.summarize.ranking import sentence_features
from graftlm.pipelines.summarize.selector import EncodedExample, fit_selector
from graftlm.pipelines.summarize.text import ngrams, split_words
from graftlm.runs.run import RunContext

PARTS: tuple[Part, ...] = ("train", "validation", "test")
FIRST = 100  # sentences of a document that selectors learn from
SOURCE_TOKENS, SUMMARY_TOKENS = 400, 100  # that writers read and write
LONGEST = 10  # n-grams of copy curves
VECTORS, OUTPUT = "vectors.safetensors", "output.json"
_FEATURES = ("first", "relative", "near_2", "near_6", "near_15", "near_50", "centrality")


def _texts(sample: Sample, count: int | None = None) -> list[str]:
    return [sample.document.sentences[index].text for index in sample.document.selectable[:count]]


@lru_cache(maxsize=1)
def _targets(longdocs: str, sizes: CorpusSizes) -> dict[str, list[int]]:
    """For each sentence of an abstract the positions of the two nearest of the first sentences, by document."""
    samples = [sample for part in PARTS[:2] for sample in load(longdocs, sizes)[part]]
    return {sample.id: oracle_extract(_texts(sample, FIRST), sample.abstract) for sample in samples}


class VectorsRun(DocumentRun):
    """Vectors of the sentences of a part by MiniLM in bfloat16: the test's whole documents, the others' beginnings."""

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


class LearnedRun(DocumentRun):
    """A run that learns, and writes a JSON object: what it made of each test document."""

    def artefacts(self) -> tuple[str, ...]:
        return (OUTPUT,)

    def keep(self, context: RunContext, output: Mapping[str, Any], losses: Any) -> Measurement:
        """Write the output, and measure nothing but the losses of training."""
        write_atomically(context.folder / OUTPUT, json.dumps(output).encode())
        return Measurement(Row(id=self.id, label=self.id, metrics={"documents": len(output)}), {"losses": losses})


class SelectorRun(LearnedRun):
    """The rankings of a trained selector, which learns from the beginnings of all training documents.

    `modern` reads vectors, their similarity to the document's mean vector, position and centrality, scaled by their
    means and deviations in training. It depends on the runs of the vectors.
    """

    training: SelectorTrainingConfig

    def measure(self, context: RunContext) -> Measurement:
        targets, parts = _targets(self.longdocs, self.sizes), self.parts
        if self.training.kind == "modern":
            return self._modern(context, targets)
        rows, held_out = (
            [SelectorExample(tuple(_texts(s, FIRST)), tuple(targets[s.id])) for s in parts[part]] for part in PARTS[:2]
        )
        selector = train_selector(rows, held_out, self.training)
        rankings = {s.id: [row.index for row in selector.rank(s.document)] for s in parts["test"]}
        return self.keep(context, rankings, selector.record["losses"])

    def _modern(self, context: RunContext, targets: Mapping[str, list[int]]) -> Measurement:
        folders = zip(PARTS, context.dependencies.values(), strict=True)
        inputs = [_modern_inputs(self.parts[part], load_file(folder / VECTORS)) for part, folder in folders]
        everything = torch.cat(list(inputs[0].values()))
        mean, scale = everything.mean(0), everything.std(0).clamp(min=1e-6)
        rows, held_out, test = ({name: (x - mean) / scale for name, x in part.items()} for part in inputs)
        torch.manual_seed(self.training.seed)
        fields: dict[str, Any] = {"input_type": "embeddings", "document_encoder": "transformer", "head": "classifier"}
        fields |= {"sentence_embedding_size": len(mean), "hidden_size": 96, "dropout": 0.2}
        model = SentenceSelector(SentenceSelectorConfig(**fields))
        examples, validation = (
            [EncodedExample(x, torch.tensor(targets[name])) for name, x in part.items() if targets[name]]
            for part in (rows, held_out)
        )
        losses = fit_selector(model, examples, validation, self.training)
        rankings = {}
        for sample in self.parts["test"]:
            indices = sample.document.selectable
            rankings[sample.id] = [indices[position] for position in model.rank(test[sample.id]).indices]
        return self.keep(context, rankings, losses)


def _modern_inputs(samples: Sequence[Sample], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By document, (N, v + 8)."""
    rows = {}
    for sample in samples:
        own, (features, _) = vectors[sample.id].float(), sentence_features(sample.document)
        columns = [torch.from_numpy(features[name][: len(own)]).float() for name in _FEATURES]
        near = torch.cosine_similarity(own, own[:FIRST].mean(0, keepdim=True))
        rows[sample.id] = torch.cat([own, torch.stack([near, *columns], dim=1)], dim=1)
    return rows


class WriterRun(LearnedRun):
    """The texts of a writer: a pointer-generator, or without copying a sequence-to-sequence model.

    `size` is that of word vectors and of each LSTM. Writers have no choice to make on validation documents.
    """

    seed: int
    has_copy: bool
    vocab_size: int = 10_000
    size: int = 64
    epochs: int = 4

    def measure(self, context: RunContext) -> Measurement:
        pairs = [[(read_tokens(s), tokens_of(s.summary)) for s in self.parts[part]] for part in ("train", "test")]
        words = frequent_words((text for pair in pairs[0] for text in pair), self.vocab_size)
        rows, test = (encode_examples(words, part, SUMMARY_TOKENS) for part in pairs)
        torch.manual_seed(self.seed)
        model = PointerGenerator(len(words), self.size, has_copy=self.has_copy)
        losses = train(model, rows, self.epochs, 2e-3, self.seed)
        texts = model.write(words, test, SUMMARY_TOKENS)
        return self.keep(context, {s.id: text for s, text in zip(self.parts["test"], texts, strict=True)}, losses)


def read_tokens(sample: Sample) -> list[str]:
    """What a writer reads."""
    return [token for text in _texts(sample, SOURCE_TOKENS) for token in tokens_of(text)][:SOURCE_TOKENS]


def copy_curve(samples: Sequence[Sample], texts: Mapping[str, str]) -> dict[str, list[float]]:
    """Percent of the n-grams of texts, n from 1: `read` are in the tokens that writers read, `rest` only elsewhere."""
    shares: dict[str, list[list[float]]] = {name: [[] for _ in range(LONGEST)] for name in ("read", "rest")}
    for sample in samples:
        words, read, whole = map(split_words, (texts[sample.id], " ".join(read_tokens(sample)), sample.document.text))
        for n in range(1, min(LONGEST, len(words)) + 1):
            own, near = ngrams(words, n), {*ngrams(read, n)}
            for name, known in (("read", near), ("rest", {*ngrams(whole, n)} - near)):
                shares[name][n - 1].append(100 * sum(gram in known for gram in own) / len(own))
    return {name: [round(fmean(values), 2) for values in rows if values] for name, rows in shares.items()}
