"""Ollama's /api/chat and /api/generate, for programs that know no other."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import field
from typing import Any

from edge.records import dataclass
from edge.run.request import Chat, Request
from edge.server.events import Ended, Event, Piece
from edge.server.http import dumps, parse_body
from edge.server.hub import Hub
from edge.server.prompts import chat_of, said_by
from edge.server.protocols.answers import Answer, follow, gather, timings_of, usage_of
from edge.server.protocols.bodies import Budget, Drawn, Hints, grammar_of, limits_of
from edge.server.protocols.fields import said
from edge.server.protocols.offered import of_chat
from edge.server.refusal import RefusedError
from edge.values import brief

VERSION = "0.12.0"  # of the protocol: programs refuse older ones

_ZERO = re.compile(r"0+(\.0*)?[a-zµ]*$")
_NUMBER, _UNIT = r"(\d+(\.\d*)?|\.\d+)", "(ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"[-+]?({_NUMBER}|({_NUMBER}{_UNIT})+)", re.ASCII)  # as Go writes them: 1h30m

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "presence_penalty", "frequency_penalty")
OPTIONS = (*SAMPLING, "stop", "num_predict")


@dataclass(frozen=True, kw_only=True)
class Shared(Hints):
    """Fields of both bodies."""

    model: str | None = said("A name of /v1/models; the first model without it.")
    stream: bool | None = said("Send the answer in pieces, a line of JSON each (default: yes).")
    format: str | dict[str, Any] | None = said("json, or a JSON schema.")
    options: dict[str, Any] | None = said("num_predict, temperature, top_k, top_p, min_p, seed, stop and penalties.")
    keep_alive: str | float | None = said(
        "0 without a text unloads the model; else it stays until another needs the memory."
    )
    truncate: bool | None = said("Let rows of a prompt that is too long be evicted (default: no).")
    edge: Budget | None = said("Budgets of this request.")

    @property
    def unloads(self) -> bool:
        """Whether a request without a text unloads the model: `keep_alive` is 0, with or without a unit."""
        return bool(_ZERO.match(str(self.keep_alive)))


@dataclass(frozen=True, kw_only=True)
class ApiChatBody(Shared):
    """POST /api/chat"""

    messages: list[dict[str, Any]] = field(default_factory=list, metadata={"help": "The conversation."})
    tools: list[dict[str, Any]] | None = said("Functions that the model may call.")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Tools that the answer goes without."""
        return of_chat(self.tools).left_out

    @property
    def text(self) -> list[dict[str, Any]]:
        """The messages to answer. Without any, the request loads or unloads the model."""
        return self.messages


@dataclass(frozen=True, kw_only=True)
class ApiGenerateBody(Shared):
    """POST /api/generate"""

    prompt: str | None = said("The user's text.")
    system: str | None = said("The system prompt.")
    raw: bool | None = said("Continue the prompt as it is, without a chat template.")
    images: list[str] | None = said("Pictures before the prompt, in base64.")

    @property
    def text(self) -> str | None:
        """The prompt to answer. Without one, the request loads or unloads the model."""
        return self.prompt


def translate(body: ApiChatBody | ApiGenerateBody, headers: Any, tenant: str) -> list[Request]:
    """The request; none without a text. Raises RefusedError."""
    if isinstance(body.keep_alive, str) and not _DURATION.fullmatch(body.keep_alive):
        raise _wrong("keep_alive", "a duration, such as 5m", body.keep_alive)
    if not body.text:
        return []
    options = body.options or {}
    limit = options.get("num_predict")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
        raise _wrong("options.num_predict", "a whole number", limit)
    drawn = parse_body(Drawn, {name: options[name] for name in (*SAMPLING, "stop") if name in options}, "options")
    form = body.format
    grammar = None
    if form:
        grammar = grammar_of(
            {"type": "json_object"} if form == "json" else {"type": "json_schema", "schema": form}, "format"
        )
    raw = isinstance(body, ApiGenerateBody) and bool(body.raw)
    request = Request(
        _prompt(body), raw=raw, max_tokens=limit if limit and limit > 0 else None, sampling=drawn.sampling(),
        stop=drawn.stops(), think=body.mode(), grammar=grammar, tenant=tenant,
        **limits_of(body.edge, headers, evict=body.truncate is True),
    )  # fmt: skip
    return [request]


def _prompt(body: ApiChatBody | ApiGenerateBody) -> Chat | str:
    if isinstance(body, ApiGenerateBody):
        assert body.prompt
        if body.raw:
            if body.images:
                raise RefusedError(400, "images go through the chat template", param="images", code="invalid_value")
            return body.prompt
        system = [{"role": "system", "content": body.system}] if body.system else []
        return chat_of([*system, {"role": "user", "content": _shown(body.prompt, body.images, "images")}])
    roles = [message.get("role") for message in body.messages]
    if (number := next((n for n, role in enumerate(roles) if not isinstance(role, str)), None)) is not None:
        raise _wrong(f"messages[{number}].role", "text", roles[number])
    messages = [_message(each, f"messages[{n}]") for n, each in enumerate(body.messages)]
    return chat_of(messages, of_chat(body.tools).tools)


def _shown(content: Any, images: Any, where: str, role: str = "user") -> str | list[dict[str, Any]]:
    """A content, text or parts, behind pictures in base64, which only users and tools show. Raises RefusedError."""
    if not images:
        return said_by(role, content, where)
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise _wrong(where.replace("content", "images"), "a list of pictures in base64", images)
    sources = ({"type": "base64", "data": each.rpartition(",")[2]} for each in images)
    shown: list[dict[str, Any]] = [{"type": "image", "source": source} for source in sources]
    return said_by(role, [*shown, *(content if isinstance(content, list) else [content] if content else [])], where)


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message in OpenAI's form. Calls have no identifiers here: results name their function at most."""
    if message.get("audio"):
        why = f"{where}.audio is not supported: send sounds as input_audio to /v1/chat/completions"
        raise RefusedError(400, why, param=f"{where}.audio", code="unsupported")
    content = _shown(message.get("content"), message.get("images"), f"{where}.content", message["role"])
    said: dict[str, Any] = {"role": message["role"], "content": content}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise _wrong(f"{where}.tool_calls", "a list", calls)
        said["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    names = {"thinking": "thinking", "tool_call_id": "tool_call_id", "tool_name": "name", "name": "name"}
    return said | {ours: message[name] for name, ours in names.items() if message.get(name) is not None}


def _wrong(where: str, what: str, given: Any) -> RefusedError:
    return RefusedError(400, f"{where} must be {what}, not {brief(given)}", param=where, code="invalid_value")


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _wrong(where, "an object with a function", call)
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    called = {"name": function.get("name"), "arguments": text}
    return {"id": call.get("id"), "type": "function", "function": called}


async def load(hub: Hub, name: str, body: ApiChatBody | ApiGenerateBody) -> dict[str, Any]:
    """The response to a request without a text, which loads or unloads the model."""
    if body.unloads:
        await hub.pool.unload(body.model)
    else:
        hub.pool.release(await hub.lease(body.model))
    return Writer(name, chats=isinstance(body, ApiChatBody)).without_text(unloaded=body.unloads)


class Writer:
    """Writes one response, whole or in lines. chats: the request is of /api/chat."""

    def __init__(self, model: str, *, chats: bool) -> None:
        self._model, self._chats = model, chats
        self._answers: dict[int, Answer] = {0: Answer()}

    def chunks(self, found: Event) -> list[bytes]:
        """The line for an event of the answer, if there is one."""
        follow(self._answers, found)
        if isinstance(found, Piece):
            return [dumps(self._line("" if found.thought else found.text, found.text if found.thought else "")) + b"\n"]
        if isinstance(found, Ended):
            return [dumps(self._end("", "")) + b"\n"]
        return []

    def last(self) -> list[bytes]:
        """The end of a stream: nothing, since `chunks` has sent the last line."""
        return []

    def failed(self, error: RefusedError) -> list[bytes]:
        """The end of a stream after an error."""
        return [dumps(error.body("ollama")) + b"\n"]

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The response to a request without streaming."""
        for each in events:
            gather(self._answers, each)
        return self._end(self._answers[0].text, self._answers[0].thought)

    def without_text(self, *, unloaded: bool) -> dict[str, Any]:
        """The response to a request that loads or unloads the model."""
        return {**self._line(""), "done": True, "done_reason": "unload" if unloaded else "load"}

    def _line(self, text: str, thought: str = "", calls: Any = None) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")
        head = {"model": self._model, "created_at": now, "done": False}
        thinking = {"thinking": thought} if thought else {}
        if not self._chats:
            return {**head, "response": text, **thinking}
        message = {"role": "assistant", "content": text, **thinking, **({"tool_calls": calls} if calls else {})}
        return {**head, "message": message}

    def _end(self, text: str, thought: str) -> dict[str, Any]:
        answer = self._answers[0]
        calls = [{"function": {"name": each.name, "arguments": json.loads(each.arguments)}} for each in answer.calls]
        usage, timings = usage_of([answer]), timings_of([answer]) or {}
        report = answer.ended.report if answer.ended else None
        return {
            **self._line(text, thought, calls), "done": True,
            "done_reason": "length" if answer.reason == "length" else "stop",
            "total_duration": int(1e9 * report.timings.total_s) if report else 0,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int(1e6 * timings.get("prompt_ms", 0)),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int(1e6 * timings.get("predicted_ms", 0)),
            "edge": usage.get("edge"),
        }  # fmt: skip
