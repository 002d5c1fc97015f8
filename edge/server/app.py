"""The server's application: its routes, from request bodies to responses. protocols/table.py has those that answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge.errors import EdgeError
from edge.model.structure.spec import deaf
from edge.run.request import Request as Generating
from edge.run.session import Session
from edge.server import page
from edge.server.documents import Shelf, sources_header
from edge.server.events import Event, Likely, Piece
from edge.server.forms import boundary_of, parse_form
from edge.server.guard import Guard
from edge.server.http import (
    ClientGoneError,
    Json,
    StreamResponse,
    check_type,
    count_values,
    decode,
    parse_body,
    read_body,
    refuse,
    until_gone,
)
from edge.server.hub import Hub
from edge.server.ledger import Claim
from edge.server.models.costs import FORM, of_body, of_bytes, picture_bytes, pictures_in
from edge.server.prompts import count_tokens
from edge.server.protocols import anthropic, native, ollama, ollama_models, openapi
from edge.server.protocols.anthropic import MessagesBody
from edge.server.protocols.bodies import DetokenizeBody, TokenizeBody
from edge.server.protocols.ollama_models import ApiShowBody
from edge.server.protocols.table import ENDPOINTS, Endpoint
from edge.server.protocols.unread import check_fields, ignored_header
from edge.server.refusal import RefusedError, protocol_of, refusal_of

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def make_app(hub: Hub) -> ASGIApp:
    """The application of a server; it closes the hub's models when it ends."""
    shelf = Shelf(hub.settings.documents or (), hub)
    server = Endpoints(hub, shelf)
    routes = [
        *(Route(path, page.serve) for path in page.names()),
        Route("/health", server.about(lambda request: native.health(hub))),
        Route("/v1/health", server.about(lambda request: native.health(hub))),
        Route("/metrics", server.about(lambda request: native.metrics(hub))),
        Route("/props", server.about(server.props)),
        Route("/openapi.json", server.about(lambda request: Json(openapi.describe()))),
        Route("/v1/models", server.about(server.models)),
        Route("/models", server.about(server.models)),
        Route("/v1/models/{name:path}", server.about(server.model)),
        *(Route(path, server.answer(each), methods=["POST"]) for each in ENDPOINTS for path in each.paths),
        Route("/v1/messages/count_tokens", server.count, methods=["POST"]),
        Route("/api/show", server.show, methods=["POST"]),
        Route("/api/pull", server.pull, methods=["POST"]),
        *(Route(path, server.unchanged, methods=[method]) for path, (method, _) in ollama_models.UNCHANGED.items()),
        Route("/api/tags", server.about(lambda request: Json(ollama_models.tags(hub)))),
        Route("/api/ps", server.about(lambda request: Json(ollama_models.running(hub)))),
        Route("/api/version", server.about(lambda request: Json({"version": ollama.VERSION}))),
        Route("/tokenize", server.with_model(TokenizeBody, native.tokenize), methods=["POST"]),
        Route("/tokenizer_info", server.tokenizer_info),
        Route("/detokenize", server.with_model(DetokenizeBody, native.detokenize), methods=["POST"]),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await hub.pool.close()
        shelf.close()

    handlers: Any = {
        RefusedError: _refuse, EdgeError: _refuse, ClientGoneError: _refuse, HTTPException: _refuse_route,
        Exception: _refuse,
    }  # fmt: skip
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    return Guard(Counting(app, hub.responses), hub.settings, page.names())


class Endpoints:
    """The handlers of the routes."""

    def __init__(self, hub: Hub, shelf: Shelf) -> None:
        self._hub, self._shelf = hub, shelf

    def about(self, respond: Callable[[Request], Response]) -> Handler:
        """A handler that answers at once, without loading a model."""

        async def handle(request: Request) -> Response:
            return respond(request)

        return handle

    def props(self, request: Request) -> Response:
        entry, _ = self._hub.pool.find(request.query_params.get("model"))
        return Json(native.props(self._hub, entry))

    def models(self, request: Request) -> Response:
        """GET /v1/models"""
        found = native.models(self._hub)
        return Json(anthropic.models(found["data"]) if protocol_of(request.scope) == "anthropic" else found)

    def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        name = request.path_params["name"]
        entry, _ = self._hub.pool.find(name)
        found = {each["id"]: each for each in native.models(self._hub)["data"]}
        model = found.get(name) or found[entry.name]
        return Json(anthropic.model(model) if protocol_of(request.scope) == "anthropic" else model)

    def with_model(self, kind: type[T], work: Callable[[T, Any, Claim], bytes]) -> Handler:
        """A handler that needs a loaded model, but generates nothing. work: makes the response, in a thread."""

        async def handle(request: Request) -> Response:
            async with self._body(request) as data:
                body = self._parse(request, kind, data)
                async with self._session(getattr(body, "model", None)) as session:
                    content = await asyncio.to_thread(work, body, session, request.state.claim)
                    return Response(content, media_type="application/json")

        return handle

    async def tokenizer_info(self, request: Request) -> Response:
        async with self._session(request.query_params.get("model")) as session:
            return Json(native.tokenizer_info(session))

    def answer(self, endpoint: Endpoint) -> Handler:
        """The handler of a row of the table."""

        async def handle(request: Request) -> Response:
            read = self._form(request) if endpoint.form else self._body(request, lenient=endpoint.lenient)
            async with read as data:
                body: Any = self._parse(request, endpoint.body, data)
                requests = endpoint.translate(body, request.headers, request.scope.get("tenant", ""))
                entry, _ = self._hub.pool.find(body.model)
                name = body.model or entry.name
                if endpoint.form and entry.spec.ears is None:
                    raise deaf(entry.name)
                if not requests and endpoint.empty is not None:
                    return Json(await endpoint.empty(self._hub, name, body))
                return await self._answer(request, endpoint, name, body, requests)

        return handle

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        async with self._body(request) as data:
            body = self._parse(request, MessagesBody, data)
            [asked] = anthropic.translate(body, request.headers, "")
            async with self._session(body.model) as session:
                count = await asyncio.to_thread(count_tokens, session.model, asked)
                return Json({"input_tokens": count})

    async def show(self, request: Request) -> Response:
        """POST /api/show"""
        async with self._body(request, lenient=True) as data:
            body = self._parse(request, ApiShowBody, data)
            entry, _ = self._hub.pool.find(body.model or body.name)
            return Json(ollama_models.show(entry))

    async def pull(self, request: Request) -> Response:
        """POST /api/pull"""
        async with self._body(request, lenient=True) as data:
            body = self._parse(request, ApiShowBody, data)
            return Json(ollama_models.pull(self._hub, body.model or body.name))

    async def unchanged(self, request: Request) -> Response:
        """Endpoints that would change the server's models."""
        raise ollama_models.unchanged(request.url.path)

    def _parse(self, request: Request, kind: type[T], data: Any) -> T:
        """The checked fields of a body. Raises RefusedError, also for fields that are not supported."""
        request.state.ignored = check_fields(kind, data)
        return parse_body(kind, data)

    @asynccontextmanager
    async def _session(self, model: str | None) -> AsyncIterator[Session]:
        """Yield the session of a model, which stays loaded within the block."""
        lease = await self._hub.lease(model)
        try:
            yield lease.session
        finally:
            self._hub.pool.release(lease)

    @asynccontextmanager
    async def _body(self, request: Request, *, lenient: bool = False) -> AsyncIterator[Any]:
        """Yield the JSON of a request, whose memory is claimed within the block, and as long as it is answered."""
        check_type(request, lenient=lenient)
        claim = request.state.claim = Claim(self._hub.pool.ledger)
        try:
            body = await read_body(
                request, self._hub.settings.most_body, lambda size: claim.add("bodies", of_bytes(size), waits=True)
            )
            values, size = await asyncio.to_thread(count_values, body), len(body)
            claim.add("bodies", of_body(0, values, 0), waits=True)
            data = decode(body)
            del body
            claim.add("bodies", of_body(size, 0, picture_bytes(data)), waits=True)
            if self._hub.settings.fetch_images:
                await self._fetch(request, data, claim)
            yield data
        finally:
            claim.release()

    async def _fetch(self, request: Request, data: Any, claim: Claim) -> None:
        """Put pictures in place of their addresses, for a model that sees. Raises RefusedError."""
        from edge.server.fetching import Fetcher  # here: few servers fetch pictures

        name = data.get("model") if isinstance(data, dict) else None
        if not any(pictures_in(data)) or not self._hub.pool.find(name if isinstance(name, str) else None)[0].sees:
            return
        fetcher = Fetcher(self._hub.settings.most_body)
        fetching = asyncio.to_thread(
            fetcher.fill, pictures_in(data), lambda size: claim.add("bodies", of_bytes(size * 4 // 3), waits=True)
        )
        await until_gone(request.receive, fetching)

    @asynccontextmanager
    async def _form(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """As `_body`, of a request in multipart/form-data."""
        boundary = boundary_of(request.headers.get("content-type", ""))
        claim = request.state.claim = Claim(self._hub.pool.ledger)
        try:
            body = await read_body(
                request, self._hub.settings.most_body, lambda size: claim.add("bodies", FORM * size, waits=True)
            )
            data = parse_form(body, boundary)
            del body
            yield data
        finally:
            claim.release()

    async def _answer(
        self, request: Request, endpoint: Endpoint, name: str, body: Any, requests: Sequence[Generating]
    ) -> Response:  # fmt: skip
        """Generate, and send the events as they come or as one response."""
        ignored = ignored_header([*request.state.ignored, *getattr(body, "left_out", ())])
        named = getattr(getattr(body, "edge", None), "documents", None)
        if named is not None:
            finding = self._shelf.ground(named, body.model, requests, request.state.claim)
            requests = await until_gone(request.receive, finding)
            ignored |= sources_header(requests[0].sources)
        asked = self._hub.ask(body.model, requests, request.state.claim, work=endpoint.work(body))
        answering = await until_gone(request.receive, asked)
        try:
            writer = endpoint.writer(name, body, answering)
            events = answering.events()
            if not endpoint.streams(body):
                found = await until_gone(request.receive, _all(events))
                answering.close()
                made = writer.whole(found)
                response = made if isinstance(made, Response) else Json(made)
                response.headers.update(ignored)
                return response
            first = await until_gone(request.receive, answering.first())
            events = answering.events(first, keeps=getattr(writer, "keeps", False))
        except BaseException:
            answering.close()
            raise
        return StreamResponse(_stream(writer, events), endpoint.media_type, endpoint.quiet, answering.close, ignored)


async def _stream(writer: Any, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """A response in its protocol's form; an error becomes its last part."""
    try:
        async for each in events:
            for chunk in writer.chunks(each):
                yield chunk
        for chunk in writer.last():
            yield chunk
    except Exception as error:
        for chunk in writer.failed(refusal_of(error)):
            yield chunk


async def _all(events: AsyncIterator[Event]) -> list[Event]:
    """All events, with the pieces of a text joined."""
    found = list[Event]()
    texts: dict[int, tuple[int, bool, list[str]]] = {}  # by choice: of the pieces in a row, their place and parts

    def join(choice: int) -> None:
        if choice in texts:
            place, thought, parts = texts.pop(choice)
            found[place] = Piece(choice, "".join(parts), thought)

    async for each in events:
        last = texts.get(each.choice)
        if isinstance(each, Piece) and last is not None and last[1] == each.thought:
            last[2].append(each.text)
        elif not isinstance(each, Likely):  # whose text follows
            join(each.choice)
            if isinstance(each, Piece):
                texts[each.choice] = len(found), each.thought, [each.text]
            found.append(each)
        else:
            found.append(each)
    for choice in list(texts):
        join(choice)
    return found


class Counting:
    """Counts responses by path and status."""

    def __init__(self, app: ASGIApp, responses: Counter[tuple[str, int]]) -> None:
        self._app, self._responses = app, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", None) or "other"
                self._responses[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, count)


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)
    return refuse(error, request.scope)


async def _refuse_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    words = {404: f"there is no {request.url.path[:80]}", 405: f"{request.method} does not work here"}
    headers = dict(getattr(error, "headers", None) or {})
    refused = RefusedError(status, words.get(status, "bad request"), code={404: "not_found", 405: "method"}.get(status))
    found = refuse(refused, request.scope)
    found.headers.update(headers)
    return found
