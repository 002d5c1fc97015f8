"""POST /v1/rerank: texts by their relevance to a query, in the form of Jina's and Cohere's API, or of TEI's /rerank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import Annotated, Any

import numpy as np

from edge.records import dataclass
from edge.run.request import Request
from edge.run.sequences.ranking import ranked
from edge.run.session import Session
from edge.server.events import Event, Ranked
from edge.server.hub import Work
from edge.server.models.costs import RANKED
from edge.server.models.worker import Job
from edge.server.protocols.embeddings import requests_of
from edge.server.protocols.fields import said, whole
from edge.server.refusal import RefusedError

_DECIMALS = 6


@dataclass(frozen=True)
class Document:
    """A text of the `documents`."""

    text: str


@dataclass(frozen=True, kw_only=True)
class RerankBody:
    """POST /v1/rerank"""

    query: str = field(metadata={"help": "The query."})
    documents: list[str] | list[Document] | None = said("The texts.")
    texts: list[str] | None = said("The texts, for an answer in the form of Text Embeddings Inference.")
    model: str | None = said("A name of /v1/models; the first model without it.")
    top_n: Annotated[int, whole(1, 1 << 31)] | None = said("Return this many texts at most.")
    return_documents: bool | None = said("Return texts, too.")
    return_text: bool | None = said("The same, with `texts`.")
    truncate: bool | None = said("Texts that are too long lose their ends, in any case.")
    instruction: str | None = said("The task, for rerankers that answer yes or no.")

    @property
    def all_texts(self) -> list[str]:
        given: Sequence[str | Document] = self.texts or self.documents or []
        return [each if isinstance(each, str) else each.text for each in given]


def translate(body: RerankBody, headers: Any, tenant: str) -> list[Request]:
    """A request for each text. Raises RefusedError."""
    if body.texts and body.documents:
        raise RefusedError(400, "state documents or texts, not both", param="documents", code="invalid_value")
    if not body.all_texts:
        name, lacking = ("documents", body.documents) if body.texts is None else ("texts", body.texts)
        why = f"{name} is {'missing' if lacking is None else 'empty'}"
        raise RefusedError(400, why, param=name, code="invalid_value")
    if not body.query.strip():
        raise RefusedError(400, "the query is empty", param="query", code="invalid_value")
    return requests_of(body.all_texts, tenant)


def work_of(body: RerankBody) -> Work:
    return partial(_rank, query=body.query, instruction=body.instruction)


def _rank(
    numbered: Sequence[tuple[int, Request]], session: Session, job: Job, *, query: str, instruction: str | None
) -> None:
    """Rank texts. Runs in the worker's thread."""
    job.flow.claim.add("answers", RANKED * len(numbered))
    texts = [str(request.prompt) for _, request in numbered]
    scores, tokens = session.rank_counted(query, texts, instruction=instruction)
    for place, ((choice, _), score) in enumerate(zip(numbered, scores.tolist(), strict=True)):
        job.flow.put(Ranked(choice, 0 if place else tokens, score))


class Writer:
    """Writes the response."""

    def __init__(self, model: str, body: RerankBody) -> None:
        self._model, self._body = model, body

    def whole(self, events: list[Event]) -> Any:
        found = sorted((each for each in events if isinstance(each, Ranked)), key=lambda each: each.choice)
        scores = np.array([each.score for each in found])
        texts, body = self._body.all_texts, self._body
        order = [(index, round(score, _DECIMALS)) for index, score in ranked(scores, body.top_n)]
        if body.texts:
            return [
                {"index": index, "score": score, **({"text": texts[index]} if body.return_text else {})}
                for index, score in order
            ]
        tokens = sum(each.tokens for each in found)
        return {
            "object": "list",
            "model": self._model,
            "results": [
                {
                    "index": index, "relevance_score": score,
                    **({"document": {"text": texts[index]}} if body.return_documents else {}),
                } for index, score in order
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }  # fmt: skip
