"""The page, in headless Chromium: what a person does with it, by mouse and by keyboard, and what can go wrong."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from graftlm.backbone import Backbone
from graftlm.serving.keys import Keys
from graftlm.serving.pages import FOLDER
from graftlm.serving.server import open_service
from graftlm.serving.service import Service
from graftlm.serving.settings import Settings
from graftlm.serving.state import Phase
from serving.scripted import ENDLESS, FRENCH, HOSTILE, ScriptedEngine, save_run, scripted_service
from serving.web import running
from tiny import tiny_model, tiny_tokenizer

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE = 60_000  # milliseconds, for busy machines
TEA = "🍵 Tea is old. Most people who drink tea live in Asia. Tea came to the valley with two brothers. It is hot."
QUERY = "Are you sure it is pretty?"
SCHEMES = {"light": (1280, 900), "dark": (320, 640)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on PATH: install it, as with apt-get install chromium")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        except PlaywrightError as error:
            pytest.skip(f"{path} does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return scripted_service(tmp_path_factory.mktemp("grafts"))


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with running(service) as address:
        yield address


@pytest.fixture
def engine(service: Service) -> ScriptedEngine:
    assert isinstance(service.engine, ScriptedEngine)
    service.engine.asks.clear()
    service.engine.cancelled.clear()
    return service.engine


@pytest.fixture
def complaints() -> list[str]:
    """What a page says on its console that is no plain note; a test may take away what it expects."""
    return []


@pytest.fixture
def page(browser: Browser, address: str, complaints: list[str]) -> Iterator[Page]:
    with opened(browser, address, complaints) as page:
        yield page
    assert complaints == []


class opened:  # noqa: N801  # a context manager
    """The page in a context of its own; `answers` come in the place of the server's, by the pattern of their path."""

    def __init__(
        self, browser: Browser, address: str, complaints: list[str], answers: Any = None, **options: Any
    ) -> None:
        self.context = browser.new_context(reduced_motion="reduce", **options)
        self.context.set_default_timeout(PATIENCE)
        self.page, self.address, self.complaints = self.context.new_page(), address, complaints
        self.answers = answers or {}

    def __enter__(self) -> Page:
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type != "log" else None)
        self.page.on(
            "request", lambda sent: None if sent.url.startswith(self.address) else self.complaints.append(sent.url)
        )
        for path, answer in self.answers.items():
            self.page.route(path, lambda route, _, answer=answer: route.fulfill(json=answer))
        self.page.goto(f"{self.address}/")
        return self.page

    def __exit__(self, *error: object) -> None:
        self.context.close()


def column(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=name, exact=True)


def generate(page: Page, prompt: str) -> None:
    page.get_by_label(re.compile("Text to continue|Your message")).fill(prompt)
    page.get_by_role("button", name="Generate").click()


def view(page: Page, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()


def begin(page: Page, text: str, **fields: str) -> None:
    view(page, "Clarify")
    page.get_by_label("Your text").fill(text)
    page.get_by_label("Write in").select_option("fr")
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Begin", exact=True).click()


# The files


def test_no_file_reads_text_as_html_or_asks_elsewhere() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file
        assert not re.search(r"@import|url\(", text), file


def test_the_page_needs_no_inline_script_or_style() -> None:
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))
    assert "script-src 'self'; style-src 'self'" in text


# Compare


def test_models_write_side_by_side(page: Page, engine: ScriptedEngine) -> None:
    expect(column(page, "bare backbone")).to_be_visible()
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Add a model").click()
    third = page.locator("article.column").nth(2)
    third.get_by_role("checkbox", name="danish").check()
    third.get_by_role("checkbox", name="router").check()
    generate(page, "Hello. ")
    for name, model in {"bare backbone": "tiny", "danish": "danish", "danish + router": "danish+router"}.items():
        expect(column(page, name).locator(".tokens")).to_have_text(
            f"Hello. This is {model}, née here. It writes 2 lines."
        )
        expect(column(page, name).get_by_role("status")).to_contain_text("It ended by itself")
    assert {(ask.model, ask.seed, ask.temperature, ask.max_tokens) for ask in engine.asks} == {
        (model, 7, 0.5, 80) for model in ("tiny", "danish", "danish+router")
    }


def test_tokens_are_coloured_by_what_wrote_them_with_values_on_hover_and_focus(page: Page) -> None:
    page.locator("article.column").nth(1).get_by_role("checkbox", name="danish").uncheck()
    page.locator("article.column").nth(1).get_by_role("checkbox", name="router").check()
    generate(page, "Hello. ")
    router = column(page, "router")
    expect(router.get_by_role("list", name="Legend")).to_contain_text("law")
    tokens = router.locator(".token:not(.swatch)")
    looks = [(tokens.nth(place).get_attribute("class") or "").split()[1:] for place in range(5)]
    assert len({tuple(look) for look in looks}) == 2  # law and poetry, each with a colour and an underline of its own
    lines = [tokens.nth(place).evaluate("one => getComputedStyle(one).textDecoration") for place in (0, 4)]
    assert lines[0] != lines[1]
    tip = page.get_by_role("tooltip")
    tokens.nth(2).hover()
    expect(tip).to_contain_text("law0.50")
    expect(tip).to_contain_text("probability")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.mouse.move(0, 0)
    router.get_by_role("group", name="Text of router").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("law0.75")
    expect(page.locator("#main > .hidden[role=status]")).to_contain_text("law 0.75, poetry 0.23")
    expect(router.locator(".here")).to_have_count(1)


def test_tokens_may_be_coloured_by_surprise_or_not_at_all(page: Page) -> None:
    generate(page, "Hello. ")
    expect(column(page, "danish").get_by_role("list", name="Legend")).to_contain_text("open gates")
    page.get_by_label("Colour tokens by").select_option("surprise")
    expect(column(page, "bare backbone").get_by_role("list", name="Legend")).to_contain_text("bits a token")
    assert column(page, "bare backbone").locator(".tokens .surprise").count() > 5
    page.get_by_label("Colour tokens by").select_option("none")
    expect(page.locator(".tokens .surprise, .tokens [class*=pattern]")).to_have_count(0)


def test_stop_ends_what_is_written(page: Page, engine: ScriptedEngine) -> None:
    page.get_by_label("Text to continue").fill(f"Go on {ENDLESS} ")
    page.keyboard.press("Control+Enter")
    expect(column(page, "danish").get_by_role("status")).to_contain_text("so far")
    page.get_by_role("button", name="Stop").click()
    for name in ("bare backbone", "danish"):
        expect(column(page, name).get_by_role("status")).to_contain_text("You stopped it")
    assert engine.cancelled.wait(20)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()


def test_a_model_s_error_stands_in_its_own_column(page: Page, complaints: list[str]) -> None:
    generate(page, "wrong ")
    expect(column(page, "danish").get_by_role("alert")).to_have_text("The graft danish can't: leave it out.")
    expect(column(page, "bare backbone").locator(".tokens")).to_contain_text("This is tiny")
    expect(column(page, "bare backbone").get_by_role("alert")).to_be_hidden()
    assert all("status of 400" in one for one in complaints)  # Chromium tells of every such answer
    complaints.clear()


def test_a_chat_goes_on_with_what_was_said(page: Page, engine: ScriptedEngine) -> None:
    page.get_by_label("Chat").check()
    generate(page, "Hello.")
    expect(column(page, "danish").locator(".tokens")).to_contain_text("This is danish")
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    generate(page, "And now?")
    expect(column(page, "danish").locator(".tokens")).to_have_count(2)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    said = [engine.prompts.tokenizer.decode(list(ask.prompt)) for ask in engine.asks if ask.model == "danish"]
    assert re.search(r"User: Hello\.\nAssistant: This is danish, née.*User: And now\?\nAssistant:$", said[1], re.DOTALL)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".tokens")).to_have_count(0)


def test_an_empty_prompt_and_a_server_that_is_gone_are_told_in_a_sentence(page: Page, complaints: list[str]) -> None:
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#compare-error")).to_have_text("There is nothing to answer: write a text first.")
    page.route("**/v1/completions", lambda route: route.abort())
    generate(page, "Hello.")
    expect(column(page, "danish").get_by_role("alert")).to_have_text(
        "The server can’t be reached: is it still running?"
    )
    page.unroute("**/v1/completions")
    begun = 'data: {"choices": [{"text": "Be", "index": 0}]}\n\n'
    page.route("**/v1/completions", lambda route: route.fulfill(body=begun, content_type="text/event-stream"))
    page.get_by_role("button", name="Generate").click()
    expect(column(page, "danish").get_by_role("alert")).to_contain_text("broke off")
    assert all("ERR_FAILED" in one for one in complaints)
    complaints.clear()


# What a server says is text


def test_nothing_that_a_server_says_is_read_as_html(page: Page) -> None:
    generate(page, "hostile ")
    expect(column(page, "danish").locator(".tokens")).to_contain_text(HOSTILE)
    begin(page, HOSTILE + " Are you sure?")
    expect(page.locator(".talk")).to_contain_text(HOSTILE)
    view(page, "Summarize")
    page.get_by_label("Text to summarise").fill(f"Tea is {HOSTILE} old. It is hot.")
    page.get_by_role("button", name="Summarise").click()
    expect(page.locator(".source")).to_contain_text(HOSTILE)
    view(page, "Grafts")
    page.get_by_role("button", name="Show the report").first.click()
    expect(page.locator(".report table")).to_contain_text(f"LoRA {HOSTILE[:8]}")
    assert page.locator("main script, main img").count() == 0
    assert "owned" not in page.title()


def test_names_of_grafts_are_text_too(browser: Browser, address: str, complaints: list[str]) -> None:
    name = HOSTILE.replace('"', "'")
    unknown = dict.fromkeys(("steps", "tokens", "learned", "forgotten"))
    backbone, graft = {"name": name, "chat": True, "context": None}, {"name": name, "label": name, "parameters": 1}
    answers = {
        "**/v1/models": {"data": [{"id": "tiny"}, {"id": name}]},
        "**/v1/graftlm/grafts": {"backbone": backbone, "data": [graft | unknown]},
    }
    with opened(browser, address, complaints, answers) as page:
        expect(column(page, name)).to_be_visible()
        view(page, "Grafts")
        expect(page.get_by_role("heading", name=name)).to_be_visible()
        assert "owned" not in page.title()
    assert complaints == []


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
    page.get_by_label("Text to summarise").fill(TEA)
    page.get_by_label("Sentences at most").fill("2")
    page.get_by_role("button", name="Summarise").click()
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
    said = engine.say
    engine.say = lambda prompt, ask: "Most people who drink tea live in Asia. Zebras yawn 17 times."
    view(page, "Summarize")
    page.get_by_label("Text to summarise").fill(TEA)
    page.get_by_label("Written by").select_option("danish")
    page.get_by_role("button", name="Summarise").click()
    expect(page.locator(".sentences li").nth(1)).to_contain_text("no passage is near")
    expect(page.locator(".sentences li").nth(0).get_by_role("link")).to_be_visible()
    expect(page.locator(".notes")).to_contain_text("Not in the source: 17")
    engine.say = said


def test_files_are_read_by_their_ending_or_refused(page: Page) -> None:
    view(page, "Summarize")
    file, error = page.get_by_label("Choose a file"), page.locator("#summarize-error")
    file.set_input_files({"name": "tea.md", "mimeType": "", "buffer": b"# Tea\n\nTea is old."})
    expect(page.get_by_label("Text to summarise")).to_have_value("# Tea\n\nTea is old.")
    expect(page.get_by_label("Read it as")).to_have_value("markdown")
    file.set_input_files({"name": "tea.pdf", "mimeType": "", "buffer": b"%PDF"})
    expect(error).to_contain_text("tea.pdf is no text that can be read here")
    file.set_input_files({"name": "tea.txt", "mimeType": "", "buffer": b"\xff\xfe"})
    expect(error).to_have_text("tea.txt is not UTF-8 text: convert it first.")
    expect(page.get_by_label("Text to summarise")).to_have_value("# Tea\n\nTea is old.")


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
    guarded = dataclasses.replace(service, keys=Keys([("anna", key)]), phase=Phase())
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


@pytest.mark.parametrize("scheme", SCHEMES)
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
        page.get_by_label("Text to summarise").fill(TEA)
        page.get_by_role("button", name="Summarise").click()
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


# With a model


def test_a_real_model_writes_on_the_page(browser: Browser, tmp_path: Path, complaints: list[str]) -> None:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    graft = save_run(backbone, tmp_path)
    with (
        running(open_service(backbone, {"danish": graft}, settings=Settings(port=0))) as address,
        opened(browser, address, complaints) as page,
    ):
        page.get_by_role("spinbutton", name="Tokens at most").fill("12")
        generate(page, "The quick brown fox")
        for name in ("bare backbone", "danish"):
            expect(column(page, name).get_by_role("status")).to_contain_text(re.compile("It (ended|reached)"))
            expect(column(page, name).locator(".tokens")).to_contain_text(
                re.compile("^The quick brown fox.+", re.DOTALL)
            )
    assert complaints == []
