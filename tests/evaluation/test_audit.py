"""An audit: exact where nothing changed, equal to a literal computation where something did, and honest on the rest."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from graftlm import GraftedModel, audit, build_graft, graft_config, save_graft
from graftlm.backbone import Backbone, token_texts
from graftlm.data.own_text import read_own_text
from graftlm.errors import (
    ArtifactError,
    BackboneError,
    DataError,
    EvaluationError,
    ForgettingBudgetError,
    GraftError,
    RecipeError,
)
from graftlm.evaluation import Interval, value_of
from graftlm.evaluation.audit.comparison import compare_windows
from graftlm.evaluation.audit.differences import tokenizer_difference
from graftlm.evaluation.audit.loading import load_pair
from graftlm.evaluation.audit.passages import widest_passages
from graftlm.evaluation.chat_answers import ChatQuestion, answer_questions, behavior, behavior_lost
from graftlm.evaluation.scores import Scores
from graftlm.evaluation.windows import cut_windows
from tiny import EOS, VOCABULARY, tiny_model, tiny_tokenizer

TEXT = ["the old house by the river was quiet that morning " * 3, "a letter lay in the garden and said nothing " * 2]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|in|>' + m['role'] + '\n' + m['content'] + '<|out|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|in|>assistant\n' }}{% endif %}"
)
CHATS: dict[str, Any] = {"tokens": 300, "length": 48, "answers": 6, "max_new_tokens": 8, "progress": False}
SIZES: dict[str, Any] = {"tokens": 200, "length": 24, "batch_size": 7, "progress": False}


def plain(seed: int = 0, **changes: Any) -> Backbone:
    torch.manual_seed(seed)
    return Backbone.wrap(tiny_model("llama", **changes), tiny_tokenizer(), "tiny")


def tuned_copy(backbone: Backbone, spread: float = 0.05) -> Backbone:
    model = copy.deepcopy(backbone.model)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return Backbone.wrap(model, backbone.tokenizer, "tuned")


def saved(backbone: Backbone, folder: Path) -> Path:
    backbone.model.save_pretrained(folder)
    backbone.need_tokenizer().save_pretrained(folder)
    return folder


def chatting(spread: float = 0.0) -> Backbone:
    """A chat model whose template and generation config end turns with a token that it draws often."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|in|>", "<|out|>"]})  # type: ignore[arg-type]
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    torch.manual_seed(4)
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    out: Any = tokenizer.convert_tokens_to_ids("<|out|>")
    head: Any = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[out] = 5.0
    model.generation_config.eos_token_id = [EOS, out]
    return Backbone.wrap(model, tokenizer, "tiny chat")


def never_ending(backbone: Backbone) -> Backbone:
    tuned = tuned_copy(backbone)
    head: Any = tuned.model.get_output_embeddings()
    head.bias.data[tuned.model.generation_config.eos_token_id] = -50.0
    return tuned


def moved_graft(backbone: Backbone, kind: str = "neutral-residues") -> Any:
    graft = build_graft(graft_config({"kind": kind, "capacity": 0.5}), backbone)
    torch.manual_seed(2)
    for parameter in graft.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    return graft


def literal(base: Any, tuned: Any, ids: list[int], first: int) -> tuple[list[float], list[bool]]:
    """Divergences and changes of choice at `ids[first:]`, from whole distributions in float64, one text at a time."""
    with torch.no_grad():
        p, q = (torch.softmax(model(torch.tensor([ids])).logits[0].double(), -1) for model in (base, tuned))
    divergences, changes = [], []
    for at in range(first - 1, len(ids) - 1):
        terms = [float(a * math.log(a / b)) for a, b in zip(p[at].tolist(), q[at].tolist(), strict=False) if a > 0]
        divergences.append(math.fsum(terms))
        changes.append(int(p[at].argmax()) != int(q[at].argmax()))
    return divergences, changes


def test_own_kl_and_changed_tokens_equal_a_literal_computation(tmp_path: Path) -> None:
    base = plain()
    tuned = tuned_copy(base)
    found = audit(base, tuned, tmp_path, **SIZES)
    divergences, changes = [], []
    for sample in read_own_text(tmp_path / "own-text.jsonl"):
        for start, stop in sample.turns:
            some, other = literal(base.model, tuned.model, sample.ids[:stop], start)
            divergences += some
            changes += other
    assert len(divergences) >= 200
    own_kl, changed = found.metrics["own_kl"], found.metrics["changed_tokens"]
    assert isinstance(own_kl, Interval)
    assert isinstance(changed, Interval)
    assert own_kl.mean == pytest.approx(np.mean(divergences), rel=1e-4)
    assert own_kl.low < own_kl.mean < own_kl.high
    assert changed.mean == pytest.approx(np.mean(changes), abs=2 / len(changes))


def test_a_model_against_itself_is_exactly_zero_everywhere(tmp_path: Path) -> None:
    folder = str(saved(plain(), tmp_path / "model"))
    found = audit(folder, folder, texts={"news": TEXT}, **SIZES)
    names = [name for name in found.metrics if name.endswith(("_kl", "_lost", "changed_tokens"))]
    assert {"own_kl", "changed_tokens", "news_kl", "news_lost", "news_changed_tokens"} <= {*names}
    assert all(found.metrics[name] == Interval(mean=0, low=0, high=0) for name in names)
    assert not found.passages
    assert any("one model" in note for note in found.notes)


def test_several_texts_have_the_mean_of_what_each_lost() -> None:
    base = plain()
    texts = {"news": TEXT, "tales": ["a b c d e f g h " * 6]}
    found = audit(base, tuned_copy(base), texts=texts, budget={"texts_lost": 100}, **(SIZES | {"tokens": 0}))
    lost = [value_of(found.metrics[f"{name}_lost"]) for name in texts]
    assert lost[0] != pytest.approx(lost[1], rel=1e-3)
    assert value_of(found.metrics["texts_lost"]) == pytest.approx(sum(lost) / 2, abs=1e-9)
    with pytest.raises(EvaluationError) as error:
        audit(base, base, texts={"news": TEXT}, budget={"texts_lost": 1.0}, **SIZES)
    assert "texts_lost" in str(error.value)


def test_further_texts_have_losses_and_the_paired_rise(tmp_path: Path) -> None:
    base = plain()
    tuned = tuned_copy(base)
    found = audit(base, tuned, texts={"news": TEXT}, **SIZES)
    first, second = (found.results.row(name).metrics["news"] for name in ("base", "tuned"))
    lost = found.metrics["news_lost"]
    assert isinstance(first, Interval)
    assert isinstance(second, Interval)
    assert isinstance(lost, Interval)
    assert lost.mean == pytest.approx(second.mean - first.mean, abs=1e-9)
    path = tmp_path / "news.txt"
    path.write_text("\n".join(TEXT), encoding="utf-8")
    assert audit(base, tuned, texts={"news": path}, **(SIZES | {"tokens": 0})).metrics["news_kl"]


def test_a_graft_is_put_on_the_base_which_does_not_see_it(tmp_path: Path) -> None:
    base = plain()
    folder = saved(base, tmp_path / "model")
    graft = moved_graft(base)
    save_graft(graft, base, tmp_path / "graft")
    found = audit(str(folder), tmp_path / "graft", tmp_path / "out", **SIZES)
    (sample, *_) = read_own_text(tmp_path / "out" / "own-text.jsonl")
    with load_pair(str(folder), tmp_path / "graft") as (first, second):
        assert first.backbone is second.backbone
        (window,) = compare_windows(
            first.predictor, second.predictor, first.tokenizer, [next(iter(own(sample)))], batch_size=1
        )
    with GraftedModel(base, {"graft": graft}) as model:
        expected, _ = literal(base.bare_model, model, sample.ids, sample.turns[0][0])
    assert window.kl == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert found.metrics["own_kl"].mean > 1e-3  # type: ignore[union-attr]
    again = audit(base, GraftedModel(base, {"graft": graft}), **SIZES)
    assert again.metrics["own_kl"].mean == pytest.approx(found.metrics["own_kl"].mean, rel=1e-4)  # type: ignore[union-attr]


def own(sample: Any) -> Any:
    from graftlm.evaluation.windows import own_windows

    return own_windows([sample])


def test_a_graft_can_be_the_base_and_samples_its_own_text(tmp_path: Path) -> None:
    base = plain()
    folder = saved(base, tmp_path / "model")
    save_graft(moved_graft(base), base, tmp_path / "graft")
    sizes = SIZES | {"backbone": str(folder)}
    back = audit(tmp_path / "graft", str(folder), tmp_path / "back", **sizes)
    audit(str(folder), tmp_path / "graft", tmp_path / "forth", **SIZES)
    assert back.metrics["own_kl"].mean > 1e-3  # type: ignore[union-attr]
    sampled, other = (read_own_text(tmp_path / name / "own-text.jsonl") for name in ("back", "forth"))
    assert [sample.ids for sample in sampled] != [sample.ids for sample in other], "the graft writes other text"
    alone = audit(tmp_path / "graft", tmp_path / "graft", **sizes)
    assert alone.metrics["own_kl"].mean == 0  # type: ignore[union-attr]
    with pytest.raises(BackboneError) as caught:
        audit(tmp_path / "graft", str(folder), **SIZES)
    assert "--backbone" in str(caught.value)


def test_an_adapter_of_peft_is_audited_as_the_model_with_it_merged(tmp_path: Path) -> None:
    base = plain()
    folder = saved(base, tmp_path / "model")
    peft = get_peft_model(copy.deepcopy(base.model), LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
    torch.manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn_like(parameter)
    peft.save_pretrained(tmp_path / "adapter")
    merged = Backbone.wrap(copy.deepcopy(peft).merge_and_unload(), base.tokenizer, "merged")
    found = audit(str(folder), tmp_path / "adapter", **SIZES)
    expected = audit(str(folder), merged, **SIZES)
    assert expected.metrics["own_kl"].mean > 1e-4  # type: ignore[union-attr]
    assert found.metrics["own_kl"].mean == pytest.approx(expected.metrics["own_kl"].mean, rel=1e-3)  # type: ignore[union-attr]
    sizes = SIZES | {"tokens": 0, "texts": {"a": TEXT}}
    with pytest.raises(ArtifactError) as caught:
        audit(tmp_path / "adapter", str(folder), **sizes)
    assert "--backbone" in str(caught.value)
    back = audit(tmp_path / "adapter", str(folder), backbone=str(folder), **sizes)
    assert back.metrics["a_kl"].mean > 1e-4  # type: ignore[union-attr]


def test_adapters_that_do_not_fit_are_named(tmp_path: Path) -> None:
    base = plain()
    folder = saved(base, tmp_path / "model")
    other = tiny_model("llama", hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    get_peft_model(other, LoraConfig(target_modules=["q_proj"], r=4)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ArtifactError) as caught:
        audit(str(folder), tmp_path / "adapter", **SIZES)
    assert "adapter" in str(caught.value)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="adapter_model.bin"):
        audit(str(folder), tmp_path / "adapter", **SIZES)


def test_int8_moves_predictions_a_little_and_int4_more() -> None:
    pytest.importorskip("torchao")
    base = plain(hidden_size=64, head_dim=16, num_attention_heads=4, intermediate_size=64)
    eight, four = (
        audit(base, base, quantize=bits, **SIZES).metrics["own_kl"].mean  # type: ignore[union-attr]
        for bits in ("int8", "int4")
    )
    assert 0 < eight < four


def test_tokens_added_to_the_tuned_model_count_as_lost_probability() -> None:
    base = plain()
    tuned = tuned_copy(base, spread=0.0)
    tokenizer = copy.deepcopy(base.need_tokenizer())
    tokenizer.add_tokens(["<extra>"])
    tuned.model.resize_token_embeddings(VOCABULARY + 1)
    with torch.no_grad():
        tuned.model.get_output_embeddings().weight[-1] = tuned.model.get_output_embeddings().weight[5]
    tuned = Backbone.wrap(tuned.model, tokenizer, "extended")
    assert tokenizer_difference(base.tokenizer, tokenizer) is None
    (window,) = compare_windows(base.model, tuned.model, base.tokenizer, cut_windows(base.tokenizer, TEXT[1:], 200))
    with torch.no_grad():
        p = torch.softmax(base.model(torch.tensor(window.window.ids[None])).logits[0].double(), -1)
    expected = -torch.log(1 / (1 + p[window.window.first - 1 : -1, 5]))  # Σ p log(p / (p / (1 + p_5)))
    assert window.kl == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-6)


def test_models_of_different_tokenizers_are_compared_by_bits_per_byte_alone() -> None:
    base = plain()
    tokenizer = tiny_tokenizer()
    moved = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = moved["model"]["vocab"]
    first, second = sorted(ids, key=lambda token: -ids[token])[:2]
    ids[first], ids[second] = ids[second], ids[first]
    other = copy.deepcopy(tokenizer)
    other._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(moved))  # type: ignore[attr-defined]
    tuned = Backbone.wrap(tuned_copy(base).model, other, "other")
    with pytest.raises(DataError) as caught:
        audit(base, tuned, **SIZES)
    assert "--text" in str(caught.value)
    found = audit(base, tuned, texts={"news": TEXT}, **SIZES)
    assert {*found.metrics} == {"news_bpb"}
    assert any("bits per byte" in note for note in found.notes)


def test_a_budget_fails_above_it_and_is_checked_before_anything_is_loaded() -> None:
    base = plain()
    tuned = tuned_copy(base)
    over = audit(base, tuned, budget={"own_kl": 1e-9}, **SIZES)
    assert not over.results.aims[0].met
    with pytest.raises(ForgettingBudgetError) as caught:
        over.check_budget()
    assert "own_kl" in str(caught.value)
    quantized = audit(base, base, quantize="int8", budget={"own_kl": 1e-9}, **SIZES)
    with pytest.raises(ForgettingBudgetError) as caught:
        quantized.check_budget()
    assert "old text" not in str(caught.value), "a model that is only quantized has no training to change"
    assert "bits" in str(caught.value)
    within = audit(base, tuned, budget={"own_kl": 1e9, "news_lost": 100}, texts={"news": TEXT}, **SIZES)
    within.check_budget()
    for name in ("own_lk", "news_lost"):
        with pytest.raises(EvaluationError, match=name):
            audit("no-such-model", "neither", budget={name: 1.0}, **SIZES)
    for nothing_to_ask in ({"tokens": 0}, {"answers": 0}):
        with pytest.raises(EvaluationError, match="stops_lost"):
            audit(
                "no-such-model",
                "neither",
                texts={"news": TEXT},
                budget={"stops_lost": 1.0},
                **SIZES | nothing_to_ask,
            )
    with pytest.raises(EvaluationError) as caught:
        audit(base, tuned, budget={"chat_kl": 1.0}, **SIZES)
    assert "chat_kl" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "settings", "error", "named"),
    [
        (7, {}, BackboneError, "int"),
        ("EMPTY", {}, ArtifactError, "empty"),
        ("ENCODER", {}, BackboneError, "causal"),
        ("BASE", {"quantize": "int3"}, RecipeError, "quantize"),
        ("BASE", {"tokens": 0}, DataError, "tokens"),
        ("BASE", {"texts": {"news": 7}}, DataError, "news"),
        ("BASE", {"texts": {"own": TEXT}}, DataError, "own"),
        ("BASE", {"prompts": ["Hello?"], "tokens": 0}, DataError, "leave out prompts"),
        ("BASE", {"tokens": -1}, RecipeError, "tokens"),
        ("BASE", {"no_such": 1}, RecipeError, "no_such"),
        ("GRAFT", {"quantize": "int8"}, EvaluationError, "GraftedModel"),
    ],
)
def test_what_cannot_be_audited_gets_one_sentence(
    given: Any, settings: dict[str, Any], error: type[GraftError], named: str, tmp_path: Path
) -> None:
    base = plain()
    (tmp_path / "empty").mkdir()
    models = {
        "EMPTY": tmp_path / "empty",
        "BASE": base,
        "ENCODER": Backbone.wrap(tiny_model("bert"), tiny_tokenizer()) if given == "ENCODER" else None,
        "GRAFT": GraftedModel(base, {"graft": moved_graft(base)}) if given == "GRAFT" else None,
    }
    with pytest.raises(error) as caught:
        audit(base, models.get(given, given), **(SIZES | settings))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupted_sampling_goes_on_and_another_base_samples_anew(tmp_path: Path) -> None:
    base = plain()
    folder = str(saved(base, tmp_path / "model"))
    audit(folder, tuned_copy(base), tmp_path / "out", **SIZES)
    path = tmp_path / "out" / "own-text.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    audit(folder, tuned_copy(base), tmp_path / "out", **SIZES)
    assert path.read_bytes() == whole
    other = str(saved(plain(seed=5, hidden_size=64), tmp_path / "other"))
    audit(other, other, tmp_path / "out", **SIZES)
    assert path.read_bytes() != whole


def test_passages_are_where_the_divergence_is_and_do_not_overlap() -> None:
    base = plain()
    tuned = tuned_copy(base)
    compared = compare_windows(base.model, tuned.model, base.tokenizer, cut_windows(base.tokenizer, TEXT, 40))
    passages = widest_passages([("text", each) for each in compared], base.tokenizer, count=4, length=8)
    masses = [sum(token.kl for token in passage.tokens) for passage in passages]
    assert masses == sorted(masses, reverse=True)
    every = [each.kl[start : start + 8].sum() for each in compared for start in range(0, max(1, len(each.kl) - 4), 4)]
    assert masses[0] == pytest.approx(max(every))
    seen = [round(token.kl, 12) for passage in passages for token in passage.tokens]
    assert len(seen) == len(set(seen)), "no token is in two passages"
    for passage in passages:
        for token in passage.tokens:
            assert len(token.base) == len(token.tuned) == 3
            shares = [share for _, share in token.base]
            assert shares == sorted(shares, reverse=True)


def test_comparisons_stand_in_the_order_of_the_windows() -> None:
    base = plain()
    tuned = tuned_copy(base)
    windows = list(cut_windows(base.tokenizer, ["a letter lay", TEXT[0], "in the garden", TEXT[1]], 200))
    compared = compare_windows(base.model, tuned.model, base.tokenizer, windows, batch_size=2)
    assert [id(each.window) for each in compared] == [id(window) for window in windows]
    assert [len(each.kl) for each in compared] == [window.tokens for window in windows]


def test_what_is_lost_on_examples_is_the_base_s_result_minus_the_tuned_one_s(tmp_path: Path) -> None:
    base = plain()
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"the house {number}", "answer": " was by the river"} for number in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    examples = {"pairs": {"path": str(path), "metric": "log-perplexity"}}
    result = audit(base, tuned_copy(base), examples=examples, **(SIZES | {"tokens": 0}))
    first, second = (result.results.row(name).metrics["pairs_log-perplexity"] for name in ("base", "tuned"))
    lost = result.metrics["pairs_log-perplexity_lost"]
    assert lost.mean == pytest.approx(second.mean - first.mean)  # type: ignore[union-attr]
    assert lost.low <= lost.mean <= lost.high  # type: ignore[union-attr]


def test_the_texts_of_tokens_make_the_whole_text() -> None:
    class Bytes:
        """One token for each byte."""

        @staticmethod
        def decode(ids: list[int]) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text = "Łódź, 東京 and <b>"
    texts = token_texts(Bytes(), list(text.encode()))
    assert "".join(texts) == text
    assert "\ufffd" not in "".join(texts)


class Replies:
    """A model that gives one fixed reply to every prompt."""

    def __init__(self, reply: list[int]) -> None:
        self.reply, self.training, self.device = reply, False, torch.device("cpu")
        self.generation_config = type("Config", (), {"eos_token_id": EOS})()
        self.config = type("Config", (), {"max_position_embeddings": 64})()

    def eval(self) -> None:
        pass

    def train(self, mode: bool) -> None:
        pass

    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([input_ids, torch.tensor([self.reply] * len(input_ids))], dim=1)


def test_answers_that_end_and_that_keep_the_template_are_counted() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|in|>"]})  # type: ignore[arg-type]
    opens: Any = tokenizer.convert_tokens_to_ids("<|in|>")
    word = tokenizer("a")["input_ids"][-1]
    questions = [ChatQuestion([word, word], "?"), ChatQuestion([word], "?")]
    ends, runs_on, breaks = (
        answer_questions(Replies(reply), tokenizer, questions, max_new_tokens=3)
        for reply in ([word, EOS, word], [word, word, word], [word, opens, EOS])
    )
    assert [(answer.stops, answer.keeps_template) for answer in ends] == [(True, True)] * 2
    assert [(answer.stops, answer.keeps_template) for answer in runs_on] == [(False, True)] * 2
    assert [(answer.stops, answer.keeps_template) for answer in breaks] == [(True, False)] * 2
    assert behavior(ends)["stops"].mean == 1
    lost = behavior_lost(ends, runs_on)
    assert lost["stops_lost"].mean == 1
    assert lost["keeps_template_lost"].mean == 0
    assert "same_language_lost" not in lost, "answers too short to tell"
    with pytest.raises(DataError) as caught:
        answer_questions(Replies([word]), tokenizer, [ChatQuestion([word] * 62, "?")], max_new_tokens=3)
    assert "64" in str(caught.value)


def test_the_language_of_an_answer_is_told() -> None:
    pytest.importorskip("py3langid")
    from graftlm.evaluation.chat_answers import _same_language

    english = "Where is the nearest railway station, please?"
    assert _same_language(english, "It is behind the old church, on the left side of the street.") is True
    assert _same_language(english, "Der Bahnhof liegt hinter der alten Kirche auf der linken Seite.") is False
    assert _same_language(english, "Yes.") is None


def test_two_loaded_copies_share_nothing_and_the_graft_is_off_afterwards(tmp_path: Path) -> None:
    base = plain()
    save_graft(moved_graft(base), base, tmp_path / "graft")
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    with load_pair(base, tmp_path / "graft") as (_, second):
        assert isinstance(second.model, GraftedModel)
    assert not any(module._forward_hooks for module in base.model.modules())
    assert all(torch.equal(before[name], value) for name, value in base.model.state_dict().items())
    with pytest.raises(BackboneError, match="missing"), load_pair(base, tmp_path / "missing"):
        pass


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")  # PEFT's, which counts from the mask
def test_a_learned_prompt_is_audited_by_the_logits_of_the_text_alone(tmp_path: Path) -> None:
    base = plain()
    folder = saved(base, tmp_path / "model")
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    prompted = get_peft_model(copy.deepcopy(base.model), config)
    prompted.save_pretrained(str(tmp_path / "prompt"))
    found = audit(str(folder), tmp_path / "prompt", tmp_path / "out", **SIZES)
    divergences = []
    for sample in read_own_text(tmp_path / "out" / "own-text.jsonl"):
        for start, stop in sample.turns:
            ids = torch.tensor([sample.ids[:stop]])
            with torch.no_grad():
                p, q = base.model(ids).logits[0].double(), prompted(input_ids=ids).logits[0, 3:].double()
            log_p, log_q = p.log_softmax(-1)[start - 1 : -1], q.log_softmax(-1)[start - 1 : -1]
            divergences += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
    own_kl = found.metrics["own_kl"]
    assert own_kl.mean == pytest.approx(np.mean(divergences), rel=1e-3)  # type: ignore[union-attr]
    with pytest.raises(ArtifactError) as caught:
        audit(tmp_path / "prompt", str(folder), backbone=str(folder), **SIZES)
    assert "prompt" in str(caught.value)


def test_conversations_are_measured_on_their_own_and_intervals_are_over_texts(tmp_path: Path) -> None:
    base = chatting()
    tuned = never_ending(base)
    found = audit(base, tuned, tmp_path, **CHATS)
    samples = read_own_text(tmp_path / "own-text.jsonl")
    nats, changes, tokens = [], [], []
    for sample in samples:
        parts = [literal(base.model, tuned.model, sample.ids[:stop], start) for start, stop in sample.turns]
        nats.append(sum(sum(some) for some, _ in parts))
        changes.append(float(sum(sum(other) for _, other in parts)))
        tokens.append(sum(len(some) for some, _ in parts))
    chats = np.array([sample.is_chat for sample in samples])
    assert 3 < chats.sum() < len(samples) - 3
    count = np.arange(len(samples))
    sums = Scores(np.array(changes), np.array(tokens), np.zeros_like(count), count, np.array(nats))
    for name, expected in (
        ("own_kl", sums.interval("kl_per_token")),
        ("chat_kl", sums.subset(chats).interval("kl_per_token")),
        ("changed_tokens", sums.interval("nats_per_token")),
    ):
        measured = found.metrics[name]
        assert isinstance(measured, Interval)
        assert list(measured.model_dump().values()) == pytest.approx(list(expected.model_dump().values()), rel=1e-3)
    assert sums.subset(~chats).value("kl_per_token") != pytest.approx(found.metrics["chat_kl"].mean, rel=0.05)  # type: ignore[union-attr]


def test_each_model_gives_its_own_answers_to_the_questions_of_the_base() -> None:
    base = chatting()
    found = audit(base, never_ending(base), **CHATS)
    first, second = (found.results.row(name).metrics["stops"] for name in ("base", "tuned"))
    assert (first.mean, second.mean, found.metrics["stops_lost"].mean) == (1, 0, 1)  # type: ignore[union-attr]
    assert len(found.conversations) == 6
    assert len({len(question.ids) for question, _, _ in found.conversations}) > 1
    assert all(answer.stops and not other.stops for _, answer, other in found.conversations)


def test_answers_of_a_batch_are_those_of_each_question_alone() -> None:
    """A literal greedy loop, without padding, cache or the penalty of the generation config."""
    backbone = chatting(spread=0.3)
    model: Any = backbone.model
    tokenizer: Any = backbone.tokenizer
    model.generation_config.repetition_penalty = 5.0
    ends = model.generation_config.eos_token_id
    texts = ["the", "a letter lay in the garden and said", "old house", "quiet that morning by the river", "lay"]
    questions = [ChatQuestion(tokenizer(text, add_special_tokens=False)["input_ids"], text) for text in texts]
    expected = []
    for question in questions:
        ids = [*question.ids]
        while len(ids) < len(question.ids) + 12 and not (len(ids) > len(question.ids) and ids[-1] in ends):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answer = ids[len(question.ids) :]
        expected.append((tokenizer.decode(answer, skip_special_tokens=True).strip(), answer[-1] in ends))
    assert len({text for text, _ in expected}) > 2
    found = answer_questions(model, tokenizer, questions, max_new_tokens=12)
    assert [(answer.text, answer.stops) for answer in found] == expected


def test_a_budget_is_compared_with_the_mean() -> None:
    base = plain()
    tuned = tuned_copy(base)
    own: Any = audit(base, tuned, **SIZES).metrics["own_kl"]
    assert own.low < own.mean < own.high
    for budget, met in (((own.low + own.mean) / 2, False), (own.mean, True), ((own.mean + own.high) / 2, True)):
        assert audit(base, tuned, budget={"own_kl": budget}, **SIZES).results.aims[0].met is met


@pytest.mark.parametrize(
    ("template", "difference"),
    [
        pytest.param(CHAT_TEMPLATE, None, marks=pytest.mark.slow),
        (CHAT_TEMPLATE + "{# the same text #}", None),
        (CHAT_TEMPLATE.replace("assistant\n", "model\n"), r"assistant\\n' of BASE is .*model\\n' in TUNED"),
        (None, r"TUNED has none"),
        ("{{ raise_exception('no') }}", r"can't be filled: no"),
    ],
)
def test_another_chat_template_is_noted(template: str | None, difference: str | None) -> None:
    base = chatting()
    tokenizer = copy.deepcopy(base.need_tokenizer())
    tokenizer.chat_template = template
    tuned = Backbone.wrap(copy.deepcopy(base.model), tokenizer, "tuned")
    sizes: dict[str, Any] = CHATS | {"tokens": 100}
    notes = [note for note in audit(base, tuned, **sizes).notes if "chat templates differ" in note]
    if difference is None:
        assert not notes
    else:
        assert re.search(difference, notes[0])


def test_special_tokens_that_the_tuned_model_added_break_the_template() -> None:
    tokenizer, tuned = tiny_tokenizer(), tiny_tokenizer()
    known, word, added = 40, 41, len(tokenizer)
    special: Any = [tuned.convert_ids_to_tokens(known), "<|call|>"]
    tuned.add_special_tokens({"additional_special_tokens": special})
    assert tuned.convert_tokens_to_ids(special) == [known, added]
    question = [ChatQuestion([word], "?")]
    keeps = [
        answer_questions(Replies([token, EOS]), tokenizer, question, tuned_tokenizer=tuned, max_new_tokens=2)[0]
        for token in (word, known, added)
    ]
    assert [answer.keeps_template for answer in keeps] == [True, False, False]


@pytest.mark.parametrize("is_new", [True, False])
def test_an_audit_sees_the_special_tokens_of_the_tuned_model(is_new: bool) -> None:
    base = chatting()
    extended: Any = copy.deepcopy(base.need_tokenizer())
    known = next(token for token in sorted(extended.get_vocab()) if token.startswith("Ġ") and len(token) > 2)
    call = "<|call|>" if is_new else known
    extended.add_special_tokens({"additional_special_tokens": [call]})
    model = tuned_copy(base, spread=0.0).model
    model.resize_token_embeddings(len(extended))
    head: Any = model.get_output_embeddings()
    head.bias.data[extended.convert_tokens_to_ids(call)] = 50.0
    found = audit(base, Backbone.wrap(model, extended, "calls"), **(CHATS | {"tokens": 600}))
    assert found.metrics["keeps_template_lost"].mean == 1  # type: ignore[union-attr]


def test_the_precision_holds_below_a_graft_as_well(tmp_path: Path) -> None:
    base = plain()
    folder = str(saved(base, tmp_path / "model"))
    save_graft(moved_graft(base), base, tmp_path / "graft")
    for pair in ((tmp_path / "graft", folder), (folder, tmp_path / "graft")):
        with load_pair(*pair, backbone=folder, dtype="bfloat16") as models:
            assert [model.backbone.model.dtype for model in models] == [torch.bfloat16] * 2


def test_a_base_whose_user_s_turns_never_end_is_audited_on_free_text(tmp_path: Path) -> None:
    base = chatting()
    head: Any = base.model.get_output_embeddings()
    head.bias.data[base.need_tokenizer().convert_tokens_to_ids("<|out|>")] = -50.0
    found = audit(base, tuned_copy(base), tmp_path, **CHATS)
    samples = read_own_text(tmp_path / "own-text.jsonl")
    assert sum(sample.tokens for sample in samples) >= CHATS["tokens"]
    assert not any(sample.is_chat for sample in samples)
    assert found.metrics["own_kl"].mean > 1e-3  # type: ignore[union-attr]
    assert {"chat_kl", "stops"}.isdisjoint(found.metrics)
    assert any("sampled no conversation" in note for note in found.notes)


def test_the_number_of_conversations_behind_a_divergence_is_told() -> None:
    base = chatting()
    found = audit(base, tuned_copy(base), **CHATS)
    counts = found.results.details["own_text_counts"]["tuned"]  # type: ignore[call-overload, index]
    assert counts["texts"] > counts["chats"] > 0  # type: ignore[call-overload, index, operator]
    told = f"conversations: {counts['chats']}"  # type: ignore[call-overload, index]
    assert not any("instead of" in note for note in found.notes)
    assert told in str(found)
    assert told in found.page()


def test_fewer_answers_than_asked_for_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.data.questions._MAX_BATCHES", 1)
    base = chatting()
    found = audit(base, tuned_copy(base), **{**CHATS, "tokens": 200, "answers": 60, "max_new_tokens": 1})
    asked = len(found.conversations)
    assert 0 < asked < 60
    assert any(f"{asked} instead of 60" in note for note in found.notes)
    unasked = audit(base, tuned_copy(base), texts={"news": TEXT}, **{**CHATS, "tokens": 0})
    assert not unasked.conversations
    assert any("--prompts" in note for note in unasked.notes)


def test_the_sources_of_a_text_are_told(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(" ".join(TEXT) * 3, encoding="utf-8")
    base = plain()
    found = audit(base, tuned_copy(base), texts={"news": tmp_path}, limit_tokens=40, **SIZES)
    assert "first 1 of 3 documents" in " ".join(str(found).split())
