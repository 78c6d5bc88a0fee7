"""The page's other views, in headless Chromium: clarify, summarize, grafts; the key, colors, accessibility."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from graftlm.evaluation import Results
from graftlm.evaluation.audit import Audit
from graftlm.evaluation.audit.passages import Passage, PassageToken
from graftlm.evaluation.chat_answers import ChatAnswer, ChatQuestion
from graftlm.evaluation.results import Row
from graftlm.serving import clarification
from graftlm.serving.service import Service
from graftlm.serving.settings import ApiKeys
from serving.browsing import QUERY, TEA, begin, column, generate, opened, view
from serving.scripted import ENDLESS, FRENCH, HOSTILE, ScriptedEngine
from serving.web import changed, running
from summarize.tools import write_pdf

pytestmark = pytest.mark.slow  # a browser, and processes that read documents

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
    expect(page.locator("#clarify-error")).to_contain_text("The answer is missing")
    page.get_by_label("a stranger").check()
    page.get_by_role("button", name="Answer", exact=True).click()
    result = page.get_by_role("article", name="The result")
    expect(result).to_contain_text(FRENCH["a stranger"])
    expect(result).to_contain_text(re.compile(r"It cost 3 calls, [\d,]+ tokens read and \d+ tokens written\."))
    expect(page.get_by_role("heading", name="The result")).to_be_focused()
    page.reload()
    expect(page.get_by_role("article", name="The result")).to_contain_text(FRENCH["a stranger"])
    page.get_by_role("button", name="Start again").click()
    page.reload()
    expect(page.get_by_role("article", name="The result")).to_have_count(0)


def test_a_question_can_be_skipped_or_answered_in_own_words(page: Page) -> None:
    begin(page, QUERY)
    expect(page.locator(".question")).to_contain_text("was not measured")
    page.get_by_role("button", name="Skip the question").click()
    expect(page.get_by_role("article", name="The result")).to_contain_text("Written from the text alone")
    begin(page, QUERY)
    page.get_by_label("Or in your own words").fill("my aunt")
    page.keyboard.press("Enter")
    expect(page.locator(".talk")).to_contain_text("my aunt")
    expect(page.get_by_role("article", name="The result")).to_contain_text("Written with your answers")


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
    file.set_input_files({"name": "tea.docx", "mimeType": "", "buffer": b"PK"})
    expect(error).to_contain_text("tea.docx")
    file.set_input_files({"name": "tea.txt", "mimeType": "", "buffer": b"\xff\xfe"})
    expect(error).to_have_text("tea.txt is not UTF-8 text: convert it first.")
    expect(page.get_by_label("Text to summarize")).to_have_value("# Tea\n\nTea is old.")


def test_a_pdf_file_is_sent_whole_and_shown_by_its_pages(page: Page, tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "tea.pdf", TEA.removeprefix("🍵 "), "A merchant who never drank any wrote this page.")
    view(page, "Summarize")
    page.get_by_label("Text to summarize").fill("An older text.")
    page.get_by_label("Choose a file").set_input_files(path)
    expect(page.locator("#source-file")).to_contain_text(f"tea.pdf, {path.stat().st_size:,} bytes")
    expect(page.get_by_label("Text to summarize")).to_be_hidden()
    page.get_by_label("Sentences at most").fill("9")
    page.get_by_role("button", name="Summarize").click()
    expect(page.locator(".source .page")).to_have_text(["Page 1", "Page 2"])
    expect(page.locator(".source mark a").last).to_have_text("A merchant who never drank any wrote this page.")
    page.locator(".sentences a").last.click()
    expect(page.locator(".source mark a").last).to_be_focused()
    page.get_by_role("button", name="Remove the file").click()
    expect(page.get_by_label("Text to summarize")).to_have_value("")
    expect(page.get_by_label("Read it as")).to_be_enabled()


def test_a_summary_is_shown_while_it_is_written(page: Page, engine: ScriptedEngine) -> None:
    engine.say = lambda prompt, request: "## Tea\n\nMost people *drink* tea."
    view(page, "Summarize")
    page.get_by_label("Text to summarize").fill(f"Most people who drink tea live in Asia {ENDLESS}.")
    page.get_by_label("Written by").select_option("danish")
    page.get_by_role("button", name="Summarize").click()
    expect(page.get_by_role("status").filter(has_text="danish is writing")).to_be_visible()
    expect(page.locator("#draft em")).to_have_text("drink")
    expect(page.locator("#draft h3")).to_have_text("Tea")
    expect(page.locator(".source mark")).to_have_text(re.compile("^Most people"))
    page.locator("#view-summarize").get_by_role("button", name="Stop").click()
    expect(page.locator("#summarize-error")).to_have_text("You stopped it.")
    expect(page.locator("#draft em")).to_have_text("drink")
    assert engine.cancelled.wait(20)


def summarized(page: Page, text: str, sentences: list[str], form: str = "text", writer: str | None = None) -> None:
    """Summarize a text by an answer that has these sentences of it as its extract."""
    extract = [
        {"index": place, "text": one, "start": text.index(one), "end": text.index(one) + len(one)}
        for place, one in enumerate(sentences)
    ]
    figures = {"words": 1, "bigrams": 1, "numbers": None, "names": None, "missing": []}
    whole = {"extract": {"sentences": extract, "selector": "hand"}, "links": [], "writer": writer, "notes": []}
    event = json.dumps(whole | {"summary": "", "faithfulness": figures, "format": form})
    body = f"data: {event}\n\ndata: [DONE]\n\n"
    page.route("**/summarize", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    view(page, "Summarize")
    page.get_by_label("Text to summarize").fill(text)
    page.get_by_label("Read it as").select_option(form)
    page.get_by_role("button", name="Summarize").click()
    expect(page.locator(".sentences li")).to_have_count(len(sentences))


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_the_source_opens_at_its_first_passage(page: Page, form: str) -> None:
    text = "Nothing of interest.\n\n" * 200 + "Tea is **old**. It is hot.\n\n" + "Nothing more.\n\n" * 200
    summarized(page, text, ["It is hot."], form)
    source, passage = page.locator(".source").bounding_box(), page.locator(".source mark").bounding_box()
    assert source is not None
    assert passage is not None
    assert 0 < passage["y"] - source["y"] < source["height"] / 3


MARKDOWN = """# Tea & <b>more</b>

Tea is an **old** drink, and [most people](javascript:alert(1)) who drink it live in *Asia*.

- It came with `two <i>brothers</i>`, who carried it.
1. snake_case_names stay, 2 * 3 * 4 too

| leaf | price |
|---|---|
| green | **12** |

```html
<script>document.title = "owned"</script>
```

![x](x" onerror="document.title='owned'") <img src=x onerror="document.title='owned'"> \\*no\\*
"""


def test_markdown_is_drawn_and_keeps_its_passages(page: Page) -> None:
    passages = ["Tea is an **old** drink, and [most people](javascript:alert(1)) who drink it live in *Asia*."]
    passages += ["It came with `two <i>brothers</i>`, who carried it.", "**12**"]
    summarized(page, MARKDOWN, passages, "markdown")
    source = page.locator(".source")
    for place, told in enumerate(
        ["Tea is an old drink, and most people who drink it live in Asia.", "It came", "12"], 1
    ):
        parts = source.locator(f"mark[data-number='{place}'] a").all_inner_texts()
        assert "".join(parts).startswith(told)
        expect(source.locator(f"#source-{place}")).to_have_count(1)
        expect(source.locator(f"mark[data-number='{place}'] sup")).to_have_text([str(place)])
    expect(source.locator("h3")).to_have_text("Tea & <b>more</b>")
    expect(source.locator("strong")).to_have_text(["old", "123"])  # 12, and the passage's number
    expect(source.locator("li")).to_have_count(2)
    expect(source.locator("li").nth(1)).to_have_text("snake_case_names stay, 2 * 3 * 4 too")
    expect(source.locator("th")).to_have_text(["leaf", "price"])
    expect(source.locator("pre")).to_have_text('<script>document.title = "owned"</script>')
    expect(source).to_contain_text("*no*")
    page.locator(".sentences a").nth(1).click()
    expect(source.locator("#source-2")).to_be_focused()


def test_markdown_makes_no_html_and_no_address(page: Page) -> None:
    summarized(page, MARKDOWN, ["Tea is an **old** drink"], "markdown", writer="danish")
    assert page.locator(".source :is(script, img, b, i, iframe)").count() == 0
    assert page.locator(".source a:not([href^='#summary-'])").count() == 0
    kept = {"class", "id", "href", "title", "data-passage", "data-number", "tabindex", "value", "aria-hidden"}
    names = page.locator(".source *").evaluate_all("all => all.flatMap((one) => one.getAttributeNames())")
    assert set(names) <= kept
    assert "owned" not in page.title()


def test_a_passage_that_markdown_hides_shows_the_text_as_it_is(page: Page) -> None:
    summarized(page, MARKDOWN, ["javascript:alert(1)"], "markdown")
    expect(page.locator(".source mark a")).to_have_text("javascript:alert(1)")
    expect(page.locator(".source")).to_contain_text("# Tea & <b>more</b>")


def test_markdown_of_any_form_is_drawn_at_once_and_with_its_empty_cells(page: Page) -> None:
    blanks = " " * 5000
    worst = (
        f"# a{blanks}b #\n\na|b\n-{blanks}x\n\na{'`' * 5000}\n\n{'**a ' * 2000}\n\n|1||3|\n|-|:-:|-|\n|4|\\||6|\n\nTea."
    )
    began = time.monotonic()
    summarized(page, worst, ["Tea."], "markdown")
    assert time.monotonic() - began < 20  # minutes before
    source = page.locator(".source")
    expect(source.locator("h3")).to_have_text(re.compile("^a +b$"))
    expect(source.locator("th")).to_have_text(["1", "", "3"])
    expect(source.locator("td")).to_have_text(["4", "|", "6"])


# Limits and names


def test_fields_take_what_the_server_takes(page: Page, service: Service, complaints: list[str]) -> None:
    most = str(service.limits.max_tokens)
    for name, view_name in {"most": "Compare", "clarify-most": "Clarify", "summary-most": "Summarize"}.items():
        view(page, view_name)
        expect(page.locator(f"#{name}")).to_have_attribute("max", most)
    expect(page.locator("#summary-most")).to_have_value(most)  # 160 at first
    view(page, "Clarify")
    expect(page.get_by_label("Questions at most")).to_have_attribute("max", str(clarification.MAX_QUESTIONS))
    page.get_by_label("Your text").fill("🍵" * (clarification.MAX_QUERY + 1))
    page.get_by_role("button", name="Begin", exact=True).click()
    expect(page.locator("#clarify-error")).to_have_text(re.compile("20,001 characters.*20,000"))
    view(page, "Summarize")
    large = {"name": "a.pdf", "mimeType": "", "buffer": b"x" * (6 * service.settings.body_bytes)}
    page.get_by_label("Choose a file").set_input_files(large)
    expect(page.locator("#summarize-error")).to_have_text(re.compile("6,291,456 bytes.*6,289,920"))


def test_no_name_is_cut_without_a_title(browser: Browser, address: str, complaints: list[str]) -> None:
    long = "a-graft-with-the-longest-name-that-a-folder-may-have-0123456789"
    measured = {"learned": None, "forgotten": None, "steps": 1, "tokens": 1, "audit": False}
    graft = {"name": long, "backbone": "tiny", "label": "neutral residues", "parameters": 1} | measured
    limits = {"max_tokens": 100, "text": 100, "query": 100, "answer": 100, "questions": 5, "sentences": 10}
    answers = {
        "**/v1/models": {"data": [{"id": "tiny"}, {"id": long}]},
        "**/v1/graftlm/grafts": {
            "backbones": [{"name": "tiny", "kind": "causal-lm", "chat": True, "context": None}],
            "data": [graft],
            "limits": limits | {"document_bytes": 1000},
        },
    }
    with opened(browser, address, complaints, answers, viewport={"width": 390, "height": 800}) as page:
        for name, field in (("Clarify", "#clarify-model"), ("Summarize", "#writer")):
            view(page, name)
            choice = page.locator(field)  # what is visible may be of the view before
            choice.select_option(long)
            expect(choice).to_have_attribute("title", long)
        for name in ("Compare", "Clarify", "Summarize", "Grafts"):
            view(page, name)
            assert page.evaluate(CUT) == []
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert complaints == []


CUT = """() => [...document.querySelectorAll("main *")].filter((one) => one.checkVisibility() && !one.closest("[title]")
  && one.scrollWidth > one.clientWidth + 1 && ["hidden", "clip"].includes(getComputedStyle(one).overflowX)
  && !one.matches(".hidden, [type=file]")).map((one) => one.outerHTML)"""


# Grafts, key, colors


def test_the_texts_of_a_plot_stand_apart(page: Page) -> None:
    boxes = page.evaluate(PLOT)
    titles = [box for box in boxes if box["axis"]]
    assert len(titles) == 2
    assert any("−0.0" in box["text"] for box in boxes)
    for title in titles:
        for other in boxes:
            apart = (
                title["right"] <= other["left"] or other["right"] <= title["left"]
                or title["bottom"] <= other["top"] or other["bottom"] <= title["top"]
            )  # fmt: skip
            assert apart or title is other, (title, other)


PLOT = """async () => {
  const { plot } = await import("./plot.js");
  const at = (mean) => ({ mean, low: mean - 0.01, high: mean + 0.01 });
  const point = (id, learned, forgotten) => ({ id, label: id, learned: at(learned), forgotten: at(forgotten) });
  const points = [point("a", -0.055, -0.05), point("b", 0.05, 0.02)];
  const drawn = plot(points, {}, "a plot");
  document.getElementById("main").append(drawn);
  return [...drawn.querySelectorAll("text")].map((one) => {
    const { left, right, top, bottom } = one.getBoundingClientRect();
    return { left, right, top, bottom, text: one.textContent, axis: one.classList.contains("axis") };
  });
}"""


def audit_page() -> str:
    """The page of an audit with a passage and an answer, whose texts are no HTML."""
    rows = [
        Row(id="base", label="base", metrics={"own_kl": 0.0}),
        Row(id="tuned", label="tuned", metrics={"own_kl": 0.5}),
    ]
    choices = ([("tea", 0.7), ("\n", 0.2)], [("coffee", 0.6), (HOSTILE, 0.3)])
    tokens = [PassageToken(text, 0.5, *choices) for text in ("Tea ", "<b>is</b> ", "old")]
    answers = (ChatAnswer(HOSTILE, True, True, True), ChatAnswer("Ja.", False, True, True))
    passage = Passage("news", 0.5, f"{HOSTILE} ", tokens)
    conversations = [(ChatQuestion([1], "Is it old?"), *answers)]
    return Audit(Results.here("audit", rows), [passage], conversations, ["A note."]).page()


def test_an_audit_is_shown_with_its_graft(page: Page, service: Service) -> None:
    expect(page.get_by_role("button", name="Show the audit")).to_have_count(0)
    path = service.store.entries()["danish"].folder / "audit.html"
    path.write_text(audit_page(), encoding="utf-8")
    try:
        page.reload()
        view(page, "Grafts")
        page.get_by_role("button", name="Show the audit").click()
        audit = page.locator(".audit")
        expect(audit.get_by_role("heading", name="Audit of tuned")).to_be_visible()
        expect(audit.get_by_role("row", name="own KL")).to_contain_text("0.500")
        expect(audit.locator(".audit-tokens")).to_have_text(f"{HOSTILE} Tea <b>is</b> old")
        audit.locator(".audit-token").first.focus()
        page.keyboard.press("ArrowRight")
        tip = page.get_by_role("tooltip")
        expect(tip).to_contain_text("<b>is</b>")
        expect(tip).to_contain_text("tea 70.0%, \\n 20.0%")
        expect(tip).to_contain_text("coffee 60.0%")
        expect(audit).to_contain_text("tuned, does not end")
        assert audit.locator("b, img, script, style, a").count() == 0
        assert "owned" not in page.title()
        page.get_by_role("button", name="Hide the audit").click()
        check(page)
        page.get_by_role("button", name="Show the audit").click()
        check(page)
    finally:
        path.unlink()


def test_a_report_is_a_plot_with_a_table_beside_it(page: Page) -> None:
    view(page, "Grafts")
    danish, router = page.get_by_role("article", name="danish"), page.get_by_role("article", name="router")
    danish.get_by_role("button", name="Show the report").click()
    expect(danish.get_by_role("img")).to_have_accessible_name(re.compile("fine-tuning: learned 1.270, forgot 0.221"))
    expect(danish.locator(".plot .mark")).to_have_count(3)
    expect(danish.locator(".report").get_by_role("row", name="this graft")).to_contain_text("0.004 [−0.016, 0.034]")
    router.get_by_role("button", name="Show the report").click()
    expect(router.locator(".plot .mark")).to_have_count(1)
    danish.get_by_role("button", name="Hide the report").click()
    expect(danish.locator(".plot")).to_be_hidden()


def test_a_report_without_losses_shows_what_became_of_the_answers(
    browser: Browser, address: str, complaints: list[str]
) -> None:
    kept = {"mean": 0.975, "low": 0.87, "high": 0.996}
    measured = {"kept_answers": kept, "spill": {"mean": 0.0, "low": 0.0, "high": 0.09}, "trainable_parameters": 12}
    report = {"name": "danish", "points": [], "measured": measured, "training": {}, "results": None, "audit": None}
    with opened(browser, address, complaints, {"**/danish/report": report}) as page:
        view(page, "Grafts")
        danish = page.get_by_role("article", name="danish")
        danish.get_by_role("button", name="Show the report").click()
        answers = danish.get_by_role("region", name="Answers, danish")
        expect(answers.get_by_role("row", name="answered as before")).to_contain_text("0.975 [0.870, 0.996]")
        expect(answers.get_by_role("row", name="name a taught thing")).to_contain_text("0.000 [0.000, 0.090]")
        expect(answers.get_by_role("row")).to_have_count(3)
        expect(danish.get_by_text("neither learning nor forgetting")).to_have_count(0)


def test_a_server_with_keys_gets_one_that_stays_in_the_tab(
    browser: Browser, service: Service, complaints: list[str]
) -> None:
    key = "a-key-of-some-length"
    guarded = changed(service, keys=ApiKeys([("anna", key)]), closing=threading.Event())
    with running(guarded) as address, opened(browser, address, complaints) as page:
        expect(page.locator("#key-note")).to_contain_text("The API key is missing")
        page.get_by_label("API key").fill("another-key-of-some-length")
        page.keyboard.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("The API key is unknown")
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
        expect(page.locator("#key-note")).to_contain_text("The API key is unknown")
        page.get_by_label("API key").fill(key)
        page.keyboard.press("Enter")
        expect(column(page, "danish")).to_be_visible()
        with page.expect_response("**/v1/models") as late:
            held[0].continue_()
        assert late.value.status == 401
        expect(page.get_by_label("API key")).to_be_hidden()
        assert all("status of 401" in one for one in complaints)


def test_colors_follow_the_system_and_the_switch(browser: Browser, address: str, complaints: list[str]) -> None:
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


@pytest.mark.parametrize("scheme", ["dark", "light"])
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
