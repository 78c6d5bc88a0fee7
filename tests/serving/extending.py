"""Requests to the routes under /v1/graftlm/."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from graftlm.serving.app import create_app
from graftlm.serving.service import Service


def client_of(service: Service) -> TestClient:
    """A client that sees the answers of failures too."""
    return TestClient(create_app(service), base_url="http://localhost", raise_server_exceptions=False)


def post(client: TestClient, route: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(f"/v1/graftlm/{route}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def refusal(client: TestClient, route: str, status: int = 400, **body: Any) -> str:
    return post(client, route, status, **body)["error"]["message"]
