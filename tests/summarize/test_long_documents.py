"""A document ten times longer than any window: its windows are read one by one, and budgets hold."""

from __future__ import annotations

import random

import pytest
import torch

from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.pipelines.summarize import (
    Budget,
    LanguageModelWriter,
    PromptLayout,
    SourceDocument,
    SummaryDecoding,
    TrainedSelector,
    read_text,
    summarize,
)
from graftlm.training.language_model import train_tokenizer
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("sentencex")
SENTENCES, TOKENS = 20, 200  # windows of selector and writer
WORDS = ["tea", "water", "cards", "persons", "drank", "sorted", "many", "was", "in", "the", "cup"]


def long_document(times: int = 10) -> SourceDocument:
    """With an introduction that alone is longer than the writer's window."""
    chance = random.Random(0)
    lines = [" ".join(chance.choices(WORDS, k=8)).capitalize() + f" {number}." for number in range(times * SENTENCES)]
    half = len(lines) // 2
    return read_text(f"# Introduction\n\n{' '.join(lines[:half])}\n\n# Results\n\n{' '.join(lines[half:])}", ".md")


def selector(head: str, document: SourceDocument) -> TrainedSelector:
    torch.manual_seed(0)
    tokenizer = train_tokenizer((sentence.text for sentence in document.sentences), 80)
    config = SentenceSelectorConfig(
        vocab_size=len(tokenizer), embedding_size=4, hidden_size=4, head=head, max_sentences=SENTENCES, extract_size=3
    )
    return TrainedSelector(SentenceSelector(config).eval(), tokenizer)


@pytest.mark.parametrize("head", ["classifier", "pointer"])
def test_ten_windows_are_summarized_within_their_budgets(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = long_document()
    chosen = selector(head, document)
    model = tiny_model("llama", max_position_embeddings=TOKENS).eval()
    writer = LanguageModelWriter(model, tiny_tokenizer(), "tiny", PromptLayout(), SummaryDecoding(max_new_tokens=12))
    whole = writer.count_tokens(" ".join(sentence.text for sentence in document.sentences))
    assert len(document.sentences) >= 10 * SENTENCES
    assert whole >= 10 * TOKENS
    read, written = [], []
    choose, generate = chosen.model.rank, model.generate
    monkeypatch.setattr(chosen.model, "rank", lambda inputs: read.append(len(inputs)) or choose(inputs))

    def spy(**arguments):
        output = generate(**arguments)
        written.append((arguments["input_ids"].shape, output.shape[1]))
        return output

    monkeypatch.setattr(model, "generate", spy)
    summary = summarize(document, selector=chosen, writer=writer, budget=Budget(amount=3 * TOKENS, unit="tokens"))
    assert max(read) == SENTENCES
    assert sum(read) == len(document.sentences)
    assert TOKENS < summary.extract.used <= 3 * TOKENS, "more than the writer's window, and no more than allowed"
    ((rows, prompt), total), *more = written
    assert (rows, more) == (1, [])
    assert prompt + 12 <= TOKENS
    assert total <= TOKENS
    assert any("could read" in note for note in summary.notes)
    taken = {index * 10 // len(document.sentences) for index in summary.extract.indices}
    assert len(taken) == 10, "the extract has sentences of every window"
