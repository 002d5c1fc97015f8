"""The endpoints that answer: for each its bodies, how these become requests, and how events become responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from edge.records import dataclass
from edge.run.request import Request
from edge.server.http import event
from edge.server.hub import Answering, Hub, Work
from edge.server.prompts import score
from edge.server.protocols import (
    anthropic,
    chat,
    completions,
    embeddings,
    ollama,
    ollama_models,
    rerank,
    responses,
    speech,
)
from edge.server.protocols.bodies import ChatBody, CompletionBody

Translate = Callable[[Any, Any, str], list[Request]]  # a body, the HTTP request's headers, and its tenant


@dataclass(frozen=True)
class Endpoint:
    """A row of the table. paths: the first is the documented one."""

    paths: tuple[str, ...]
    body: type
    translate: Translate
    writer: Callable[[str, Any, Answering], Any]  # of the response: for the model's name and the body
    work: Callable[[Any], Work | None] = lambda body: None  # in place of generating
    empty: Callable[[Hub, str, Any], Awaitable[Any]] | None = None  # the response to a body that needs no answer
    streams: Callable[[Any], bool] = lambda body: bool(body.stream)
    media_type: str = "text/event-stream"
    quiet: bytes = b": waiting\n\n"  # sent while a stream has no text
    lenient: bool = False  # about the body's content type
    form: bool = False  # whether the body is multipart/form-data, not JSON


def _ollama(path: str, body: type) -> Endpoint:
    return Endpoint(
        (path,), body, ollama.translate,
        lambda name, body, answering: ollama.Writer(name, chats=isinstance(body, ollama.ApiChatBody)),
        empty=ollama.load, streams=lambda body: body.stream is not False, media_type="application/x-ndjson", quiet=b"",
        lenient=True,
    )  # fmt: skip


def _ollama_embeddings(path: str, body: type) -> Endpoint:
    return Endpoint(
        (path,), body, ollama_models.translate,
        lambda name, body, answering: ollama_models.EmbeddingWriter(name, body),
        work=ollama_models.embeds, empty=ollama_models.no_embeddings, streams=lambda body: False, lenient=True,
    )  # fmt: skip


ENDPOINTS = (
    Endpoint(
        ("/v1/chat/completions", "/chat/completions"), ChatBody, chat.translate,
        lambda name, body, answering: chat.Writer(
            name, answering.tokenizer, choices=body.n or 1, usage=body.wants_usage, logprobs=bool(body.logprobs),
            votes=chat.votes_of(body) is not None,
        ),
    ),
    Endpoint(
        ("/v1/completions",), CompletionBody, completions.translate,
        lambda name, body, answering: completions.Writer(name, body, answering.tokenizer),
        work=lambda body: score if completions.scores(body) else None,
    ),
    Endpoint(
        ("/v1/responses",), responses.ResponsesBody, responses.translate,
        lambda name, body, answering: responses.Writer(name, body),
    ),
    Endpoint(
        ("/v1/messages",), anthropic.MessagesBody, anthropic.translate,
        lambda name, body, answering: anthropic.Writer(name, answering.flow), quiet=event({"type": "ping"}, "ping"),
    ),
    Endpoint(
        ("/v1/embeddings", "/embeddings"), embeddings.EmbeddingsBody, embeddings.translate,
        lambda name, body, answering: embeddings.Writer(name, body), work=embeddings.work_of,
        streams=lambda body: False,
    ),
    Endpoint(
        ("/v1/rerank", "/rerank", "/v2/rerank", "/reranking", "/v1/reranking"), rerank.RerankBody, rerank.translate,
        lambda name, body, answering: rerank.Writer(name, body), work=rerank.work_of, streams=lambda body: False,
    ),
    *(
        Endpoint(
            (path,), body, speech.translate, lambda name, body, answering: speech.Writer(name, body),
            work=speech.work_of, streams=lambda body: body.streams, form=True,
        )
        for path, body in (
            ("/v1/audio/transcriptions", speech.TranscriptionBody), ("/v1/audio/translations", speech.TranslationBody),
        )
    ),
    _ollama("/api/chat", ollama.ApiChatBody),
    _ollama("/api/generate", ollama.ApiGenerateBody),
    _ollama_embeddings("/api/embed", ollama_models.ApiEmbedBody),
    _ollama_embeddings("/api/embeddings", ollama_models.ApiEmbeddingsBody),
)  # fmt: skip
