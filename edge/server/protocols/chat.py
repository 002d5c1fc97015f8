"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from edge.model.chat.parts import newest
from edge.model.tokens.tokenizer import TokenizerLike
from edge.run.branching.voting import TEMPERATURE, words_of
from edge.run.report import TokenLogprob
from edge.run.request import INTERACTIVE, TITLES, TOOLS, Request
from edge.server.events import Call, Ended, Event, Likely, Piece
from edge.server.http import event
from edge.server.prompts import chat_of, choices_of, is_background, said_by
from edge.server.protocols.answers import Answer, follow, gather, timings_of, usage_of
from edge.server.protocols.bodies import ChatBody, limits_of
from edge.server.protocols.offered import of_chat
from edge.server.refusal import RefusedError
from edge.tools.parser import ArgumentPiece, CallBegin

DONE = event(b"[DONE]")


def translate(body: ChatBody, headers: Any, tenant: str) -> list[Request]:
    """A request for each choice. Raises RefusedError."""
    if not body.messages:
        raise RefusedError(400, "messages is empty", param="messages", code="invalid_value")
    if body.top_logprobs and not body.logprobs:
        raise RefusedError(400, "top_logprobs needs logprobs", param="top_logprobs", code="invalid_value")
    messages = _messages(body)
    variables = {name: value for name, value in (body.chat_template_kwargs or {}).items() if name != "enable_thinking"}
    limited = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    tools, parallel = of_chat(body.tools).tools, body.parallel_tool_calls is not False
    request = Request(
        chat_of(messages, tools, body.tool_choice, parallel, variables, body.continue_final_message is not False),
        max_tokens=limit_of(getattr(body, limited), limited),
        sampling=body.sampling(),
        stop=body.stops(),
        ignore_eos=bool(body.ignore_eos),
        think=body.mode(),
        grammar=body.grammar_of_answer(),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        priority=priority_of(messages),
        tenant=tenant,
        **limits_of(body.edge, headers, votes=True),
    )
    count = votes_of(body)
    if count:  # by 0.7, unless the request states another temperature
        request = replace(request, sampling={"temperature": TEMPERATURE, **body.sampling()})
    return choices_of(request, count or body.n or 1)


def votes_of(body: ChatBody) -> int | None:
    """The number of answers to draw for a vote, which sends one; None without. Raises RefusedError."""
    count = body.edge.vote if body.edge else None
    if count is None:
        return None
    others = {
        "n": (body.n or 1) > 1, "stream": body.stream, "tools": body.tools, "temperature 0": body.temperature == 0,
    }  # fmt: skip
    if given := next((name for name, value in others.items() if value), None):
        raise RefusedError(400, f"edge.vote goes without {given}", param="edge.vote", code="unsupported")
    return count


def limit_of(count: int | None, name: str = "max_tokens") -> int | None:
    """The most tokens of an answer; None (no limit) for -1 and None. Raises RefusedError for 0."""
    if count == 0:
        why = f"{name} must be at least 1, or -1 for as many as fit, not 0"
        raise RefusedError(400, why, param=name, code="invalid_value")
    return None if count in (None, -1) else count


def _messages(body: ChatBody) -> tuple[dict[str, Any], ...]:
    """The messages, their contents as text and pictures. Raises RefusedError for another input of the user."""
    roles = ["tool" if each.role == "function" else each.role for each in body.messages]
    question, found = newest(roles), list[dict[str, Any]]()
    for number, each in enumerate(body.messages):
        content = said_by(each.role, each.content, f"messages[{number}].content", strict=number == question)
        found.append({name: value for name, value in vars(each).items() if value is not None} | {"content": content})
    return tuple(found)


def priority_of(messages: Sequence[dict[str, Any]]) -> int:
    """The priority: background for prompts that programs send unseen, tools after a tool's result, else interactive."""
    last = messages[-1]
    if last["role"] == "user" and isinstance(last["content"], str) and is_background(last["content"]):
        return TITLES
    return TOOLS if last["role"] == "tool" else INTERACTIVE


class Writer:
    """Writes one response, whole or in chunks."""

    def __init__(
        self, model: str, tokenizer: TokenizerLike, *, choices: int = 1, usage: bool = False, logprobs: bool = False,
        votes: bool = False,
    ) -> None:  # fmt: skip
        """votes: the answers are those of a vote, which sends one."""
        self._votes = votes
        self._tokenizer, self._choices, self._usage, self._logprobs = tokenizer, choices, usage, logprobs
        self._waiting: dict[int, list[TokenLogprob]] = {}  # tokens whose text has not been sent
        self._answers: dict[int, Answer] = {}
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}

    def chunks(self, found: Event) -> list[bytes]:
        """The chunks for an event of the answer."""
        sent = []
        if not self._answers:  # programs take an answer for ended when its only choice so far has ended
            sent = [self._chunk(choice, {"role": "assistant", "content": ""}) for choice in range(self._choices)]
        follow(self._answers, found)
        if isinstance(found, Piece) and found.thought:
            sent.append(self._chunk(found.choice, {"reasoning_content": found.text}))
        elif isinstance(found, Piece):
            tokens = self._likely(self._waiting.pop(found.choice, []))
            sent.append(self._chunk(found.choice, {"content": found.text}, tokens=tokens))
        elif isinstance(found, Likely):
            self._waiting.setdefault(found.choice, []).extend([] if found.token.thought else [found.token])
        elif isinstance(found, Call) and (delta := _call_delta(found)):
            sent.append(self._chunk(found.choice, {"tool_calls": [delta]}))
        elif isinstance(found, Ended):
            answer = self._answers[found.choice]
            tokens = self._likely(self._waiting.pop(found.choice, []))  # whose text is a call's, or was cut off
            sent.append(self._chunk(found.choice, {}, answer.reason, tokens=tokens, timings=timings_of([answer])))
        return sent

    def last(self) -> list[bytes]:
        """The end of a stream."""
        usage = {
            **self._head,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage_of(self._answers.values()),
        }
        return [*([event(usage)] if self._usage else []), DONE]

    def failed(self, error: RefusedError) -> list[bytes]:
        """The end of a stream after an error."""
        return [event(error.body()), DONE]

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The response to a request without streaming."""
        for each in events:
            gather(self._answers, each)
        answers = dict(sorted(self._answers.items())).items()
        costs, usage = list(self._answers.values()), usage_of(self._answers.values())
        if self._votes:
            same = Counter(filter(None, (words_of(each.text) for _, each in answers)))
            chosen = max((each for _, each in answers), key=lambda each: same[words_of(each.text)])
            costs.sort(key=lambda each: each is chosen)  # last: `usage` and `timings` tell how that one ended
            usage = usage_of(costs)
            usage.setdefault("edge", {})["votes"] = same[words_of(chosen.text)]
            answers = {0: chosen}.items()
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": _message(answer),
                    "logprobs": self._likely(answer.tokens),
                    "finish_reason": answer.reason,
                }
                for index, answer in answers
            ],
            "usage": usage,
            "timings": timings_of(costs),
        }

    def _likely(self, tokens: list[TokenLogprob]) -> dict[str, Any] | None:
        """Log-probabilities of tokens in OpenAI's form; None without tokens, or if the request wants none."""
        if not (self._logprobs and tokens):
            return None
        content = [
            {**self._chance(each.token, each.logprob), "top_logprobs": [self._chance(*one) for one in each.top]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def _chance(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token)
        text = piece.decode(errors="replace") or self._tokenizer.text(token)
        return {"token": text, "logprob": logprob, "bytes": list(piece)}

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, *, tokens: Any = None, **more: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": tokens, "finish_reason": reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **more})


def _message(answer: Answer) -> dict[str, Any]:
    content = answer.text or (None if answer.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in answer.calls
        ]
    if answer.thoughts:
        message["reasoning_content"] = answer.thought
    return message


def _call_delta(found: Call) -> dict[str, Any] | None:
    part = found.event
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        return {"index": part.index, "id": part.id, "type": "function", "function": function}
    if isinstance(part, ArgumentPiece):
        return {"index": part.index, "function": {"arguments": part.text}}
    return None
