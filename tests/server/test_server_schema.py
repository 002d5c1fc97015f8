"""Requests that schemathesis makes of the server's own description."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from serving import served
from starlette.testclient import TestClient

from edge.server.protocols.openapi import describe

if not find_spec("schemathesis"):  # whose import takes seconds, also of workers that run none of these tests
    pytest.skip("no schemathesis", allow_module_level=True)
OPERATIONS = [(path, method) for path, methods in describe()["paths"].items() for method in methods]


def test_server_follows_its_openapi_schema() -> None:
    """In one test, since the import takes a worker seconds."""
    import schemathesis

    schema = schemathesis.openapi.from_dict(describe())
    with served(options={"max_kv_size": 64}) as client:
        for path, method in OPERATIONS:
            check_operation(client, schema[path][method])


def check_operation(client: TestClient, operation: Any) -> None:
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
