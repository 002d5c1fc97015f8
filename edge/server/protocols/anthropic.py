"""POST /v1/messages and /v1/messages/count_tokens of Anthropic's API, which Claude Code uses."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal
from uuid import uuid4

from edge.grammar.grammar import Grammar
from edge.model.chat.thinking import Think
from edge.records import dataclass
from edge.run.arguments import MOST_TOKENS
from edge.run.request import Request
from edge.server.events import Call, Ended, Event, Flow, Piece
from edge.server.http import event
from edge.server.prompts import chat_of, content_of, said_by, text_of
from edge.server.protocols.answers import Answer, follow, gather, usage_of
from edge.server.protocols.bodies import Budget, Drawn, Hints, grammar_of, limits_of, think_of
from edge.server.protocols.fields import said, whole, within
from edge.server.protocols.offered import of_messages
from edge.server.refusal import RefusedError
from edge.tools.parser import ArgumentPiece, CallBegin
from edge.values import brief

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True)
class AnthropicMessage:
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MessagesBody(Hints):
    """POST /v1/messages"""

    messages: list[AnthropicMessage] = field(metadata={"help": "The conversation; the last message is the user's."})
    max_tokens: Annotated[int, whole(1, MOST_TOKENS)] | None = said("Most tokens of the answer.")
    model: str | None = said("A name of /v1/models; the first model without it.")
    system: str | list[dict[str, Any]] | None = said("The system prompt.")
    stop_sequences: list[str] | None = said("Texts before which the answer ends.")
    stream: bool | None = said("Send the answer in pieces, as server-sent events.")
    temperature: Annotated[float, within(0, 1)] | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = said("Functions that the model may call.")
    tool_choice: dict[str, Any] | None = said("auto, any, none or a tool.")
    output_config: dict[str, Any] | None = said("The form of the answer, in `format`.")
    output_format: dict[str, Any] | None = said("The form of the answer, in older programs.")
    edge: Budget | None = said("Budgets of this request.")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Tools that the answer goes without."""
        return of_messages(self.tools).left_out


def translate(body: MessagesBody, headers: Any, tenant: str) -> list[Request]:
    """The request. Raises RefusedError."""
    if not body.messages:
        raise RefusedError(400, "messages is empty", param="messages", code="invalid_value")
    system = text_of(body.system, "system")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(body.messages, 1):
        messages += _messages(message, f"messages[{number - 1}].content", last=number == len(body.messages))
    choice, parallel = _choice(body.tool_choice)
    drawn = Drawn(
        temperature=body.temperature, top_k=body.top_k, top_p=body.top_p, stop=list(body.stop_sequences or ())
    )
    request = Request(
        chat_of(messages, of_messages(body.tools).tools, choice, parallel), max_tokens=body.max_tokens,
        sampling=drawn.sampling(), stop=drawn.stops(), think=_think(body), grammar=_grammar(body), tenant=tenant,
        **limits_of(body.edge, headers),
    )  # fmt: skip
    return [request]


def _grammar(body: MessagesBody) -> Grammar | None:
    """The grammar of `output_config.format`, or of the older `output_format`. Raises RefusedError."""
    form = (body.output_config or {}).get("format")
    if body.output_format is not None:
        return grammar_of(body.output_format, "output_format")
    if form is not None and not isinstance(form, dict):
        why = f"output_config.format must be an object, not {brief(form)}"
        raise RefusedError(400, why, param="output_config.format", code="invalid_value")
    return grammar_of(form, "output_config.format")


def _messages(message: AnthropicMessage, where: str, *, last: bool) -> list[dict[str, Any]]:
    """A message in OpenAI's form; results of tools become messages of their own."""
    if isinstance(message.content, str) or not message.content:
        return [{"role": message.role, "content": said_by(message.role, message.content, where)}]
    texts: list[Any] = []
    calls, results, thoughts = list[dict[str, Any]](), list[dict[str, Any]](), list[str]()
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = content_of(block.get("content"), where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block)
    read = content_of if message.role == "user" else text_of
    said_now = read(texts, where, strict=last and message.role == "user" and not results)
    said: dict[str, Any] = {"role": message.role, "content": said_now}
    if calls:
        said["tool_calls"] = calls
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    return [*results, *([said] if said_now or calls or not results else [])]


def _choice(choice: dict[str, Any] | None) -> tuple[Any, bool]:
    """tool_choice in OpenAI's form, and whether an answer may have several calls. Raises RefusedError."""
    if choice is None:
        return None, True
    kind, parallel = choice.get("type"), not choice.get("disable_parallel_tool_use")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        why = "missing" if kind is None else f"{brief(kind)}: choose from auto, any, none, tool"
        raise RefusedError(400, f"tool_choice.type is {why}", param="tool_choice", code="invalid_value")
    return _CHOICES[kind], parallel


def _think(body: MessagesBody) -> Think:
    budget = body.thinking.get("budget_tokens") if isinstance(body.thinking, dict) else None
    if body.max_tokens and isinstance(budget, int) and budget >= body.max_tokens:
        message = f"thinking.budget_tokens is {budget}: it must be less than max_tokens, {body.max_tokens}"
        raise RefusedError(400, message, param="thinking", code="invalid_value")
    mode, effort = body.mode(), think_of((body.output_config or {}).get("effort"))
    return effort if effort.chosen and mode in (Think(), Think(enabled=True)) else mode


def models(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """GET /v1/models in the form of this API. found: the models in the form of OpenAI's."""
    data = [model(each) for each in found]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


def model(found: dict[str, Any]) -> dict[str, Any]:
    """GET /v1/models/NAME in the form of this API."""
    created = datetime.datetime.fromtimestamp(found["created"], datetime.timezone.utc)
    rows = found["meta"]["n_ctx"]
    return {
        "type": "model", "id": found["id"], "display_name": found["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"), "max_input_tokens": rows, "max_tokens": rows,
        "capabilities": None, "lifecycle": "active", "deprecated_at": None, "retires_at": None, "line": None,
    }  # fmt: skip


class Writer:
    """Writes one response, whole or in events. flow: knows the prompt's tokens."""

    def __init__(self, model: str, flow: Flow) -> None:
        self._head = {
            "id": f"msg_{uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model, "container": None,
        }  # fmt: skip
        self._flow = flow
        self._answers: dict[int, Answer] = {0: Answer()}
        self._open: tuple[str, int] | None = None  # kind of the block, and its index
        self._blocks = 0
        self._began = False

    def chunks(self, found: Event) -> list[bytes]:
        """The server-sent events for an event of the answer."""
        follow(self._answers, found)
        sent: list[bytes] = []
        if not self._began:
            self._began = True
            usage = _usage(self._flow.prompt_tokens, 0, 0)  # the end says how many of them were reused
            message: dict[str, Any] = {
                **self._head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            sent.append(_event("message_start", message=message))
        if isinstance(found, Piece):
            kind = "thinking" if found.thought else "text"
            if self._open is None or self._open[0] != kind:
                start = {"type": "thinking", "thinking": "", "signature": ""} if found.thought else _text("")
                sent += [*self._end_block(), self._begin_block(kind, start)]
            sent.append(self._delta({"type": f"{kind}_delta", kind: found.text}))
        elif isinstance(found, Call) and isinstance(found.event, CallBegin):
            block = {"type": "tool_use", "id": _tool_id(found.event.id), "name": found.event.name, "input": {}}
            sent += [*self._end_block(), self._begin_block("tool_use", block)]
        elif isinstance(found, Call) and isinstance(found.event, ArgumentPiece):
            sent.append(self._delta({"type": "input_json_delta", "partial_json": found.event.text}))
        elif isinstance(found, Ended):
            sent += self._end_block()
        return sent

    def last(self) -> list[bytes]:
        """The end of a stream."""
        delta = {**self._end(), "container": None}
        return [_event("message_delta", delta=delta, usage=self._usage()), _event("message_stop")]

    def failed(self, error: RefusedError) -> list[bytes]:
        """The end of a stream after an error."""
        return [event(error.body("anthropic"), "error")]

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The response to a request without streaming."""
        for each in events:
            gather(self._answers, each)
        answer = self._answers[0]
        content: list[dict[str, Any]] = []
        if answer.thoughts:
            content.append({"type": "thinking", "thinking": answer.thought, "signature": ""})
        if answer.text or not answer.calls:
            content.append(_text(answer.text))
        content += [
            {"type": "tool_use", "id": _tool_id(each.id), "name": each.name, "input": json.loads(each.arguments)}
            for each in answer.calls
        ]
        return {**self._head, "content": content, **self._end(), "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        found = usage_of(self._answers.values())
        cached = found["prompt_tokens_details"]["cached_tokens"]
        usage = _usage(found["prompt_tokens"] - cached, cached, found["completion_tokens"])
        return usage | {"edge": found.get("edge")}

    def _end(self) -> dict[str, Any]:
        """Why the answer ended."""
        ended = self._answers[0].ended
        text = ended.report.stop_text if ended and ended.report else None
        reason = "stop_sequence" if text is not None else _REASONS[self._answers[0].reason]
        return {"stop_reason": reason, "stop_sequence": text}

    def _begin_block(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind, self._blocks
        self._blocks += 1
        return _event("content_block_start", index=self._open[1], content_block=block)

    def _end_block(self) -> list[bytes]:
        found, self._open = self._open, None
        return [] if found is None else [_event("content_block_stop", index=found[1])]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._open[1] if self._open else 0, delta=delta)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _tool_id(identifier: str) -> str:
    return "toolu_" + identifier.removeprefix("call_")


def _usage(fresh: int, cached: int, generated: int) -> dict[str, Any]:
    return {
        "input_tokens": fresh, "output_tokens": generated, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0, "cache_creation": None, "server_tool_use": None, "service_tier": None,
    }  # fmt: skip


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
