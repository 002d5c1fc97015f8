"""Refused requests: a status and one line of JSON, in the form of the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.datastructures import Headers

from edge.errors import BudgetError, EdgeError, EngineError, InputError, MissingExtraError, UnsupportedError

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "server_error", 503: "overloaded_error",
}  # fmt: skip
_ANTHROPIC = {413: "request_too_large", 500: "api_error"}  # names that differ in Anthropic's API
_SCHEMA = ".function.parameters"  # which Anthropic's tools have as input_schema

Protocol = Literal["openai", "anthropic", "ollama"]


def protocol_of(scope: Mapping[str, Any]) -> Protocol:
    """The protocol of an HTTP request, by its path, or by a header that Anthropic's clients send with each request."""
    path = scope["path"]
    if path.startswith("/api/"):
        return "ollama"
    named = "anthropic-version" in Headers(scope=scope)  # type: ignore[arg-type]
    return "anthropic" if named or path.startswith("/v1/messages") else "openai"


class RefusedError(Exception):
    """A request that is not carried out. param: the field of the body that is wrong. retry: seconds after which the
    same request may succeed. closes: the connection ends with the response."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        retry: int | None = None, closes: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry = status, message, code, param, retry
        self.closes = closes

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry is None else {"Retry-After": str(self.retry)}
        found |= {"Connection": "close"} if self.closes else {}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def words(self, protocol: Protocol) -> str:
        """The message, which some protocols have in words of their own."""
        own = protocol == "anthropic" and (self.param or "").endswith(_SCHEMA)
        return self.message.replace(_SCHEMA, ".input_schema", 1) if own else self.message

    def body(self, protocol: Protocol = "openai", request_id: str | None = None) -> dict[str, Any]:
        """The error in the form of a protocol."""
        if protocol == "ollama":
            return {"error": self.words(protocol)}
        if protocol == "anthropic":
            error = {"type": _ANTHROPIC.get(self.status, self.type), "message": self.words(protocol)}
            return {"type": "error", "error": error, "request_id": request_id}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class TooLongError(RefusedError):
    """A prompt that is longer than the rows, in the words by which programs know that they have to compact it."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            400, f"the maximum context length is {most} tokens, but the prompt has {tokens}: shorten it, or let its "
            'rows be evicted by "edge": {"evict": true}', code="context_length_exceeded",
        )  # fmt: skip
        self._tokens, self._most = tokens, most

    def words(self, protocol: Protocol) -> str:
        if protocol == "anthropic":
            return f"prompt is too long: {self._tokens} tokens > {self._most} maximum"
        if protocol == "ollama":
            return f"prompt too long; exceeded max context length by {self._tokens - self._most} tokens"
        return self.message


def refusal_of(error: Exception) -> RefusedError:
    """The refusal that reports an error. Internal errors and those of engines are reported without details."""
    if isinstance(error, RefusedError):
        return error
    message = " ".join(str(error).split())
    if isinstance(error, BudgetError):
        field = f"edge.{error.param}" if error.param else None
        said = message.replace(f"--{error.param} ", f"{field} ") if field else message
        return RefusedError(422, said, code="budget_exceeded", param=field)
    if isinstance(error, InputError):
        return RefusedError(400, message, code="invalid_value", param=error.param)
    if isinstance(error, UnsupportedError | MissingExtraError):
        return RefusedError(400, message, code="unsupported")
    if isinstance(error, EdgeError) and not isinstance(error, EngineError):
        return RefusedError(503, message, code="unavailable", retry=5)
    return RefusedError(500, "the model failed on this request" if isinstance(error, EngineError) else "internal error")
