"""The owner's settings of a server: a chat template, a limit, adapters as names of models, an index of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, open_golden
from lora_files import write_adapter
from serving import HELLO, MODEL, OTHER, PLAIN, chat, error_of, hub_of, served

import edge
from edge.documents.indexing import index
from edge.errors import InputError
from edge.options import Options
from edge.run.starting.loading import load

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant></think>"
ENCODER = str(GOLDEN / "encoders" / "bert.gguf")
QUESTION = [{"role": "user", "content": "What is called?"}]


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


@pytest.mark.parametrize(("models", "option", "words"), [
    ((MODEL, MODEL), "", "two of the models have the same name"),
    ((MODEL, OTHER), "chat_template", "--chat-template goes with one model"),
    ((MODEL, OTHER), "mmproj", "--mmproj goes with one model"),
])  # fmt: skip
def test_models_of_one_name_or_one_template_are_refused(models: tuple[str, ...], option: str, words: str) -> None:
    with pytest.raises(InputError, match=words), served(*models, options={option: "x"} if option else {}):
        pass


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


# Adapters


def test_adapters_are_models(tmp_path: Path) -> None:
    model = open_golden(MODEL).model
    small = write_adapter(tmp_path / "small.gguf", model, rank=2, seed=1)
    large = write_adapter(tmp_path / "large.gguf", model, rank=8, seed=2)
    with load(model, lora=str(large), **PLAIN) as session:
        answers = {}
        for name, lora in (("", None), (":small", small), (":large", large)):
            session.set_lora(lora)
            answers[name] = session.generate("Hello", max_tokens=8, ignore_eos=True)
    assert len(set(answers.values())) == 3
    with served(adapters=[f"small={small}", f"{MODEL}/large={large}"]) as client:
        names = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert names == [MODEL, f"{MODEL}:small", f"{MODEL}:large"]
        for name in ("", ":small", ":large", "", ":small"):
            found = chat(client, model=MODEL + name)
            assert found["choices"][0]["message"]["content"] == answers[name]
            assert found["model"] == MODEL + name
        asked = ({"model": MODEL + name, "input": "sea"} for name in ("", ":small", ""))
        base, small_one, again = (client.post("/v1/embeddings", json=each).json()["data"] for each in asked)
        assert base == again != small_one
        assert hub_of(client).pool.loads == 1
        response = client.post("/v1/chat/completions", json={"messages": [], "model": f"{MODEL}:none"})
        assert error_of(response)["code"] in ("model_not_found", "invalid_value")


# Documents


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_INDEXES", str(tmp_path / "indexes"))
    (tmp_path / "call.md").write_text("# Calls\n\nA function is called with two arguments.\n")
    index("own", tmp_path / "call.md", encoder=ENCODER, backend="reference")
    return tmp_path / "call.md"


def test_answer_and_sources_are_those_of_python(own: Path) -> None:
    with edge.Documents("own", backend="reference") as documents, load(open_golden(MODEL).model, **PLAIN) as session:
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


@pytest.mark.usefixtures("own")
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
