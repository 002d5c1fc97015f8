"""Sounds in requests: the same prompt and answer as in Python."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import GOLDEN
from golden.sounds import SHORT, chirp
from serving import error_of, served
from starlette.testclient import TestClient

import edge
from edge.media.recording import wav_of

TEXT, EARS = GOLDEN / "heard" / "qwen2.gguf", GOLDEN / "heard" / "qwen2audio.gguf"
QUESTION = "What is heard?"
MORE: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}  # the first tokens have no text
DATA = base64.b64encode(wav_of(chirp(SHORT))).decode()
SOUND = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served(str(TEXT), options={"mmproj": EARS, "kv_dtype": "f32"}) as client:
        yield client


def body(sound: dict[str, Any], kind: str = "text") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [sound, {"type": kind, "text": QUESTION}]}]


def test_answer_is_that_of_python(client: TestClient) -> None:
    with edge.load(TEXT, backend="reference", mmproj=EARS, threads=1) as session:
        expected = session.generate(QUESTION, sounds=[edge.Sound(chirp(SHORT))], **MORE)
    assert expected
    chat = client.post("/v1/chat/completions", json={"messages": body(SOUND)} | MORE)
    assert chat.json()["choices"][0]["message"]["content"] == expected
    item = {"type": "message", **body(SOUND, "input_text")[0]}
    responses = client.post("/v1/responses", json={"input": [item], "max_output_tokens": 12, "ignore_eos": True})
    assert responses.json()["output"][0]["content"][0]["text"] == expected
    about = client.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"]
    assert about == ["text", "audio"]


@pytest.mark.parametrize(("sound", "why"), [
    ({"data": "!", "format": "wav"}, "not base64"), ({"data": DATA, "format": "pcm16"}, "format must be"),
    ({"data": DATA[:400], "format": "wav"}, "cut off"), ({}, "no sound"),
    ({"url": "file:///etc/passwd"}, "no data URL"),
])  # fmt: skip
def test_other_sounds_are_refused(client: TestClient, sound: dict[str, Any], why: str) -> None:
    part = {"type": "input_audio", "input_audio": sound}
    response = client.post("/v1/chat/completions", json={"messages": body(part), "max_tokens": 1})
    assert response.status_code == 400
    assert why in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["IMAGE_URL", "sound_url", "image_url"])
def test_parts_of_unknown_kinds_are_refused_in_a_question_alone(client: TestClient, kind: str) -> None:
    said = body({"type": kind, kind: {"url": f"data:audio/wav;base64,{DATA}"}})
    response = client.post("/v1/chat/completions", json={"messages": said, "max_tokens": 1})
    assert response.status_code == 400
    assert f"'{kind}'" in error_of(response)["message"]
    later = [*said, {"role": "user", "content": "And?"}]
    assert client.post("/v1/chat/completions", json={"messages": later, "max_tokens": 1}).status_code == 200
    heard = body({"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{DATA}"}})
    plain = client.post("/v1/chat/completions", json={"messages": body(SOUND), "max_tokens": 1}).json()["usage"]
    found = client.post("/v1/chat/completions", json={"messages": heard, "max_tokens": 1}).json()["usage"]
    assert found["prompt_tokens"] == plain["prompt_tokens"]
    sent = {"messages": [{"role": "user", "content": "Hm?", "audio": [DATA]}]}
    assert "audio is not supported" in client.post("/api/chat", json=sent).json()["error"]


def test_models_without_ears_refuse_sounds() -> None:
    with served() as client:
        response = client.post("/v1/chat/completions", json={"messages": body(SOUND), "max_tokens": 1})
        assert response.status_code == 400
        assert "ears" in error_of(response)["message"]
