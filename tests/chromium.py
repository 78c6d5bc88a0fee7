"""A headless Chromium for the tests of pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

PATIENCE = 60_000  # milliseconds, for busy machines
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for the tests of one module; they are skipped where none is installed or starts.

    No longer: an event loop runs in this thread as long, and another test's would not start.
    """
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
