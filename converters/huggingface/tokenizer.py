"""Convert a Hugging Face folder's tokenizer and chat template into GGUF fields that give the same ids for the same
text.

Four kinds are supported: byte-level BPE, SentencePiece's BPE with byte fallback, also from its own `tokenizer.model`,
and of encoders BERT's WordPiece and XLM-R's unigram model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.converters.huggingface.byte_level import byte_level_fields
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.pieces import Pieces, pieces_of_json, pieces_of_model
from edge.converters.huggingface.unigram import unigram_fields, unigram_pieces
from edge.converters.huggingface.word_piece import word_piece_fields, word_piece_roles
from edge.devices.regular import read_bounded
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field
from edge.formats.json_file import items, read_object
from edge.model.tokens.tokenizer import ALONE, ENDS, LSTRIP, RSTRIP, SPACES
from edge.model.tokens.vocabulary import END_NAMES
from edge.model.tokens.word_piece import to_stored
from edge.values import brief

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # config's name, GGUF's
_MOST_TEMPLATE = 1 << 20
_PHI3 = {"<unk>", "<s>", "</s>", "<|endoftext|>"}  # llama.cpp crashes on a model of that name without them


@dataclass(frozen=True)
class Vocabulary:
    """A converted tokenizer."""

    fields: dict[str, Field]  # of the header
    swallows: bool  # control tokens absorb the space after them


def read_vocabulary(folder: Path, config: Config, size: int) -> Vocabulary:
    """Read the tokenizer for `size` embeddings. Raises InputError if there is none, UnsupportedError,
    ModelFormatError."""
    settings = _settings(folder)
    path, model = folder / "tokenizer.json", folder / "tokenizer.model"
    if path.is_file():
        said = read_object(path)
        added = _added(path, said, size)
        texts, fields = _texts_and_fields(path, said, added, size)
        strips = any(each.get("rstrip") is True and each.get("special") is True for each in added.values())
        swallows = strips and set(texts) >= _PHI3
        fields |= _habits(path, said, added)
        ends = _token_around(path, said, last=True)
        fields = {
            "tokenizer.ggml.add_bos_token": _adds(path, said, settings, "bos"),
            "tokenizer.ggml.add_eos_token": _adds(path, said, settings, "eos"),
        } | fields
    elif model.is_file():
        pieces, swallows, ends = pieces_of_model(model), False, None
        texts, fields = pieces.texts, _piece_fields(model, pieces, {}, size)
        fields["tokenizer.ggml.add_bos_token"] = bool(settings.get("add_bos_token", True))
        fields["tokenizer.ggml.add_eos_token"] = settings.get("add_eos_token") is True
    else:
        raise InputError(f"{folder}: there is no tokenizer.json or tokenizer.model in it")
    ids = {text: index for index, text in enumerate(texts)}
    roles = _role_fields(folder, settings, config, ids, ends)
    if fields["tokenizer.ggml.model"] == "bert":
        roles = word_piece_roles(settings, ids)
    elif {"cls_token", "sep_token"} <= settings.keys():  # another encoder's
        roles |= word_piece_roles(settings, ids)
    fields |= roles
    template = _template(folder, settings)
    return Vocabulary(fields | ({"tokenizer.chat_template": template} if template else {}), swallows)


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json as defaults; both may be missing."""
    said: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            said |= {key: value for key, value in read_object(folder / name).items() if value is not None}
    return said


def _added(path: Path, said: Mapping[str, Any], size: int) -> dict[int, dict[str, Any]]:
    """Added tokens by id; ids beyond the embeddings are dropped. Raises ModelFormatError."""
    found: dict[int, dict[str, Any]] = {}
    for each in items(path, said, "added_tokens"):
        if not isinstance(each, dict) or not isinstance(each.get("content"), str) or not _is_id(each.get("id")):
            raise ModelFormatError(f"{path}: the added token {brief(each)} has no text or no id")
        if each["id"] < size:
            found[each["id"]] = each
    return found


def _habits(path: Path, said: Mapping[str, Any], added: dict[int, dict[str, Any]]) -> dict[str, Field]:
    """Fields for added tokens that absorb blanks or match whole words only. Raises UnsupportedError for others that
    change ids."""
    pieces = said["model"].get("type") == "WordPiece"
    prepends = '"Prepend"' in json.dumps(said.get("normalizer"))
    for each in added.values():
        text, special = brief(each["content"]), each.get("special") is True
        if pieces and (not special or each.get("single_word")):
            raise UnsupportedError(f"{path}: the added token {text} is an ordinary word, which is not supported")
        if prepends and each.get("normalized") is True and not special:
            raise UnsupportedError(f"{path}: the added token {text} is normalized: it matches behind a space only")
    flags = {RSTRIP: "rstrip", LSTRIP: "lstrip", ALONE: "single_word"}
    found = {key: [index for index, each in added.items() if each.get(flag) is True] for key, flag in flags.items()}
    return {} if pieces else {key: np.array(tokens, np.int32) for key, tokens in found.items() if tokens}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _texts_and_fields(
    path: Path, said: Mapping[str, Any], added: dict[int, dict[str, Any]], size: int
) -> tuple[list[str], dict[str, Field]]:
    model = said.get("model")
    if isinstance(model, dict) and model.get("type") == "WordPiece" and isinstance(model.get("vocab"), dict):
        return _texts_and_word_pieces(path, said, model, added, size)
    if isinstance(model, dict) and model.get("type") == "Unigram":
        return _texts_and_unigrams(path, said, added, size)
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else model
        raise UnsupportedError(
            f"{path}: a tokenizer of type {brief(kind)} is not supported (BPE, WordPiece and Unigram are)"
        )
    texts = _texts(path, model["vocab"], added, size)
    merges = _merges(path, model)
    if model.get("byte_fallback"):
        pieces = pieces_of_json(path, said, texts, merges, set(added))
        return texts, _piece_fields(path, pieces, added, size)
    fields: dict[str, Field] = byte_level_fields(path, said)
    fields["tokenizer.ggml.tokens"] = texts
    fields["tokenizer.ggml.token_type"] = _types(np.full(size, NORMAL, np.int32), texts, added)
    fields["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    return texts, fields


def _texts_and_word_pieces(
    path: Path, said: Mapping[str, Any], model: Mapping[str, Any], added: dict[int, dict[str, Any]], size: int
) -> tuple[list[str], dict[str, Field]]:
    fields, texts = word_piece_fields(path, said), _texts(path, model["vocab"], added, size)
    types = _types(np.full(size, NORMAL, np.int32), texts, added)
    stored = [text if types[index] == CONTROL else to_stored(text) for index, text in enumerate(texts)]
    return stored, fields | {"tokenizer.ggml.tokens": stored, "tokenizer.ggml.token_type": types}


def _texts_and_unigrams(
    path: Path, said: Mapping[str, Any], added: dict[int, dict[str, Any]], size: int
) -> tuple[list[str], dict[str, Field]]:
    pieces, fields = unigram_pieces(path, said), unigram_fields(path, said)
    texts = _texts(path, {text: index for index, text in enumerate(pieces)}, added, size)
    types = np.full(size, NORMAL, np.int32)
    unknown = said["model"].get("unk_id")
    if _is_id(unknown) and unknown < size:
        types[unknown] = UNKNOWN
    scores = np.array([pieces.get(text, 0.0) for text in texts], np.float32)
    listed: dict[str, Field] = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.scores": scores}
    return texts, fields | listed | {"tokenizer.ggml.token_type": _types(types, texts, added)}


def _texts(path: Path, vocab: Mapping[str, Any], added: dict[int, dict[str, Any]], size: int) -> list[str]:
    """The text of every id; embeddings without a token get the customary names. Raises ModelFormatError."""
    texts: dict[int, str] = {index: each["content"] for index, each in added.items()}
    for text, index in vocab.items():
        if not _is_id(index) or index >= size:
            raise ModelFormatError(f"{path}: the token {brief(text)} has the id {brief(index)}, of {size} embeddings")
        if texts.setdefault(index, text) != text:
            raise ModelFormatError(f"{path}: the id {index} belongs to {brief(texts[index])} and to {brief(text)}")
    listed = [texts.get(index, f"[PAD{index}]") for index in range(size)]
    if len(set(listed)) < size:
        raise ModelFormatError(f"{path}: two ids have the same text")
    if any(not text or "\0" in text for text in listed):
        raise UnsupportedError(f"{path}: a token is empty or holds a zero byte: GGUF has no such tokens")
    return listed


def _merges(path: Path, model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges as pairs; older files write a pair as one string."""
    pairs = []
    for each in items(path, model, "merges"):
        pair = tuple(each.split(" ")) if isinstance(each, str) else tuple(each) if isinstance(each, list) else ()
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise ModelFormatError(f"{path}: the merge {brief(each)} is not a pair")
        pairs.append((pair[0], pair[1]))
    return pairs


def _types(types: Any, texts: list[str], added: dict[int, dict[str, Any]]) -> Any:
    """Token types, extended by those of added tokens and of embeddings without a token."""
    for index, text in enumerate(texts):
        if index not in added and text == f"[PAD{index}]":
            types[index] = UNUSED
    for index, each in added.items():
        if each.get("special") is True:
            types[index] = UNKNOWN if types[index] == UNKNOWN else CONTROL
        elif "▁" not in each["content"] or types[index] != NORMAL:  # merging finds the others, which decode to spaces
            types[index] = USER_DEFINED
    return types


def _piece_fields(path: Path, pieces: Pieces, added: dict[int, dict[str, Any]], size: int) -> dict[str, Field]:
    if len(pieces.texts) > size:
        raise ModelFormatError(f"{path}: {len(pieces.texts)} tokens, but only {size} embeddings")
    for index in range(len(pieces.texts), size):
        pieces.texts.append(f"[PAD{index}]")
    scores, types = np.zeros(size, np.float32), np.full(size, UNUSED, np.int32)
    scores[: len(pieces.scores)], types[: len(pieces.types)] = pieces.scores, pieces.types
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces.texts,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": _types(types, pieces.texts, added),
        "tokenizer.ggml.add_space_prefix": pieces.space_prefix,
        **({SPACES: pieces.spaces} if pieces.spaces else {}),
    }


def _adds(path: Path, said: Mapping[str, Any], settings: Mapping[str, Any], role: str) -> bool:
    """Whether texts start with BOS (or end with EOS): by the tokenizer's post-processor, else by the settings."""
    if _template_around(path, said) is not None:
        return _token_around(path, said, last=role == "eos") is not None
    return settings.get(f"add_{role}_token") is True


def _token_around(path: Path, said: Mapping[str, Any], *, last: bool) -> str | None:
    """The special token that the post-processor puts before, or behind, a text."""
    parts = _template_around(path, said) or []
    token = parts[-1 if last else 0].get("SpecialToken") if parts else None
    return str(token.get("id")) if isinstance(token, dict) else None


def _template_around(path: Path, said: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The parts of a TemplateProcessing for a single text; None without one."""
    post = said.get("post_processor")
    for step in (items(path, post, "processors") or [post]) if isinstance(post, dict) else []:
        if isinstance(step, dict) and step.get("type") == "TemplateProcessing":
            return [each for each in items(path, step, "single") if isinstance(each, dict)]
    return None


def _role_fields(
    folder: Path, settings: Mapping[str, Any], config: Config, ids: dict[str, int], behind: str | None
) -> dict[str, Field]:
    """Fields for special tokens: bos, eos, unk and pad (by text, else by the ids in config.json), other end-of-turn
    tokens, and tokens that must not be generated. behind: the token at the end of texts, which is EOS if there is
    one, as llama.cpp's converter has it."""
    roles: dict[str, int] = {}
    for role, name in _ROLES.items():
        text = settings.get(f"{role}_token")
        text = text.get("content") if isinstance(text, dict) else text
        index = ids.get(text) if isinstance(text, str) else None
        if index is None:
            index = next(iter(_ids(config.get(f"{role}_token_id"), len(ids))), None)
        if index is not None:
            roles[name] = index
    generation = folder / "generation_config.json"
    said = read_object(generation) if generation.is_file() else {}
    ends = _ids(config.get("eos_token_id"), len(ids)) + _ids(said.get("eos_token_id"), len(ids))
    texts = {index: text for text, index in ids.items()}
    if behind in ids:
        ends += [roles["eos"]] if "eos" in roles else []
        roles["eos"] = ids[behind]
    others = [i for i in dict.fromkeys(ends) if i != roles.get("eos") and texts[i] not in END_NAMES]
    roles |= dict(zip(("eot", "eom"), others, strict=False))
    fields: dict[str, Field] = {f"tokenizer.ggml.{name}_token_id": np.uint32(i) for name, i in roles.items()}
    if len(others) > 2:
        fields[ENDS] = np.array(others, np.int32)
    if suppressed := _ids(said.get("suppress_tokens"), len(ids)):
        fields["tokenizer.ggml.suppress_tokens"] = np.array(suppressed, np.int32)
    return fields


def _ids(value: Any, size: int) -> list[int]:
    """Normalize an id or a list of ids to a list; values of other types are left out."""
    return [each for each in (value if isinstance(value, list) else [value]) if _is_id(each) and each < size]


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: from its own file, or from the settings, which may hold several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bounded(path, _MOST_TEMPLATE, "a chat template", ModelFormatError).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelFormatError(f"{path}: cannot be read ({error})") from None
    said = settings.get("chat_template")
    if isinstance(said, list):
        named = {each.get("name"): each.get("template") for each in said if isinstance(each, dict)}
        said = named.get("default")
    return said if isinstance(said, str) and said else None
