"""Section TOKENIZER of model.edge: the tables of `runtime/vocabulary.h`, in the order that its first comment lists."""

from __future__ import annotations

import re

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.words import words_section
from edge.errors import UnsupportedError
from edge.model.tokenizer import BYTE_OF_CHAR, NORMALIZER, Tokenizer
from edge.model.vocabulary import CONTROL
from edge.types import AnyArray

KINDS = ("gpt2", "llama", "gemma4")
ADDS_SPACE, SPACE_FIRST, SPACE_ALWAYS, WHOLE_WORDS = 1, 2, 4, 8
IS_CONTROL, ONLY_SPECIAL, SWALLOWS = 1, 2, 4
LONGEST_PIECE, MOST_PROBES = 1024, 256
TOKEN_BITS, RANK_BITS = 20, 24
_COUNTS = (
    "kind", "flags", "tokens", "merges", "characters", "slots", "probes", "specials", "ends", "banned", "piece_bytes",
    "special_bytes",
)  # fmt: skip
CONFIG = c_struct(
    **dict.fromkeys(_COUNTS, "<u4"),
    **dict.fromkeys(("bos", "unknown"), "<i4"),  # or -1
    bytes=("<i4", (256,)),  # the tokens of single bytes, or -1
    special_starts=("<u4", (257,)),  # the special tokens that begin with byte i
    reserved="<u4",
)
CHARACTER = c_struct(point="<u4", token="<i4")
SPECIAL = c_struct(start="<u4", length="<u4", flags="<u4", token="<i4")
STRUCTS = {"tokenizer_config": CONFIG, "character": CHARACTER, "special_token": SPECIAL}  # by their names in C


def tokenizer_sections(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """Sections TOKENIZER and WORDS; the latter is empty except for byte-level vocabularies.

    Raises UnsupportedError for tokenizers that the C runtime cannot run.
    """
    if tokenizer.composes:
        raise UnsupportedError(f"a tokenizer that composes characters ({NORMALIZER} is NFC) cannot be exported")
    return _tokens(tokenizer), words_section(tokenizer.rule) if tokenizer.rule else b""


def _tokens(tokenizer: Tokenizer) -> bytes:
    size = tokenizer.size
    pieces = [tokenizer.piece(token) for token in range(size)]
    if (longest := max(map(len, pieces))) > LONGEST_PIECE:
        raise UnsupportedError(f"a token of {longest} bytes cannot be exported (at most {LONGEST_PIECE})")
    slots, probes = _slots(tokenizer, pieces)
    specials, special_starts, special_texts = _specials(tokenizer)
    characters = _characters(tokenizer)
    firsts, merges = _merges(tokenizer)
    ends, banned = sorted(tokenizer.end_ids), sorted(tokenizer.suppressed)
    bos = tokenizer.bos_id if tokenizer.add_bos and tokenizer.bos_id is not None else -1
    unknown = -1 if tokenizer.unknown_id is None else tokenizer.unknown_id
    flags = (
        ADDS_SPACE * tokenizer.space_prefix + SPACE_FIRST * (tokenizer.spaces == "first")
        + SPACE_ALWAYS * (tokenizer.spaces == "always") + WHOLE_WORDS * tokenizer.whole_words
    )  # fmt: skip
    counts = (
        KINDS.index(tokenizer.kind), flags, size, len(merges), len(characters), len(slots), probes, len(specials),
        len(ends), len(banned), sum(map(len, pieces)), len(special_texts),
    )  # fmt: skip
    config = {
        **dict(zip(_COUNTS, counts, strict=True)),
        "bos": bos, "unknown": unknown, "bytes": _byte_tokens(tokenizer), "special_starts": special_starts,
    }  # fmt: skip
    return b"".join(
        [
            filled(CONFIG, config),
            merges.astype("<u8").tobytes(),
            firsts.astype("<u4").tobytes(),
            characters.tobytes(),
            slots.astype("<i4").tobytes(),
            np.cumsum([0, *map(len, pieces)]).astype("<u4").tobytes(),
            specials.tobytes(),
            np.array([*ends, *banned], "<i4").tobytes(),
            *pieces,
            special_texts,
        ]
    )


def _merges(tokenizer: Tokenizer) -> tuple[AnyArray, AnyArray]:
    """The index of each left token's first merge, and the merges, uint64: right token, rank, merged token."""
    firsts, table = tokenizer.vocabulary.merge_table()
    right, rank, merged = table.astype(np.uint64).T
    if tokenizer.size > 1 << TOKEN_BITS or len(table) > 1 << RANK_BITS:
        raise UnsupportedError(f"a vocabulary of {tokenizer.size} tokens and {len(table)} merges cannot be exported")
    return firsts, right << np.uint64(TOKEN_BITS + RANK_BITS) | rank << np.uint64(TOKEN_BITS) | merged


def _byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """The token of each byte, or -1."""
    if tokenizer.kind == "gpt2":
        names = sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)
    else:
        names = [f"<0x{byte:02X}>" for byte in range(256)]
    found = [tokenizer.vocabulary.find_plain(name) for name in names]
    return [-1 if token is None else token for token in found]


def _characters(tokenizer: Tokenizer) -> AnyArray:
    """The tokens of single characters, CHARACTER [n]."""
    if tokenizer.kind == "gpt2":
        return np.zeros(0, CHARACTER)
    texts = ((tokenizer.text(token), token) for token in _plain(tokenizer))
    return np.array(sorted((ord(text), token) for text, token in texts if len(text) == 1), CHARACTER)


def _plain(tokenizer: Tokenizer) -> list[int]:
    kinds = tokenizer.vocabulary.kinds
    return [token for token, kind in enumerate(kinds) if kind != CONTROL]


def _slots(tokenizer: Tokenizer, pieces: list[bytes]) -> tuple[AnyArray, int]:
    """A hash table, with linear probing, of tokens that words become without merging, and its most probes."""
    if tokenizer.kind == "gemma4":
        chosen = [token for token in _plain(tokenizer) if re.fullmatch(r"\n+", tokenizer.text(token))]
    elif tokenizer.whole_words:
        chosen = [token for token in _plain(tokenizer) if _bytes_of(tokenizer.text(token)) == pieces[token]]
    else:
        return np.zeros(0, int), 0
    size = 1 << (2 * len(chosen)).bit_length()
    slots = np.full(size, -1)
    longest = 0
    for token in chosen:
        at = first = _fnv1a(pieces[token])
        while slots[at % size] >= 0:
            at += 1
        slots[at % size] = token
        longest = max(longest, at - first)
    if (probes := longest + 2) > MOST_PROBES:  # the last finds a free slot
        raise UnsupportedError("the vocabulary's hash table is too dense to be exported")
    return slots, probes


def _specials(tokenizer: Tokenizer) -> tuple[AnyArray, AnyArray, bytes]:
    """Tokens that match as a whole, SPECIAL [n]; the first of them for each first byte, [257]; and their texts."""
    if tokenizer.lstripping or tokenizer.alone:
        said = tokenizer.text(min(tokenizer.lstripping | tokenizer.alone))
        raise UnsupportedError(f"exported models have no tokens like {said!r}, which depends on the text before it")
    found = sorted((text.encode(), token, control) for text, (token, control) in tokenizer.special_tokens().items())
    rows, texts = [], b""
    for text, token, control in found:
        only_special = text.decode() not in tokenizer.literal_ids
        flags = IS_CONTROL * control + ONLY_SPECIAL * only_special + SWALLOWS * (token in tokenizer.swallowing)
        rows.append((len(texts), len(text), flags, token))
        texts += text
    starts = np.searchsorted([text[0] for text, _, _ in found], np.arange(257))
    return np.array(rows, SPECIAL), starts, texts


def _fnv1a(data: bytes) -> int:
    value = 2166136261
    for byte in data:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def _bytes_of(word: str) -> bytes | None:
    """The bytes of a word in GPT-2's characters for bytes; None if it has others."""
    return bytes(BYTE_OF_CHAR[char] for char in word) if BYTE_OF_CHAR.keys() >= set(word) else None
