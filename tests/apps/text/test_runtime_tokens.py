"""The C runtime's tokenizer: the ids and texts of edge.model.tokens.tokenizer."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from conftest import examples, exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_library import CHECKED, build
from runtime_tokens import SOURCES, CTokenizer, cut_words
from test_gguf_file import BOOL, GGUF, STRING, U32
from test_pre_tokenizers import PRE_TOKENIZERS, RULES, SEPARATING, gemma4, mixed_texts
from test_tokenizer import CONTROL, MANUAL, NORMAL, SPM, TEXTS, TORTURE, USER_DEFINED, with_tokens

from edge.apps.sections.vocabulary import tokenizer_sections
from edge.apps.sections.words import words_section
from edge.errors import UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.names.catalog import find_model
from edge.model.tokens.pre_tokenizers import PUBLISHED as PUBLISHED_RULES
from edge.model.tokens.pre_tokenizers import PreTokenizer
from edge.model.tokens.tokenizer import NORMALIZER, SPACES, Tokenizer, TokenizerLike

MODELS = ("smollm2-135m", str(SPM))  # bytes, SentencePiece; of Gemma's 262,144 tokens make test-all
EACH = pytest.mark.parametrize("model", [*MODELS, exhaustive("gemma3-270m")])
MARKS = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "</s>", "<h1>", "\u2581\u2581")


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


def random_text(rnd: random.Random) -> str:
    """Words, marks, blanks, and characters from everywhere."""

    def piece() -> str:
        kind = rnd.random()
        if kind < 0.3:
            return "".join(
                chr(rnd.choice((rnd.randrange(0x80), rnd.randrange(0x3100)))) for _ in range(rnd.randint(1, 4))
            )
        if kind < 0.4:
            return chr(rnd.choice((rnd.randrange(0xD800), rnd.randrange(0xE000, 0x110000))))
        if kind < 0.5:
            return rnd.choice(" \n\t\r'\u3000") * rnd.choice((1, 1, 2, 3, 30))
        if kind < 0.55:
            return rnd.choice(MARKS)
        place = rnd.randrange(len(MANUAL) - 20)
        return rnd.choice((MANUAL[place : place + rnd.randint(1, 20)], rnd.choice(SEPARATING)[: rnd.randint(1, 30)]))

    return "".join(piece() for _ in range(rnd.randint(1, 8)))


@EACH
def test_ids_and_texts_of_models_are_those_of_python(model: str) -> None:
    rnd = random.Random(3)
    check(*both(model), TEXTS + SEPARATING + [random_text(rnd) for _ in range(examples(100))])


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
    rnd = random.Random(4)
    own = [random_text(rnd) for _ in range(count)]
    return TEXTS + SEPARATING + own + mixed_texts(6, count) + mixed_texts(7, count // 10, 300)


FEW = ("default", "jais-2", "kimi-k2", "deepseek-v3", "youtu", "viking")  # in which everything occurs


@pytest.mark.parametrize("name", [name if name in FEW else exhaustive(name) for name in RULES.values()])
def test_words_of_every_rule_are_cut_as_by_tokenizers(name: str) -> None:
    rule = PRE_TOKENIZERS[name]
    section = words_section(rule)
    assert [text for text in rule_texts(examples(60)) if cut_words(section, text) != words_of(rule, text)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PUBLISHED_RULES)
def test_words_of_published_rules_are_cut_as_by_tokenizers(name: str) -> None:
    rule = PUBLISHED_RULES[name]
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
    file = GGUF(dict(base.metadata), base.tensors)
    file.metadata.update(fields)
    return file


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
    """Blocks with and without places to cut."""
    python, c = both(model)
    for text in (MANUAL[:20_000], "\u4f60" * 9_000 + "a b" + MANUAL[:9_000], "ab" * 35_000 + " b c"):
        assert c.encode(text) == python.encode(text).tolist()


@EACH
@pytest.mark.parametrize("char", ["a", " ", "\n", "👍"])
def test_million_equal_characters_take_linear_time(model: str, char: str) -> None:
    """Linear code without recursion takes a few tenths of a second."""
    _, c = both(model)
    start = time.process_time()
    c.encode(char * 1_000_000)
    assert time.process_time() - start < 10


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
    program = build((SOURCES[0].with_name("tokens_fuzz.c"), *SOURCES), CHECKED)
    text = " ".join([*SEPARATING, "\ufffd<|im_end|>[X]</s>\n\n\n", "xy" * 40]).encode() + b"\xff\xed\xa0\x80"
    names = ("tokens", "words", "letters", "text")
    for name, data in zip(names, (*tokenizer_sections(tokenizer), text), strict=True):
        (tmp_path / name).write_bytes(data)
    command = [program, *(tmp_path / name for name in names), str(seed), str(mutants)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("name", ["whole words", "user-defined tokens", "composed characters", "Gemma 4"])
def test_damaged_tables_do_no_harm(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(read_gguf(FILES[name]().write(tmp_path / "m.gguf")))
    mutants = examples(100)
    assert mutants // 10 < fuzz(tmp_path, tokenizer, 1, mutants) < mutants


@pytest.mark.exhaustive
@EACH
def test_damaged_tables_of_models_do_no_harm(tmp_path: Path, model: str) -> None:
    assert fuzz(tmp_path, both(model)[0], 2, 5_000) > 500
