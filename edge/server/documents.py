"""Answers by the server's own indexes: requests name one in `edge.documents`."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial

from edge.documents.encoder import check_encoder, open_encoder
from edge.documents.packing import pack
from edge.documents.searching import Found, search
from edge.documents.store import Store
from edge.errors import InputError
from edge.model.chat.parts import newest
from edge.options import Options
from edge.run.grounding import Grounded, Reader, grounded
from edge.run.report import Cited
from edge.run.request import Chat, Request
from edge.server.events import Embedded
from edge.server.hub import Hub
from edge.server.ledger import Claim
from edge.server.protocols.embeddings import embed
from edge.server.refusal import RefusedError
from edge.types import FloatArray

HEADER = "Edge-Sources"
_TOP = 5  # passages of a prompt
_FIELD = "edge.documents"


class Shelf:
    """The indexes that a server offers, by name; their encoders are models of its pool. Raises InputError for an index
    that is not there, and the errors of `open_encoder`."""

    def __init__(self, names: Sequence[str], hub: Hub) -> None:
        self._hub, self._opened, self._lock = hub, ExitStack(), threading.Lock()
        self._stores: dict[str, tuple[Store, str, str | None]] = {}  # with their encoder, and its prompt of questions
        for name in names:
            store = self._opened.enter_context(Store(name))
            model = open_encoder(store.encoder or "", Options())
            check_encoder(store, model)
            encoder = hub.pool.add_encoder(store.encoder or "", str(model.path))
            self._stores[name] = store, encoder, "query" if "query" in model.prompts else None

    def close(self) -> None:
        self._opened.close()

    async def ground(
        self, name: str, model: str | None, requests: Sequence[Request], claim: Claim
    ) -> list[Request]:  # fmt: skip
        """The requests of one body with passages before their question. Raises RefusedError."""
        began = time.perf_counter()
        store, encoder, prompt = self._find(name)
        asked = requests[0]
        if not isinstance(asked.prompt, Chat):
            raise _refused(f"{_FIELD} needs a chat: use /v1/chat/completions")
        number = newest([str(each.get("role")) for each in asked.prompt.messages])
        question = asked.prompt.messages[number].get("content") if number >= 0 else None
        if not isinstance(question, str) or not question.strip():
            raise _refused(f"{_FIELD} needs a question in text")
        vector = await self._embedded(encoder, prompt, question, asked, claim)
        lease = await self._hub.lease(model)
        try:
            messages, sources = await asyncio.to_thread(
                self._packed, store, question, vector, asked, lease.session.reader
            )
        finally:
            self._hub.pool.release(lease)
        spent = time.perf_counter() - began
        return [
            replace(
                each, prompt=replace(asked.prompt, messages=messages), sources=sources,
                time=None if each.time is None else max(0.0, each.time - spent),
            ) for each in requests
        ]  # fmt: skip

    def _find(self, name: str) -> tuple[Store, str, str | None]:
        if name not in self._stores:
            known = ", ".join(self._stores) or "none: edge serve --documents NAME offers one"
            raise RefusedError(
                404, f"there is no index {name[:80]!r} here ({known})", param=_FIELD, code="index_not_found"
            )
        return self._stores[name]

    async def _embedded(
        self, encoder: str, prompt: str | None, question: str, asked: Request, claim: Claim
    ) -> FloatArray:  # fmt: skip
        work = partial(embed, truncate=True, prompt_name=prompt)
        answering = await self._hub.ask(encoder, [Request(question, tenant=asked.tenant)], claim, work=work)
        try:
            [found] = [each async for each in answering.events() if isinstance(each, Embedded)]
        finally:
            answering.close()
        return found.values

    def _packed(
        self, store: Store, question: str, vector: FloatArray, asked: Request, reader: Reader
    ) -> tuple[list[dict[str, object]], tuple[Cited, ...]]:
        """The messages with passages, and these. Runs in a thread."""
        with self._lock:
            found = search(store, question, vector, most=_TOP)
        assert isinstance(asked.prompt, Chat)
        try:
            _, messages, grounding = grounded(
                _Packing(found), reader, None, asked.prompt.messages, None, asked.max_tokens
            )
        except InputError as error:
            raise _refused(str(error)) from None
        return messages, grounding.sources


class _Packing:
    """Packs passages that were found before."""

    def __init__(self, found: Sequence[Found]) -> None:
        self._found = found

    def ground(self, question: str, reader: Reader, room: int) -> Grounded:
        encode = reader.model.tokenizer.encode
        return pack(question, self._found, lambda text: encode(text, start=False).size, room)


def sources_header(sources: Sequence[Cited]) -> dict[str, str]:
    """The header of a response whose prompt has passages: without their texts, in ASCII."""
    if not sources:
        return {}
    named = ("number", "title", "heading", "file", "place", "unit")
    listed = [{name: value for name, value in asdict(each).items() if name in named} for each in sources]
    return {HEADER: json.dumps(listed)}


def _refused(message: str) -> RefusedError:
    return RefusedError(400, message, param=_FIELD, code="invalid_value")
