"""POST /v1/completions: texts and token ids without a chat template, and their tokens' log-probabilities."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any
from uuid import uuid4

import numpy as np

from edge.model.tokens.tokenizer import TokenizerLike
from edge.run.request import Request
from edge.server.events import Ended, Event, Piece, Scored
from edge.server.http import event
from edge.server.prompts import choices_of
from edge.server.protocols.answers import Answer, gather, timings_of, usage_of
from edge.server.protocols.bodies import MOST_PROMPTS, CompletionBody, limits_of
from edge.server.protocols.chat import DONE, limit_of
from edge.server.refusal import RefusedError
from edge.types import IntArray


def translate(body: CompletionBody, headers: Any, tenant: str) -> list[Request]:
    """A request for each choice of each prompt. Raises RefusedError."""
    if body.suffix:
        raise RefusedError(400, "suffix is not supported", param="suffix", code="unsupported")
    if drawn_of(body) > (body.n or 1) and (body.stream or scores(body)):
        message = "best_of goes without a stream and without scores of the prompt"
        raise RefusedError(400, message, param="best_of", code="unsupported")
    if body.logprobs is not None and body.echo and not scores(body):
        message = "logprobs with echo need temperature 0 and max_tokens 0 or 1"
        raise RefusedError(400, message, param="logprobs", code="unsupported")
    prompts = prompts_of(body)
    if len(prompts) > MOST_PROMPTS:
        raise RefusedError(
            400, f"prompt has {len(prompts)} prompts, {MOST_PROMPTS} are the most", param="prompt", code="invalid_value"
        )
    if (grammar := body.grammar_of_answer()) is not None and scores(body):
        raise RefusedError(400, "the form of the answer goes without echo", param="echo", code="invalid_value")
    limit = body.max_tokens or None if scores(body) else limit_of(16 if body.max_tokens is None else body.max_tokens)
    requests = [
        Request(
            prompt,
            raw=True,
            max_tokens=limit,
            sampling=body.sampling(),
            stop=body.stops(),
            ignore_eos=bool(body.ignore_eos),
            logprobs=0 if body.logprobs is None and drawn_of(body) > (body.n or 1) else body.logprobs,
            grammar=grammar,
            tenant=tenant,
            **limits_of(body.edge, headers),
        )
        for prompt in prompts
    ]
    return [each for request in requests for each in choices_of(request, drawn_of(body))]


def drawn_of(body: CompletionBody) -> int:
    """The answers to draw for each prompt. Raises RefusedError for a `best_of` below `n`."""
    if body.best_of is not None and body.best_of < (body.n or 1):
        why = f"best_of is {body.best_of}: it must be n, {body.n}, or more"
        raise RefusedError(400, why, param="best_of", code="invalid_value")
    return body.best_of or body.n or 1


def prompts_of(body: CompletionBody) -> list[str | IntArray]:
    """The prompts of a body. Raises RefusedError for empty ones."""
    prompt: Any = body.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    if not prompt or not all(prompt):
        raise RefusedError(400, "the prompt is empty", param="prompt", code="invalid_value")
    return [each if isinstance(each, str) else np.array(each, np.int32) for each in prompt]


def scores(body: CompletionBody) -> bool:
    """Whether a pass over the prompt answers the request: it scores the prompt's tokens, and finds the next one."""
    return (
        bool(body.echo)
        and (body.logprobs is not None or body.max_tokens == 0)
        and body.max_tokens in (0, 1)
        and (not body.temperature)
    )


class Writer:
    """Writes one response, whole or in chunks. body: of the request. tokenizer: gives the tokens' texts."""

    def __init__(self, model: str, body: CompletionBody, tokenizer: TokenizerLike) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._prompts = prompts_of(body)
        self._answers: dict[int, Answer] = {}
        self._offsets: Counter[int] = Counter()  # by choice: characters of tokens whose log-probabilities were sent
        self._head = {
            "id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def chunks(self, found: Event) -> list[bytes]:
        """The chunks for an event of the answer."""
        first = found.choice not in self._answers
        gather(self._answers, found)
        answer = self._answers[found.choice]
        answer.texts.clear()
        echo = self._echoed(found.choice) if first and self._body.echo else ""
        text, reason = echo, None
        if isinstance(found, Piece) and not found.thought:
            text += found.text
        elif isinstance(found, Ended):
            reason = answer.reason
        elif isinstance(found, Scored):
            text, reason = echo + self._added(found), "length"
        elif not text:
            return []
        tells = isinstance(found, Piece | Scored | Ended)
        logprobs = self._logprobs(found.choice) if tells else None
        choice = {"index": found.choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        more = {"timings": timings_of([answer])} if isinstance(found, Ended) else {}
        return [event({**self._head, "choices": [choice], **more})]

    def last(self) -> list[bytes]:
        """The end of a stream."""
        usage = {**self._head, "choices": [], "usage": usage_of(self._answers.values())}
        return [*([event(usage)] if self._body.wants_usage else []), DONE]

    def failed(self, error: RefusedError) -> list[bytes]:
        """The end of a stream after an error."""
        return [event(error.body()), DONE]

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The response to a request without streaming."""
        for each in events:
            gather(self._answers, each)
        choices, best = [], self._best()
        costs = sorted(self._answers.values(), key=lambda each: any(each is sent for _, sent in best))
        for number, (index, answer) in enumerate(best):
            echo = self._echoed(index) if self._body.echo else ""
            text = answer.text if answer.scored is None else self._added(answer.scored)
            reason = "length" if answer.ended is None else answer.reason
            logprobs = self._logprobs(index)
            choices.append({"index": number, "text": echo + text, "logprobs": logprobs, "finish_reason": reason})
        return {**self._head, "choices": choices, "usage": usage_of(costs), "timings": timings_of(costs)}

    def _best(self) -> list[tuple[int, Answer]]:
        """The answers to send: of each prompt those whose tokens are likeliest on average, if more were drawn;
        last those without tokens."""
        found, drawn, count = sorted(self._answers.items()), drawn_of(self._body), self._body.n or 1
        if drawn == count:
            return found

        def likelihood(each: tuple[int, Answer]) -> float:
            tokens = each[1].tokens
            return sum(token.logprob for token in tokens) / len(tokens) if tokens else -math.inf

        prompts = [found[first : first + drawn] for first in range(0, len(found), drawn)]
        return [each for own in prompts for each in sorted(own, key=likelihood, reverse=True)[:count]]

    def _echoed(self, index: int) -> str:
        prompt = self._prompts[index // drawn_of(self._body)]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _added(self, scored: Scored) -> str:
        return self._tokenizer.decode(scored.tokens[len(scored.tokens) - scored.generated :])

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """Tokens since the last call with their log-probabilities and likeliest alternatives, in the form of OpenAI's
        older API; None if the request wants none."""
        if self._body.logprobs is None:
            return None
        answer = self._answers[index]
        if answer.scored is not None:
            ids, chances, likeliest = answer.scored.tokens, answer.scored.logprobs, answer.scored.top
        else:
            new, answer.tokens = answer.tokens, []
            ids, chances = tuple(each.token for each in new), tuple(each.logprob for each in new)
            likeliest = tuple(dict(each.top) for each in new)
        texts = [self._text(token) for token in ids]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        top = [
            None if each is None else {self._text(token): chance for token, chance in each.items()}
            for each in likeliest
        ]
        return {"tokens": texts, "token_logprobs": list(chances), "top_logprobs": top, "text_offset": offsets}

    def _text(self, token: int) -> str:
        piece = self._tokenizer.piece(token)
        try:
            return piece.decode() or self._tokenizer.text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
