"""The rules of a pre-tokenizer as tables for `runtime/text/words.c`: classes of characters and automatons.

An expression becomes Thompson's automaton. A state of its table is a list of threads, in the order in which a
backtracking matcher would try them. Threads after one that matches are dropped, so the table finds the backtracking
matcher's match in one pass (Cox, "Regular Expression Matching: the Virtual Machine Approach"). The table decides with
the next character in hand whether a match ends; `(?!\\S)` needs no more.

The `tokenizers` library decides which characters have a property, so both agree on the version of Unicode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import and_, or_
from typing import Any

import numpy as np
from tokenizers import Regex, pre_tokenizers

from edge.apps.c_struct import c_struct, filled
from edge.errors import UnsupportedError
from edge.model.tokens.pre_tokenizers import PreTokenizer
from edge.records import dataclass

CODE_POINTS, BLOCK = 0x110000, 128
MOST_SPLITS = 8
CONFIG = c_struct(block_count="<u4", class_count="<u4", splits="<u4", states=("<u4", (MOST_SPLITS,)))
ENDS, _MOST_STATES, _MOST_CLASSES = 0x8000, 0x8000, 255
_SURROGATES = range(0xD800, 0xE000)  # no text contains them

Set = np.ndarray[Any, np.dtype[np.bool_]]  # [CODE_POINTS]: which characters it has


# Expressions, as trees. `sets` are indices into the parser's list of sets.


@dataclass(frozen=True)
class One:
    """A character of a set."""

    set: int


@dataclass(frozen=True)
class NotNext:
    """A negative lookahead: the next character, if there is one, is not of the set."""

    set: int


@dataclass(frozen=True)
class Then:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """The first alternative that leads to a match."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A greedy repetition."""

    part: Node
    least: int
    most: int | None


Node = One | NotNext | Then | Either | Repeat


def words_section(rule: PreTokenizer) -> bytes:
    """Section WORDS of model.edge. Raises UnsupportedError for expressions that tables cannot express."""
    parser = _Parser()
    trees = [parser.parse(split) for split in rule.splits]
    if len(trees) > MOST_SPLITS:
        raise UnsupportedError(
            f"a pre-tokenizer of {len(trees)} expressions cannot be exported (at most {MOST_SPLITS})"
        )
    blocks, classes, members = _classes(parser.sets)
    tables = [_automaton(tree, members) for tree in trees]
    states = [table.shape[0] for table in tables] + [0] * (MOST_SPLITS - len(tables))
    head = {"block_count": len(classes) // BLOCK, "class_count": len(members), "splits": len(tables), "states": states}
    return b"".join([filled(CONFIG, head), blocks, classes, *(table.tobytes() for table in tables)])


class _Parser:
    """Parses the part of Oniguruma's syntax that pre-tokenizers use."""

    def __init__(self) -> None:
        self._sets: dict[bytes, int] = {}

    @property
    def sets(self) -> list[Set]:
        return [np.frombuffer(each, bool) for each in self._sets]

    def parse(self, pattern: str) -> Node:
        self._text, self._at, self._any_case = pattern, 0, False
        tree = self._either()
        if self._at < len(pattern):
            raise self._unsupported()
        return tree

    def _unsupported(self) -> UnsupportedError:
        rest = self._text[self._at : self._at + 20]
        return UnsupportedError(f"the pre-tokenizer's expression cannot be exported from {rest!r} on")

    def _next(self, *wanted: str) -> str | None:
        """Read the one of these texts that comes next; None if none does."""
        found = next((each for each in wanted if self._text.startswith(each, self._at)), None)
        self._at += len(found or "")
        return found

    def _match(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _either(self) -> Node:
        options = [self._then()]
        while self._next("|"):
            options.append(self._then())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _then(self) -> Node:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Then(tuple(parts))

    def _repeated(self) -> Node:
        part = self._part()
        while found := self._match(r"[?*+](?![?+])|\{(\d+)(?:(,)(\d*))?\}(?![?+])"):
            if found[1] is None:
                least, most = {"?": (0, 1), "*": (0, None), "+": (1, None)}[found[0]]
            else:
                least = int(found[1])
                most = (int(found[3]) if found[3] else None) if found[2] else least
            part = Repeat(part, least, most)
        if self._at < len(self._text) and self._text[self._at] in "?*+{":
            raise self._unsupported()  # possessive and lazy ones
        return part

    def _part(self) -> Node:
        if self._next("(?!"):
            found = NotNext(self._add(self._members()))
        elif opened := self._next("(?:", "(?i:", "("):
            outside, self._any_case = self._any_case, self._any_case or opened == "(?i:"
            tree = self._either()
            self._any_case = outside
            if not self._next(")"):
                raise self._unsupported()
            return tree
        else:
            return One(self._add(self._members()))
        if not self._next(")"):
            raise self._unsupported()
        return found

    def _add(self, members: Set) -> int:
        return self._sets.setdefault(members.tobytes(), len(self._sets))

    def _members(self) -> Set:
        """The set of a class in brackets, an escape or a character."""
        if self._next("["):
            return self._bracket()
        if self._text[self._at : self._at + 1] in set("?*+{}^$.()") | {""}:
            raise self._unsupported()
        return self._single()

    def _bracket(self) -> Set:
        negated = bool(self._next("^"))
        terms: list[list[Set]] = [[]]
        while not self._next("]"):
            if self._at >= len(self._text):
                raise self._unsupported()
            if self._next("&&"):
                terms.append([])
            elif self._next("["):
                terms[-1].append(self._bracket())
            else:
                terms[-1].append(self._range())
        found: Set = reduce(and_, (reduce(or_, term) for term in terms if term))
        return ~found if negated else found

    def _range(self) -> Set:
        start = self._at
        first = self._single()
        if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
            low, self._at = self._code_point(start), self._at + 1
            end = self._at
            self._single()
            found = np.zeros(CODE_POINTS, bool)
            found[low : self._code_point(end) + 1] = True
            return found
        return first

    def _code_point(self, at: int) -> int:
        """The code point of the character whose pattern begins at `at` and ends here."""
        text = self._text[at : self._at]
        if escaped := re.fullmatch(r"\\x\{([0-9A-Fa-f]+)\}", text):
            return int(escaped[1], 16)
        named = {"\\n": "\n", "\\r": "\r", "\\t": "\t"}.get(text, text.removeprefix("\\") or "\\")
        if len(named) != 1:
            raise self._unsupported()
        return ord(named)

    def _single(self) -> Set:
        start = self._at
        if found := self._match(r"\\([pP])\{(\w+)\}"):
            return _property(found[2]) if found[1] == "p" else ~_property(found[2])
        if found := self._match(r"\\([sS])"):
            return _property("s") if found[1] == "s" else ~_property("s")
        if not self._match(r"\\x\{[0-9A-Fa-f]+\}|\\[nrt]|\\[^\w\s]|[^\\]"):
            raise self._unsupported()
        members = np.zeros(CODE_POINTS, bool)
        point = self._code_point(start)
        members[_same_letter(point) if self._any_case else [point]] = True
        return members


@lru_cache(maxsize=64)
def _property(name: str) -> Set:
    """The characters with a Unicode property, such as `Lu`, or `s` for white space, by the `tokenizers` library.
    Only a few code points stand for those from U+34000 to plane 13, and those of private use: these are alike."""
    pattern = r"\s" if name == "s" else rf"\p{{{name}}}"
    found = np.ones(CODE_POINTS, bool)
    for start, end, asked in ((0, 0x34000, 0x34000), (0x34000, 0xE0000, 0x34010), (0xE0000, 0xF0000, 0xE1000),
                              (0xF0000, CODE_POINTS, 0xF0010)):  # fmt: skip
        points = [point for point in range(start, asked) if point not in _SURROGATES]
        cut = pre_tokenizers.Split(Regex(f"{pattern}+"), behavior="removed")
        others = np.zeros(len(points), bool)
        for _, (first, last) in cut.pre_tokenize_str("".join(map(chr, points))):
            others[first:last] = True
        found[points] = ~others
        found[asked:end] = found[asked - 1]
    found[_SURROGATES] = found[0xDFFF + 1]  # U+E000: as good as any
    found.setflags(write=False)
    return found


@lru_cache(maxsize=256)
def _same_letter(point: int) -> list[int]:
    """The characters that equal an ASCII character if case is ignored."""
    folded = chr(point).casefold()
    if point >= 0x80:
        raise UnsupportedError(f"an expression that ignores the case of {chr(point)!r} cannot be exported")
    return [each for each in range(0x10000) if chr(each).casefold() == folded]


def _classes(sets: Sequence[Set]) -> tuple[bytes, bytes, Set]:
    """Group characters that no set tells apart into classes. Returns the block of each BLOCK code points (uint16), the
    classes of each distinct block (uint8), and whether a set has a class, bool [classes, sets]."""
    if len(sets) > 64:
        raise UnsupportedError(f"a pre-tokenizer with {len(sets)} sets of characters cannot be exported")
    within = np.zeros(CODE_POINTS, np.uint64)
    for index, members in enumerate(sets):
        within |= members.astype(np.uint64) << np.uint64(index)
    blocks: dict[bytes, int] = {}
    index_of = [blocks.setdefault(block.tobytes(), len(blocks)) for block in within.reshape(-1, BLOCK)]
    found, classes = np.unique(np.frombuffer(b"".join(blocks), np.uint64), return_inverse=True)
    if found.size > _MOST_CLASSES:
        raise UnsupportedError(f"a pre-tokenizer with {found.size} classes of characters cannot be exported")
    of_sets = found[:, None] >> np.arange(len(sets), dtype=np.uint64) & np.uint64(1)
    return np.array(index_of, "<u2").tobytes(), classes.astype(np.uint8).tobytes(), of_sets.astype(bool)


# Automata. A thread is an index into a program, a list of these steps:


@dataclass
class _Fork:
    """Continues at each of these steps, the first with priority."""

    ways: list[int]


@dataclass(frozen=True)
class _Read:
    """Reads a character of a set; with `ahead`, only checks that the next character is not of the set."""

    set: int
    after: int
    ahead: bool = False


_Step = _Fork | _Read | None  # None: a match


def _automaton(tree: Node, members: Set) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Next states by state and class of the next character, uint16 [states, classes + 1]; the last class: the end."""
    program: list[_Step] = [None]
    start = _settled(program, [_compile(program, tree, 0)])
    states: dict[tuple[int, ...], int] = {(): 0, start: 1}
    moves: list[list[int]] = []
    waiting = [(), start]
    for threads in waiting:  # grows in the loop
        row = []
        for kind in range(members.shape[0] + 1):
            reached, ends = _advance(program, threads, members[kind] if kind < members.shape[0] else None)
            if reached not in states:
                states[reached] = len(states)
                waiting.append(reached)
            row.append(states[reached] | (ENDS if ends else 0))
        moves.append(row)
        if len(states) >= _MOST_STATES:
            raise UnsupportedError("the pre-tokenizer's expression has too many states to be exported")
    if any(move & ENDS for move in moves[1]):
        raise UnsupportedError("the pre-tokenizer's expression matches an empty text: it cannot be exported")
    return np.array(moves, "<u2")


def _compile(program: list[_Step], node: Node, after: int) -> int:
    """Add the steps of a tree, which continue at `after`; return the index of the first one."""
    if isinstance(node, Then):
        return reduce(lambda at, part: _compile(program, part, at), reversed(node.parts), after)
    if isinstance(node, Repeat):
        if node.most is None:
            loop = _Fork([])
            program.append(loop)
            first = len(program) - 1
            loop.ways = [_compile(program, node.part, first), after]
        else:
            first = after
            for _ in range(node.most - node.least):
                program.append(_Fork([_compile(program, node.part, first), after]))
                first = len(program) - 1
        for _ in range(node.least):
            first = _compile(program, node.part, first)
        return first
    if isinstance(node, Either):
        program.append(_Fork([_compile(program, option, after) for option in node.options]))
    else:
        program.append(_Read(node.set, after, ahead=isinstance(node, NotNext)))
    return len(program) - 1


def _settled(program: list[_Step], threads: Iterable[int]) -> tuple[int, ...]:
    """The threads that read, look ahead or match, without duplicates, by priority; none after a match."""
    found: list[int] = []
    for thread, step in _reached(program, threads, lambda _: False):
        found.append(thread)
        if step is None:
            break
    return tuple(found)


def _advance(program: list[_Step], threads: Sequence[int], having: Set | None) -> tuple[tuple[int, ...], bool]:
    """The threads after the next character, and whether a match ends before it. having: whether each set has the
    character, bool [sets]; None: the text ends."""
    found: list[int] = []
    for _, step in _reached(program, threads, lambda step: having is None or not having[step.set]):
        if step is None:
            return _settled(program, found), True
        if not step.ahead and having is not None and having[step.set]:
            found.append(step.after)
    return _settled(program, found), False


def _reached(
    program: list[_Step], threads: Iterable[int], passes: Callable[[_Read], bool]
) -> Iterator[tuple[int, _Read | None]]:
    """The threads that `threads` reach through forks and through lookaheads that `passes` accepts, with their steps,
    without duplicates, by priority."""
    seen = set()
    waiting = list(threads)[::-1]
    while waiting:
        thread = waiting.pop()
        if thread in seen:
            continue
        seen.add(thread)
        step = program[thread]
        if isinstance(step, _Fork):
            waiting += step.ways[::-1]
        elif step is not None and step.ahead and passes(step):
            waiting.append(step.after)
        else:
            yield thread, step
