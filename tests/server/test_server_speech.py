"""Transcripts of the server: all forms, streams, refusals, beside a model that answers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import chat, error_of, events_of, hub_of, served
from speech_models import golden_whisper, tone, wav
from starlette.testclient import TestClient

import edge
from edge.media.mel import RATE
from edge.types import FloatArray

soundfile = pytest.importorskip("soundfile")

PATH = "/v1/audio/transcriptions"

model = golden_whisper()


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[TestClient]:
    with served("llama-gqa-tied", str(model)) as client:
        yield client


def ogg(samples: FloatArray) -> bytes:
    soundfile.write(file := io.BytesIO(), samples, RATE, format="OGG")
    return file.getvalue()


def post(client: TestClient, path: str = PATH, sound: bytes | None = None, **fields: Any) -> Any:
    data = {"model": "ears", "language": "de", **fields}
    return client.post(path, data=data, files={"file": ("talk.wav", wav(tone()) if sound is None else sound)})


def test_every_form_has_the_text_of_the_session(client: TestClient, model: Path) -> None:
    with edge.load(model, backend="reference") as session:
        segments = list(session.transcribe(wav(tone()), language="de"))
    text = "".join(each.text for each in segments).strip()
    assert post(client).json()["text"] == text
    assert post(client, response_format="text").text == text + "\n"
    assert post(client, response_format="srt").text.count("-->") == len(segments)
    short = wav(tone()[:RATE])
    assert post(client, sound=short, response_format="vtt").text.startswith("WEBVTT\n\n00:00:00.")
    found = post(client, response_format="verbose_json").json()
    assert (found["task"], found["language"], found["duration"]) == ("transcribe", "german", 3.1)
    assert found["usage"]["seconds"] == 4
    assert [each["tokens"] for each in found["segments"]] == [list(each.tokens) for each in segments]
    words = post(client, response_format="verbose_json", **{"timestamp_granularities[]": ["word"]}).json()
    assert words["words"][0].keys() == {"word", "start", "end", "probability"}
    assert "segments" not in words
    captions = post(client, response_format="srt", **{"timestamp_granularities[]": ["word"]}).text
    assert captions.count("-->") == len(words["words"])
    events = events_of(post(client, stream="true").text)
    assert "".join(each["delta"] for each in events[:-2]) == events[-2]["text"]
    assert events[-2]["text"].strip() == text
    asked = {"model": "ears", "response_format": "verbose_json"}
    translated = client.post("/v1/audio/translations", data=asked, files={"file": short}).json()
    assert translated["task"] == "translate"


def test_loaded_model_that_hears_is_described(client: TestClient) -> None:
    post(client)
    told = {each["id"]: each["architecture"]["input_modalities"] for each in client.get("/v1/models").json()["data"]}
    assert told == {"llama-gqa-tied": ["text"], "ears": ["audio"]}
    assert client.post("/api/show", json={"model": "ears"}).json()["capabilities"] == ["audio"]
    assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize(("fields", "status", "words"), [
    ({"sound": b"no sound"}, 400, "no sound that can be read"),
    ({"language": "xx"}, 400, "'xx' is not among en, de"),
    ({"temperature": "hot"}, 400, "temperature must be a number"),
    ({"response_format": "doc"}, 400, "response_format must be one of"),
    ({"stream": "true", "response_format": "srt"}, 400, "a stream has no response_format srt"),
    ({"timestamp_granularities[]": ["word"]}, 400, "is for response_format verbose_json"),
    ({"include[]": "logprobs"}, 400, "include is not supported"),
    ({"model": "llama-gqa-tied"}, 400, "does not hear"),  # and is not loaded for it
    ({"sound": bytes(17 << 20)}, 413, "bytes"),
])  # fmt: skip
def test_wrong_requests_are_refused(client: TestClient, fields: dict[str, Any], status: int, words: str) -> None:
    response = post(client, **fields)
    assert response.status_code == status
    assert words in error_of(response)["message"]
    if fields.get("model"):
        assert "llama-gqa-tied" not in hub_of(client).pool.workers


def test_transcripts_of_cut_sounds_say_so(client: TestClient) -> None:
    sound, other = wav(tone()), ogg(tone())
    for data, cut in ((sound, False), (sound[: len(sound) * 2 // 3], True), (other[: len(other) * 2 // 3], True)):
        assert post(client, sound=data).json()["usage"]["edge"].get("cut", False) is cut
        assert ("Edge-Cut" in post(client, sound=data, response_format="text").headers) is cut


def test_forms_that_are_none_are_refused(client: TestClient) -> None:
    kind = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b'--x\r\nContent-Disposition: form-data; name="file"\r\n', b"--x\r\n\r\n\r\n--x--"):
        assert error_of(client.post(PATH, content=body, headers=kind))["code"] == "form"
    assert "file is missing" in error_of(client.post(PATH, content=b"--x--", headers=kind))["message"]
    assert client.post(PATH, json={"model": "ears"}).status_code == 415
    twice = client.post(PATH, data={"model": "ears"}, files=[("file", b"a"), ("file", b"b")])
    assert "file twice" in error_of(twice)["message"]
    asked = client.post("/v1/chat/completions", json={"model": "ears", "messages": [{"role": "user", "content": "Hi"}]})
    assert "hears, and answers no prompts" in error_of(asked)["message"]
    embedded = client.post("/v1/embeddings", json={"model": "ears", "input": "Hi"})
    assert embedded.status_code == 400
    assert "hears, and embeds no texts: /v1/audio/transcriptions" in error_of(embedded)["message"]
    assert chat(client)["choices"]  # the other model still answers
