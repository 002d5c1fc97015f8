"""LoRA adapters (arXiv:2106.09685) in GGUF: low-rank changes of a model's matrices, applied at run time.

For each changed matrix W, an adapter has A, `NAME.lora_a` [rank, columns of W], and B, `NAME.lora_b` [rows of W, rank].
The model then computes y = W x + scale · (alpha / rank) · B (A x).

Format: the adapters that llama.cpp's `convert_lora_to_gguf.py` writes. As in llama.cpp, an alpha of 0 stands for a
factor of 1, and the rank of each pair is its own. Adapters of type `dora`, edge's own, also have lengths,
`NAME.lora_magnitude` [rows], to which DoRA (arXiv:2402.09353) scales the rows of the changed matrix. They are merged
into the weights, not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from edge.devices.keys import key_of
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import PLAIN, dequantize
from edge.formats.gguf import GGUFFile, TensorInfo, read_gguf
from edge.model.adapters.lora_file import MAX_SCALE, LoraFile, LoraSize
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import JOINED, Source
from edge.records import dataclass
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray
from edge.values import brief

MAX_RANK = 1024  # of all adapters of a run together; real ones have 4 to 256
LORA, DORA = "lora", "dora"  # adapter.type
_A, _B, _LENGTHS = ".lora_a", ".lora_b", ".lora_magnitude"


@dataclass(frozen=True)
class Pair:
    """The matrices A and B for one matrix of the model, on disk."""

    a: TensorInfo
    b: TensorInfo
    lengths: TensorInfo | None = None  # DoRA's, of the rows

    @property
    def rank(self) -> int:
        return self.b.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter file with its header checked."""

    file: GGUFFile
    architecture: str
    name: str
    alpha: float
    pairs: dict[str, Pair]  # by the model's tensor
    kind: str = LORA

    @property
    def rank(self) -> int:
        """The largest rank of its pairs."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def parameters(self) -> int:
        return sum(info.elements for info in self.file.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.file.tensors.values())

    @cached_property
    def sha256(self) -> str:
        """The file's SHA-256, for which the whole file is read."""
        return fingerprint(self.file.path).sha256

    def factor(self, pair: Pair) -> float:
        return self.alpha / pair.rank if self.alpha else 1.0

    def read(self, info: TensorInfo) -> FloatArray:
        """Read a matrix, float32 [rows, columns]. Raises ModelFormatError for values that are not finite."""
        data = self.file.tensor_bytes(info).reshape(info.shape[1] if len(info.shape) > 1 else 1, -1)
        values = dequantize(data, info.type)
        if not np.isfinite(values).all():
            raise ModelFormatError(f"{self.file.path}: {info.name} has values that are not finite")
        return values

    def check_model(self, file: GGUFFile, spec: ModelSpec) -> None:
        """Raise InputError if the adapter belongs to another model."""
        path = self.file.path
        if self.architecture != spec.architecture:
            other = brief(self.architecture)
            raise InputError(f"{path}: an adapter of a model of type {other}, but this is {spec.architecture}")
        for name, pair in self.pairs.items():
            info = file.tensors.get(name)
            if info is None:
                raise InputError(f"{path}: changes {name}, which the model does not have: it belongs to another model")
            if len(info.shape) != 2 or (pair.a.shape[0], pair.b.shape[1]) != info.shape:
                raise InputError(
                    f"{path}: changes {name} of shape ({pair.a.shape[0]}, {pair.b.shape[1]}), but the model's has "
                    f"{info.shape}: it belongs to another model"
                )


def is_adapter(file: GGUFFile) -> bool:
    return file.metadata.get("general.type") == "adapter"


def read_adapter(path: Path) -> Adapter:
    """Read and check the header of an adapter.

    Raises ModelFormatError for damaged files and other kinds of file, UnsupportedError for other kinds of adapter,
    InputError for a folder.
    """
    if (path / "adapter_config.json").is_file():
        raise InputError(f"{path} is a PEFT adapter: edge convert {path} adapter.gguf --base MODEL makes a file of it")
    file = read_gguf(path)
    if not is_adapter(file):
        kind = file.metadata.get("general.type")
        raise ModelFormatError(f"{path}: not an adapter: general.type is {'missing' if kind is None else brief(kind)}")
    kind, architecture = (file.metadata.get(key) for key in ("adapter.type", "general.architecture"))
    if kind not in (LORA, DORA):
        raise UnsupportedError(f"{path}: an adapter of type {brief(kind)}: edge runs lora only")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFormatError(f"{path}: general.architecture is missing")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise UnsupportedError(f"{path}: an activated LoRA (aLoRA), which edge does not run")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha) or abs(alpha) > MAX_SCALE:
        raise ModelFormatError(f"{path}: adapter.lora.alpha is {brief(alpha)}, not a float within ±{MAX_SCALE:g}")
    name = str(file.metadata.get("general.name", path.stem))
    return Adapter(file, architecture, "".join(filter(str.isprintable, name))[:100], alpha, _find_pairs(file), kind)


def _find_pairs(file: GGUFFile) -> dict[str, Pair]:
    path, found = file.path, dict[str, dict[str, TensorInfo]]()
    parts = (_A, _B, _LENGTHS) if file.metadata.get("adapter.type") == DORA else (_A, _B)
    for name, info in file.tensors.items():
        suffix = next((part for part in parts if name.endswith(part)), "")
        changed = name.removesuffix(suffix)
        if not suffix:
            raise UnsupportedError(f"{path}: {name} is no part of a LoRA pair: edge does not run such adapters")
        if changed.startswith("token_embd") or not changed.endswith(".weight"):
            raise UnsupportedError(f"{path}: it changes {changed}: edge runs adapters of matrices in layers only")
        if len(info.shape) != (1 if suffix == _LENGTHS else 2):
            raise UnsupportedError(f"{path}: {name} has {len(info.shape)} dimensions")
        if info.type not in PLAIN:
            raise UnsupportedError(f"{path}: {name} is of type {info.type}: choose one of {', '.join(PLAIN)}")
        found.setdefault(changed, {})[suffix] = info
    if not found:
        raise ModelFormatError(f"{path}: an adapter without tensors")
    pairs: dict[str, Pair] = {}
    for changed, two in found.items():
        if not {_A, _B} <= two.keys():
            raise ModelFormatError(f"{path}: {changed} has only one of {_A} and {_B}")
        pairs[changed] = Pair(two[_A], two[_B], lengths := two.get(_LENGTHS))
        if lengths and lengths.shape[0] != two[_B].shape[1]:
            raise ModelFormatError(f"{path}: {lengths.name} has {lengths.shape[0]} rows: they must agree")
        if two[_A].shape[1] != two[_B].shape[0]:
            ranks = f"{two[_A].shape[1]} and {two[_B].shape[0]}"
            raise ModelFormatError(f"{path}: the matrices of {changed} have the ranks {ranks}: they must agree")
    return pairs


@dataclass(frozen=True)
class Lora:
    """The adapters of a run, checked against their model."""

    adapters: tuple[Adapter, ...]
    scales: tuple[float, ...]

    @cached_property
    def size(self) -> LoraSize:
        return _size_of(self.adapters)

    @cached_property
    def key(self) -> str:
        """A key of the adapters, made from the hashes of their files and their scales."""
        parts = [f"{adapter.sha256} {scale!r}" for adapter, scale in zip(self.adapters, self.scales, strict=True)]
        return key_of("\n".join(parts))

    def changes(self, source: Source) -> bool:
        """Whether an adapter changes the tensor of this source (from `find_tensors`)."""
        return any(source.tensor in adapter.pairs for adapter in self.adapters)

    def matrices(self, source: Source) -> tuple[FloatArray, FloatArray]:
        """The change of a matrix, with all factors in B: A float32 [ranks, columns], B float32 [rows, ranks].

        source: a matrix that some adapter changes; for a part of a fused matrix, B has the rows of that part. Raises
        ModelFormatError, also if factors make B's values infinite.
        """
        found = [
            _scaled(adapter, scale, pair, source)
            for adapter, scale in zip(self.adapters, self.scales, strict=True)
            if (pair := adapter.pairs.get(source.tensor))
        ]
        return np.concatenate([a for a, _ in found]), np.concatenate([b for _, b in found], axis=1)

    def merged(self, weights: FloatArray, source: Source) -> FloatArray:
        """A whole matrix with its changes, one adapter after the other, float32 [rows, columns]."""
        for adapter, scale in zip(self.adapters, self.scales, strict=True):
            if pair := adapter.pairs.get(source.tensor):
                a, b = _scaled(adapter, scale, pair, source)
                weights = weights + b @ a
                if pair.lengths:
                    lengths = adapter.read(pair.lengths).reshape(-1, 1)
                    weights = weights * (lengths / np.linalg.norm(weights, axis=1, keepdims=True))
        return weights


def _scaled(adapter: Adapter, scale: float, pair: Pair, source: Source) -> tuple[FloatArray, FloatArray]:
    """A and B for the rows of a source, with all factors in B. Raises ModelFormatError if they are too large."""
    rows = adapter.read(pair.b)[source.index]
    with np.errstate(over="ignore"):
        b = rows * np.float32(scale * adapter.factor(pair))
    if not np.isfinite(b).all():
        raise ModelFormatError(f"{adapter.file.path}: {pair.b.name} is too large for its scale: lower it")
    return adapter.read(pair.a), b


def adapted_values(spec: ModelSpec) -> int:
    """Values of A and B per rank, if all matrices of all layers are adapted."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = (spec.hidden + queries) * 2 + (spec.hidden + keys) * 2
    return spec.layers * (attention + 3 * (spec.hidden + spec.ffn))


def size_of(files: Iterable[LoraFile]) -> LoraSize:
    """The size of adapters, for plans, without their model. Raises ModelFormatError, UnsupportedError."""
    return _size_of([read_adapter(each.path) for each in files])


def open_lora(files: Sequence[LoraFile], file: GGUFFile, spec: ModelSpec, *, merging: bool = False) -> Lora | None:
    """Open adapters and check them against their model's header; matrices are read later. None if there are none.

    merging: they are merged into the weights, not run. Raises InputError for adapters of another model,
    ModelFormatError, UnsupportedError.
    """
    adapters = tuple(read_adapter(each.path) for each in files)
    for adapter in adapters:
        path, outside = adapter.file.path, next((name for name in adapter.pairs if not name.startswith("blk.")), "")
        if not merging and (outside or adapter.kind == DORA):
            why = f"it changes {outside}, outside of layers" if outside else "a DoRA adapter scales rows of weights"
            raise UnsupportedError(f"{path}: {why}: merge it with edge convert MODEL FILE --lora {path}")
        if not merging and (divided := next((name for name in adapter.pairs if name.endswith(f"{JOINED}.weight")), "")):
            why = f"it changes {divided.removesuffix('.weight')}, whose heads are packed apart"
            raise UnsupportedError(f"{path}: {why}: merge it with edge convert MODEL FILE --lora {path}")
        adapter.check_model(file, spec)
    lora = Lora(adapters, tuple(each.scale for each in files))
    return lora if lora.size.rank else None


def _size_of(adapters: Sequence[Adapter]) -> LoraSize:
    ranks: dict[str, int] = {}
    for adapter in adapters:
        for name, pair in adapter.pairs.items():
            ranks[name] = ranks.get(name, 0) + pair.rank
    if (rank := max(ranks.values(), default=0)) > MAX_RANK:
        raise UnsupportedError(f"the adapters have rank {rank} together, more than the {MAX_RANK} that edge runs")
    return LoraSize(rank, sum(adapter.nbytes for adapter in adapters))
