"""The C runtime's tokenizers: the ids and texts of edge.model.tokens."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, examples, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_library import CHECKED, build, said_by
from runtime_tokens import SOURCES, CTokenizer, cut_words
from test_gguf_file import BOOL, GGUF, STRING, U32
from test_pre_tokenizers import PRE_TOKENIZERS, RULES, SEPARATING, gemma4, mixed_texts
from test_tokenizer import CONTROL, MANUAL, NORMAL, SPM, TEXTS, TORTURE, USER_DEFINED, with_tokens

from edge.apps.sections.vocabulary import tokenizer_sections
from edge.apps.sections.words import words_section
from edge.converters.huggingface.reader import convert_folder
from edge.errors import UnsupportedError
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import fields_of, planned_as, write_gguf
from edge.model.names.catalog import find_model
from edge.model.tokens.pre_tokenizers import PUBLISHED as PUBLISHED_RULES
from edge.model.tokens.pre_tokenizers import PreTokenizer
from edge.model.tokens.tokenizer import NORMALIZER, SPACES, Tokenizer, TokenizerLike
from edge.model.tokens.unigram import Unigram
from edge.model.tokens.word_piece import WordPiece

MODELS = ("smollm2-135m", str(SPM))  # bytes, SentencePiece; of Gemma's 262,144 tokens make test-all
EACH = pytest.mark.parametrize("model", [*MODELS, exhaustive("gemma3-270m")])


@lru_cache
def both(model: str) -> tuple[Tokenizer, CTokenizer]:
    tokenizer = Tokenizer(read_gguf(find_model(model)))
    return tokenizer, CTokenizer(tokenizer)


def differ(python: Tokenizer, c: CTokenizer, text: str, special: bool, start: bool) -> bool:
    """Whether ids, or what they say, differ."""
    ids = python.encode(text, special=special, start=start).tolist()
    return c.encode(text, special, start) != ids or c.decode(ids) != python.decode(ids)


def check(python: Tokenizer, c: CTokenizer, texts: list[str]) -> None:
    for special, start in ((False, True), (True, True), (False, False)):
        assert [text for text in texts if differ(python, c, text, special, start)] == []


@EACH
def test_ids_and_texts_of_models_are_those_of_python(model: str) -> None:
    check(*both(model), TEXTS + SEPARATING + mixed_texts(3, examples(100)))


@EACH
def test_kinds_and_pieces_of_tokens_are_those_of_python(model: str) -> None:
    python, c = both(model)
    bos = python.bos_id if python.add_bos else -1
    assert c.about() == (bos, sorted(python.end_ids), sorted(python.suppressed))
    for token in range(0, python.size, 1 if python.size < 1000 else 97):
        assert c.decode([token]) == python.decode([token])
    assert c.decode([-1, python.size, 1 << 30]) == ""


@settings(max_examples=examples(30), deadline=None)
@given(text=TORTURE)
def test_any_text_has_the_ids_of_python(text: str) -> None:
    for model in MODELS:
        check(*both(model), [text])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from([*range(0x100), 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0x80, 0x9F, 0xA0, 0xBF]), max_size=30))
def test_bytes_that_are_no_text_are_replaced(data: list[int]) -> None:
    python, c = both(str(SPM))
    text = bytes(data).decode(errors="replace")
    assert c.encode(bytes(data)) == python.encode(text).tolist()
    byte_tokens = [python.vocabulary.find(f"<0x{byte:02X}>") for byte in data]
    assert c.decode([token for token in byte_tokens if token is not None]) == text


# Words


def words_of(rule: PreTokenizer, text: str) -> list[int]:
    """Lengths of the words that the `tokenizers` library cuts, which have a character for each byte."""
    return [len(word) for word, _ in rule.build().pre_tokenize_str(text)]


def rule_texts(count: int) -> list[str]:
    return TEXTS + SEPARATING + mixed_texts(6, count) + mixed_texts(7, count // 10, 300)


FEW = ("default", "jais-2", "kimi-k2", "deepseek-v3", "youtu", "viking")  # in which everything occurs
RULES_BY_NAME = {name: PRE_TOKENIZERS[name] for name in RULES.values()}
RULES_BY_NAME |= {f"published {name}": rule for name, rule in PUBLISHED_RULES.items()}


@pytest.mark.parametrize("name", [name if name in FEW else exhaustive(name) for name in RULES_BY_NAME])
def test_words_of_every_rule_are_cut_as_by_tokenizers(name: str) -> None:
    rule = RULES_BY_NAME[name]
    section = words_section(rule)
    assert [text for text in rule_texts(examples(60)) if cut_words(section, text) != words_of(rule, text)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bloom", "default", "deepseek-v3", "kimi-k2", "qwen35"])  # which name all properties
def test_words_with_every_character_are_cut_as_by_tokenizers(name: str) -> None:
    rule = PRE_TOKENIZERS[name]
    section = words_section(rule)
    points = [*range(0xD800), *range(0xE000, 0x34000), *range(0xDFF00, 0xE0200), 0xF0000, 0x10FFFF]
    for start in range(0, len(points), 1 << 14):
        chars = map(chr, points[start : start + (1 << 14)])
        text = " ".join(f"a{char}b {char} '{char}1{char}{char}\n" for char in chars)
        assert cut_words(section, text) == words_of(rule, text)


@pytest.mark.parametrize(
    "pattern",
    ["a*", "(?=a)b", "a+?", "a++", r"\w+", "a|", "(a", "[a", "^a", r"(?i:ß)", r"a(?!bc)", r"\b", "(?!a)", "a{2"],
)
def test_expressions_that_cannot_be_tables_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be exported"):
        words_section(PreTokenizer((pattern,)))


# Settings of files


def edited(base: GGUF, **fields: Any) -> GGUF:
    return GGUF(base.metadata | fields, base.tensors)


def spm_with(**settings: Any) -> GGUF:
    return edited(GGUF.read(SPM), **settings)


FILES: dict[str, Callable[[], GGUF]] = {
    "no space before a prompt": lambda: spm_with(**{"tokenizer.ggml.add_space_prefix": (BOOL, False)}),
    "a space at first": lambda: spm_with(**{SPACES: (STRING, "first")}),
    "a space always": lambda: spm_with(**{SPACES: (STRING, "always")}),
    "spaces after control tokens": lambda: edited(
        with_tokens({271: "<|user|>"}, SPM, CONTROL), **{"general.name": (STRING, "Phi-3")}
    ),
    "unknown characters": lambda: edited(
        with_tokens({3 + 0xF0: "xyz", 3 + 0xE4: "zyx"}, SPM, NORMAL), **{"tokenizer.ggml.unknown_token_id": (U32, 0)}
    ),
    "user-defined tokens": lambda: with_tokens(
        dict(enumerate(["[X]", "[X]b", "<|user|>", "[INST]", "\n\n", "dé"], 266)), kind=USER_DEFINED
    ),
    "whole words": lambda: edited(
        with_tokens({270: "Ġhello", 271: "hello"}), **{"tokenizer.ggml.pre": (STRING, "llama-bpe")}
    ),
    "Gemma 4": gemma4,
    "composed characters": lambda: edited(GGUF.read(), **{NORMALIZER: (STRING, "NFC")}),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_settings_of_files_change_ids_as_in_python(tmp_path: Path, name: str) -> None:
    python = Tokenizer(read_gguf(FILES[name]().write(tmp_path / "m.gguf")))
    marks = "<|user|> \n hi<|user|>\u2581x</s> y</s></s>[X]b[X]a[INST]\n\n\n\u4f60\u597d👍👍 x dé hello the hello"
    check(python, CTokenizer(python), [marks, *TEXTS, *SEPARATING, " x", "\u2581x", "\n" * 40])


def test_token_of_more_bytes_than_a_buffer_is_refused(tmp_path: Path) -> None:
    for text, refused in (("x" * 1024, False), ("é" * 513, True)):
        python = Tokenizer(read_gguf(with_tokens({270: text}, SPM, NORMAL).write(tmp_path / f"{len(text)}.gguf")))
        with pytest.raises(UnsupportedError, match="of 1026 bytes cannot") if refused else nullcontext():
            tokenizer_sections(python)


# Long texts


@EACH
def test_long_text_in_blocks_has_the_ids_of_python(model: str) -> None:
    """Blocks with and without places to cut. Without any, time is linear: quadratic code would take hours."""
    python, c = both(model)
    for text in (MANUAL[:20_000], "\u4f60" * 9_000 + "a b" + MANUAL[:9_000], "ab" * 35_000 + " b c"):
        assert c.encode(text) == python.encode(text).tolist()
    for char in ("a", " ", "\n", "👍"):
        assert c.encode(char * 1_000_000)


def test_merges_take_no_memory_once_a_text_is_encoded(tmp_path: Path) -> None:
    python, _ = both("smollm2-135m")
    c = CTokenizer(python, tmp_path / "tokens")
    for text in (MANUAL[:5_000], MANUAL[5_000:6_000]):
        assert c.encode(text) == python.encode(text).tolist()
    maps = Path("/proc/self/smaps")
    if maps.exists():
        own = maps.read_text().partition(str(tmp_path / "tokens"))[2]
        resident = int(own.partition("Rss:")[2].split()[0]) << 10
        assert resident <= len(c.sections[0]) - 8 * len(python.vocabulary.merges())


# Damaged tables


def fuzz(tmp_path: Path, tokenizer: TokenizerLike, seed: int, mutants: int) -> int:
    """The number of mutants that could be opened; fails where sanitizers find anything."""
    program = build(("tokens_fuzz.c", *SOURCES), CHECKED)
    text = " ".join([*SEPARATING, "\ufffd<|im_end|>[X]</s>\n\n\n", "xy" * 40]).encode() + b"\xff\xed\xa0\x80"
    names = ("tokens", "words", "letters", "text")
    for name, data in zip(names, (*tokenizer_sections(tokenizer), text), strict=True):
        (tmp_path / name).write_bytes(data)
    return int(said_by(program, *(tmp_path / name for name in names), seed, mutants))


@pytest.mark.parametrize("name", ["whole words", "user-defined tokens", "composed characters", "Gemma 4"])
def test_damaged_tables_do_no_harm(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(read_gguf(FILES[name]().write(tmp_path / "m.gguf")))
    mutants = examples(100)
    assert mutants // 10 < fuzz(tmp_path, tokenizer, 1, mutants) < mutants


# Tokenizers with normalizers: WordPiece, unigrams, and byte pairs behind NFC

ENCODERS = ("bert", "bert-cased", "xlm-roberta", "composed")
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
def encoder(name: str) -> tuple[TokenizerLike, CTokenizer]:
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


def check_encoder(name: str, texts: list[str]) -> None:
    python, c = encoder(name)
    for special in (False, True):
        different = [text for text in texts if c.encode(text, special) != python.encode(text, special=special).tolist()]
        assert different == []


@pytest.mark.parametrize("name", ENCODERS)
def test_ids_of_encoders_are_those_of_libraries(name: str) -> None:
    rnd = random.Random(5)
    odd = ["".join(rnd.choices(ODD, k=rnd.randint(1, 9))) for _ in range(examples(150))]
    long = ["x" * 100, "x" * 101, "ab" * 40000, "The sky is blue. " * 1500, "\u4f60\u597d" * 9000]
    check_encoder(name, TEXTS + SEPARATING + odd + long + mixed_texts(6, examples(80)))


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
    for name in ENCODERS:
        check_encoder(name, [text])


@pytest.mark.parametrize("name", ["bert", exhaustive("xlm-roberta")])
def test_damaged_tables_of_encoders_do_no_harm(tmp_path: Path, name: str) -> None:
    mutants = examples(40)
    assert mutants // 10 < fuzz(tmp_path, encoder(name)[0], 1, mutants) < mutants
