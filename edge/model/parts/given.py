"""Rows that stand in a sequence in place of tokens: a soft prompt, a picture, a sound.

Each row has an id beyond the vocabulary, derived from a hash of the whole content that it belongs to: caches, drafts
and histories compare such ids as they compare tokens. An engine takes the row of an id of the vocabulary from its
embedding table, of others from the `GivenRows` that its caller passes along. From ids alone, a sequence also knows
where a picture begins and ends, and so its positions, what its tokens see, and what it must not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from edge.errors import InputError
from edge.model.parts.places import Places
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray

_END = 2**31 - 1  # ids are int32


@dataclass(frozen=True)
class Content:
    """Rows that belong together. make: returns them, float32 [n, width]; called whenever a pass needs some of them.

    grid: rows and columns of a picture's cells, whose positions have several components where the model's have. whole:
    tokens of this content see all of it, and run in one pass. seen: a picture or a tile of one, also without a grid.
    before, behind: of a tile, the picture's tokens before its first row and behind its last, texts in between too.
    """

    ids: IntArray
    make: Callable[[], FloatArray]
    grid: tuple[int, int] | None = None
    whole: bool = False
    seen: bool = False
    before: int = 0
    behind: int = 0

    @property
    def picture(self) -> bool:
        """Whether these rows stay in a cache together, or leave it together."""
        return self.seen or self.whole or self.grid is not None

    @property
    def size(self) -> int:
        """Tokens of the content, or of the picture of a tile."""
        return self.before + int(self.ids.size) + self.behind

    @property
    def cells(self) -> IntArray:
        """Positions of a grid's rows from the first on, int32 [n, 3]: time, which stands still, row, column."""
        assert self.grid is not None
        row, column = np.divmod(np.arange(self.ids.size, dtype=np.int32), np.int32(self.grid[1]))
        return np.stack([np.zeros_like(row), row, column], axis=1)


@dataclass(frozen=True)
class Span:
    """A part of some tokens that belongs to one content: tokens `start` to `stop`, the first its row `first`."""

    start: int
    stop: int
    content: Content
    first: int

    @property
    def begin(self) -> int:
        """The index at which the content, or the picture of a tile, begins; negative before these tokens."""
        return self.start - self.first - self.content.before

    @property
    def end(self) -> int:
        """The index at which that ends, perhaps beyond these tokens."""
        return self.begin + self.content.size


class GivenRows:
    """A table of rows by their ids, which begin at `vocab`.

    A row has `hidden` values or, where a model adds more parts of it behind its first layers (`Network.deepstack`),
    (1 + deepstack) · hidden. components: of the model's positions, 0 for one.
    """

    def __init__(self, vocab: int, hidden: int, deepstack: int = 0, components: int = 0) -> None:
        self.vocab, self.hidden, self.deepstack, self.components = vocab, hidden, deepstack, components
        self._known = dict[int, list[tuple[Content, int]]]()  # contents that have an id, and where

    @classmethod
    def of(cls, spec: ModelSpec) -> GivenRows:
        """An empty table for a model."""
        network = spec.network
        deepstack, components = (network.deepstack, network.components) if network else (0, 0)
        return cls(spec.vocab, spec.hidden, deepstack, components)

    def add(self, rows: FloatArray, grid: tuple[int, int] | None = None, whole: bool = False) -> IntArray:
        """Add the rows of one content, float32 [n, width], in place of embeddings (scaled, where the model scales
        them). grid, whole: see `Content`. Returns their ids, int32 [n]. Raises InputError."""
        rows = self._checked(rows)
        name = repr(rows.shape).encode() + rows.tobytes()
        return self.promise(name, len(rows), lambda: rows, grid, whole)

    def promise(
        self, name: bytes, count: int, make: Callable[[], FloatArray], grid: tuple[int, int] | None = None,
        whole: bool = False, *, seen: bool = False, before: int = 0, behind: int = 0,
    ) -> IntArray:  # fmt: skip
        """As `add`, for `count` rows that `make` returns when a pass needs them. name: differs for other rows. Others:
        see `Content`. Raises InputError."""
        if grid is not None and (min(grid) < 1 or grid[0] * grid[1] != count):
            raise InputError(f"a grid of {grid[0]} × {grid[1]} cells does not have {count} rows")
        named = name + repr((grid, whole)).encode() if grid or whole else name
        content = Content(ids_of(named, count, self.vocab), make, grid, whole, seen, before, behind)
        self._hold(content)
        return content.ids

    def _hold(self, content: Content) -> None:
        for index, each in enumerate(content.ids.tolist()):
            known = self._known.setdefault(each, [])
            if not any(np.array_equal(other.ids, content.ids) for other, _ in known):
                known.append((content, index))

    def joined(self, other: GivenRows | None) -> GivenRows:
        """A table with the rows of this one and of another of the same model."""
        found = GivenRows(self.vocab, self.hidden, self.deepstack, self.components)
        for table in (self, *([other] if other else [])):
            for content in table._contents():
                found._hold(content)
        return found

    def only(self, tokens: IntArray) -> GivenRows | None:
        """A table with the contents of which some row is among these tokens; None if there is none."""
        found = GivenRows(self.vocab, self.hidden, self.deepstack, self.components)
        used = {*tokens[tokens >= self.vocab].tolist()}
        for content in self._contents():
            if not used.isdisjoint(content.ids.tolist()):
                found._hold(content)
        return found if found._known else None

    def check(self, tokens: IntArray) -> None:
        """Raise InputError for an id beyond the vocabulary without a row."""
        if not self._known.keys() >= set(tokens[tokens >= self.vocab].tolist()):
            raise InputError(f"token ids must be from 0 to {self.vocab - 1}, or those of given rows")

    def rows(self, tokens: IntArray) -> FloatArray:
        """The rows of those tokens that are ids beyond the vocabulary, in their order, float32 [m, hidden]."""
        return np.asarray(self.parts(tokens)[0])

    def parts(self, tokens: IntArray) -> FloatArray:
        """As `rows`, then the rows that are added behind the first layers, float32 [1 + deepstack, m, hidden]."""
        width = (1 + self.deepstack) * self.hidden
        found = [np.zeros((0, width), np.float32)]
        for span in self.spans(tokens):
            rows = self._checked(span.content.make())
            if len(rows) != span.content.ids.size:
                raise InputError(f"{span.content.ids.size} rows were promised, and {len(rows)} were made")
            part = rows[span.first : span.first + span.stop - span.start]
            found.append(np.pad(part, [(0, 0), (0, width - part.shape[1])]))
        parts: FloatArray = np.concatenate(found).reshape(-1, 1 + self.deepstack, self.hidden).swapaxes(0, 1)
        return np.ascontiguousarray(parts)

    def _checked(self, rows: FloatArray) -> FloatArray:
        widths = {self.hidden, (1 + self.deepstack) * self.hidden}
        if rows.ndim != 2 or rows.shape[1] not in widths or rows.dtype.kind != "f":
            wanted = " or ".join(f"{each}" for each in sorted(widths))
            raise InputError(
                f"given rows must be float32 [n, {wanted}], not {rows.dtype} of shape {rows.shape}: this model's "
                f"hidden states have {self.hidden} values"
            )
        if not np.isfinite(rows).all():
            raise InputError("given rows have values that are not finite")
        return np.ascontiguousarray(rows, np.float32)

    # What follows from ids

    @property
    def has_pictures(self) -> bool:
        return any(each.picture for each in self._contents())

    def spans(self, tokens: IntArray) -> list[Span]:
        """The parts of these tokens that have rows, in their order."""
        found, beyond, stop = list[Span](), np.flatnonzero(tokens >= self.vocab), 0
        for start in beyond.tolist():
            if start < stop:
                continue
            known = self._known.get(int(tokens[start]), ())
            spans = [Span(start, start + _agreement(each.ids[at:], tokens[start:]), each, at) for each, at in known]
            if spans:
                found.append(max(spans, key=lambda span: span.stop))
                stop = found[-1].stop
        return found

    def pictures(self, tokens: IntArray) -> list[Span]:
        """As `spans`, of pictures alone."""
        return [span for span in self.spans(tokens) if span.content.picture]

    def places(self, tokens: IntArray, position: int) -> Places | None:
        """The places of tokens that follow `position` − 1, perhaps in the middle of a picture; None if their positions
        are consecutive and each sees those before it."""
        special = [each for each in self.pictures(tokens) if self.components or each.content.whole]
        if not special:
            return None
        count, sees, moved = tokens.size, np.arange(tokens.size, dtype=np.int32), 0
        positions = position + sees if not self.components else np.repeat(position + sees[:, None], self.components, 1)
        for span in special:
            if span.content.whole:
                sees[span.start : span.stop] = span.stop - 1
            if not self.components or span.content.grid is None:
                continue
            cells = span.content.cells
            reached = np.maximum.accumulate(cells.max(axis=1))
            first = position + span.start - moved - (int(reached[span.first - 1]) + 1 if span.first else 0)
            part = slice(span.first, span.first + span.stop - span.start)
            positions[span.start : span.stop] = first + cells[part]
            behind = first + int(reached[part.stop - 1]) + 1
            moved = position + span.stop - behind
            positions[span.stop :] = (position + np.arange(span.stop, count) - moved)[:, None]
        return Places(positions.astype(np.int32), sees, floor=position - 1)

    def undivided(self, tokens: IntArray, count: int, most: int, rows: int) -> tuple[int, int]:
        """How many of `most` tokens to run in a pass of about `count`, so that it divides no content that is `whole`:
        more only where they begin with a longer one. And the rows to have room for: all of a picture that it begins,
        which begins another pass if both take more than `rows`. tokens: at least the first `count`."""
        cut = next((each for each in self.pictures(tokens[:count]) if count < each.end), None)
        if cut is None:
            return count, count
        end, start = min(cut.end, most), max(0, cut.begin)
        run = start or end if cut.content.whole or (start and end > rows) else count
        return run, end if run > start else run

    def numbers(self, tokens: IntArray) -> IntArray:
        """The positions, one of each, of tokens that begin a conversation, int32 [n]."""
        places = self.places(tokens, 0)
        return np.arange(tokens.size, dtype=np.int32) if places is None else places.numbers

    def check_fits(self, most: int, rows: int, pinned: int) -> None:
        """Raise InputError for a content that cannot run: a whole one that is longer than a pass, of `most` tokens, or
        a picture with no room in `rows`, beside those that are `pinned`, and a token."""
        for content in self._contents():
            size = content.size
            if content.whole and size > most:
                raise InputError(
                    f"a picture's {size} tokens see each other, and run in one pass, which has at most {most}: use "
                    f"--prefill-step-size {size}"
                )
            if content.picture and size + pinned + 1 > rows:
                raise InputError(
                    f"a picture or sound of {size} tokens does not fit in {rows} KV rows: use "
                    f"--max-kv-size {size + pinned + 1} or more, or for a picture fewer --image-tokens"
                )

    def _contents(self) -> Iterable[Content]:
        return {id(each): each for known in self._known.values() for each, _ in known}.values()


def interleaved(keys: FloatArray, count: int) -> FloatArray:
    """Keys [..., head] whose RoPE pairs are halves of the first `count` values, with neighbours as pairs."""
    found: FloatArray = keys.copy()
    halves = keys[..., :count].reshape(*keys.shape[:-1], 2, -1)
    found[..., :count] = halves.swapaxes(-1, -2).reshape(*keys.shape[:-1], count)
    return found


def content_ids(rows: FloatArray, vocab: int) -> IntArray:
    """The ids of the rows of one content, from a hash of all of it."""
    return ids_of(repr(rows.shape).encode() + rows.tobytes(), len(rows), vocab)


def ids_of(name: bytes, count: int, vocab: int) -> IntArray:
    """Different ids for `count` rows, int32 [count], at least `vocab`, from a hash of their name."""
    import hashlib  # loads OpenSSL

    content, salt = hashlib.sha256(name).digest(), 0
    while True:  # again for the rare content that gives two rows the same id
        drawn = hashlib.shake_256(content + salt.to_bytes(4, "little")).digest(8 * count)
        ids = vocab + (np.frombuffer(drawn, np.uint64) % np.uint64(_END - vocab)).astype(np.int64)
        if np.unique(ids).size == count:
            return np.asarray(ids, np.int32)
        salt += 1


def _agreement(one: AnyArray, other: AnyArray) -> int:
    """The number of first values that two arrays share."""
    size = min(one.size, other.size)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size
