"""The parts of a document that the writer reads: the introduction, then an extract, the next sentences, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study import shuffled, write_lines
from experiments.summarize.corpora import CORPORA, CorpusSizes, Sample, evenly, load
from experiments.summarize.rivals import RandomSelector
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.pipelines.summarize import (
    CHAT_LAYOUT,
    Budget,
    DefaultSelector,
    LanguageModelWriter,
    LeadSelector,
    Selector,
    SourceDocument,
    select,
)
from graftlm.pipelines.summarize.oracle import oracle_labels
from graftlm.pipelines.summarize.prompts import WriterPrompt, introduction_range
from graftlm.pipelines.summarize.selection import Extract, FixedSelector
from graftlm.pipelines.summarize.text import ngrams, split_words
from graftlm.pipelines.summarize.writer import SummaryDecoding

TRAINING_LAYOUTS = ("i", "i_long", "ie_selected")  # layouts of training rows, in turn
_RUN_WORDS = 8  # words of the runs by which documents are compared


class PromptSizes(NamedTuple):
    """Sizes of prompts and sets of documents.

    Attributes:
        window: tokens of prompt and abstract.
        abstract: tokens of the abstract.
        test: test documents of each collection.
        validation: validation documents in total.
        train: training documents in total.
    """

    window: int = 384
    abstract: int = 80
    test: int = 30
    validation: int = 20
    train: int = 120


class PromptMaker:
    """Makes the prompts of a chat model.

    Args:
        backbone: the model, with a tokenizer.
        sizes: sizes of the prompts.
    """

    def __init__(self, backbone: Backbone, sizes: PromptSizes) -> None:
        self.tokenizer = backbone.need_tokenizer()
        self.sizes = sizes
        self.writers: dict[str, LanguageModelWriter] = {}
        marks = {"i": None, "ie": CHAT_LAYOUT.extract, "i_long": " "}  # strings before the extract
        for name, mark in marks.items():
            layout = CHAT_LAYOUT.model_copy(update={"window": sizes.window, "extract": mark})
            decoding = SummaryDecoding(max_new_tokens=sizes.abstract)
            self.writers[name] = LanguageModelWriter(
                backbone.model,
                self.tokenizer,
                name="",
                layout=layout,
                decoding=decoding,
            )

    def layouts(self, sample: Sample) -> dict[str, tuple[LanguageModelWriter, Extract]]:
        """Return the writer and the extract of each layout."""
        document = sample.document
        ten = Budget()
        selected = select(document, DefaultSelector(), ten)
        gold = select(document, FixedSelector(gold_sentences(sample)), ten)
        chance = select(document, RandomSelector(0), ten)
        following = FixedSelector(self._following(document, selected))
        introduction_only = self.writers["i"]
        with_extract = self.writers["ie"]
        return {
            "i": (introduction_only, selected),
            "ie_gold": (with_extract, gold),
            "ie_selected": (with_extract, selected),
            "ie_random": (with_extract, chance),
            "i_long": (self.writers["i_long"], select(document, following, Budget(amount=100))),
        }

    def _following(self, document: SourceDocument, extract: Extract) -> list[int]:
        """Return the sentences after those of the introduction that are read, then those before the introduction."""
        prompt = self.writers["i"].build_prompt(extract)
        after = range(max(prompt.read) + 1, len(document.sentences))
        before = range(introduction_range(document).start)
        return [*after, *before] or [0]

    def row(self, sample: Sample) -> dict[str, Any]:
        """Return a test document: ids of its prompts, `start` with those that all have in common, and its texts."""
        prompts: dict[str, WriterPrompt] = {}
        for name, (writer, extract) in self.layouts(sample).items():
            prompts[name] = writer.build_prompt(extract)
        common = _common_length([prompt.ids for prompt in prompts.values()])
        texts = [sentence.text for sentence in sample.document.sentences]
        read: dict[str, str] = {}
        for name, prompt in prompts.items():
            read[name] = " ".join(texts[index] for index in prompt.read)
        answer = [*self._ids(sample.summary), self.tokenizer.eos_token_id]
        return {
            "id": sample.id,
            "start": prompts["i"].ids[:common],
            "prompts": {name: prompt.ids[common:] for name, prompt in prompts.items()},
            "read": read,
            "answer": answer[: self.sizes.abstract],
            "abstract": list(sample.abstract),
            "rivals": self._rivals(sample),
            "source": sample.document.text,
        }

    def _rivals(self, sample: Sample) -> dict[str, list[str]]:
        """Return the sentences of each extract with which the summaries are compared."""
        introduction = introduction_range(sample.document)
        lead = select(sample.document, LeadSelector(), Budget(amount=3))
        return {
            "extract": self._short(sample, DefaultSelector()),
            "introduction": self._short(sample, FixedSelector(introduction)),
            "lead3": [sentence.text for sentence in lead.sentences],
        }

    def chat(self, sample: Sample, layout: str) -> dict[str, Any]:
        """Return a training row, with the abstract's first complete sentences as the answer."""
        writer, extract = self.layouts(sample)[layout]
        sentences = list(sample.abstract)
        while len(sentences) > 1 and self._count(" ".join(sentences)) >= self.sizes.abstract:
            sentences.pop()
        ids = self._ids(" ".join(sentences))
        answer = self.tokenizer.decode(ids[: self.sizes.abstract - 2])
        return {"messages": [*writer.messages(extract), {"role": "assistant", "content": answer}]}

    def _ids(self, text: str) -> list[int]:
        encoding = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return list(encoding["input_ids"])

    def _count(self, text: str) -> int:
        return len(self._ids(text))

    def _short(self, sample: Sample, selector: Selector) -> list[str]:
        """Return the best sentences that have as many tokens as a summary; the best one if none fits."""
        sentences = sample.document.sentences
        shortest = min(self._count(sentences[ranked.index].text) for ranked in selector.rank(sample.document))
        budget = Budget(amount=1)
        if shortest <= self.sizes.abstract:
            budget = Budget(amount=self.sizes.abstract, unit="tokens")
        extract = select(sample.document, selector, budget, self._count)
        return [sentence.text for sentence in extract.sentences]


def _common_length(rows: Sequence[Sequence[int]]) -> int:
    """Return the number of first ids that all rows have in common; the rows differ within the shortest."""
    length = 0
    while len({row[length] for row in rows}) == 1:
        length += 1
    return length


def gold_sentences(sample: Sample) -> list[int]:
    """Return the two nearest sentences of each sentence of the abstract: first all best ones, then the second best."""
    labels = oracle_labels(sample.sentence_texts(), sample.abstract)
    best = [row[0] for row in labels]
    second = [row[1] for row in labels if len(row) > 1]
    indices = sample.document.selectable
    return [indices[position] for position in dict.fromkeys([*best, *second])]


def word_runs(sample: Sample) -> set[tuple[str, ...]]:
    """Return all runs of eight words of abstract and introduction."""
    sentences = sample.document.sentences
    introduction = " ".join(sentences[index].text for index in introduction_range(sample.document))
    runs: set[tuple[str, ...]] = set()
    for text in (sample.summary, introduction):
        runs.update(ngrams(split_words(text), _RUN_WORDS))
    return runs


def unlike(samples: Iterable[Sample], others: Iterable[Sample]) -> list[Sample]:
    """Return the samples that share less than half of their runs of words with the others."""
    known: set[tuple[str, ...]] = set()
    for other in others:
        known.update(word_runs(other))
    kept = []
    for sample in samples:
        runs = word_runs(sample)
        if 2 * len(runs & known) < max(len(runs), 1):
            kept.append(sample)
    return kept


def write_prompts(
    longdocs: str,
    split: CorpusSizes,
    sizes: PromptSizes,
    seeds: Sequence[int],
    config: BackboneConfig,
    folder: Path,
) -> None:
    """Write the prompts.

    The files are `test_CORPUS.jsonl` with all layouts, `validation.jsonl` and `train_SEED.jsonl` with one layout in
    each row, and `counts.json` with the number of documents.

    Args:
        longdocs: folder of the collections.
        split: number of documents of each part.
        sizes: sizes of prompts and sets.
        seeds: seeds of the training sets.
        config: the backbone.
        folder: folder of the files.
    """
    maker = PromptMaker(config.load(), sizes)
    parts = load(longdocs, split)
    kept = unlike(parts["test"], [*parts["train"], *parts["validation"]])
    for corpus in CORPORA:
        samples = evenly([sample for sample in kept if sample.corpus == corpus], sizes.test)
        write_lines(folder / f"test_{corpus}.jsonl", (maker.row(sample) for sample in samples))
    sets: dict[str, list[Sample]] = {}
    for seed in seeds:
        sets[f"train_{seed}"] = shuffled(parts["train"], f"train {seed}")[: sizes.train]
    sets["validation"] = evenly(parts["validation"], sizes.validation)
    for name, samples in sets.items():
        write_lines(folder / f"{name}.jsonl", _chat_rows(maker, samples))
    counts = {part: len(samples) for part, samples in parts.items()}
    counts["unlike"] = len(kept)
    write_lines(folder / "counts.json", [counts])


def _chat_rows(maker: PromptMaker, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    rows = []
    for sample, layout in zip(samples, cycle(TRAINING_LAYOUTS), strict=False):
        rows.append(maker.chat(sample, layout))
    return rows
