"""What a writer reads besides the extract: the introduction, the whole document, or summaries of its sections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from graftlm.errors import RecipeError
from graftlm.pipelines.summarize import (
    Budget,
    LanguageModelWriter,
    LeadSelector,
    PromptLayout,
    SourceDocument,
    SummaryDecoding,
    load_writer,
    read_text,
    select,
)
from graftlm.pipelines.summarize.hierarchy import LIVE_WINDOWS
from graftlm.pipelines.summarize.prompt_layout import Context
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.pipelines.summarize.writer_training import rest_text
from summarize.tools import TEA
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("sentencex")
DOCUMENT = read_text(TEA, ".md")
LAST = len(DOCUMENT.sentences) - 1


def writer(
    context: Context = "introduction", window: int = 1024, new: int = 8, *, is_hierarchical: bool = False
) -> LanguageModelWriter:
    model = tiny_model("llama", max_position_embeddings=1024).eval()
    layout = PromptLayout(introduction="<i>", extract="<e>", summary="<s>", window=window, context=context)
    decoding = SummaryDecoding(max_new_tokens=new)
    return LanguageModelWriter(model, tiny_tokenizer(), "tiny", layout, decoding, is_hierarchical=is_hierarchical)


def long_document(sections: int, sentences: int = 12) -> SourceDocument:
    parts = []
    for section in range(sections):
        text = " ".join(f"Tea number {section} has {line} cups and many cards." for line in range(sentences))
        parts.append(f"## Part {section}\n\n{text}\n")
    return read_text("\n".join(parts), ".md")


class Spy:
    """Counts the windows of a writer, and writes the first words of each."""

    def __init__(self, model_writer: LanguageModelWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        self.batches: list[int] = []
        self.most_live = 0
        self._live = 0
        self._writer = model_writer
        self._build = model_writer.build_prompt
        monkeypatch.setattr(model_writer, "build_prompt", self.build_prompt)
        monkeypatch.setattr(model_writer, "complete_batch", self.complete_batch)

    def build_prompt(self, *arguments):
        prompt = self._build(*arguments)
        self._live += 1
        self.most_live = max(self.most_live, self._live)
        return prompt

    def complete_batch(self, prompts: Sequence[list[int]]) -> list[tuple[str, bool]]:
        self._live = 0
        self.batches.append(len(prompts))
        self.lengths.extend(len(prompt) for prompt in prompts)
        return [(f"Tea {len(self.lengths)}.", False) for _ in prompts]


def test_a_whole_document_is_read_in_order_before_the_extract() -> None:
    model_writer = writer("document")
    extract = select(DOCUMENT, FixedSelector([LAST]), Budget(amount=1))
    prompt = model_writer.build_prompt(extract)
    text = model_writer.tokenizer.decode(prompt.ids, skip_special_tokens=True)
    assert text == f"<i>{DOCUMENT.text}<e>{extract.text}<s>"
    assert prompt.read == tuple(range(LAST + 1))
    assert prompt.notes == []
    assert rest_text(DOCUMENT, "document") == ""
    introduction = writer("introduction").build_prompt(extract)
    assert introduction.kept < prompt.kept == LAST + 1


def test_a_whole_document_takes_the_room_that_the_extract_leaves() -> None:
    extract = select(DOCUMENT, FixedSelector([LAST]), Budget(amount=1))
    whole = len(writer("document").build_prompt(extract).ids)
    exact = writer("document", window=whole + 8).build_prompt(extract)
    assert (exact.kept, exact.notes) == (LAST + 1, [])
    short = writer("document", window=whole + 7).build_prompt(extract)
    assert short.kept == LAST
    assert len(short.ids) + 8 <= whole + 7
    assert len(short.notes) == 1


def test_every_sentence_of_a_long_document_is_read_in_bounded_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model_writer = writer(window=160, is_hierarchical=True)
    sizes = []
    for sections in (4, 40):
        document = long_document(sections)
        with monkeypatch.context() as patch:
            spy = Spy(model_writer, patch)
            output = model_writer.write(select(document, LeadSelector(), Budget(amount=1)))
        assert len(spy.lengths) > sections, "each section has a window of its own, at least"
        assert max(spy.lengths) + 8 <= 160
        assert max(spy.batches) <= LIVE_WINDOWS
        assert spy.most_live <= LIVE_WINDOWS + 1, "the windows of a batch, and one that was tried at the top"
        sizes.append(len(spy.lengths))
        assert output.text == f"Tea {len(spy.lengths)}."
        assert any("section by section" in note for note in output.notes)
        assert not any("could read" in note or "beginning" in note for note in output.notes)
    assert sizes[1] > 9 * sizes[0]


def test_the_sentences_of_all_windows_are_read_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model_writer = writer(window=160, is_hierarchical=True)
    document = long_document(3)
    seen: list[int] = []
    windows = 0
    tops: list[str] = []
    build = model_writer.build_prompt

    def build_prompt(extract, opening):
        nonlocal windows
        prompt = build(extract, opening)
        if opening.indices:
            assert not extract.indices
            windows += 1
            seen.extend(opening.indices[: prompt.kept])
        else:
            tops.append(model_writer.tokenizer.decode(prompt.ids, skip_special_tokens=True))
        return prompt

    monkeypatch.setattr(model_writer, "build_prompt", build_prompt)
    monkeypatch.setattr(model_writer, "complete_batch", lambda prompts: [("Cup.", False)] * len(prompts))
    extract = select(document, FixedSelector([5]), Budget(amount=1))
    output = model_writer.write(extract)
    assert seen == list(range(len(document.sentences)))
    assert output.read == tuple(seen)
    assert tops[-1].startswith("<i>Cup.")
    assert tops[-1].endswith(f"<e>{extract.text}<s>")
    assert tops[-1].count("Cup.") == windows


def test_a_window_without_room_for_two_summaries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model_writer = writer(window=160, is_hierarchical=True)
    text = "Tea"
    while model_writer.count_tokens(text) < 100:  # one fits into a window, and two do not
        text += " and cards"
    monkeypatch.setattr(model_writer, "complete_batch", lambda prompts: [(text, False)] * len(prompts))
    with pytest.raises(RecipeError) as error:
        model_writer.write(select(long_document(4), FixedSelector([5]), Budget(amount=1)))
    assert "window" in str(error.value)


def test_sections_without_a_summary_leave_the_extract(monkeypatch: pytest.MonkeyPatch) -> None:
    model_writer = writer(window=160, is_hierarchical=True)
    monkeypatch.setattr(model_writer, "complete_batch", lambda prompts: [("", False)] * len(prompts))
    extract = select(DOCUMENT, FixedSelector([LAST]), Budget(amount=1))
    assert model_writer.write(extract).text == extract.text


def test_the_context_is_kept_in_the_layout_and_can_be_replaced(tiny_backbone, tmp_path: Path) -> None:
    assert "context" not in json.loads(PromptLayout().model_dump_json())
    layout = PromptLayout(context="document")
    assert PromptLayout.model_validate_json(layout.model_dump_json()) == layout
    folder = tiny_backbone("llama")
    assert load_writer(folder, device="cpu").layout.context == "introduction"
    loaded = load_writer(folder, device="cpu", context="hierarchical", window=64)
    assert (loaded.layout.context, loaded.layout.window) == ("introduction", 64)
    assert loaded.is_hierarchical
    whole = load_writer(folder, device="cpu", context="document")
    assert (whole.layout.context, whole.is_hierarchical) == ("document", False)
    with pytest.raises(RecipeError) as error:
        PromptLayout.parse({"context": "hierarchical"})
    assert "context" in str(error.value)
