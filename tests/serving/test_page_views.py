"""The page's other views, in headless Chromium: clarify, summarize, grafts; the key, colours, accessibility."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from graftlm.serving.service import Service
from graftlm.serving.settings import ApiKeys
from serving.browsing import QUERY, TEA, begin, column, generate, opened, view
from serving.scripted import FRENCH, ScriptedEngine
from serving.web import changed, running

SCHEMES = {"light": (1280, 900), "dark": (320, 640)}


# Clarify


def test_a_conversation_goes_to_its_end_over_reloads(page: Page) -> None:
    begin(page, QUERY, Ask_above="0.1")
    expect(page.get_by_role("heading", name='Who is "you"?')).to_be_focused()
    expect(page.locator(".question")).to_contain_text("expected to bring 1.00 bits")
    page.reload()
    expect(page.get_by_label("Your text")).to_have_value(QUERY)
    page.get_by_text("What would be written under each answer").click()
    expect(page.get_by_role("row", name="a stranger")).to_contain_text(FRENCH["a stranger"])
    page.get_by_role("button", name="Answer", exact=True).click()
    expect(page.locator("#clarify-error")).to_contain_text("There is no answer yet")
    page.get_by_label("a stranger").check()
    page.get_by_role("button", name="Answer", exact=True).click()
    result = page.get_by_role("article", name="The result")
    expect(result).to_contain_text(FRENCH["a stranger"])
    expect(result).to_contain_text(re.compile(r"It cost 3 calls, [\d,]+ tokens read and \d+ tokens written\."))
    expect(page.get_by_role("heading", name="The result")).to_be_focused()
    page.reload()
    expect(page.get_by_role("article", name="The result")).to_contain_text(FRENCH["a stranger"])
    page.get_by_role("button", name="Begin anew").click()
    page.reload()
    expect(page.get_by_role("article", name="The result")).to_have_count(0)


def test_a_question_can_be_skipped_or_answered_in_own_words(page: Page) -> None:
    begin(page, QUERY)
    expect(page.locator(".question")).to_contain_text("was not measured")
    page.get_by_role("button", name="Skip the question").click()
    expect(page.get_by_role("article", name="The result")).to_contain_text("written from the text alone")
    begin(page, QUERY)
    page.get_by_label("Or in your own words").fill("my aunt")
    page.keyboard.press("Enter")
    expect(page.locator(".talk")).to_contain_text("my aunt")
    expect(page.get_by_role("article", name="The result")).to_contain_text("written with your answers")


def test_what_is_refused_leaves_the_form_as_it_was(page: Page, complaints: list[str]) -> None:
    begin(page, "Où est le chat que tu as vu ?")
    expect(page.locator("#clarify-error")).to_contain_text("French")
    expect(page.get_by_label("Your text")).to_have_value(re.compile("chat"))
    expect(page.get_by_role("button", name="Begin", exact=True)).to_be_enabled()
    complaints.clear()


# Summarize


def test_sentences_and_passages_lead_to_each_other(page: Page) -> None:
    view(page, "Summarize")
    page.get_by_label("Text to summarize").fill(TEA)
    page.get_by_label("Sentences at most").fill("2")
    page.get_by_role("button", name="Summarize").click()
    sentences, passages = page.locator(".sentences a"), page.locator(".source mark a")
    expect(sentences).to_have_count(2)
    for place in range(2):
        assert sentences.nth(place).inner_text() == passages.nth(place).inner_text()
    assert (
        page.locator(".source").evaluate(
            "one => [...one.childNodes].map((x) => x.firstChild?.textContent ?? x.textContent).join('')"
        )
        == TEA
    )
    sentences.nth(1).hover()
    expect(page.locator(".lit")).to_have_count(2)
    sentences.nth(0).focus()
    page.keyboard.press("Enter")
    expect(passages.nth(0)).to_be_focused()
    expect(passages.nth(0)).to_have_class("lit")
    page.keyboard.press("Enter")
    expect(sentences.nth(0)).to_be_focused()


def test_a_written_summary_says_which_sentences_have_no_source(page: Page, engine: ScriptedEngine) -> None:
    engine.say = lambda prompt, request: "Most people who drink tea live in Asia. Zebras yawn 17 times."
    view(page, "Summarize")
    page.get_by_label("Text to summarize").fill(TEA)
    page.get_by_label("Written by").select_option("danish")
    page.get_by_role("button", name="Summarize").click()
    expect(page.locator(".sentences li").nth(1).locator(".unsupported")).to_have_text("unsupported")
    expect(page.locator(".sentences li").nth(0).get_by_role("link")).to_be_visible()
    expect(page.locator(".sentences li").nth(0)).to_contain_text("verbatim")
    expect(page.locator(".notes")).to_contain_text("Not in the source: 17")


def test_files_are_read_by_their_ending_or_refused(page: Page) -> None:
    view(page, "Summarize")
    file, error = page.get_by_label("Choose a file"), page.locator("#summarize-error")
    file.set_input_files({"name": "tea.md", "mimeType": "", "buffer": b"# Tea\n\nTea is old."})
    expect(page.get_by_label("Text to summarize")).to_have_value("# Tea\n\nTea is old.")
    expect(page.get_by_label("Read it as")).to_have_value("markdown")
    file.set_input_files({"name": "tea.pdf", "mimeType": "", "buffer": b"%PDF"})
    expect(error).to_contain_text("tea.pdf is no text that can be read here")
    file.set_input_files({"name": "tea.txt", "mimeType": "", "buffer": b"\xff\xfe"})
    expect(error).to_have_text("tea.txt is not UTF-8 text: convert it first.")
    expect(page.get_by_label("Text to summarize")).to_have_value("# Tea\n\nTea is old.")


# Grafts, key, colours


def test_a_report_is_a_plot_with_a_table_beside_it(page: Page) -> None:
    view(page, "Grafts")
    danish, router = page.get_by_role("article", name="danish"), page.get_by_role("article", name="router")
    danish.get_by_role("button", name="Show the report").click()
    expect(danish.get_by_role("img")).to_have_accessible_name(re.compile("fine-tuning: learned 1.270, forgot 0.221"))
    expect(danish.locator(".plot .mark")).to_have_count(3)
    expect(danish.locator(".plot .path")).to_have_count(3)
    expect(danish.locator(".report").get_by_role("row", name="this graft")).to_contain_text("0.004 [−0.016, 0.034]")
    router.get_by_role("button", name="Show the report").click()
    expect(router.locator(".plot .mark")).to_have_count(1)
    danish.get_by_role("button", name="Hide the report").click()
    expect(danish.locator(".plot")).to_be_hidden()


def test_a_server_with_keys_gets_one_that_stays_in_the_tab(
    browser: Browser, service: Service, complaints: list[str]
) -> None:
    key = "a-key-of-some-length"
    guarded = changed(service, keys=ApiKeys([("anna", key)]), closing=threading.Event())
    with running(guarded) as address, opened(browser, address, complaints) as page:
        expect(page.locator("#key-note")).to_contain_text("The API key is missing")
        page.get_by_label("API key").fill("another-key-of-some-length")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("is not one that this server knows")
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        expect(column(page, "danish")).to_be_visible()
        expect(page.get_by_label("API key")).to_be_hidden()
        page.reload()
        generate(page, "Hello. ")
        expect(column(page, "danish").locator(".tokens")).to_contain_text("This is danish")
        assert page.evaluate("() => Object.values(localStorage).join('')").count(key) == 0
        assert all("status of 401" in one for one in complaints)


def test_a_late_answer_to_an_old_key_does_not_ask_again(
    browser: Browser, service: Service, complaints: list[str]
) -> None:
    key, held = "a-key-of-some-length", []
    guarded = changed(service, keys=ApiKeys([("anna", key)]), closing=threading.Event())
    with running(guarded) as address, opened(browser, address, complaints) as page:
        expect(page.locator("#key-note")).to_contain_text("The API key is missing")
        page.route("**/v1/models", lambda route: held.append(route), times=1)
        page.get_by_label("API key").fill("another-key-of-some-length")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("is not one that this server knows")
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        expect(column(page, "danish")).to_be_visible()
        with page.expect_response("**/v1/models") as late:
            held[0].continue_()
        assert late.value.status == 401
        expect(page.get_by_label("API key")).to_be_hidden()
        assert all("status of 401" in one for one in complaints)


def test_colours_follow_the_system_and_the_switch(browser: Browser, address: str, complaints: list[str]) -> None:
    def paper(page: Page) -> str:
        return page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")

    with opened(browser, address, complaints, color_scheme="dark") as page:
        dark = paper(page)
        page.get_by_label("Light").check()
        light = paper(page)
        assert light != dark
        page.reload()
        assert paper(page) == light
        page.get_by_label("Auto").check()
        assert paper(page) == dark
    assert complaints == []


@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.exhaustive)])
def test_every_view_passes_axe_and_fits_the_screen(
    browser: Browser, address: str, complaints: list[str], scheme: Any
) -> None:
    width, height = SCHEMES[scheme]
    screen: Any = {"width": width, "height": height}
    with opened(browser, address, complaints, color_scheme=scheme, viewport=screen) as page:
        page.locator("article.column").nth(0).get_by_role("checkbox", name="router").check()
        generate(page, "Hello. ")
        expect(page.get_by_role("list", name="Legend")).to_have_count(2)
        check(page)
        begin(page, QUERY, Ask_above="0.1")
        page.get_by_text("What would be written under each answer").click()
        check(page)
        page.get_by_label("a stranger").check()
        page.get_by_role("button", name="Answer", exact=True).click()
        view(page, "Summarize")
        page.get_by_label("Text to summarize").fill(TEA)
        page.get_by_role("button", name="Summarize").click()
        expect(page.locator(".source mark").first).to_be_visible()
        check(page)
        view(page, "Grafts")
        page.get_by_role("button", name="Show the report").first.click()
        expect(page.locator(".plot")).to_be_visible()
        check(page)
    assert complaints == []


def check(page: Page) -> None:
    """No violation of axe's rules, and nothing wider than the screen."""
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
