"""POST /v1/embeddings: vectors of texts and token ids, from the hidden states of a model that also generates."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np

from edge.records import dataclass
from edge.run.request import Request
from edge.run.session import Session
from edge.server.events import Embedded, Event
from edge.server.hub import Work
from edge.server.models.costs import EMBEDDED
from edge.server.models.worker import Job
from edge.server.protocols.bodies import TokenId
from edge.server.protocols.fields import said, whole
from edge.server.refusal import RefusedError, TooLongError
from edge.types import FloatArray, IntArray

MOST_TEXTS = 2048  # of OpenAI's API
Dimensions = Annotated[int, whole(1, 1 << 20)]
_DECIMALS = 9  # of numbers of unit vectors, beyond the resolution of float32


@dataclass(frozen=True, kw_only=True)
class EmbeddingsBody:
    """POST /v1/embeddings"""

    input: str | list[TokenId] | list[str] | list[list[TokenId]] = field(
        metadata={"help": "A text or token ids, or several of either."}
    )
    model: str | None = said("A name of /v1/models; the first model without it.")
    encoding_format: Literal["float", "base64"] | None = said("Numbers (the default), or float32 in base64.")
    dimensions: Dimensions | None = said("Return only the first values, scaled anew, of models trained for that.")
    prompt_name: str | None = said("The model's prompt before each text, such as query or document.")
    truncate: bool | None = said("Leave out the end of a text that is too long.")


def translate(body: EmbeddingsBody, headers: Any, tenant: str) -> list[Request]:
    """A request for each text. Raises RefusedError."""
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given or not all(given):
        raise RefusedError(400, "the input is empty", param="input", code="invalid_value")
    return requests_of([each if isinstance(each, str) else np.array(each, np.int32) for each in given], tenant)


def requests_of(texts: Sequence[str | IntArray], tenant: str) -> list[Request]:
    """A request for each text. Raises RefusedError for more than MOST_TEXTS."""
    if len(texts) > MOST_TEXTS:
        message = f"input has {len(texts)} texts, {MOST_TEXTS} are the most"
        raise RefusedError(400, message, param="input", code="invalid_value")
    return [Request(each, tenant=tenant, evict=False) for each in texts]


def work_of(body: EmbeddingsBody) -> Work:
    return partial(embed, truncate=bool(body.truncate), dimensions=body.dimensions, prompt_name=body.prompt_name)


def embed(
    numbered: Sequence[tuple[int, Request]], session: Session, job: Job, *, truncate: bool = False,
    dimensions: int | None = None, prompt_name: str | None = None,
) -> None:  # fmt: skip
    """Embed texts. Runs in the worker's thread. Raises RefusedError for impossible token ids, for more dimensions than
    the model has, and for a text that is longer than the rows, unless their eviction is allowed."""
    if session.spec.ears:
        raise RefusedError(400, f"{session.model.name} hears, and embeds no texts: /v1/audio/transcriptions")
    size = session.model.tail.size
    if dimensions is not None and dimensions > size:
        raise RefusedError(400, f"this model has {size} dimensions", param="dimensions", code="invalid_value")
    texts = [_encode(request, session, prompt_name, truncate=truncate) for _, request in numbered]
    job.flow.claim.add("answers", EMBEDDED * (dimensions or size) * len(texts))
    most, found = session.engine.kv.capacity, session.embed(texts, truncate=truncate, dimensions=dimensions)
    for (choice, _), tokens, values in zip(numbered, texts, found, strict=True):
        job.flow.put(Embedded(choice, min(tokens.size, most) if truncate else tokens.size, values))


def _encode(request: Request, session: Session, prompt_name: str | None, *, truncate: bool) -> IntArray:
    if isinstance(request.prompt, str):
        text = session.model.prompted(request.prompt, prompt_name)
        tokens = session.model.encode_text(text, embedded=True)
    else:
        assert isinstance(request.prompt, np.ndarray)
        tokens = request.prompt
        if int(tokens.max()) >= session.model.tokenizer.size:
            most = session.model.tokenizer.size - 1
            raise RefusedError(400, f"token ids must be from 0 to {most}", param="input", code="invalid_value")
    most = session.engine.kv.capacity
    if tokens.size > most and session.may_evict and not (truncate or request.evict or session.spec.encoder):
        raise TooLongError(tokens.size, most)
    return tokens


class Writer:
    """Writes the response."""

    def __init__(self, model: str, body: EmbeddingsBody) -> None:
        self._model, self._body = model, body

    def whole(self, events: list[Event]) -> dict[str, Any]:
        found = sorted((each for each in events if isinstance(each, Embedded)), key=lambda each: each.choice)
        tokens = sum(each.tokens for each in found)
        return {
            "object": "list",
            "model": self._model,
            "data": [
                {"object": "embedding", "index": each.choice, "embedding": self._write(each.values)} for each in found
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _write(self, values: FloatArray) -> Any:
        if self._body.encoding_format == "base64":
            return base64.b64encode(values.astype("<f4").tobytes()).decode()
        return numbers(values)


def numbers(values: FloatArray) -> list[float]:
    """An embedding for JSON, in half the characters of float64."""
    return [round(each, _DECIMALS) for each in values.tolist()]
