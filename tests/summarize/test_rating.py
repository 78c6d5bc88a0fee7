"""Human evaluation: pages that tell nothing about systems, ratings that are read back, and agreement."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from examples.rate_summaries import (
    CRITERIA,
    Ratings,
    load_rating_items,
    ordinal_alpha,
    page,
    parse_systems,
    rating_page,
)
from examples.rate_summaries.__main__ import app
from examples.rate_summaries.page import RatingItem, key_path
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Interval, Results
from summarize import alpha_reference as reference
from summarize.rating_pages import items, write_systems

run = partial(CliRunner().invoke, app)

pytest.importorskip("sentencex")

# The worked example of Krippendorff (2011): four observers, twelve units, . is not observed.
OBSERVED = [[1, 2, 3, 3, 2, 1, 4, 1, 2, 0, 0, 0], [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, 0, 3],
            [0, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, 0], [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, 0]]  # fmt: skip
UNITS = [[value for value in unit if value] for unit in zip(*OBSERVED, strict=True)]


def test_alpha_of_the_published_example() -> None:
    assert ordinal_alpha(UNITS) == pytest.approx(0.815, abs=5e-4)
    published = {reference.nominal: 0.743, reference.ordinal: 0.815, reference.interval: 0.849}
    for distance, value in published.items():
        assert reference.alpha(UNITS, distance) == pytest.approx(value, abs=5e-4)


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=8))
def test_alpha_is_its_definition(units: list[list[int]]) -> None:
    found, wanted = ordinal_alpha(units), reference.alpha(units, reference.ordinal)
    assert (found is None) == (wanted is None)
    assert found is None or found == pytest.approx(wanted, abs=1e-9)


def test_alpha_at_its_ends() -> None:
    assert ordinal_alpha([[1, 1], [3, 3, 3], [5, 5]]) == 1
    assert ordinal_alpha([[1, 5], [5, 1]]) < 0  # type: ignore[operator]
    assert ordinal_alpha([[1], [2]]) is None
    assert ordinal_alpha([[3, 3], [3, 3]]) is None


def embedded(html: str) -> dict[str, Any]:
    return json.loads(html.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_a_page_does_not_tell_who_wrote_what() -> None:
    made = rating_page(items(), seed=3)
    data = embedded(made.html)
    assert not [name for name in ("lead", "ours", "human", "tea.md") if name in json.dumps(data["documents"])]
    assert data["page"] == made.key["page"]
    shown = [one for document in data["documents"] for one in document["summaries"]]
    assert {one["id"] for one in shown} == set(made.key["summaries"])
    assert len(shown) == 8, "the same text is shown once"
    by_text = {one["text"]: made.key["summaries"][one["id"]] for one in shown}
    assert by_text["Tea helps."] == {"document": "tea.md", "systems": ["ours"]}
    assert by_text["Water is wet."]["systems"] == ["lead", "ours"]
    assert by_text["It </script>"]["systems"] == ["human"], "a text can't end the page's script"


def test_orders_go_by_the_seed() -> None:
    pages = [embedded(rating_page(items(), seed).html) for seed in (0, 0, 1, 2, 3)]
    assert pages[0] == pages[1]
    orders = {json.dumps([[one["text"] for one in row["summaries"]] for row in found["documents"]]) for found in pages}
    assert len(orders) == 4


def test_a_page_needs_nothing_from_outside() -> None:
    html = rating_page(items()).html
    assert "default-src 'none'" in html
    assert "http:" not in html
    assert "https:" not in html
    assert "{{" not in html


def test_what_makes_no_page_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="There is no summary to rate"):
        rating_page([])
    monkeypatch.setattr(page, "_MAX_PAGE_CHARACTERS", 100)
    with pytest.raises(DataError, match="one may have 100: take fewer documents"):
        rating_page(items())


def test_the_command_makes_page_and_key(tmp_path: Path) -> None:
    out = tmp_path / "rate.html"
    done = run(["page", *write_systems(tmp_path), "--out", str(out), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["page"], found["documents"]) == (str(out), 2)
    assert found["notes"] == ["Of 3 documents 2 have a summary of every system, and are taken."]
    key = json.loads(key_path(out).read_text())
    assert {tuple(one["systems"]) for one in key["summaries"].values()} == {("lead",), ("ours",)}
    passages = [title for row in embedded(out.read_text())["documents"] for title, _ in row["passages"]]
    assert "1. Introduction" in passages
    assert "send raters the page alone" in done.stderr
    fewer, notes = load_rating_items(parse_systems(write_systems(tmp_path)), limit=1)
    assert (len(fewer), notes[1]) == (1, "Of those 1 are drawn.")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1 has no document and summary"),
        ("tea", "line 1 has no"),
        ('{"document": "a", "summary": 1}', "line 1"),
    ],
)
def test_files_of_another_form_are_told(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        load_rating_items({"a": tmp_path / "a.jsonl"})


def test_systems_are_told_apart(tmp_path: Path) -> None:
    assert parse_systems(["x=a.jsonl", "b.jsonl"]) == {"x": Path("a.jsonl"), "b": Path("b.jsonl")}
    with pytest.raises(RecipeError, match="are both called a: give them names, as NAME=FILE"):
        parse_systems(["a.jsonl", "b/a.jsonl"])
    with pytest.raises(RecipeError, match="has no name"):
        parse_systems(["=a.jsonl"])
    with pytest.raises(DataError, match=r"none.jsonl can't be read"):
        load_rating_items({"a": tmp_path / "none.jsonl"})
    (tmp_path / "a.jsonl").write_text('{"document": "x", "summary": "X."}\n')
    (tmp_path / "b.jsonl").write_text('{"document": "y", "summary": "Y."}\n')
    with pytest.raises(DataError, match="No document has a summary in each of"):
        load_rating_items({"a": tmp_path / "a.jsonl", "b": tmp_path / "b.jsonl"})


def saved(made: page.RatingPage, rater: str, rate) -> dict[str, Any]:
    """What a page saves when `rate(system, criterion)` says what a rater thinks."""
    given = {
        summary: {name: rate(one["systems"][0], name) for name in CRITERIA}
        for summary, one in made.key["summaries"].items()
    }
    return {"format": page.RATINGS_FORMAT, "page": made.key["page"], "rater": rater, "ratings": given}


@pytest.fixture
def rated(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A key and the files of two raters, one of whom left something out."""
    made = rating_page(items())
    _, key = made.write(tmp_path / "rate.html")
    anna = saved(made, "Anna", lambda system, name: 5 if system == "human" else 3)
    ben = saved(made, "Ben", lambda system, name: {"human": 4, "lead": 2, "ours": 3}[system])
    del ben["ratings"][next(one for one, about in made.key["summaries"].items() if about["systems"] == ["human"])]
    paths = [tmp_path / "anna.json", tmp_path / "ben.json"]
    for path, ratings in zip(paths, (anna, ben), strict=True):
        path.write_text(json.dumps(ratings))
    return key, paths


def test_means_intervals_and_agreement(rated, tmp_path: Path) -> None:
    key, paths = rated
    done = run(["results", str(key), *map(str, paths), "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.stderr
    found = Results.read(tmp_path / "out")
    assert [row.id for row in found.rows] == ["human", "lead", "ours", "agreement"]
    human, lead, ours = (found.row(name).metrics["fluency"] for name in ("human", "lead", "ours"))
    assert isinstance(human, Interval)
    assert isinstance(lead, Interval)
    assert isinstance(ours, Interval)
    assert human.mean == pytest.approx((5 + 4.5 + 4.5) / 3)  # a summary counts by the mean of its ratings
    assert human.low < human.mean < human.high
    assert lead.mean == 2.5
    assert ours.mean == pytest.approx((3 + 2.5 + 3) / 3)  # one text is also the lead's
    pairs = [[5, 4], [5, 4], [5], [3, 2], [3, 2], [3, 2], [3, 3], [3, 3]]
    assert found.row("agreement").metrics["fluency"] == pytest.approx(reference.alpha(pairs, reference.ordinal))
    assert found.details["missing"] == 4
    assert found.details["raters"] == ["Anna", "Ben"]
    assert found.paper[0].metrics["coherence"] == 3.73


def test_one_rater_has_means_and_no_agreement(rated) -> None:
    key, paths = rated
    rows = Ratings.load(key, paths[:1]).results().rows
    assert [row.id for row in rows] == ["human", "lead", "ours"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page": "other"}, "has ratings of another page"),
        ({"format": "other"}, "is no such file: the ratings that such a page saves"),
        ({"ratings": []}, "has no ratings of summaries"),
        ({"ratings": {"x": {}}}, "rates x, which is no summary of its page"),
        ({"rater": "Anna"}, "are both of Anna: give one file for each rater"),
    ],
)
def test_files_that_are_no_ratings_of_the_page_are_told(rated, change: dict[str, Any], message: str) -> None:
    key, (anna, ben) = rated
    ben.write_text(json.dumps(json.loads(ben.read_text()) | change))
    with pytest.raises(DataError, match=message):
        Ratings.load(key, [anna, ben])


@pytest.mark.parametrize("row", [{"fluency": 6}, {"fluency": 0}, {"fluency": True}, {"fluency": 2.5}, {"taste": 3}])
def test_ratings_off_the_scale_are_told(rated, row: dict[str, Any]) -> None:
    key, (anna, _) = rated
    one = json.loads(anna.read_text())
    one["ratings"][next(iter(one["ratings"]))] = row
    anna.write_text(json.dumps(one))
    with pytest.raises(DataError, match=r"go from 1 to 5: save it from the page again"):
        Ratings.load(key, [anna])


def test_keys_and_files_that_are_none(rated, tmp_path: Path) -> None:
    key, (anna, _) = rated
    with pytest.raises(DataError, match="the key of a page that examples.rate_summaries wrote is expected"):
        Ratings.load(anna, [anna])
    with pytest.raises(DataError, match="can't be read"):
        Ratings.load(tmp_path / "none.json", [anna])
    anna.write_bytes(b"\xff")
    with pytest.raises(DataError, match="is no such file"):
        Ratings.load(key, [anna])


def test_a_heading_without_text_is_kept() -> None:
    document = items()[0]
    assert isinstance(document, RatingItem)
    assert [title for title, _ in document.passages][:2] == ["A study of tea", "1. Introduction"]
