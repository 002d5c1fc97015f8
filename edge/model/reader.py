"""Reader of ModelSpec, a model's architecture as data, from a checked GGUF header."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.model.architectures import find_network
from edge.model.cores import NextToken
from edge.model.structure.fallback import ENCODERS, check_types, is_dense, make_spec, read_fallback, read_sizes
from edge.model.structure.layers import Block, is_behind
from edge.model.structure.mtp import ASSISTANT, EAGLE, SHARED, mtp_file, without_mtp
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.values import brief

# llama.cpp has three times as many, but aborts the process if figures of a header contradict each other. For these
# decoders, fuzzing has shown that a file which passes the checks below also runs. To add one, add its name, and run
# some thousand mutants of a small model, as `test_fuzz_engine.py` does. For all others, `fallback.py` counts figures
# from tensors, and llama.cpp first tries the header in a process of its own.
ARCHITECTURES = {
    "apertus", "arcee", "baichuan", "bitnet", "bloom", "chatglm", "codeshell", "command-r", "ernie4_5", "exaone",
    "exaone4", "falcon", "gemma", "gemma2", "gemma3", "gpt2", "gptneox", "granite", "hunyuan-dense", "internlm2",
    "jais", "llama", "maincoder", "minicpm", "mistral3", "mpt", "nemotron", "olmo", "olmo2", "orion", "phi2", "phi3",
    "plamo", "qwen2", "qwen3", "refact", "seed_oss", "smollm3", "stablelm", "starcoder", "starcoder2", "xverse",
}  # fmt: skip
HEARS = "whisper"  # the architecture of models that hear
_PARTIAL_ROPE = {"chatglm", "gptneox", "nemotron", "phi2", "phi3", "stablelm"}  # these may rotate a part of each head
_SLIDING_PERIOD = {"gemma2": 2, "gemma3": 6, "olmo2": 4}  # with a sliding window: every n-th layer has full attention
ENCODER = "clip"  # the architecture of mmproj files (`towers/mmproj.py`)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


def read_spec(file: GGUFFile) -> ModelSpec:
    """The architecture of a GGUF file, with every figure checked against its tensors.

    Raises ModelFormatError if figures are missing, impossible or contradict the tensors; UnsupportedError for adapters,
    models that read no text, and architectures, encoders or settings that edge does not support.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFormatError(f"{file.path}: general.architecture is missing: this is not a model")
    if file.metadata.get("general.type") == "adapter":
        raise UnsupportedError(f"{file.path}: an adapter, not a model: run its model with --lora {file.path}")
    if architecture == ASSISTANT:
        raise UnsupportedError(f"{file.path}: drafts for Gemma 4, and runs with it alone: --draft {file.path}")
    if architecture == ENCODER:
        raise UnsupportedError(
            f"{file.path}: an encoder of pictures or sounds, not a model: it belongs beside its model's file"
        )
    if architecture == HEARS:
        from edge.model.whisper import read_whisper  # here: few models are of this kind

        found = read_whisper(file)
        return replace(found.spec, ears=found.ears)
    if architecture == EAGLE:
        raise UnsupportedError(f"{file.path}: an EAGLE-3 head, which drafts beside its model: --draft {file.path}")
    if not _NAME.fullmatch(architecture):
        raise UnsupportedError(f"{file.path}: the architecture {brief(architecture)} is not supported yet")
    if "token_embd.weight" not in file.tensors and architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: the architecture {architecture} has no token_embd.weight: it reads no text"
        )
    if "token_embd.weight" not in file.tensors:
        raise ModelFormatError(f"{file.path}: has no token_embd.weight: a vocabulary or adapter, not a whole model")

    proven = architecture in ARCHITECTURES and is_dense(Header(file, architecture))
    whole, file = file, without_mtp(file)
    header = Header(file, architecture)
    if not proven:
        return _with_mtp(whole, _with_network(header, read_fallback(header)))
    hidden, layers = read_sizes(header)
    vocab = file.tensors["token_embd.weight"].shape[1]
    heads = header.count("attention.head_count", "heads")
    kv_heads = header.count("attention.head_count_kv", "heads", default=heads)
    if heads % kv_heads:
        raise ModelFormatError(f"{file.path}: {heads} heads cannot share {kv_heads} KV heads")
    head_dim = header.count("attention.key_length", "head_dim", default=hidden // heads)
    value_dim = header.count("attention.value_length", "head_dim", default=hidden // heads)
    if file.metadata.get(f"{architecture}.vocab_size", vocab) != vocab:
        raise ModelFormatError(f"{file.path}: vocab_size differs from the rows of token_embd.weight ({vocab})")

    ffn = header.count("feed_forward_length", "ffn", default=4 * hidden)
    rope_dim = header.count("rope.dimension_count", "head_dim", default=head_dim)
    if rope_dim % 2 or rope_dim > head_dim or (rope_dim < head_dim and architecture not in _PARTIAL_ROPE):
        raise ModelFormatError(f"{file.path}: rope.dimension_count is {rope_dim}, but heads have {head_dim} values")
    _check_hyperparameters(header, layers)
    check_types(file, 2)
    queries, keys, values = heads * head_dim, kv_heads * head_dim, kv_heads * value_dim
    shapes = {
        "output_norm": (hidden,),
        "output": (hidden, vocab),
        "rope_freqs": (rope_dim // 2,),
        "attn_norm": (hidden,),
        "attn_q": (hidden, queries),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, values),
        "attn_qkv": (hidden, queries + keys + values),
        "attn_output": (heads * value_dim, hidden),
        "ffn_norm": (hidden,),
        "ffn_down": (ffn, hidden),
    }
    if "blk.0.ffn_gate.weight" in file.tensors:  # else ffn_up may hold the gate as well
        shapes |= {"ffn_gate": (hidden, ffn), "ffn_up": (hidden, ffn)}
    _check_shapes(file, layers, shapes)

    spec = make_spec(
        header,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        rope_dim=rope_dim,
        window=header.count("attention.sliding_window", "context") if header.value("attention.sliding_window") else 0,
    )
    network = find_network(header, spec)
    return replace(spec, network=network, layer_values=() if network else (2 * keys,) * layers)


def _with_network(header: Header, spec: ModelSpec) -> ModelSpec:
    """The spec of a model that llama.cpp can run, with its layers if our own engines know the architecture."""
    if spec.architecture in ENCODERS:  # llama.cpp runs them, but edge's llama.cpp engine does not
        return replace(spec, network=find_network(header, spec))
    with suppress(UnsupportedError):
        return replace(spec, network=find_network(header, spec))
    return spec


def _with_mtp(file: GGUFFile, spec: ModelSpec) -> ModelSpec:
    """Add the spec of the layer for multi-token prediction, if the file has one that our engines can run."""
    with suppress(UnsupportedError, ModelFormatError):
        if spec.network and (layer := mtp_file(file)):
            found = _with_network(Header(layer, spec.architecture), read_fallback(Header(layer, spec.architecture)))
            if found.network is None:
                return spec
            blocks = (Block("", NextToken(spec.hidden), replaces=True), *found.network.layers[0])
            found = replace(found, network=replace(found.network, layers=(blocks,)))
            find_tensors(layer, found)  # which checks shapes
            sizes = Counter(dict(found.type_bytes))
            for info in filter(None, (layer.tensors.get(f"{name}.weight") for name in SHARED)):
                sizes[info.type] -= info.nbytes
            own = tuple((name, size) for name, size in sizes.items() if size)
            return replace(spec, mtp=replace(found, type_bytes=own, mtp_of=spec))
    return spec


def _check_hyperparameters(header: Header, layers: int) -> None:
    """Refuse settings that the plan does not account for, and those that make llama.cpp abort."""
    file, architecture = header.file, header.architecture
    prefix = f"{architecture}."
    ours = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    scaling = ours.get("rope.scaling.type", "none")
    if scaling not in _ROPE_SCALINGS:
        raise UnsupportedError(f"{file.path}: RoPE scaling {brief(scaling)} is not one of {', '.join(_ROPE_SCALINGS)}")
    if architecture == "gemma2" or (architecture in _SLIDING_PERIOD and "attention.sliding_window" in ours):
        period = ours.get("attention.sliding_window_pattern", _SLIDING_PERIOD[architecture])
        if not isinstance(period, int) or not 2 <= period <= layers:
            raise ModelFormatError(f"{file.path}: every {brief(period)}th of {layers} layers is to have full attention")


def _check_shapes(file: GGUFFile, layers: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that every layer has attention, that no tensor belongs to another layer or to a matrix that is missing, and
    that tensors have their `shapes`."""
    for layer in range(layers):
        missing = [name for name in ("attn_q", "attn_k", "attn_v") if f"blk.{layer}.{name}.weight" not in file.tensors]
        if missing and f"blk.{layer}.attn_qkv.weight" not in file.tensors:
            raise ModelFormatError(f"{file.path}: layer {layer} of {layers} has no {missing[0]}.weight")
    numbers = {str(layer) for layer in range(layers)}
    for name, tensor in file.tensors.items():
        *place, stem, kind = ["", "", *name.split(".")]
        if "blk" in place and not (place[-1] in numbers and place[-2] == "blk"):
            raise ModelFormatError(f"{file.path}: {name} belongs to none of {layers} layers")
        whole = f"{name.removesuffix(kind)}weight"
        if kind != "weight" and whole not in file.tensors:
            raise ModelFormatError(f"{file.path}: {name} belongs to {whole}, which is missing")
        shape = () if is_behind(name) else shapes.get(stem, ())
        if kind == "bias":
            shape = shape[-1:]
        if shape and kind in ("weight", "bias") and tensor.shape != shape:
            raise ModelFormatError(f"{file.path}: {name} has shape {tensor.shape} instead of {shape}")
