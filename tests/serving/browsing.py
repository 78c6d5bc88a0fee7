"""What a person does with the page of the server."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Browser, Locator, Page

from chromium import PATIENCE

TEA = "🍵 Tea is old. Most people who drink tea live in Asia. Tea came to the valley with two brothers. It is hot."
QUERY = "Are you sure it is pretty?"


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
