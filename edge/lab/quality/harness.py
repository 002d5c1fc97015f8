"""A session as a model of EleutherAI's lm-eval: edge's engines answer the requests of its tasks.

Texts are tokenized as lm-eval does for other engines: blanks at the end of a context belong to the continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from edge.errors import InputError
from edge.run.session import Session
from edge.sampling import SamplingParams
from edge.types import IntArray

_ANSWER_TOKENS = 256  # most tokens of an answer, unless the task states them: lm-eval's own default

OnProgress = Callable[[int, int], None]
"""Called with the number of answered requests of one kind, and their total."""


class SessionLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Answers the requests of lm-eval's tasks with a session, one after the other.

    shortened: the number of requests that lost their beginning, since they have more tokens than the model can read.
    """

    def __init__(self, session: Session, on_progress: OnProgress | None = None) -> None:
        super().__init__()
        self._session, self._on_progress = session, on_progress
        kv, context = session.engine.kv, session.spec.context
        self._room = context if session.may_evict else min(kv.capacity, context)  # tokens that the model reads
        self.shortened = 0

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, else EOS. Raises InputError if the model has neither."""
        tokenizer = self._session.tokenizer
        found = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if found is None:
            raise InputError("the model has neither BOS nor EOS, which texts without a context begin with")
        return found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; by default with BOS if the model begins texts with it."""
        tokenizer = self._session.tokenizer
        begins = tokenizer.add_bos if add_special_tokens is None else add_special_tokens
        bos = [tokenizer.bos_id] if begins and tokenizer.bos_id is not None else []
        return [*bos, *tokenizer.encode(string).tolist()]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """ln p of each continuation, and whether greedy decoding would produce it."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """ln p of whole texts, in windows as long as the KV cache where they are longer."""
        return self._each(requests, lambda request: self._rolling(request.args[0]))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answers to contexts, each ended before one of the task's stop strings."""
        return self._each(requests, lambda request: self._generate(*request.args))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._each(requests, lambda request: self._score(request[1], request[2]))

    def _each(self, requests: Sequence[Any], answer: Callable[[Any], Any]) -> list[Any]:
        found = []
        for done, request in enumerate(requests, start=1):
            found.append(answer(request))
            if self._on_progress:
                self._on_progress(done, len(requests))
        return found

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        if not continuation:
            return 0.0, True
        tokens = self._fitting([*(context or [self.prefix_token_id]), *continuation], self._room + 1)
        first = max(1, tokens.size - len(continuation))
        scored = self._session.score(tokens, top=1, first=first, keep_rows=True)
        return sum(each.logprob for each in scored), all(each.top[0][0] == each.token for each in scored)

    def _rolling(self, text: str) -> float:
        tokens = self.tok_encode(text, add_special_tokens=False)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self._room, context_len=1)
        return float(sum(self._score(*make_disjoint_window(each))[0] for each in windows))

    def _generate(self, context: str, settings: Mapping[str, Any]) -> str:
        until, most = settings.get("until") or (), int(settings.get("max_gen_toks") or _ANSWER_TOKENS)
        if most >= self._room:
            raise InputError(f"an answer may have {most} tokens, and the cache {self._room} rows: raise --max-kv-size")
        tokens = self._fitting(self.tok_encode(context) or [self.prefix_token_id], self._room - most)
        return self._session.generate(
            tokens, max_tokens=most, sampling=_sampling(settings),
            stop=[each for each in ([until] if isinstance(until, str) else until) if each],
        )  # fmt: skip

    def _fitting(self, tokens: list[int], most: int) -> IntArray:
        """The last tokens that the model can read, int32 [n]."""
        self.shortened += len(tokens) > most
        return np.array(tokens[-most:], np.int32)


def _sampling(settings: Mapping[str, Any]) -> SamplingParams:
    """Greedy sampling, unless a task asks for random draws. Ignores recommendations of the model's file."""
    temperature, draws = settings.get("temperature"), settings.get("do_sample")
    if temperature is None:
        temperature = 1.0 if draws else 0.0
    return SamplingParams(
        temperature=0.0 if draws is False else float(temperature), top_p=float(settings.get("top_p") or 1.0),
        top_k=int(settings.get("top_k") or 0), min_p=0.0, seed=0,
    )  # fmt: skip
