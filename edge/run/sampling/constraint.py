"""Constraints on an answer: the protocol, and where in a generation one holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from edge.errors import InputError
from edge.grammar.grammar import Grammar
from edge.model.model import Model
from edge.model.tokens.tokenizer import TokenizerLike
from edge.run.sampling.thoughts import Thinking
from edge.types import FloatArray

if TYPE_CHECKING:
    from edge.tools.use import ToolUse

_LONGEST = 1024  # tokens of a shortest answer
_NEAR = 256  # tokens left, from which on each token is checked for a way to the end


class Constraint(Protocol):
    """The set of token sequences that an answer may be, followed from its first token to its last."""

    def mask(self, logits: FloatArray) -> None:
        """Set the logits, float32 [vocab], of tokens that cannot be next to −∞, in place."""
        ...

    def allows(self, token: int) -> bool:
        """Whether this token can be next, at lower cost than `mask`; also False where only a mask can tell."""
        ...

    def accept(self, token: int) -> None:
        """Continue the answer with this token, which `mask` or `allows` allowed."""
        ...

    def forced(self) -> list[int]:
        """Return and accept the tokens that must follow."""
        ...

    def within(self, token: int, left: int) -> int:
        """This token, which `mask` or `allows` allowed, or another one behind which the answer can still end with
        `left` tokens in all."""
        ...

    def shortest(self, most: int) -> int | None:
        """About the fewest tokens that the answer may have from here; None if they are more than `most`."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        ...


class Constrained:
    """A constraint within one generation: it holds from the end of the thoughts, which are free.

    skips: whether forced tokens need no logits. begins: whether the constraint holds for thoughts, too.
    """

    def __init__(self, constraint: Constraint, thinking: Thinking, *, skips: bool, begins: bool = False) -> None:
        self._constraint, self._thinking, self._skips, self._begins = constraint, thinking, skips, begins
        self._begun = False  # whether the answer has its first token
        self._offered: int | None = None  # the token that opens a thought, if the last mask allowed it
        self.left: int | None = None  # tokens that the answer may still have
        self.closes = False  # whether a drawn token was replaced, so that the answer ends within them
        self.cuts = False  # whether that was within a value, rather than where the answer could end anyway
        self._lead = list[int]()  # pending tokens between thoughts and answer
        self.holds = begins or thinking.answering
        if begins:
            self._begun = True
            thinking.end_before_header()

    @classmethod
    def of(
        cls, grammar: Grammar, model: Model, thinking: Thinking, *, skips: bool, begins: bool = False,
        ends: Sequence[str] = (),
    ) -> Constrained:  # fmt: skip
        """Constrain answers by a grammar. ends: as for `Matcher`, whose errors are raised."""
        from edge.grammar.matcher import Matcher

        return cls(Matcher(grammar, model.tokenizer, ends), thinking, skips=skips, begins=begins)

    def mask(self, logits: FloatArray) -> None:
        """As `Constraint.mask`. Before the answer, the token that opens a thought stays possible."""
        opening = self._offered = self._opening
        before = None if opening is None else logits[opening]
        self._constraint.mask(logits)
        if opening is not None:
            logits[opening] = before

    def allows(self, token: int) -> bool:
        """As `Constraint.allows`."""
        self._offered = self._opening
        return self._offered is None and self._constraint.allows(token)

    def within(self, token: int) -> int:
        """As `Constraint.within`, near the limit of the answer."""
        if not self.holds or token == self._offered or self.left is None or self.left > _NEAR:
            return token
        found = self._constraint.within(token, self.left)
        if found != token:
            self.closes, self.cuts = True, self.cuts or not self._constraint.complete
        return found

    def leave_room(self, most: int) -> None:
        """End thoughts before they take the last of `most` tokens, which the answer needs."""
        if (
            self._thinking.possible
            and not self._begins
            and (least := self._constraint.shortest(min(most, _LONGEST))) is not None
        ):
            self._thinking.leave_room(most - least)

    def accept(self, token: int) -> None:
        """Follow a drawn token, which `thinking` has been fed already."""
        if self.holds and token != self._offered:
            self._begun = True
            self._constraint.accept(token)
        else:
            self.holds = self._thinking.answering
            self._lead = self._thinking.lead if self.holds else []

    def thoughts_were_cut(self, tokens: list[int]) -> None:
        """Follow the inserted tokens that end the thoughts, up to the beginning of the answer."""
        if self._begins:
            for token in tokens:
                self._constraint.accept(token)
        else:
            self.holds = self._thinking.answering

    def forced(self) -> list[int]:
        """Return and accept the tokens that follow without a choice."""
        lead, self._lead = self._lead, []
        if not self.holds or not self._skips or self._opening is not None:
            return lead
        tokens = self._constraint.forced()
        self._begun = self._begun or bool(tokens)
        return lead + tokens

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return self.holds and self._constraint.ended

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self.holds and self._constraint.complete

    @property
    def _opening(self) -> int | None:
        """The token that may open a thought where the answer could begin."""
        return None if self._begun else self._thinking.may_open


def check_tools(use: ToolUse, tokenizer: TokenizerLike) -> None:
    """Raise InputError about the first tool's schema that is wrong by itself."""
    from edge.grammar.matcher import Matcher
    from edge.tools.use import wrong_schema

    for number, tool in enumerate(use.tools):
        try:
            Matcher(Grammar(json_schema=tool["function"].get("parameters") or {}), tokenizer)
        except InputError as wrong:
            raise wrong_schema(number, str(wrong).removeprefix("the JSON schema cannot be used: ")) from None
