"""The compositions on real text at their smallest, on text that the test makes: tables, the form of results, errors."""

from __future__ import annotations

import json
import random
import re
from importlib import import_module
from pathlib import Path

import pytest

from experiments import Options, reproduce
from experiments.composition_code.run import code_of, docstring_of, functions
from experiments.composition_language.run import read_verses
from experiments.parents import DOCUMENTS, ENGLISH, FRENCH, PretrainRun, prose
from graftlm.data import SourceConfig
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results, value_of
from graftlm.runs.execute import execute

composed = import_module("experiments.composed")
code = import_module("experiments.composition_code.run")
language = import_module("experiments.composition_language.run")

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


END = ", upper end of the interval"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both reproductions leave their parents, which they share."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.slow
@pytest.mark.slow
def test_language_in_the_one_form(folder: Path, runs: Path) -> None:
    out = runs / "language"
    options = Options(data=folder, out=out, quick=True, jobs=1)
    results = reproduce("composition-language", options)

    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == {*composed.LABELS, *language.LABELS}
    for name in rows.keys() - {"m_b", "m_a", "m_a_code", "m_a_own", "fixed_mixture"}:
        assert {"old_bpb", "new_bpb", "python_bpb", "forgotten", "ntrex_en_fr", "bible_fr_en_bpb"} <= rows[name].keys()
        assert not any(metric.startswith("validation") for metric in rows[name]), "chosen on, so not reported"
    assert "old" not in rows["m_a_own"], "another tokenizer's tokens are other units"
    weights = [value_of(rows[name]["trainable_parameters"]) for name in ("both", "lora")]
    assert max(weights) < 1.15 * min(weights)
    assert rows["composition"] == rows["both"]
    assert {aim.text.removesuffix(END) for aim in results.aims} == set(language.RATIOS.values())
    assert (out / "bits-per-byte.png").exists()
    details = json.loads((out / "results.json").read_text())["details"]
    assert len(details["search"]["fixed_mixture"]) == len(composed.SHARES)
    assert details["ratios"].keys() == set(language.RATIOS.values())

    kept = sorted((out / "runs" / "measurements").glob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in kept}
    again = reproduce("composition-language", options.model_copy(update={"tables": ("tokenizers",)}))
    assert {path: path.stat().st_mtime_ns for path in before} == before, "what was measured is read back"
    assert again.row("cross").metrics["new"] == results.row("cross").metrics["new"]


@pytest.mark.slow
@pytest.mark.slow
def test_code_in_the_one_form(folder: Path, runs: Path) -> None:
    results = reproduce("composition-code", Options(data=folder, out=runs / "code", quick=True, jobs=1))
    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == {*composed.LABELS, *code.LABELS}
    for metrics in rows.values():
        assert {"c2t", "c2t_bpb", "c2t_chrf", "t2c", "t2c_bpb", "t2c_chrf"} <= metrics.keys()
    assert {aim.text.removesuffix(END) for aim in results.aims} == set(code.RATIOS.values())


def test_a_fixed_mixture_has_the_shares_that_it_names(tmp_path: Path, tiny_backbone) -> None:
    folder, other = str(tiny_backbone("llama")), str(tiny_backbone("gpt2"))
    text = tmp_path / "text.jsonl"
    write_lines(text, [json.dumps({"text": " ".join(WORDS)})])
    graft = {"kind": "composition", "augmenting": composed.named({"one": Path(other)}), **composed.MIXTURE}
    run = composed.FixedMixtureRun(
        id="x",
        share=0.3,
        backbone={"name": folder},
        graft=graft,
        data={"test": {"new": [{"path": str(text)}]}, "length": 24},
        training={"steps": 0, "batch_size": 1, "learning_rate": 1e-3},
        evaluation={"own_tokens": 0, "decode_prompts": 0},
    )
    measured = execute([run], tmp_path / "out", progress=False)["x"]
    assert measured.details["statistics"]["one_gate"]["new"] == [pytest.approx(0.3)]


def test_the_committed_results_are_of_this_form() -> None:
    for module in (language, code):
        results = Results.read(Path(str(module.__file__)).parent)
        wanted = {"m_a", "m_b", "composition", "lora", "vanilla_m_a", "random_m_a"}
        assert wanted <= {row.id for row in results.rows}
        assert results.seeds[0] == 0
        ratios = results.details["ratios"]
        for aim in results.aims:
            ratio = ratios[aim.text.removesuffix(END)]
            assert ratio["high"] > ratio["mean"]
            assert aim.measured == ratio["high"], "the whole interval is within an aim that is met"
            assert aim.met == (ratio["high"] <= aim.aim)


def test_mistakes(tmp_path: Path) -> None:
    options = Options(data=tmp_path, out=tmp_path / "out")
    for name in ("composition-language", "composition-code"):
        with pytest.raises(DataError) as missing:
            reproduce(name, options)
        assert "lm_text/eltec_eng.jsonl" in str(missing.value)
        with pytest.raises(RecipeError) as unknown:
            reproduce(name, options.model_copy(update={"tables": ("3",)}))
        assert "'3'" in str(unknown.value)


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


def test_real_verses_are_in_one_part_by_value(data_dir: Path) -> None:
    parts = language.with_prompts(data_dir, language.LanguageAmounts())

    def sides(name: str) -> set[str]:
        pairs = [(prompt.rpartition("\n")[0].partition(": ")[2], answer) for prompt, answer in parts[name]]
        return {" ".join(re.findall(r"\w+", side.lower())) for pair in pairs for side in pair}

    train, validation, test = (sides(name) for name in ("verses-prompts", "task-validation_pairs", "task-bible_en_fr"))
    assert len(train) > 1000
    assert not train & (validation | test)
    assert not validation & test


def test_verses(folder: Path) -> None:
    verses = read_verses(folder, 160)
    assert len(verses) == 60
    assert set(verses[0][0].split()) <= set(WORDS)
    assert set(verses[0][1].split()) <= set(MOTS)
