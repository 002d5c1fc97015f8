"""Tokenizers: the ids of llama.cpp and SentencePiece, text in parts and at any length, and vocabularies refused."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf_file import ARRAY, BOOL, F32, GGUF, GOLDEN, I32, STRING, U32, Value

from edge.backends.llamacpp.library import is_installed, library
from edge.errors import EdgeError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.model import make_tokenizer, open_model
from edge.model.names.catalog import find_model
from edge.model.parts.text import well_formed
from edge.model.tokens.tokenizer import BLOCK, Tokenizer
from edge.model.tokens.word_piece import WordPiece, to_stored

CASES: list[dict[str, Any]] = json.loads((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"))
TEXTS = [case["text"] for case in CASES]
MANUAL = "\n".join(text for _, text in sorted(topics.items()))
SPM = GOLDEN / "spm.gguf"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# Texts that tokenizers disagree on: fragments of the torture texts between characters of every kind.
PIECES = st.one_of(
    st.text(max_size=5),
    st.text("abzAZ019 \n\t'.,-_<|>", max_size=8),
    st.sampled_from([piece for text in TEXTS for piece in text.split(" ") if len(piece) < 30]),
    st.sampled_from([" ", "  ", "\n\n", " \n", "'s", "'LL", "<|im_end|>", "\u2581", "\u0301", "\u200d", "\ufe0f"]),
)
TORTURE = st.lists(PIECES, max_size=12).map("".join)


@lru_cache
def smollm2() -> Tokenizer:
    return Tokenizer(read_gguf(find_model("smollm2-135m")))


@lru_cache
def spm() -> Tokenizer:
    return Tokenizer(read_gguf(SPM))


@lru_cache
def lost_bytes() -> frozenset[int]:
    """Bytes that SmolLM2 has no token for: 0x06, and some that are rare in UTF-8."""
    pieces = {smollm2().piece(token) for token in range(smollm2().size)}
    return frozenset(byte for byte in range(256) if bytes([byte]) not in pieces)


def known_to_smollm2(text: str) -> str:
    return "".join(char for char in text if lost_bytes().isdisjoint(char.encode()))


def ids(tokenizer: Tokenizer, text: str, **options: bool) -> list[int]:
    result = tokenizer.encode(text, **options)
    assert result.dtype == np.int32
    return result.tolist()


# The ids


@settings(max_examples=examples(60), deadline=None)
@given(text=TORTURE, special=st.booleans())
def test_ids_match_llama_cpp(llama_cpp_smollm2: LlamaCpp, llama_cpp_spm: LlamaCpp, text: str, special: bool) -> None:
    text = known_to_smollm2(text).replace("\0", "")  # where C strings end
    assert ids(smollm2(), text, special=special) == llama_cpp_smollm2(text, special)
    assert ids(spm(), text, special=special) == llama_cpp_spm(text, special)
    assert smollm2().decode(smollm2().encode(text)) == text
    for tokenizer in (smollm2(), spm()):
        assert tokenizer._control.isdisjoint(ids(tokenizer, text))


class LlamaCpp:
    """llama.cpp's own tokenizer."""

    def __init__(self, path: Path) -> None:
        if not is_installed():
            pytest.skip("needs llama-cpp-python")
        self._lib = library()
        parameters = self._lib.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model
        self._vocabulary = self._lib.llama_model_get_vocab(self._model)

    def __call__(self, text: str, special: bool) -> list[int]:
        data = text.encode()
        buffer = (ctypes.c_int32 * (len(data) + 8))()
        count = self._lib.llama_tokenize(self._vocabulary, data, len(data), buffer, len(buffer), False, special)
        return list(buffer[:count])

    def adds_bos(self) -> bool:
        return bool(self._lib.llama_vocab_get_add_bos(self._vocabulary))

    def ends(self, size: int) -> set[int]:
        return {token for token in range(size) if self._lib.llama_vocab_is_eog(self._vocabulary, token)}

    def close(self) -> None:
        self._lib.llama_model_free(self._model)


@pytest.fixture(scope="module")
def llama_cpp_smollm2() -> Iterator[LlamaCpp]:
    tokenize = LlamaCpp(find_model("smollm2-135m"))
    yield tokenize
    tokenize.close()


@pytest.fixture(scope="module")
def llama_cpp_spm() -> Iterator[LlamaCpp]:
    tokenize = LlamaCpp(SPM)
    yield tokenize
    tokenize.close()


@pytest.mark.parametrize("text", ["</s>", "<s>", "one</s> two", "<|im_end|></s><unk>"])
def test_control_tokens_in_prompts_are_text_unless_raw(llama_cpp_spm: LlamaCpp, text: str) -> None:
    """Also for a model without a chat template, whose prompts are a user's words and nothing else."""
    model = open_model(SPM)
    assert model.template is None
    plain, special = ([1, *llama_cpp_spm(text, special)] for special in (False, True))
    assert model.encode_prompt(text).tolist() == model.encode_text(text).tolist() == plain
    raw = model.encode_prompt(text, raw=True).tolist()
    assert raw == (special[1:] if text.startswith("<s>") else special)  # BOS comes once
    assert spm()._control.isdisjoint(plain[1:])
    assert len(plain) > len(raw)


# Parts and lengths


@settings(max_examples=examples(40), deadline=None)
@given(parts=st.lists(PIECES, max_size=15))
def test_text_in_parts_and_blocks(parts: list[str]) -> None:
    whole = [ids(each, "".join(parts)) for each in (smollm2(), spm())]
    for block in (10, BLOCK):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("edge.model.tokens.tokenizer.BLOCK", block)
            assert [each.encode(iter(parts)).tolist() for each in (smollm2(), spm())] == whole


# Tokens


def test_pieces_join_to_the_text() -> None:
    tokenizer, text = smollm2(), "na\u00efve \U0001f600"
    assert tokenizer.piece(1) == tokenizer.piece(2) == b""  # control tokens show nothing
    assert tokenizer.text(1) == "<|im_start|>"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert {tokenizer.text(token) for token in tokenizer.end_ids} == {"<|im_end|>", "<|endoftext|>", "<reponame>"}
    assert b"".join(tokenizer.piece(token) for token in ids(tokenizer, text)) == text.encode()
    assert tokenizer.decode(ids(tokenizer, "\U0001f600")[:1]) == "\ufffd"
    for token in (-1, tokenizer.size):
        with pytest.raises((IndexError, OverflowError)):
            tokenizer.text(token)
    assert [spm().piece(token) for token in (0, 1, 2)] == [b""] * 3
    assert sorted(spm().piece(token) for token in range(3, 259)) == sorted(bytes([byte]) for byte in range(256))
    assert (spm().bos_id, spm().eos_id, spm().add_bos) == (1, 2, True)


def test_stream_decoder_waits_for_whole_characters() -> None:
    tokenizer = smollm2()
    text = "ok \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3fd\u0e2a\u6f22 end"
    tokens = ids(tokenizer, text)
    decoder = tokenizer.stream_decoder()
    shown = [decoder.decode(tokenizer.piece(token)) for token in tokens]
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert shown.count("") > 5  # these emoji take several tokens each
    assert decoder.decode(b"\xf0\x9f") == ""
    assert decoder.decode(b"", final=True) == "\ufffd"


# Vocabularies


def opened(file: GGUF, path: Path) -> Tokenizer:
    return Tokenizer(read_gguf(file.write(path)))


def with_tokens(
    changes: dict[int, str | bytes], base: Path = GOLDEN / "llama-gqa-tied.gguf", kind: int | None = None
) -> GGUF:
    """A golden file with other texts, and another type, for some tokens; merges that name the old texts go."""
    file = GGUF.read(base)
    tokens, types = (list(file.metadata[f"tokenizer.ggml.{name}"][1][1]) for name in ("tokens", "token_type"))
    gone = {tokens[index] for index in changes}
    for index, text in changes.items():
        tokens[index] = text
        types[index] = kind or types[index]
    file.metadata["tokenizer.ggml.tokens"] = (ARRAY, (STRING, tokens))
    file.metadata["tokenizer.ggml.token_type"] = (ARRAY, (I32, types))
    if merges := file.metadata.get("tokenizer.ggml.merges"):
        kept = [line for line in merges[1][1] if not gone & {*line.split(" "), line.replace(" ", "")}]
        file.metadata["tokenizer.ggml.merges"] = (ARRAY, (STRING, kept))
    return file


def test_user_defined_tokens_match_but_marks_do_not(tmp_path: Path) -> None:
    marks = ["<|user|>", "<end_of_turn>", "[INST]", "<|im_x|>"]
    tokenizer = opened(with_tokens(dict(enumerate(["[X]", *marks], 267)), kind=USER_DEFINED), tmp_path / "m.gguf")
    assert ids(tokenizer, "a[X]b")[1] == 267
    for index, mark in enumerate(marks, 268):
        assert index not in ids(tokenizer, f"a{mark}b")
        assert ids(tokenizer, f"a{mark}b", special=True)[1] == index
        assert tokenizer.decode(ids(tokenizer, f"a{mark}b")) == f"a{mark}b"
    assert 269 in tokenizer.end_ids
    assert (tokenizer.piece(267), tokenizer.piece(269), tokenizer.piece(270)) == (b"[X]", b"", b"[INST]")


def test_stated_end_of_turn_joins_known_ends(tmp_path: Path) -> None:
    """By its text, see test_pre_tokenizers.py."""
    file = changed("eot_token_id", (U32, 100))
    file.metadata["tokenizer.ggml.eom_token_id"] = (U32, 0xFFFFFFFF)  # none
    assert opened(file, tmp_path / "m.gguf").end_ids == {0, 2, 100}


def test_prompts_that_start_with_bos(tmp_path: Path) -> None:
    for pre, stated, adds in (
        ("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", True, True)
    ):  # fmt: skip
        file = changed("add_bos_token", None if stated is None else (BOOL, stated))
        file.metadata["tokenizer.ggml.pre"] = (STRING, pre)
        assert opened(file, tmp_path / "m.gguf").add_bos == adds
        del file.metadata["tokenizer.ggml.bos_token_id"]
        assert not opened(file, tmp_path / "m.gguf").add_bos


def test_text_is_never_merged_into_control_token(tmp_path: Path) -> None:
    """Its halves are tokens, and llama.cpp would put them together: the best score of all is a control token's 0."""
    file = with_tokens({700: "</", 701: "s>"}, SPM)
    tokenizer = opened(file, tmp_path / "m.gguf")
    assert tokenizer.text(2) == "</s>"
    assert ids(tokenizer, "a</s>", start=False)[-2:] == [700, 701]
    assert ids(tokenizer, "a</s>", start=False, special=True)[-1] == 2

    file = with_tokens({271: "it"})
    file.metadata["tokenizer.ggml.merges"] = (ARRAY, (STRING, ["i t", "i n"]))
    assert 271 in ids(opened(file, tmp_path / "m.gguf"), "it")
    file = with_tokens({271: "it"}, kind=CONTROL)
    file.metadata["tokenizer.ggml.merges"] = (ARRAY, (STRING, ["i t", "i n"]))
    tokenizer = opened(file, tmp_path / "m.gguf")
    assert tokenizer.decode(ids(tokenizer, "it")) == "it"
    assert ids(tokenizer, "it", special=True) == [271]


def test_empty_suppressed_and_swallowing_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tokenizer = opened(with_tokens({270: "", 271: "\0x"}), path)
    assert (tokenizer.text(270), tokenizer.text(271)) == ("[EMPTY_270]", "[EMPTY_271]")
    assert opened(GGUF.read(), path).suppressed == frozenset()
    assert opened(changed("suppress_tokens", (ARRAY, (I32, [5, 7, -1, 272, 7]))), path).suppressed == {5, 7}
    file = with_tokens({271: "<|user|>"}, kind=CONTROL)
    for name, decoded in (("x", "\n hi x"), ("Phi 3 is Phi-3-mini", "hi x")):  # which swallow the space after them
        file.metadata["general.name"] = (STRING, name)
        tokenizer = opened(file, path)
        assert tokenizer.decode(ids(tokenizer, "<|user|>\n hi<|endoftext|> x", special=True)) == decoded


def changed(key: str, value: Value | None, base: Path = GOLDEN / "llama-gqa-tied.gguf") -> GGUF:
    file = GGUF.read(base)
    file.metadata.pop(f"tokenizer.ggml.{key}", None)
    if value is not None:
        file.metadata[f"tokenizer.ggml.{key}"] = value
    return file


DAMAGED: dict[str, tuple[Callable[[], GGUF], str]] = {
    "no tokens": (lambda: changed("tokens", None), "tokenizer.ggml.tokens is missing"),
    "too few tokens": (lambda: changed("tokens", (ARRAY, (STRING, ["a", "b"]))), "2 tokens, but another number"),
    "a long token": (lambda: with_tokens({100: "x" * 1025}), "more than 1024 characters"),
    "too few types": (lambda: changed("token_type", (ARRAY, (I32, [1]))), "1 token types for 272 tokens"),
    "a byte token of another form": (lambda: with_tokens({100: "x\ny"}, kind=6), r"byte token 'x\ny' is not"),
    "no merges": (lambda: changed("merges", None), "tokenizer.ggml.merges is missing"),
    "an unknown merge": (lambda: changed("merges", (ARRAY, (STRING, ["a Z\n"]))), "names tokens that are not in"),
    "an end outside": (lambda: changed("eos_token_id", (U32, 272)), "eos_token_id is 272, outside"),
    "a start that is a text": (lambda: changed("bos_token_id", (STRING, "x\n")), r"bos_token_id is 'x\n', outside"),
    "suppressed fractions": (lambda: changed("suppress_tokens", (ARRAY, (F32, [1.0]))), "is not a list of tokens"),
    "no scores": (lambda: changed("scores", None, SPM), "tokenizer.ggml.scores is missing"),
    "scores that are no numbers": (lambda: changed("scores", (ARRAY, (F32, [math.nan] * 800)), SPM), "or no numbers"),
    "tokens of each other": (lambda: with_tokens({i: "\u0e01" * (i - 299) for i in range(300, 600)}, SPM), "too many"),
}  # fmt: skip

UNSUPPORTED: dict[str, tuple[Callable[[], GGUF], str]] = {
    "no tokenizer": (lambda: changed("model", None), "tokenizer null is not supported"),
    "another tokenizer": (lambda: changed("model", (STRING, "rwkv")), "tokenizer 'rwkv' is not supported"),
    "a tokenizer of two lines": (lambda: changed("model", (STRING, "a\nb" * 9999)), r"tokenizer 'a\nb"),
    "another pre-tokenizer": (lambda: changed("pre", (STRING, "gpt2")), "pre-tokenizer 'gpt2' is not supported"),
}


@pytest.mark.parametrize(
    ("base", "first", "second"),
    [("llama-gqa-tied", 260, 271), ("llama-gqa-tied", 3, 74), ("spm", 269, 601), ("encoders/bert", 366, 479),
     ("llama-gqa-tied", 1, 2)],
)  # fmt: skip
def test_equal_tokens_encode_to_the_first(tmp_path: Path, base: str, first: int, second: int) -> None:
    """Encoding finds the first, merges stay, and both decode. The copy replaces a later token, or an earlier one."""
    path = GOLDEN / f"{base}.gguf"
    before = make_tokenizer(read_gguf(path))
    kept, replaced = (second, first) if first == 3 else (first, second)
    text, stored = before.text(kept), GGUF.read(path).metadata["tokenizer.ggml.tokens"][1][1][kept]
    twice = make_tokenizer(read_gguf(with_tokens({replaced: stored}, path).write(tmp_path / "twice.gguf")))
    assert twice.text(first) == twice.text(second) == text
    assert twice.piece(first) == twice.piece(second) == before.piece(kept)
    said = before.decode([kept]).strip() or text
    expected = [first if each == kept else each for each in before.encode(said, special=True).tolist()]
    assert twice.encode(said, special=True).tolist() == expected
    assert first in expected


@pytest.mark.parametrize(("refused", "error"), [(DAMAGED, ModelFormatError), (UNSUPPORTED, UnsupportedError)])
def test_damaged_vocabularies_are_refused(
    tmp_path: Path, refused: dict[str, tuple[Callable[[], GGUF], str]], error: type[EdgeError]
) -> None:
    path = tmp_path / "m.gguf"
    for make, expected in refused.values():
        with pytest.raises(error) as caught:
            opened(make(), path)
        message = str(caught.value)
        assert expected in message
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        assert len(message) < len(str(path)) + 400


def test_lone_surrogates_are_replaced() -> None:
    for text, better in (
        ("añ€😀", "añ€😀"), ("a\udcffb", "a�b"), ("\ud83d\ude00 \ud800", "😀 �"),
        ("\udcc3\udca9", "é"),  # what Python makes of an argument in a locale without UTF-8
    ):  # fmt: skip
        assert well_formed(text) == better
        assert smollm2().encode(text).tolist() == smollm2().encode(better).tolist()


def test_word_pieces_are_read_as_llama_cpp_stores_them() -> None:
    """Their ids are compared in test_hf_encoders.py."""
    tokenizer = WordPiece(read_gguf(GOLDEN / "encoders" / "bert.gguf"))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 3)
    assert tokenizer.encode("a [SEP] b", special=True).tolist().count(3) == 1
    assert 3 not in tokenizer.encode("a [SEP] b")  # a text of users holds no control tokens
    assert tokenizer.decode(tokenizer.encode("The ský is blue")) == "the sky is blue"
    cased = WordPiece(read_gguf(GOLDEN / "encoders" / "bert-cased.gguf"))  # as its vocabulary has capitals
    assert cased.decode(cased.encode("The é is blue")) == "The é is blue"
    for token in range(tokenizer.size):
        text = tokenizer.text(token)
        stored = to_stored(text)
        assert stored == text if text.startswith("[") and len(text) > 1 else stored in (f"▁{text}", text[2:])
