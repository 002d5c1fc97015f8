"""Tokenizers of Hugging Face folders: the ids of the `tokenizers` library, in our tokenizer and in llama.cpp's."""

from __future__ import annotations

import json
import struct
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, examples
from hf_folders import FOLDERS, complaint, copy_folder, edit_json
from test_pre_tokenizers import BYTES, spelled
from test_tokenizer import CASES, TEXTS, LlamaCpp
from tokenizers import Tokenizer as Oracle

from edge.converters.huggingface.config import Config
from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.tokenizer import read_vocabulary
from edge.converters.onnx.tokenizer_file import tokenizer_json
from edge.errors import EdgeError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.model.model import open_model
from edge.model.tokens.tokenizer import NORMALIZER, SPACES, Tokenizer

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
KINDS = ("gemma2", "gpt2", "llama", "mistral", "qwen2")


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=True).tolist()


def expected(oracle: Oracle, text: str) -> list[int]:
    return oracle.encode(text, add_special_tokens=False).ids


def fields_of(folder: Path, size: int, **config: Any) -> dict[str, Field]:
    return read_vocabulary(folder, Config(folder / "config.json", config), size).fields


def vocabulary_file(folder: Path, size: int, **config: Any) -> Path:
    """A GGUF file with the folder's tokenizer, and embeddings of one number."""
    path = folder / "vocabulary.gguf"
    fields: dict[str, Field] = {"general.architecture": "llama", **fields_of(folder, size, **config)}
    write_gguf(path, fields, [Planned("token_embd.weight", (1, size), "F32")], [np.zeros(size, np.float32)])
    return path


def check_ids(path: Path, oracle: Oracle, texts: list[str], *, llama_cpp: bool = True) -> None:
    file = read_gguf(path)
    ours, theirs = Tokenizer(file), LlamaCpp(path)
    composes = file.metadata.get(NORMALIZER) == "NFC"  # llama.cpp does not
    assert [text for text in texts if ids(ours, text) != expected(oracle, text)] == []
    if llama_cpp:
        for text in texts:
            said = theirs(unicodedata.normalize("NFC", text) if composes else text, special=True)
            assert said == expected(oracle, text), text
    assert ours.add_bos == theirs.adds_bos()
    theirs.close()


# The ids


@pytest.mark.parametrize("name", [*KINDS, "gemma3", "phi3"])  # that of gemma3 is also in the other folders
def test_ids_of_golden_folders_are_the_librarys(name: str, tmp_path: Path) -> None:
    convert_folder(FOLDERS / name, tmp_path / "model.gguf")
    check_ids(tmp_path / "model.gguf", Oracle.from_file(str(FOLDERS / name / "tokenizer.json")), TEXTS)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_spaces_as_metaspace_puts_them(scheme: str, tmp_path: Path) -> None:
    """Before text that does not begin with one; llama.cpp knows only of a space before any text."""
    folder = copy_folder("mistral", tmp_path / "mistral")

    def edit(said: dict[str, Any]) -> None:
        said["normalizer"] = None
        said["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}

    edit_json(folder / "tokenizer.json", edit)
    oracle = Oracle.from_file(str(folder / "tokenizer.json"))
    path = vocabulary_file(folder, 800)
    check_ids(path, oracle, TEXTS, llama_cpp=scheme == "never")
    again = Oracle.from_str(json.dumps(tokenizer_json(Tokenizer(read_gguf(path)))))
    assert [text for text in TEXTS if expected(again, text) != expected(oracle, text)] == []


def test_piece_without_merges_is_found(tmp_path: Path) -> None:
    """Its score is 0, and its merges are missing in many files. The model was trained with it."""
    folder = copy_folder("mistral", tmp_path / "mistral")
    oracle = Oracle.from_file(str(folder / "tokenizer.json"))
    first = str(oracle.id_to_token(259))

    def lose(said: dict[str, Any]) -> None:
        said["model"]["merges"] = [pair for pair in said["model"]["merges"] if "".join(pair) != first]

    edit_json(folder / "tokenizer.json", lose)
    assert first in {left + right for left, right in json.loads(oracle.to_str())["model"]["merges"]}
    check_ids(vocabulary_file(folder, 800), oracle, TEXTS)


@pytest.mark.parametrize("key", [NORMALIZER, SPACES])
def test_unknown_normalizers_and_spaces_are_refused(key: str, tmp_path: Path) -> None:
    fields: dict[str, Field] = {"general.architecture": "qwen2", **fields_of(FOLDERS / "qwen2", 272), key: "magic"}
    planned = [Planned("token_embd.weight", (1, 272), "F32")]
    write_gguf(tmp_path / "model.gguf", fields, planned, [np.zeros(272, np.float32)])
    with pytest.raises(UnsupportedError, match=r"'magic'.* is not supported"):
        Tokenizer(read_gguf(tmp_path / "model.gguf"))


def test_sentencepiece_own_file(tmp_path: Path) -> None:
    """Where there is no tokenizer.json. The ids are SentencePiece's."""
    (tmp_path / "tokenizer.model").write_bytes((FOLDERS / "spm.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    path = vocabulary_file(tmp_path, 802)
    ours, theirs = Tokenizer(read_gguf(path)), LlamaCpp(path)
    for case in CASES:
        assert ours.encode(case["text"]).tolist() == case["spm"]
        assert theirs(case["text"], special=False) == case["spm"]
    theirs.close()
    assert (ours.bos_id, ours.eos_id, ours.add_bos, ours.size) == (1, 2, True, 802)
    golden = read_gguf(GOLDEN / "spm.gguf")
    file = read_gguf(path)
    np.testing.assert_array_equal(file.numbers("tokenizer.ggml.scores")[:800], golden.numbers("tokenizer.ggml.scores"))
    np.testing.assert_array_equal(
        file.numbers("tokenizer.ggml.token_type")[:800], golden.numbers("tokenizer.ggml.token_type")
    )


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(*fields: tuple[int, int | bytes | float]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value)
    return out


def piece(text: str, score: float = 0.0, kind: int = 1) -> tuple[int, bytes]:
    return 1, message((1, text.encode()), (2, score), (3, kind))


BPE, PLAIN = (2, message((3, 2))), (3, message((1, b"identity"), (4, 0)))
MODELS: list[tuple[bytes, type[EdgeError], str]] = [
    (b"", UnsupportedError, "not BPE"),
    (b"\xff" * 30, ModelFormatError, "damaged"),
    (message(piece("a"), piece("b"), (2, message((3, 1))), PLAIN), UnsupportedError, "not BPE"),
    (message(piece("a"), BPE, (3, message((1, b"nmt_nfkc"), (4, 0)))), UnsupportedError, "normalization"),
    (message(piece("a"), BPE), UnsupportedError, "removes spaces"),
    (message(piece("a"), piece("a"), BPE, PLAIN), ModelFormatError, "damaged"),
    (message(piece("a", float("nan")), BPE, PLAIN), ModelFormatError, "damaged"),
    (message((1, message((1, b"a"), (3, 2**63))), BPE, PLAIN), ModelFormatError, "damaged"),
    (message(*(piece(f"t{index}") for index in range(9)), BPE, PLAIN), ModelFormatError, "only 4 embeddings"),
]


@pytest.mark.parametrize(("data", "error", "match"), MODELS, ids=range(len(MODELS)))
def test_unsupported_sentencepiece_files_are_refused(
    data: bytes, error: type[EdgeError], match: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(error, match=match):
        fields_of(tmp_path, 4)


# What goes with the ids


def test_tokens_that_were_added(tmp_path: Path) -> None:
    convert_folder(FOLDERS / "gpt2", tmp_path / "model.gguf")
    file = read_gguf(tmp_path / "model.gguf")
    tokens, types = file.strings("tokenizer.ggml.tokens"), file.numbers("tokenizer.ggml.token_type")
    assert tokens[272:] == ["<tool>", "[x]  [y]", *(f"[PAD{index}]" for index in range(274, 280))]
    assert types[[0, 1, 2]].tolist() == [CONTROL] * 3
    assert types[272:].tolist() == [USER_DEFINED] * 2 + [UNUSED] * 6
    tokenizer = Tokenizer(file)
    assert tokenizer.encode("a<tool>b").tolist()[1] == 272
    assert tokenizer.decode([272, 273]) == "<tool>[x]  [y]"


def test_bos_and_eos_tokens(tmp_path: Path) -> None:
    def roles(settings: dict[str, Any], generation: Any = None, **config: Any) -> dict[str, Any]:
        folder = copy_folder("qwen2", tmp_path / str(len(list(tmp_path.iterdir()))))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
        names = ("bos", "eos", "unknown", "padding", "eot", "eom")
        fields = fields_of(folder, 272, **config)
        found = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in names}
        return {name: int(value) for name, value in found.items() if value is not None}

    assert roles({}) == {}
    assert roles({"eos_token": "<|im_end|>"}, eos_token_id=5) == {"eos": 2, "eot": 5}
    assert roles({"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}) == {"eos": 2, "padding": 0}
    assert roles({}, bos_token_id=1, eos_token_id=[2, 0, 7]) == {"bos": 1, "eos": 2, "eot": 7}
    assert roles({"eos_token": "<|im_end|>"}, [2, 0]) == {"eos": 2}  # readers know that 0 is <|endoftext|>
    assert roles({"eos_token": "<|im_end|>"}, 9, eos_token_id=2) == {"eos": 2, "eot": 9}
    assert roles({"eos_token": "<|im_end|>"}, [2, 9, 11]) == {"eos": 2, "eot": 9, "eom": 11}
    assert roles({"eos_token": "no such token"}, eos_token_id=999) == {}
    assert roles({"eos_token": 5, "bos_token": None}, bos_token_id=True, eos_token_id="2") == {}


@pytest.mark.parametrize(("name", "size"), [("qwen2", 272), ("mistral", 800)])
def test_added_tokens_strip_spaces_and_match_words(name: str, size: int, tmp_path: Path) -> None:
    folder = copy_folder(name, tmp_path / name)
    added = {"<L>": "lstrip", "<R>": "rstrip", "<both>": "lstrip rstrip", "zq": "single_word", "<cs>": "lstrip"}

    def edit(said: dict[str, Any]) -> None:
        for index, (text, flags) in enumerate(added.items(), size):
            flag = {key: key in flags.split() for key in ("lstrip", "rstrip", "single_word")}
            special = {"special": name == "mistral" or text == "<cs>", "normalized": False}
            said["added_tokens"].append({"id": index, "content": text, **flag, **special})

    edit_json(folder / "tokenizer.json", edit)
    oracle = Oracle.from_file(str(folder / "tokenizer.json"))
    path = vocabulary_file(folder, size + len(added))
    texts = ["a <L> b", "a  <R>\n b", "<both> <L>", "<R>  <both>  x", "zq zqa zq1 (zq) zq", "a \t<cs> b", "<L>"]
    check_ids(path, oracle, texts, llama_cpp=False)
    again = Oracle.from_str(json.dumps(tokenizer_json(Tokenizer(read_gguf(path)))))
    assert [expected(again, text) for text in texts] == [expected(oracle, text) for text in texts]


def test_suppressed_tokens(tmp_path: Path) -> None:
    folder = copy_folder("qwen2", tmp_path / "folder")
    said: dict[str, Any] = {"suppress_tokens": [3, 8, 999, "4", -1]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    convert_folder(folder, tmp_path / "model.gguf")
    assert Tokenizer(read_gguf(tmp_path / "model.gguf")).suppressed == {3, 8}


def test_whether_prompts_begin_with_bos(tmp_path: Path) -> None:
    def adds(edit: Callable[[dict[str, Any]], object], **settings: Any) -> Any:
        folder = copy_folder("llama", tmp_path / str(len(list(tmp_path.iterdir()))))
        edit_json(folder / "tokenizer.json", edit)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return fields_of(folder, 272)["tokenizer.ggml.add_bos_token"]

    def wrapped(said: dict[str, Any]) -> None:
        said["post_processor"] = {"type": "Sequence", "processors": [BYTES, said["post_processor"]]}

    assert adds(lambda said: None) is True
    assert adds(wrapped) is True
    assert adds(lambda said: said["post_processor"]["single"].pop(0), add_bos_token=True) is False
    assert adds(lambda said: said.update(post_processor=None), add_bos_token=True) is True
    assert adds(lambda said: said.update(post_processor=BYTES)) is False


def test_chat_templates(tmp_path: Path) -> None:
    def template(jinja: bytes | None, settings: Any) -> Any:
        folder = copy_folder("qwen2", tmp_path / str(len(list(tmp_path.iterdir()))))
        (folder / "chat_template.jinja").unlink()
        if jinja is not None:
            (folder / "chat_template.jinja").write_bytes(jinja)
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": settings}))
        return fields_of(folder, 272).get("tokenizer.chat_template")

    assert template(None, None) is None
    assert template(None, "A{{ 1 }}") == "A{{ 1 }}"
    assert template("Ä".encode(), "B") == "Ä"
    assert template(None, [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]) == "D"
    assert template(None, [{"name": "tool_use", "template": "T"}, 5]) is None
    for bad in (b"\xff", b"x" * (2 << 20)):
        with pytest.raises(ModelFormatError, match=r"chat_template\.jinja"):
            template(bad, None)
    convert_folder(FOLDERS / "qwen2", tmp_path / "model.gguf")
    model = open_model(tmp_path / "model.gguf")
    assert model.tokenizer.decode(model.encode_prompt("Hi")) == "user\nHi\nassistant\n"


def test_control_tokens_strip_spaces_behind_them(tmp_path: Path) -> None:
    """Phi-3's do, and readers of GGUF go by the model's name."""
    folder = copy_folder("mistral", tmp_path / "my-model")
    swallowing = {"rstrip": True, "special": True, "single_word": False, "lstrip": False, "normalized": False}
    user, end = {"id": 800, "content": "<|user|>"}, {"id": 801, "content": "<|endoftext|>"}
    edit_json(folder / "tokenizer.json", lambda said: said["added_tokens"].append(user | swallowing))
    assert not read_vocabulary(folder, Config(folder / "config.json", {}), 802).swallows
    edit_json(folder / "tokenizer.json", lambda said: said["added_tokens"].append(end | swallowing | {"rstrip": False}))
    vocabulary = read_vocabulary(folder, Config(folder / "config.json", {}), 802)
    assert vocabulary.swallows
    path = folder / "x.gguf"
    fields: dict[str, Field] = {"general.architecture": "llama", "general.name": "phi-3", **vocabulary.fields}
    write_gguf(path, fields, [Planned("token_embd.weight", (1, 802), "F32")], [np.zeros(802, np.float32)])
    oracle = Oracle.from_file(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(read_gguf(path))
    theirs = LlamaCpp(path)
    for text in ("<|user|>  \n Hi", "<|user|>Hi", "Hi <|user|> "):
        assert ids(tokenizer, text) == expected(oracle, text) == theirs(text, special=True)
    theirs.close()
    again = Oracle.from_str(json.dumps(tokenizer_json(tokenizer)))
    assert expected(again, "<|user|>  \n Hi") == expected(oracle, "<|user|>  \n Hi")


# What is refused


def pre_tokenizer(*steps: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda said: said.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, BYTES]})


def normalizer(said: Any) -> Callable[[dict[str, Any]], None]:
    return lambda file: file.update(normalizer=said)


def model(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda said: said["model"].update(changes)


def behind_spaces(said: dict[str, Any]) -> None:
    """An added token that matches in text whose spaces are ▁ already."""
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    said.update(normalizer={"type": "Sequence", "normalizers": steps}, pre_tokenizer=None)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    said["added_tokens"].append({"id": 800, "content": "<new>", "normalized": True, **flags})


REFUSED: list[tuple[str, Callable[[dict[str, Any]], object], type[EdgeError], str]] = [
    ("qwen2", model(type="WordLevel"), UnsupportedError, "type 'WordLevel' is not supported"),
    ("qwen2", model(dropout=0.1), UnsupportedError, "dropout"),
    ("qwen2", model(end_of_word_suffix="</w>"), UnsupportedError, "end_of_word_suffix"),
    ("qwen2", model(ignore_merges=True), UnsupportedError, "ignore_merges True"),
    ("qwen2", pre_tokenizer({"type": "Whitespace"}), UnsupportedError, "none that GGUF has a name for.*Whitespace"),
    ("qwen2", pre_tokenizer(spelled(r"\p{L}+")), UnsupportedError, "none that GGUF"),
    ("qwen2", lambda said: said.update(pre_tokenizer=BYTES | {"add_prefix_space": True}), UnsupportedError, "space"),
    ("qwen2", normalizer({"type": "NFKC"}), UnsupportedError, "normalizer is not supported.*NFKC"),
    ("qwen2", model(merges=["a"]), ModelFormatError, "'a' is not a pair"),
    ("qwen2", model(merges=[["zz", "zz"]]), ModelFormatError, "not in the vocabulary"),
    ("qwen2", lambda said: said["model"]["vocab"].update(x="5"), ModelFormatError, "has the id '5'"),
    ("qwen2", lambda said: said["model"]["vocab"].update(toomuch=272), ModelFormatError, "has the id 272, of 272"),
    ("qwen2", lambda said: said["model"]["vocab"].update(other=5), ModelFormatError, "the id 5 belongs to"),
    ("qwen2", lambda said: said["added_tokens"][0].update(id=-1), ModelFormatError, "no text or no id"),
    ("mistral", normalizer(None), UnsupportedError, "does not write spaces as ▁"),
    ("mistral", normalizer({"type": "NFC"}), UnsupportedError, "normalizer NFC"),
    ("mistral", lambda said: said.update(pre_tokenizer=BYTES), UnsupportedError, "pre-tokenizer ByteLevel"),
    ("mistral", lambda said: said["model"]["merges"].pop(40), UnsupportedError, "is not merged of"),
    ("mistral", lambda said: said["model"]["merges"].append(["zz", "q"]), ModelFormatError, "names tokens"),
]  # fmt: skip


def test_added_token_that_matches_behind_spaces_is_refused(tmp_path: Path) -> None:
    folder = copy_folder("mistral", tmp_path / "mistral")
    edit_json(folder / "tokenizer.json", behind_spaces)
    assert "'<new>' is normalized" in complaint(lambda: fields_of(folder, 812))


@pytest.mark.parametrize(("name", "edit", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(
    name: str, edit: Callable[[dict[str, Any]], object], error: type[EdgeError], match: str, tmp_path: Path
) -> None:
    folder = copy_folder(name, tmp_path / name)
    edit_json(folder / "tokenizer.json", edit)
    with pytest.raises(error, match=match) as caught:
        convert_folder(folder, tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


ODD: list[Any] = [
    None, -1, 0, 2**70, 0.5, "x", "", [], [1, "x"], [[]], [{}], {}, {"type": "Sequence"}, {"type": 3}, True,
]  # fmt: skip

UNREAD = ("decoder", "truncation", "padding", "version")


def places(said: Any, *above: str | int) -> list[tuple[str | int, ...]]:
    """Paths to all values in JSON, but for a vocabulary's own."""
    found = [above] if above else []
    if len(said) > 50 if isinstance(said, list | dict) else True:
        return found
    for key, inner in said.items() if isinstance(said, dict) else enumerate(said):
        found += places(inner, *above, key)
    return found


@pytest.mark.parametrize(("name", "file"), [
    ("llama", "tokenizer.json"),
    *(("qwen2", f"{title}.json") for title in ("tokenizer_config", "special_tokens_map", "generation_config")),
])  # fmt: skip
def test_files_of_any_kind_are_read_or_refused(name: str, file: str, tmp_path: Path) -> None:
    """Every value in turn becomes something else, in make test one in three of ODD; then the whole file does."""
    step = 3 if examples(1) == 1 else 1
    folder = copy_folder(name, tmp_path / "folder")
    path = folder / file
    if not path.exists():
        path.write_text('{"eos_token_id": [2, 0], "eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}')
    text = path.read_text(encoding="utf-8")
    for number, place in enumerate(places(json.loads(text))):
        for value in ODD[number % step :: step] if place[0] not in UNREAD else ():
            changed = json.loads(text)
            part = changed
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = value
            path.write_text(json.dumps(changed), encoding="utf-8")
            assert "\n" not in complaint(lambda: fields_of(folder, 810)), (place, value)
    for data in (b"", b"[]", b"\xff", b"{", b'{"a": NaN}'):
        path.write_bytes(data)
        assert "\n" not in complaint(lambda: fields_of(folder, 810))


def test_merges_as_older_files_write_them(tmp_path: Path) -> None:
    folder = copy_folder("qwen2", tmp_path / "qwen2")
    edit_json(folder / "tokenizer.json", lambda said: model(merges=[*map(" ".join, said["model"]["merges"])])(said))
    assert fields_of(folder, 272)["tokenizer.ggml.merges"] == fields_of(FOLDERS / "qwen2", 272)["tokenizer.ggml.merges"]


def test_ids_beyond_embeddings_are_left_out(tmp_path: Path) -> None:
    """Some files add a token that the model has no embedding for."""
    folder = copy_folder("qwen2", tmp_path / "qwen2")
    image = {"id": 272, "content": "<image>", "special": True}
    edit_json(folder / "tokenizer.json", lambda said: said["added_tokens"].append(image))
    assert fields_of(folder, 272)["tokenizer.ggml.tokens"] == fields_of(FOLDERS / "qwen2", 272)["tokenizer.ggml.tokens"]
