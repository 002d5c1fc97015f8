"""Pictures in the requests of each protocol: the same prompt and answer as in Python."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from serving import error_of, served
from starlette.testclient import TestClient

import edge
from edge.devices.memory import memory_use

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
EYES = GOLDEN / "eyes" / "mmproj.gguf"
QUESTION = "What is in the picture?"


def encoded(name: str) -> str:
    with np.load(GOLDEN / "eyes" / "smolvlm.npz") as golden:
        stream = BytesIO()
        PIL.fromarray(golden[name]).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


FIRST, SECOND = encoded("first"), encoded("second")
URL = f"data:image/png;base64,{FIRST}"
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": FIRST}}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(str(GOLDEN / "eyes" / "smolvlm.gguf"), options={"mmproj": EYES, "kv_dtype": "f32"}) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> str:
    with edge.load(GOLDEN / "eyes" / "smolvlm.gguf", backend="reference", mmproj=EYES, threads=1) as session:
        return session.generate(QUESTION, images=[edge.Image(base64.b64decode(FIRST))], max_tokens=4)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


REQUESTS: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (
        {"messages": user({"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}), "max_tokens": 4},
        lambda found: found["choices"][0]["message"]["content"],
    ),
    "/v1/responses": (
        {"input": [{"type": "message", "role": "user", "content": [
            {"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]}],
         "max_output_tokens": 4},
        lambda found: found["output"][0]["content"][0]["text"],
    ),
    "/v1/messages": ({"messages": user(BLOCK), "max_tokens": 4}, lambda found: found["content"][0]["text"]),
    "/api/chat": (
        {"messages": [{"role": "user", "content": QUESTION, "images": [FIRST]}], "stream": False,
         "options": {"num_predict": 4}},
        lambda found: found["message"]["content"],
    ),
    "/api/generate": (
        {"prompt": QUESTION, "images": [FIRST], "stream": False, "options": {"num_predict": 4}},
        lambda found: found["response"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", REQUESTS)
def test_answer_is_that_of_python(path: str, client: TestClient, expected: str) -> None:
    body, text = REQUESTS[path]
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert text(response.json()) == expected


def test_conversation_reuses_its_pictures_and_no_others(client: TestClient) -> None:
    def ask(picture: str, *more: dict[str, Any]) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        body = {"messages": [*user(part), *more], "max_tokens": 1, "ignore_eos": True}
        found: dict[str, Any] = client.post("/v1/chat/completions", json=body).json()["usage"]
        return found

    first = ask(FIRST)
    answered = ({"role": "assistant", "content": "A bar."}, {"role": "user", "content": "Where?"})
    again = ask(FIRST, *answered)
    assert again["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 20
    other = ask(SECOND, *answered)
    assert other["prompt_tokens_details"]["cached_tokens"] <= 8  # the template's first words


def test_results_of_tools_may_show_pictures(client: TestClient) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": URL}}]}
    said = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    response = client.post("/v1/chat/completions", json={"messages": said, "max_tokens": 1, "ignore_eos": True})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    text = client.post("/v1/chat/completions", json={"messages": [*said[:2], {**result, "content": "A bar."}],
                                                     "max_tokens": 1, "ignore_eos": True}).json()["usage"]  # fmt: skip
    assert usage["prompt_tokens"] > text["prompt_tokens"] + 20


@pytest.mark.parametrize(("part", "why"), [
    (
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        "not fetched: send the picture itself",
    ),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is no data URL"),
    ({"type": "image", "image": str(EYES)}, "is no data URL"),
    ({"type": "image", "sent": {"type": "image", "image": str(EYES)}}, "it has no picture"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}, "is not base64"),
    ({"type": "image_url", "image_url": {"url": URL[:222]}}, "damaged or cut off"),
    ({"type": "image_url"}, "it has no picture"),
])  # fmt: skip
def test_refused_pictures_are_named(part: dict[str, Any], why: str, client: TestClient) -> None:
    response = client.post("/v1/chat/completions", json={"messages": user(part), "max_tokens": 1})
    assert response.status_code == 400
    assert why in error_of(response)["message"]


def test_eyes_left_out_for_memory_are_no_longer_offered(tmp_path: Path) -> None:
    model = str(shutil.copy(GOLDEN / "eyes" / "smolvlm.gguf", tmp_path / "a.gguf"))
    shutil.copy(EYES, tmp_path / "mmproj-a.gguf")
    offered: tuple[bool, ...] = ()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier tests in this process
    for more in range(0, 200, 12):  # the text model fits before both do
        options = {"memory": memory_use().rss + (more << 20), "max_kv_size": 64, "kv_dtype": "f32"}
        with served(model, options=options) as client:
            fits = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
            about = client.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"]
            offered = "image" in about, "vision" in client.post("/api/show", json={"model": "a"}).json()["capabilities"]
        if fits:
            break
        assert offered == (True, True)
    assert (fits, offered) == (True, (False, False))
