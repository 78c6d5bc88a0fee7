"""Answers equal a literal greedy loop; scores equal a literal sum; metrics are what their names say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from graftlm.backbone import Backbone, load_backbone
from graftlm.data import Document
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation import (
    Example,
    chrf,
    chrf_signature,
    exact_match,
    generate_answers,
    paired_difference,
    score,
    score_answers,
)
from graftlm.evaluation.examples import chrf_counts, chrf_of
from graftlm.generation.generate import Decoding, generate_text
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from stories import convert_stories
from tiny import BOS, EOS, tiny_model

PROMPTS = ["The quick", "a", "Le renard brun saute par-dessus le chien", "def f(x):", "語 und 🙂", "dog dog dog dog"]
NEW = 12


@torch.no_grad()
def literal_answer(model: Any, tokenizer: Any, prompt: str, new: int, *, bos: bool = False) -> str:
    """Greedy, a whole pass for each token: no batch, no padding, no cache."""
    given = [BOS] * bos + tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = list(given)
    while len(ids) < len(given) + new:
        token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == EOS:
            break
        ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=True).removeprefix(prompt)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("bos", [False, True])
def test_answers_equal_a_literal_loop(
    model: Any, tokenizer: Any, bos_tokenizer: Any, bos: bool, batch_size: int
) -> None:
    chosen = bos_tokenizer if bos else tokenizer
    actual = generate_answers(model, chosen, PROMPTS, max_new_tokens=NEW, stop=(), batch_size=batch_size)
    assert actual == [literal_answer(model, tokenizer, prompt, NEW, bos=bos) for prompt in PROMPTS]
    assert len(set(actual)) > 3


def test_a_grafted_model_answers_with_its_graft(tokenizer: Any) -> None:
    backbone = Backbone.wrap(tiny_model("llama"))
    graft = build_graft(graft_config({"kind": "adapter", "width": 8}), backbone)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.normal_(std=0.5)
    bare = generate_answers(backbone.model, tokenizer, PROMPTS, max_new_tokens=NEW, stop=())
    with GraftedModel(backbone, {"graft": graft}) as grafted:
        grafted.train()
        actual = generate_answers(grafted, tokenizer, PROMPTS, max_new_tokens=NEW, stop=())
        assert grafted.training, "the mode is given back"
        grafted.eval()
        assert actual == [literal_answer(grafted, tokenizer, prompt, NEW) for prompt in PROMPTS]
    assert actual != bare


def test_a_vocabulary_that_has_no_line_break_needs_no_stop_at_one(model: Any) -> None:
    words = Tokenizer(WordLevel({"?": 0, "the": 1, "fox": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")
    kept = generate_answers(model, tokenizer, ["the fox"], max_new_tokens=4, stop=())
    assert generate_answers(model, tokenizer, ["the fox"], max_new_tokens=4, stop=("\n",)) == kept


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings_end_an_answer(model: Any, tokenizer: Any, length: int) -> None:
    whole = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=NEW, stop=())
    stop = next(text[3 : 3 + length] for text in whole if len(text) > 3 + length and "\ufffd" not in text)
    actual = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=NEW, stop=("never", stop))
    assert actual == [text.partition(stop)[0] for text in whole]
    assert actual != whole


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_row_that_is_done_costs_no_more_steps(tokenizer: Any, length: int) -> None:
    model, calls = tiny_model("llama"), []
    whole = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=NEW, stop=())
    ids = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    new = [
        model.generate(**encoding, max_new_tokens=NEW, do_sample=False)[0, encoding["input_ids"].shape[1] :]
        for encoding in ids
    ]
    model.register_forward_hook(lambda *_: calls.append(1))
    clean = [i for i, text in enumerate(whole) if len(text) > length and "\ufffd" not in text[: length + 1]]
    assert clean
    for i in clean:
        calls.clear()
        stop = whole[i][:length]
        assert generate_answers(model, tokenizer, [PROMPTS[i]], max_new_tokens=NEW, stop=(stop,)) == [""]
        assert len(calls) == next(n for n in range(1, NEW + 1) if stop in tokenizer.decode(new[i][:n]))


def test_an_end_of_text_token_ends_an_answer(tokenizer: Any) -> None:
    model = tiny_model("llama")
    ids = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    new = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[:, ids["input_ids"].shape[1] :].tolist()
    ends = new[0][3]
    model.generation_config.eos_token_id = [ends, EOS]  # as models with several have them
    actual = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=NEW, stop=())
    kept = [row[: min((i for i, token in enumerate(row) if token in (ends, EOS)), default=NEW)] for row in new]
    assert actual == [tokenizer.decode(row, skip_special_tokens=True) for row in kept]
    assert len(kept[0]) <= 3


def test_a_checkpoint_s_own_generation_settings_do_not_count(tokenizer: Any) -> None:
    model = tiny_model("llama")
    expected = generate_answers(model, tokenizer, PROMPTS, max_new_tokens=NEW, stop=())
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0, no_repeat_ngram_size=1)
    assert generate_answers(model, tokenizer, PROMPTS, max_new_tokens=NEW, stop=()) == expected


def test_no_prompts_have_no_answers(model: Any, tokenizer: Any) -> None:
    assert generate_answers(model, tokenizer, [], max_new_tokens=3) == []


def test_prompts_that_can_not_be_continued(model: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        generate_answers(model, tokenizer, ["a", ""], max_new_tokens=3)
    assert "example 2" in str(caught.value)
    with pytest.raises(EvaluationError, match=r"601.*512"):
        generate_answers(model, tokenizer, ["a"], max_new_tokens=600)
    with pytest.raises(DataError):
        generate_answers(model, tokenizer, ["a"], max_new_tokens=3, stop=("\n", ""))


# Scores

EXAMPLES = [
    Example("The quick brown ", "fox jumps"),
    Example("a", "b"),
    Example("", "def f(x): return x"),
    Example("Où? ", "語 🙂 und naïve façades"),
]


@torch.no_grad()
def literal_score(model: Any, tokenizer: Any, example: Example, *, bos: bool) -> tuple[float, int]:
    given = [BOS] * bos + tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
    given, answer = (given, answer) if given else (answer[:1], answer[1:])
    logits = model(torch.tensor([[*given, *answer]])).logits[0].double()
    positions = range(len(given) - 1, len(given) + len(answer) - 1)
    nats = sum(-torch.log_softmax(logits[at], -1)[token].item() for at, token in zip(positions, answer, strict=True))
    return nats, len(answer)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("bos", [False, True])
def test_scores_are_of_the_answer_given_its_prompt(
    model: Any, tokenizer: Any, bos_tokenizer: Any, bos: bool, batch_size: int
) -> None:
    scores = score_answers(model, bos_tokenizer if bos else tokenizer, EXAMPLES, batch_size=batch_size)
    expected = [literal_score(model, tokenizer, example, bos=bos) for example in EXAMPLES]
    np.testing.assert_allclose(scores.nats, [nats for nats, _ in expected], rtol=1e-5)
    assert scores.tokens.tolist() == [tokens for _, tokens in expected]
    assert scores.document.tolist() == list(range(len(EXAMPLES)))
    sizes = [len(example.answer.encode()) for example in EXAMPLES]
    sizes[2] -= 0 if bos else len(tokenizer.decode(tokenizer(EXAMPLES[2].answer)["input_ids"][:1]))
    assert scores.bytes.tolist() == sizes
    assert paired_difference(scores, scores, "bits_per_byte").mean == 0


@pytest.mark.parametrize("length", [4, 7, 64])
@pytest.mark.parametrize("bos", [False, True])
@torch.no_grad()
def test_prompts_of_documents_are_context_in_every_window(
    model: Any, tokenizer: Any, bos_tokenizer: Any, length: int, bos: bool
) -> None:
    documents = [Document(example.answer, prompt=example.prompt) for example in EXAMPLES]
    scores = score(model, bos_tokenizer if bos else tokenizer, documents, length=length)
    for index, example in enumerate(EXAMPLES):
        given, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (example.prompt, example.answer)
        )
        ids, losses = given + answer, []
        for i in range(max(len(given), 0 if bos else 1), len(ids)):
            start = 0  # of the window that scores token i, each beginning with the last token of the one before
            while i >= start + length - bos:
                start += length - bos - 1
            logits = model(torch.tensor([[BOS] * bos + ids[start:i]])).logits[0, -1].double()
            losses.append(-torch.log_softmax(logits, -1)[ids[i]].item())
        mine = scores.document == index
        assert scores.tokens[mine].sum() == len(losses)
        assert scores.nats[mine].sum() == pytest.approx(sum(losses), rel=1e-5)


@pytest.mark.parametrize("bos", [False, True])
def test_a_graft_is_told_which_tokens_are_prompts(
    model: Any, tokenizer: Any, bos_tokenizer: Any, bos: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = bos_tokenizer if bos else tokenizer
    seen: list[torch.Tensor | None] = []
    logits_at = GraftedModel.logits_at

    def watch(self: GraftedModel, *arguments: Any, prompt: torch.Tensor | None = None, **more: Any) -> Any:
        seen.append(prompt)
        return logits_at(self, *arguments, prompt=prompt, **more)

    monkeypatch.setattr(GraftedModel, "logits_at", watch)
    with GraftedModel(Backbone.wrap(tiny_model("llama"))) as grafted:
        actual = score_answers(grafted, chosen, EXAMPLES)
        np.testing.assert_allclose(actual.nats, score_answers(model, chosen, EXAMPLES).nats, rtol=1e-5)
        score(grafted, chosen, ["no prompt at all"])
    assert seen[0] is not None
    expected = [len(chosen(example.prompt)["input_ids"]) if example.prompt else 0 for example in EXAMPLES]
    assert sorted(seen[0].sum(dim=1).tolist()) == sorted(expected)
    assert seen[1] is None


def test_answers_that_can_not_be_scored(model: Any, tokenizer: Any) -> None:
    with pytest.raises(DataError) as caught:
        score_answers(model, tokenizer, [Example("a", "b"), Example("a", "")])
    assert "example 2" in str(caught.value)
    with pytest.raises(EvaluationError) as too_long:
        score_answers(model, tokenizer, [Example("語" * 200, "語" * 50)])
    assert "512" in str(too_long.value)


# Metrics


def test_exact_match_sees_through_white_space_around_the_answer_alone() -> None:
    examples = [Example("", "12"), Example("", " a b\n"), Example("", "a b"), Example("", "A"), Example("", "")]
    actual = exact_match(["12\n", "a b", "a  b", "a", "\n"], examples)
    assert actual.dtype == np.float64
    assert actual.tolist() == [1, 1, 0, 0, 1]


texts = st.lists(st.tuples(st.text("ab é.", max_size=20), st.text("ab é.", max_size=20)), min_size=1, max_size=5)


@settings(max_examples=60)
@given(texts, st.sampled_from([1, 2]))
def test_chrf_is_sacrebleu_s(pairs: list[tuple[str, str]], beta: int) -> None:
    from sacrebleu.metrics.chrf import CHRF

    answers, examples = [given for given, _ in pairs], [Example("", expected) for _, expected in pairs]
    expected = CHRF(beta=beta).corpus_score(answers, [[example.answer for example in examples]]).score
    assert chrf(answers, examples, beta=beta) == pytest.approx(expected)
    assert chrf_of(chrf_counts(answers, examples).sum(axis=0), beta=beta) == pytest.approx(expected)


def test_chrf_of_right_and_wrong_answers() -> None:
    examples = [Example("", "the cat sat"), Example("", "on the mat")]
    assert chrf(["the cat sat", "on the mat"], examples) == pytest.approx(100)
    assert chrf(["xyz", ""], examples) == 0
    assert chrf_counts([], []).shape == (0, 18)
    assert chrf_signature().startswith("chrF2|nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.")
    assert chrf_signature(beta=1).startswith("chrF1|")


@pytest.mark.parametrize("metric", [exact_match, chrf])
def test_answers_to_other_examples(metric: Any) -> None:
    with pytest.raises(EvaluationError):
        metric(["a"], [Example("", "a"), Example("", "b")])


def test_a_real_model_with_a_sentencepiece_tokenizer(data_dir: Path, tmp_path: Path) -> None:
    backbone = load_backbone(convert_stories(data_dir / "models" / "stories260K", tmp_path))
    model, tokenizer = backbone.model, backbone.need_tokenizer()
    prompts = [
        "Once upon a time, there was a",
        "One day, Lily",
        "The",
        "Tom said: Hello! Do you want to play with me in the",
    ]
    together = generate_answers(model, tokenizer, prompts, max_new_tokens=24, stop=(".",))
    alone = [generate_answers(model, tokenizer, [prompt], max_new_tokens=24, stop=(".",))[0] for prompt in prompts]
    assert together == alone
    assert together[0].startswith(" little"), "the blank between prompt and answer stays"
    decoding = Decoding(max_new_tokens=24)
    whole = [generate_text(model, tokenizer, prompt, decoding).text for prompt in prompts]
    assert together == [text.partition(".")[0] for text in whole]
    likely, unlikely = (
        Example(prompts[0], answer) for answer in ("little girl named Lily.", "quantum of lizards under.")
    )
    scores = score_answers(model, tokenizer, [likely, unlikely])
    assert 2 * scores.nats[0] < scores.nats[1]
    assert scores.bytes.tolist() == [len(likely.answer), len(unlikely.answer)]
