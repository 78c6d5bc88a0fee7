"""The compositions on real text at their smallest, on text that the test makes: tables, the form of results, errors."""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import Options, reproduce
from experiments.composition_code.run import code_of, docstring_of, functions
from experiments.composition_language.readout import Readout, ReadoutRun, fit, rows_of_text
from experiments.composition_language.run import passages, read_verses
from experiments.parents import DOCUMENTS, ENGLISH, FRENCH, PretrainRun, prose
from graftlm.backbone import Backbone, load_backbone
from graftlm.data import SourceConfig
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results, score, value_of
from graftlm.runs.run import execute

code = import_module("experiments.composition_code.run")
language = import_module("experiments.composition_language.run")

TRAINED_LONG = ("composition_long_lr0.01_s0", "lora_long_lr0.01_s0")

WORDS = ["the", "a", "river", "house", "that", "walked", "under", "morning", "old", "said", "her", "garden", "letter"]
MOTS = ["le", "une", "maison", "qui", "marchait", "sous", "vieux", "dit", "son", "jardin", "lettre", "avec", "depuis"]


def texts(words: list[str], count: int, characters: int, seed: int) -> list[str]:
    random_ = random.Random(seed)
    return [" ".join(random_.choice(words) for _ in range(characters // 5)) for _ in range(count)]


def write_lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def bible(words: list[str], seed: int) -> list[str]:
    verses = texts(words, 60, 40, seed)
    return ["### Psalms", "", *(f"[{1 + n // 20}:{n % 20 + 1}] {verse}" for n, verse in enumerate(verses))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    for name, words, seed in ((ENGLISH, WORDS, 0), (FRENCH, MOTS, 1)):
        write_lines(data / name, [json.dumps({"text": text}) for text in texts(words, 8, 4_000, seed)])
    for seed, name in enumerate(DOCUMENTS):
        documents = texts(WORDS, 3, 400, seed)
        write_lines(data / name, [json.dumps({"text": f"Title: x\n\n{text}\n"}) for text in documents])
    write_lines(data / "parallel/ntrex/newstest2019-src.eng.txt", texts(WORDS, 12, 40, 3))
    write_lines(data / "parallel/ntrex/newstest2019-ref.fra.txt", texts(MOTS, 12, 40, 4))
    write_lines(data / "parallel/bible/BSB.txt", bible(WORDS, 5))
    write_lines(data / "parallel/bible/FreSynodale1921.txt", bible(MOTS, 6))
    return data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both reproductions leave their parents, which they share."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_language_in_the_one_form(folder: Path, runs: Path) -> None:
    out = runs / "language"
    options = Options(data=folder, out=out, quick=True, jobs=1)
    results = reproduce("composition-language", options)

    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == set(language.LABELS) - set(language.VARIANTS)
    for name in ("composition", "lora", "vanilla_m_a", "random_m_a", "own_tokenizer", "code", "french_and_code"):
        assert {"old_bpb", "new_bpb", "python_bpb", "forgotten", "forgotten_bpb", "ntrex_en_fr"} <= rows[name].keys()
    for name in ("prompts", "encoder_m_a"):
        assert {"continue", "bible_fr_en_bpb", "bible_en_fr_chrf"} <= rows[name].keys()
    assert "old" not in rows["m_a_own"], "another tokenizer's tokens are other units"
    weights = [value_of(rows[name]["trainable_parameters"]) for name in ("composition", "lora")]
    assert max(weights) < 1.15 * min(weights)
    for name in ("readout_frozen", "readout_free", "readout_free_both"):
        assert {"new_bpb", "validation_new_bpb"} <= rows[name].keys()
    assert len(results.aims) == 7
    assert (out / "bits-per-byte.png").exists()
    steps = {name: len((out / "runs" / name / "history.jsonl").read_text().splitlines()) for name in TRAINED_LONG}
    assert set(steps.values()) == {9}, "three times the steps of the other rows"
    chosen = json.loads((out / "results.json").read_text())["details"]["rates"]
    assert chosen.keys() >= set(language.LONG_RATES)

    kept = sorted((out / "runs" / "measurements").glob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in kept}
    again = reproduce("composition-language", options.model_copy(update={"tables": ("2",)}))
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what was measured is read back"
    assert again.row("composition").metrics["new"] == results.row("composition").metrics["new"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_code_in_the_one_form(folder: Path, runs: Path) -> None:
    results = reproduce("composition-code", Options(data=folder, out=runs / "code", quick=True, jobs=1))
    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == set(code.LABELS)
    for metrics in rows.values():
        assert {"c2t", "c2t_bpb", "c2t_chrf", "t2c", "t2c_bpb", "t2c_chrf"} <= metrics.keys()
    assert len(results.aims) == 5


@pytest.fixture
def anchor_and_specialist(tiny_backbone) -> tuple[Backbone, Backbone]:
    folder = str(tiny_backbone("llama"))
    return load_backbone(folder, device="cpu"), load_backbone(folder, device="cpu")


def test_a_readout_with_a_models_own_layer_is_that_model(anchor_and_specialist) -> None:
    backbone, _ = anchor_and_specialist
    layer = backbone.model.lm_head.weight
    free, frozen = Readout([backbone.model], None), Readout([backbone.model], layer)
    with torch.no_grad():
        free.map.weight.copy_(layer)
        frozen.map.weight.copy_(torch.eye(layer.shape[1]))
    tokenizer, text = backbone.need_tokenizer(), [" ".join(WORDS)] * 3
    wanted = score(backbone.model, tokenizer, text, length=16).nats
    for one in (free, frozen):
        assert np.allclose(score(one, tokenizer, text, length=16).nats, wanted, rtol=1e-5)


def test_a_readout_is_fitted_to_the_tokens_that_follow(anchor_and_specialist) -> None:
    backbone, other = anchor_and_specialist
    run = ReadoutRun(id="x", models=(), through=None, text="", tests={}, length=12, epochs=60, tokens=64)
    rows = rows_of_text([" ".join(WORDS * 4)], backbone.need_tokenizer(), run.length)
    assert torch.equal(rows[1:, 0], rows[:-1, -1]), "no token is skipped between rows"
    readout = Readout([backbone.model, other.model], None)
    assert readout.states(rows).shape == (*rows.shape, 2 * backbone.sites.width)
    before = {name: one.clone() for name, one in backbone.model.state_dict().items()}
    start = _loss(readout, rows)
    fit(readout, rows, run)
    assert _loss(readout, rows) < 0.5 * start
    assert all(torch.equal(one, before[name]) for name, one in backbone.model.state_dict().items())


def _loss(readout: Readout, rows: torch.Tensor) -> float:
    logits = readout(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_the_committed_results_are_of_this_form() -> None:
    for module in (language, code):
        results = Results.read(Path(str(module.__file__)).parent)
        wanted = {"m_a", "m_b", "composition", "lora", "vanilla_m_a", "random_m_a"}
        wanted |= {"encoder_m_a"} if module is code else {"own_tokenizer", "code", "french_and_code"}
        assert wanted <= {row.id for row in results.rows}
        assert results.seeds[0] == 0


def test_mistakes(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out")
    for name in ("composition-language", "composition-code"):
        with pytest.raises(DataError, match=r"lacks lm_text/eltec_eng.jsonl: pass --data"):
            reproduce(name, options)
        with pytest.raises(RecipeError, match="There is no table '3'"):
            reproduce(name, options.model_copy(update={"tables": ("3",)}))


def test_a_finished_model_is_found_again(tmp_path: Path, tiny_backbone) -> None:
    text = tmp_path / "text.jsonl"
    write_lines(text, [json.dumps({"text": text}) for text in texts(WORDS, 2, 400, 0)])
    first = PretrainRun(
        id="first",
        tokenizer=str(tiny_backbone("llama")),
        sources=[{"path": str(text)}],
        width=8,
        layers=1,
        heads=2,
        length=16,
    )
    further = first.model_copy(update={"id": "further", "depends_on": ("first",)})
    models = tmp_path / "models"
    measured = execute([first, further], models, progress=False)
    assert measured["further"].row.metrics["loss"] != measured["first"].row.metrics["loss"]
    written = (models / "first" / "config.json").stat().st_mtime_ns
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_bytes(text.read_bytes())
    moved = first.model_copy(update={"sources": [SourceConfig(path=str(elsewhere))]})
    execute([moved], models, progress=False)
    assert (models / "first" / "config.json").stat().st_mtime_ns == written, "where a file lies decides nothing"
    assert first.model_copy(update={"seed": 1}).key() != first.key()


def test_prose_has_no_code() -> None:
    sentence = "This is a sentence of running text that is long enough to be kept, and says something besides. "
    text = f"Title: x\nAuthor: y\n\n{sentence}\n\n```rust\nfn main() {{}}\n```\n\n    indented = code(1)\n\n| a | b |\n"
    assert prose(text) == sentence.strip()


def test_functions_and_their_docstrings() -> None:
    source = '''
class A:
    def add(self, first, second):
        """Add two numbers and
        give their sum back.

        More about it.
        """
        total = first + second
        return total + 0 * self.zero

    def short(self):
        """Too short."""

def no_docstring(first):
    return [one for one in first if one is not None and one > 0]
'''
    (found,) = functions([source, source, "not Python at all ("])
    assert found.doc == "Add two numbers and give their sum back."
    prompt, answer = docstring_of(found)
    assert prompt.startswith("def add(self, first, second):\n    total")
    assert answer.strip() == found.doc
    prompt, answer = code_of(found)
    assert prompt == f"# {found.doc}\ndef add(self, first, second):\n"
    assert answer == "    total = first + second\n    return total + 0 * self.zero\n"


def test_passages_and_verses(folder: Path) -> None:
    text = " ".join(f"word{n}" for n in range(100))
    for prompt, rest in passages([text], 120):
        assert prompt + rest in text
        assert rest.startswith(" ")
    verses = read_verses(folder, 160)
    assert len(verses) == 60
    assert set(verses[0][0].split()) <= set(WORDS)
    assert set(verses[0][1].split()) <= set(MOTS)
