"""mmproj files: encoders of pictures and sounds that llama.cpp keeps beside a model, as GGUF with the architecture
`clip`.

`view` shows the layers of such a file as a model of its own, by our names of tensors. Nothing in a file is trusted:
figures have bounds, shapes are checked, and a tensor that no part of the encoder reads refuses the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import prod

import numpy as np

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import ArrayRef, GGUFFile, TensorInfo
from edge.formats.gguf_fields import Header
from edge.model.reader import ENCODER
from edge.model.structure.fallback import check_types, count_tensors
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_tensors
from edge.records import dataclass
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray
from edge.values import brief

ARCHITECTURE = ENCODER
VISION, AUDIO = "vision", "audio"  # names of encoders in headers; their tensors begin with the first letter
_HEARS = ("a.", "mm.a.")  # beginnings of names of tensors of encoders of sounds
_NAMES = {  # of a layer's tensors, where ours differ
    "ln1": "attn_norm", "ln2": "ffn_norm", "attn_out": "attn_output", "attn_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm",
}  # fmt: skip
_LARGEST = {"patch": 256, "side": 1 << 14}  # pixels
_BLOCK = 1 << 18  # values of a matrix that are converted to floats at once
_CONTEXT = 1 << 17  # patches of a pass: no encoder has a limit of its own
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Mmproj:
    """The checked header of an encoder. patch, side, mean and std are those of pictures alone."""

    file: GGUFFile
    kind: str  # of the projector, by which a family is known
    name: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    eps: float
    patch: int  # pixels of a patch's side
    side: int  # pixels of the side of a picture or tile
    projected: int  # values of a row for the text model
    mean: tuple[float, ...]  # of the values of red, green, blue, which lie between 0 and 1
    std: tuple[float, ...]
    sense: str = VISION

    @property
    def header(self) -> Header:
        """Its fields, such as `vision.image_size`."""
        return Header(self.file, ARCHITECTURE)

    @cached_property
    def identity(self) -> str:
        """Differs between encoders, hexadecimal. Reads the file unless its hash is known."""
        return fingerprint(self.file.path).sha256

    def weights(self, name: str) -> FloatArray:
        """A tensor in float32, its dimensions the outermost first."""
        info = self.file.tensors[name]
        data = self.file.tensor_bytes(info).reshape(info.elements // info.shape[0], -1)
        return dequantize(data, info.type).reshape(info.shape[::-1])

    def linear(self, name: str, rows: FloatArray) -> FloatArray:
        """The product of rows [n, columns] with a matrix, or a convolution without overlap, and its bias if there is
        one."""
        info = self.file.tensors[f"{name}.weight"]
        data = self.file.tensor_bytes(info).reshape(info.elements // rows.shape[1], -1)
        product, step = np.empty((len(rows), len(data)), np.float32), max(1, _BLOCK // rows.shape[1])
        for start in range(0, len(data), step):  # a block's floats stay in the cache
            part = dequantize(data[start : start + step].reshape(-1, data.nbytes // info.rows), info.type)
            product[:, start : start + step] = rows @ part.reshape(-1, rows.shape[1]).T
        return np.asarray(product + self.weights(f"{name}.bias") if f"{name}.bias" in self.file.tensors else product)


def is_mmproj(file: GGUFFile) -> bool:
    return file.metadata.get("general.architecture") == ARCHITECTURE


def senses_of(file: GGUFFile) -> list[str]:
    """The encoders in an mmproj file: VISION, AUDIO, or both."""
    return [each for each in (VISION, AUDIO) if file.metadata.get(f"{ARCHITECTURE}.has_{each}_encoder") is True]


def read_mmproj(file: GGUFFile, sense: str = VISION) -> Mmproj:
    """Read the header of an encoder. Raises ModelFormatError, UnsupportedError for a file without one of this sense."""
    if not is_mmproj(file):
        raise ModelFormatError(f"{file.path}: not an encoder of pictures or sounds (mmproj)")
    header = Header(file, ARCHITECTURE)
    if sense not in senses_of(file):
        raise UnsupportedError(
            f"{file.path}: this encoder {'sees no pictures' if sense == VISION else 'hears nothing'}"
        )
    kind = header.value(f"{sense}.projector_type") or header.value("projector_type")
    if not isinstance(kind, str):
        raise ModelFormatError(f"{file.path}: clip.projector_type is missing")
    hidden, heads = (
        header.count(f"{sense}.embedding_length", "hidden"),
        header.count(f"{sense}.attention.head_count", "heads"),
    )
    patch, side = 1, 1
    if sense == VISION:
        sizes = zip(("patch_size", "image_size"), _LARGEST.values(), strict=True)
        patch, side = (_pixels(header, key, most) for key, most in sizes)
    if hidden % heads or side < patch:
        patches = f", patches of {patch} in {side} pixels" if sense == VISION else ""
        raise ModelFormatError(f"{file.path}: an encoder of {hidden} values in {heads} heads{patches}")
    return Mmproj(
        file, kind, "".join(filter(str.isprintable, str(file.metadata.get("general.name", file.path.stem))))[:100],
        hidden, header.count(f"{sense}.feed_forward_length", "ffn"), header.count(f"{sense}.block_count", "layers"),
        heads, header.positive(f"{sense}.attention.layer_norm_epsilon", 1e-6, below=1.0), patch, side,
        header.count(f"{sense}.projection_dim", "hidden"),
        _triple(header, "image_mean", (0.5,) * 3), _triple(header, "image_std", (0.5,) * 3), sense,
    )  # fmt: skip


def view(mmproj: Mmproj, network: Network, own: Mapping[str, tuple[int, ...]]) -> tuple[GGUFFile, ModelSpec]:
    """The layers as a model. own: the shapes of all other tensors, the outermost dimension first; files may
    lack those with a name in brackets. Raises ModelFormatError, UnsupportedError for unknown tensors."""
    file, tensors, rest = mmproj.file, dict[str, TensorInfo](), dict[str, TensorInfo]()
    own_letter = mmproj.sense[0]
    last_norm = f"{own_letter}.post_ln."
    for name, info in file.tensors.items():
        if name.startswith(f"{own_letter}.blk."):
            _, _, number, *stem = name.split(".")
            tensors[".".join(["blk", number, *_ours(stem)])] = info
        elif name.startswith(last_norm) and network.encoder_norm:
            tensors[name.replace(last_norm, "output_norm.", 1)] = info
        elif name.startswith(_HEARS) == (mmproj.sense == AUDIO):
            rest[name] = info
    _swap_old(tensors, mmproj)
    _check(file, rest, own)
    found = replace(file, tensors=tensors)
    check_types(found, 2)
    core = next(filter(None, network.attention))
    spec = ModelSpec(
        architecture=ARCHITECTURE, name=mmproj.name, layers=len(network.layers), hidden=network.hidden,
        heads=core.heads, kv_heads=core.kv_heads, head_dim=core.head_dim, ffn=mmproj.ffn, vocab=0, context=_CONTEXT,
        norm_eps=network.norm_eps, rope_base=core.rope.base, rope_dim=core.rope.dim, window=0, network=network,
        **count_tensors(found),
    )  # fmt: skip
    try:
        find_tensors(found, spec)
    except UnsupportedError as error:
        raise UnsupportedError(f"{file.path}: {str(error).split(': use')[0]}") from None
    return found, spec


def check_own(mmproj: Mmproj, own: Mapping[str, tuple[int, ...]]) -> None:
    """Check the tensors of an encoder whose layers no engine runs: as `view`."""
    tensors = {name: each for name, each in mmproj.file.tensors.items() if name.startswith(_HEARS)}
    check_types(replace(mmproj.file, tensors=tensors), 4)
    _check(mmproj.file, tensors, own)


def _ours(stem: list[str]) -> list[str]:
    return [_NAMES.get(stem[0], stem[0]), *stem[1:]] if stem else stem


def _swap_old(tensors: dict[str, TensorInfo], mmproj: Mmproj) -> None:
    """Old files name the two matrices of a feed-forward network the other way round."""
    for name in [name for name in tensors if name.endswith(".ffn_up.weight")]:
        if mmproj.ffn != mmproj.hidden and tensors[name].shape == (mmproj.ffn, mmproj.hidden):
            for kind in ("weight", "bias"):
                one = f"{name.removesuffix('.weight')}.{kind}"
                other = one.replace("ffn_up", "ffn_down")
                if one in tensors and other in tensors:
                    tensors[one], tensors[other] = tensors[other], tensors[one]


def _check(file: GGUFFile, rest: Mapping[str, TensorInfo], own: Mapping[str, tuple[int, ...]]) -> None:
    shapes = {name.strip("[]"): shape for name, shape in own.items()}
    if unknown := sorted(rest.keys() - shapes.keys()):
        raise UnsupportedError(f"{file.path}: edge does not know the tensor {unknown[0]} of this encoder")
    for name, shape in own.items():
        info = rest.get(name.strip("[]"))
        if info is None and not name.startswith("["):
            raise ModelFormatError(f"{file.path}: has no {name}")
        flat = tuple(each for each in shape[::-1] if each > 1)
        if info and (tuple(each for each in info.shape if each > 1) != flat or info.elements != prod(shape)):
            raise ModelFormatError(f"{file.path}: {info.name} has shape {info.shape} instead of {shape[::-1]}")


def _pixels(header: Header, key: str, most: int) -> int:
    value = header.value(f"vision.{key}")
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ModelFormatError(f"{header.file.path}: clip.vision.{key} is {brief(value)}: it must be from 1 to {most}")
    return value


def _triple(header: Header, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    name = f"{ARCHITECTURE}.vision.{key}"
    ref = header.file.metadata.get(name)
    if ref is None:
        return default
    values = (
        header.file.numbers(name).astype(np.float64)
        if isinstance(ref, ArrayRef) and ref.count == len(default)
        else None
    )
    if values is None or not np.isfinite(values).all() or (key == "image_std" and (values <= 0).any()):
        raise ModelFormatError(f"{header.file.path}: {name} must be {len(default)} numbers")
    return tuple(float(each) for each in values.tolist())
