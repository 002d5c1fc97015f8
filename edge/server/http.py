"""HTTP: reads bodies, writes JSON and streams of events, and cancels requests whose client has gone away."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge.server.deadline import Deadline
from edge.server.refusal import RefusedError, protocol_of, refusal_of
from edge.values import brief, parse

MOST_VALUES = 1 << 18  # values in a body: each takes many times its text in memory
DEEPEST = 64  # nesting of lists and objects
BODY_S = 30.0  # seconds within which a client must have sent its request
STALLED_S = 60.0  # seconds for which a client may leave a part of the answer unread
QUIET_S = 10.0  # seconds without text after which a stream sends a keep-alive
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*\\?(?:"|\Z)', re.DOTALL)  # matches from every quote, in linear time

T = TypeVar("T")


async def read_body(request: Request, most: int, grow: Callable[[int], None]) -> bytes:
    """Read a body. grow: called with the size of each part before it is kept.

    Raises RefusedError if it has more than `most` bytes, or takes longer than BODY_S, and the errors of `grow`. What is
    too large is received to its end and dropped, since a client that still sends may lose the response.
    """
    stated = request.headers.get("content-length", "0")
    size = known = int(stated[:15]) if stated.isascii() and stated.isdigit() else 0
    if known > most and "expect" in request.headers:  # the client waits for a word before it sends
        raise _too_large(known, most)
    parts, kept = list[bytes](), 0
    try:
        async with Deadline(BODY_S):
            async for part in request.stream():
                kept += len(part)
                size = max(size, kept)
                if size <= most:
                    grow(len(part))
                    parts.append(part)
                else:
                    parts.clear()
    except asyncio.TimeoutError:
        raise RefusedError(400, f"the request was not sent within {BODY_S:.0f} s", code="timeout") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    if size > most:
        raise _too_large(size, most)
    return b"".join(parts)


def _too_large(size: int, most: int) -> RefusedError:
    return RefusedError(413, f"the request has {size} bytes, {most} are the most", code="too_large")


def check_type(request: Request, *, lenient: bool) -> None:
    """Refuse bodies whose type is not JSON: web pages can send other types to any server without a preflight request.
    lenient: accept a missing type, and that of curl's -d."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (lenient and kind in ("", "application/x-www-form-urlencoded")):
        return
    raise RefusedError(415, f"the content is {kind[:60]!r}: send Content-Type: application/json", code="media_type")


def decode(body: bytes) -> Any:
    """Parse JSON. Raises RefusedError if it is invalid or nested too deep."""
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise RefusedError(400, "the request is not UTF-8", code="json") from None
    except RecursionError:
        raise RefusedError(400, f"the request is nested more than {DEEPEST} deep", code="json") from None
    except ValueError as error:
        raise RefusedError(400, f"the request is not JSON: {error}"[:200], code="json") from None
    if _too_deep(found):
        raise RefusedError(400, f"the request is nested more than {DEEPEST} deep", code="json")
    return found


def count_values(body: bytes) -> int:
    """An upper bound on the number of values in JSON, by its commas and opening brackets outside of strings. Raises
    RefusedError if it has more than MOST_VALUES."""
    found = _marks(body, 0, len(body))
    if found > len(body) // 16:
        for number, each in enumerate(_STRINGS.finditer(body)):
            found -= _marks(body, each.start(), each.end())
            if number > 2 * MOST_VALUES:  # names and values
                found = number
                break
    if found > MOST_VALUES:
        raise RefusedError(413, f"the request has more than {MOST_VALUES} values", code="too_large")
    return found


def _marks(body: bytes, start: int, end: int) -> int:
    return sum(body.count(mark, start, end) for mark in (b",", b"[", b"{"))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += [part for part in each.values() if isinstance(part, dict | list)]
            elif isinstance(each, list):
                inner += [part for part in each if isinstance(part, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def parse_body(kind: type[T], data: Any, where: str = "") -> T:
    """The checked fields of a body, or of a part of it. Raises RefusedError, which names the wrong field."""
    if not isinstance(data, dict):
        raise RefusedError(400, f"{where or 'the request'} must be a JSON object, not {brief(data)}", code="json")
    try:
        return parse(kind, data, where)
    except ValueError as error:
        message = str(error).replace("must be a table", "must be an object")
        raise RefusedError(400, message, param=message.split(" ", 1)[0][:80], code="invalid_value") from None


def dumps(value: Any) -> bytes:
    """JSON in one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain).encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value)


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def refuse(error: Exception, scope: Scope) -> Json:
    """The response to a request that fails, in the form of its protocol."""
    refused = refusal_of(error)
    return Json(refused.body(protocol_of(scope), scope.get("request_id")), refused.status, refused.headers)


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + (data if isinstance(data, bytes) else dumps(data)) + b"\n\n"


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client goes away, cancel `work`, close a result that comes nevertheless, and
    raise ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        left = not task.done()
        for each in (task, gone):
            each.cancel()
        found, _ = await asyncio.gather(task, gone, return_exceptions=True)
        if left and hasattr(found, "close"):
            found.close()


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamResponse(Response):
    """Sends parts as they come, until the client goes away or stops reading. quiet: sent while no part comes."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        media_type: str,
        quiet: bytes = b"",
        end: Callable[[], None] = lambda: None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.parts, self.quiet, self.end, self.status_code, self.background = parts, quiet, end, 200, None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGoneError, OSError, asyncio.TimeoutError):
                await until_gone(receive, self._send(send))
        finally:
            self.end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        coming: asyncio.Future[bytes] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(self.parts))
                done, _ = await asyncio.wait((coming,), timeout=QUIET_S)
                if done:
                    try:
                        part = coming.result()
                    except StopAsyncIteration:
                        break
                    coming = None
                else:
                    part = self.quiet
                if part:
                    async with Deadline(STALLED_S):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            if coming is not None:
                coming.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
