"""Prompts of one instruction compute their common beginning once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.pipelines.clarify import LocalModel, load_template
from graftlm.pipelines.clarify.models import PrefixCache
from graftlm.pipelines.clarify.prompts import Prompt, build_prompt
from tiny import tiny_model, tiny_tokenizer

TEMPLATE = load_template("answer")
QUESTION = "Which one?"


def prompt(name: Any, text: str, answer: str | None = None) -> Prompt:
    exchanges = [] if answer is None else [(QUESTION, answer)]
    return build_prompt(TEMPLATE, name, "en", text, exchanges=exchanges)


PROMPTS = [
    prompt("ask", "What is it?"),
    prompt("write", "What is it?", "a jar"),
    prompt("write", "What is it?", "a file"),
    prompt("ask", "What is it?", "a file"),
    prompt("write", "Is it?", "a file"),
    prompt("write", "Is it?", "a file"),
    prompt("plain", "Is it?"),
]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    positions = {"llama": "max_position_embeddings", "gpt2": "n_positions"}[request.param]
    return tiny_model(request.param, **{positions: 8192})


@torch.inference_mode()
def test_logits_equal_those_without_reuse(model: Any) -> None:
    tokenizer, prefixes, reused = tiny_tokenizer(), PrefixCache(model), []
    for item in PROMPTS:
        ids = tokenizer(item.text(), verbose=False)["input_ids"]
        cache = prefixes.begin(item.instructions, ids, len(ids) - 1)
        reused.append(cache.get_seq_length())
        logits = model(input_ids=torch.tensor([ids[reused[-1] :]]), past_key_values=cache).logits[0, -1]
        # Sums of other order: float32 rounds them differently.
        torch.testing.assert_close(logits, model(input_ids=torch.tensor([ids])).logits[0, -1], atol=1e-4, rtol=1e-3)
        model(input_ids=torch.tensor([ids[:3]]), past_key_values=cache)  # new tokens, which `keep` removes
        prefixes.keep(item.instructions, ids, cache)
        assert cache.get_seq_length() == len(ids)
        if reused[-1] == len(ids) - 1:
            assert item == PROMPTS[4], "the same prompt again computes one token"
    assert [count > 0 for count in reused] == [False, False, True, True, True, True, False]


def test_replies_and_scores_equal_those_without_reuse(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    reusing, fresh = (LocalModel(model, tokenizer, max_new_tokens=6, reuse=reuse) for reuse in (True, False))
    for item in PROMPTS:
        outputs = ["Rome.", "Rome is large.", "xx"]
        assert reusing.score(item, outputs) == pytest.approx(fresh.score(item, outputs), rel=1e-3)
        one, other = reusing.generate(item), fresh.generate(item)
        assert one.cost == other.cost
        likelihoods = fresh.score(item, [one.text or " ", other.text or " "])
        assert likelihoods[0] == pytest.approx(likelihoods[1], rel=1e-3), "greedy texts may part where two tokens tie"


def test_windows_and_grafts_reuse_nothing() -> None:
    windowed = tiny_model("mistral", sliding_window=8)
    assert not PrefixCache.serves(windowed)
    assert LocalModel(windowed, tiny_tokenizer())._prefixes is None
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer())
    config = graft_config({"kind": "lora"})
    with GraftedModel(backbone, {"lora": build_graft(config, backbone)}) as grafted:
        assert not PrefixCache.serves(grafted)


def test_candidate_answers_part_at_the_answer_and_conversations_at_the_text() -> None:
    """What servers with prefix caching can reuse: prompts begin with what is the same."""
    one, other = (item.text().rpartition("<answer>") for item in PROMPTS[1:3])
    assert one[0] == other[0]
    assert one[2] != other[2]
    one, other = (item.messages() for item in (PROMPTS[2], PROMPTS[4]))
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]
    first, second = (item.messages() for item in (PROMPTS[0], PROMPTS[3]))
    assert first[:-1] == second[:-1]
    assert second[-1]["content"].startswith(first[-1]["content"]), "a second question follows the first one's prompt"
