"""Section NORMALIZER of model.edge: which characters a tokenizer drops, maps to others, or composes, and which end a
word or belong together. The tables are the answers of the `tokenizers` library to questions about every character.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import normalizers, pre_tokenizers

from edge.apps.c_struct import c_struct, filled
from edge.apps.sections.words import BLOCK, CODE_POINTS
from edge.errors import ModelFormatError
from edge.model.tokens.unigram import Unigram
from edge.model.tokens.word_piece import WordPiece
from edge.types import AnyArray

# A character's class is a number below ALONE, and flags. BERT's: 0 for one that stays as it is. Unigrams': GRAPHEMES.
# Of characters that are composed, the class is the canonical combining class, up to 240, or DECOMPOSED.
DROPPED, MAPPED, SYLLABLE = 1, 2, 3  # SYLLABLE: of Hangul, which becomes its two or three parts
GRAPHEMES = ("OTHER", "CONTROL", "EXTEND", "SPACING", "ZWJ", "PREPEND", "PICTURE", "L", "V", "T", "LV", "LVT")
DECOMPOSED = 0xFF
ALONE, BLANK = 0x40, 0x80  # it is a word of its own; it ends a word, and is no part of one

CONFIG = c_struct(**dict.fromkeys(("block_count", "mapped", "points", "units", "text_bytes", "pairs"), "<u4"))
MAPPING = c_struct(point="<u4", start="<u4")  # of its characters among `points`, up to the start of the next mapping
PAIR = c_struct(first="<u4", second="<u4", composed="<u4")
STRUCTS = {"letters_config": CONFIG, "letter_mapping": MAPPING, "letter_pair": PAIR}  # by their names in C

_MARK = "\u3042"  # stands between characters that are asked about together; the library changes and makes none
_AT_ONCE, _LAST_CLASS = 256, 240  # the largest combining class
_ACUTE, _JOINER = "\u0301", "\u200d"
# Unassigned planes, and those for private use but their last blocks: what holds for the first point holds for all.
_ALIKE = (range(0x40000, 0xE0000), range(0xF0000, 0xFFF00), range(0x100000, 0x10FF00))
_FIRST_PLANE, _OTHER_PLANES, _PICTURES = range(0x10000), range(0x10000, 0xF0000), range(0x1F000, 0x20000)
_HANGUL = {
    "L": (range(0x1100, 0x1160), range(0xA960, 0xA97D)), "V": (range(0x1160, 0x11A8), range(0xD7B0, 0xD7C7)),
    "T": (range(0x11A8, 0x1200), range(0xD7CB, 0xD7FC)), "LVT": (range(0xAC00, 0xD7A4),),
    "LV": (range(0xAC00, 0xD7A4, 28),),  # of the syllables before, those without a last part
}  # fmt: skip


def word_piece_letters(tokenizer: WordPiece) -> bytes:
    """The section of BERT's tokenizer. Combining characters that its normalizer leaves and puts in another order, which
    takes two of them in a row, are not told apart from letters."""
    classes, mapped = np.zeros(CODE_POINTS, np.uint8), list[tuple[int, str]]()
    for points in _all_points():
        texts = list(map(chr, points))
        for point, text, out in zip(points, texts, _answers(tokenizer.normalizer, texts), strict=True):
            if out in ("", " "):
                classes[point] = BLANK if out else DROPPED
            elif out == f" {text} ":
                classes[point] = ALONE
            elif out != text and len(out) > 1 and 0xAC00 <= point < 0xD7A4:
                classes[point] = SYLLABLE
            elif out != text:
                classes[point] = MAPPED
                mapped.append((point, out))
        for point, flag in _breaks(tokenizer.pre_tokenizer, texts):
            classes[point] |= flag
    return _section(classes, mapped)


def unigram_letters(tokenizer: Unigram) -> bytes:
    """The section of a unigram tokenizer. Its table maps graphemes of less than 6 bytes by their first characters, and
    the characters of longer ones each. Raises ModelFormatError for a damaged table."""
    classes = np.zeros(CODE_POINTS, np.uint8)
    for points in _all_points():
        for point, flag in _breaks(pre_tokenizers.WhitespaceSplit(), list(map(chr, points))):
            classes[point] = flag
    if tokenizer.table is None:
        return _section(classes, [])
    units = int.from_bytes(tokenizer.table[:4], "little")
    trie, text = tokenizer.table[4 : 4 + units], tokenizer.table[4 + units :]
    if units % 4 or not units or len(trie) != units:
        raise ModelFormatError("tokenizer.ggml.precompiled_charsmap is damaged: its trie is cut short")
    for kind, found in _graphemes(tokenizer.normalizer):
        classes[found] = classes[found] & BLANK | GRAPHEMES.index(kind)
    return _section(classes, [], trie, text)


@lru_cache(1)
def composing_letters() -> bytes:
    """The section of NFC: decompositions, combining classes, and pairs that become one character. Hangul, which is
    composed by arithmetic, is left out."""
    compose, decompose = normalizers.NFC().normalize_str, normalizers.NFD()
    ask = decompose.normalize_str
    classes, mapped, pairs = np.zeros(CODE_POINTS, np.uint8), list[tuple[int, str]](), list[tuple[int, int, int]]()
    marks = {unicodedata.combining(chr(each)): chr(each) for each in range(0x3100)}
    last = marks[_LAST_CLASS]
    for points in _all_points():
        texts = list(map(chr, points))
        behind = _answers(decompose, [last + text for text in texts])
        for point, text, out, moved in zip(points, texts, _answers(decompose, texts), behind, strict=True):
            if out == text:
                if moved != last + text or text == last:  # a mark, whose class is that of marks with which it stays
                    pairs_of = ((mark + text, text + mark, kind) for kind, mark in marks.items() if kind)
                    stay = (kind for one, two, kind in pairs_of if (ask(one), ask(two)) == (one, two))
                    classes[point] = next(stay, unicodedata.combining(text))
            elif not 0xAC00 <= point < 0xD7A4:
                classes[point] = DECOMPOSED
                mapped.append((point, out))
                if compose(text) == text:
                    pairs.append((ord(compose(out[:-1])), ord(out[-1]), point))
    return _section(classes, mapped, pairs=sorted(pairs))


def _graphemes(normalizer: Any) -> Iterator[tuple[str, AnyArray]]:
    """Classes of characters, by what the normalizer makes of graphemes with a character that it maps, and with an
    accent, which stays only at the end of a longer grapheme. Others make no difference."""
    ask = normalizer.normalize_str

    def ends(points: Iterable[int], before: str, behind: str) -> list[int]:
        """The points that, between these texts, leave the accent in its place."""
        return [each for each in points if ask(before + chr(each) + behind + _ACUTE).endswith(_ACUTE)]

    plane = [each for each in _FIRST_PLANE if not 0xD800 <= each < 0xE000]
    mapped = [each for each in plane if ask(chr(each)) != chr(each)]
    yield "CONTROL", np.array(control := ends(mapped, "", ""), np.int64)
    starts = sorted(set(mapped) - set(control), key=lambda point: len(chr(point).encode()))
    if not starts:
        return
    for kind, ranges in _HANGUL.items():
        yield kind, np.concatenate([np.array(each) for each in ranges])
    start = chr(starts[0])
    room, replaced = 5 - len(start.encode()), ask(start)
    everywhere = (*plane, *(_OTHER_PLANES if room == 4 else ()))  # 4 bytes fit behind one
    fitting = [each for each in everywhere if len(chr(each).encode()) <= room and each not in control]
    joined = [each for each in fitting if ask(start + chr(each)) == replaced and ask(chr(each)) != ""]
    longer = next((chr(each) for each in starts if each >= 0x80), start)
    joined += ends((each for each in fitting if ask(chr(each)) == ""), longer, "")
    yield "EXTEND", np.array(joined, np.int64)
    yield "PREPEND", np.array(prepended := ends(plane, "", start + _ACUTE * (room // 2 - 1)), np.int64)
    for first in [chr(each) for each in prepended if each in mapped][:1]:
        some = [each for each in plane if len((first + chr(each)).encode()) < 6 and ask(chr(each)) == chr(each)]
        yield "CONTROL", np.array([each for each in some if ask(first + chr(each)) != ask(first)], np.int64)
    pictured = next((chr(each) for each in starts if ends([each], chr(each) + _JOINER, "")), None)
    if pictured is not None:
        apart = sorted(set(joined) - set(ends(joined, pictured, _JOINER + pictured)))
        yield "SPACING", np.array(apart, np.int64)
        yield "PICTURE", np.array(ends((*plane, *_PICTURES), "", _JOINER + pictured), np.int64)
    yield "ZWJ", np.array([ord(_JOINER)])


def _all_points() -> Iterator[list[int]]:
    """All characters, some at a time; of those that are alike the first ones, see `_section`."""
    for first in range(0, CODE_POINTS, _AT_ONCE):
        if any(first in each[1:] for each in _ALIKE):
            continue
        points = [each for each in range(first, first + _AT_ONCE) if not 0xD800 <= each < 0xE000]
        if points:
            yield points


def _answers(normalizer: Any, texts: list[str]) -> list[str]:
    found: list[str] = normalizer.normalize_str(_MARK.join(texts)).split(_MARK)
    return found if len(found) == len(texts) else [normalizer.normalize_str(each) for each in texts]


def _breaks(splitter: Any, texts: list[str]) -> Iterator[tuple[int, int]]:
    """Characters that end words, with their flags."""
    kept = np.full(2 * len(texts) + 1, BLANK, np.uint8)
    for _, (first, end) in splitter.pre_tokenize_str(f"x{'x'.join(texts)}x"):
        kept[first:end] = ALONE if end - first == 1 else 0
    kept[::2] = 0
    for number in np.flatnonzero(kept):
        yield ord(texts[number // 2]), int(kept[number])


def _section(
    classes: AnyArray, mapped: list[tuple[int, str]], trie: bytes = b"", text: bytes = b"",
    pairs: list[tuple[int, int, int]] | None = None,
) -> bytes:  # fmt: skip
    for each in _ALIKE:
        classes[each.start : each.stop] = classes[each.start]
    blocks: dict[bytes, int] = {}
    index_of = [blocks.setdefault(block.tobytes(), len(blocks)) for block in classes.reshape(-1, BLOCK)]
    starts = np.cumsum([0, *(len(out) for _, out in mapped)])
    table = np.zeros(len(mapped) + 1, MAPPING)
    table["point"], table["start"] = [*(point for point, _ in mapped), CODE_POINTS], starts
    points = np.array([ord(each) for _, out in mapped for each in out], "<u4")
    config = {
        "block_count": len(blocks), "mapped": len(mapped), "points": points.size, "units": len(trie) // 4,
        "text_bytes": len(text), "pairs": len(pairs or []),
    }  # fmt: skip
    parts = [np.array(index_of, "<u2").tobytes(), *blocks, table.tobytes(), points.tobytes(), trie]
    return b"".join([filled(CONFIG, config), *parts, np.array(pairs or [], PAIR).tobytes(), text])
