"""What the writer reads of a document: the introduction, and behind it an extract, the next sentences, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study import shuffled, write_lines
from experiments.summarize.corpora import CORPORA, Sample, evenly, load
from experiments.summarize.rivals import RandomSelector
from graftlm.backbone import Backbone
from graftlm.pipelines.summarize import CHAT_LAYOUT, Budget, DefaultSelector, LanguageModelWriter, LeadSelector, select
from graftlm.pipelines.summarize.oracle import oracle_labels
from graftlm.pipelines.summarize.selection import Extract, FixedSelector
from graftlm.pipelines.summarize.text import ngrams, split_words
from graftlm.pipelines.summarize.writer import SummaryDecoding, introduction_range


class PromptSizes(NamedTuple):
    """Tokens of prompt with abstract, and of the abstract; test documents a collection; others in all."""

    window: int = 384
    abstract: int = 80
    test: int = 30
    validation: int = 20
    train: int = 120


class PromptMaker:
    """Lays documents out for a chat model."""

    def __init__(self, backbone: Backbone, sizes: PromptSizes) -> None:
        self.tokenizer, self.sizes = backbone.need_tokenizer(), sizes
        self.writers = {}
        for name, changes in {"i": {"extract": None}, "ie": {}, "i_long": {"extract": " "}}.items():
            layout = CHAT_LAYOUT.model_copy(update={"window": sizes.window, **changes})
            decoding = SummaryDecoding(max_new_tokens=sizes.abstract)
            self.writers[name] = LanguageModelWriter(backbone.model, self.tokenizer, "", layout, decoding)

    def layouts(self, sample: Sample) -> dict[str, tuple[LanguageModelWriter, Extract]]:
        """The writer and the extract of each layout."""
        document, writers = sample.document, self.writers
        selected = select(document, DefaultSelector(), Budget())
        after = max(writers["i"].build_prompt(selected).read) + 1
        following = [*range(after, len(document.sentences)), *range(introduction_range(document).start)]
        return {
            "i": (writers["i"], selected),
            "ie_gold": (writers["ie"], select(document, FixedSelector(gold_sentences(sample)), Budget())),
            "ie_selected": (writers["ie"], selected),
            "ie_random": (writers["ie"], select(document, RandomSelector(0), Budget())),
            "i_long": (writers["i_long"], select(document, FixedSelector(following or [0]), Budget(amount=100))),
        }

    def row(self, sample: Sample) -> dict[str, Any]:
        """A test document: ids of its prompts, `start` those that all have in common, and its texts."""
        made = {name: writer.build_prompt(extract) for name, (writer, extract) in self.layouts(sample).items()}
        columns = zip(*(prompt.ids for prompt in made.values()), strict=False)  # as long as the shortest
        common = next(number for number, ids in enumerate(columns) if len({*ids}) > 1)
        texts = [sentence.text for sentence in sample.document.sentences]
        return {
            "id": sample.id,
            "start": made["i"].ids[:common],
            "prompts": {name: prompt.ids[common:] for name, prompt in made.items()},
            "read": {name: " ".join(texts[index] for index in prompt.read) for name, prompt in made.items()},
            "answer": [*self._ids(sample.summary), self.tokenizer.eos_token_id][: self.sizes.abstract],
            "abstract": list(sample.abstract),
            "rivals": {
                "extract": self._short(sample, DefaultSelector()),
                "introduction": self._short(sample, FixedSelector(introduction_range(sample.document))),
                "lead3": [s.text for s in select(sample.document, LeadSelector(), Budget(amount=3)).sentences],
            },
            "source": sample.document.text,
        }

    def chat(self, sample: Sample, layout: str) -> dict[str, Any]:
        """A training row: the abstract's first whole sentences as the answer."""
        writer, extract = self.layouts(sample)[layout]
        sentences = list(sample.abstract)
        while len(sentences) > 1 and len(self._ids(" ".join(sentences))) >= self.sizes.abstract:
            sentences.pop()
        answer = self.tokenizer.decode(self._ids(" ".join(sentences))[: self.sizes.abstract - 2])
        return {"messages": [*writer.messages(extract), {"role": "assistant", "content": answer}]}

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _short(self, sample: Sample, selector: Any) -> list[str]:
        """The best sentences that have as many tokens as a summary; the best one where none fits."""
        texts = [sample.document.sentences[ranked.index].text for ranked in selector.rank(sample.document)]
        fits = min(len(self._ids(text)) for text in texts) <= self.sizes.abstract
        budget = Budget(amount=self.sizes.abstract, unit="tokens") if fits else Budget(amount=1)
        extract = select(sample.document, selector, budget, lambda text: len(self._ids(text)))
        return [sentence.text for sentence in extract.sentences]


def gold_sentences(sample: Sample) -> list[int]:
    """The two sentences that are most like each of the abstract's: first the best of each, then the second."""
    indices = sample.document.selectable
    labels = oracle_labels([sample.document.sentences[index].text for index in indices], sample.abstract)
    ranked = [row[rank] for rank in range(max(map(len, labels))) for row in labels if rank < len(row)]
    return [indices[position] for position in dict.fromkeys(ranked)]


def word_runs(sample: Sample) -> set[tuple[str, ...]]:
    """All runs of eight words of abstract and introduction."""
    sentences = sample.document.sentences
    introduction = " ".join(sentences[index].text for index in introduction_range(sample.document))
    return {run for text in (sample.summary, introduction) for run in ngrams(split_words(text), 8)}


def unlike(samples: Iterable[Sample], others: Iterable[Sample]) -> list[Sample]:
    """The samples of whose runs of words less than half are in the others."""
    known = {run for sample in others for run in word_runs(sample)}
    return [each for each in samples if 2 * len((own := word_runs(each)) & known) < max(len(own), 1)]


def write_prompts(longdocs: str, split: Any, sizes: PromptSizes, seeds: Any, config: Any, folder: Path) -> None:
    """Write `test_CORPUS.jsonl`, `validation.jsonl`, `train_SEED.jsonl`, each row in a layout, and `counts.json`."""
    maker, parts = PromptMaker(config.load(), sizes), load(longdocs, split)
    kept = unlike(parts["test"], [*parts["train"], *parts["validation"]])
    for corpus in CORPORA:
        own = evenly([sample for sample in kept if sample.corpus == corpus], sizes.test)
        write_lines(folder / f"test_{corpus}.jsonl", map(maker.row, own))
    sets = {f"train_{seed}": shuffled(parts["train"], f"train {seed}")[: sizes.train] for seed in seeds}
    for name, samples in (sets | {"validation": evenly(parts["validation"], sizes.validation)}).items():
        layouts = cycle(("i", "i_long", "ie_selected"))  # in turn
        write_lines(folder / f"{name}.jsonl", map(maker.chat, samples, layouts))
    write_lines(folder / "counts.json", [{part: len(of) for part, of in parts.items()} | {"unlike": len(kept)}])
