"""Pictures and sounds in the requests of each protocol: the same prompt and answer as in Python."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from golden.sounds import SHORT, chirp
from serving import client_of, error_of
from starlette.testclient import TestClient

import edge
from edge.media.recording import wav_of

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
TEXT, EYES = GOLDEN / "eyes" / "smolvlm.gguf", GOLDEN / "eyes" / "mmproj.gguf"
HEARING, EARS = GOLDEN / "heard" / "qwen2.gguf", GOLDEN / "heard" / "qwen2audio.gguf"
CHATS = "/v1/chat/completions"
SEEN, HEARD = "What is in the picture?", "What is heard?"


def encoded(name: str) -> str:
    with np.load(GOLDEN / "eyes" / "smolvlm.npz") as golden:
        stream = BytesIO()
        PIL.fromarray(golden[name]).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


FIRST, SECOND = encoded("first"), encoded("second")
WAV = base64.b64encode(wav_of(chirp(SHORT))).decode()
SOUND = {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}

seeing = client_of(str(TEXT), options={"mmproj": EYES, "kv_dtype": "f32"})
hearing = client_of(str(HEARING), options={"mmproj": EARS, "kv_dtype": "f32"})


def shown(picture: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}


def user(*parts: dict[str, Any], asked: str = SEEN, kind: str = "text") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": kind, "text": asked}]}]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": FIRST}}
PICTURES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": user(shown(FIRST)), "max_tokens": 4},
    "/v1/responses": {
        "input": user({"type": "input_image", "image_url": shown(FIRST)["image_url"]["url"]}, kind="input_text"),
        "max_output_tokens": 4,
    },
    "/v1/messages": {"messages": user(IMAGE), "max_tokens": 4},
    "/api/chat": {
        "messages": [{"role": "user", "content": SEEN, "images": [FIRST]}], "stream": False,
        "options": {"num_predict": 4},
    },
    "/api/generate": {"prompt": SEEN, "images": [FIRST], "stream": False, "options": {"num_predict": 4}},
}  # fmt: skip
SOUNDS: dict[str, dict[str, Any]] = {
    CHATS: {"messages": user(SOUND, asked=HEARD), "max_tokens": 12, "ignore_eos": True},
    "/v1/responses": {
        "input": user(SOUND, asked=HEARD, kind="input_text"), "max_output_tokens": 12, "ignore_eos": True,
    },
}  # fmt: skip


TEXT_OF = {
    CHATS: lambda found: found["choices"][0]["message"]["content"],
    "/v1/responses": lambda found: found["output"][0]["content"][0]["text"],
    "/v1/messages": lambda found: found["content"][0]["text"],
    "/api/chat": lambda found: found["message"]["content"],
    "/api/generate": lambda found: found["response"],
}


def test_answer_is_that_of_python(seeing: TestClient, hearing: TestClient) -> None:
    with edge.load(TEXT, backend="reference", mmproj=EYES, threads=1) as session:
        expected = session.generate(SEEN, images=[edge.Image(base64.b64decode(FIRST))], max_tokens=4)
    for path, body in PICTURES.items():
        response = seeing.post(path, json=body)
        assert response.status_code == 200, response.text
        assert TEXT_OF[path](response.json()) == expected
    with edge.load(HEARING, backend="reference", mmproj=EARS, threads=1) as session:
        expected = session.generate(HEARD, sounds=[edge.Sound(chirp(SHORT))], max_tokens=12, ignore_eos=True)
    assert expected
    for path, body in SOUNDS.items():
        assert TEXT_OF[path](hearing.post(path, json=body).json()) == expected
    for client, other in ((seeing, "image"), (hearing, "audio")):
        about = client.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"]
        assert about == ["text", other]


def test_conversation_reuses_its_pictures_and_no_others(seeing: TestClient) -> None:
    def ask(picture: str, *more: dict[str, Any]) -> dict[str, Any]:
        body = {"messages": [*user(shown(picture)), *more], "max_tokens": 1, "ignore_eos": True}
        return seeing.post(CHATS, json=body).json()["usage"]

    first = ask(FIRST)
    answered = ({"role": "assistant", "content": "A bar."}, {"role": "user", "content": "Where?"})
    again = ask(FIRST, *answered)
    assert again["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 20
    other = ask(SECOND, *answered)
    assert other["prompt_tokens_details"]["cached_tokens"] <= 8  # the template's first words


@pytest.mark.parametrize(("part", "why"), [
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "not fetched: send the picture itself"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is no data URL"),
    ({"type": "image", "image": str(EYES)}, "is no data URL"),
    ({"type": "image", "sent": {"type": "image", "image": str(EYES)}}, "it has no picture"),
    (shown("!!"), "is not base64"), (shown(FIRST[:200]), "damaged or cut off"),
    ({"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}}, "not base64"),
    ({"type": "input_audio", "input_audio": {"data": WAV[:400], "format": "wav"}}, "cut off"),
    ({"type": "input_audio", "input_audio": {"url": "file:///etc/passwd"}}, "no data URL"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(
    part: dict[str, Any], why: str, seeing: TestClient, hearing: TestClient
) -> None:
    client = hearing if part["type"] == "input_audio" else seeing
    response = client.post(CHATS, json={"messages": user(part), "max_tokens": 1})
    assert response.status_code == 400
    assert why in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["IMAGE_URL", "sound_url", "image_url"])
def test_parts_of_unknown_kinds_are_refused_in_a_question_alone(hearing: TestClient, kind: str) -> None:
    said = user({"type": kind, kind: {"url": f"data:audio/wav;base64,{WAV}"}})
    response = hearing.post(CHATS, json={"messages": said, "max_tokens": 1})
    assert response.status_code == 400
    assert f"'{kind}'" in error_of(response)["message"]
    later = [*said, {"role": "user", "content": "And?"}]
    assert hearing.post(CHATS, json={"messages": later, "max_tokens": 1}).status_code == 200


def test_audio_of_other_protocols(hearing: TestClient) -> None:
    """As vLLM has it; Ollama has none."""
    address = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{WAV}"}}
    plain, found = (
        hearing.post(CHATS, json={"messages": user(each), "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        for each in (SOUND, address)
    )
    assert found == plain
    sent = {"messages": [{"role": "user", "content": "Hm?", "audio": [WAV]}]}
    assert "audio is not supported" in hearing.post("/api/chat", json=sent).json()["error"]
