"""Turns requests into prompts for a session, and scores the tokens of prompts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from edge.errors import InputError
from edge.model.chat.media_parts import SENT
from edge.model.chat.messages import SEEN
from edge.model.chat.parts import MEDIA, has_media, kind_of, newest, text_of_parts
from edge.model.chat.thinking import Think
from edge.model.model import Model
from edge.model.parts.prompt import Prompt
from edge.model.structure.spec import check_generates
from edge.run.decoding.logprobs import Reader
from edge.run.request import Chat, Messages, Request
from edge.run.session import Session
from edge.server.events import Scored
from edge.server.models.costs import of_grammar, of_tokens
from edge.server.models.pool import SCORED_AT_ONCE
from edge.server.models.worker import Job
from edge.server.refusal import RefusedError, TooLongError
from edge.types import IntArray

_BILLING = re.compile(r"^x-anthropic-billing-header:.*\n*", re.MULTILINE)
_CLOCK = re.compile(r"^Current time is [\d:]+\.? Today's date is [\d-]+\.?\n", re.MULTILINE)
_TITLES = re.compile(r"### Task:\s*(?:Generate|Suggest) ")


def settle_prefix(system: str) -> str:
    """Make the beginning of a system prompt the same in each request: drop Claude Code's billing line, and move Home
    Assistant's time to the end."""
    system = _BILLING.sub("", system)
    clock = _CLOCK.search(system)
    return system if clock is None else f"{_CLOCK.sub('', system, count=1).rstrip()}\n{clock[0].strip()}"


def is_background(text: str) -> bool:
    """Whether a program sends this text in the background, as Open WebUI does for titles and tags of a chat."""
    return _TITLES.match(text) is not None


def text_of(content: Any, where: str, *, strict: bool = False) -> str:
    """The text of a message's content, as `text_of_parts`. Raises RefusedError."""
    try:
        return text_of_parts(content, where, strict=strict)
    except InputError as error:
        raise RefusedError(400, str(error), code="unsupported", param=where) from None


def content_of(content: Any, where: str, *, strict: bool = False) -> str | list[dict[str, Any]]:
    """A message's content: its text; with pictures and sounds a list of parts, in which these wait for a model that
    perceives them. Raises RefusedError."""
    if not has_media(content):
        return text_of(content, where, strict=strict)
    found = list[dict[str, Any]]()
    for kind, run in groupby(content, kind_of):
        if kind:
            found += ({"type": MEDIA[kind], SENT: part, "where": where} for part in run)
        elif text := text_of([*run], where, strict=strict):
            found.append({"type": "text", "text": text})
    return found


def said_by(role: str, content: Any, where: str, *, strict: bool = False) -> str | list[dict[str, Any]]:
    """The content of a message of this role, in which users and tools show pictures and sounds. Raises RefusedError,
    also for a user without any."""
    if role == "user" and (content is None or content == []):
        why = f"{where} is missing: a message of the user has a text, or a list of parts"
        raise RefusedError(400, why, code="invalid_value", param=where)
    return (content_of if role in SEEN else text_of)(content, where, strict=strict)


def chat_of(messages: Iterable[dict[str, Any]], *options: Any, **more: Any) -> Chat:
    """The prompt of these messages, in the form of OpenAI's API. options: further fields of Chat."""
    settled = [
        {**each, "content": settle_prefix(each["content"])} if each["role"] in ("system", "developer") else each
        for each in messages
    ]
    return Chat(settled, *options, **more)


def choices_of(request: Request, count: int) -> list[Request]:
    """A request for each of `count` answers, whose seeds follow each other."""
    stated = request.sampling if isinstance(request.sampling, Mapping) else {}
    if stated.get("seed") is None:
        return [request] * count
    return [replace(request, sampling={**stated, "seed": (stated["seed"] + number) % 2**64}) for number in range(count)]


def prepare(request: Request, job: Job, session: Session) -> Request:
    """The request with its prompt encoded, and the server's defaults. Raises InputError, UnsupportedError,
    RefusedError."""
    model = session.model
    check_generates(model.spec)
    request = replace(request, think=Think() if model.template is None else model.template.nearest(request.think))
    if request.grammar is not None:
        job.claim.add("grammars", of_grammar(request.grammar.text))
    prompt = encode(request, model)
    if request.grammar is None and prompt.tools is not None and prompt.tools.constrains:
        job.claim.add("grammars", of_grammar(json.dumps(prompt.tools.tools)))
    job.tokens = prompt.first(None)
    prompt.read()  # sets `ended`: all blocks have been read
    _check_ids(job.tokens, model, prompt)
    job.flow.prompt_tokens = job.tokens.size
    room = session.engine.kv.capacity - model.prefix_rows
    if job.tokens.size >= room and not (session.may_evict and request.evict):
        raise TooLongError(job.tokens.size, room - 1)
    longest = room if session.may_evict else room - job.tokens.size
    spent = time.perf_counter() - job.arrived
    return replace(
        request, prompt=prompt, max_tokens=request.max_tokens or longest, time_spent=spent, keep_text=False
    )  # fmt: skip


def encode(request: Request, model: Model) -> Prompt:
    """The prompt of a request. Raises RefusedError for a chat with a model that has no chat template."""
    if isinstance(request.prompt, Chat) and model.template is None:
        why = f"{model.name} has no chat template: use /v1/completions"
        raise RefusedError(400, why, code="unsupported", param="model")
    if isinstance(request.prompt, Chat):
        _check_perceived(request.prompt.messages, model)
    return request.encode(model)


def _check_perceived(messages: Messages, model: Model) -> None:
    """Refuse media for which the model lacks a sense in the message that the user waits to see answered; in others, a
    line stands for them."""
    question = newest([str(each.get("role")) for each in messages])
    content = messages[question].get("content") if question >= 0 else None
    parts = content if isinstance(content, list) else []
    sent = next((part for part in parts if SENT in part and kind_of(part) not in model.senses), None)
    if sent is not None:
        text_of([sent[SENT]], sent["where"], strict=True)


def count_tokens(model: Model, request: Request) -> int:
    """The tokens of a prompt, of which none is kept."""
    return sum(block.size for block in encode(replace(request, think=Think()), model).rest())


def _check_ids(tokens: IntArray, model: Model, prompt: Prompt | None = None) -> None:
    if prompt is not None and prompt.given is not None:
        prompt.given.check(tokens)
    elif tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < model.tokenizer.size:
        raise InputError(f"token ids must be from 0 to {model.tokenizer.size - 1}")


def score(numbered: Sequence[tuple[int, Request]], session: Session, job: Job) -> None:
    """Report the log-probabilities of texts, one after the other."""
    for choice, request in numbered:
        if job.cancelled:
            return
        session.reset()
        _score(request, choice, session, job)


def _score(request: Request, choice: int, session: Session, job: Job) -> None:
    """Report each token's log-probability after those before it and the model's prefix, with the likeliest
    alternatives; and the likeliest next token, if one is to be generated. Raises InputError if the prompt does not
    fit."""
    tokens = encode(request, session.model).first(None)
    _check_ids(tokens, session.model)
    room, top = session.engine.kv.capacity - session.model.prefix_rows, max(1, request.logprobs or 0)
    if tokens.size > room:
        raise TooLongError(tokens.size, room)
    job.flow.claim.add("answers", of_tokens(tokens.size, top))
    logprobs: list[float | None] = [None]
    likeliest: list[dict[int, float] | None] = [None]
    generated = [] if not request.max_tokens else [0]
    step = min(SCORED_AT_ONCE, session.plan.config.chunk)
    if prefix := session.model.prefix:
        for first in range(0, prefix.ids.size, step):
            session.forward(prefix.ids[first : first + step], upcoming=step)
    for first in range(0, tokens.size, step):
        if job.cancelled:
            return
        part = tokens[first : first + step]
        for number, row in enumerate(session.forward(part, upcoming=step, every=True), first + 1):
            if number == tokens.size and not generated:
                continue
            target = tokens[number] if number < tokens.size else int(row.argmax())
            if number == tokens.size:
                generated = [int(target)]
            found = Reader(row, top).of(int(target))
            logprobs.append(found.logprob)
            likeliest.append(dict(found.top))
    ids = (*tokens.tolist(), *generated)
    job.flow.put(Scored(choice, ids, tuple(logprobs), tuple(likeliest), len(generated)))
