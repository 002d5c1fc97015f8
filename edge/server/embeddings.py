"""POST /v1/embeddings: vectors of texts, the mean of a model's last hidden states."""

from __future__ import annotations

import base64
from typing import Any, Literal, cast

import numpy as np

from edge.run.embedding import Pooling
from edge.run.session import Session
from edge.server.asked import Asked
from edge.server.bodies import MOST_PROMPTS, EmbeddingBody
from edge.server.events import Embedded, Event
from edge.server.prompts import check_ids
from edge.server.refusal import RefusedError
from edge.server.worker import Job


def translate(body: EmbeddingBody, tenant: str) -> list[Asked]:
    """A request for each text. Raises RefusedError."""
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or not all(given):
        raise RefusedError(400, "the input is empty", param="input", code="invalid_value")
    if len(given) > MOST_PROMPTS:
        raise RefusedError(
            400, f"input has {len(given)} texts, {MOST_PROMPTS} are the most", param="input", code="invalid_value"
        )
    if body.dimensions is not None:
        raise RefusedError(400, "dimensions is not supported", param="dimensions", code="unsupported")
    texts = [each if isinstance(each, str) else tuple(each) for each in given]
    return [Asked(model=body.model or "", prompt=each, priority="tools", tenant=tenant) for each in texts]


def embed(pooling: Pooling, asked: Asked, session: Session, job: Job) -> None:
    """Put the embedding of a text or of token ids."""
    prompt = cast("str | tuple[int, ...]", asked.prompt)
    tokens = session.model.encode_text(prompt) if isinstance(prompt, str) else np.array(prompt, np.int32)
    check_ids(tokens, session.model)
    if not job.cancelled:
        job.flow.put(Embedded(job.choice, session.embed(tokens, pooling=pooling), tokens.size))


class Writer:
    def __init__(self, model: str, form: Literal["float", "base64"]) -> None:
        self._model, self._form = model, form

    def whole(self, events: list[Event]) -> dict[str, Any]:
        found = sorted((each for each in events if isinstance(each, Embedded)), key=lambda each: each.choice)
        tokens = sum(each.tokens for each in found)
        return {
            "object": "list",
            "model": self._model,
            "data": [
                {"object": "embedding", "index": number, "embedding": self._written(each)}
                for number, each in enumerate(found)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _written(self, found: Embedded) -> Any:
        vector = found.vector.astype("<f4")
        return base64.b64encode(vector.tobytes()).decode() if self._form == "base64" else vector.tolist()
