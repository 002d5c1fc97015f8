"""Convert a Hugging Face folder into a GGUF file of its own float types: config.json, safetensors, tokenizer, chat
template.

Matrices keep their type (float32, float16, bfloat16); vectors become float32, which all readers of GGUF require.
Memory holds one tensor at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from reprlib import repr as brief

import numpy as np

from edge.converters.huggingface.architectures import of_config
from edge.converters.huggingface.architectures.common import Architecture, Layout, Sizes
from edge.converters.huggingface.architectures.rope import kept_fields, rope_tensors
from edge.converters.huggingface.checkpoint import CheckpointTensor, read_checkpoint
from edge.converters.huggingface.config import Config, read_config
from edge.converters.huggingface.fused import part as part_fused
from edge.converters.huggingface.layout import is_finite, to_gguf, to_kind
from edge.converters.huggingface.quantized import Packed, find_packed
from edge.converters.huggingface.tokenizer import read_vocabulary
from edge.devices.output import new_file
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import FILE_TYPES, FLOATS
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf, write_outline
from edge.formats.json_file import shown
from edge.model.reader import read_spec
from edge.model.tokenizer import Tokenizer
from edge.types import AnyArray

_ROOTS = ("", "model.", "transformer.", "language_model.model.", "model.language_model.")
_HEADS = ("lm_head", "language_model.lm_head")
# Tensors of checkpoints beside the text model's weights.
_OTHERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


@dataclass(frozen=True)
class ImportedTensor:
    """A tensor of the GGUF file and its source."""

    planned: Planned
    source: CheckpointTensor
    layout: Layout
    heads: int

    def data(self) -> AnyArray:
        """The tensor in GGUF's layout. Raises ModelFormatError for values that are not finite."""
        kind, wanted = self.source.dtype, self.planned.type
        if wanted not in FLOATS and isinstance(self.source, Packed):
            return to_gguf(self.source.read_blocks(), self.layout, self.heads)
        array = self.source.read()
        where = f"{self.source.path}: {self.source.name}"
        if not is_finite(array, kind):
            raise ModelFormatError(f"{where} has values that are no numbers, or infinite")
        return to_gguf(to_kind(array, kind, wanted, where), self.layout, self.heads)


@dataclass(frozen=True)
class Source:
    """An opened folder: the GGUF header and tensors that it becomes."""

    folder: Path
    architecture: Architecture
    fields: dict[str, Field]
    parts: list[ImportedTensor]
    factors: dict[str, AnyArray]  # of RoPE

    @property
    def planned(self) -> list[Planned]:
        """The tensors of the GGUF file, in order."""
        factors = [Planned(name, (array.size,), "F32") for name, array in self.factors.items()]
        return factors + [part.planned for part in self.parts]

    def data(self) -> Iterator[AnyArray]:
        yield from self.factors.values()
        for part in self.parts:
            yield part.data()


def is_folder(path: Path) -> bool:
    """Whether a path looks like a Hugging Face model."""
    return (path / "config.json").is_file()


def planned(folder: Path, *, type: str | None = None, blocks: bool = False) -> list[Planned]:
    """The tensors that `convert_folder` would write; no weights are read. Raises the same errors."""
    return open_folder(folder, type, blocks=blocks).planned


def outline_folder(folder: Path, path: Path, *, blocks: bool = False) -> GGUFFile:
    """The GGUF file that `convert_folder` would write, without weights, for inspection and plans. Raises the same
    errors."""
    source = open_folder(folder, blocks=blocks)
    return write_outline(path, source.fields, source.planned)


def convert_folder(
    folder: Path,
    target: Path,
    *,
    progress: Callable[[float], None] | None = None,
    type: str | None = None,
    blocks: bool = False,
) -> None:
    """Write the GGUF file, atomically.

    type: F32, F16 or BF16 for all matrices; default: each keeps its own, and quantized ones become float16.
    blocks: quantized matrices keep their values, in Q4_0 or Q4_1, where these types can hold them.
    Raises InputError if files are missing or the target cannot be written, ModelFormatError if they are damaged or
    contradict each other, UnsupportedError for unknown architectures, tokenizers and quantizations.
    """
    source = open_folder(folder, type, blocks=blocks)
    with new_file(target) as temporary:
        write_gguf(temporary, source.fields, source.planned, source.data(), progress)
        try:
            file = read_gguf(temporary)
            read_spec(file)
            Tokenizer(file)
        except EdgeError as error:
            message = str(error).removeprefix(f"{temporary}: ")
            raise ModelFormatError(f"{folder}: as GGUF, it would not be readable: {message}") from None


def open_folder(folder: Path, type: str | None = None, *, blocks: bool = False) -> Source:
    """Read a folder's headers, not its weights. Raises the errors of `convert_folder`."""
    if type not in (None, *FLOATS):
        raise InputError(f"a folder is read into {', '.join(FLOATS)}, not {brief(type)}")
    whole = read_config(folder)
    architecture, config = of_config(whole)
    for part in (whole, config):
        if part.values.get("is_causal", True) is not True:  # null is a no as well
            raise UnsupportedError(f"{part.path}: is_causal is not true: the model cannot generate text")
    sizes = architecture.sizes(config)
    _check_sizes(config, sizes)
    fields: dict[str, Field] = {"general.architecture": architecture.name, "general.type": "model"}
    said = architecture.fields(config, sizes)
    factors: dict[str, AnyArray] = {}
    if architecture.rope:
        rope = architecture.rope(config)
        factors = dict(rope_tensors(rope, sizes))
        said_besides = kept_fields(rope)
    else:
        said_besides = {}
    tensors = read_checkpoint(folder)
    packed = find_packed(tensors, whole)
    apart = part_fused({**tensors, **packed}, architecture.fused)
    parts = _parts(folder, architecture, config, sizes, apart, type)
    if blocks:
        parts = [_as_blocks(part) for part in parts]
    vocabulary = read_vocabulary(folder, whole, sizes.vocab)
    fields["general.name"] = _name(folder, vocabulary.swallows)
    fields["general.file_type"] = np.uint32(FILE_TYPES[_main_type(parts)])
    fields["general.quantization_version"] = np.uint32(2)
    fields |= {f"{architecture.name}.{key}": value for key, value in said.items()} | said_besides
    return Source(folder, architecture, fields | vocabulary.fields, parts, factors)


def _check_sizes(config: Config, sizes: Sizes) -> None:
    if sizes.heads % sizes.kv_heads:
        raise ModelFormatError(f"{config.path}: {sizes.heads} heads cannot share {sizes.kv_heads} KV heads")
    if sizes.head_dim % 2:
        raise ModelFormatError(f"{config.path}: heads of {sizes.head_dim} values, an odd number")


def _parts(
    folder: Path,
    architecture: Architecture,
    config: Config,
    sizes: Sizes,
    tensors: dict[str, CheckpointTensor],
    kind: str | None,
) -> list[ImportedTensor]:
    """All tensors in GGUF's order; every tensor of the checkpoint must be accounted for."""
    root = _root(folder, architecture, tensors)
    parts, used = [], set[str]()
    for ours, theirs in _names(architecture, sizes.layers):
        stem, name = ours.rpartition(".")[2], root + theirs
        if stem == "output":
            name = next((head for head in _HEADS if f"{head}.weight" in tensors), theirs)
            head = tensors.get(f"{name}.weight")
            if _is_tied(architecture, config, has_head=head is not None):
                embedding = tensors[f"{root}{architecture.names['token_embd']}.weight"]
                if head is not None and not _equal(head, embedding):
                    raise ModelFormatError(
                        f"{config.path}: tie_word_embeddings says that {name}.weight is the embedding, but it differs"
                    )
                used.add(f"{name}.weight")
                continue
        for suffix in (".weight", ".bias"):
            source = tensors.get(name + suffix)
            if source is not None:
                used.add(name + suffix)
                parts.append(_part(architecture, sizes, ours + suffix, stem, source, kind))
            elif suffix == ".weight" or stem in architecture.biases:
                raise ModelFormatError(f"{folder}: the tensor {name}{suffix} is missing")
    if (odd := architecture.odd_bias((part.planned.name for part in parts), sizes.layers)) is not None:
        raise ModelFormatError(f"{folder}: a {architecture.name} model has biases of {odd} everywhere or nowhere")
    for key, group in architecture.maybe_biases.items():
        has_bias = any(part.planned.name.split(".")[-2:] == [stem, "bias"] for part in parts for stem in group)
        if has_bias != bool(config.get(key)):
            raise ModelFormatError(
                f"{config.path}: {key} is {brief(config.get(key))}, but there are {'' if has_bias else 'no '}biases"
            )
    for name, source in tensors.items():
        if name not in used and not name.startswith(_OTHERS) and not name.endswith(_BUFFERS):
            raise ModelFormatError(f"{source.path}: {shown(name)} is no tensor of a {architecture.name} model")
    return parts


def _names(architecture: Architecture, layers: int) -> Iterator[tuple[str, str]]:
    """GGUF's and Hugging Face's names of all modules: the embedding, layer by layer, the rest."""
    in_layers = [(ours, theirs) for ours, theirs in architecture.names.items() if "{}" in ours]
    others = [(ours, theirs) for ours, theirs in architecture.names.items() if "{}" not in ours]
    yield from (pair for pair in others if not pair[0].startswith("output"))
    for layer in range(layers):
        yield from ((ours.format(layer), theirs.format(layer)) for ours, theirs in in_layers)
    yield from (pair for pair in others if pair[0].startswith("output"))


def _root(folder: Path, architecture: Architecture, tensors: dict[str, CheckpointTensor]) -> str:
    embedding = architecture.names["token_embd"]
    for root in _ROOTS:
        if f"{root}{embedding}.weight" in tensors:
            return root
    raise ModelFormatError(f"{folder}: the tensor {architecture.root}{embedding}.weight is missing")


def _is_tied(architecture: Architecture, config: Config, *, has_head: bool) -> bool:
    """Whether the head is the embedding, which old files do not always say."""
    said = config.get("tie_word_embeddings")
    return bool(said) if said is not None else architecture.tied or not has_head


def _equal(head: CheckpointTensor, embedding: CheckpointTensor) -> bool:
    return (head.dtype, head.shape) == (embedding.dtype, embedding.shape) and bool(
        np.array_equal(head.read(), embedding.read())
    )


def _part(
    architecture: Architecture, sizes: Sizes, name: str, stem: str, source: CheckpointTensor, wanted: str | None
) -> ImportedTensor:
    shape = architecture.shape(stem, sizes)
    if name.endswith(".bias"):
        shape = shape[:1]
    layout = architecture.layouts.get(stem, "same")
    if layout == "transposed" and isinstance(source, Packed):
        layout = "same"  # packed layers have one layout for all architectures
    expected = shape[::-1] if layout == "transposed" else shape
    where = f"{source.path}: {source.name}"
    if source.shape != expected:
        raise ModelFormatError(f"{where} has shape {source.shape} instead of {expected}")
    if source.dtype not in FLOATS:
        raise UnsupportedError(f"{where} is of type {source.dtype}: only {', '.join(FLOATS)} are read")
    kind = "F32" if len(shape) == 1 else wanted or source.dtype
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(stem, 1)
    return ImportedTensor(Planned(name, shape[::-1], kind), source, layout, heads)


def _as_blocks(part: ImportedTensor) -> ImportedTensor:
    kind = part.source.block_type if isinstance(part.source, Packed) else None
    return part if kind is None else replace(part, planned=replace(part.planned, type=kind))


def _main_type(parts: list[ImportedTensor]) -> str:
    """The type of most values."""
    counts = Counter[str]()
    for part in parts:
        counts[part.planned.type] += prod(part.planned.shape)
    return max(counts, key=lambda kind: counts[kind])


def _name(folder: Path, swallows: bool) -> str:
    """The folder's name, changed to contain `phi-3` if and only if control tokens absorb spaces: readers of GGUF rely
    on that."""
    name = "".join(filter(str.isprintable, folder.resolve().name))[:90] or "model"
    claims = "phi-3" in name.lower() or "phi3" in name.lower()
    if swallows and not claims:
        return f"{name} (Phi-3)"
    return name.lower().replace("phi3", "phi 3").replace("phi-3", "phi 3") if claims and not swallows else name
