"""Requests that name an index of the server's in `edge.documents`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from serving import MODEL, chat, error_of, hub_of, served

import edge
from edge.documents.indexing import index
from edge.errors import InputError

ENCODER = str(GOLDEN / "encoders" / "bert.gguf")
QUESTION = [{"role": "user", "content": "What is called?"}]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_INDEXES", str(tmp_path / "indexes"))
    (tmp_path / "call.md").write_text("# Calls\n\nA function is called with two arguments.\n")
    index("own", tmp_path / "call.md", encoder=ENCODER, backend="reference")
    return tmp_path / "call.md"


def test_answer_and_sources_are_those_of_python(own: Path) -> None:
    with edge.Documents("own", backend="reference") as documents:
        options: dict[str, Any] = {"backend": "reference", "max_kv_size": 400, "threads": 1}
        with edge.load(GOLDEN / f"{MODEL}.gguf", **options) as session:
            expected = session.generate("What is called?", documents=documents, max_tokens=8, ignore_eos=True)
            tokens = session.report.tokens.prompt if session.report else 0
    with served(documents=["own"]) as client:
        found = chat(client, QUESTION, temperature=0, edge={"documents": "own"})
        assert found["choices"][0]["message"]["content"] == expected
        assert found["usage"]["prompt_tokens"] == tokens
        assert chat(client, QUESTION)["usage"]["prompt_tokens"] < tokens
        body = {"messages": QUESTION, "max_tokens": 4, "edge": {"documents": "own"}}
        for path, stream in (("/v1/chat/completions", True), ("/v1/messages", False), ("/api/chat", True)):
            response = client.post(path, json={**body, "stream": stream, "model": MODEL})
            assert response.status_code == 200, response.text
            assert json.loads(response.headers["edge-sources"]) == [
                {"number": 1, "title": "Calls", "heading": "", "file": str(own), "place": 3, "unit": "line"}
            ]
        assert "edge-sources" not in client.post("/v1/chat/completions", json={**body, "edge": {}}).headers
        assert hub_of(client).pool.names()
        listed = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert listed == [MODEL, "bert"]


def test_refusals_name_the_wrong_field() -> None:
    with served(documents=["own"]) as client:
        asked = {"edge": {"documents": "own"}, "max_tokens": 4}
        for path, body, status, message in (
            ("/v1/chat/completions", {"messages": QUESTION, "edge": {"documents": "other"}}, 404,
             "there is no index 'other' here (own)"),
            ("/v1/completions", {"prompt": "x", **asked}, 400, "edge.documents needs a chat"),
            ("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}], **asked}, 400,
             "edge.documents needs a question"),
            ("/v1/chat/completions", {"messages": QUESTION, "edge": {"documents": 3}}, 400, "edge.documents"),
            ("/v1/chat/completions", {"messages": QUESTION, "documents": ["x"]}, 400, "an index in edge.documents"),
        ):  # fmt: skip
            response = client.post(path, json=body)
            assert (response.status_code, message in error_of(response)["message"]) == (status, True), response.text
    with served() as client:
        response = client.post("/v1/chat/completions", json={"messages": QUESTION, **asked})
        assert "edge serve --documents NAME offers one" in error_of(response)["message"]
    with pytest.raises(InputError, match="there is no index 'none'"), served(documents=["none"]):
        pass
