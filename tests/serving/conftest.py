"""A server around a scripted engine, and its page in a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from chromium import chromium
from graftlm.serving.service import Service
from serving.browsing import opened
from serving.scripted import ScriptedEngine, scripted_service
from serving.web import running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return scripted_service(tmp_path_factory.mktemp("grafts"))


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with running(service) as address:
        yield address


@pytest.fixture
def engine(service: Service) -> Iterator[ScriptedEngine]:
    """The engine of the service, which remembers nothing; what a test lets it say ends with the test."""
    engine = service.engine
    assert isinstance(engine, ScriptedEngine)
    engine.requests.clear()
    engine.cancelled.clear()
    say = engine.say
    yield engine
    engine.say = say


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def complaints() -> list[str]:
    """What a page says on its console that is no plain note; a test may take away what it expects."""
    return []


@pytest.fixture
def page(browser: Browser, address: str, complaints: list[str]) -> Iterator[Page]:
    with opened(browser, address, complaints) as page:
        yield page
    assert complaints == []
