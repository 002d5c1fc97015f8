"""The tokens that a grammar allows next, by llguidance: an Earley parser over the bytes of a model's vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from edge.errors import InputError, MissingExtraError, UnsupportedError
from edge.grammar.ending import Endings, endings_of
from edge.grammar.grammar import Grammar
from edge.grammar.numbers import TAIL, numbers_of
from edge.json_schema import closed
from edge.model.model import Model
from edge.model.tokens.tokenizer import MARK, TokenizerLike
from edge.types import FloatArray

# States of a lexer take 1 to 2 KiB each, and stay; real schemas make some hundreds.
_MOST_LEXER_STATES = 20_000
_BUILDING, _STEP, _ITEMS = 1_000_000, 200_000, 50_000  # llguidance's defaults: 20 ms, 15 ms, and 2.5 ms of work
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
# Measured, of vocabularies of 300 to 262,144 tokens: llguidance itself, and its tables while they are made.
_LIBRARY_BYTES, _TOKEN_BYTES = 10 << 20, 490
_ECHOED = 300  # characters of llguidance's messages that errors repeat
# Parts of them: a place in a grammar; a wrong regular expression with carets below; lines of a grammar, likewise.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REGEX = re.compile(
    r'(?:invalid regex ".*" \(in regex\): )?regex parse error:\n(?: {4}(.*)\n {4}( *)\^+\n|(?:.*\n)*?)error: '
)
_LINES = re.compile(r"^ +\d+ \|.*|^ *\^+ *$", re.MULTILINE)

# Blanks between the parts of a JSON text: a model that writes nothing else would never end its answer.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"

# The minimum of a logit and its bound is the logit, or −∞. A row for each value of a mask's byte, a bound for each bit.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS == 1, np.float32(np.inf), np.float32(-np.inf))


def check_grammar(grammar: Grammar, model: Model) -> None:
    """Compile a grammar for a model's vocabulary. The model keeps the vocabulary's tables, so plans made after a check
    count their memory; `load(grammar=…)` plans first.

    Raises InputError for an invalid grammar, MissingExtraError without llguidance.
    """
    Matcher(grammar, model.tokenizer)


def tables_bytes(tokenizer: TokenizerLike) -> int:
    """Peak bytes of making the vocabulary's tables, most of which stay; 0 if they exist. Raises MissingExtraError
    without llguidance."""
    _library()
    return 0 if tokenizer in _made else _LIBRARY_BYTES + _TOKEN_BYTES * tokenizer.size


class Matcher:
    """The state of one answer in its grammar. Its memory is bounded by the limits above and by the answer's length.

    Raises InputError for a grammar that is invalid or takes too much work, MissingExtraError without llguidance.
    """

    def __init__(self, grammar: Grammar, tokenizer: TokenizerLike, ends: Sequence[str] = ()) -> None:
        """ends: texts that end a value, by which an answer may be closed."""
        words = _words(tokenizer)
        library = _library()
        try:
            definition = _definition(grammar)
        except InputError as error:
            raise InputError(str(error), grammar.param) from None
        limits = library.LLParserLimits(
            initial_lexer_fuel=_BUILDING, step_lexer_fuel=_STEP, step_max_items=_ITEMS,
            max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False,
        )  # fmt: skip
        self._matcher = library.LLMatcher(words, definition, log_level=0, limits=limits)
        if self._matcher.is_error():
            why = _one_line(self._matcher.get_error(), placed=grammar.regex is None)
            raise InputError(f"the {grammar.name} cannot be used: {why}", grammar.param)
        self._bits = np.zeros((words.vocab_size + 31) // 32 * 4, np.uint8)
        self._address = self._bits.ctypes.data
        self._free = False  # no text is forced here
        in_json = grammar.json_schema is not None or "%json" in (grammar.lark or "")
        self._numbers, self._piece = numbers_of(tokenizer) if in_json else None, tokenizer.piece
        self._tail = b""  # of the answer
        self._tokenizer, self._ends = tokenizer, ends
        self._way: list[int] | None = None  # from here to an end, if it is known,
        self._next: tuple[int, list[int]] | None = None  # and behind the token that was drawn
        self._try_at = 1 << 31  # tokens left, above which no way was found

    def mask(self, logits: FloatArray) -> None:
        """Set the logits, float32 [vocab], of tokens that the grammar does not allow next to −∞. These include the end
        of a turn, unless the answer may end here.

        Raises UnsupportedError if the grammar exceeds its limits of work.
        """
        self._matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._check()
        if self._numbers is not None:
            self._numbers.bound(self._bits, self._tail)
        np.minimum(logits, _BOUNDS.take(self._bits, axis=0).reshape(-1)[: logits.size], out=logits)

    def allows(self, token: int) -> bool:
        """Whether `mask` certainly allows a token, in a tenth of its time. False may also mean that only a mask can
        tell: at the end of an answer, in a long number, and where text is forced, of which a mask allows only the
        tokenizer's own tokens.
        """
        if not self._free or (self._numbers is not None and self._numbers.exceeds(token, self._tail)):
            return False
        return bool(self._matcher.validate_tokens([token]) == 1)

    def accept(self, token: int) -> None:
        """Continue the answer with a token that `mask` or `allows` allowed. Raises UnsupportedError as `mask` does."""
        self._free = False
        self._way = self._next[1] if self._next is not None and self._next[0] == token else None
        self._matcher.consume_token(token)
        self._check()
        self._follow([token])

    def forced(self) -> list[int]:
        """Accept and return the tokens of text that the grammar forces, as the tokenizer writes it. They end where a
        token may depend on later text."""
        tokens = list[int]()
        while found := self._matcher.compute_ff_tokens():
            self._matcher.consume_tokens(found)
            self._check()
            tokens += found
        self._follow(tokens)
        if tokens and self._way is not None:
            self._way = self._way[len(tokens) :] if self._way[: len(tokens)] == tokens else None
        self._free = True
        return tokens

    def within(self, token: int, left: int) -> int:
        """A token that `mask` or `allows` allowed, if the answer can end behind it with `left` tokens in all; else the
        next one of a way to its end. The token, too, where no way is short enough."""
        self._next = None
        if left > self._try_at or token in self._tokenizer.end_ids:
            return token
        way = self._way_behind(token, left - 1)
        if way is None:
            here = self._way if self._way is not None else self._ways.way(self._matcher, self._words, left)
            if here is None or len(here) > left:
                self._try_at = left * 3 // 4
                return token
            token, *way = here or self._end  # an answer may end where it is
        self._next = token, way
        return token

    def _way_behind(self, token: int, most: int) -> list[int] | None:
        """A way to the end behind a token, of at most `most` tokens: mostly the known one."""
        behind = self._matcher.deep_copy()
        behind.consume_token(token)
        if self._way is not None:
            way = self._way[1:] if self._way[:1] == [token] else self._way
            if len(way) <= most and behind.validate_tokens([*way, *self._end]) == len(way) + 1:
                return way
        return self._ways.way(behind, self._words, most)

    @property
    def _ways(self) -> Endings:
        return endings_of(self._tokenizer)

    @property
    def _end(self) -> list[int]:
        return [min(self._tokenizer.end_ids, default=self._tokenizer.size)]

    @cached_property
    def _words(self) -> list[list[int]]:
        return [self._tokenizer.encode(text, special=True, start=False).tolist() for text in self._ends]

    def shortest(self, most: int) -> int | None:
        """About the fewest tokens that the answer may have from here; None if they are more than `most`."""
        way = self._ways.way(self._matcher, self._words, most)
        return None if way is None else len(way)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def _follow(self, tokens: list[int]) -> None:
        if self._numbers is not None:
            self._tail = b"".join((self._tail, *map(self._piece, tokens)))[-TAIL:]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UnsupportedError(f"the grammar failed in this answer: {_one_line(self._matcher.get_error())}")


def _definition(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    make = _library().LLMatcher
    if grammar.json_schema is not None:
        schema = json.dumps(closed(json.loads(str(grammar.json_schema))))
        text: str = make.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
    elif grammar.regex is not None:
        text = make.grammar_from_regex(grammar.regex)
    else:
        text = make.grammar_from_lark(_lark(grammar.lark or ""))
    return text


def _lark(text: str) -> str:
    """A grammar in Lark's notation, converted if it is in GBNF. Raises InputError."""
    from llguidance.gbnf_to_lark import any_to_lark

    if not _GBNF.search(text):
        return text
    try:
        return str(any_to_lark(text))
    except Exception as error:  # its own, IndexError or RecursionError
        raise InputError(f"the grammar cannot be used: {_one_line(str(error))}") from None


class _Encoder:
    """A tokenizer in the form that llguidance expects, with a weak reference: llguidance must not keep it alive."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        special = {token for token, control in tokenizer.special_tokens().values() if control}
        special |= {token for text, (token, _) in tokenizer.special_tokens().items() if MARK.fullmatch(text)}
        ends = sorted(tokenizer.end_ids) or [tokenizer.size]  # after all others, where it has no logit
        self.ends, self.eos_token_id, self.bos_token_id = ends, ends[0], tokenizer.bos_id
        self.special_token_ids = sorted(special)
        self.tokens: Sequence[bytes] = [
            tokenizer.text(token).encode() if token in special else tokenizer.piece(token)
            for token in range(tokenizer.size)
        ]
        self._tokenizer = ref(tokenizer)

    def __call__(self, text: bytes | str) -> list[int]:
        tokenizer = self._tokenizer()
        assert tokenizer is not None  # the matcher's caller holds it
        text = text if isinstance(text, str) else text.decode(errors="replace")
        tokens: list[int] = tokenizer.encode(text, start=False).tolist()
        return tokens


_made: WeakKeyDictionary[TokenizerLike, Any] = WeakKeyDictionary()  # llguidance's tokenizers


def _words(tokenizer: TokenizerLike) -> Any:
    """The vocabulary in llguidance's form, made once per tokenizer, which takes some tenths of a second."""
    if (found := _made.get(tokenizer)) is not None:
        return found
    library, encoder = _library(), _Encoder(tokenizer)
    wrapper = library.TokenizerWrapper(encoder)
    size = max(tokenizer.size, encoder.ends[-1] + 1)
    made = library.LLTokenizer(wrapper, n_vocab=size, eos_token=encoder.ends, slices=library.LLTokenizer.json_slices())
    wrapper.tokens = encoder.tokens = ()  # llguidance has a trie of its own
    _made[tokenizer] = made
    return made


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("llguidance", "grammar") from None
    return llguidance


def _one_line(message: str, *, placed: bool = True) -> str:
    """llguidance's message, with positions in place of carets. placed: whether the grammar is the user's text."""

    def expression(found: re.Match[str]) -> str:
        return f"{found[1]!r:.40}, character {len(found[2]) + 1}: " if found[1] else ""

    message = _REGEX.sub(expression, _PLACE.sub(r"line \1, column \2: " if placed else "", message))
    line = " ".join(_LINES.sub("", message).split())
    return line if len(line) <= _ECHOED else f"{line[: _ECHOED - 1]}…"
