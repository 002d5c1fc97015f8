"""POST /v1/embeddings: the vectors of the session, in both forms, and what is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from conftest import GOLDEN
from serving import MODEL, PLAIN, error_of, served

import edge


def test_embeddings_are_those_of_the_session() -> None:
    with edge.load(GOLDEN / f"{MODEL}.gguf", **PLAIN) as session:
        expected = np.stack([session.embed(text) for text in ("one", "two")])
        last = session.embed("two", pooling="last")
        ids, size = session.model.encode_text("two").tolist(), session.model.encode_text("one").size
    with served() as client:
        found = client.post("/v1/embeddings", json={"model": MODEL, "input": ["one", "two"]}).json()
        np.testing.assert_array_equal([each["embedding"] for each in found["data"]], expected)
        assert [each["index"] for each in found["data"]] == [0, 1]
        assert found["usage"]["total_tokens"] == len(ids) + size
        body = {"input": ids, "encoding_format": "base64", "pooling": "last"}
        (each,) = client.post("/v1/embeddings", json=body).json()["data"]
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(each["embedding"]), "<f4"), last)
        chat = client.post("/v1/completions", json={"prompt": "one", "max_tokens": 2, "ignore_eos": True})
        assert chat.status_code == 200


@pytest.mark.parametrize("body", [{"input": ""}, {"input": []}, {"input": [99999]}, {"input": "a", "dimensions": 3}])
def test_what_cannot_be_embedded_is_refused(body: dict[str, object]) -> None:
    with served() as client:
        response = client.post("/v1/embeddings", json=body)
        assert response.status_code == 400
        assert error_of(response)["message"]
