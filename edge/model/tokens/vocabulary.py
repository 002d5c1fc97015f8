"""The tokens and merges of a byte pair encoding as tables in one file of the cache folder, mapped and never unpacked.

A model's tokenizer fields are lists of strings. As objects, the 262,144 tokens of Gemma 3 take 80 MiB, and 260 MiB
while they are read; as these tables they take 12 MiB, which a start maps in a millisecond. Numbers are little-endian,
arrays begin at multiples of 8 bytes:

    magic     8 bytes, "edgevoc1"
    counts    uint32 [4]: tokens n, merges m, bytes of text t, 0
    hashes    uint64 [n], sorted: Σ (byte i + 1) · P^i mod 2^64 of each token's text
    hashed    uint32 [n]: the token of each hash
    starts    uint32 [n + 1]: where a token's text starts in `texts`
    kinds     uint8  [n]: NORMAL, CONTROL …
    texts     uint8  [t]: UTF-8
    firsts    uint32 [n + 1]: merges firsts[i] to firsts[i + 1] have the left token i
    rights    uint32 [m]: their right tokens, ascending for each left token
    ranks     uint32 [m]: lower merges first
    merged    uint32 [m]: the token that left and right become
"""

from __future__ import annotations

import heapq
import mmap
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge.devices.keys import Hasher
from edge.devices.platform import map_file
from edge.devices.private import open_private
from edge.errors import CacheError, ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.storage import cache
from edge.types import AnyArray
from edge.values import brief

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # tokenizer.ggml.token_type

# Tokens that end a turn in models whose metadata names only one of them.
END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<eos>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
    "</s>",
)
# In a vocabulary with one of these sets, <|end|> ends a message, such as a thought, and not the turn.
CALL_ENDS = tuple({one, other} for one in ("<|return|>", "<|flush|>") for other in ("<|call|>", "<|calls|>"))

_MAGIC = b"edgevoc1"
_P, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_LONGEST_TOKEN = 1024  # characters; the longest real ones are runs of a few hundred spaces
_MOST_SPLITS = 16  # ways to make a token of two others, on average; real vocabularies have two
_CHUNK = 1 << 12  # tokens or merges processed at a time while tables are made
_FIELDS = ("tokens", "token_type", "merges", "scores")


class Vocabulary:
    """The tables of one tokenizer. A token of kind CONTROL has a text, but merging never yields it."""

    def __init__(self, tables: bytes | mmap.mmap) -> None:
        view = memoryview(tables)
        tokens, merges, text, _ = struct.unpack_from("<4I", view, 8)
        at = 24

        def array(form: Literal["B", "I", "Q"], count: int) -> memoryview[int]:
            nonlocal at
            start, size = at, count * struct.calcsize(form)
            at += -(-size // 8) * 8
            return view[start : start + size].cast(form)

        self.size: int = tokens
        self._hashes, self._hashed = array("Q", tokens), array("I", tokens)
        self._starts, self.kinds = array("I", tokens + 1), array("B", tokens)
        self._texts = array("B", text)
        self._firsts, self._rights = array("I", tokens + 1), array("I", merges)
        self._ranks, self._merged = array("I", merges), array("I", merges)
        self._merge_table = self._firsts, self._rights, self._ranks, self._merged

    def text(self, token: int) -> str:
        """A token's text. Raises IndexError for ids outside the vocabulary."""
        if not 0 <= token < self.size:
            raise IndexError(f"token {token} is not in the vocabulary of {self.size}")
        return str(self._texts[self._starts[token] : self._starts[token + 1]], "utf-8")

    def find(self, text: str) -> int | None:
        """The token with this text, of any kind; None if there is none."""
        data = text.encode()
        wanted = _hash(data)
        index = bisect_left(self._hashes, wanted)
        while index < self.size and self._hashes[index] == wanted:
            token = self._hashed[index]
            if self._texts[self._starts[token] : self._starts[token + 1]] == data:
                return token
            index += 1
        return None

    def find_plain(self, text: str) -> int | None:
        """The token with this text, unless it is a control token."""
        token = self.find(text)
        return None if token is None or self.kinds[token] == CONTROL else token

    def of_kind(self, kind: int) -> list[int]:
        """All tokens of a kind, ascending."""
        return [int(token) for token in np.flatnonzero(np.frombuffer(self.kinds, np.uint8) == kind)]

    def merges(self) -> list[tuple[int, int]]:
        """Pairs of tokens that merge, best first."""
        firsts, rules = self.merge_table()
        lefts = np.repeat(np.arange(self.size), firsts[1:] - firsts[:-1])
        order = np.argsort(rules[:, 1])
        return list(zip(lefts[order].tolist(), rules[order, 0].tolist(), strict=True))

    def merge_table(self) -> tuple[AnyArray, AnyArray]:
        """The merges by left token: firsts, uint32 [n + 1], and right token, rank and result of each merge, uint32
        [m, 3]. Rows firsts[i] to firsts[i + 1] have the left token i."""
        firsts, *columns = (np.frombuffer(each, np.uint32) for each in self._merge_table)
        return firsts, np.stack(columns, axis=1)

    def merge(self, ids: list[int]) -> list[int]:
        """Byte pair encoding: apply the best merge, leftmost on ties, until none is left. Changes `ids`."""
        count = len(ids)
        following = list(range(1, count + 1))
        previous = list(range(-1, count - 1))
        heap: list[tuple[int, int, int]] = []
        for index in range(count - 1):
            if found := self._pair(ids[index], ids[index + 1]):
                heap.append((found[0], index, found[1]))
        heapq.heapify(heap)
        while heap:
            _, index, merged = heapq.heappop(heap)
            right = following[index]
            if ids[index] < 0 or right >= count:
                continue  # it was merged into its left neighbour, or it is the last
            found = self._pair(ids[index], ids[right])
            if found is None or found[1] != merged:
                continue
            ids[index], ids[right] = merged, -1
            after = following[index] = following[right]
            if after < count:
                previous[after] = index
                if found := self._pair(merged, ids[after]):
                    heapq.heappush(heap, (found[0], index, found[1]))
            before = previous[index]
            if before >= 0 and (found := self._pair(ids[before], merged)):
                heapq.heappush(heap, (found[0], before, found[1]))
        return [token for token in ids if token >= 0]

    def _pair(self, left: int, right: int) -> tuple[int, int] | None:
        """The rank of a merge and its result; None if these tokens do not merge."""
        end = self._firsts[left + 1]
        index = bisect_left(self._rights, right, self._firsts[left], end)
        return (self._ranks[index], self._merged[index]) if index < end and self._rights[index] == right else None


def open_vocabulary(file: GGUFFile, kind: str) -> Vocabulary:
    """Open the tables of a file's tokenizer in the cache folder, and make them if they are missing. kind: gpt2, llama
    or gemma4.

    Raises ModelFormatError for a damaged vocabulary.
    """
    digest = Hasher(_MAGIC + repr((kind, END_NAMES)).encode())
    for name in _FIELDS:
        if (key := f"tokenizer.ggml.{name}") in file.spans:
            digest.update(name)
            for part in file.field_parts(key):
                digest.update(part)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as out:
            out.writelines(_make_tables(file, kind))

    try:
        path = cache.find_or_make("tokenizers", digest.key(), ".voc", write, f"tokens of {file.path.name}")
        with open_private(path) as mapped:
            return Vocabulary(map_file(mapped.fileno()))  # resident now, so that the plan counts it
    except (CacheError, OSError):  # the cache folder cannot be written: this process keeps tables of its own
        return Vocabulary(b"".join(_make_tables(file, kind)))


def _make_tables(file: GGUFFile, kind: str) -> Iterator[bytes]:
    """The table file's bytes, in parts. No string stays a Python object or dictionary key: those take the memory."""
    texts, starts = _read_texts(file)
    size = starts.size - 1
    hashes = _hashes(texts, starts)
    order = np.argsort(hashes, kind="stable").astype(np.int32)  # of tokens with the same text, the first is found
    everything = _Finder(hashes[order], order)
    kinds = _read_kinds(file, size, everything)
    chosen = order[kinds[order] != CONTROL]
    plain = _Finder(hashes[chosen], chosen)
    if kind != "llama":
        left, right, merged = _listed_merges(file, plain, everything, kinds)
    else:
        left, right, merged = _scored_merges(file, texts, starts, kinds, plain)
    rank = np.arange(left.size, dtype=np.int32)
    by_pair = np.lexsort((-rank, right, left))  # of a pair that is listed twice, the last counts
    by_pair = by_pair[np.append(True, np.diff(left[by_pair]) | np.diff(right[by_pair]))[: left.size].astype(bool)]
    arrays = (
        (hashes[order], "<u8"),
        (order, "<u4"),
        (starts, "<u4"),
        (kinds, "u1"),
        (texts, "u1"),
        (np.searchsorted(left[by_pair], np.arange(size + 1)), "<u4"),
        (right[by_pair], "<u4"),
        (rank[by_pair], "<u4"),
        (merged[by_pair], "<u4"),
    )
    yield _MAGIC + struct.pack("<4I", size, by_pair.size, texts.size, 0)
    for values, form in arrays:
        data = values.astype(form).tobytes()
        yield data + bytes(-len(data) % 8)


def repeats_a_token(file: GGUFFile) -> bool:
    """Whether two tokens have the same text."""
    texts, starts = _read_texts(file)
    return np.unique(_hashes(texts, starts)).size < starts.size - 1


def _hashes(texts: Bytes, starts: AnyArray) -> Hashes:
    """A hash of each token's text, uint64 [tokens]."""
    return np.concatenate([_Sums(*chunk).whole() for chunk in _chunks(texts, starts)] or [np.zeros(0, np.uint64)])


def _read_texts(file: GGUFFile) -> tuple[Bytes, AnyArray]:
    """The tokens' texts as UTF-8, concatenated, and their starts. As in llama.cpp, a text ends at a zero byte, and
    empty ones get names."""
    texts, starts = bytearray(), array("q", [0])
    for index, piece in enumerate(file.raw_strings("tokenizer.ggml.tokens")):
        text = piece.partition(b"\0")[0] or b"[EMPTY_%d]" % index
        if not text.isascii():
            text = text.decode("utf-8", errors="replace").encode()
        if len(text) > _LONGEST_TOKEN and len(text.decode()) > _LONGEST_TOKEN:
            raise ModelFormatError(
                f"{file.path}: a token has more than {_LONGEST_TOKEN} characters: the file is damaged"
            )
        texts += text
        starts.append(len(texts))
    return np.frombuffer(texts, np.uint8), np.frombuffer(starts, np.int64)


def _chunks(texts: Bytes, starts: AnyArray) -> Iterator[tuple[Bytes, AnyArray]]:
    """Some thousand texts at a time, with their starts in the chunk."""
    for first in range(0, starts.size - 1, _CHUNK):
        part = starts[first : first + _CHUNK + 1]
        yield texts[part[0] : part[-1]], part - part[0]


class _Sums:
    """Hashes of substrings of texts: Σ (byte i + 1) · P^i is a difference of running sums."""

    def __init__(self, texts: Bytes, starts: AnyArray) -> None:
        lengths = np.diff(starts)
        self.starts, self.ends = starts[:-1], starts[1:]
        self.place = np.arange(texts.size) - np.repeat(self.starts, lengths)  # of each byte in its text
        longest = int(lengths.max(initial=0)) + 1
        self.powers = _powers(_P, longest)
        self._inverse = _powers(pow(_P, -1, 1 << 64), longest)
        values = (texts.astype(np.uint64) + np.uint64(1)) * self.powers[self.place]
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])

    def whole(self) -> Hashes:
        return self.between(self.starts, self.ends, self.starts)

    def between(self, first: AnyArray, end: AnyArray, start: AnyArray) -> Hashes:
        """Hashes of bytes from `first` to `end` of texts that begin at `start`."""
        hashes: Hashes = (self._sums[end] - self._sums[first]) * self._inverse[first - start]
        return hashes


class _Finder:
    """Finds tokens by the hashes of their texts."""

    def __init__(self, hashes: Hashes, tokens: AnyArray) -> None:
        self._hashes, self._tokens = hashes, tokens

    def find(self, wanted: Hashes) -> AnyArray:
        """A token for each hash, -1 where there is none."""
        if not self._hashes.size:
            return np.full(wanted.shape, -1, np.int32)
        index = np.minimum(np.searchsorted(self._hashes, wanted), self._hashes.size - 1)
        return np.where(self._hashes[index] == wanted, self._tokens[index], np.int32(-1))


def _read_kinds(file: GGUFFile, size: int, everything: _Finder) -> Bytes:
    """The kind of each token. Unknown tokens count as control tokens; so do end-of-turn tokens, which some files list
    as ordinary words (</s> is one in a few vocabularies)."""
    kinds = np.full(size, NORMAL, np.uint8)
    if "tokenizer.ggml.token_type" in file.metadata:
        types = file.numbers("tokenizer.ggml.token_type")
        if types.size != size:
            raise ModelFormatError(f"{file.path}: {types.size} token types for {size} tokens")
        kinds[:] = 0
        for kind in (NORMAL, CONTROL, USER_DEFINED, BYTE):
            kinds[types == kind] = kind
        kinds[types == UNKNOWN] = CONTROL
    for name in END_NAMES:
        token = int(everything.find(np.array([_hash(name.encode())], np.uint64))[0])
        if token >= 0 and (name != "</s>" or kinds[token] != NORMAL):
            kinds[token] = CONTROL
    return kinds


def _listed_merges(file: GGUFFile, plain: _Finder, everything: _Finder, kinds: Bytes) -> tuple[AnyArray, ...]:
    """Merges as listed by byte-level files and Gemma 4's, "left right", without those of control tokens."""
    found: list[AnyArray] = []
    lines = file.raw_strings("tokenizer.ggml.merges")
    while chunk := list(islice(lines, _CHUNK)):
        chunk = [line if line.isascii() else line.decode("utf-8", errors="replace").encode() for line in chunk]
        for line in chunk:
            if not 0 < len(line) <= 8 * _LONGEST_TOKEN + 1:
                raise _unknown_merge(file, line)
        texts = np.frombuffer(b"".join(chunk), np.uint8)
        sums = _Sums(texts, np.append(0, np.cumsum([len(line) for line in chunk])))
        # The first character may itself be a space, never the separator.
        spaces = np.where((texts == ord(" ")) & (sums.place > 0), np.arange(texts.size), texts.size)
        cut = np.minimum(np.minimum.reduceat(spaces, sums.starts), sums.ends - 1)
        left = sums.between(sums.starts, cut, sums.starts)
        right = sums.between(cut + 1, sums.ends, sums.starts)
        hashes = np.stack([left, right, left + sums.powers[cut - sums.starts] * right])
        pairs = plain.find(hashes)
        known = (pairs >= 0).all(0)
        anything = everything.find(hashes)
        control = ((anything >= 0) & (kinds[anything] == CONTROL)).any(0)
        for index in np.flatnonzero(~known & ~control).tolist():
            raise _unknown_merge(file, chunk[index])
        found.append(pairs[:, known])
    merges = np.concatenate([np.zeros((3, 0), np.int32), *found], axis=1)
    return tuple(merges)


def _unknown_merge(file: GGUFFile, line: bytes) -> ModelFormatError:
    said = brief(line[:256].decode("utf-8", errors="replace"))
    return ModelFormatError(f"{file.path}: merge {said} names tokens that are not in the vocabulary")


def _scored_merges(
    file: GGUFFile, texts: Bytes, starts: AnyArray, kinds: Bytes, plain: _Finder
) -> tuple[AnyArray, ...]:
    """SentencePiece's scores as merges: every split of a token into two, best score first."""
    size = kinds.size
    scores = file.numbers("tokenizer.ggml.scores")
    if scores.size != size or np.isnan(scores).any():
        raise ModelFormatError(f"{file.path}: {scores.size} token scores for {size} tokens, or no numbers")
    found: list[AnyArray] = []
    count = 0
    for index, (chunk, within) in enumerate(_chunks(texts, starts)):
        sums = _Sums(chunk, within)
        token = np.repeat(np.arange(sums.starts.size, dtype=np.int32), np.diff(within))
        inside = (sums.place > 0) & (chunk & 0xC0 != 0x80)  # cuts lie between characters
        token, cut = token[inside], np.flatnonzero(inside)
        start = sums.starts[token]
        left = plain.find(sums.between(start, cut, start))
        right = plain.find(sums.between(cut, sums.ends[token], start))
        first = plain.find(sums.whole())[token]  # of those with the same text
        token += index * _CHUNK
        usable = (left >= 0) & (right >= 0) & (first == token) & ~np.isin(kinds[token], (CONTROL, BYTE))
        splits = np.stack([left, right, token])[:, usable]
        found.append(splits)
        count += splits.shape[1]
        if count > _MOST_SPLITS * size:
            raise ModelFormatError(f"{file.path}: its tokens are made of each other in too many ways: it is damaged")
    merges = np.concatenate([np.zeros((3, 0), np.int32), *found], axis=1)
    return tuple(merges[:, np.lexsort((merges[1], merges[0], -scores[merges[2]].astype(np.float64)))])


def _powers(base: int, count: int) -> Hashes:
    return np.cumprod(np.array([1, *[base] * (count - 1)], np.uint64), dtype=np.uint64)


def _hash(text: bytes) -> int:
    value = 0
    for byte in reversed(text):
        value = (value * _P + byte + 1) & _MASK
    return value
