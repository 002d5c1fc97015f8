"""Section TOKENIZER of model.edge: the tables of `runtime/text/vocabulary.h`, in its first comment's order."""

from __future__ import annotations

import re

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.sections.words import words_section
from edge.errors import UnsupportedError
from edge.model.tokens.tokenizer import BYTE_OF_CHAR, LONGEST_BLOCK, Tokenizer, TokenizerLike
from edge.model.tokens.unigram import Unigram
from edge.model.tokens.vocabulary import CONTROL
from edge.model.tokens.word_piece import REST, WordPiece
from edge.types import AnyArray

KINDS = ("gpt2", "llama", "gemma4", "bert", "t5")
ADDS_SPACE, SPACE_FIRST, SPACE_ALWAYS, WHOLE_WORDS, COMPOSES = 1, 2, 4, 8, 16
IS_CONTROL, ONLY_SPECIAL, SWALLOWS = 1, 2, 4
LONGEST_PIECE, MOST_PROBES = 1024, 256
TOKEN_BITS, RANK_BITS = 20, 24
_COUNTS = (
    "kind", "flags", "tokens", "merges", "characters", "slots", "probes", "specials", "ends", "banned", "piece_bytes",
    "special_bytes", "scores", "longest",
)  # fmt: skip
CONFIG = c_struct(
    **dict.fromkeys(_COUNTS, "<u4"),
    **dict.fromkeys(("bos", "unknown"), "<i4"),  # or -1
    bytes=("<i4", (256,)),  # the tokens of single bytes, or -1
    special_starts=("<u4", (257,)),  # the special tokens that begin with byte i
    least="<f8",  # the score of an unknown character
)
CHARACTER = c_struct(point="<u4", token="<i4")
SPECIAL = c_struct(start="<u4", length="<u4", flags="<u4", token="<i4")
STRUCTS = {"tokenizer_config": CONFIG, "character": CHARACTER, "special_token": SPECIAL}  # by their names in C


def tokenizer_sections(tokenizer: TokenizerLike) -> tuple[bytes, bytes, bytes]:
    """Sections TOKENIZER, WORDS and NORMALIZER; the second is for byte-level vocabularies, the last for WordPiece,
    unigrams and those that compose characters.

    Raises UnsupportedError for tokenizers that the C runtime cannot run, ModelFormatError for damaged tables.
    """
    if isinstance(tokenizer, WordPiece | Unigram):
        from edge.apps.sections.letters import unigram_letters, word_piece_letters

        if isinstance(tokenizer, WordPiece):
            return _pieces(tokenizer), b"", word_piece_letters(tokenizer)
        return _pieces(tokenizer), b"", unigram_letters(tokenizer)
    if not isinstance(tokenizer, Tokenizer):
        raise UnsupportedError("its tokenizer is known to llama.cpp alone")
    letters = b""
    if tokenizer.composes:
        from edge.apps.sections.letters import composing_letters

        letters = composing_letters()
    return _tokens(tokenizer), words_section(tokenizer.rule) if tokenizer.rule else b"", letters


def composing_bytes(tokenizer: TokenizerLike) -> int:
    """Bytes of a session's memory for a block of text that is composed."""
    return 3 * 4 * LONGEST_BLOCK if isinstance(tokenizer, Tokenizer) and tokenizer.composes else 0


def _pieces(tokenizer: WordPiece | Unigram) -> bytes:
    """Tables of tokens into which words are split. Pieces that begin a word of WordPiece begin with a space."""
    pieces = [b""] * tokenizer.size
    for text, token in tokenizer.pieces.items():
        if isinstance(tokenizer, WordPiece):
            text = text.removeprefix(REST) if text.startswith(REST) else f" {text}"
        pieces[token] = text.encode()
    _check_longest(pieces)
    chosen = sorted(tokenizer.pieces.values())
    slots, probes = _hashed(chosen, pieces)
    unigrams = isinstance(tokenizer, Unigram)
    scores = np.array(tokenizer.scores if isinstance(tokenizer, Unigram) else [], "<f4")
    special = {} if unigrams else tokenizer.special_tokens()  # to unigrams, control tokens are text
    found = sorted((text.encode(), token) for text, (token, _) in special.items())
    specials, special_starts, special_texts = _special_table(
        [(text, IS_CONTROL | ONLY_SPECIAL, token) for text, token in found]
    )
    config = {
        "kind": KINDS.index(tokenizer.kind), "tokens": tokenizer.size, "slots": len(slots), "probes": probes,
        "specials": len(specials), "piece_bytes": sum(map(len, pieces)), "special_bytes": len(special_texts),
        "scores": scores.size, "longest": max(map(len, pieces)), "bos": tokenizer.bos_id,
        "unknown": tokenizer.unknown_id, "bytes": [-1] * 256, "special_starts": special_starts,
        "least": tokenizer.least if isinstance(tokenizer, Unigram) else 0.0,
    }  # fmt: skip
    return _joined(
        config, pieces, slots=slots, scores=scores, specials=specials, special_texts=special_texts,
    )  # fmt: skip


def _tokens(tokenizer: Tokenizer) -> bytes:
    size = tokenizer.size
    pieces = [tokenizer.piece(token) for token in range(size)]
    _check_longest(pieces)
    slots, probes = _slots(tokenizer, pieces)
    specials, special_starts, special_texts = _specials(tokenizer)
    characters = _characters(tokenizer)
    firsts, merges = _merges(tokenizer)
    ends, banned = sorted(tokenizer.end_ids), sorted(tokenizer.suppressed)
    flags = (
        ADDS_SPACE * tokenizer.space_prefix + SPACE_FIRST * (tokenizer.spaces == "first")
        + SPACE_ALWAYS * (tokenizer.spaces == "always") + WHOLE_WORDS * tokenizer.whole_words
        + COMPOSES * tokenizer.composes
    )  # fmt: skip
    config = {
        "kind": KINDS.index(tokenizer.kind), "flags": flags, "tokens": size, "merges": len(merges),
        "characters": len(characters), "slots": len(slots), "probes": probes, "specials": len(specials),
        "ends": len(ends), "banned": len(banned), "piece_bytes": sum(map(len, pieces)),
        "special_bytes": len(special_texts),
        "bos": tokenizer.bos_id if tokenizer.add_bos and tokenizer.bos_id is not None else -1,
        "unknown": -1 if tokenizer.unknown_id is None else tokenizer.unknown_id,
        "bytes": _byte_tokens(tokenizer), "special_starts": special_starts,
    }  # fmt: skip
    return _joined(
        config, pieces, merges, firsts, characters, slots, specials=specials,
        named=np.array([*ends, *banned], "<i4"), special_texts=special_texts,
    )  # fmt: skip


_NONE = np.zeros(0, "<i4")


def _joined(
    config: dict[str, object], pieces: list[bytes], merges: AnyArray = _NONE, firsts: AnyArray | None = None,
    characters: AnyArray = _NONE, slots: AnyArray = _NONE, *, scores: AnyArray = _NONE, specials: AnyArray = _NONE,
    named: AnyArray = _NONE, special_texts: bytes = b"",
) -> bytes:  # fmt: skip
    """The section. named: tokens that end a turn, then banned ones."""
    firsts = np.zeros(len(pieces) + 1) if firsts is None else firsts
    return b"".join(
        [
            filled(CONFIG, config),
            merges.astype("<u8").tobytes(),
            firsts.astype("<u4").tobytes(),
            characters.tobytes(),
            slots.astype("<i4").tobytes(),
            np.cumsum([0, *map(len, pieces)]).astype("<u4").tobytes(),
            specials.tobytes(),
            named.tobytes(),
            scores.tobytes(),
            *pieces,
            special_texts,
        ]
    )


def _check_longest(pieces: list[bytes]) -> None:
    if (longest := max(map(len, pieces))) > LONGEST_PIECE:
        raise UnsupportedError(f"a token of {longest} bytes cannot be exported (at most {LONGEST_PIECE})")


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
    return _hashed(chosen, pieces)


def _hashed(chosen: list[int], pieces: list[bytes]) -> tuple[AnyArray, int]:
    """A hash table of these tokens by their pieces, and its most probes."""
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
    rows = []
    for text, token, control in found:
        only_special = text.decode() not in tokenizer.literal_ids
        flags = IS_CONTROL * control + ONLY_SPECIAL * only_special + SWALLOWS * (token in tokenizer.swallowing)
        rows.append((text, flags, token))
    return _special_table(rows)


def _special_table(rows: list[tuple[bytes, int, int]]) -> tuple[AnyArray, AnyArray, bytes]:
    """Of texts, flags and tokens, ascending by texts: SPECIAL [n], the first of each first byte, and the texts."""
    starts = np.cumsum([0, *(len(text) for text, _, _ in rows)])
    table = [(start, len(text), flags, token) for start, (text, flags, token) in zip(starts, rows, strict=False)]
    firsts = np.searchsorted([text[0] for text, _, _ in rows], np.arange(257))
    return np.array(table, SPECIAL), firsts, b"".join(text for text, _, _ in rows)


def _fnv1a(data: bytes) -> int:
    value = 2166136261
    for byte in data:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def _bytes_of(word: str) -> bytes | None:
    """The bytes of a word in GPT-2's characters for bytes; None if it has others."""
    return bytes(BYTE_OF_CHAR[char] for char in word) if BYTE_OF_CHAR.keys() >= set(word) else None
