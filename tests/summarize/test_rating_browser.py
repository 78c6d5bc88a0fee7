"""The rating page in a browser: ratings are made by mouse and keys, survive a reload, and are read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from chromium import chromium
from examples.rate_summaries import CRITERIA, Ratings, rating_page
from summarize.rating_pages import items

pytest.importorskip("sentencex")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator:
    """The page as a file, in a fresh profile; anything that it asks of a network, or complains of, is an error."""
    made = rating_page(items())
    path, _ = made.write(tmp_path / "rate.html")
    context = browser.new_context(color_scheme="light", viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(90_000)  # a busy machine is slow to open pages
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "blob:")) or wrong.append(request.url))
    page.goto(path.as_uri())
    yield page, made, tmp_path
    assert wrong == []
    context.close()


def rows_of(page) -> list:
    return page.get_by_role("group").all()


def test_all_is_rated_by_keys_and_read_back(opened) -> None:
    page, made, folder = opened
    page.get_by_label("Your name").fill("Anna B.")
    wanted: dict[str, list[int]] = {}
    for number in range(1, 4):
        expect(page.get_by_role("heading", name=f"Document {number} of 3")).to_be_visible()
        count = len(page.get_by_role("group").all())
        rows_of(page)[0].get_by_role("radio").first.focus()
        values = [1 + (number + index) % 5 for index in range(count)]
        for value in values:
            page.keyboard.press(str(value))
        texts = page.locator("article p").all_inner_texts()
        for index, text in enumerate(texts):
            wanted[text] = values[4 * index : 4 * index + 4]
        assert page.evaluate("document.activeElement.id") == ("after" if number < 3 else "download")
        page.keyboard.press("Enter") if number < 3 else None
    expect(page.get_by_role("status")).to_have_text("32 of 32 ratings made.")
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    saved = folder / waiting.value.suggested_filename
    waiting.value.save_as(saved)
    assert saved.name == f"ratings-{made.key['page']}-Anna-B-.json"
    expect(page.get_by_role("alert")).to_have_text("Saved, with all ratings.")
    found = Ratings.load(folder / "rate.key.json", [saved])
    given = {one: [row[name] for name in CRITERIA] for one, row in found.by_rater["Anna B."].items()}
    assert sorted(given.values()) == sorted(wanted.values())
    summaries = made.key["summaries"].items()
    human = next(one for one, about in summaries if (about["document"], about["systems"]) == ("tea.md", ["human"]))
    assert given[human] == wanted["It </script>"]


def test_ratings_survive_a_reload(opened) -> None:
    page, _, _ = opened
    page.get_by_label("Your name").fill("Ben")
    page.get_by_role("button", name="Next").click()
    group = page.get_by_role("article", name="Summary B").get_by_role("group", name="Fluency")
    group.get_by_role("radio", name="4").click()
    page.get_by_role("button", name="Dark colors").click()
    second = page.get_by_role("heading", name="Document 2 of 3")
    for _ in range(10):  # a busy Chromium is late to hand what a file has stored to the process that reads it again
        page.reload()
        if second.is_visible():
            break
        page.wait_for_timeout(1_000)
    expect(second).to_be_visible()
    assert page.get_by_label("Your name").input_value() == "Ben"
    group = page.get_by_role("article", name="Summary B").get_by_role("group", name="Fluency")
    assert group.get_by_role("radio", name="4").is_checked()
    expect(page.get_by_role("status")).to_have_text("1 of 32 ratings made.")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.get_by_label("Document", exact=True).input_value() == "1"


def test_what_is_missing_is_told(opened) -> None:
    page, _, folder = opened
    page.get_by_role("button", name="Download").click()
    assert "Enter your name first" in page.get_by_role("alert").inner_text()
    assert page.evaluate("document.activeElement.id") == "rater"
    page.keyboard.type("Cleo")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download").click()
    waiting.value.save_as(folder / "cleo.json")
    expect(page.get_by_role("alert")).to_have_text("Saved; 32 of 32 ratings are still missing.")
    assert Ratings.load(folder / "rate.key.json", [folder / "cleo.json"]).by_rater == {"Cleo": {}}


def test_digits_are_digits_where_one_writes(opened) -> None:
    page, _, _ = opened
    page.get_by_label("Your name").focus()
    page.keyboard.type("R2 D2")
    assert page.get_by_label("Your name").input_value() == "R2 D2"
    expect(page.get_by_role("status")).to_have_text("0 of 32 ratings made.")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(opened, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page, _, _ = opened
    page.emulate_media(color_scheme=theme)
    page.get_by_role("radio").nth(2).check(force=True)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing stands out at the side"
        found = axe.Axe().run(page)
        assert not found.response["violations"], found.generate_report()
