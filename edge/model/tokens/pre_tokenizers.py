"""Pre-tokenizers: how byte-level vocabularies split text into words before merging, by their names in GGUF files.

A rule is a list of regular expressions, each splitting the pieces of the previous one. The names in PRE_TOKENIZERS have
their meaning in llama.cpp, so that a file gives the same tokens in both. For a few models, llama.cpp's rule differs
from the rule of their training; PUBLISHED holds the latter, for models that edge itself converts.

To add one: its name and its rule. Every rule must split between a letter and a space before a letter (`_SAFE_CUT` in
tokenizer.py needs that), and run in linear time. For apps, `edge/apps/sections/words.py` compiles the expressions to
tables, and refuses syntax that it does not know; `tests/apps/text/test_runtime_tokens.py` compares the words.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenizers import Regex, pre_tokenizers

from edge.records import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_DIGITS3 = r"\p{N}{1,3}"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = f"{_CONTRACTIONS}|{_LETTERS}|{_DIGITS3}|{_REST}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"


@dataclass(frozen=True)
class PreTokenizer:
    """A rule for splitting text into words."""

    splits: tuple[str, ...]  # applied in this order
    whole_words: bool = False  # words in the vocabulary are not merged
    adds_bos: bool = False  # prompts start with BOS unless the file says otherwise

    def build(self) -> Any:
        """The rule as an object of the `tokenizers` library; its words are in the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in self.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])


def _rule(*splits: str, **settings: bool) -> PreTokenizer:
    return PreTokenizer(splits, **settings)


def _cased(upper: str, lower: str, contractions: str, digits: str) -> PreTokenizer:
    """A rule that ends a word where upper case follows lower case, and keeps contractions with the word before them."""
    words = "|".join(
        rf"[^\r\n\p{{L}}\p{{N}}]?{each}{contractions}" for each in (f"{upper}*{lower}+", f"{upper}+{lower}*")
    )
    return _rule(f"{words}|{digits}|{_REST_SLASH}")


# llama.cpp knows the case of ASCII letters only, and no word continues after a combining mark.
_ASCII_CASES = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_UNICODE_CASES = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN = r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
_LETTERS_BUT_HAN = rf"[\p{{L}}&&[^{_HAN}]]"

_GPT2 = _rule(GPT2_WORDS)
_DIGITS_GPT2 = _rule(r"\p{N}", GPT2_WORDS)
_LLAMA3 = _rule(_LLAMA3_WORDS)
_LLAMA3_WHOLE = replace(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN2 = _rule(_QWEN2_WORDS)
_GPT4O = _cased(*_ASCII_CASES, f"{_CONTRACTIONS}?", _DIGITS3)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = _rule(
    _DIGITS3,
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _rule(r"[\p{P}$+<=>^~|]+", GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": _rule(r"[\p{P}$+<=>^~|`]+", GPT2_WORDS, "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "granite-docling", "gigachat", "a.x-4.0",
         "mellum", "modern-bert"), _GPT2,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2,
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0"), _LLAMA3_WHOLE,
    ),
    **dict.fromkeys(("glm4", "glm5"), replace(_LLAMA3, whole_words=True)),
    **dict.fromkeys(
        ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "kormo", "solar-open", "grok-2",
         "bailingmoe", "bailingmoe2", "llada-moe"), _QWEN2,
    ),
    "qwen35": _rule(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": replace(_cased(*_ASCII_CASES, "", r"\p{N}"), whole_words=True, adds_bos=True),
    "minicpm5": _rule(_DIGITS3, rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}+|{_REST}", whole_words=True),
    "seed-coder": _rule(
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "deepseek-coder": _rule("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[ࠀ-龥가-\x{D7FF}&&\S]+", r"\p{N}"),
    "youtu": _rule(
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTIONS}?|\p{{N}}|{_REST_SLASH}",
        whole_words=True,
    ),
    "kimi-k2": _rule(
        rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS_BUT_HAN}+{_CONTRACTIONS}?|{_DIGITS3}|{_REST}",
    ),
    "ufakzeka": _rule(rf"{_LETTERS}|\p{{N}}|{_REST}"),
    "laguna": _rule(r"[^\n]+|\n+", _QWEN2_WORDS),
    "jais-2": _rule(
        f"{_CONTRACTIONS}|{_LETTERS}|{_DIGITS3}|" + r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s",
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _rule(_BLOOM)),
    "viking": _rule(_BLOOM, r"\p{N}"),
}  # fmt: skip

# The published rules that llama.cpp's differ from.
PUBLISHED: dict[str, PreTokenizer] = {
    "gpt-4o": _cased(*_UNICODE_CASES, f"{_CONTRACTIONS}?", _DIGITS3),
    "tekken": replace(_cased(*_UNICODE_CASES, "", r"\p{N}"), whole_words=True, adds_bos=True),
}
