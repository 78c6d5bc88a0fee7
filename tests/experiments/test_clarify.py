"""Chains beside their baselines: what the harness measures, keeps and resumes, by a translator of known behaviour."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clarify.server import request_parts, serving, words
from experiments import Options, clarify, reproduce
from experiments.clarify import metrics
from experiments.clarify.conversations import read_sets, sample
from experiments.clarify.datasets import AmbiguousExample
from experiments.clarify.run import METHODS, STATEMENT, decision, language_row, paper_rows, slug
from experiments.clarify.scripted import ScriptedTranslator, digit, right_label
from graftlm.errors import DataError, EndpointError, EvaluationError, RecipeError
from graftlm.evaluation import Interval, Results, Row, value_of
from graftlm.pipelines.clarify.prompts import Prompt
from tiny import tiny_model, tiny_tokenizer

FORMALITY = [
    ("formal", "Good evening, Madam.", f"Are you {word}?", f"Êtes-vous {french} ?")
    for word, french in (("sure", "sûre"), ("ready", "prête"), ("alone", "seule"), ("tired", "fatiguée"))
] + [
    ("informal", "Hi, Dad.", f"Do you have {word}?", f"Tu as {french} ?")
    for word, french in (("time", "le temps"), ("money", "de l'argent"), ("a pen", "un stylo"), ("a key", "une clé"))
]
WORDS = [("bark", "écorce", "The bark of the oak."), ("seal", "phoque", "A seal on the rocks.")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a little of AmbigMT's form."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "ambigmt").mkdir()
    lines = [f"{label}\t\t{context}\t{source}\t{reference}" for label, context, source, reference in FORMALITY]
    (folder / "ambigmt" / "formality_en_fr.tsv").write_text("label\t\tctx\tsrc\ttrg\n" + "\n".join(lines) + "\n")
    lines = [f"{word}\t{french}\t{context}" for word, french, context in WORDS]
    (folder / "ambigmt" / "polysemy_en_fr.tsv").write_text("src\ttrg\tctx\n" + "\n".join(lines) + "\n")
    return folder


def scripted_server(examples: Iterable[AmbiguousExample]) -> Callable[[Mapping[str, Any]], str]:
    """The scripted translator as the replies of a server."""
    translator = ScriptedTranslator(examples)

    def reply(body: Mapping[str, Any]) -> str:
        prompt = Prompt(body["messages"][0]["content"], (), tuple(request_parts(body).items()), "")
        return translator.generate(prompt).text

    return reply


def options(data: Path, out: Path, *tables: str, **more: Any) -> Options:
    return Options(data=data, out=out, tables=tables or ("4.2",), jobs=1, **({"endpoint": "scripted"} | more))


def test_known_mistakes_give_known_figures(data: Path, tmp_path: Path) -> None:
    results = reproduce("clarify", options(data, tmp_path))
    assert [row.id for row in results.rows] == ["scripted-intercpt", "scripted-with_context", "scripted-no_extra"]
    examples = read_sets(data)["formality", "fr"]
    # A wrong answer leads to the contrast, which AmbigMT has none of: then to the English text, without a marker.
    right = {
        "intercpt": sum(digit(one) != 0 for one in examples),
        "with_context": sum(digit(one) < 8 for one in examples),
        "no_extra": sum(digit(one) % 2 == 0 for one in examples),
    }
    for method, count in right.items():
        row = results.row(f"scripted-{method}")
        for name in ("accuracy", "coverage"):
            assert value_of(row.metrics[f"formality_fr_{name}"]) == pytest.approx(100 * count / len(examples))
        assert 0 <= value_of(row.metrics["polysemy_fr_hit3"]) <= value_of(row.metrics["polysemy_fr_hit10"]) <= 100
    asks, plain = results.row("scripted-intercpt").metrics, results.row("scripted-no_extra").metrics
    assert (asks["calls"], asks["questions"]) == (30, 10)
    assert (plain["calls"], plain["questions"], plain["examples"]) == (10, 0, 10)
    assert value_of(asks["prompt_tokens"]) > value_of(plain["prompt_tokens"])
    assert results.details["statement"] == STATEMENT
    assert results.paper == []
    assert (tmp_path / "figure-4.3.png").exists()
    assert (tmp_path / "figure-4.6.png").exists()


def test_the_number_of_examples_is_limited(data: Path, tmp_path: Path) -> None:
    results = reproduce("clarify", options(data, tmp_path, limit=2))
    assert results.details["limit"] == 2
    assert set(results.details["examples"].values()) == {2}


@pytest.mark.slow
def test_a_run_resumes_after_a_server_failure(data: Path, tmp_path: Path) -> None:
    script = scripted_server(one for examples in read_sets(data).values() for one in examples)
    calls = 0

    def dying(body: Mapping[str, Any]) -> str:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise ConnectionError
        return script(body)

    def url_of(server: Any) -> Options:
        return options(data, tmp_path, endpoint=server.url, models=("Org/Some-Model",), concurrency=1)

    with serving(dying) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(server), "handle_error", lambda *arguments: None)
        patch.setattr("experiments.clarify.conversations.RETRIES", 0)
        with pytest.raises(EndpointError):
            reproduce("clarify", url_of(server))
    (kept,) = tmp_path.rglob("replies-*.jsonl")
    done = kept.read_text().splitlines()
    assert len(done) == 10, "every reply is kept"
    kept.write_text("\n".join(done) + '\n{"key": "cut o')
    with serving(script) as server:
        results = reproduce("clarify", url_of(server))
        assert len(server.requests) == 50 - 10
        assert results.rows[0].id == "org_some_model-intercpt"
        assert {row.where for row in results.paper} == {"Table 4.2"}
    with serving(script) as server:
        assert reproduce("clarify", url_of(server)).rows == results.rows
        assert server.requests == [], "another port changes nothing"


def test_a_user_apart_from_translators_of_two_sizes(data: Path, tmp_path: Path) -> None:
    """Figure 4.3: one user for all sizes."""
    script = scripted_server(one for examples in read_sets(data).values() for one in examples)
    with serving(script) as server:
        given = {"endpoint": server.url, "models": ("small", "large"), "user": "wise", "quick": True}
        results = reproduce("clarify", options(data, tmp_path / "sizes", "figure-4.3", **given))
        requests = list(server.requests)
    of_user = [body for body in requests if "Unknown" in body["messages"][0]["content"]]
    assert of_user
    assert {body["model"] for body in of_user} == {"wise"}
    assert {body["model"] for body in requests if body not in of_user} == {"small", "large"}
    assert {body["max_tokens"] for body in requests} == {32}
    assert {row.id for row in results.rows} == {f"{size}-{method}" for size in ("small", "large") for method in METHODS}
    assert results.details["user"] == "wise"
    assert (tmp_path / "sizes" / "figure-4.3.png").exists()


def test_the_price_has_the_tokens_of_both_models_each_at_its_own(data: Path, tmp_path: Path) -> None:
    script = scripted_server(one for examples in read_sets(data).values() for one in examples)
    with serving(script) as server:
        given = {"endpoint": server.url, "user": "wise", "quick": True, "prices": "1,2", "user_prices": "10,20"}
        with pytest.raises(RecipeError) as error:
            reproduce("clarify", options(data, tmp_path, "4.2", **given, models=("small", "large")))
        assert "--prices" in str(error.value), "one price says nothing of two models"
        assert not server.requests
        results = reproduce("clarify", options(data, tmp_path, "4.2", **given, models=("small",)))
        requests = list(server.requests)
    expected = 0.0
    for body in requests:
        scale = 10 if body["model"] == "wise" else 1
        expected += scale * (words(body["messages"]) + 2 * len(script(body).split())) / 1e6
    assert sum(value_of(row.metrics["price"]) for row in results.rows) == pytest.approx(expected, abs=1e-5)
    assert results.details["rows_of_unknown_price"] == []


def test_figure_4_6_needs_french_and_spanish_only(data: Path, tmp_path: Path) -> None:
    results = reproduce("clarify", options(data, tmp_path, "figure-4.6", quick=True))
    names = {name for row in results.rows for name in row.metrics}
    assert "formality_fr_share_formal" in names
    assert not any(name.startswith("polysemy") for name in names)
    assert {path.name for path in tmp_path.glob("figure-*.png")} >= {"figure-4.6.png"}


@pytest.mark.slow
def test_figure_4_5_has_every_model_as_the_user(data: Path, tmp_path: Path) -> None:
    results = reproduce("clarify", options(data, tmp_path, "figure-4.5", models=("one", "two"), quick=True))
    assert [row.id for row in results.rows] == ["one-intercpt_user_one", "one-intercpt_user_two"]
    assert (tmp_path / "figure-4.5.png").exists()


def test_a_quick_run_holds_whole_conversations_with_a_local_model(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_model("llama", max_position_embeddings=8192).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (tmp_path / "data" / "ambigmt").mkdir(parents=True)
    line = "formal\t\tGood evening, Madam.\tAre you sure?\tÊtes-vous sûre ?\n"
    (tmp_path / "data" / "ambigmt" / "formality_en_fr.tsv").write_text(f"label\t\tctx\tsrc\ttrg\n{line}")
    chosen = options(tmp_path / "data", tmp_path / "out", quick=True, endpoint=None, backbone=str(folder))
    results = reproduce("clarify", chosen)
    assert [row.id for row in results.rows] == [f"tiny-{method}" for method in METHODS]
    for row in results.rows:
        assert value_of(row.metrics["examples"]) == 1
        assert 0 < value_of(row.metrics["new_tokens"]) <= 32 * value_of(row.metrics["calls"])
    assert len(list((tmp_path / "out").rglob("replies-*.jsonl"))) == 3


# What a learned metric's command does, with a measure that can be worked by hand: the length of the translation.
LENGTH = "import json, sys; [print(len(json.loads(line)['mt'])) for line in sys.stdin]"


def own(name: str, code: str) -> str:
    return f"{name}={sys.executable} -c {shlex.quote(code)}"


@pytest.mark.slow
def test_scorers_of_the_user_add_metrics(data: Path, tmp_path: Path) -> None:
    results = reproduce("clarify", options(data, tmp_path, scorers=(own("length", LENGTH),)))
    metrics_of = results.row("scripted-intercpt").metrics
    outputs = [len(one.reference) if digit(one) else len(one.source) for one in read_sets(data)["formality", "fr"]]
    interval = metrics_of["formality_fr_length"]
    assert isinstance(interval, Interval)
    assert interval.mean == pytest.approx(sum(outputs) / len(outputs))
    assert min(outputs) <= interval.low <= interval.mean <= interval.high <= max(outputs)
    assert {"polysemy_fr_length3", "polysemy_fr_length10"} <= {*metrics_of}


def test_the_best_of_the_first_words() -> None:
    scorer = metrics.Scorer(own("length", LENGTH))
    examples = [AmbiguousExample(word, "polysemy", "fr", word, ("c",), "x") for word in ("bark", "seal")]
    values = metrics.score_rows(scorer, "polysemy", examples, ["a, bb, c, dddd", ""])
    assert values == {"length3": (2 + 0) / 2, "length10": (4 + 0) / 2}


@pytest.mark.parametrize(
    ("written", "kind", "named"),
    [
        ("comet", RecipeError, "NAME=COMMAND"),
        ("Comet 2=python", RecipeError, "NAME=COMMAND"),
        ("comet= ", RecipeError, "NAME=COMMAND"),
        ("bleu=python", RecipeError, "The name bleu"),
        ("comet=/no/such/program", EvaluationError, "No such file or directory: /no/such/program"),
        (own("comet", "1/0"), EvaluationError, "ended with 1 (ZeroDivisionError: division by zero)"),
        (own("comet", "print('model loaded')"), EvaluationError, "'model loaded'"),
        (own("comet", "print(1)"), EvaluationError, "1 numbers for 2 translations"),
        (own("comet", "print('1 nan')"), EvaluationError, "finite"),
    ],
)
def test_scorers_that_do_not_score(written: str, kind: type[Exception], named: str) -> None:
    two = [("a", "b", "c")] * 2
    with pytest.raises(kind) as error:
        metrics.Scorer(written)(two)
    assert named in str(error.value)


@pytest.mark.slow
def test_specialists_and_users(data: Path, tmp_path: Path) -> None:
    results = reproduce("clarify", options(data, tmp_path, "4.2", "4.4", "4.5", models=("one", "two"), quick=True))
    ids = [row.id for row in results.rows]
    assert {"one-intercpt", "two-no_extra", "two-intercpt_specialist", "one-intercpt_user_two"} <= {*ids}
    assert {path.name for path in tmp_path.glob("figure-*.png")} == {f"figure-4.{n}.png" for n in (3, 4, 5, 6)}
    assert results.details["templates"] == ["translate", "translate-formality", "translate-polysemy"]


def test_which_questions_are_needed() -> None:
    def example(context: str, source: str, reference: str, contrast: str) -> AmbiguousExample:
        return AmbiguousExample("x", "profession", "fr", source, (context,), reference, "feminine", contrast)

    told = example("She was late.", "The nurse ran.", "L'infirmière courut.", "L'infirmier courut.")
    same = example("She was late.", "The artist ran.", "L'artiste courut.", "L'artiste  courut.")
    unread = example("The mother was late.", "The nurse ran.", "L'infirmière courut.", "L'infirmier courut.")
    assert [decision(told, with_context)[:2] for with_context in (False, True)] == [(True, True), (False, False)]
    assert [decision(same, with_context)[:2] for with_context in (False, True)] == [(False, False)] * 2
    assert decision(unread, True)[:2] == (True, False), "this reader knows pronouns alone"
    row = language_row("fr", [told, same, unread])
    found = {name: round(value_of(metric), 1) for name, metric in row.metrics.items()}
    assert (found["precision"], found["recall"], found["precision_always"]) == (66.7, 100.0, 33.3)
    assert (found["asked"], found["needed"], found["texts"]) == (3, 2, 6)


def test_figures_worked_by_hand() -> None:
    one, two = (
        AmbiguousExample(str(n), "polysemy", "fr", "bark", ("c",), reference)
        for n, reference in ((1, "écorce"), (2, "cri"))
    )
    found = metrics.polysemy_metrics(["aboiement, Écorce", "a、b、c、cri"], [one, two])
    assert [value_of(found[name]) for name in ("hit3", "hit10")] == [50.0, 100.0]
    assert value_of(found["chrf10"]) > value_of(found["chrf3"])
    examples = [
        AmbiguousExample(str(n), "formality", "fr", "s", ("c",), "r", label)
        for n, label in enumerate(["formal", "informal", None])
    ]
    labels = metrics.label_metrics(["formal", None, "formal"], examples)
    assert {name: value_of(value) for name, value in labels.items()} == {
        "accuracy": 50.0,
        "coverage": 50.0,
        "share_formal": 100.0,
    }
    interval = metrics.share(5, 10)
    assert (round(interval.low, 1), round(interval.high, 1)) == (23.7, 76.3)
    assert metrics.share(0, 0).high == 100


def test_checkers_read_the_source_but_for_gender() -> None:
    """A verb without a subject is a polite address only if the English addresses somebody."""
    example = AmbiguousExample("x", "formality", "es", "Does your dog bark?", ("c",), "r", "formal")
    assert metrics.labels_of(["¿Su perro ladra?"], [example], "formality", "es") == ["formal"]
    other = AmbiguousExample("x", "formality", "es", "Does his dog bark?", ("c",), "r", None)
    assert metrics.labels_of(["¿Su perro ladra?"], [other], "formality", "es") == [None]
    thing = AmbiguousExample("x", "it", "fr", "Can you grab it?", ("c",), "r", "feminine")
    assert metrics.labels_of(["Tu peux la prendre ?"], [thing], "it", "fr") == ["feminine"]
    person = AmbiguousExample("x", "profession", "de", "She left.", ("c",), "r", "feminine")
    assert metrics.labels_of(["Sie sind müde."], [person], "profession", "de") == [None]
    assert metrics.labels_of(["x"], [person], "profession", "pt") is None


def test_mistakes_by_class() -> None:
    example = AmbiguousExample("x", "formality", "fr", "Are you sure?", ("c",), "r", "formal")

    def sorted_as(question: str | None, answer: str | None, text: str = "Are you sure?") -> dict[str, int]:
        one = AmbiguousExample("x", "formality", "fr", text, ("c",), "r", "formal")
        return metrics.mistakes(["informal"], [one], [{"question": question, "answer": answer}], "formality")

    assert sorted_as(None, None) == {"no-question": 1}
    assert sorted_as('What is "sure"?', "certain") == {"wrong-question": 1}
    assert sorted_as('Who is "you"?', None) == {"limited-context": 1}
    assert sorted_as('Who is "you"?', "a friend") == {"wrong-answer": 1}
    assert sorted_as('Who is "you"?', "a stranger") == {"style-or-other": 1}
    assert sorted_as('Who is "you"?', "a stranger", "Do you like it?") == {"many-ambiguities": 1}
    assert metrics.mistakes(["formal"], [example], [{"question": None, "answer": None}], "formality") == {}
    assert [metrics.label_in_answer(answer, "name") for answer in ("a woman", "He is.", "a man or a woman", "x")] == [
        "feminine",
        "masculine",
        None,
        None,
    ]


def test_significance_tells_the_same_from_the_different() -> None:
    examples = [AmbiguousExample(str(n), "it", "fr", "s", ("c",), f"le chat {n} dort bien ici") for n in range(20)]
    right = [one.reference for one in examples]
    found = metrics.significance({"a": right, "b": list(right), "c": ["rien du tout"] * 20}, examples, "fr")
    assert found["b"] == {"BLEU": 1.0, "chrF": 1.0}
    assert found["c"]["BLEU"] < 0.05
    assert found["c"]["chrF"] < 0.05


def test_japanese_is_cut_into_characters() -> None:
    example = AmbiguousExample("x", "it", "ja", "s", ("c",), "棚に置きました。")
    assert value_of(metrics.text_metrics(["棚に置きました。"], [example], "ja")["bleu"]) == pytest.approx(100)


def test_the_same_example_counts_once() -> None:
    one = AmbiguousExample("1", "it", "fr", "s", ("c",), "r", "feminine")
    assert sample([one, one, AmbiguousExample("2", "it", "fr", "s", ("d",), "r")], 9) == [
        one,
        AmbiguousExample("2", "it", "fr", "s", ("d",), "r"),
    ]
    many = [AmbiguousExample(str(n), "it", "fr", str(n), ("c",), "r") for n in range(50)]
    assert sample(many, 7) == sample(many, 7)
    assert len(sample(many, 7)) == 7


def test_the_scripted_translator_tells_examples_of_one_text_apart() -> None:
    her, his = (
        AmbiguousExample(label, "it", "fr", "It is here.", (context,), reference, label, "x")
        for label, context, reference in (
            ("feminine", "A key.", "Elle est là."),
            ("masculine", "A book.", "Il est là."),
        )
    )
    translator = ScriptedTranslator([her, his])
    for one in (her, his):
        prompt = Prompt("Put the text into French", (), (("text", one.source), ("answer", right_label(one))), "")
        assert translator.generate(prompt).text == one.reference


@pytest.mark.parametrize(
    ("more", "kind", "named"),
    [
        ({"endpoint": None}, RecipeError, "--endpoint"),
        ({"endpoint": "http://localhost:1/v1"}, RecipeError, "--model"),
        ({"tables": ("figure-4.3",)}, RecipeError, "figure-4.3"),
        ({"tables": ("figure-4.5",)}, RecipeError, "figure-4.5"),
        ({"backbone": "folder"}, RecipeError, "--backbone"),
        ({"user_endpoint": "http://localhost:1/v1"}, RecipeError, "--user"),
        ({"prices": "1"}, RecipeError, "--prices"),
        ({"tables": ("4.9",)}, RecipeError, "'4.9'"),
        ({"data": Path("nowhere")}, DataError, "nowhere"),
    ],
)
def test_invalid_options_are_refused(
    data: Path, tmp_path: Path, more: dict[str, Any], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind) as error:
        reproduce("clarify", options(data, tmp_path).model_copy(update=more))
    assert named in str(error.value)


def test_published_figures_stand_beside_their_own_metrics() -> None:
    row = Row(id="x-intercpt", label="x", metrics={"formality_fr_bleu": 1.0, "name_ja_accuracy": 2.0, "calls": 1})
    found = paper_rows([row, Row(id="needed_fr", label="n", metrics={"precision": 1.0})])
    assert [(one.where, one.metrics) for one in found] == [
        ("Table 4.2", {"formality_fr_bleu": 39.1}),
        ("Table 4.3", {"name_ja_accuracy": 71.0}),
    ]
    assert slug("Org/Some Model:7b") == "org_some_model_7b"


def test_the_committed_results_are_of_this_form() -> None:
    results = Results.read(Path(clarify.__file__).parent)
    assert [row.id for row in results.rows] == [
        *(f"scripted-{method}" for method in METHODS),
        "needed_de",
        "needed_fr",
        "needed_es",
    ]
    assert results.details["statement"] == STATEMENT
    assert json.dumps(results.details)
