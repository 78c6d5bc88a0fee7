"""What the server says of itself in /openapi.json is true, for requests that fit it and for those that don't."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from serving.web import ScriptedEngine, running, web_service

CHECKS = [
    # not positive_data_acceptance: a schema can't say that top_logprobs needs logprobs, or which models there are
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with running(web_service(ScriptedEngine())) as address:
        yield address


@pytest.fixture(scope="module")
def api(served: str) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{served}/openapi.json")


# What a schema can't say: which models there are, how many tokens they have, and that options of a stream need one.
KNOWN = {"model": "tiny", "prompt": "the fox", "stream_options": None, "messages": [{"role": "user", "content": "a"}]}
KNOWN |= dict.fromkeys(("logit_bias", "structured_outputs", "response_format", "tools", "tool_choice"))
GET = ("/v1/models", "/v1/models/{model}", "/health", "/metrics")
POST = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "fits"),
    [*(("GET", path, True) for path in GET), *(("POST", path, fits) for path in POST for fits in (True, False))],
)
def test_the_server_is_as_its_schema_says(api: schemathesis.BaseSchema, method: str, path: str, fits: bool) -> None:
    operation = api[path][method]
    mode = GenerationMode.POSITIVE if fits else GenerationMode.NEGATIVE
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=20, suppress_health_check=list(HealthCheck), deadline=None, derandomize=True)
    def check(case: schemathesis.Case) -> None:
        if fits:
            for said in (case.body, case.path_parameters):
                if isinstance(said, dict):
                    said |= {key: value for key, value in KNOWN.items() if key in said}
        statuses[case.call_and_validate(checks=CHECKS).status_code] += 1

    check()
    if fits:
        assert statuses[200], statuses
    else:
        assert all(status >= 400 for status in statuses), statuses


def test_the_schema_names_our_routes(served: str) -> None:
    paths = httpx.get(f"{served}/openapi.json").json()["paths"]
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics"} <= set(paths)
    assert {"400", "401", "404", "413", "429", "503"} <= set(paths["/v1/completions"]["post"]["responses"])
