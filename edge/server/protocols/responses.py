"""POST /v1/responses without state, as Codex uses it: each request has the whole conversation; nothing is stored."""

from __future__ import annotations

import time
from dataclasses import field
from typing import Any, Literal
from uuid import uuid4

from edge.records import dataclass
from edge.run.request import Request
from edge.server.events import Call, Ended, Event, Piece
from edge.server.http import event
from edge.server.prompts import chat_of
from edge.server.protocols.answers import Answer, gather, reason_of, usage_of
from edge.server.protocols.bodies import Budget, Count, Drawn, Hints, grammar_of, limits_of
from edge.server.protocols.fields import said
from edge.server.protocols.items import messages_of
from edge.server.protocols.offered import of_responses
from edge.server.refusal import RefusedError
from edge.tools.parser import ArgumentPiece, CallBegin, CallCut, CallEnd

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # by items: the types of their parts


@dataclass(frozen=True, kw_only=True)
class ResponsesBody(Hints):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]] = field(metadata={"help": "A text, or the items of a conversation."})
    model: str | None = said("A name of /v1/models; the first model without it.")
    instructions: str | None = said("The system prompt.")
    max_output_tokens: Count | None = said("Most tokens of the answer.")
    stream: bool | None = said("Send the answer in pieces, as server-sent events.")
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = said(
        "Functions that the model may call, in namespaces or not; others are left out."
    )
    tool_choice: str | dict[str, Any] | None = said("none, auto, required, or a function.")
    parallel_tool_calls: bool | None = said("Whether the model may call several functions.")
    text: dict[str, Any] | None = said("The form of the answer, in `format`.")
    include: list[str] | None = said("Ignored, but for message.output_text.logprobs, which is not supported.")
    metadata: dict[str, Any] | None = said("Comes back with the answer.")
    previous_response_id: str | None = said("Not supported: nothing is stored.")
    truncation: Literal["auto", "disabled"] | None = said("auto: rows of a prompt that is too long may be evicted.")
    edge: Budget | None = said("Budgets of this request.")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Tools that the answer goes without."""
        return of_responses(self.tools).left_out


def translate(body: ResponsesBody, headers: Any, tenant: str) -> list[Request]:
    """The request. Raises RefusedError."""
    if body.previous_response_id:
        message = "previous_response_id: this server stores nothing: send the whole conversation as input"
        raise RefusedError(400, message, param="previous_response_id", code="unsupported")
    if "message.output_text.logprobs" in (body.include or ()):
        raise RefusedError(400, "include: there are no logprobs here", param="include", code="unsupported")
    if not body.input:
        raise RefusedError(400, "input is empty", param="input", code="invalid_value")
    messages: list[dict[str, Any]] = []
    offered = of_responses(body.tools)
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages += messages_of(items, offered)
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") != "allowed_tools":
        choice = {"type": "function", "function": {"name": offered.seen(choice.get("name"), choice.get("namespace"))}}
    drawn = Drawn(temperature=body.temperature, top_p=body.top_p)
    request = Request(
        chat_of(_merged(messages), offered.tools, choice, body.parallel_tool_calls is not False),
        max_tokens=body.max_output_tokens if body.max_output_tokens and body.max_output_tokens > 0 else None,
        sampling=drawn.sampling(), think=body.mode(),
        grammar=grammar_of((body.text or {}).get("format"), "text.format"),
        tenant=tenant, **limits_of(body.edge, headers, evict=body.truncation == "auto"),
    )  # fmt: skip
    return [request]


def _merged(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Merge the system messages at the beginning into one: chat templates take only one."""
    count = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if count < 2:
        return tuple(messages)
    text = "\n\n".join(each["content"] for each in messages[:count])
    return ({"role": "system", "content": text}, *messages[count:])


class Writer:
    """Writes one response, whole or in events."""

    keeps = True  # a stream ends with the whole response

    def __init__(self, model: str, body: ResponsesBody) -> None:
        self._offered = of_responses(body.tools)
        self._head = {
            "id": f"resp_{uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "store": False, "previous_response_id": None, "error": None, "incomplete_details": None,
            "background": False, "truncation": body.truncation or "disabled", "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False, "tool_choice": body.tool_choice or "auto",
            "tools": _offered(body.tools),
            "temperature": body.temperature, "top_p": body.top_p,
            "text": {"format": {"type": "text"}, **(body.text or {})}, "reasoning": body.reasoning,
        }  # fmt: skip
        self._answers: dict[int, Answer] = {0: Answer()}
        self._items: list[dict[str, Any]] = []  # of the output
        self._text: list[str] = []  # of the item that is open
        self._sequence = 0

    def chunks(self, found: Event) -> list[bytes]:
        """The server-sent events for an event of the answer."""
        gather(self._answers, found)
        kind, sent = self._open, list[bytes]()
        if not self._sequence:
            states = ("response.created", "response.in_progress")
            sent += [self._event(name, response=self._response("in_progress")) for name in states]
        if isinstance(found, Piece):
            wanted = "reasoning" if found.thought else "message"
            if kind != wanted:
                sent += [*self._done(), *self._begin(wanted)]
            self._text.append(found.text)
            more: dict[str, Any] = {} if found.thought else {"logprobs": []}
            sent.append(self._delta(f"response.{_TEXTS[wanted]}.delta", found.text, content_index=0, **more))
        elif isinstance(found, Call):
            part = found.event
            if isinstance(part, CallBegin):
                sent += [
                    *self._done(),
                    *self._begin("function_call", call_id=part.id, arguments="", **self._offered.place(part.name)),
                ]
            elif isinstance(part, ArgumentPiece):
                self._text.append(part.text)
                sent.append(self._delta("response.function_call_arguments.delta", part.text))
            elif isinstance(part, CallCut | CallEnd):
                sent += self._done(cut=isinstance(part, CallCut))
        elif isinstance(found, Ended):
            sent += self._done(cut=reason_of(found) == "length")
        return sent

    def last(self) -> list[bytes]:
        """The end of a stream."""
        response = self._finished()
        return [self._event(f"response.{response['status']}", response=response)]

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The response to a request without streaming."""
        for each in events:
            self.chunks(each)
        return self._finished()

    def failed(self, error: RefusedError) -> list[bytes]:
        """The end of a stream after an error."""
        response = self._response("failed") | {"error": {"code": error.code or error.type, "message": error.message}}
        return [self._event("response.failed", response=response)]

    @property
    def _open(self) -> str | None:
        """The kind of the item that is being written."""
        return self._items[-1]["type"] if self._items and self._items[-1]["status"] == "in_progress" else None

    def _begin(self, kind: str, **more: Any) -> list[bytes]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **more}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._text = []
        index = len(self._items) - 1
        sent = [self._event("response.output_item.added", output_index=index, item=dict(item))]
        if kind in _TEXTS:
            part = _part(kind, "")
            sent.append(self._event("response.content_part.added", **self._place(), content_index=0, part=part))
        return sent

    def _done(self, *, cut: bool = False) -> list[bytes]:
        kind = self._open
        if kind is None:
            return []
        item, text, sent = self._items[-1], "".join(self._text), list[bytes]()
        item["status"] = "incomplete" if cut else "completed"
        if kind in _TEXTS:
            part, place = _part(kind, text), {**self._place(), "content_index": 0}
            item["content"] = [part]
            more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
            sent.append(self._event(f"response.{_TEXTS[kind]}.done", **place, text=text, **more))
            sent.append(self._event("response.content_part.done", **place, part=part))
        else:
            item["arguments"] = text
            sent.append(self._event("response.function_call_arguments.done", **self._place(), arguments=text))
        return [*sent, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _finished(self) -> dict[str, Any]:
        cut = self._answers[0].reason == "length"
        details = {"reason": "max_output_tokens"} if cut else None
        return self._response("incomplete" if cut else "completed") | {"incomplete_details": details}

    def _response(self, status: str) -> dict[str, Any]:
        found = usage_of(self._answers.values())
        usage = {
            "input_tokens": found["prompt_tokens"], "output_tokens": found["completion_tokens"],
            "total_tokens": found["total_tokens"],
            "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens_details": found["completion_tokens_details"], "edge": found.get("edge"),
        }  # fmt: skip
        return {
            **self._head,
            "status": status,
            "output": self._items,
            "usage": usage if status != "in_progress" else None,
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _delta(self, name: str, text: str, **more: Any) -> bytes:
        return self._event(name, **self._place(), delta=text, **more)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": name, "sequence_number": self._sequence - 1, **fields}, name)


def _offered(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools that a response names: those of the request that the model may call."""
    kinds = {"function": {"parameters": None, "strict": None}, "namespace": {}}
    return [{**kinds[kind], **tool} for tool in tools or () if (kind := str(tool.get("type"))) in kinds]


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {} if kind == "reasoning" else {"annotations": [], "logprobs": []}
    return {"type": _TEXTS[kind], "text": text, **more}
