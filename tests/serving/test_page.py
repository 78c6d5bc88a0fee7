"""The page, in headless Chromium: models that write side by side, and what can go wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from graftlm.backbone import Backbone
from graftlm.serving.app import PAGE_FOLDER
from graftlm.serving.service import open_service
from graftlm.serving.settings import ServerSettings
from serving.browsing import begin, column, generate, opened, view
from serving.scripted import ENDLESS, HOSTILE, ScriptedEngine, save_run
from serving.web import running
from tiny import tiny_model, tiny_tokenizer

# The files


def test_no_file_reads_text_as_html_or_asks_elsewhere() -> None:
    for file in PAGE_FOLDER.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), file
        assert not re.search(r"@import|url\(", text), file


def test_the_page_needs_no_inline_script_or_style() -> None:
    text = (PAGE_FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))
    assert "script-src 'self'; style-src 'self'" in text


def test_the_page_knows_no_limit_of_the_server_and_one_spelling() -> None:
    text = (PAGE_FOLDER / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'id="([\w-]+)"[^>]*\smax="', text)) == {"temperature", "seed", "threshold"}
    assert "maxlength" not in text
    words = " ".join(file.read_text(encoding="utf-8") for file in PAGE_FOLDER.glob("*.[hj]*"))
    assert set(re.findall(r"\b\w+is(?:e|es|ed|ing|ation)\b", words)) == {
        "Promise",
        "surprise",
    }  # American: -ize, color
    assert "colour" not in words.casefold()


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
        expect(column(page, name).get_by_role("status")).to_contain_text("The model ended the text")
    assert {(request.model, request.seed, request.temperature, request.max_tokens) for request in engine.requests} == {
        (model, 7, 0.5, 80) for model in ("tiny", "danish", "danish+router")
    }


@pytest.mark.slow
def test_nothing_can_be_asked_before_the_server_has_said_what_it_serves(page: Page) -> None:
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    page.reload()
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    expect(page.get_by_role("button", name="Add a model")).to_be_disabled()
    page.get_by_label("Text to continue").fill("Hello. ")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#compare-error")).to_contain_text("still loading")
    for name, asks in {"Clarify": "Begin", "Summarize": "Summarize"}.items():
        view(page, name)
        expect(page.get_by_role("button", name=asks)).to_be_disabled()
    (models,) = held
    models.continue_()
    for name, asks in {"Summarize": "Summarize", "Clarify": "Begin", "Compare": "Generate"}.items():
        view(page, name)
        expect(page.get_by_role("button", name=asks)).to_be_enabled()
    expect(page.locator("#compare-error")).to_be_hidden()
    page.get_by_role("button", name="Generate").click()
    expect(column(page, "danish").get_by_role("status")).to_contain_text("The model ended the text")


@pytest.mark.slow
def test_tokens_are_colored_by_what_wrote_them_with_values_on_hover_and_focus(page: Page) -> None:
    page.locator("article.column").nth(1).get_by_role("checkbox", name="danish").uncheck()
    page.locator("article.column").nth(1).get_by_role("checkbox", name="router").check()
    generate(page, "Hello. ")
    router = column(page, "router")
    expect(router.get_by_role("list", name="Legend")).to_contain_text("law")
    tokens = router.locator(".token:not(.swatch)")
    looks = [(tokens.nth(place).get_attribute("class") or "").split()[1:] for place in range(5)]
    assert len({tuple(look) for look in looks}) == 2  # law and poetry, each with a color and an underline of its own
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


@pytest.mark.slow
def test_tokens_may_be_colored_by_surprise_or_not_at_all(page: Page) -> None:
    generate(page, "Hello. ")
    expect(column(page, "danish").get_by_role("list", name="Legend")).to_contain_text("open gates")
    page.get_by_label("Color tokens by").select_option("surprise")
    expect(column(page, "bare backbone").get_by_role("list", name="Legend")).to_contain_text("bits a token")
    assert column(page, "bare backbone").locator(".tokens .surprise").count() > 5
    page.get_by_label("Color tokens by").select_option("none")
    expect(page.locator(".tokens .surprise, .tokens [class*=pattern]")).to_have_count(0)


@pytest.mark.slow
def test_stop_ends_what_is_written(page: Page, engine: ScriptedEngine) -> None:
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()  # the page knows the models
    page.get_by_label("Text to continue").fill(f"Go on {ENDLESS} ")
    page.keyboard.press("Control+Enter")
    expect(column(page, "danish").get_by_role("status")).to_contain_text("so far")
    page.get_by_role("button", name="Stop").click()
    for name in ("bare backbone", "danish"):
        expect(column(page, name).get_by_role("status")).to_contain_text("You stopped it")
    assert engine.cancelled.wait(20)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()


@pytest.mark.slow
def test_a_model_s_error_stands_in_its_own_column(page: Page, complaints: list[str]) -> None:
    generate(page, "wrong ")
    expect(column(page, "danish").get_by_role("alert")).to_have_text("The graft danish can't: leave it out.")
    expect(column(page, "bare backbone").locator(".tokens")).to_contain_text("This is tiny")
    expect(column(page, "bare backbone").get_by_role("alert")).to_be_hidden()
    assert all("status of 400" in one for one in complaints)  # Chromium tells of every such answer
    complaints.clear()


@pytest.mark.slow
def test_a_chat_goes_on_with_what_was_said(page: Page, engine: ScriptedEngine) -> None:
    page.get_by_label("Chat").check()
    generate(page, "Hello.")
    expect(column(page, "danish").locator(".tokens")).to_contain_text("This is danish")
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    generate(page, "And now?")
    expect(column(page, "danish").locator(".tokens")).to_have_count(2)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    said = [engine.tokenizer.decode(list(request.prompt)) for request in engine.requests if request.model == "danish"]
    assert re.search(r"User: Hello\.\nAssistant: This is danish, née.*User: And now\?\nAssistant:$", said[1], re.DOTALL)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".tokens")).to_have_count(0)


@pytest.mark.slow
def test_a_new_chat_forgets_an_answer_that_is_still_written(page: Page, engine: ScriptedEngine) -> None:
    page.get_by_label("Chat").check()
    generate(page, f"Go on {ENDLESS}")
    expect(column(page, "danish").get_by_role("status")).to_contain_text("so far")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    expect(column(page, "danish").get_by_role("status")).to_have_text("")
    generate(page, "Hello.")
    expect(column(page, "danish").locator(".tokens")).to_contain_text("This is danish")
    assert ENDLESS not in engine.tokenizer.decode(list(engine.requests[-1].prompt))


@pytest.mark.slow
def test_a_chat_has_a_system_prompt_and_enter_sends(page: Page, engine: ScriptedEngine) -> None:
    expect(page.get_by_label("System prompt")).to_be_hidden()
    page.get_by_label("Chat").check()
    page.get_by_label("System prompt").fill(" Answer in rhymes. ")
    page.get_by_label("Your message").fill("Hello.")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Well?")
    expect(page.get_by_label("Your message")).to_have_value("Hello.\nWell?")
    page.keyboard.press("Enter")
    expect(column(page, "danish").locator(".tokens")).to_contain_text("This is danish")
    expect(page.get_by_label("Your message")).to_have_value("")
    prompts = [engine.tokenizer.decode(list(request.prompt)) for request in engine.requests]
    assert all("Answer in rhymes.\n\nUser: Hello.\nWell?\nAssistant:" in prompt for prompt in prompts)
    page.reload()
    expect(page.get_by_label("System prompt")).to_have_value(" Answer in rhymes. ")
    page.get_by_label("Your message").fill("half a word")
    page.get_by_label("Your message").dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(page.get_by_label("Your message")).to_have_value("half a word")


@pytest.mark.slow
def test_an_empty_prompt_and_a_server_that_is_gone_are_told_in_a_sentence(page: Page, complaints: list[str]) -> None:
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#compare-error")).to_have_text("The text is empty: write one first.")
    page.route("**/v1/completions", lambda route: route.abort())
    generate(page, "Hello.")
    expect(column(page, "danish").get_by_role("alert")).to_have_text(
        "The server can’t be reached: is it still running?"
    )
    page.unroute("**/v1/completions")
    begun = 'data: {"choices": [{"text": "Be", "index": 0}]}\n\n'
    page.route("**/v1/completions", lambda route: route.fulfill(body=begun, content_type="text/event-stream"))
    page.get_by_role("button", name="Generate").click()
    expect(column(page, "danish").get_by_role("alert")).to_contain_text("is incomplete")
    assert all("ERR_FAILED" in one for one in complaints)
    complaints.clear()


# What a server says is text


def test_nothing_that_a_server_says_is_read_as_html(page: Page) -> None:
    generate(page, "hostile ")
    expect(column(page, "danish").locator(".tokens")).to_contain_text(HOSTILE)
    begin(page, HOSTILE + " Are you sure?")
    expect(page.locator(".talk")).to_contain_text(HOSTILE)
    view(page, "Summarize")
    page.get_by_label("Text to summarize").fill(f"Tea is {HOSTILE} old. It is hot.")
    page.get_by_role("button", name="Summarize").click()
    expect(page.locator(".source")).to_contain_text(HOSTILE)
    view(page, "Grafts")
    page.get_by_role("button", name="Show the report").first.click()
    expect(page.locator(".report table")).to_contain_text(f"LoRA {HOSTILE[:8]}")
    assert page.locator("main script, main img").count() == 0
    assert "owned" not in page.title()


@pytest.mark.slow
def test_names_of_grafts_are_text_too(browser: Browser, address: str, complaints: list[str]) -> None:
    name = HOSTILE.replace('"', "'")
    unknown = dict.fromkeys(("steps", "tokens", "learned", "forgotten", "audit"))
    limits = dict.fromkeys(("max_tokens", "text", "query", "answer", "questions", "sentences", "document_bytes"), 100)
    backbone = {"name": name, "kind": "causal-lm", "chat": True, "context": None}
    graft = {"name": name, "backbone": name, "label": name, "parameters": 1}
    answers = {
        "**/v1/models": {"data": [{"id": "tiny"}, {"id": name}]},
        "**/v1/graftlm/grafts": {"backbones": [backbone], "data": [graft | unknown], "limits": limits},
    }
    with opened(browser, address, complaints, answers) as page:
        expect(column(page, name)).to_be_visible()
        view(page, "Grafts")
        expect(page.get_by_role("heading", name=name)).to_be_visible()
        assert "owned" not in page.title()
    assert complaints == []


# With a model


@pytest.mark.slow
def test_a_real_model_writes_on_the_page(browser: Browser, tmp_path: Path, complaints: list[str]) -> None:
    backbone = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny")
    graft = save_run(backbone, tmp_path)
    with (
        running(open_service(backbone, {"danish": graft}, settings=ServerSettings(port=0))) as address,
        opened(browser, address, complaints) as page,
    ):
        page.get_by_role("spinbutton", name="Tokens at most").fill("12")
        generate(page, "The quick brown fox")
        for name in ("bare backbone", "danish"):
            expect(column(page, name).get_by_role("status")).to_contain_text(
                re.compile("ended the text|length was reached")
            )
            expect(column(page, name).locator(".tokens")).to_contain_text(
                re.compile("^The quick brown fox.+", re.DOTALL)
            )
    assert complaints == []
