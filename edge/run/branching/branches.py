"""Several continuations of one conversation, side by side on a batch: `Session.fork` and its end, `Fork.join`.

    with session.fork(2) as fork:
        answers = [branch.stream(text) for branch, text in zip(fork, ("And in summer?", "And in winter?"))]
        texts = ["".join(each) for each in answers]
        fork.join(fork[0])  # the conversation goes on with this branch

A branch's prompt is the conversation's tokens and its own; the batch's sequences copy the rows of a common beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from edge.errors import BusyError, InputError
from edge.model.chat.thinking import Think
from edge.model.model import Model
from edge.model.parts.prompt import Prompt
from edge.run.batching.stream import Stream
from edge.run.hooks import Hooks, OnLogprob, OnThought
from edge.run.report import RunReport
from edge.run.reporting import check_complete
from edge.run.request import Request, Text
from edge.run.sequences.sequence import TokenSequence
from edge.types import IntArray

if TYPE_CHECKING:
    from edge.run.batching.batch import Batch

MOST_BRANCHES = 64
_EVICTED = "rows of this {} were evicted, and branches need all of its tokens: load with a larger --max-kv-size"


def tokens_of(model: Model, opening: str) -> IntArray:
    """The tokens of a text with which an answer begins, int32 [n]."""
    return model.tokenizer.encode(opening, start=False) if opening else np.zeros(0, np.int32)


class Branch:
    """One continuation; `report` is that of its last answer."""

    def __init__(self, fork: Fork, tokens: IntArray | None) -> None:
        """tokens: of its conversation, which continues the fork's, int32 [n]."""
        self._fork, self._stream, self._tokens = fork, cast(Stream | None, None), tokens
        self.given = fork.given  # its rows of ids beyond the vocabulary

    @property
    def report(self) -> RunReport | None:
        return self._stream.report if self._stream else None

    @property
    def tokens(self) -> IntArray | None:
        """The tokens of its conversation so far, int32 [n]; None once rows were evicted."""
        ticket = self._stream.ticket if self._stream else None
        return self._tokens if ticket is None or ticket.pause or ticket.loop is None else ticket.tokens

    def stream(
        self, prompt: Text, *, opening: str = "", think: Think | str | bool | int | None = None,
        time_limit: float | None = None, energy_limit: float | None = None, on_thought: OnThought | None = None,
        on_logprob: OnLogprob | None = None, **options: Any,
    ) -> Stream:  # fmt: skip
        """The pieces of an answer to the next turn, or, with `raw`, to the continued text. All branches with an open
        stream run in common passes while one of them is read. opening: text with which the answer begins, which is no
        part of it. Other arguments are those of `Request`. Raises what `start` raises."""
        request = Request(
            prompt, think=Think.parse(think), time=time_limit, energy=energy_limit, follow_up=self.begun, **options
        )  # fmt: skip
        return self.start(request, Hooks(thought=on_thought, logprob=on_logprob), opening)

    @property
    def begun(self) -> bool:
        """Whether there is a conversation to continue."""
        return self.tokens is None or self.tokens.size > 0

    def start(self, request: Request, hooks: Hooks, opening: str = "") -> Stream:
        """Answer a request, whose prompt continues the branch's conversation. opening: as for `stream`.

        Raises BusyError while the last answer of this branch is open, InputError, UnsupportedError.
        """
        fork, known = self._fork, self.tokens
        if self._stream is not None and self._stream.ticket.pause:
            raise BusyError("this branch is answering: read its stream to the end, or close it")
        if known is None:
            raise InputError(_EVICTED.format("branch"))
        if request.vote is not None or request.skeleton:
            raise InputError("a branch gives one answer: ask the session for a vote or an outline")
        asked, begun = request.encode(fork.model), tokens_of(fork.model, opening)
        prefix = fork.model.prefix  # with which a conversation begins, and which goes before each prompt
        tokens = np.concatenate([known[prefix.ids.size :] if prefix else known, asked.first(None), begun])
        given = asked.given.joined(self.given) if asked.given else self.given
        prompt = Prompt([tokens], asked.thinks, asked.tools, given=given)
        self._tokens, self.given = known, given
        self._stream = Stream(fork.batch, replace(request, prompt=prompt, follow_up=False), hooks, None)
        return self._stream

    def generate(self, prompt: Text, **options: Any) -> str:
        """The whole answer to the next turn; options are those of `stream`. Raises IncompleteError, too."""
        stream = self.stream(prompt, **options)
        answer = "".join(stream)
        check_complete(stream.report, answer)
        return answer


class Fork:
    """The branches of a conversation. Without `join`, the conversation is afterwards as it was before."""

    def __init__(
        self, sequence: TokenSequence, model: Model, make: Callable[[Callable[[], None]], Batch], n: int
    ) -> None:
        """sequence: has the conversation. make: makes a batch that keeps it until it calls this function. Raises
        InputError."""
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_BRANCHES:
            raise InputError(f"the number of branches must be from 1 to {MOST_BRANCHES}, not {n!r:.40}")
        found = sequence.tokens
        if found is None:
            raise InputError(_EVICTED.format("conversation"))
        self._sequence, self.model, self.given, self.tokens = sequence, model, sequence.given, found
        self._mark, self._joined = sequence.mark(hold=True), cast(tuple[Branch, IntArray | None] | None, None)
        self.batch = make(self._restore)
        self._branches = [Branch(self, found) for _ in range(n)]
        if sequence.engine.kv.has_tail:  # which can be copied now, and not behind longer rows
            for slot in self.batch.slots[1:n]:
                slot.tokens.rows.take(sequence.rows, sequence.engine.kv.length)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches)

    def __getitem__(self, number: int) -> Branch:
        return self._branches[number]

    def after(self, asked: Prompt, answer: str) -> IntArray:
        """The tokens of the conversation after one more turn, int32 [n]."""
        prefix = self.model.prefix
        before = prefix.ids if prefix and not self.tokens.size else self.tokens
        return np.concatenate([before, asked.first(None), tokens_of(self.model, answer)])

    def join(self, branch: Branch, tokens: IntArray | None = None) -> None:
        """End all branches; the session's conversation goes on with this one. tokens: that it has then in place of the
        branch's own, int32 [n]. Raises InputError if the branch has evicted rows of its own ones, or is no branch of
        this open fork; BusyError as `Batch`."""
        if branch not in self._branches or self.batch.closed:
            raise InputError("this is no branch of an open fork")
        self._joined = branch, tokens
        try:
            self.close()
        except BusyError:
            self._joined = None
            raise
        if tokens is None and branch.tokens is None:
            raise InputError(_EVICTED.format("branch"))

    def close(self) -> None:
        """End all branches. Raises BusyError while another thread runs a pass."""
        self.batch.__exit__()

    def _restore(self) -> None:
        """Make a conversation the session's again: that of the joined branch, or the one before the fork."""
        branch, tokens = self._joined or (None, None)
        if branch is not None and tokens is None:
            tokens = branch.tokens
        if branch is not None and tokens is not None:
            rows = tokens
            donor = max(self.batch.slots, key=lambda slot: slot.tokens.rows.shared_out(rows))
            self._sequence.become(tokens, donor.tokens, branch.given)
        elif not self._sequence.rewind(self._mark):
            self._sequence.become(self.tokens, self._sequence, self.given)
