"""Whisper (Radford et al., 2022, arXiv:2212.04356): an encoder of sound, and a decoder that writes what was said.

In edge's GGUF files the architecture is `whisper`. The decoder's tensors have the usual names, and `cross_attn_…` those
of its attention to the encoder's states; the encoder's begin with `enc.`. For engines the file is two models, whose
headers `ears_file` and `words_file` return: tensors under the names that a network has, at their places in the file.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import ArrayRef, GGUFFile, TensorInfo
from edge.formats.gguf_fields import Header
from edge.model.cores import Attention, Dense
from edge.model.structure.fallback import read_fallback
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.records import dataclass

ARCHITECTURE = "whisper"
FRAMES = 3000  # of a window of 30 s
ALIGNMENT, MELS, MULTILINGUAL = "alignment_heads", "mel_count", "multilingual"
MISHEARD = ("int4",)  # dtypes of rows in which a transcript has other words
MANY_LANGUAGES = 51865  # tokens of the least multilingual vocabulary
EARS = "enc."  # before the names of the encoder's tensors
STEM = ("conv1", "conv2")  # [hidden, 3 · inputs], with the inputs of one tap side by side; they run outside of engines
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
           "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")  # fmt: skip
TIMESTAMPS = tuple(f"<|{number / 50:.2f}|>" for number in range(FRAMES // 2 + 1))
_BIASES = ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class Whisper:
    """An opened Whisper model. spec, ears: its decoder and its encoder. Numbers of tokens are ids of the vocabulary."""

    spec: ModelSpec
    ears: ModelSpec
    mels: int  # bands of the spectrogram
    frames: int  # the most of a window
    positions: int  # states of the encoder, half as many
    context: int  # the most tokens of the decoder
    vocab: int
    multilingual: bool
    languages: dict[str, int]  # ids by code; none if the model knows English only
    sot: int
    eot: int
    translate: int
    transcribe: int
    prev: int
    no_speech: int
    no_timestamps: int
    first_timestamp: int  # the others follow, 0.02 s apart
    alignment: tuple[tuple[int, int], ...]  # (layer, head) whose cross attention follows the sound


def is_whisper(file: GGUFFile) -> bool:
    return file.metadata.get("general.architecture") == ARCHITECTURE


def read_whisper(file: GGUFFile) -> Whisper:
    """The model of a file, with every shape checked. Raises InputError for another model, ModelFormatError and
    UnsupportedError for a damaged one."""
    if not is_whisper(file):
        raise InputError(f"{file.path} does not hear: choose a Whisper model, such as whisper-tiny.en")
    header, spec, ears = Header(file, ARCHITECTURE), read_words(file), _read_ears(file)
    if spec.hidden != ears.hidden:
        raise ModelFormatError(f"{file.path}: encoder and decoder differ in width, {ears.hidden} and {spec.hidden}")
    mels, positions = header.count(MELS, "heads"), ears.vocab
    for name, inputs in zip(STEM, (mels, ears.hidden), strict=True):
        _check(file, f"{EARS}{name}.weight", (3 * inputs, ears.hidden))
        _check(file, f"{EARS}{name}.bias", (ears.hidden,))
    texts = _control_tokens(file)
    missing = [text for text in (*SPECIAL, TIMESTAMPS[0]) if text not in texts]
    if missing:
        raise ModelFormatError(f"{file.path}: its vocabulary has no token {missing[0]}")
    eot, sot, translate, transcribe, _, prev, no_speech, no_timestamps = (texts[text] for text in SPECIAL)
    languages = {text[2:-2]: number for text, number in texts.items() if sot < number < translate and text[:2] == "<|"}
    stated = header.value(MULTILINGUAL)  # folders without a generation_config.json do not say it
    multilingual = spec.vocab >= MANY_LANGUAGES if stated is None else stated is True
    return Whisper(
        spec, ears, mels, 2 * positions, positions, spec.context, spec.vocab, multilingual,
        languages if multilingual else {}, sot, eot, translate, transcribe, prev, no_speech, no_timestamps,
        texts[TIMESTAMPS[0]], _alignment(file, spec.layers // 2, spec.heads),
    )  # fmt: skip


def read_words(file: GGUFFile) -> ModelSpec:
    """The decoder's spec. Each of its layers is two of the network: attention to the text so far, and the rest."""
    words = words_file(file)
    spec = read_fallback(Header(words, ARCHITECTURE))
    own = Attention(spec.heads, spec.heads, spec.head_dim, spec.head_dim**-0.5, biases=_BIASES)
    layers = (
        (Block("attn_norm", own, norm_bias=True),),
        (Block("attn_norm", replace(own, across=True), norm_bias=True), _dense(spec)),
    )
    network = Network(
        spec.hidden, spec.vocab, layers * (spec.layers // 2), norm="layer", norm_eps=spec.norm_eps,
        positions=spec.context, output_norm_bias=True,
    )  # fmt: skip
    return _checked(words, spec, network)


def ears_file(file: GGUFFile) -> GGUFFile:
    """The header of the encoder as a model whose tokens are the positions of states: their embeddings are the table of
    positions, which given rows replace."""
    tensors = {name.removeprefix(EARS): info for name, info in file.tensors.items() if name.startswith(EARS)}
    for name in [name for name in tensors if name.startswith(STEM)]:
        del tensors[name]
    if table := tensors.pop("position_embd.weight", None):
        tensors["token_embd.weight"] = table
    own = {key: value for key, value in file.metadata.items() if not key.startswith(f"{ARCHITECTURE}.")}
    prefix = f"{ARCHITECTURE}.encoder."
    own |= {key.replace(".encoder.", "."): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return replace(file, metadata=own, tensors=_named(tensors))


def words_file(file: GGUFFile) -> GGUFFile:
    """The header of the decoder, whose layers are divided in two (`read_words`)."""
    header = Header(file, ARCHITECTURE)
    tensors: dict[str, TensorInfo] = {}
    for name, info in file.tensors.items():
        if name.startswith(EARS):
            continue
        block, number, rest = name.split(".", 2) if name.count(".") > 2 else ("", "", "")
        if block != "blk" or not number.isdecimal():
            tensors[name] = info
            continue
        across = rest.startswith("cross_")
        half = 2 * int(number[:6]) + (across or rest.startswith("ffn"))
        tensors[f"blk.{half}.{rest.removeprefix('cross_') if across else rest}"] = info
    layers = {f"{ARCHITECTURE}.block_count": 2 * header.count("block_count", "layers")}
    return replace(file, metadata=file.metadata | layers, tensors=_named(tensors))


def _read_ears(file: GGUFFile) -> ModelSpec:
    ears = ears_file(file)
    if "token_embd.weight" not in ears.tensors:
        raise ModelFormatError(f"{file.path}: has no {EARS}position_embd.weight")
    spec = read_fallback(Header(ears, ARCHITECTURE))
    own = Attention(spec.heads, spec.heads, spec.head_dim, spec.head_dim**-0.5, biases=_BIASES, causal=False)
    layer = (Block("attn_norm", own, norm_bias=True), _dense(spec))
    network = Network(
        spec.hidden, spec.vocab, (layer,) * spec.layers, norm="layer", norm_eps=spec.norm_eps, output_norm_bias=True,
        encoder_norm=True,
    )  # fmt: skip
    return _checked(ears, spec, network)


def _dense(spec: ModelSpec) -> Block:
    return Block("ffn_norm", Dense(spec.ffn, "gelu_erf", gated=False, biases=_BIASES), norm_bias=True)


def _checked(file: GGUFFile, spec: ModelSpec, network: Network) -> ModelSpec:
    if spec.hidden != spec.heads * spec.head_dim:
        raise ModelFormatError(f"{file.path}: {spec.heads} heads of {spec.head_dim} for {spec.hidden} values")
    spec = replace(spec, network=network, layer_values=())
    try:
        find_tensors(file, spec)
    except UnsupportedError as error:  # which advises another engine
        raise ModelFormatError(f"{file.path}: {str(error).split(':')[0]}") from None
    return spec


def _named(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name: replace(info, name=name) for name, info in tensors.items()}


def _check(file: GGUFFile, name: str, shape: tuple[int, ...]) -> None:
    found = file.tensors.get(name)
    if found is None or found.shape != shape:
        said = "is missing" if found is None else f"has shape {found.shape} instead of {shape}"
        raise ModelFormatError(f"{file.path}: {name} {said}")


def _control_tokens(file: GGUFFile) -> dict[str, int]:
    """Ids of tokens such as <|en|> or <|0.02|>, by their texts, in order."""
    key = "tokenizer.ggml.tokens"
    if not isinstance(file.metadata.get(key), ArrayRef):
        raise ModelFormatError(f"{file.path}: {key} is missing")
    return {
        text: number for number, text in enumerate(file.strings(key)) if text.startswith("<|") and text.endswith("|>")
    }


def _alignment(file: GGUFFile, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """The heads that the file names; else all of the upper half of the layers, as openai-whisper takes them."""
    key = f"{ARCHITECTURE}.{ALIGNMENT}"
    if not isinstance(file.metadata.get(key), ArrayRef):
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    pairs = np.asarray(file.numbers(key))
    if pairs.size % 2 or not pairs.size or (pairs < 0).any() or (pairs.reshape(-1, 2) >= (layers, heads)).any():
        raise ModelFormatError(f"{file.path}: {key} names heads that do not exist")
    return tuple((int(layer), int(head)) for layer, head in pairs.reshape(-1, 2))
