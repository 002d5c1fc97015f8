"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from edge.server.answers import Answer, gather, timings_of, usage_of
from edge.server.asked import Asked, Chat, Priority
from edge.server.bodies import ChatBody, grammar_of, limits_of
from edge.server.events import Ended, Event, Piece
from edge.server.http import dumps, event
from edge.server.prompts import is_background, text_of
from edge.server.refusal import RefusedError, refusal_of

DONE = event(b"[DONE]")


def translate(body: ChatBody, headers: Any, tenant: str) -> Asked:
    """Raises RefusedError."""
    if not body.messages:
        raise RefusedError(400, "messages is empty", param="messages", code="invalid_value")
    for name in ("logit_bias", "tools", "logprobs"):
        value = getattr(body, name)
        if value:
            raise RefusedError(400, f"{name} is not supported yet", param=name, code="unsupported")
    messages = tuple({k: v for k, v in asdict(each).items() if v is not None} for each in body.messages)
    variables = {name: value for name, value in (body.chat_template_kwargs or {}).items() if name != "enable_thinking"}
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Asked(
        model=body.model or "",
        prompt=Chat(messages, tuple(body.tools or ()), body.tool_choice, variables),
        choices=body.n or 1,
        max_tokens=limit_of(limit),
        sampling=body.sampling(),
        stop=body.stops(),
        ignore_eos=bool(body.ignore_eos),
        think=body.think(),
        grammar=grammar_of(body.response_format),
        priority=priority_of(body),
        tenant=tenant,
        **limits_of(body.edge, headers),
    )


def limit_of(count: int | None) -> int | None:
    """Most tokens of an answer; None for -1 and none. Raises RefusedError for 0."""
    if count == 0:
        raise RefusedError(400, "max_tokens must be at least 1", param="max_tokens", code="invalid_value")
    return None if count in (None, -1) else count


def priority_of(body: ChatBody) -> Priority:
    last = body.messages[-1]
    if last.role == "user" and is_background(
        text_of(asdict(last)["content"], f"messages[{len(body.messages) - 1}].content")
    ):
        return "background"
    return "tools" if last.role == "tool" else "interactive"


class Writer:
    """Writes one response, whole or in chunks."""

    def __init__(self, model: str, *, usage: bool = False) -> None:
        self._usage = usage
        self._answers: dict[int, Answer] = {}
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}

    def chunks(self, found: Event) -> list[bytes]:
        """The chunks that an event makes."""
        first = found.choice not in self._answers
        gather(self._answers, found)
        sent = [self._chunk(found.choice, {"role": "assistant", "content": ""})] if first else []
        if isinstance(found, Piece):
            sent.append(self._chunk(found.choice, {"reasoning_content" if found.thought else "content": found.text}))
        elif isinstance(found, Ended):
            answer = self._answers[found.choice]
            sent.append(self._chunk(found.choice, {}, answer.reason, timings=timings_of([answer])))
        return sent

    def last(self) -> list[bytes]:
        """What ends a stream."""
        usage = {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage_of(self._answers.values()),
        }
        return [*([event(usage)] if self._usage else []), DONE]

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The response that is no stream."""
        for each in events:
            gather(self._answers, each)
        answers = dict(sorted(self._answers.items())).items()
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {"index": index, "message": _message(answer), "logprobs": None, "finish_reason": answer.reason}
                for index, answer in answers
            ],
            "usage": usage_of(self._answers.values()),
            "timings": timings_of(self._answers.values()),
        }

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **more})


def _message(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.thoughts:
        message["reasoning_content"] = answer.thought
    return message


async def stream(writer: Any, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """A response's chunks; what goes wrong meanwhile is one of them."""
    try:
        async for each in events:
            for chunk in writer.chunks(each):
                yield chunk
        for chunk in writer.last():
            yield chunk
    except Exception as error:
        yield event(dumps(refusal_of(error).body()))
        yield DONE
