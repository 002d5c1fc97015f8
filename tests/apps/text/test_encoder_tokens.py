"""The C runtime's tokenizers with normalizers: the ids of WordPiece, of unigrams, and of byte pairs behind NFC."""

from __future__ import annotations

import random
import unicodedata
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from conftest import GOLDEN, examples, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_tokens import CTokenizer
from test_gguf_file import GGUF, STRING
from test_pre_tokenizers import SEPARATING
from test_runtime_tokens import edited, fuzz, random_text
from test_tokenizer import TEXTS, TORTURE

from edge.converters.huggingface.reader import convert_folder
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import fields_of, planned_as, write_gguf
from edge.model.tokens.tokenizer import NORMALIZER, Tokenizer, TokenizerLike
from edge.model.tokens.unigram import Unigram
from edge.model.tokens.word_piece import WordPiece

NAMES = ("bert", "bert-cased", "xlm-roberta", "composed")
# Characters that join others to graphemes, that are mapped, dropped, or decomposed.
ODD = [
    *"\u0301\u0302\u200d\u0600\ufe0f\u0903\u0d4e\u20d0\u00ad\u200b",
    *"\u1100\u1161\u11a8\uac00\uac01\uffa1\u00a9\u2122",
    *"\u2764\u00aa\ufb01\uff21\u0130\u1e9e\u037e\u3000\u00a0\u2581#[]\ufdfa\u0958\u4e00\uf900\x00\x85 aB", "\U0001f600",
    "\U0001d165", "\U000e0020", "[SEP]", "##",
    *"e\u0323\u0307s\u1e69\u0344\u0345\u1f82\u212b\u0915\u093c\u302e\u1b44\u0dd9\u0dca\u0dcf\u1175\u11c2\u0340",
]  # fmt: skip


def double_array(replaced: dict[str, str]) -> bytes:
    """A table of characters as SentencePiece stores it: the size of a trie in Darts' form, the trie, the texts."""
    keys = {key.encode(): value.encode() for key, value in replaced.items()}
    text, starts = b"", dict[bytes, int]()
    for key, value in keys.items():
        starts[key] = len(text)
        text += value + b"\0"
    units, taken, waiting, bases = {0: 0}, {0}, [(0, b"")], set[int]()
    for place, begin in waiting:  # grows in the loop
        labels = {key[len(begin)] if len(key) > len(begin) else 0 for key in keys if key.startswith(begin)}
        used = bases | taken
        base = next(each for each in range(1, 1 << 20) if not used & {each, *(each ^ one for one in labels)})
        bases.add(base)
        units[place] |= (place ^ base) << 10 | (0 in labels) << 8
        for label in labels:
            taken.add(base ^ label)
            units[base ^ label] = label if label else 1 << 31 | starts[begin]
            if label:
                waiting.append((base ^ label, begin + bytes([label])))
    trie = np.zeros(max(units) + 1, "<u4")
    trie[list(units)] = list(units.values())
    return np.uint32(trie.nbytes).tobytes() + trie.tobytes() + text


@lru_cache
def both(name: str) -> tuple[TokenizerLike, CTokenizer]:
    """XLM-R's with a table of many characters, most of them NFKC's."""
    if name == "composed":
        path = edited(GGUF.read(), **{NORMALIZER: (STRING, "NFC")}).write(Path(mkdtemp()) / "model.gguf")
        composing = Tokenizer(read_gguf(path))
        return composing, CTokenizer(composing)
    if name != "xlm-roberta":
        tokenizer: TokenizerLike = WordPiece(read_gguf(GOLDEN / "encoders" / f"{name}.gguf"))
        return tokenizer, CTokenizer(tokenizer)
    path = Path(mkdtemp()) / "model.gguf"
    convert_folder(GOLDEN / "embedders" / name, path)
    file = read_gguf(path)
    points = [*range(0xA0, 0x180), *range(0x2100, 0x2130), *range(0xFF01, 0xFF80)]
    points += map(ord, "\ufb01\ufdfa\u0958\uffa1")
    table = {chr(point): unicodedata.normalize("NFKC", chr(point)) for point in points}
    table = {key: value for key, value in table.items() if key != value}
    table |= {"\u00a9": "(c)", "A": "a", "\u200b": " ", "\ufe0f": "", "\x01": "", "x\u0302": "X", "\u00ad": ""}
    table |= {"\u0600": "p"}
    fields = fields_of(file) | {"tokenizer.ggml.precompiled_charsmap": np.frombuffer(double_array(table), np.uint8)}
    data = (file.tensor_bytes(each) for each in file.tensors.values())
    write_gguf(path.with_name("mapped.gguf"), fields, planned_as(file.tensors.values()), data)
    tokenizer = Unigram(read_gguf(path.with_name("mapped.gguf")))
    assert tokenizer.normalizer.normalize_str("\uff21\u0301 \u00a9") == "A (c)"  # a grapheme of 5 bytes as a whole
    return tokenizer, CTokenizer(tokenizer)


def check(name: str, texts: list[str]) -> None:
    python, c = both(name)
    for special in (False, True):
        different = [text for text in texts if c.encode(text, special) != python.encode(text, special=special).tolist()]
        assert different == []


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_encoders_are_those_of_libraries(name: str) -> None:
    rnd = random.Random(5)
    odd = ["".join(rnd.choices(ODD, k=rnd.randint(1, 9))) for _ in range(examples(150))]
    long = ["x" * 100, "x" * 101, "ab" * 40000, "The sky is blue. " * 1500, "\u4f60\u597d" * 9000]
    check(name, TEXTS + SEPARATING + odd + long + [random_text(rnd) for _ in range(examples(80))])


def test_piece_of_a_blank_is_found(tmp_path: Path) -> None:
    base = GGUF.read(GOLDEN / "encoders" / "bert.gguf")
    kind, (of, texts) = base.metadata["tokenizer.ggml.tokens"]
    texts = [{"\u2581x": " "}.get(each, each) for each in texts]  # no piece begins with an x
    path = edited(base, **{"tokenizer.ggml.tokens": (kind, (of, texts))}).write(tmp_path / "m.gguf")
    python = WordPiece(read_gguf(path))
    c = CTokenizer(python)
    for text in ("x", "x" * 99, "x" * 100, "a x"):
        assert c.encode(text) == python.encode(text).tolist()


@settings(max_examples=examples(60), deadline=None)
@given(text=st.one_of(TORTURE, st.lists(st.sampled_from(ODD), max_size=12).map("".join), st.text()))
def test_any_text_of_encoders_has_the_ids_of_libraries(text: str) -> None:
    for name in NAMES:
        check(name, [text])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_every_character_has_the_ids_of_libraries(name: str) -> None:
    points = [each for each in range(0x110000) if not 0xD800 <= each < 0xE000]
    texts = [" ".join(f"a{chr(each)}b" for each in points[at : at + 64]) for at in range(0, len(points), 64)]
    check(name, texts)


@pytest.mark.parametrize("name", ["bert", exhaustive("xlm-roberta")])
def test_damaged_tables_of_encoders_do_no_harm(tmp_path: Path, name: str) -> None:
    mutants = examples(40)
    assert mutants // 10 < fuzz(tmp_path, both(name)[0], 1, mutants) < mutants
