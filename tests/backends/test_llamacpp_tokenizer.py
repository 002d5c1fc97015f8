"""llama.cpp's own tokenizer, for vocabularies that edge does not know: the ids of ours where both know one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_gguf_file import ARRAY, GGUF, I32, STRING
from test_pre_tokenizers import SEPARATING, gemma4, mixed_texts, named
from test_tokenizer import MANUAL, SPM, TEXTS, LlamaCpp, ids, with_tokens

import edge.backends.llamacpp.tokenizer
from edge.backends.llamacpp.library import is_installed
from edge.backends.llamacpp.tokenizer import LlamaCppTokenizer
from edge.errors import EdgeError, MissingExtraError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.tokens.tokenizer import Tokenizer
from edge.run.starting.loading import load
from edge.run.starting.opening import find_tokenizer, open_model

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")

KNOWN: dict[str, Callable[[Path], Path]] = {
    "byte-level": lambda folder: named(folder, "qwen2"),
    "SentencePiece": lambda folder: SPM,
    "Gemma 4": lambda folder: gemma4().write(folder / "m.gguf"),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_tokens_equal_those_of_our_tokenizer(tmp_path: Path, kind: str) -> None:
    file = read_gguf(KNOWN[kind](tmp_path))
    ours, theirs = Tokenizer(file), LlamaCppTokenizer(file)
    for text in TEXTS + SEPARATING + mixed_texts(6, 100) + [MANUAL[:30_000]]:
        assert theirs.encode(text).tolist() == ids(ours, text)
        assert theirs.encode(text, special=True).tolist() == ids(ours, text, special=True)
        assert theirs.decode(theirs.encode(text)) == ours.decode(ours.encode(text))
    assert [theirs.piece(i) for i in range(ours.size)] == [ours.piece(i) for i in range(ours.size)]
    assert [theirs.text(i) for i in range(ours.size)] == [ours.text(i) for i in range(ours.size)]
    assert theirs.special_tokens() == ours.special_tokens()
    assert theirs.end_ids == ours.end_ids
    assert (theirs.size, theirs.bos_id, theirs.add_bos) == (ours.size, ours.bos_id, ours.add_bos)
    for outside in (-1, ours.size):
        with pytest.raises(IndexError):
            theirs.text(outside)


def unknown(pre: str = "superbpe") -> GGUF:
    """A golden model under a pre-tokenizer that is not ours."""
    file = GGUF.read()
    file.metadata["tokenizer.ggml.pre"] = (STRING, pre)
    return file


@pytest.mark.parametrize("pre", ["superbpe", "exaone-moe", "tiny_aya"])
def test_unknown_pre_tokenizers(tmp_path: Path, pre: str) -> None:
    path = named(tmp_path, pre)
    file = read_gguf(path)
    with pytest.raises(UnsupportedError, match=f"pre-tokenizer '{pre}' is not supported yet"):
        Tokenizer(file)
    ours, theirs = find_tokenizer(file), LlamaCpp(path)
    assert isinstance(ours, LlamaCppTokenizer)
    for text in TEXTS + SEPARATING + mixed_texts(7, 50):
        assert ours.encode(text).tolist() == theirs(text, special=False)
    theirs.close()


def test_one_long_word(tmp_path: Path) -> None:
    """llama.cpp's regular expressions would recurse over it, and end the process."""
    tokenizer = LlamaCppTokenizer(read_gguf(named(tmp_path, "exaone-moe")))
    for word in ("a" * 100_000, " " * 100_000, "\u4f60\u597d" * 50_000, "!" * 100_000):
        assert tokenizer.decode(tokenizer.encode(word)) == word


def test_second_start_tries_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = read_gguf(named(tmp_path, "superbpe"))
    first = LlamaCppTokenizer(file).encode("once more").tolist()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a child")

    monkeypatch.setattr(edge.backends.llamacpp.tokenizer, "run_child", fail)
    assert LlamaCppTokenizer(file).encode("once more").tolist() == first
    with pytest.raises(AssertionError, match="a child"):
        LlamaCppTokenizer(read_gguf(named(tmp_path, "viking")))


# What cannot be read


def without_newline() -> GGUF:
    """RWKV's kind of vocabulary, in which llama.cpp looks for a newline without end."""
    file = GGUF.read()
    count = len(file.metadata["tokenizer.ggml.tokens"][1][1])
    file.metadata["tokenizer.ggml.model"] = (STRING, "rwkv")
    file.metadata["tokenizer.ggml.tokens"] = (ARRAY, (STRING, [f"a{index}" for index in range(count)]))
    return file


def a_token_twice() -> GGUF:
    file = with_tokens({100: "qq", 101: "qq"})
    file.metadata["tokenizer.ggml.pre"] = (STRING, "superbpe")
    return file


def too_many_tokens() -> GGUF:
    file = unknown()
    tokens, types = (list(file.metadata[f"tokenizer.ggml.{each}"][1][1]) for each in ("tokens", "token_type"))
    file.metadata["tokenizer.ggml.tokens"] = (ARRAY, (STRING, [*tokens, "one more"]))
    file.metadata["tokenizer.ggml.token_type"] = (ARRAY, (I32, [*types, 1]))
    return file


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (without_newline, UnsupportedError, "cannot read its tokenizer (llama.cpp gave up: it took more than"),
        (a_token_twice, UnsupportedError, "cannot read its tokenizer (llama.cpp gave up: it ended with"),
        (lambda: unknown("no such"), UnsupportedError, "does not know its tokenizer either (llama_model_load: error"),
        (too_many_tokens, ModelFormatError, "273 tokens, but another number of embeddings"),
    ],
)
def test_vocabularies_unreadable_by_llama_cpp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[], GGUF], error: type[EdgeError], message: str
) -> None:
    if make is without_newline:
        monkeypatch.setattr(edge.backends.llamacpp.tokenizer, "_TIMEOUT", 1.0)
    path = make().write(tmp_path / "m.gguf")
    with pytest.raises(error) as caught:
        open_model(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


def test_without_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtraError("llama-cpp-python", "llamacpp")

    monkeypatch.setattr(edge.backends.llamacpp.tokenizer, "library", missing)
    with pytest.raises(UnsupportedError, match=r"is not supported yet; llama.cpp may know it, but .*install"):
        open_model(unknown().write(tmp_path / "m.gguf"))


# Runs


def test_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = unknown().write(tmp_path / "m.gguf")
    with caplog.at_level(logging.WARNING, "edge"), load(path, memory="8GiB", max_kv_size=64) as session:
        assert session.plan.backend == "llamacpp"
        text = "".join(session.generate("Once upon a time", max_tokens=8, raw=True))
    assert f"llamacpp runs this model, more slowly: {path}: pre-tokenizer 'superbpe' is not supported" in caplog.text
    # The same vocabulary under a name that edge knows gives the same ids for this text, and so the same answer.
    known = GGUF.read().write(tmp_path / "known.gguf")
    with load(known, backend="llamacpp", memory="8GiB", max_kv_size=64) as session:
        assert isinstance(session.tokenizer, Tokenizer)
        assert "".join(session.generate("Once upon a time", max_tokens=8, raw=True)) == text


def test_suppressed_tokens_are_not_generated(tmp_path: Path) -> None:
    def answer(file: GGUF) -> str:
        path = file.write(tmp_path / "m.gguf")
        with load(path, backend="llamacpp", memory="8GiB", max_kv_size=64) as session:
            return "".join(session.generate("Once upon a time", max_tokens=1, raw=True, ignore_eos=True))

    file = unknown()
    first = answer(file)
    tokenizer = Tokenizer(read_gguf(GGUF.read().write(tmp_path / "known.gguf")))
    likely = [token for token in range(tokenizer.size) if tokenizer.piece(token).decode(errors="replace") == first]
    assert likely
    file.metadata["tokenizer.ggml.suppress_tokens"] = (ARRAY, (I32, likely))
    assert answer(file) != first
