"""The page of an audit in a browser: all of its text, both models' choices by pointer and by keys, and no findings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chromium import chromium
from graftlm.backbone import Backbone
from graftlm.evaluation.audit import Audit, audit
from graftlm.evaluation.chat_answers import ChatAnswer, ChatQuestion
from tiny import tiny_model, tiny_tokenizer

TEXT = ["the <old> house & the river", "a letter lay in the garden and said nothing " * 4]

sync = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def found() -> Audit:
    base = Backbone.wrap(tiny_model("llama"), tiny_tokenizer(), "tiny <base>")
    model = copy.deepcopy(base.model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tuned = Backbone.wrap(model, base.tokenizer, "tuned & more")
    result = audit(base, tuned, texts={"news": TEXT}, tokens=100, length=32, progress=False, budget={"own_kl": 0.0001})
    good, bad = ChatAnswer("It is <b>here</b>.", True, True, True), ChatAnswer("Es ist hier " * 9, False, False, False)
    result.conversations = [(ChatQuestion([1], "Where is <it>?"), good, bad), (ChatQuestion([1], "Same?"), good, good)]
    return result


@pytest.fixture(scope="module")
def page(found: Audit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = found.write(tmp_path_factory.mktemp("audit"))
    with chromium() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        yield page
        assert not errors


@pytest.mark.slow
def test_the_page_has_every_passage_and_answer_as_text(page: Any, found: Audit) -> None:
    texts = page.locator(".text.tokens").all_text_contents()
    assert len(texts) == len(found.passages) > 0
    for text, passage in zip(texts, found.passages, strict=True):
        assert text == passage.before + "".join(token.text for token in passage.tokens)
    assert page.get_by_text("Where is <it>?").count() == 1
    assert page.get_by_text("1 of 2 greedy answers differ.").count() == 1
    assert page.get_by_text("tuned, does not end, breaks the template, another language").count() == 1
    assert page.get_by_role("row").count() == len(found.results.row("tuned").metrics) + 1
    assert page.get_by_text("over the budget of own_kl").count() == 1


@pytest.mark.slow
def test_choices_show_at_the_pointer_and_by_keys(page: Any, found: Audit) -> None:
    first, second = found.passages[0].tokens[:2]
    tip = page.locator("#tip")
    tokens = page.locator(".text.tokens").first.locator(".token")
    tokens.first.hover()
    sync.expect(tip).to_contain_text(f"KL {first.kl:.3f} nats")
    for _, share in (*first.base, *first.tuned):
        sync.expect(tip).to_contain_text(f"{100 * share:.1f}%")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    sync.expect(tip).to_contain_text(f"KL {second.kl:.3f} nats")
    page.keyboard.press("Escape")
    sync.expect(tip).to_have_text("")


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(page: Any, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.emulate_media(color_scheme=theme)
    page.locator(".token").first.focus()
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing stands out at the side"
        response = axe.Axe().run(page)
        assert not response.response["violations"], response.generate_report()


def test_a_page_without_differences_says_so(found: Audit) -> None:
    page = Audit(found.results, notes=["BASE and TUNED are one model."]).page()
    assert "No token&#x27;s prediction differs." in page or "No token's prediction differs." in page
    assert "No question was asked." in page
    assert "<base>" not in page
