"""Facts about a model file for `edge inspect`, without loading its weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from edge.backends import backend_names, engine_named, find_backend
from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import Footprint
from edge.converters.hearing import outline_hearing
from edge.converters.huggingface.reader import is_folder, outline_folder
from edge.devices.output import work_folder
from edge.devices.profiles import find_profile
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import EdgeError, MissingExtraError, UnsupportedError
from edge.formats.gguf import ArrayRef, GGUFFile, TensorInfo, read_gguf
from edge.formats.onnx_folder import read_folder, read_manifest
from edge.media.mel import RATE
from edge.model.adapters.lora import is_adapter, read_adapter
from edge.model.chat.thinking import find_family
from edge.model.drafters.assistant import is_assistant, read_assistant
from edge.model.drafters.eagle import is_eagle, read_eagle
from edge.model.names.catalog import find_model
from edge.model.reader import read_spec
from edge.model.structure.mtp import mtp_layers, mtp_tensors
from edge.model.structure.spec import ModelSpec
from edge.model.tokens.tokenizer import check_known
from edge.model.towers import AUDIO, VISION, is_mmproj, read_ears, read_tower, senses_of
from edge.model.whisper import MISHEARD, words_file
from edge.model.whisper.checkpoint import is_checkpoint
from edge.plan.npu import NpuUse, npu_use
from edge.storage.fingerprint import hash_file

EXAMPLE = 1280, 720  # pixels of a picture, width and height
HEARD_S = 30  # seconds
_ENDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_VOCABULARY = ("token_embd.weight", "output.weight")
_STEP = 1 << 20  # bytes from one sample of a file to the next
_SAMPLE = 256  # bytes, to tell files apart
_ROWS = 1024  # KV rows whose bytes are counted


@dataclass(frozen=True)
class TypeShare:
    """All tensors of one block type."""

    type: str
    tensors: int
    parameters: int
    bytes: int
    share: float  # of the bytes of all tensors


@dataclass(frozen=True)
class Vocabulary:
    """A model's vocabulary."""

    tokenizer: str  # `gpt2` (byte-level), `llama` (SentencePiece), `gemma4` …
    pre: str | None
    known: bool  # to edge's own tokenizer, not just to llama.cpp's
    tokens: int
    merges: int
    adds_bos: bool | None
    special: dict[str, tuple[int, str]]  # id and text by purpose


@dataclass(frozen=True)
class EngineUse:
    """An engine's support of a model."""

    engine: str
    kv_bytes: dict[str, int]  # of one token's row, by KV dtype
    reason: str | None  # why the engine does not run the model; None: it does
    window_bytes: dict[str, int] = field(default_factory=dict)  # of all rings, in addition to rows


@dataclass(frozen=True)
class AdapterInfo:
    """A LoRA adapter."""

    name: str
    ranks: list[int]
    alpha: float  # the change of a matrix is scaled by alpha / rank
    changes: dict[str, int]  # number of changed matrices by name within layers


@dataclass(frozen=True)
class DrafterInfo:
    """An assistant or an EAGLE-3 head, which drafts for a model. head_rows: of `vocab`, those that it reads for a
    token. reads: the layers of the model whose inputs a head reads."""

    layers: int
    width: int
    model_width: int  # values of the model's states
    centroids: int  # 0: none
    used: int
    head_rows: int
    vocab: int
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncoderInfo:
    """An encoder beside a model, whose states have `model_width` values."""

    name: str
    kind: str  # of the projector
    models: tuple[str, ...]  # their architectures
    model_width: int  # values of the model's states
    layers: int
    width: int
    ffn: int
    heads: int


@dataclass(frozen=True)
class EyesInfo(EncoderInfo):
    """An encoder of pictures, which sees for a model. rows: that a picture may have, from the fewest to the most."""

    patch: int  # pixels of its side
    rows: tuple[int, ...]
    default_rows: int
    example: tuple[int, int]  # rows and patches of a picture of `EXAMPLE` pixels


@dataclass(frozen=True)
class EarsInfo(EncoderInfo):
    """An encoder of sounds, which hears for a model."""

    rows: int  # of a sound of `HEARD_S` seconds


@dataclass(frozen=True)
class Inspection:
    """Facts about a model file."""

    path: Path
    format: str
    bytes: int
    architecture: str
    parameters: int
    bits_per_weight: float  # of all tensors
    body_bits: float | None  # of matrices except embedding and head; None: there are none
    types: list[TypeShare]
    tensors: list[TensorInfo]
    vocabulary: Vocabulary
    template: str | None  # the file's, untrusted
    stamp: str  # of the header and a few bytes of every tensor, or of every MiB of a folder
    sha256: dict[str, str]  # of every file, if requested
    spec: ModelSpec | None  # None: no engine of edge runs the model
    reason: str | None  # why spec is None
    engines: list[EngineUse]
    adapter: AdapterInfo | None = None  # for a LoRA adapter, which is no model
    drafter: DrafterInfo | None = None  # for an assistant, which is no model either
    eyes: EyesInfo | None = None  # for an encoder of pictures, likewise
    ears: EarsInfo | None = None  # and for one of sounds
    thinks: bool = False  # has marks of thoughts (`--think`)
    npu: NpuUse | None = None  # of the device asked about
    mtp_layers: int = 0  # for multi-token prediction, after those of `spec`
    mtp_bytes: int = 0
    mtp_engines: tuple[str, ...] = ()  # engines that draft with the first of them; others leave them out


def inspect_model(
    model: str | Path, *, device: str | None = None, sha256: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Inspection:  # fmt: skip
    """Read a model's header, with all checks. sha256: hash whole files, which takes a second per GB or two.

    model: as in `open_model`, or a Hugging Face folder, which is shown as the GGUF file that edge convert would write.
    device: a name in `edge devices list`, to learn whether its NPU runs the model.
    Raises InputError, ModelFormatError, UnsupportedError. GGUF files of architectures that edge does not run can be
    inspected, too.
    """
    profile = None if device is None else find_profile(device)
    if is_checkpoint(path := Path(model)):
        with work_folder() as folder:
            file = outline_hearing(path, folder / f"{path.absolute().stem}.gguf")
            files = _checkpoint(path) if path.is_dir() else [path]
            return _inspect(path, file, "Whisper checkpoint of another program", files, profile, sha256, progress)
    if is_folder(path):
        with work_folder() as folder:
            file = outline_folder(path, folder / f"{path.absolute().name}.gguf", blocks=True)
            return _inspect(path, file, "Hugging Face folder", _checkpoint(path), profile, sha256, progress)
    path = find_model(model)
    if path.is_dir():
        files = [path / name for name in read_manifest(path).files]
        return _inspect(path, read_folder(path), "ONNX folder of edge", files, profile, sha256, progress)
    file = read_gguf(path)
    return _inspect(path, file, f"GGUF {file.version}", [path], profile, sha256, progress)


def engine_use(name: str, file: GGUFFile, spec: ModelSpec) -> EngineUse:
    """Whether an engine runs a model, and if not, why; nothing is loaded."""
    misheard: tuple[str, ...] = ()
    if spec.ears:
        file, spec, misheard = words_file(file), replace(spec, ears=None), MISHEARD
    try:
        backend = find_backend(name, file, spec)
        dtypes = [each for each in backend.CAPABILITIES.kv_dtypes if each not in misheard]
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
        spec=spec and replace(spec, mtp=None),
        reason=reason,
        eyes=_eyes(file),
        ears=_ears(file),
        adapter=_adapter(file),
        drafter=_drafter(file),
        engines=[] if spec is None else [engine_use(name, file, spec) for name in backend_names()],
        npu=None if spec is None or profile is None else npu_use(file, spec, profile),
        mtp_layers=0 if spec is None else len(mtp_layers(file)),
        mtp_bytes=0 if spec is None else sum(info.nbytes for info in mtp_tensors(file).values()),
        mtp_engines=tuple(name for name in backend_names() if spec and engine_named(name).runs_mtp(spec)),
    )


def _spec(file: GGUFFile) -> tuple[ModelSpec | None, str | None]:
    try:
        return read_spec(file), None
    except UnsupportedError as error:
        return None, str(error).removeprefix(f"{file.path}: ")


def _adapter(file: GGUFFile) -> AdapterInfo | None:
    """Read an adapter. Raises the errors of `read_adapter`."""
    if not is_adapter(file):
        return None
    adapter = read_adapter(file.path)
    ranks = sorted({pair.rank for pair in adapter.pairs.values()})
    changes = Counter(name.split(".")[2] for name in adapter.pairs)
    return AdapterInfo(adapter.name, ranks, adapter.alpha, dict(changes))


def _drafter(file: GGUFFile) -> DrafterInfo | None:
    """Read an assistant or a head. Raises the errors of `read_assistant` and `read_eagle`."""
    if is_eagle(file):
        head = read_eagle(file)
        assert head.features is not None
        core, vocab = head.features, file.count("tokenizer.ggml.tokens")
        width = core.size // len(core.layers)
        return DrafterInfo(head.layers, head.hidden, width, 0, 0, head.vocab, vocab, core.layers)
    if not is_assistant(file):
        return None
    spec = read_assistant(file)
    assert spec.network is not None
    assert spec.network.assists is not None
    own = spec.network.assists
    rows = spec.vocab * own.used // own.centroids if own.centroids else spec.vocab
    return DrafterInfo(spec.layers, spec.hidden, own.hidden, own.centroids, own.used, rows, spec.vocab)


def _ears(file: GGUFFile) -> EarsInfo | None:
    """Read an encoder of sounds. Raises the errors of `read_ears`, unless the file also sees."""
    sees = VISION in senses_of(file)
    if not is_mmproj(file) or (sees and AUDIO not in senses_of(file)):
        return None
    try:
        tower = read_ears(file)
    except EdgeError:
        if sees:
            return None
        raise
    clip, layout = tower.mmproj, tower.layout(HEARD_S * RATE)
    return EarsInfo(
        clip.name, clip.kind, tower.architectures, clip.projected, clip.layers, clip.hidden, clip.ffn, clip.heads,
        layout.tokens,
    )  # fmt: skip


def _eyes(file: GGUFFile) -> EyesInfo | None:
    """Read an encoder of pictures. Raises the errors of `read_tower`."""
    if not is_mmproj(file) or VISION not in senses_of(file):
        return None
    tower = read_tower(file)
    clip, layout = tower.mmproj, tower.layout(*EXAMPLE)
    return EyesInfo(
        clip.name, clip.kind, tower.architectures, clip.projected, clip.layers, clip.hidden, clip.ffn, clip.heads,
        clip.patch, tower.sizes, tower.default, (layout.tokens, layout.patches),
    )  # fmt: skip


def _bits(tensors: Iterable[TensorInfo]) -> float | None:
    elements, nbytes = 0, 0
    for info in tensors:
        elements, nbytes = elements + info.elements, nbytes + info.nbytes
    return 8 * nbytes / elements if elements else None


def _types(tensors: list[TensorInfo]) -> list[TypeShare]:
    """Shares of block types, most bytes first."""
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
    """The files of a Hugging Face folder that define the model."""
    return sorted(
        path for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".model", ".jinja", ".bin")
    )


def _stamp(file: GGUFFile) -> str:
    """16 hexadecimal digits that change with a file's header or any large part of its weights."""
    with open(file.path, "rb") as data:
        digest = hashlib.sha256(data.read(file.data_offset))
        for info in file.tensors.values():
            data.seek(info.offset + info.nbytes // 2)
            digest.update(data.read(min(_SAMPLE, info.nbytes - info.nbytes // 2)))
    return digest.hexdigest()[:16]


def _stamp_of(files: list[Path]) -> str:
    """A stamp of several files, by names, sizes, and samples at every MiB."""
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
    """Bytes of a row, as the engine counts its allocation."""
    small, large = (_footprint(backend, spec, kv_dtype, rows) for rows in (_ROWS, 2 * _ROWS))
    return (large.kv - large.fixed_kv - small.kv + small.fixed_kv) // _ROWS


def _footprint(backend: Backend, spec: ModelSpec, kv_dtype: str, rows: int) -> Footprint:
    return backend.footprint(spec, EngineConfig(rows, 1, kv_dtype, 1))
