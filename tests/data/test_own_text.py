"""Text that a backbone samples itself: drawn from its own distribution, resumable, and refused where it can't be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.backbone import Backbone
from graftlm.data import DataConfig, SelfSourceConfig, build_mixture
from graftlm.data.own_text import marked_ids, read_own_text
from graftlm.data.own_text_sampling import OwnTextSampler, sample_own_text
from graftlm.errors import DataError
from tiny import EOS, TOKENS, tiny_model, tiny_tokenizer

LENGTH = 24
TEMPLATE = (
    "{{ '<|in|>system\nbe kind<|out|>\n' }}{% for m in messages %}{{ '<|in|>' + m['role'] + '\n' + m['content'] + "
    "'<|out|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|in|>assistant\n' }}{% endif %}"
)


def backbone(**changes: Any) -> Backbone:
    return Backbone.wrap(tiny_model("llama", **({"num_hidden_layers": 1} | changes)), tiny_tokenizer(), "tiny")


def chat_backbone() -> Backbone:
    """A backbone whose template ends turns with a token, which it samples often."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|in|>", "<|out|>"]})  # type: ignore[arg-type]
    tokenizer.chat_template = TEMPLATE
    model = tiny_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    out: Any = tokenizer.convert_tokens_to_ids("<|out|>")
    head: Any = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[out] = 5.0
    head.bias.data[EOS] = 2.0
    model.generation_config.eos_token_id = EOS
    return Backbone.wrap(model, tokenizer, "tiny chat")


def sample(path: Path, model: Backbone, **settings: Any) -> list[Any]:
    config = SelfSourceConfig(self=True, **({"tokens": 300, "batch_size": 8} | settings))
    return sample_own_text(model, config, LENGTH, path / "samples.jsonl", progress=False)


def test_samples_depend_on_their_seed_and_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    model, length = backbone(), 12
    sizes = {"tokens": 300, "length": length, "batch_size": 4}
    whole = sample(tmp_path, model, **sizes)
    assert 300 <= sum(text.tokens for text in whole) < 300 + length
    assert all(len(text.ids) <= length for text in whole)
    file = tmp_path / "samples.jsonl"
    assert read_own_text(file) == whole
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) > 3
    half_a_batch = b"".join(lines[:2]) + lines[2][: len(lines[2]) // 2]
    without_line_break = b"".join(lines[:2]).rstrip()
    for kept in (half_a_batch, without_line_break, b'{"key'):
        file.write_bytes(kept)
        assert sample(tmp_path, model, **sizes) == whole
        assert read_own_text(file) == whole
    assert sample(tmp_path / "other", model, seed=1, **sizes) != whole


def test_a_file_of_other_samples_is_written_anew(tmp_path: Path) -> None:
    config = SelfSourceConfig(self=True, tokens=200, batch_size=8)
    file = tmp_path / "samples.jsonl"
    first = sample_own_text(backbone(), config, LENGTH, file, key="a", progress=False)
    other = sample_own_text(backbone(seed=1), config, LENGTH, file, key="b", progress=False)
    assert read_own_text(file) == other != first


def test_tokens_are_drawn_from_the_models_own_distribution(tmp_path: Path) -> None:
    """The first token of free text, with a checkpoint's penalties and truncations in its generation config."""
    model = backbone()
    model.model.generation_config.update(top_k=2, repetition_penalty=3.0, min_p=0.5)
    texts = sample(tmp_path, model, tokens=8000, length=3, batch_size=512)
    start = texts[0].ids[0]
    with torch.no_grad():
        expected = model.bare_model(torch.tensor([[start]])).logits[0, -1].softmax(-1).numpy()
    expected[[EOS]] = 0  # an empty text is not kept
    expected /= expected.sum()
    first = np.bincount([text.ids[1] for text in texts], minlength=TOKENS) / len(texts)
    deviation = np.sqrt(expected * (1 - expected) / len(texts))
    assert (np.abs(first - expected) < 5 * deviation + 3 / len(texts)).all()
    assert (first > 0).sum() > 100


def test_of_a_conversation_the_model_writes_both_turns(tmp_path: Path) -> None:
    model = chat_backbone()
    tokenizer: Any = model.tokenizer
    texts = sample(tmp_path, model, length=64, chat_fraction=0.5, tokens=600, batch_size=32)
    chats = [text for text in texts if text.is_chat]
    assert 0.3 < sum(text.tokens for text in chats) / sum(text.tokens for text in texts) < 0.7
    before = tokenizer("<|in|>system\nbe kind<|out|>\n<|in|>user\n", add_special_tokens=False)["input_ids"]
    after = tokenizer("<|out|>\n<|in|>assistant\n", add_special_tokens=False)["input_ids"]
    for text in chats:
        (asked, end), (answered, stop) = text.turns
        assert text.ids[:asked] == before
        assert text.ids[end - 1 : answered] == after, "the turn ends with the token that the model drew"
        assert answered < stop == len(text.ids) <= 64
        marked = marked_ids(text)
        assert ((np.abs(marked) & (1 << 30)) > 0).sum() in (asked, asked - 1)  # the first is stored inverted
    assert {text.ids[-1] for text in chats} & {EOS}


def test_all_can_be_conversations_in_any_number_of_batches(tmp_path: Path) -> None:
    texts = sample(tmp_path, chat_backbone(), length=64, chat_fraction=1.0, tokens=300, batch_size=4)
    assert len(texts) > 4
    assert all(text.is_chat for text in texts)


def test_openings_begin_free_texts_in_turn(tmp_path: Path) -> None:
    model = backbone()
    texts = sample(tmp_path, model, openings=["the garden", "a house"], tokens=300)
    tokenizer: Any = model.tokenizer
    starts = {str(tokenizer.decode(text.ids[1 : text.turns[0][0]])) for text in texts}
    assert starts == {"the garden", "a house"}


def test_a_token_budget_prefers_no_opening() -> None:
    """Its last texts are dropped, so that a batch must not be sorted by the length of the openings."""
    openings = ["the garden", "a house by the old sea", "a"]
    config = SelfSourceConfig(self=True, tokens=500, openings=openings, batch_size=16)
    texts = OwnTextSampler(backbone(), config, LENGTH).batch(0, [], 500)
    lengths = [text.turns[0][0] for text in texts]
    assert len(set(lengths[:5])) == 3, "texts that end at once are missing"
    assert len(lengths) > 12


def test_a_text_does_not_end_with_a_token_of_its_opening(tmp_path: Path) -> None:
    """Also where the tokenizer has no token that begins or ends a text."""
    model = backbone()
    tokenizer: Any = model.tokenizer
    for name in ("bos_token", "eos_token"):
        setattr(tokenizer, name, None)
    model.model.generation_config.eos_token_id = None
    texts = sample(tmp_path, model, openings=["the"], tokens=2000)
    first = texts[0].ids[0]
    assert any(first in text.ids[1:] for text in texts)
    assert {len(text.ids) for text in texts} == {LENGTH}


def test_own_text_trains_as_old_text(tmp_path: Path) -> None:
    model = backbone()
    texts = sample(tmp_path, model)
    (tmp_path / "new.txt").write_text("le vieux jardin dormait. " * 60, encoding="utf-8")
    values = {"new": [{"path": str(tmp_path / "new.txt")}], "old": [{"self": True}], "length": 16}
    config = DataConfig.parse(values | {"replay_fraction": 0.5})
    tokenizer: Any = model.tokenizer
    mixture = build_mixture(config, tokenizer, 4, [[marked_ids(text) for text in texts]])
    batch = mixture.batch(0)
    sampled = [token for text in texts for token in text.ids]
    with pytest.raises(DataError, match="own_text"):
        build_mixture(config, tokenizer, 4)
    joined = " ".join(map(str, sampled))
    for row in batch.input_ids[batch.domain == 0].tolist():
        assert " ".join(map(str, row)) in joined


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"chat_fraction": 0.5}, "chat_fraction"),
        ({"length": 4096}, "4096"),
        ({"openings": ["the garden " * 30]}, "opening"),
    ],
)
def test_what_cannot_be_sampled_is_named(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        sample(tmp_path, backbone(), **settings)
    assert problem in str(error.value)


def test_an_encoder_and_a_model_that_only_ends_its_texts_are_named(tmp_path: Path) -> None:
    encoder = Backbone.wrap(tiny_model("bert"), tiny_tokenizer(), "tiny")
    with pytest.raises(DataError) as error:
        sample(tmp_path, encoder)
    assert "causal language model" in str(error.value)
    mute = backbone()
    head: Any = mute.model.get_output_embeddings()
    bias = torch.full((len(head.weight),), -1e4).index_fill(0, torch.tensor([EOS]), 1e4)
    head.bias = torch.nn.Parameter(bias)
    with pytest.raises(DataError) as error:
        sample(tmp_path, mute)
    assert "3 batches" in str(error.value)
    assert "temperature" in str(error.value)


def test_conversations_that_never_end_their_first_turn_are_told_from_free_text(tmp_path: Path) -> None:
    endless = chat_backbone()
    head: Any = endless.model.get_output_embeddings()
    out: Any = endless.need_tokenizer().convert_tokens_to_ids("<|out|>")
    head.bias.data[[out, EOS]] = -1e4
    with pytest.raises(DataError) as error:
        sample(tmp_path, endless, tokens=100, chat_fraction=0.5, length=64)
    assert "3 batches" in str(error.value)
    assert "chat_fraction" in str(error.value)


def test_a_long_opening_leaves_others_their_length(tmp_path: Path) -> None:
    """Texts go on to the length that they may have, whatever is sampled beside them."""
    model = backbone()
    long = "the garden " * 4
    width = len(model.need_tokenizer()(long)["input_ids"])
    texts = sample(tmp_path, model, tokens=400, openings=["the", long], length=width + 4)
    assert max(text.tokens for text in texts if text.turns[0][0] < width // 2) > 8


def test_conversations_that_bring_nothing_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    """And an interrupted sampling that went on with free text does so again."""
    endless = chat_backbone()
    head: Any = endless.model.get_output_embeddings()
    out: Any = endless.need_tokenizer().convert_tokens_to_ids("<|out|>")
    head.bias.data[[out, EOS]] = -1e4
    texts = sample(tmp_path, endless, tokens=300, length=64)
    assert sum(text.tokens for text in texts) >= 300
    assert not any(text.is_chat for text in texts)
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    barren = [number for number, line in enumerate(lines) if line == "[]\n"]
    assert len(barren) == 3
    for kept in (barren[1], barren[-1] + 1, len(lines) - 1):
        path.write_text("".join(lines[:kept]))
        assert sample(tmp_path, endless, tokens=300, length=64) == texts


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"temperature": 2.0, "top_p": 0.5}])
def test_tokens_are_drawn_at_the_temperature_from_the_likeliest(settings: dict[str, float], tmp_path: Path) -> None:
    model = backbone()
    options: dict[str, Any] = {"tokens": 4000, "openings": ["the garden"], "length": 16, "batch_size": 250}
    texts = sample(tmp_path, model, **options, **settings)
    start = texts[0].turns[0][0]
    with torch.no_grad():
        logits = model.model(torch.tensor([texts[0].ids[:start]])).logits[0, -1].double()
    probabilities, order = (logits / settings.get("temperature", 1.0)).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(0) - probabilities
    kept = torch.where(before < settings.get("top_p", 1.0), probabilities, 0.0)
    expected = torch.zeros_like(kept).index_copy(0, order, kept)
    expected[EOS] = 0.0  # texts that end at once are left out
    expected /= expected.sum()
    drawn = torch.bincount(torch.tensor([text.ids[start] for text in texts]), minlength=len(expected)) / len(texts)
    deviation = (expected * (1 - expected) / len(texts)).sqrt()
    assert ((drawn - expected).abs() <= 5 * deviation + 2 / len(texts)).all()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(DataError) as error:
        sample(tmp_path, backbone(), tokens=50)
    assert "samples.jsonl" in str(error.value)


def test_a_template_that_ends_no_turn_or_fails_is_named_if_it_was_asked_for(tmp_path: Path) -> None:
    for template in ("{{ messages[0]['content'] }} says:", "{{ 1 // 0 }}"):
        model = backbone()
        assert model.tokenizer is not None
        model.tokenizer.chat_template = template
        with pytest.raises(DataError):
            sample(tmp_path, model, chat_fraction=1.0)
        assert not any(text.is_chat for text in sample(tmp_path, model, tokens=50))


def test_the_reason_of_a_template_is_named(tmp_path: Path) -> None:
    model = backbone()
    assert model.tokenizer is not None
    model.tokenizer.chat_template = "{{ raise_exception('No role is supported') }}"
    with pytest.raises(DataError):
        sample(tmp_path, model, chat_fraction=1.0)


def test_too_few_samples_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    model = backbone()
    texts = sample(tmp_path, model, tokens=5)
    (tmp_path / "new.txt").write_text("le vieux jardin dormait. " * 60, encoding="utf-8")
    values = {"new": [{"path": str(tmp_path / "new.txt")}], "old": [{"self": True}], "length": 64}
    tokenizer: Any = model.tokenizer
    with pytest.raises(DataError) as error:
        build_mixture(DataConfig.parse(values), tokenizer, 4, [[marked_ids(text) for text in texts]])
    assert "own text" in str(error.value)
    assert "64" in str(error.value)
    file = tmp_path / "samples.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError) as error:
        read_own_text(file)
    assert "samples.jsonl" in str(error.value)


@pytest.mark.parametrize("fraction", [0.1, 0.5, pytest.param(0.8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tokens", [600, pytest.param(1500, marks=pytest.mark.slow)])
def test_conversations_have_their_share_of_the_tokens(fraction: float, tokens: int, tmp_path: Path) -> None:
    samples = sample(tmp_path, chat_backbone(), tokens=tokens, chat_fraction=fraction, batch_size=32, length=64)
    total = sum(each.tokens for each in samples)
    chats = sum(each.tokens for each in samples if each.is_chat)
    assert tokens <= total <= tokens + 64
    assert chats == pytest.approx(fraction * tokens, abs=2 * 64)
