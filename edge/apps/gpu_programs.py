"""A model's GPU programs as data: kernel sources, buffers, and the dispatches of each pass.

The GPU engine's generator (backends/tvm/gpu) writes them for any GPU, without knowing the device. `section` is a
header, tables of structs, and the sources. Apps have it as section GPU of model.edge, and the content of the weight
buffers as section GPU_WEIGHTS; runtime/gpu/ reads both. Pages have two files, which web/package/gpu.js reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.backends.base import EngineConfig
from edge.backends.tvm.gpu import ENGINE as GPU_ENGINE
from edge.backends.tvm.gpu import SHOWN_BYTES, kernels_bytes
from edge.backends.tvm.gpu.adapters import Adapters
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.design import KEYS, MOST_MOVED, RING_MOVE, VALUES, Design, RowForm, input_stride
from edge.backends.tvm.gpu.export import any_gpu, places_of, write_weights
from edge.backends.tvm.gpu.hosts.opencl import POCL_COMPILER_BYTES
from edge.backends.tvm.gpu.kv import STAGED
from edge.backends.tvm.gpu.memory import DeviceMemory
from edge.backends.tvm.gpu.picking import top_offset
from edge.backends.tvm.gpu.program import Dispatch, Program, Slice
from edge.backends.tvm.gpu.weights import WeightsLayout
from edge.backends.tvm.kv.memory import RING
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.low_rank import padded_rank
from edge.backends.tvm.packing.shape import Shape
from edge.errors import UnsupportedError
from edge.model.model import Model
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.plan.plan import Plan
from edge.records import dataclass
from edge.types import Progress

# Kernel languages by host: OpenCL, webgpu.h or a page (WGSL), Metal. LANGUAGES: in the order of KERNEL.source.
LANGUAGES = OPENCL, WGSL, METAL = ("opencl", "wgsl", "metal")
HOSTS = dict.fromkeys(("linux", "android", "windows"), (OPENCL, WGSL)) | dict.fromkeys(("ios", "macos"), (METAL,))
HOSTS |= {"web": (WGSL,)}
BUFFER_ALIGNMENT = 16  # bytes; buffers' sizes are multiples of it
MOST_SCALARS = 8  # of a dispatch
HOST_BYTES = 4 << 20  # of the process besides buffers: a slice of the weights' file, and rows being copied
SNAPSHOTS = 3  # of a recurrent state: after the system prompt, and before each of the last two turns
DRIVER = "as measured where {} compiles; phones' drivers are not known"
COPIED = "a copy of the weights beside the mapped file, which some drivers do not make"
MAPPED = "that the weights count, which stay in the mapped file"

NONE = 0xFFFFFFFF  # the number of no buffer
# Sequences of dispatches, in the order of their numbers. A move copies keys, values or both (ROWS), in the arena of all
# rows or of rings.
_MOVED = ("KEYS", "VALUES", "ROWS")
_TUNING = {"row_splits": 1}  # bundles have one kind of steps
_PLAIN = ("STEP", "CHUNK", "LAST", "PICKED", "TOP")
PASSES = (*_PLAIN, *(f"{kind}MOVE_{which}" for kind in ("", "RING_") for which in _MOVED))
STATE = ("COUNT", "ANGLE", "POSITION", "WANTED", "BANNED", "BANS")  # fields of `State` that hosts write

_SINGLE = ("tables", "tokens", "logits", "layer_inputs", "found", "states")  # buffers
_BUFFERS = ("keys", "values", "row_scales", "pairs")  # of an arena
_MOVES = (KEYS, VALUES, KEYS + VALUES)

GPU = c_struct(
    # The number of each kind of struct, and the offset of their table; `numbers` are uint32.
    **{
        f"{name}{what}": "<u4" for name in ("kernels", "buffers", "parts", "dispatches", "passes", "adapted", "numbers")
        for what in ("", "_at")
    },
    # Buffers, by number. _BUFFERS: of the arena of all rows, or without rings; then of the arena of rings, if separate.
    **dict.fromkeys(_SINGLE, "<u4"),
    **dict.fromkeys(_BUFFERS, ("<u4", (2,))),
    # For each arena, too: rows; values and bytes of a key; how many of the values RoPE rotates; the index in `numbers`
    # of its heads, numbered across all layers, and their count.
    **dict.fromkeys(("rows", "head", "row_bytes", "rotated", "heads_at", "heads"), ("<u4", (2,))),
    # Offsets in words in the buffer `tables`, from backends/tvm/gpu/design.py. normals: 0 if keys are not reflected
    # (int4 keys are). positions: their number.
    **dict.fromkeys(("starts", "lengths", "angles", "temperatures", "normals", "positions_at", "positions"), "<u4"),
    **dict.fromkeys(("angle_rows", "pairs_rotated", "kinds"), "<u4"),
    **dict.fromkeys(("vocab", "chunk", "all_heads", "largest_head"), "<u4"),
    input_stride="<u4",  # values between a token's vectors for consecutive layers; 0: none
    halves="<u4",  # 1: of `rotated` values of a key, i is rotated with i + rotated / 2, not 2i with 2i + 1
    shared="<u4",  # the most bytes of workgroup memory
    threads="<u4",  # the most threads of a workgroup
    staged="<u4",  # rows after those of an arena, through which rows are copied
    most_moved="<u4",  # the most rows moved at once
    top_at="<u4",  # offset in bytes of TOP's result in `found`
)  # fmt: skip
KERNEL = c_struct(  # source, length: for each of LANGUAGES; length 0: none. written: a bit for each buffer
    name="S48", source=("<u4", (3,)), length=("<u4", (3,)), threads=("<u4", (2,)), parts="<u4", written="<u4"
)
BUFFER = c_struct(size="<u8", weights="<u8", loaded="<u4", reserved="<u4")  # weights: offset of its content, if loaded
PART = c_struct(buffer="<u4", reserved="<u4", offset="<u8", size="<u8")
# numbers: index in `numbers` of the dispatch's parts, then its scalars, then its matrices, by their numbers in ADAPTED.
# per: tokens of a workgroup in y, which determine the number of workgroups; 0: groups[1]. adapted: a dispatch with
# matrices runs only if LoRA adapters change one of them (1), or none (0).
DISPATCH = c_struct(
    kernel="<u4", groups=("<u4", (2,)), per="<u4", numbers="<u4",
    **dict.fromkeys(("parts", "scalars", "matrices", "adapted"), "<u4"),
)  # fmt: skip
ADAPTED = c_struct(buffer="<u4", reserved="<u4", at="<u8", size="<u8")  # a matrix: its adapter's buffer; place of B
PASS = c_struct(first="<u4", count="<u4")
STRUCTS = {
    "gpu_config": GPU, "gpu_kernel": KERNEL, "gpu_buffer": BUFFER, "gpu_part": PART, "gpu_dispatch_config": DISPATCH,
    "gpu_pass": PASS, "gpu_adapted": ADAPTED,
}  # fmt: skip


@dataclass(frozen=True)
class GPUPrograms:
    """The part of a bundle for GPUs."""

    languages: tuple[str, ...]
    model: Model
    design: Design
    section: bytes
    places: dict[str, tuple[int, int]]  # of the weight buffers: offset and size of their content, by name
    buffers: dict[str, int]  # bytes by name

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight buffers' content."""
        return max(at + size for at, size in self.places.values())

    def bytes(self) -> dict[str, int]:
        """Bytes of the device's buffers: weights, kv, lora and scratch."""
        rows = {"states", *_BUFFERS, *(RING + name for name in _BUFFERS)}
        adapters = self.design.adapters.buffers(self.design.weights)
        weights = sum(size for name, size in self.buffers.items() if name in self.places)
        kv = sum(size for name, size in self.buffers.items() if name in rows)
        lora = sum(size for name, size in self.buffers.items() if name in adapters)
        scratch = sum(self.buffers.values()) - weights - kv - lora
        return {"weights": weights, "kv": kv, "lora": lora, "scratch": scratch}

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the part of an adapter's file that is for the GPU: a byte for each matrix, then the buffers."""
        flags = len(matrices_in(self.design.weights, self.design.adapters))
        return round_up(flags, BUFFER_ALIGNMENT) + self.bytes()["lora"]

    def write_weights(self, out: BinaryIO, start: int) -> None:
        """Write the weight buffers' content from byte `start` of the file, which ends with it."""
        write_weights(out, start, self.model.file, self.model.spec, self.design, self.places)


# Uniform bytes of a dispatch; dispatches of a layer in all passes (25 of Gemma 4), and those of its adapters.
_UNIFORM, _DISPATCHES, _ADAPTED = 256, 25, 24


def check_gpu(system: str, spec: ModelSpec, config: EngineConfig) -> tuple[str, ...]:
    """The languages of a system's hosts. Raises UnsupportedError for other systems and features that hosts lack."""
    if system not in HOSTS:
        raise UnsupportedError(f"--gpu is for {', '.join(HOSTS)}, not for {system}")
    network = find_network(spec)
    lacks = {
        "KV policies that look at rows (h2o, kvzap): choose --kv-policy streaming, window or full": config.per_head,
        "latent attention: export without --gpu": any(core and core.latent for core in network.attention),
    }  # fmt: skip
    if found := next((what for what, lacking in lacks.items() if lacking), None):
        raise UnsupportedError(f"--gpu has no {found}")
    return HOSTS[system]


def describe_gpu(gpu: GPUPrograms, plan: Plan, *, in_page: bool) -> dict[str, Any]:
    """The manifest's part `gpu`. peak: bytes of a process with one session, where GPU and CPU share memory: for an app,
    with the rows of one engine and the assumed bytes of the driver; for a page, with the module and the buffers."""
    sizes, of_cpu = gpu.bytes(), plan.bytes
    buffers = {"languages": [*gpu.languages], "bytes": sizes}
    if in_page:
        mapped = mapped_bytes(gpu.model.spec, plan.config)
        return buffers | {"mapped": mapped, "peak": plan.predicted_peak + sum(sizes.values()) + mapped}
    rest = plan.predicted_peak - of_cpu.weights - of_cpu.kv - of_cpu.scratch - of_cpu.lora
    measured = driver_bytes(gpu.languages, gpu.model.spec, plan.config)
    driver = {"bytes": measured, "source": DRIVER.format("pocl" if OPENCL in gpu.languages else "lavapipe")}
    assumes = MAPPED if METAL in gpu.languages else COPIED
    return buffers | {
        "assumes": assumes,
        "driver": driver,
        "peak": rest + sum(sizes.values()) + _host_bytes(gpu.model.spec) + measured,
    }


def driver_bytes(languages: tuple[str, ...], spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of the process for the driver in a first run, when it compiles: pocl's for OpenCL, which contains LLVM and
    Clang, otherwise lavapipe's."""
    kinds = len(Shape.of(spec, GPU_ENGINE.NAME, GPU_ENGINE.supports).blocks) + (config.lora_rank > 0)
    return kernels_bytes(kinds, config.kv_dtype) + (POCL_COMPILER_BYTES if OPENCL in languages else SHOWN_BYTES)


def _host_bytes(spec: ModelSpec) -> int:
    """Bytes of the process for a GPU's buffers: what copies their content, and a recurrent state with its snapshots."""
    return HOST_BYTES + (1 + SNAPSHOTS) * spec.state_bytes


def mapped_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of the buffers that a page makes for itself (web/package/gpu.js): one for reading logits, the rows of a
    pass and a recurrent state, and the uniforms of its dispatches, whose number is bounded."""
    dispatches = _DISPATCHES + (_ADAPTED if config.lora_rank else 0)
    rows = 4 * spec.vocab + spec.state_bytes + _UNIFORM * dispatches * (spec.layers + 1)
    for core in (each for each in find_network(spec).attention if each and each.rows_of is None):
        form = RowForm.of(core, config.kv_dtype)
        rows += (core.kv_heads * config.chunk + TILE) * 8 * (form.words + form.scaled)
    return rows


def buffer_bytes(system: str, spec: ModelSpec, config: EngineConfig) -> int:
    """Bytes of the device's buffers and of the host, without a page's module. Raises as `check_gpu`."""
    check_gpu(system, spec, config)
    rank = padded_rank(config.lora_rank)
    config = replace(config, logits_rows=1, pinned=0, lora_rank=rank, tuning=_TUNING, drafts=0)
    need = GPU_ENGINE.footprint(spec, config)
    host = mapped_bytes(spec, config) if system == "web" else _host_bytes(spec)
    return need.weights + need.kv + need.scratch + need.lora + host


def make_programs(
    model: Model, languages: tuple[str, ...], config: EngineConfig, progress: Progress | None = None
) -> GPUPrograms:
    """Raises UnsupportedError for models without kernels, MissingExtraError without TVM, EngineError if TVM fails."""
    rank = padded_rank(config.lora_rank)  # padded as in adapter files, for the CPU
    config = replace(config, threads=1, logits_rows=1, observes=False, tuning=_TUNING, lora_rank=rank, drafts=0)
    designs = [Design.of(model.file, model.spec, config, any_gpu(language)) for language in languages]
    _check_order(designs[0])
    programs = {each.language: program_of(each, progress) for each in designs}
    design, program = designs[0], programs[languages[0]]
    assert all(_without_sources(each) == _without_sources(program) for each in programs.values())
    passes = _passes(program, design)
    memory = DeviceMemory.of(model.spec, config, design.tables)
    arenas, placed = _arenas(memory, design), memory.arrays[f"{memory.kv.arenas[-1].prefix}positions"]
    positions = placed.size + placed.spare if placed.size else 0  # as kv.c has them
    sizes = {name: buffer.nbytes for name, buffer in memory.buffers.items()} | design.buffers(positions)
    used = {part.buffer for dispatches in passes.values() for each in dispatches for part in each.slices}
    buffers = {name: round_up(size, BUFFER_ALIGNMENT) for name, size in sizes.items() if name in used}
    places = {name: place for name, place in places_of(design.weights.buffers).items() if name in used}
    section = _section(programs, design, passes, buffers, places, arenas, positions)
    return GPUPrograms(languages, model, design, section, places, buffers)


def _check_order(design: Design) -> None:
    """Raise UnsupportedError if int4 keys of the GPU and the CPU differ in more than the order of their values.

    The orders differ where RoPE pairs value i with i + pairs. The int4 codes then differ in order alone only if the
    reordering permutes the bits of i, since it then commutes with the Hadamard transform.
    """
    if design.kv_dtype != "int4" or not design.halves or not design.pairs:
        return
    for head in (design.shape.attention.head_dim, design.shape.ringed.head_dim):
        rotated = 2 * min(design.pairs, head // 2)
        if rotated != head or head & (head - 1):
            raise UnsupportedError(
                f"--gpu has no int4 KV rows of heads of {head} values, {rotated} of them rotated: choose "
                "--kv-dtype f16 or int8"
            )


def _without_sources(program: Program) -> Program:
    kernels = {name: replace(kernel, source="") for name, kernel in program.kernels.items()}
    return replace(program, language="", kernels=kernels)


def _passes(program: Program, design: Design) -> dict[str, tuple[Dispatch, ...]]:
    form = RowForm.of(design.shape.attention, design.kv_dtype)
    names = [name for name in _BUFFERS if form.scaled or name != "row_scales"]
    passes = {name: program.passes[name.lower()] for name in _PLAIN}
    kinds = {"": "edge_move"} if form.words else {}  # rows of models without attention are empty
    kinds |= {"RING_": RING_MOVE} if design.shape.apart else {}
    for kind, kernel in kinds.items():
        slices = tuple(Slice(kind.lower() + name) for name in names)
        for which, name in zip(_MOVES, _MOVED, strict=True):
            moved = Dispatch(kernel, slices, (which,), (1, MOST_MOVED), "other", per=1)
            passes[f"{kind}MOVE_{name}"] = (moved,)
    return passes


def matrices_in(weights: WeightsLayout, adapters: Adapters) -> list[tuple[int, str]]:
    """The layer and name of each matrix of ADAPTED, in order."""
    return [(layer, name) for layer, layout in enumerate(weights.layers) for name in adapters.layer(layout)]


@dataclass(frozen=True)
class _Arena:
    """An arena of KV rows."""

    prefix: str
    rows: int
    form: RowForm
    rotated: int  # values of a key that RoPE rotates
    heads: list[int]  # numbered across all layers


def _arenas(memory: DeviceMemory, design: Design) -> list[_Arena]:
    shape, kinds = design.shape, memory.kv.kinds
    arenas = []
    for size in memory.kv.arenas:
        ringed = kinds.ringed if size.ringed else ()
        layers = sorted((*ringed, *kinds.whole)) if size.whole else ringed
        heads = [layer * shape.kv_heads + head for layer in layers for head in range(size.core.kv_heads)]
        rotated = 2 * min(design.pairs, size.core.head_dim // 2)
        arenas.append(_Arena(size.prefix, size.rows, RowForm.of(size.core, design.kv_dtype), rotated, heads))
    return arenas


def _section(
    programs: dict[str, Program], design: Design, passes: dict[str, tuple[Dispatch, ...]], buffers: dict[str, int],
    places: dict[str, tuple[int, int]], arenas: list[_Arena], positions: int,
) -> bytes:  # fmt: skip
    program = next(iter(programs.values()))
    kernels = {each.kernel: None for dispatches in passes.values() for each in dispatches}
    kernel_numbers = {name: number for number, name in enumerate(kernels)}
    buffer_numbers = {name: number for number, name in enumerate(buffers)}
    matrices = {each: number for number, each in enumerate(matrices_in(design.weights, design.adapters))}
    parts: dict[Slice, int] = {}
    numbers: list[int] = []
    dispatches, runs = list[bytes](), list[bytes]()
    for name in PASSES:
        runs.append(filled(PASS, {"first": len(dispatches), "count": len(passes.get(name, ()))}))
        for each in passes.get(name, ()):
            assert len(each.scalars) <= MOST_SCALARS
            run: dict[str, object] = {
                "kernel": kernel_numbers[each.kernel], "groups": each.groups, "per": each.per,
                "numbers": len(numbers), "parts": len(each.slices), "scalars": len(each.scalars),
                "matrices": len(each.product), "adapted": each.adapted is True,
            }  # fmt: skip
            dispatches.append(filled(DISPATCH, run))
            numbers += [parts.setdefault(part, len(parts)) for part in each.slices]
            numbers += [scalar & NONE for scalar in each.scalars]
            numbers += [matrices[each.layer or 0, name] for name in each.product]
    heads_at = []
    for arena in arenas:
        heads_at.append(len(numbers))
        numbers += arena.heads
    sources, at = b"", dict[tuple[str, str], tuple[int, int]]()
    for language, made in programs.items():
        for name in kernels:
            lines = (line for line in made.kernels[name].source.splitlines() if line.strip())
            text = "\n".join(line for line in lines if not line.lstrip().startswith("//")).encode() + b"\0"
            at[name, language] = len(sources), len(text) - 1
            sources += text
    tables = {
        "buffers": [
            filled(BUFFER, {"size": size, "loaded": name in places, "weights": places.get(name, (0, 0))[0]})
            for name, size in buffers.items()
        ],
        "parts": [
            filled(PART, {
                "buffer": buffer_numbers[part.buffer], "offset": part.offset,
                "size": part.size or buffers[part.buffer] - part.offset,
            }) for part in parts
        ],
        "dispatches": dispatches, "passes": runs,
        "adapted": [
            filled(ADAPTED, {
                "buffer": buffer_numbers[f"lora.{layer}"], "at": 4 * low.at, "size": 4 * (low.end - low.at),
            })
            for layer, layout in enumerate(design.weights.layers) for low in design.adapters.layer(layout).values()
        ],
        "numbers": [np.array(numbers, "<u4").tobytes()],
    }  # fmt: skip
    kernels_at = round_up(GPU.itemsize, 8)
    place = kernels_at + KERNEL.itemsize * len(kernels)
    values: dict[str, object] = {"kernels": len(kernels), "kernels_at": kernels_at}
    body = b""
    for table, rows in tables.items():
        data = b"".join(rows)
        values |= {table: len(numbers) if table == "numbers" else len(rows), f"{table}_at": place + len(body)}
        body += data + bytes(-len(data) % 8)
    first = place + len(body)
    rows_of_kernels = b"".join(
        filled(KERNEL, {
            "name": name.encode(), "threads": kernel.threads,
            "source": [first + start for start, _ in places], "length": [length for _, length in places],
            "parts": len(kernel.buffers),
            "written": sum(1 << number for number, each in enumerate(kernel.buffers) if each in kernel.written),
        })
        for name in kernels for kernel in [program.kernels[name]]
        for places in [[at.get((name, language), (0, 0)) for language in LANGUAGES]]
    )  # fmt: skip
    layout, shape = design.tables, design.shape
    values |= {name: buffer_numbers.get(name, NONE) for name in _SINGLE}
    values |= {
        name: [buffer_numbers.get(prefix + name, NONE) for prefix in ("", RING)] for name in _BUFFERS
    }  # fmt: skip
    of_arenas = {
        "rows": [each.rows for each in arenas], "head": [each.form.head for each in arenas],
        "row_bytes": [4 * each.form.words for each in arenas], "rotated": [each.rotated for each in arenas],
        "heads_at": heads_at, "heads": [len(each.heads) for each in arenas],
    }  # fmt: skip
    values |= {name: [*each, 0][:2] for name, each in of_arenas.items()}
    values |= {
        "starts": layout.starts, "lengths": layout.lengths, "angles": layout.angles,
        "temperatures": layout.temperatures, "normals": layout.normals if layout.normal else 0,
        "positions_at": layout.positions, "positions": positions,
        "angle_rows": layout.angle_rows, "pairs_rotated": layout.pairs, "halves": design.halves,
        "kinds": max(design.kinds, default=0) + 1, "vocab": shape.vocab, "chunk": design.chunk,
        "all_heads": shape.layers * shape.kv_heads, "largest_head": shape.padded_head,
        "input_stride": input_stride(shape.layer_inputs),
        "shared": max(program.kernels[name].shared for name in kernels),
        "threads": max(program.kernels[name].threads[0] * program.kernels[name].threads[1] for name in kernels),
        "staged": STAGED, "most_moved": MOST_MOVED, "top_at": top_offset(shape.vocab),
    }  # fmt: skip
    head = filled(GPU, values)
    return head + bytes(kernels_at - len(head)) + rows_of_kernels + body + sources
