"""The divergence from the backbone: equal to an enumeration of all texts, and to its estimate from sampled ones."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graftlm.backbone import Backbone
from graftlm.data import SelfSourceConfig
from graftlm.data.own_text import OwnText
from graftlm.data.own_text_sampling import sample_own_text
from graftlm.errors import EvaluationError
from graftlm.evaluation import Scores, value_of
from graftlm.evaluation.divergence import own_text_metrics
from graftlm.evaluation.scores import learning_and_forgetting, score, score_windows
from graftlm.evaluation.windows import own_windows
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from tiny import tiny_model, tiny_tokenizer

VOCABULARY, LENGTH = 5, 3


def model_of_few_tokens(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, eos_token_id=0, bos_token_id=0, **shape)).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.6
    return model


def log_probability(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(N,): of the tokens behind the first of each row."""
    with torch.no_grad():
        table = model(ids).logits.double().log_softmax(-1)
    return table[:, :-1].gather(-1, ids[:, 1:, None]).sum((1, 2))


def scored(model: Any, reference: Any, samples: list[OwnText]) -> Any:
    return score_windows(model, SimpleNamespace(pad_token_id=0), own_windows(samples), reference=reference)


def test_it_is_the_divergence_of_the_distributions_over_all_texts() -> None:
    backbone, model = model_of_few_tokens(0), model_of_few_tokens(1)
    ids = torch.tensor([(0, *text) for text in itertools.product(range(VOCABULARY), repeat=LENGTH)])
    log_p, log_q = log_probability(backbone, ids), log_probability(model, ids)
    expected = (log_p.exp() * (log_p - log_q)).sum().item()
    scores = scored(model, backbone, [OwnText(row, [(1, LENGTH + 1)]) for row in ids.tolist()])
    assert (log_p.exp().numpy() * scores.kl).sum() == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1
    same = scored(backbone, backbone, [OwnText(row, [(1, LENGTH + 1)]) for row in ids.tolist()])
    assert np.abs(same.kl).max() < 1e-6


def test_sampled_texts_estimate_it_without_bias(tmp_path: Path) -> None:
    backbone, model = model_of_few_tokens(0), model_of_few_tokens(1)
    ids = torch.tensor([(0, *text) for text in itertools.product(range(VOCABULARY), repeat=LENGTH)])
    log_p = log_probability(backbone, ids)
    tokenizer: Any = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([0, 0])
    config = SelfSourceConfig(self=True, tokens=6000, length=LENGTH + 1, batch_size=1000)
    wrapped = Backbone.wrap(backbone, tokenizer, "few tokens")
    samples = sample_own_text(wrapped, config, 4, tmp_path / "samples.jsonl", progress=False)
    assert {sample.ids[0] for sample in samples} == {0}
    whole = [sample for sample in samples if len(sample.ids) == LENGTH + 1]
    scores = scored(model, backbone, whole)
    # Texts that a drawn start token ended early are missing: weigh the enumeration alike.
    complete = (ids[:, 1:-1] != 0).all(1)
    weights = (log_p.exp() * complete / (log_p.exp() * complete).sum()).numpy()
    every = scored(model, backbone, [OwnText(row, [(1, LENGTH + 1)]) for row in ids.tolist()])
    conditional = float((weights * every.kl).sum())
    assert scores.kl.mean() == pytest.approx(conditional, abs=4 * scores.kl.std() / len(whole) ** 0.5)


def by_hand(model: Any, backbone: Any, ids: list[int], start: int, stop: int) -> float:
    """The divergence at the tokens start to stop of a text, each behind all that precedes it."""
    with torch.no_grad():
        log_p, log_q = (m(torch.tensor([ids])).logits[0].double().log_softmax(-1) for m in (backbone, model))
    return float((log_p.exp() * (log_p - log_q)).sum(-1)[start - 1 : stop - 1].sum())


def test_both_turns_of_a_conversation_count_after_all_that_precedes_them() -> None:
    backbone, model = model_of_few_tokens(0), model_of_few_tokens(1)
    chat = OwnText([0, 3, 1, 2, 4, 3, 1, 1, 2], [(2, 4), (6, 9)])
    free = OwnText([0, 2, 2, 1], [(1, 4)])
    scores = scored(model, backbone, [chat, free])
    expected = [by_hand(model, backbone, chat.ids, *turn) for turn in chat.turns]
    expected.append(by_hand(model, backbone, free.ids, 1, 4))
    np.testing.assert_allclose(scores.kl, expected, rtol=1e-4)

    samples = [chat, free, chat]
    own = score_windows(model, tiny_tokenizer(), own_windows(samples), reference=backbone).by_document()
    assert own.tokens.tolist() == [5, 3, 5], "a conversation is one unit"
    metrics = own_text_metrics(own, samples)
    assert value_of(metrics["chat_kl"]) == pytest.approx(sum(expected[:2]) / 5, rel=1e-4)
    assert value_of(metrics["own_kl"]) == pytest.approx((2 * sum(expected[:2]) + expected[2]) / 13, rel=1e-4)


@pytest.mark.slow
def test_the_mean_over_sampled_tokens_is_expected_divergence_over_expected_length(tmp_path: Path) -> None:
    """Texts that end early are in it: a sum over a sum, as it is reported."""
    backbone, model = model_of_few_tokens(0), model_of_few_tokens(1)
    tokenizer: Any = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([0, 0])
    config = SelfSourceConfig(self=True, tokens=20_000, length=LENGTH + 1, batch_size=1000)
    wrapped = Backbone.wrap(backbone, tokenizer, "few tokens")
    scores = scored(model, backbone, sample_own_text(wrapped, config, 4, tmp_path / "samples.jsonl", progress=False))
    divergence = length = kept = 0.0
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        end = next((place + 1 for place, token in enumerate(text) if token == 0), LENGTH)
        if text[0] == 0 or any(text[end:]):  # empty, or counted with the first text of the same beginning
            continue
        ids = [0, *text[:end]]
        probability = float(log_probability(backbone, torch.tensor([ids])).exp())
        kept += probability
        length += probability * end
        divergence += probability * by_hand(model, backbone, ids, 1, end + 1)
    assert 0.3 < kept < 0.99, "empty texts are left out"
    assert scores.tokens.mean() == pytest.approx(length / kept, rel=0.05)
    assert scores.kl.sum() / scores.tokens.sum() == pytest.approx(divergence / length, rel=0.05)


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "neutral-residues"},
        {"kind": "finetune"},
        {"kind": "lora"},
        {"kind": "peft", "method": "OFT", "options": {"oft_block_size": 8}},
        {"kind": "peft", "method": "OSF"},
        {"kind": "llama-pro", "blocks": 1},
    ],
    ids=lambda config: config.get("method", config["kind"]),
)
def test_the_bare_model_stays_bare_while_a_graft_is_attached(config: dict[str, Any]) -> None:
    """Taps, modules of PEFT, copies and new blocks do not act in it."""
    ids = torch.randint(10, 200, (2, 12), generator=torch.Generator().manual_seed(0))
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    expected = backbone.model(ids).logits
    with GraftedModel(backbone, {"graft": build_graft(graft_config(config), backbone)}) as model:
        with torch.no_grad():
            for parameter in model.trainable_parameters().values():
                parameter.add_(torch.randn(parameter.shape) * 0.1)
        assert (model(ids).logits - expected).abs().max() > 0.1
        torch.testing.assert_close(backbone.bare_model(ids).logits, expected, rtol=1e-5, atol=5e-5)
        scores = score(model, backbone.tokenizer, ["the garden"] * 4, reference=backbone.bare_model)
    assert scores.kl is not None
    assert scores.kl.min() > 1e-4


def test_new_text_has_a_divergence_where_it_was_measured() -> None:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    other = tiny_model("llama", seed=1)
    plain = score(other, backbone.tokenizer, ["the garden"] * 4)
    assert "new_kl" not in learning_and_forgetting({}, {"new": plain})
    with pytest.raises(EvaluationError) as caught:
        plain.value("kl_per_token")
    assert "reference" in str(caught.value)
    beside = score(other, backbone.tokenizer, ["the garden"] * 4, reference=backbone.model)
    interval = learning_and_forgetting({}, {"new": beside})["new_kl"]
    assert interval.low <= value_of(interval) <= interval.high
    ids = torch.tensor([backbone.need_tokenizer()("the garden")["input_ids"]])
    log_p, log_q = (model(ids).logits.double().log_softmax(-1)[0, :-1] for model in (backbone.model, other))
    assert value_of(interval) == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-4)


def test_the_turns_of_a_conversation_are_one_unit_of_the_interval() -> None:
    rng = np.random.default_rng(0)
    means = np.repeat(rng.normal(size=200), 2)  # two turns that are alike
    scores = Scores(
        nats=means * 10,
        tokens=np.full(400, 10),
        bytes=np.full(400, 30),
        document=np.repeat(np.arange(200), 2),
        kl=means * 5,
    )
    merged = scores.by_document()
    assert merged.tokens.tolist() == [20] * 200
    assert merged.document.tolist() == [*range(200)]
    one, two = merged.interval("kl_per_token"), scores.interval("kl_per_token")
    assert one.mean == pytest.approx(two.mean)
    assert (one.high - one.low) / (two.high - two.low) == pytest.approx(2**0.5, rel=0.15)


def test_no_logits_of_prompts_are_computed() -> None:
    model = model_of_few_tokens(0)
    counts: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: counts.append(output[..., 0].numel()))
    scored(model, model, [OwnText([0, 1, 2, 3, 4], [(3, 5)]), OwnText([0, 1, 2], [(2, 3)])])
    assert counts == [3, 3]
