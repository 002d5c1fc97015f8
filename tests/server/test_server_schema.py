"""Requests that schemathesis makes of the server's own description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from serving import served
from starlette.testclient import TestClient

from edge.server.protocols.openapi import describe

schemathesis = pytest.importorskip("schemathesis")
SCHEMA = schemathesis.openapi.from_dict(describe())
OPERATIONS = [each.ok() for each in SCHEMA.get_all_operations()]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(options={"max_kv_size": 64}) as client:
        yield client


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.label)
def test_server_does_what_its_description_says(client: TestClient, operation: Any) -> None:
    @settings(max_examples=5, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        body = case.body if isinstance(case.body, dict) else {}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 2) or 1
        content = {"json": body} if case.method.upper() == "POST" else {}
        response = client.request(case.method, case.path, **content)
        assert response.status_code != 500, response.text
        assert str(response.status_code) in operation.definition.raw["responses"], response.text
        if response.status_code != 200 and case.path.startswith(("/v1/c", "/v1/r", "/t", "/d")):
            assert response.json()["error"]["message"]

    check()
