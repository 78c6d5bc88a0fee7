"""Training of writers: examples in their windows, likelihoods, and several documents at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.data.marked_ids import PADDING
from graftlm.data.rows import collate
from graftlm.errors import DataError, GraftError, RecipeError
from graftlm.pipelines.summarize import (
    Budget,
    LanguageModelWriter,
    LeadSelector,
    PromptLayout,
    SummaryDecoding,
    WriterExample,
    load_writer,
    read_text,
    select,
    train_writer,
)
from graftlm.pipelines.summarize.writer_training import (
    encode_example,
    example_rows,
    rest_rows,
    rest_text,
)
from graftlm.training import TrainingConfig
from summarize.tools import TEA, introduction_text, summary_likelihoods
from tiny import tiny_model, tiny_tokenizer

pytest.importorskip("sentencex")
LAYOUT = PromptLayout(introduction="<i>", extract="<e>", summary="<s>", rest="<r>", window=400)
DOCUMENT = read_text(TEA, ".md")
SHORT = read_text("# Milk\n\n## Introduction\n\nMilk is white.\n\n## Method\n\nCows give milk to all.\n", ".md")
EXAMPLES = [
    WriterExample(select(DOCUMENT, LeadSelector(), Budget(amount=3)), "Tea helps 12% of all."),
    WriterExample(select(SHORT, LeadSelector(), Budget(amount=1)), "Milk."),
    WriterExample(select(SHORT, LeadSelector(), Budget(amount=2)), "Milk is white, and cows give it."),
]


def writer(layout: PromptLayout = LAYOUT, **decoding: Any) -> LanguageModelWriter:
    model = tiny_model("llama", max_position_embeddings=512).eval()
    return LanguageModelWriter(
        model, tiny_tokenizer(), "tiny", layout, SummaryDecoding.parse({"max_new_tokens": 40} | decoding)
    )


def training(**changes: Any) -> TrainingConfig:
    return TrainingConfig.parse({"steps": 12, "batch_size": 2, "learning_rate": 1e-2, "checkpoint_every": 6} | changes)


def read(model_writer: LanguageModelWriter, ids: np.ndarray) -> str:
    return str(model_writer.tokenizer.decode(ids[ids != PADDING].tolist()))


def test_a_lesson_is_what_is_read_in_use_and_the_summary_with_its_end() -> None:
    model_writer = writer()
    rows = example_rows(model_writer, EXAMPLES[:1])
    ids = rows.input_ids[0][rows.marked[0] != PADDING].tolist()
    prompt = model_writer.build_prompt(EXAMPLES[0].extract).ids
    assert ids[: len(prompt)] == prompt
    end = model_writer.tokenizer.eos_token_id
    assert ids[-1] == end
    assert model_writer.tokenizer.decode(ids[len(prompt) : -1]) == EXAMPLES[0].summary
    batch = collate(rows.marked, np.zeros(1), boundaries="whole", pad_id=rows.pad_id)
    assert int((batch.labels != -100).sum()) == len(ids) - 1, "the prompt is learned too"


def test_lessons_share_rows_whole_and_apart() -> None:
    rows = example_rows(writer(), EXAMPLES)
    starts = (rows.marked < 0) & (rows.marked != PADDING)
    assert starts.sum() == len(EXAMPLES)
    assert len(rows) < len(EXAMPLES)
    assert starts[:, 0].all(), "no example is cut"


def test_a_long_summary_is_cut_and_does_not_end() -> None:
    model_writer = writer(max_new_tokens=3)
    rows = example_rows(model_writer, EXAMPLES[:1])
    ids = rows.input_ids[0][rows.marked[0] != PADDING].tolist()
    assert len(ids) == len(model_writer.build_prompt(EXAMPLES[0].extract)[0]) + 3
    assert ids[-1] != model_writer.tokenizer.eos_token_id


def test_what_is_cut_is_counted() -> None:
    lines: list[str] = []
    sizes = [len(encode_example(writer(), example).summary) for example in EXAMPLES]
    assert min(sizes) < max(sizes) < 40
    example_rows(writer(max_new_tokens=max(sizes)), EXAMPLES, lines.append)
    assert lines == []
    example_rows(writer(max_new_tokens=max(sizes) - 1), EXAMPLES, lines.append)
    (line,) = lines
    assert [int(number) for number in re.findall(r"\d+", line)] == [3, sizes.count(max(sizes)), max(sizes) - 1]
    long = read_text("## Introduction\n\n" + "Tea is drunk by many people. " * 100, ".md")
    example = WriterExample(select(long, LeadSelector(), Budget(amount=1)), "Tea.")
    example_rows(writer(), [*EXAMPLES, example], lines.append)
    assert [int(number) for number in re.findall(r"\d+", lines[-1])] == [4, 1, 400]


def test_the_rest_is_what_is_not_in_the_introduction() -> None:
    rest, opening = rest_text(DOCUMENT), introduction_text(DOCUMENT)
    assert "Nobody knew what was in the cup" in rest
    assert "Tea is drunk by many people." in opening
    assert len(f"{opening} {rest}") == len(" ".join(sentence.text for sentence in DOCUMENT.sentences))
    model_writer = writer()
    text = "".join(read(model_writer, row) for row in rest_rows(model_writer, [DOCUMENT, SHORT]).input_ids)
    assert "<r>Cows give milk to all." in text
    assert "Milk is white" not in text


def test_a_writer_without_extracts_is_shown_none(tmp_path: Path) -> None:
    model_writer = writer(LAYOUT.model_copy(update={"extract": None}))
    text = model_writer.tokenizer.decode(model_writer.build_prompt(EXAMPLES[0].extract)[0], skip_special_tokens=True)
    assert text == f"<i>{introduction_text(DOCUMENT)}<s>"
    folder = train_writer(model_writer, EXAMPLES, training(steps=1), tmp_path, rest_fraction=0, progress=False)
    assert load_writer(folder).layout == PromptLayout(
        introduction="<i>", extract=None, summary="<s>", rest="<r>", window=400
    )


def test_a_trained_writer_finds_its_summaries_likelier_and_comes_back_from_its_folder(tmp_path: Path) -> None:
    model_writer = writer()
    before = summary_likelihoods(model_writer, EXAMPLES)
    folder = train_writer(model_writer, EXAMPLES, training(), tmp_path, rest_fraction=0.5, progress=False)
    after = summary_likelihoods(model_writer, EXAMPLES)
    assert sum(likelihood.nats for likelihood in after) < 0.8 * sum(likelihood.nats for likelihood in before)
    again = load_writer(folder, model_writer.decoding, device="cpu")
    # Reloaded weights may be aligned otherwise, so kernels may add in another order.
    nats = [likelihood.nats for likelihood in after]
    assert [likelihood.nats for likelihood in summary_likelihoods(again, EXAMPLES)] == pytest.approx(nats, rel=1e-4)
    assert again.window == LAYOUT.window


def test_training_goes_on_where_it_stood(tmp_path: Path) -> None:
    whole, halves = writer(), writer()
    train_writer(whole, EXAMPLES, training(schedule="constant"), tmp_path / "whole", progress=False)
    train_writer(halves, EXAMPLES, training(schedule="constant", steps=6), tmp_path / "halves", progress=False)
    halves = writer()
    train_writer(halves, EXAMPLES, training(schedule="constant"), tmp_path / "halves", progress=False)
    pairs = zip(whole.model.parameters(), halves.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_likelihood_is_that_of_one_token_after_the_other() -> None:
    model_writer = writer()
    for example, likelihood in zip(EXAMPLES, summary_likelihoods(model_writer, EXAMPLES, batch_size=3), strict=True):
        ids = model_writer.build_prompt(example.extract).ids
        ids_of = model_writer.tokenizer(example.summary, add_special_tokens=False)["input_ids"]
        wanted = [*ids_of, model_writer.tokenizer.eos_token_id]
        nats = 0.0
        with torch.inference_mode():
            for token in wanted:
                nats -= float(model_writer.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])
                ids = [*ids, token]
        assert likelihood.tokens == len(wanted)
        assert likelihood.nats == pytest.approx(nats, rel=1e-4)


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_several_documents_are_written_as_each_alone(method: str) -> None:
    model_writer = writer(method=method, max_new_tokens=12)
    prompts = [model_writer.build_prompt(example.extract)[0] for example in EXAMPLES]
    assert len({len(prompt) for prompt in prompts}) > 1
    assert model_writer.complete_batch(prompts) == [model_writer.complete_batch([prompt])[0] for prompt in prompts]


def test_a_text_that_ends_at_the_limit_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model_writer = writer(max_new_tokens=3)
    (word,) = model_writer.tokenize("a")
    end = model_writer.tokenizer.eos_token_id
    assert isinstance(end, int)
    rows = [[word, word, end], [word, end], [word, word, word]]
    monkeypatch.setattr("graftlm.pipelines.summarize.writer.generate_rows", lambda *_, **__: rows)
    assert model_writer.complete_batch([]) == []
    assert model_writer.complete_batch([[word]] * 3) == [("aa", False), ("a", False), ("aaa", True)]


@pytest.mark.parametrize(
    ("layout", "examples", "error"),
    [
        (LAYOUT, [], DataError),
        (LAYOUT.model_copy(update={"window": 45}), EXAMPLES, RecipeError),
        (PromptLayout(extract=None, summary="<s>" * 9, window=60), EXAMPLES, RecipeError),
    ],
)
def test_lessons_that_cannot_be(
    layout: PromptLayout,
    examples: list[WriterExample],
    error: type[GraftError],
    tmp_path: Path,
) -> None:
    with pytest.raises(error):
        train_writer(writer(layout), examples, training(), tmp_path, rest_fraction=0, progress=False)
