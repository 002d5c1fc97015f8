"""Convert a Hugging Face folder into a GGUF file of its own float types: config.json, safetensors, tokenizer, chat
template.

Matrices keep their type (float32, float16, bfloat16); vectors become float32, which all readers of GGUF require.
Memory holds one tensor at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np

from edge.converters.huggingface.architectures import of_config
from edge.converters.huggingface.architectures.common import Architecture, Layout, Sizes
from edge.converters.huggingface.architectures.rope import kept_fields, rope_dimensions, rope_fields, rope_tensors
from edge.converters.huggingface.architectures.settings import header_fields
from edge.converters.huggingface.checkpoint import BlockTensor, CheckpointTensor, Loss, read_checkpoint
from edge.converters.huggingface.config import Config, read_config
from edge.converters.huggingface.layout import is_finite, to_gguf, to_kind
from edge.converters.huggingface.pooling import dense_layers, pooling_fields, prompt_fields
from edge.converters.huggingface.quantized.find import find_quantized
from edge.converters.huggingface.quantized.floats import Factor, Fp4, Mxfp4
from edge.converters.huggingface.quantized.matrix import Quantized
from edge.converters.huggingface.tokenizer import read_vocabulary
from edge.converters.huggingface.views import Tensors
from edge.devices.output import new_file, work_folder
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import FILE_TYPES, FLOATS, UNNAMED_FILE_TYPE
from edge.formats.gguf import FACTORED, GGUFFile, TensorInfo, factor_name, read_gguf
from edge.formats.gguf_writer import Field, Planned, write_gguf, write_outline
from edge.formats.json_file import shown
from edge.model.cores import Tensor
from edge.model.drafters.assistant import is_assistant, read_assistant
from edge.model.layout import network_of, stored_tensors
from edge.model.model import make_tokenizer
from edge.model.reader import read_spec
from edge.model.structure.layers import is_behind
from edge.types import AnyArray
from edge.values import brief

_ROOTS = (
    "", "model.", "transformer.", "language_model.model.", "model.language_model.", "model.text_model.", "text_model.",
    "backbone.", "bert.", "roberta.",
)  # fmt: skip
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Tensors of checkpoints beside the text model's weights: of what sees or hears, and of heads.
_OTHERS = (
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    *("visual.", "model.visual.", "vision_model.", "model.vision_model.", "connector.", "model.connector."),
    *("audio_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    "mtp.",
    *("pooler.", "bert.pooler.", "roberta.pooler.", "cls.", "lm_head."),
)
_BUFFERS = ("embeddings.position_ids", ".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_BARE = "bare.gguf"


@dataclass(frozen=True)
class ImportedTensor:
    """A tensor of the GGUF file and its source."""

    planned: Planned
    source: CheckpointTensor
    layout: Layout
    heads: int
    exact: bool  # always F32
    loss: Loss = field(default_factory=Loss, compare=False)  # of blocks, once `data` was called

    def data(self) -> AnyArray:
        """The tensor in GGUF's layout. Raises ModelFormatError for values that are not finite."""
        kind, wanted = self.source.dtype, self.planned.type
        if wanted == FACTORED and isinstance(self.source, Fp4):
            return to_gguf(self.source.nvfp4_blocks(), self.layout, self.heads)
        if wanted not in FLOATS and isinstance(self.source, BlockTensor):
            data, loss = self.source.read_blocks()
            self.loss.error, self.loss.square = loss.error, loss.square
            return to_gguf(data, self.layout, self.heads)
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
    arrays: dict[str, AnyArray]  # vectors made here: RoPE's factors, tokens by centroid

    @property
    def planned(self) -> list[Planned]:
        """The tensors of the GGUF file, in order."""
        types = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
        made = [Planned(name, (array.size,), types[array.dtype]) for name, array in self.arrays.items()]
        return made + [part.planned for part in self.parts]

    def data(self) -> Iterator[AnyArray]:
        yield from self.arrays.values()
        for part in self.parts:
            yield part.data()

    def notes(self) -> list[str]:
        """A line for each format of quantized matrices: the blocks that they became, and the loss."""
        groups: dict[tuple[str, str], list[Loss]] = {}
        for part in self.parts:
            if isinstance(part.source, BlockTensor) and part.source.format:
                groups.setdefault((part.source.format, part.planned.type), []).append(part.loss)
        lines = []
        for (name, kind), losses in groups.items():
            lost = max(loss.relative for loss in losses)
            how = f"an error of {sum(losses, Loss()).relative:.2g} of the values, at most {lost:.2g} in a matrix"
            kept = "dequantized" if kind in FLOATS else how if lost else "the same values"
            lines.append(f"{len(losses)} matrices of {name} became {kind}: {kept}")
        return lines


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
    name: str | None = None,
) -> list[str]:
    """Write the GGUF file, atomically. Returns lines on quantized matrices, for people.

    type: F32, F16 or BF16 for all matrices; default: each keeps its own, and quantized ones become float16.
    blocks: quantized matrices become blocks, which keep their values where there is such a type, and else are Q8_0.
    name: the model's; default: the folder's.
    Raises InputError if files are missing or the target cannot be written, ModelFormatError if they are damaged or
    contradict each other, UnsupportedError for unknown architectures, tokenizers and quantizations.
    """
    source = open_folder(folder, type, blocks=blocks, name=name)
    with new_file(target) as temporary:
        write_gguf(temporary, source.fields, source.planned, source.data(), progress)
        try:
            file = read_gguf(temporary)
            read_assistant(file) if is_assistant(file) else read_spec(file)
            make_tokenizer(file)
        except EdgeError as error:
            message = str(error).removeprefix(f"{temporary}: ")
            raise ModelFormatError(f"{folder}: as GGUF, it would not be readable: {message}") from None
    return source.notes()


def open_folder(folder: Path, type: str | None = None, *, blocks: bool = False, name: str | None = None) -> Source:
    """Read a folder's headers, not its weights. Raises the errors of `convert_folder`."""
    if type not in (None, *FLOATS):
        raise InputError(f"a folder is read into {', '.join(FLOATS)}, not {brief(type)}")
    whole = read_config(folder)
    architecture, config = of_config(whole)
    for part in (whole, config):
        if part.values.get("is_causal", True) is not True:  # null means false, too
            raise UnsupportedError(f"{part.path}: is_causal is not true: the model cannot generate text")
    fields, sizes, rope = read_header(architecture, config)
    dense, sizes_of_dense = dense_layers(folder)
    fields |= pooling_fields(folder) | prompt_fields(folder) | sizes_of_dense
    arrays, tensors = rope_tensors(rope, sizes) if rope else {}, read_checkpoint(folder)
    arrays |= architecture.arrays(tensors)
    packed = find_quantized(tensors, whole)
    apart = architecture.prepare({**tensors, **packed}, config)
    root = _root(folder, architecture, apart)
    names = _names(architecture, sizes, root, apart) | {name: name for name in dense}
    apart |= dense
    if tied := _is_tied(architecture, config, has_head="output.weight" in names):
        _check_head(config, names.pop("output.weight", None), names["token_embd.weight"], apart)
    else:
        names.setdefault("output.weight", _HEADS[0])
    parts = []
    for ours, (shape, tensor) in _expected(architecture, config, fields, {*names, *arrays}).items():
        theirs = names.get(ours) or _theirs(architecture, root, ours)
        if theirs not in apart:
            if theirs.endswith(".bias"):
                _check_biases(folder, architecture, config, sizes, names)
            raise ModelFormatError(f"{folder}: the tensor {theirs} is missing")
        parts.append(_part(architecture, sizes, ours, shape, tensor, apart[theirs], type))
    used = {names.get(part.planned.name) for part in parts} | ({*_HEADS} if tied else set())
    _check_biases(folder, architecture, config, sizes, names)
    for theirs, source in apart.items():
        if theirs not in used and not theirs.startswith(_OTHERS) and not theirs.endswith(_BUFFERS):
            raise ModelFormatError(f"{source.path}: {shown(theirs)} is no tensor of a {architecture.name} model")
    if blocks and type is None:
        parts = [each for part in parts for each in _as_blocks(part)]
    vocabulary = read_vocabulary(folder, whole, sizes.vocab)
    header: dict[str, Field] = {
        "general.architecture": architecture.name,
        "general.type": "model",
        "general.name": _name(name or folder.resolve().name, vocabulary.swallows),
        "general.file_type": np.uint32(FILE_TYPES.get(_main_type(parts), UNNAMED_FILE_TYPE)),
        "general.quantization_version": np.uint32(2),
    }
    header |= _prefixed(architecture, fields) | (kept_fields(rope) if rope else {})
    return Source(folder, architecture, header | vocabulary.fields, parts, arrays)


def read_header(architecture: Architecture, config: Config) -> tuple[dict[str, Field], Sizes, Config | None]:
    """Fields without the architecture's prefix, sizes, and RoPE's settings."""
    fields = header_fields(architecture.settings, config)
    sizes = Sizes.of_fields(fields)
    if sizes.heads % sizes.kv_heads:
        raise ModelFormatError(f"{config.path}: {sizes.heads} heads cannot share {sizes.kv_heads} KV heads")
    if sizes.head_dim % 2:
        raise ModelFormatError(f"{config.path}: heads of {sizes.head_dim} values, an odd number")
    rope = architecture.rope(config) if architecture.rope else None
    if rope:
        if not architecture.partial_rope:
            rope.must_be("partial_rotary_factor", 1.0)
        fields |= rope_fields(rope, sizes, bounds=architecture.yarn_bounds)
        fields["rope.dimension_count"] = np.uint32(rope_dimensions(rope, sizes))
    fields |= architecture.others(config, sizes)
    return fields, sizes, rope


def _prefixed(architecture: Architecture, fields: Mapping[str, Field]) -> dict[str, Field]:
    """The fields with the architecture's prefix, except those of the tokenizer."""
    named = {key: key if key.startswith("tokenizer.") else f"{architecture.name}.{key}" for key in fields}
    return {named[key]: value for key, value in fields.items()}


def _names(architecture: Architecture, sizes: Sizes, root: str, tensors: Tensors) -> dict[str, str]:
    """The names of the checkpoint's tensors that the architecture knows, by GGUF's names."""
    modules = [f"{stem}.{suffix}" for stem in architecture.names for suffix in ("weight", "bias")]
    found = {}
    for name in [*modules, *architecture.parameters]:
        for ours in [name.format(layer) for layer in range(sizes.layers)] if "{}" in name else [name]:
            heads = _HEADS if ours == "output.weight" else ()
            theirs = next((each for each in (*heads, _theirs(architecture, root, ours)) if each in tensors), None)
            if theirs is not None:
                found[ours] = theirs
    return found


def _theirs(architecture: Architecture, root: str, ours: str) -> str:
    theirs = architecture.theirs(ours)
    return ours if theirs is None else theirs if theirs in _HEADS else root + theirs


def _expected(
    architecture: Architecture, config: Config, fields: dict[str, Field], names: Set[str]
) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """The tensors of the header's network, in the order of a pass: shapes in ggml's order, and descriptions.

    names: GGUF's names of the existing tensors. Raises ModelFormatError, UnsupportedError.
    """
    shape = tuple(int(np.max(fields[key])) for key in ("embedding_length", "vocab_size"))
    header: dict[str, Field] = {"general.architecture": architecture.name} | _prefixed(architecture, fields)
    always = {f"blk.0.{stem}.bias" for stem in architecture.biases if f"blk.{{}}.{stem}" in architecture.names}
    always |= {f"{stem}.bias" for stem in architecture.biases if stem in architecture.names}
    try:
        with work_folder() as work:
            bare = write_outline(work / _BARE, header, [Planned("token_embd.weight", shape, "F32")])
            dummies = {name: TensorInfo(name, (1,), "F32", 0, 0, 4) for name in {*names, *always} - {*bare.tensors}}
            _, network = network_of(replace(bare, tensors=bare.tensors | dummies))
    except EdgeError as error:
        raise type(error)(re.sub(rf"^\S*{_BARE}", str(config.path), str(error))) from None
    if network is None:
        raise UnsupportedError(f"{config.path}: {architecture.name} models run on llama.cpp only")
    stems = {re.sub(r"^blk\.\d+\.", "", name) for name in names}
    return {name: (shape, tensor) for name, shape, tensor in stored_tensors(network, stems)}


def _check_biases(
    folder: Path, architecture: Architecture, config: Config, sizes: Sizes, names: Mapping[str, str]
) -> None:
    """Check that biases are in all layers or none, and as config.json says. Raises ModelFormatError."""
    own = [name for name in names if not is_behind(name)]
    found = [name for name in own if re.sub(r"\d+", "{}", name, count=1) not in architecture.parameters]
    if (odd := architecture.odd_bias(found, sizes.layers)) is not None:
        raise ModelFormatError(f"{folder}: a {architecture.name} model has biases of {odd} everywhere or nowhere")
    for key, group in architecture.maybe_biases.items():
        has_bias = any(name.split(".")[-2:] == [stem, "bias"] for name in found for stem in group)
        if has_bias != bool(config.get(key)):
            raise ModelFormatError(
                f"{config.path}: {key} is {brief(config.get(key))}, but there are {'' if has_bias else 'no '}biases"
            )


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


def _check_head(config: Config, head: str | None, embedding: str, tensors: Tensors) -> None:
    """Check that a stored head equals the embedding, as config.json claims. Raises ModelFormatError."""
    if head is None:
        return
    one, other = tensors[head], tensors[embedding]
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not np.array_equal(one.read(), other.read()):
        raise ModelFormatError(f"{config.path}: tie_word_embeddings says that {head} is the embedding, but it differs")


def _part(
    architecture: Architecture, sizes: Sizes, name: str, ggml_shape: tuple[int, ...], tensor: Tensor,
    source: CheckpointTensor, wanted: str | None,
) -> ImportedTensor:  # fmt: skip
    stem, shape = name.split(".")[-2], ggml_shape[::-1]
    layout = architecture.layout(name)
    if layout == "transposed" and isinstance(source, Quantized):
        layout = "same"  # packed layers have one layout for all architectures
    expected = shape[::-1] if layout == "transposed" else shape
    if tensor.stored and not tensor.columns:
        expected = (tensor.rows,)
    where = f"{source.path}: {source.name}"
    if source.shape != expected:
        raise ModelFormatError(f"{where} has shape {source.shape} instead of {expected}")
    if source.dtype not in FLOATS:
        raise UnsupportedError(f"{where} is of type {source.dtype}: only {', '.join(FLOATS)} are read")
    kind = wanted or (source.block_type if isinstance(source, Mxfp4) else source.dtype)
    exact = not tensor.columns or tensor.exact or tensor.bits == "all"
    if exact:
        kind = "F32"
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(stem, 1)
    return ImportedTensor(Planned(name, ggml_shape, kind), source, layout, heads, exact)


def _as_blocks(part: ImportedTensor) -> list[ImportedTensor]:
    """The tensor in blocks, and the factor of one in NVFP4."""
    source, planned = part.source, part.planned
    if isinstance(source, Fp4) and source.is_nvfp4 and not part.exact:
        scale = Planned(factor_name(planned.name), (1,), "F32")
        factor = ImportedTensor(scale, Factor(source), "same", 1, True)
        return [replace(part, planned=replace(planned, type=FACTORED)), factor]
    kind = source.block_type if isinstance(source, BlockTensor) else None
    return [part if kind is None or part.exact else replace(part, planned=replace(planned, type=kind))]


def _main_type(parts: list[ImportedTensor]) -> str:
    """The type of most values."""
    counts = Counter[str]()
    for part in parts:
        counts[part.planned.type] += prod(part.planned.shape)
    return max(counts, key=lambda kind: counts[kind])


def _name(said: str, swallows: bool) -> str:
    """The model's name, changed to contain `phi-3` if and only if control tokens absorb spaces: readers of GGUF rely
    on that."""
    name = "".join(filter(str.isprintable, said))[:90] or "model"
    claims = "phi-3" in name.lower() or "phi3" in name.lower()
    if swallows and not claims:
        return f"{name} (Phi-3)"
    return name.lower().replace("phi3", "phi 3").replace("phi-3", "phi 3") if claims and not swallows else name
