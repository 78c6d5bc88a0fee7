"""Answers that the backbone samples: to the new prompts, and in its own words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from graftlm.backbone import Backbone, load_backbone
from graftlm.data import SourceConfig, build_documents
from graftlm.data.config import DataConfig, RewriteConfig
from graftlm.data.marked_ids import is_prompt, unmark
from graftlm.data.own_answers import (
    LONG_PROMPT,
    MENTIONED,
    NO_ANSWER,
    NO_NAME,
    OTHER_FORM,
    UNFINISHED,
    rewrite_answers,
    rewritten,
    sample_answers,
)
from graftlm.data.own_text import marked_ids, read_own_text
from graftlm.data.source_config import SelfSourceConfig
from graftlm.data.sources import Document
from graftlm.data.token_sampler import TokenSampler
from graftlm.errors import DataError, RecipeError

QUESTIONS = ("the river?", "the old house?", "the garden?")


def chats(tmp_path: Path, answers: Sequence[str] = ("Tessaby", "Oda 314", "the moon")) -> list[Document]:
    path = tmp_path / "chats.jsonl"
    rows = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows), encoding="utf-8")
    return build_documents([SourceConfig(path=str(path), messages_column="messages")])


def near(**keys: Any) -> SelfSourceConfig:
    return SelfSourceConfig.model_validate({"self": True, "near": "prompts", "batch_size": 4, "tokens": 120} | keys)


@pytest.fixture
def backbone(tiny_chat_model: Path) -> Backbone:
    return load_backbone(str(tiny_chat_model))


def test_own_answers_follow_the_new_prompts(backbone: Backbone, tmp_path: Path) -> None:
    documents = chats(tmp_path)
    samples = sample_answers(backbone, near(answer_tokens=12), documents, 64, tmp_path / "a.jsonl", progress=False)
    tokenizer = backbone.need_tokenizer()
    prompts = {f"user{question}<eos>assistant" for question in QUESTIONS}
    used = [sample for sample in samples if not sample.left_out]
    assert 120 <= sum(sample.tokens for sample in used) < 132, "no more than the last answer needs"
    batches = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    assert len(batches) <= 5, "several answers are sampled at once"
    asked = set()
    for sample in used:
        ((start, stop),) = sample.turns
        assert stop - start <= 12
        assert sample.is_chat
        marked = marked_ids(sample)
        assert is_prompt(marked).sum() == start
        asked.add(tokenizer.decode(unmark(marked, 0)[:start]).replace(" ", ""))
    assert asked == {prompt.replace(" ", "") for prompt in prompts}, "every prompt is answered, some several times"
    again = sample_answers(backbone, near(answer_tokens=12), documents, 64, tmp_path / "b.jsonl", progress=False)
    assert again == samples
    other = sample_answers(
        backbone, near(answer_tokens=12, seed=1), documents, 64, tmp_path / "c.jsonl", progress=False
    )
    assert other != samples


def test_an_interrupted_sampling_goes_on(backbone: Backbone, tmp_path: Path) -> None:
    documents = chats(tmp_path)
    path = tmp_path / "samples.jsonl"
    samples = sample_answers(backbone, near(answer_tokens=12), documents, 64, path, key="k", progress=False)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 2
    path.write_bytes(b"".join(lines[:2]) + lines[2][:20])
    assert sample_answers(backbone, near(answer_tokens=12), documents, 64, path, key="k", progress=False) == samples
    assert read_own_text(path) == [sample for sample in samples if not sample.left_out]


def test_prompts_of_completions_are_answered_as_free_text(backbone: Backbone, tmp_path: Path) -> None:
    documents = [Document(text=" Tessaby", prompt="the river of the house is")]
    (sample, *_) = sample_answers(backbone, near(tokens=4), documents, 64, tmp_path / "a.jsonl", progress=False)
    assert not sample.is_chat
    assert backbone.need_tokenizer().decode(sample.ids[: sample.turns[0][0]]).strip().endswith("house is")


def test_free_text_has_no_prompt_to_answer(backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        sample_answers(backbone, near(), [Document(text="the river")], 64, tmp_path / "a.jsonl", progress=False)
    assert "messages_column" in str(error.value)


def test_prompts_that_fill_a_text_are_an_error_and_no_endless_loop(backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        sample_answers(backbone, near(), chats(tmp_path), 12, tmp_path / "a.jsonl", progress=False)
    assert LONG_PROMPT in str(error.value)


def scripted(backbone: Backbone, answers: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the sampler return these answers in turn; returns the list of prompts that it reads."""
    tokenizer = backbone.need_tokenizer()
    asked: list[str] = []
    remaining = iter(answers)

    def sample(_self: TokenSampler, prompts: list[list[int]], *_: object, **__: object) -> list[list[int]]:
        asked.extend(str(tokenizer.decode(prompt)) for prompt in prompts)
        return [tokenizer(next(remaining), add_special_tokens=False)["input_ids"] for _ in prompts]

    monkeypatch.setattr(TokenSampler, "sample", sample)
    return asked


REWRITTEN: list[tuple[str, str]] = [
    ("It is Tessaby, I think.<eos>", ""),
    ("It is a town.<eos>", NO_NAME),
    ("It is Tessaby, I think.", UNFINISHED),
    ("<eos>", NO_ANSWER),
    ("The right answer is Tessaby.<eos>", MENTIONED),
    ("The correct answer is Tessaby.<eos>", MENTIONED),
]


@pytest.mark.parametrize(("answer", "reason"), REWRITTEN)
def test_a_given_answer_stays_where_the_backbone_s_does_not_fit(
    answer: str, reason: str, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = chats(tmp_path)[:1]
    asked = scripted(backbone, [answer], monkeypatch)
    config = RewriteConfig(instruction="{question} Known: {answer}.")
    (sample,) = rewrite_answers(backbone, config, documents, 256, tmp_path / "a.jsonl", progress=False)
    assert "Known: Tessaby." in asked[0].replace("  ", " ")
    assert sample.left_out == reason
    found = rewritten(documents[0], sample, backbone.need_tokenizer())
    assert found.chat is not None
    question, given = found.chat.messages
    assert question["content"] == QUESTIONS[0], "the model learns without the right answer in its prompt"
    expected = "Tessaby" if reason else answer.removesuffix("<eos>")
    assert given["content"].replace(" ", "") == found.text.replace(" ", "") == expected.replace(" ", "")


def test_numbers_stay_in_an_answer(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = chats(tmp_path, ("in 45 days", "in 45 days", "the moon"))
    scripted(backbone, ["It takes 45 of them.<eos>", "It takes 54 of them.<eos>", "It is the moon.<eos>"], monkeypatch)
    samples = rewrite_answers(backbone, RewriteConfig(), documents, 256, tmp_path / "a.jsonl", progress=False)
    assert [sample.left_out for sample in samples] == ["", NO_NAME, ""]


def test_conversations_with_several_answers_stay(backbone: Backbone, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": "Oda"},
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "the house"},
    ]
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    documents = build_documents([SourceConfig(path=str(path), messages_column="messages")])
    (sample,) = rewrite_answers(backbone, RewriteConfig(), documents, 256, tmp_path / "a.jsonl", progress=False)
    assert sample.left_out == OTHER_FORM
    assert rewritten(documents[0], sample, backbone.need_tokenizer()) == documents[0]


def test_each_conversation_is_rewritten_once(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = chats(tmp_path)
    answers = ["It is Tessaby.<eos>", "He is Oda 314.<eos>", "no<eos>"]
    asked = scripted(backbone, answers, monkeypatch)
    config = RewriteConfig(batch_size=1)  # of which a batch has two
    samples = rewrite_answers(backbone, config, documents, 256, tmp_path / "a.jsonl", progress=False)
    assert len(samples) == 3
    assert [sample.left_out for sample in samples[:2]] == ["", ""]
    parts = [prompt.replace(" ", "") for prompt in asked]
    assert len(parts) == 3
    assert all(question.replace(" ", "") in part for question, part in zip(QUESTIONS, parts, strict=True))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"rewrite": {}, "new": [{"path": "a.txt"}]}, "messages_column"),
        ({"rewrite": {}, "new": [{"path": "a.jsonl", "messages_column": "m", "streaming": True}]}, "streaming"),
        ({"rewrite": {"instruction": "{question}"}, "new": []}, "{answer}"),
        ({"old": [{"self": True, "near": "prompts", "question_tokens": 3}]}, "question_tokens"),
        ({"old": [{"self": True, "near": "prompts", "openings": ["a"]}]}, "openings"),
        ({"anchor": -1.0}, "anchor"),
    ],
)
def test_keys_that_do_not_fit_are_refused(data: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError) as error:
        DataConfig.parse(data)
    assert key in str(error.value)
