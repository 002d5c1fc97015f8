"""Who may ask, and what a request may be: keys, hosts, origins, sizes, and nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import HELLO, client_of, error_of, hub_of, served
from starlette.testclient import TestClient

from edge.errors import InputError
from edge.server.documents import HEADER as SOURCES
from edge.server.protocols.unread import HEADER as IGNORED
from edge.server.settings import Settings

KEYS = ["first-key-123", "second-key-45"]
CHATS = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
SHORT = {"messages": HELLO, "max_tokens": 2}
OPENAIS = (  # headers for which a page's openai asks
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout"
)
ANTHROPICS = "anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key,x-stainless-os"

client = client_of(most_body="64KiB")


def test_other_addresses_need_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        assert Settings.parse(host=host).loopback
    for host in ("0.0.0.0", "192.168.1.4", "::", "example.org"):
        with pytest.raises(InputError, match="--api-key"):
            Settings.parse(host=host)
        assert not Settings.parse(host=host, api_key=KEYS).loopback
    with pytest.raises(InputError, match="8 characters"):
        Settings.parse(api_key=["short"])
    for origin in ("foo", "http://localhost:3000/", "http://", ""):
        with pytest.raises(InputError, match=r"--cors .*: write it like http://localhost:3000"):
            Settings.parse(cors=[origin])


def test_only_requests_with_key_are_answered() -> None:
    with served(api_key=KEYS) as client:
        assert error_of(client.post(CHATS, json=SHORT))["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer wrong-key-123"}, {"Authorization": KEYS[0]}, {"X-Api-Key": "é"}):
            sent = {name: value.encode() for name, value in headers.items()}
            assert client.post(CHATS, json=SHORT, headers=sent).status_code == 401
        for path in ("/v1/models", "/metrics", "/props", "/nothing", "/openapi.json"):
            assert client.get(path).status_code == 401
        assert client.get("/health").status_code == 200
        for headers in ({"Authorization": f"Bearer {KEYS[0]}"}, {"x-api-key": KEYS[1]}):
            assert client.post(CHATS, json=SHORT, headers=headers).status_code == 200


def test_foreign_host_names_are_refused(client: TestClient) -> None:
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[", "", "10.0.0.1"):
        assert client.post(CHATS, json=SHORT, headers={"Host": host}).status_code == 403
        assert client.get("/v1/models", headers={"Host": host}).status_code == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "LOCALHOST"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(("authority", "status"), [("127.0.0.1:8080", 200), ("evil.example", 403)])
def test_host_of_an_absolute_target_counts(client: TestClient, authority: str, status: int) -> None:
    """Its host counts, not the header's."""
    app, path = client.app, f"http://{authority}/v1/models"

    async def absolute(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    assert TestClient(absolute, base_url="http://127.0.0.1:8080").get("/").status_code == status


def test_pages_of_other_origins_may_not_ask(client: TestClient) -> None:
    wrong = (
        "http://evil.example", "null", "http://127.0.0.1:9999", "http://[", "//127.0.0.1:8080", "", "127.0.0.1:8080",
    )  # fmt: skip
    for origin in wrong:
        response = client.post(CHATS, json=SHORT, headers={"Origin": origin})
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers
    assert client.post(CHATS, json=SHORT, headers={"Origin": "http://127.0.0.1:8080"}).status_code == 200
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert client.options(CHATS, headers=asked).status_code == 403


def test_pages_that_were_allowed_ask(client: TestClient) -> None:
    origin = "app://obsidian.md"
    with served(cors=[origin], api_key=KEYS) as client:
        for names in (OPENAIS, ANTHROPICS):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
            response = client.options(CHATS, headers=asked)
            assert response.status_code == 204
            assert response.headers["access-control-allow-origin"] == origin
            assert response.headers["access-control-allow-headers"] == names
        headers = {"Origin": origin, "Authorization": f"Bearer {KEYS[0]}"}
        answered = client.post(CHATS, json=SHORT, headers=headers).headers
        assert answered["access-control-allow-origin"] == origin
        exposed = set(answered["access-control-expose-headers"].split(", "))
        assert {IGNORED, SOURCES, "X-Request-Id"} <= exposed
        assert client.post(CHATS, json=SHORT, headers={"Origin": origin}).status_code == 401


def test_bodies_that_are_no_requests_are_refused(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = client.post(CHATS, content=json.dumps(SHORT), headers={"Content-Type": kind})
        assert response.status_code == 415
        error_of(response)
    for body, status in (
        (b"", 400), (b"{", 400), (b"\xff\xfe\x00", 400), (b'"text"', 400), (b"[]", 400), (b"null", 400),
        (b'{"messages": NaN}', 400), (b'{"messages": ' + b"9" * 5000 + b"}", 400),
        (b'{"x": ' + b"[" * 1000 + b"]" * 1000 + b"}", 400), (b'{"x": ' + b'{"a":' * 10000, 400),
        (b'{"messages": "' + b"x" * (64 << 10) + b'"}', 413),
    ):  # fmt: skip
        response = client.post(CHATS, content=body, headers=JSON)
        assert response.status_code == status
        error_of(response)
    unknown_length = (b"x" * 1024 for _ in range(100))
    assert client.post(CHATS, content=unknown_length, headers=JSON).status_code == 413


def test_many_small_values_are_refused() -> None:
    with served() as client:
        body = b'{"messages": [' + b"[]," * (1 << 18) + b"[]]}"
        response = client.post(CHATS, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert hub_of(client).pool.ledger.claims.total() == 0
        table = 'a,[{\\"' * (1 << 17)  # values of a table within a text are one
        assert client.post(CHATS, content=json.dumps({"messages": table}), headers=JSON).status_code == 400


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/models", "/v1/nothing", "/api/chat", "/api/nothing", CHATS])
def test_errors_have_the_form_of_their_protocol(path: str) -> None:
    """Without a key and with one, known paths or not, each protocol has its own."""
    with served(api_key=KEYS) as client:
        ours = {} if path in ("/api/chat", "/api/nothing", CHATS) else {"anthropic-version": "2023-06-01"}
        for key, statuses in ((None, (401,)), (KEYS[0], (400, 404, 405))):
            response = client.post(path, json=[], headers={**ours, **({"x-api-key": key} if key else {})})
            assert response.status_code in statuses
            found = response.json()
            if path.startswith("/api/"):
                assert isinstance(found["error"], str)
            elif ours:
                assert (found["type"], found["request_id"]) == ("error", response.headers["request-id"])
                assert found["error"]["type"].endswith("_error")
            else:
                error_of(response)
                assert response.headers["x-request-id"]


def test_unknown_paths_and_methods_are_refused(client: TestClient) -> None:
    assert error_of(client.get("/v1/nothing"))["code"] == "not_found"
    response = client.get(CHATS)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    error_of(response)
    assert client.get("/../../etc/passwd").status_code == 404
    assert client.get("/v1/models/nothing").status_code == 404


def test_logs_contain_no_request_text(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 2}
    with served(log=True) as client, caplog.at_level("DEBUG"):
        assert client.post(CHATS, json=body).status_code == 200
        assert client.get("/a%0Ab").status_code == 404

        def fail(*_: object) -> None:
            raise ValueError("my secret")

        monkeypatch.setattr("edge.server.protocols.chat.is_background", fail)
        response = client.post(CHATS, json=body)
        assert response.status_code == 500
        assert error_of(response)["message"] == "internal error"
    text = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("edge", "uvicorn")))
    assert f"POST '{CHATS}' 200" in text
    assert "GET '/a\\nb' 404" in text
    assert "ValueError at" in text
    assert "secret" not in text
