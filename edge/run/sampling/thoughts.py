"""Separates thoughts from the answer while both are generated, and enforces the budget of thoughts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from io import StringIO

from edge.model.chat.thinking import Family, Think
from edge.model.model import Model
from edge.model.parts.prompt import Prompt
from edge.model.tokens.tokenizer import TokenizerLike
from edge.run.budgets.meters import Watch
from edge.run.hooks import OnThought
from edge.run.report import Thoughts
from edge.tools.marks import overlap

_LONGEST_HEADER = 512  # characters and special tokens
_AROUND = 8  # tokens beside a thought and an answer, such as marks
Symbol = str | int  # a character, or a special token that is part of a mark


class Splitter:
    """Separates thoughts from the answer in a stream of tokens. Marks belong to neither; a mark spelled out in ordinary
    tokens counts where the vocabulary has no token for it.

    thinking: whether the next token belongs to a thought. opening: the special token that opens one, if there is one.
    shown: control tokens to show as text, such as marks of calls. recipient: a part whose header contains this text is
    a tool call; the part and its header, from this text on, belong to the answer.
    """

    def __init__(
        self, tokenizer: TokenizerLike, family: Family | None, thinking: bool, shown: Iterable[int] = (),
        recipient: str | None = None,
    ) -> None:  # fmt: skip
        self.thinking, self._recipient = thinking, recipient
        self._tokenizer, self._decoder = tokenizer, tokenizer.stream_decoder()
        self._shown = {token: tokenizer.text(token).encode() for token in shown}
        marks = {} if family is None else family.marks
        special = {token for token, _ in tokenizer.special_tokens().values()} if marks else set()
        self._marks = [(_symbols(tokenizer, mark, special), thinks) for mark, thinks in marks.items()]
        self._tokens = {symbol for mark, _ in self._marks for symbol in mark if isinstance(symbol, int)}
        self.opening = next((mark[0] for mark, _ in self._marks if isinstance(mark[0], int)), None)
        headed = family.headed if family is not None and recipient else None
        self._header_end = _symbols(tokenizer, headed, special) if headed else []
        self._in_header = bool(headed) and thinking
        self._held: list[Symbol] = []
        self._begins = thinking  # after a mark, before the first text: blanks there are not text

    @property
    def between(self) -> bool:
        """Whether no part of a mark or character is held back, and no header is expected."""
        return not self._held and not self._in_header and not self._decoder.getstate()[0]

    def feed(self, token: int) -> list[tuple[bool, str]]:
        """Pieces of text, each with whether it is a thought. The beginning of a possible mark is held back."""
        if not self._marks:
            text = self._decoder.decode(self._piece(token))
            return [(False, text)] if text else []
        if token in self._tokens:
            self._held += [*self._decoder.decode(b"", final=True), token]
        else:
            self._held += self._decoder.decode(self._piece(token))
        found: list[tuple[bool, str]] = []
        while True:
            if match := _first_match(self._held, self._marks):
                start, end, thinks = match
                self._in_header = (
                    bool(self._header_end) and self._held[:end][-len(self._header_end) :] != self._header_end
                )
                self._emit(start, found)
                del self._held[: end - start]
                self.thinking, self._begins = thinks, True
            elif not self._in_header or not self._read_header(found):
                break
        if not self._in_header:
            self._emit(len(self._held) - max((overlap(self._held, mark) for mark, _ in self._marks), default=0), found)
        return found

    def _read_header(self, found: list[tuple[bool, str]]) -> bool:
        """Whether a header that is no mark is complete: a call's or a thought's."""
        match = _first_match(self._held, [(self._header_end, True)])
        if match is None:
            self._in_header = len(self._held) <= _LONGEST_HEADER
            return False
        self._in_header = False
        header = "".join(
            each if isinstance(each, str) else self._tokenizer.text(each) for each in self._held[: match[1]]
        )
        _, named, rest = header.partition(self._recipient or "")
        if named:
            found.append((False, named + rest))
            del self._held[: match[1]]
            self.thinking = self._begins = False
        return True

    def _piece(self, token: int) -> bytes:
        return self._shown.get(token) or self._tokenizer.piece(token)

    def rest(self) -> list[tuple[bool, str]]:
        """The pieces held back at the end of a generation."""
        found: list[tuple[bool, str]] = []
        self._emit(len(self._held), found)
        return found

    def _emit(self, count: int, found: list[tuple[bool, str]]) -> None:
        shown, self._held = self._held[:count], self._held[count:]
        piece = self._tokenizer.piece
        text = "".join(each if isinstance(each, str) else piece(each).decode() for each in shown)
        if self._begins:
            text = text.lstrip()
        if text:
            self._begins = False
            found.append((self.thinking, text))


class Thinking:
    """The thoughts of one generation, and the text of its answer without them. on_thought: called with pieces of
    thoughts. watch: measures their cost. shown, recipient: as for Splitter."""

    def __init__(
        self, model: Model, prompt: Prompt, think: Think, watch: Watch, on_thought: OnThought | None, keep_text: bool,
        shown: Iterable[int] = (), recipient: str | None = None,
    ) -> None:  # fmt: skip
        template, tokenizer = model.template, model.tokenizer
        self._tokenizer, self._again = tokenizer, False
        self._family = None if template is None or prompt.thinks is None else template.family
        self._splitter = Splitter(tokenizer, self._family, prompt.thinks or False, shown, recipient)
        self._limit, self._watch, self._on_thought = think, watch, on_thought
        self.thought = False  # whether the last token belongs to a thought, or to a mark around one
        self._thought = False  # whether there were thoughts: then none may open where the answer could begin
        self._text = StringIO() if keep_text else None
        self.tokens, self._added, self._cut = 0, 0, False
        self._most: int | None = None  # tokens of thoughts, so that an answer has room behind them
        self.held = 0.0  # seconds that the caller's on_thought took
        self._open = 0  # tokens held back as the possible beginning of an opening mark
        self._seconds, self._joules = 0.0, 0.0
        self._since: tuple[float, float] | None = None  # time and joules when these thoughts began
        self._end_ids, self._end, self._closing = tokenizer.end_ids, -1, list[int]()
        self.lead = list[int]()  # tokens between a thought's closing mark and the answer
        if self._family is not None:
            lead = (self._family.empty or "").rpartition(self._family.closing)[2]
            self.lead = tokenizer.encode(lead, start=False).tolist() if lead else []
            early_end = self._family.early_end(model.spec.architecture)
            self._closing = tokenizer.encode(early_end, special=True, start=False).tolist()
            if self._family.end is not None:
                self._end = tokenizer.special_tokens().get(self._family.end, (-1, True))[0]

    def ends(self, token: int) -> bool:
        """Whether this token ends the generation; the family's end mark does so only outside a thought."""
        return token in self._end_ids or (token == self._end and not self._splitter.thinking)

    @property
    def answering(self) -> bool:
        """Whether the next token belongs to the answer, rather than to a thought or a mark."""
        return self._family is None or (not self._splitter.thinking and self._splitter.between)

    @property
    def possible(self) -> bool:
        """Whether there may be thoughts."""
        return self._splitter.thinking or self.may_open is not None

    @property
    def may_open(self) -> int | None:
        """The special token that may open thoughts where the answer could begin; None if none may."""
        thought = self._thought or self._limit.enabled is False
        return None if self._family is None or thought else self._splitter.opening

    def feed(self, token: int) -> str:
        """The text that a generated token adds to the answer."""
        if self._family is None:
            return "".join(text for _, text in self._splitter.feed(token))
        before = self._splitter.thinking
        if before and self._since is None:
            self._begin()
        answer = self._pass_on(self._splitter.feed(token))
        now = self._splitter.thinking
        self.thought = before or now
        self._thought = self._thought or self.thought
        if before or now:
            self.tokens, self._open = self.tokens + self._open + 1, 0
        else:
            self._open = 0 if self._splitter.between else self._open + 1
        if now and not before:
            self._begin()
        elif before and not now:
            self._finish()
        return answer

    def closing(self) -> list[int]:
        """The tokens that end the thoughts, once their budget is used up; else none. The caller runs them next."""
        if not self._splitter.thinking or not self._splitter.between or self._since is None or not self._spent():
            return []
        for token in self._closing:
            self._pass_on(self._splitter.feed(token))
        self._cut, self._added = True, self._added + len(self._closing)
        self._finish()
        return self._closing

    @property
    def banned(self) -> int | None:
        """The special token that would open further thoughts, once their budget is used up."""
        return self._splitter.opening if self._cut and not self._again else None

    def end_before_header(self) -> None:
        """End thoughts over budget by the beginning of the next part, whose header the grammar chooses."""
        if self._family is not None:
            self._closing = self._tokenizer.encode(self._family.again, special=True, start=False).tolist()
            self._again = True

    def leave_room(self, most: int) -> None:
        """End thoughts in time for a generation of `most` tokens to have them and the marks around them."""
        self._most = max(1, most - len(self._closing) - len(self.lead) - _AROUND)

    def rest(self) -> str:
        """The rest of the answer, at the end of a generation."""
        return self._pass_on(self._splitter.rest())

    def report(self) -> Thoughts | None:
        """The report at the end of a generation; None if the model has not thought."""
        self._finish()
        if not self.tokens:
            return None
        text = None if self._text is None else self._text.getvalue().rstrip()
        return Thoughts(text, self.tokens, self._seconds, self._joules, self._cut, self._added)

    def _pass_on(self, pieces: list[tuple[bool, str]]) -> str:
        for thought, text in pieces:
            if thought and self._text is not None:
                self._text.write(text)
            if thought and self._on_thought is not None:
                shown = time.perf_counter()
                self._on_thought(text)
                self.held += time.perf_counter() - shown
        return "".join(text for thought, text in pieces if not thought)

    def _spent(self) -> bool:
        if self._most is not None and self.tokens >= self._most:
            return True
        if self._limit.tokens is not None:
            return self.tokens >= self._limit.tokens
        if self._limit.joules is None or self._since is None:
            return False
        return self._joules + self._watch.joules() - self._since[1] >= self._limit.joules

    def _begin(self) -> None:
        self._since = (time.perf_counter(), self._watch.joules())

    def _finish(self) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since[0]
            self._joules += self._watch.joules() - self._since[1]
            self._since = None


def _symbols(tokenizer: TokenizerLike, mark: str, special: set[int]) -> list[Symbol]:
    found: list[Symbol] = []
    for token in tokenizer.encode(mark, special=True, start=False).tolist():
        found += [token] if token in special else tokenizer.piece(token).decode("utf-8", "replace")
    return found


def _first_match(symbols: list[Symbol], marks: list[tuple[list[Symbol], bool]]) -> tuple[int, int, bool] | None:
    """Start and end of the mark that ends first, and whether thoughts follow it; None if there is none."""
    for end in range(1, len(symbols) + 1):
        for mark, thinks in marks:
            if symbols[max(0, end - len(mark)) : end] == mark:
                return end - len(mark), end, thinks
    return None
