"""What a model file is, without loading its weights: for `edge inspect`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edge.backends import backend_names, find_backend
from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import Footprint
from edge.converters.huggingface.reader import is_folder, outline_folder
from edge.devices.output import work_folder
from edge.devices.profile import DeviceProfile
from edge.devices.profiles import find_profile
from edge.errors import EdgeError, MissingExtraError, UnsupportedError
from edge.formats.gguf import ArrayRef, GGUFFile, TensorInfo, read_gguf
from edge.formats.onnx_folder import read_folder, read_manifest
from edge.model.catalog import find_model
from edge.model.lora import is_adapter, read_adapter
from edge.model.reader import read_spec
from edge.model.spec import ModelSpec
from edge.model.thinking import find_family
from edge.model.tokenizer import check_known
from edge.plan.npu import NpuUse, npu_use
from edge.storage.fingerprint import hash_file

_ENDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_VOCABULARY = ("token_embd.weight", "output.weight")
_STEP = 1 << 20  # bytes from one sample of a file to the next
_SAMPLE = 256  # bytes, to tell files apart
_ROWS = 1024  # KV rows whose bytes are counted


@dataclass(frozen=True)
class TypeShare:
    """All tensors of one block type. share: of the bytes of all tensors."""

    type: str
    tensors: int
    parameters: int
    bytes: int
    share: float


@dataclass(frozen=True)
class Vocabulary:
    """tokenizer: `gpt2` (byte-level), `llama` (SentencePiece), `gemma4` …; known: to edge, or only to llama.cpp;
    special: id and text by what it is for."""

    tokenizer: str
    pre: str | None
    known: bool
    tokens: int
    merges: int
    adds_bos: bool | None
    special: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class EngineUse:
    """kv_bytes: of one token's row, by KV dtype. window_bytes: of rows of sliding windows, which a cache of a long text
    has besides. reason: why the engine does not run this model."""

    engine: str
    kv_bytes: dict[str, int]
    reason: str | None
    window_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterInfo:
    """alpha: the factor of what a matrix adds is alpha / rank. changes: number of matrices of each name in layers."""

    name: str
    ranks: list[int]
    alpha: float
    changes: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """bits_per_weight: of all tensors; body_bits: of matrices other than the embedding and the head; None if there are
    none. stamp: of the header and a few bytes of every tensor, or of every MiB of a folder. sha256: of every file, if
    requested. spec: None, with a reason, for a model that no engine of edge runs. template: the file's, untrusted.
    thinks: whether it has marks of thoughts (`--think`). adapter: of a LoRA adapter, which is no model. npu: of the
    device that was asked about.
    """

    path: Path
    format: str
    bytes: int
    architecture: str
    parameters: int
    bits_per_weight: float
    body_bits: float | None
    types: list[TypeShare]
    tensors: list[TensorInfo]
    vocabulary: Vocabulary
    template: str | None
    stamp: str
    sha256: dict[str, str]
    spec: ModelSpec | None
    reason: str | None
    engines: list[EngineUse]
    adapter: AdapterInfo | None = None
    thinks: bool = False
    npu: NpuUse | None = None


def inspect_model(
    model: str | Path, *, device: str | None = None, sha256: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Inspection:  # fmt: skip
    """Read a model's header, with all checks. sha256: hash whole files, which takes a second per GB or two.

    model: as in `open_model`, or a Hugging Face folder, which is shown as the GGUF file that edge convert would write.
    device: its name in `edge devices list`; whether its NPU runs the model.
    Raises InputError, ModelFormatError, UnsupportedError. GGUF files of architectures that edge does not run can be
    inspected, too.
    """
    profile = None if device is None else find_profile(device)
    if is_folder(Path(model)):
        path = Path(model)
        with work_folder() as folder:
            file = outline_folder(path, folder / f"{path.absolute().name}.gguf")
            return _inspect(path, file, "Hugging Face folder", _checkpoint(path), profile, sha256, progress)
    path = find_model(model)
    if path.is_dir():
        files = [path / name for name in read_manifest(path).files]
        return _inspect(path, read_folder(path), "ONNX folder of edge", files, profile, sha256, progress)
    file = read_gguf(path)
    return _inspect(path, file, f"GGUF {file.version}", [path], profile, sha256, progress)


def engine_use(name: str, file: GGUFFile, spec: ModelSpec) -> EngineUse:
    """Whether an engine runs a model, which is not loaded, and if not, why."""
    try:
        backend = find_backend(name, file, spec)
        dtypes = backend.CAPABILITIES.kv_dtypes
        rows = {each: _row_bytes(backend, spec, each) for each in dtypes}
        windows = {each: _footprint(backend, spec, each, spec.context).fixed_kv for each in dtypes}
        return EngineUse(name, rows, None, {each: size for each, size in windows.items() if size})
    except (UnsupportedError, MissingExtraError) as error:
        return EngineUse(name, {}, str(error).removeprefix(f"{file.folder or file.path}: "))
    except EdgeError as error:
        return EngineUse(name, {}, str(error))


def _inspect(
    path: Path, file: GGUFFile, format: str, files: list[Path], profile: DeviceProfile | None, sha256: bool,
    progress: Callable[[float], None] | None,
) -> Inspection:  # fmt: skip
    tensors = list(file.tensors.values())
    body = [info for info in tensors if len(info.shape) > 1 and info.name not in _VOCABULARY]
    spec, reason = _spec(file)
    template = file.metadata.get("tokenizer.chat_template")
    return Inspection(
        path=path,
        format=format,
        bytes=sum(each.stat().st_size for each in files),
        architecture=str(file.metadata.get("general.architecture", "none")),
        parameters=sum(info.elements for info in tensors),
        bits_per_weight=_bits(tensors) or 0.0,
        body_bits=_bits(body),
        types=_types(tensors),
        tensors=tensors,
        vocabulary=_vocabulary(file),
        template=template if isinstance(template, str) else None,
        thinks=isinstance(template, str) and find_family(template) is not None,
        stamp=_stamp(file) if path == file.path else _stamp_of(files),
        sha256=_hashes(files, progress) if sha256 else {},
        spec=spec,
        reason=reason,
        adapter=_adapter(file),
        engines=[] if spec is None else [engine_use(name, file, spec) for name in backend_names()],
        npu=None if spec is None or profile is None else npu_use(file, spec, profile),
    )


def _spec(file: GGUFFile) -> tuple[ModelSpec | None, str | None]:
    try:
        return read_spec(file), None
    except UnsupportedError as error:
        return None, str(error).removeprefix(f"{file.path}: ")


def _adapter(file: GGUFFile) -> AdapterInfo | None:
    """Raises the errors of `read_adapter`."""
    if not is_adapter(file):
        return None
    adapter = read_adapter(file.path)
    ranks = sorted({pair.rank for pair in adapter.pairs.values()})
    changes = Counter(name.split(".")[2] for name in adapter.pairs)
    return AdapterInfo(adapter.name, ranks, adapter.alpha, dict(changes))


def _bits(tensors: Iterable[TensorInfo]) -> float | None:
    elements, nbytes = 0, 0
    for info in tensors:
        elements, nbytes = elements + info.elements, nbytes + info.nbytes
    return 8 * nbytes / elements if elements else None


def _types(tensors: list[TensorInfo]) -> list[TypeShare]:
    """The one with most bytes first."""
    total = max(1, sum(info.nbytes for info in tensors))
    shares = []
    for kind in {info.type for info in tensors}:
        those = [info for info in tensors if info.type == kind]
        nbytes = sum(info.nbytes for info in those)
        shares.append(TypeShare(kind, len(those), sum(info.elements for info in those), nbytes, nbytes / total))
    return sorted(shares, key=lambda each: (-each.bytes, each.type))


def _vocabulary(file: GGUFFile) -> Vocabulary:
    fields = file.metadata

    def count(key: str) -> int:
        ref = fields.get(key)
        return ref.count if isinstance(ref, ArrayRef) else 0

    size = count("tokenizer.ggml.tokens")
    tokens = file.strings("tokenizer.ggml.tokens") if size else []
    numbers = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS}
    adds = fields.get("tokenizer.ggml.add_bos_token")
    known = True
    try:
        check_known(file)
    except UnsupportedError:
        known = False
    return Vocabulary(
        tokenizer=str(fields.get("tokenizer.ggml.model", "none")),
        pre=None if (pre := fields.get("tokenizer.ggml.pre")) is None else str(pre),
        known=known,
        tokens=size,
        merges=count("tokenizer.ggml.merges"),
        adds_bos=adds if isinstance(adds, bool) else None,
        special={name: (id_, tokens[id_]) for name, id_ in numbers.items() if isinstance(id_, int) and 0 <= id_ < size},
    )


def _checkpoint(folder: Path) -> list[Path]:
    """The files of a Hugging Face folder that say what the model is."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".model", ".jinja"))


def _stamp(file: GGUFFile) -> str:
    """16 hexadecimal digits that change with a file's header or a good part of its weights."""
    with open(file.path, "rb") as data:
        digest = hashlib.sha256(data.read(file.data_offset))
        for info in file.tensors.values():
            data.seek(info.offset + info.nbytes // 2)
            digest.update(data.read(min(_SAMPLE, info.nbytes - info.nbytes // 2)))
    return digest.hexdigest()[:16]


def _stamp_of(files: list[Path]) -> str:
    """The same of several: of their names and sizes, and of what lies at every MiB."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as data:
            for at in range(0, size, _STEP):
                data.seek(at)
                digest.update(data.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _hashes(files: list[Path], progress: Callable[[float], None] | None) -> dict[str, str]:
    sizes = [path.stat().st_size for path in files]
    total, hashes = max(1, sum(sizes)), {}
    for index, path in enumerate(files):

        def tell(part: float, before: int = sum(sizes[:index]), size: int = sizes[index]) -> None:
            if progress:
                progress((before + size * part) / total)

        hashes[path.name] = hash_file(path, tell)
    return hashes


def _row_bytes(backend: Backend, spec: ModelSpec, kv_dtype: str) -> int:
    """By the engine's own count of what it allocates."""
    small, large = (_footprint(backend, spec, kv_dtype, rows) for rows in (_ROWS, 2 * _ROWS))
    return (large.kv - large.fixed_kv - small.kv + small.fixed_kv) // _ROWS


def _footprint(backend: Backend, spec: ModelSpec, kv_dtype: str, rows: int) -> Footprint:
    return backend.footprint(spec, EngineConfig(rows, 1, kv_dtype, 1))
