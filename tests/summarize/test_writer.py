"""Writers: the layout, windows and budgets that hold, links, and figures of what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.errors import DataError, GraftError, RecipeError
from graftlm.pipelines.summarize import (
    Budget,
    LanguageModelWriter,
    LeadSelector,
    PromptLayout,
    SummaryDecoding,
    load_writer,
    read_text,
    select,
)
from graftlm.pipelines.summarize.summary import link_sentences, summarize
from graftlm.pipelines.summarize.writer import drop_partial_sentence, introduction_text
from summarize.tools import TEA
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("sentencex")
LAYOUT = PromptLayout(introduction="<i>", extract="<e>", summary="<s>")
DOCUMENT = read_text(TEA, ".md")
EXTRACT = select(DOCUMENT, LeadSelector(), Budget(amount=4))


def writer(layout: PromptLayout | None = LAYOUT, **decoding: Any) -> LanguageModelWriter:
    model = tiny_model("llama", max_position_embeddings=1024).eval()
    return LanguageModelWriter(
        model, tiny_tokenizer(), "tiny", layout, SummaryDecoding(**{"max_new_tokens": 8} | decoding)
    )


def test_the_layout_is_introduction_extract_and_mark() -> None:
    model_writer = writer()
    ids, notes = model_writer.build_prompt(EXTRACT)
    text = model_writer.tokenizer.decode(ids, skip_special_tokens=True)
    assert text == f"<i>{introduction_text(DOCUMENT)}<e>{EXTRACT.text}<s>"
    assert notes == []


@pytest.mark.parametrize("window", [60, 100, 150, 200, 400])
def test_a_prompt_and_its_summary_fit_the_window(window: int) -> None:
    model_writer = writer(LAYOUT.model_copy(update={"window": window}))
    try:
        ids, notes = model_writer.build_prompt(EXTRACT)
    except RecipeError as refusal:
        message = str(refusal)
        assert f"reads {window} tokens, which has no room for one extracted sentence" in message
        return
    assert len(ids) + 8 <= window
    text = model_writer.tokenizer.decode(ids, skip_special_tokens=True)
    kept = [sentence.text for sentence in EXTRACT.sentences if sentence.text in text.split("<e>")[1]]
    assert kept
    assert bool(notes) == (len(kept) < 4)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_a_summary_has_no_more_tokens_than_allowed(method, monkeypatch: pytest.MonkeyPatch) -> None:
    model_writer = writer(method=method, max_new_tokens=12)
    lengths, generate = [], model_writer.model.generate

    def spy(input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        output = generate(input_ids=input_ids, **more)
        lengths.append(output.shape[1] - input_ids.shape[1])
        return output

    monkeypatch.setattr(model_writer.model, "generate", spy)
    texts = [model_writer.write(EXTRACT).text for _ in range(2)]
    assert texts[0] == texts[1]
    assert all(0 < length <= 12 for length in lengths)


def test_seeds_of_sampling_differ() -> None:
    assert (
        len({writer(method="sample", temperature=2.0, top_k=200, seed=seed).write(EXTRACT).text for seed in range(4)})
        > 1
    )


def test_a_writer_that_does_not_know_the_layout_says_so() -> None:
    assert any("was not trained on this layout" in note for note in writer(None).write(EXTRACT).notes)
    assert not any("was not trained" in note for note in writer().write(EXTRACT).notes)


def test_silence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model_writer = writer()
    monkeypatch.setattr(model_writer.model, "generate", lambda input_ids, **more: input_ids)
    written = model_writer.write(EXTRACT)
    assert written.text == EXTRACT.text
    assert "wrote nothing" in written.notes[0]


def test_a_sentence_that_was_cut_off_is_left_out() -> None:
    assert drop_partial_sentence("One is here. Two is") == "One is here."
    assert drop_partial_sentence("One is here. Two is.") == "One is here. Two is."
    assert drop_partial_sentence("One is") == "One is"


def test_links_lead_to_the_nearest_extracted_sentence() -> None:
    links = link_sentences("Many people drink tea. Asia has most of them living in it. Zebras!", EXTRACT)
    assert [link.index for link in links] == [0, 1, None]
    assert links[0].overlap == pytest.approx(2 * 3 / (4 + 6))
    assert links[2].overlap == 0


def test_a_summary_tells_what_it_did() -> None:
    summary = summarize(DOCUMENT, writer=writer(), budget=Budget(amount=90, unit="tokens"))
    assert summary.extract.used <= 90
    assert summary.writer == "tiny"
    assert len(summary.links) > 0
    assert summarize(DOCUMENT, selector=LeadSelector(), budget=Budget(amount=2)).notes == ()


def test_a_model_folder_is_a_writer(tmp_path: Path, tiny_backbone) -> None:
    model_writer = load_writer(tiny_backbone("llama"), SummaryDecoding(max_new_tokens=4), device="cpu")
    assert model_writer.write(select(DOCUMENT, LeadSelector(), Budget(amount=1))).text
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(tiny_backbone("llama")).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "layout.json").write_text(LAYOUT.model_dump_json())
    assert load_writer(folder, device="cpu").layout == LAYOUT
    (folder / "layout.json").write_text("{")
    with pytest.raises(DataError, match="is no layout of a summary"):
        load_writer(folder, device="cpu")
    with pytest.raises(GraftError):
        load_writer(tmp_path / "none", device="cpu")


def test_writing_leaves_no_gradients() -> None:
    model_writer = writer()
    model_writer.write(EXTRACT)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model_writer.model.parameters())
