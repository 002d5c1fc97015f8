"""Separates tool calls from the text of an answer while both are generated."""

from __future__ import annotations

from edge.model.tokens.tokenizer import MARK, TokenizerLike
from edge.run.hooks import OnCall
from edge.run.report import ToolCall
from edge.tools.parser import ArgumentPiece, CallBegin, CallEnd, Event, TextPiece
from edge.tools.use import ToolUse


def special_marks(use: ToolUse, tokenizer: TokenizerLike) -> dict[str, int]:
    """The marks of calls that are single special tokens, with their ids."""
    special = tokenizer.special_tokens()
    return {
        mark: special[mark][0]
        for mark in use.form.marks
        if mark in special and (special[mark][1] or MARK.fullmatch(mark))
    }


class ToolCalls:
    """The tool calls of one generation. on_call: called with each event except text."""

    def __init__(self, use: ToolUse, on_call: OnCall | None) -> None:
        self._parser, self._on_call = use.parser(), on_call
        self._parallel, self.forced = use.parallel, use.forced
        self._open: list[str] = []  # of the call that has begun: id, name, pieces of arguments
        self._found: list[ToolCall] = []

    @property
    def found(self) -> tuple[ToolCall, ...]:
        """Complete calls so far."""
        return tuple(self._found)

    @property
    def enough(self) -> bool:
        """Whether the answer ends now: it has a call, and parallel calls are not allowed."""
        return not self._parallel and bool(self._found)

    @property
    def whole(self) -> bool:
        """Whether the answer ends with calls of which only the closing may be missing."""
        return self._parser.whole

    def feed(self, text: str) -> str:
        """The part of a piece that is text of the answer."""
        return self._pass_on(self._parser.feed(text))

    def rest(self, *, cut: bool) -> str:
        """The text held back at the end of a generation. cut: a limit ended it; then the beginning of a call is no
        text."""
        said = self._pass_on(self._parser.finish(cut=cut))
        return "" if cut and self.forced else said

    def _pass_on(self, events: list[Event]) -> str:
        said = ""
        for event in events:
            if isinstance(event, TextPiece):
                said += event.text
                continue
            if isinstance(event, CallBegin):
                self._open = [event.id, event.name]
            elif isinstance(event, ArgumentPiece):
                self._open.append(event.text)
            elif isinstance(event, CallEnd):
                identifier, name, *pieces = self._open
                self._found.append(ToolCall(identifier, name, "".join(pieces)))
            if self._on_call is not None:
                self._on_call(event)
        return said
