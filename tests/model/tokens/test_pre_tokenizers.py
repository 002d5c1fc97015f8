"""The rules by which text is cut into words, and Gemma 4's tokenizer: the ids of llama.cpp under the same name.

The vocabularies are trained here, on text that is not cut into words: their merges cross all boundaries, so that a cut
in another place gives other ids.
"""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from conftest import examples
from test_gguf_file import ARRAY, BOOL, GGUF, I32, STRING, U32, Value
from test_tokenizer import MANUAL, TEXTS, LlamaCpp, ids, with_tokens
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

import edge.model.tokens.tokenizer
from edge.converters.huggingface.byte_level import byte_level_fields
from edge.converters.onnx.tokenizer_file import tokenizer_json
from edge.errors import UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.tokens.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from edge.model.tokens.tokenizer import WORDS, Tokenizer

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
# What rules differ in: cases, scripts with marks, with and without spaces, digits, apostrophes, all kinds of blanks.
_CHARS = (
    "aabbZZéÉßñÅяЯΣσǅʰªあア中文가ㄅนกำ็नम्ते\u0301\u0308\u200d\u2019''''sStTrReEvVlLmMdD00112²٣½१"
    '  \u00a0\u3000\n\n\r\t\x0b\x85.,!?/-_$+<=>^|~`"()[]{}。，！👍🏽\ufe0f\u00ad\u0378'
)
SEPARATING = [
    "camelCase HTTPServer iPhone ÉCOLEécole straßeNSTRASSE McDONALD'S aʰBǅc",
    "DON'T we'LL He'S'S x''s 'tis l'été 's'S '' ''re 're 'RE'",
    "नमस्ते दुनिया हिन्दी\u200dकि स्त्री ภาษาไทยกำลัง ที่นี่ cafe\u0301 n\u0303o Z\u0351\u036b",
    "中文，日本語のテキスト。「引用」한국어ㄅㄆㄇ1２三四 𠀀𪛖 漢字kanaカナ123",
    "1 12 123 1234 12345 123456 1234567 3,14 ²³ ½1 १२३४ ٣٤ a1b22c333",
    "a\n\n b\n \n\t c \r\n\r\n  d\n   \n\n\n  \u3000 e \u00a0f\t\tg   \n", "a/b//c\n/ !/\n?\n\n!!\r\n// ...\n\n --- x",
    "👨\u200d👩\u200d👧 👍🏽👍 ❤\ufe0f 1\ufe0f\u20e3 🇫🇷",
    "ab   12  3 x        y             z !\n\n?\n.\n\n\nwhole,\nx'sab'sab 'tab \n\n\n12 WHOLE wholesome",
    "$5+3=8 <a|b> ^~` [x]{y} #tag @me _u_ .net -1 'q' \"r\" (s)",
]  # fmt: skip
PLAIN = [text for text in TEXTS if "<" not in text and "\0" not in text]  # without the names of control tokens


def mixed_texts(seed: int, count: int, most: int = 12) -> list[str]:
    rnd = random.Random(seed)
    return ["".join(rnd.choice(_CHARS) for _ in range(rnd.randint(1, most))) for _ in range(count)]


def trained(cut: pre_tokenizers.PreTokenizer, texts: list[str], alphabet: list[str]) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte pair encoding."""
    library = Library(models.BPE())
    library.pre_tokenizer = cut
    trainer = trainers.BpeTrainer(vocab_size=5000, initial_alphabet=alphabet, show_progress=False, max_token_length=24)
    library.train_from_iterator(texts, trainer)
    said = json.loads(library.to_str())["model"]
    return sorted(said["vocab"], key=said["vocab"].get), [" ".join(pair) for pair in said["merges"]]


@lru_cache
def byte_level() -> GGUF:
    texts = PLAIN + SEPARATING * 3 + mixed_texts(0, 15_000, 4)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens, merges = trained(cut, texts, sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokens += ["Ġwholesome", "WHOLE", "!?"]  # which no merges make
    return vocabulary("gpt2", tokens, [NORMAL] * len(tokens), merges)


def vocabulary(kind: str, tokens: list[str], types: list[int], merges: list[str]) -> GGUF:
    """A file of a vocabulary, with embeddings of one number."""
    metadata: dict[str | bytes, Value] = {
        "general.architecture": (STRING, "llama"), "tokenizer.ggml.model": (STRING, kind),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)), "tokenizer.ggml.token_type": (ARRAY, (I32, types)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)), "tokenizer.ggml.bos_token_id": (U32, 1),
    }  # fmt: skip
    return GGUF(metadata, {"token_embd.weight": ((1, len(tokens)), 0, bytes(4 * len(tokens)))})


def named(folder: Path, name: str | None) -> Path:
    file = GGUF(dict(byte_level().metadata), byte_level().tensors)
    if name is not None:
        file.metadata["tokenizer.ggml.pre"] = (STRING, name)
    return file.write(folder / "m.gguf")


RULES: dict[PreTokenizer, str] = {rule: name for name, rule in reversed(PRE_TOKENIZERS.items())}  # its first name


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, None])
def test_every_rule_matches_llama_cpp(tmp_path: Path, name: str | None) -> None:
    path = named(tmp_path, name)
    ours, theirs = Tokenizer(read_gguf(path)), LlamaCpp(path)
    few = name not in RULES.values()  # another name for a rule
    texts = SEPARATING + mixed_texts(1, examples(10)) if few else TEXTS + SEPARATING + mixed_texts(1, examples(60))
    assert [text for text in texts if ids(ours, text) != theirs(text, special=False)] == []
    assert ours.add_bos == theirs.adds_bos()
    theirs.close()


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def spelled(*patterns: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    """A pre-tokenizer as files of the Hub spell it."""
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": behavior, "invert": invert} for each in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, BYTES | {"use_regex": False}]}


CASES = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
# Their pre-tokenizer, ignore_merges, and the name in GGUF; of those whose rule llama.cpp simplifies, "published".
PUBLISHED: dict[str, tuple[dict[str, Any], bool, str, str | None]] = {
    "GPT-2": (BYTES, False, "gpt-2", None),
    "GPT-2 by its regex": (
        spelled(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), False, "gpt-2", None,
    ),
    "SmolLM": ({"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}, False, "smollm", None),
    "Llama 3": (spelled(LETTERS % "{1,3}"), True, "llama-bpe", None),
    "Llama 3 merging": (spelled(LETTERS % "{1,3}"), False, "smaug-bpe", None),
    "Qwen2": (spelled(LETTERS % ""), False, "qwen2", None),
    "StableLM 2": (spelled(LETTERS % "", behavior="Removed", invert=True), False, "qwen2", None),
    "Phi-4-mini": (
        spelled(rf"{CASES % ('*', '+')}{ENDINGS}?|{CASES % ('+', '*')}{ENDINGS}?|\p{{N}}{{1,3}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"),
        False, "gpt-4o", "published",
    ),
    "Ministral 3": (
        spelled(rf"{CASES % ('*', '+')}|{CASES % ('+', '*')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"),
        True, "tekken", "published",
    ),
    "Qwen3.5": (
        spelled(rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"),
        False, "qwen35", None,
    ),
    "MiniCPM5": (
        spelled(r"\p{N}{1,3}", rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+"
                                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"),
        True, "minicpm5", None,
    ),
    "Seed-Coder": (
        spelled(rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}"),
        False, "seed-coder", None,
    ),
    "DeepSeek-V3": (
        spelled(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANKS}"),
        False, "deepseek-v3", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_pre_tokenizers_round_trip(tmp_path: Path, family: str) -> None:
    """The ids of the `tokenizers` library, through GGUF and back into a tokenizer.json."""
    pre, whole_words, name, words = PUBLISHED[family]
    tokens, merges = (byte_level().metadata[f"tokenizer.ggml.{each}"][1][1] for each in ("tokens", "merges"))
    model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": merges}
    said = {"model": model | {"ignore_merges": whole_words}, "pre_tokenizer": pre}
    oracle = Library.from_str(json.dumps({"version": "1.0", "added_tokens": [], **said}))
    fields = byte_level_fields(Path("tokenizer.json"), said)
    assert (fields["tokenizer.ggml.pre"], fields.get(WORDS)) == (name, words)

    file = GGUF(dict(byte_level().metadata), byte_level().tensors)
    file.metadata |= {key: (STRING, value) for key, value in fields.items() if isinstance(value, str)}
    ours = Tokenizer(read_gguf(file.write(tmp_path / "m.gguf")))
    again = Library.from_str(json.dumps(tokenizer_json(ours)))
    for text in TEXTS + SEPARATING + mixed_texts(5, examples(300)):
        expected = oracle.encode(text).ids
        assert ids(ours, text) == again.encode(text).ids == expected


def test_unknown_rule_for_words_is_refused(tmp_path: Path) -> None:
    for name, words in (("gpt-4o", "mine"), ("qwen2", "published")):
        file = GGUF(dict(byte_level().metadata), byte_level().tensors)
        file.metadata |= {"tokenizer.ggml.pre": (STRING, name), WORDS: (STRING, words)}
        with pytest.raises(UnsupportedError, match=f"{WORDS} is '{words}', which is not supported"):
            Tokenizer(read_gguf(file.write(tmp_path / "m.gguf")))


MARKS = {
    "<pad>": CONTROL, "<eos>": CONTROL, "<bos>": CONTROL, "<unk>": CONTROL, "<|turn>": CONTROL, "<turn|>": CONTROL,
    "<|think|>": CONTROL, "<|tool_response>": USER_DEFINED, "<|channel>": USER_DEFINED, "<channel|>": USER_DEFINED,
    "</s>": NORMAL,
}  # fmt: skip


@lru_cache
def gemma4() -> GGUF:
    texts = [text.replace(" ", "▁") for text in PLAIN + SEPARATING * 3 + mixed_texts(2, 5_000, 4)]
    cut = pre_tokenizers.Split(Regex("\n+|▁+[^▁\n]*|[^▁\n]+"), behavior="isolated")
    tokens, merges = trained(cut, texts, [])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    types = [*MARKS.values(), *[BYTE] * 256, *[NORMAL] * len(tokens)]
    return vocabulary("gemma4", [*MARKS, *byte_tokens, *tokens], types, merges)


@pytest.fixture(scope="module")
def gemma4_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = gemma4()
    file.metadata["tokenizer.ggml.add_bos_token"] = (BOOL, False)
    return file.write(tmp_path_factory.mktemp("gemma4") / "m.gguf")


@pytest.mark.parametrize("special", [False, True])
def test_gemma4_gives_ids_of_llama_cpp(gemma4_path: Path, special: bool) -> None:
    ours, theirs = Tokenizer(read_gguf(gemma4_path)), LlamaCpp(gemma4_path)
    assert ours.add_bos == theirs.adds_bos() is True  # whatever the file says
    texts = TEXTS + SEPARATING + mixed_texts(3, examples(300)) + ["\n" * count for count in range(40)]
    texts += [text + mark + text for text in mixed_texts(4, 20) for mark in MARKS if special or MARKS[mark] == CONTROL]
    assert [text for text in texts if ids(ours, text, special=special) != theirs(text.replace("\0", ""), special)] == []
    theirs.close()


def test_gemma4_tokenizer_json_gives_same_ids(gemma4_path: Path) -> None:
    """The ids of the `tokenizers` library, which cuts no text at newlines."""
    ours = Tokenizer(read_gguf(gemma4_path))
    library = Library.from_str(json.dumps(tokenizer_json(ours)))
    for text in TEXTS + SEPARATING + mixed_texts(5, examples(300)) + ["\n" * count for count in range(40)]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ids(ours, text, special=True) == expected
        assert library.decode(expected, skip_special_tokens=True) == ours.decode(expected)


@pytest.mark.parametrize("name", [*RULES.values(), "gemma4"])
def test_blocks_of_every_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gemma4_path: Path, name: str) -> None:
    """Encoding in blocks is right only if every rule cuts where blocks are cut."""
    path = gemma4_path if name == "gemma4" else named(tmp_path, name)
    tokenizer, text = Tokenizer(read_gguf(path)), MANUAL[:8_000]
    whole = ids(tokenizer, text)
    monkeypatch.setattr(edge.model.tokens.tokenizer, "BLOCK", 50)
    assert ids(tokenizer, text) == whole


HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")


@pytest.mark.parametrize(
    "names",
    [HARMONY, ("<|end|>", "<|flush|>", "<|calls|>"), ("<|end|>", "<|return|>"), ("<think>", "</think>"),
     ("[EOT]", "[EOS]"), ("<｜end▁of▁sentence｜>",), ("<end_of_utterance>", "<EOT>"), ("<|file_sep|>", "<|repo_name|>"),
     ("<|fim_pad|>", "[e~["), ("<turn|>", "<|tool_response>", "</s>"), ("</s>", "<eos>"), ("<|eot_id|>", "<|other|>")],
)  # fmt: skip
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_ends_of_turns_match_llama_cpp(tmp_path: Path, names: tuple[str, ...], kind: int) -> None:
    file = with_tokens(dict(enumerate(names, 260)), kind=kind)
    path = file.write(tmp_path / "m.gguf")
    ours, theirs = Tokenizer(read_gguf(path)), LlamaCpp(path)
    assert {ours.text(token) for token in ours.end_ids} == {ours.text(token) for token in theirs.ends(ours.size)}
    for name in names:
        assert ours.encode(name, special=True).tolist() == [ours.special_tokens()[name][0]]
        assert ours.special_tokens()[name][0] not in ours.encode(f"a{name}b")
    theirs.close()
