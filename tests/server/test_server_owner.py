"""The owner's settings of a server: a chat template for its model, and a limit for requests without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from serving import HELLO, MODEL, OTHER, served

from edge.errors import InputError
from edge.options import Options
from edge.run.starting.loading import load
from edge.server.running import make_hub
from edge.server.settings import Settings

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant></think>"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_bytes(b"\xef\xbb\xbf" + TEMPLATE.encode())
    return path


def test_chat_template_of_the_owner_writes_prompts(template: Path) -> None:
    written = f"<user>{HELLO[0]['content']}<assistant></think>"
    with load(GOLDEN / f"{MODEL}.gguf", chat_template=template, backend="reference") as session:
        wanted = session.model.tokenizer.encode(written)
        assert session.model.prompt("Hello").first(None)[-wanted.size :].tolist() == wanted.tolist()
        assert session.model.with_template(template) is session.model
    with served(options={"chat_template": str(template)}) as client:
        assert client.get("/props").json()["chat_template"] == TEMPLATE
        assert "thinking" in client.post("/api/show", json={"model": MODEL}).json()["capabilities"]
        count = client.post("/v1/messages/count_tokens", json={"messages": HELLO}).json()["input_tokens"]
        assert count == len(client.post("/tokenize", json={"prompt": written}).json()["tokens"])


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), (b"\xff\xfe", "is not UTF-8")])
def test_invalid_templates_are_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match=f"--chat-template .*{words}"):
        load(GOLDEN / f"{MODEL}.gguf", Options.parse(chat_template=tmp_path / "x", backend="reference"))


def test_one_template_is_for_one_model(template: Path) -> None:
    paths = [str(GOLDEN / f"{name}.gguf") for name in (MODEL, OTHER)]
    with pytest.raises(InputError, match="--chat-template goes with one model"):
        make_hub(paths, Options.parse(chat_template=template), Settings.parse())


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", {"messages": HELLO, "ignore_eos": True}), ("/v1/responses", {"input": "Hello"}),
    ("/v1/messages", {"messages": HELLO}),
    ("/api/chat", {"messages": HELLO, "stream": False, "options": {"num_predict": -1}}),
])  # fmt: skip
def test_limit_of_the_owner_ends_requests_without_one(path: str, body: dict[str, Any]) -> None:
    def generated(**more: Any) -> int:
        found = client.post(path, json={**body, **more}).json()
        usage = found.get("usage", found)
        counts = [usage[name] for name in ("completion_tokens", "output_tokens", "eval_count") if name in usage]
        return int(counts[0])

    with served(max_tokens=3) as client:
        assert generated() == 3
        if path == "/v1/chat/completions":
            assert generated(max_tokens=5) == 5


def test_limit_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="--max-tokens"):
        Settings.parse(max_tokens=0)
