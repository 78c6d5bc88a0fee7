"""The forms that a model finds likelier, at their smallest, on files that the test makes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Options, reproduce
from experiments.clarify_smollm2.measures import calibration, gains, shares, values_of
from experiments.clarify_smollm2.pairs import build_pairs, swap_gender, training_rows
from experiments.clarify_smollm2.scoring import sequence_nats
from graftlm.backbone import load_backbone
from graftlm.evaluation import value_of
from graftlm.evaluation.examples import Example, score_answers
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import graft_config

LANGUAGES = {"de": "deu", "es": "spa", "fr": "fra"}


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of all four sets, with four texts or more each; a dev text is a test text of another language."""
    data = tmp_path / "data"
    for part, languages in (("test", ("de", "it")), ("train.calls", ("de",))):
        for language in languages:
            stem = data / f"ambig/cocoa_mt/formality-control.{part}.en-{language}"
            _write(Path(f"{stem}.en"), [f"Do you see house {part} {n}?" for n in range(4)])
            for label, word in (("formal", "Sie"), ("informal", "du")):
                _write(Path(f"{stem}.{label}.{language}"), [f"Haus {n}, {word}?" for n in range(4)])
                _write(Path(f"{stem}.{label}.annotated.{language}"), [f"Haus {n}, [F]{word}[/F]?" for n in range(4)])
    for language, code in LANGUAGES.items():
        for part in ("test", "dev"):
            stem = data / "ambig/mt_geneval/geneval-context-wikiprofessions"
            names = [f"{part} {language} {n}" for n in range(4)] + ["shared" if part == "dev" else f"test {language} 9"]
            if (part, language) == ("test", "de"):
                names.append("shared")
            shown = [f"She sang. <sep> The doctor {name} came." for name in names]
            _write(Path(f"{stem}-2to1-{part}.en_{language}.en"), shown)
            for version, ending in (("original", "in"), ("flipped", "")):
                _write(Path(f"{stem}-{version}-{part}.en_{language}.{language}"), [f"Arzt{ending} {n}" for n in names])
            for gender, pronoun in (("feminine", "she"), ("masculine", "he")):
                stem = data / f"ambig/mt_geneval/geneval-sentences-{gender}-{part}.en_{language}"
                _write(Path(f"{stem}.en"), [f"Then {pronoun} came to {part} {n}." for n in range(4)])
                _write(Path(f"{stem}.{language}"), [f"{pronoun} kam {n}" for n in range(4)])
        words = {"de": ("Sie", "du", "der Präsident", "die Präsidentin")}
        words |= {"fr": ("vous", "tu", "le président", "la présidente")}
        words |= {"es": ("usted", "tú", "el presidente", "la presidenta")}
        english = ["Will you go", "You and I", "The president said", "The president of it", "Rain"]
        texts = [
            (f"{e} {n}.", f"{w} {n}.") for n in range(20) for e, w in zip(english, (*words[language], "x"), strict=True)
        ]
        _write(data / f"parallel/ntrex/newstest2019-ref.{code}.txt", [target for _, target in texts])
    _write(data / "parallel/ntrex/newstest2019-src.eng.txt", [source for source, _ in texts])
    _write(data / "parallel/ntrex/DOCUMENT_IDS.tsv", [f"d{n // 5}" for n in range(len(texts))])
    verses = ["### Mark", *(f"[1:{n}] You will see {n}." for n in range(9))]
    _write(data / "parallel/bible/BSB.txt", verses)
    _write(data / "parallel/bible/FreSynodale1921.txt", [verse.replace("You will see", "tu vois") for verse in verses])
    return data


@pytest.mark.parametrize("grafted", [False, True])
def test_one_pass_over_the_tree_scores_as_single_sequences(tiny_backbone, grafted: bool) -> None:
    backbone = load_backbone(str(tiny_backbone("llama")), dtype="float32")
    tokenizer = backbone.need_tokenizer()
    texts = [("the old house", " walked"), ("the old house", " walked under"), ("the old", " house"), ("a", " river")]
    pairs = [[tokenizer(part, add_special_tokens=False)["input_ids"] for part in pair] for pair in texts]
    config = graft_config({"kind": "lora"})
    graft = config.graft_class(config, backbone)
    with GraftedModel(backbone, {"graft": graft}) as model:
        for weight in model.trainable_parameters().values():
            torch.nn.init.normal_(weight, std=0.3)
        scored = model if grafted else backbone.bare_model
        expected = [-float(score_answers(scored, tokenizer, [Example(*text)]).nats[0]) for text in texts]
        assert sequence_nats(scored, [tuple(pair) for pair in pairs]) == pytest.approx(expected, abs=1e-3)


def test_pronouns_change_their_gender() -> None:
    english = "She saw her brother and he saw her; the book is his, himself."
    assert swap_gender(english) == "He saw his brother and she saw him; the book is her, herself."


PARTS = ("test", "clear", "dev", "dev_clear")


@pytest.mark.slow
def test_no_dev_or_training_text_is_tested(folder: Path) -> None:
    pairs = list(build_pairs(folder, dict.fromkeys(PARTS, 9)))
    text = {part: {p["told"]["nothing"].split("\n")[0] for p in pairs if p["part"] == part} for part in PARTS}
    assert any("shared" in each for each in text["test"])
    assert text["clear"]
    assert text["dev_clear"]
    assert not (text["test"] | text["clear"]) & (text["dev"] | text["dev_clear"])
    known = {"Rain 3.", "Sie 7."}
    rows = training_rows(folder, known)
    for name, of_name in rows.items():
        told = [[message["content"] for message in row["messages"]] for row in of_name]
        assert told
        assert not any({each[1].split("\n")[0][6:], each[2]} & known for each in told)
        asked = [each for each in told if "\nQuestion: " in each[1]]
        assert bool(asked) == name.endswith("question")
        assert all(
            ("a friend" in each[1]) == (each[2].split()[0] in {"du", "tu", "tú"}) for each in asked if "you" in each[1]
        )
    assert [row["messages"][2] for row in rows["plain"]] == [row["messages"][2] for row in rows["question"]]


def _pair(answers: float, *, right: int = 0, part: str = "test", nothing: float = 0.0) -> dict[str, Any]:
    """A pair whose gap, first form minus second, is `answers` under the first answer, its negative under the second."""
    gaps = {"nothing": nothing, "question": nothing}
    for name, gap in (("answer", answers), ("context", 0.5 * answers), ("word", 0.1)):
        gaps |= {f"{name}:0": nothing + gap, f"{name}:1": nothing - gap}
    nats = {name: [-10 + gap, -10.0] for name, gap in gaps.items()}
    return {"id": "x", "group": "gender_de", "part": part, "right": right, "tokens": [5, 4], "nats": nats}


def test_either_form_is_right_once() -> None:
    assert shares(_pair(1.0))["right_form_answer"] == 100.0
    values = shares(_pair(1.0, nothing=2.0))  # the answer moves the forms, and does not turn them
    assert (values["right_form_answer"], values["moved_answer"], values["first_form_nothing"]) == (50.0, 100.0, 100.0)
    assert values["right_form_wrong_answer"] == 50.0
    assert shares(_pair(-1.0))["moved_answer"] == 0.0
    assert values["right_form_nothing"] == 50.0
    mean = values_of([[_pair(1.0)], [_pair(-1.0)]], "gender_de")
    assert mean["right_form_answer"].tolist() == [50.0]
    assert mean["right_form_answer_minus_context"].tolist() == [0.0]


def test_gains_are_in_bits() -> None:
    predicted, brought, entropy = gains(_pair(math.log(3), right=1))
    assert entropy == pytest.approx(1.0)
    assert brought == pytest.approx(math.log2(0.75 / 0.5))
    assert predicted == pytest.approx(1 - (0.75 * math.log2(4 / 3) + 0.25 * math.log2(4)))


def test_a_gain_that_the_answers_keep_is_calibrated() -> None:
    pairs = [
        _pair(0.1 * n, right=n % 2, part=part) for part in ("test", "clear", "dev", "dev_clear") for n in range(12)
    ]
    found = calibration([pairs])
    assert value_of(found["rank_all"]) == pytest.approx(1.0)
    assert value_of(found["f1"]) == pytest.approx(100.0), "the threshold of the dev texts separates the tests"
    assert value_of(found["f1_always"]) < 100.0


@pytest.mark.slow
def test_a_quick_run_has_every_row(folder: Path, tiny_chat_model, tmp_path: Path) -> None:
    options = Options(data=folder, out=tmp_path / "out", quick=True, jobs=1, backbone=str(tiny_chat_model))
    results = reproduce("clarify-smollm2", options)
    groups = ("all", "formality_de", "formality_it", "gender_de", "gender_es", "gender_fr")
    models = ("bare", "question", "plain")
    assert [row.id for row in results.rows] == [
        *(f"{model}_{group}" for model in models for group in groups),
        *(f"{model}_asking" for model in models),
    ]
    for model in models:
        metrics = results.row(f"{model}_gender_fr").metrics
        assert {"right_form_nothing", "right_form_context", "right_form_answer", "right_form_other"} <= metrics.keys()
        assert value_of(metrics["right_form_nothing"]) == 50.0
    assert "moved_answer_over_plain" in results.row("question_all").metrics
    assert (tmp_path / "out" / "reliability.png").exists()
