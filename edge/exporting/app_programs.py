"""A GPU's programs as data in model.edge: kernels in source, buffers, and the dispatches of each pass.

The GPU engine's generator writes them (backends/tvm/gpu), for any GPU: nothing is known of the device. Section GPU is a
header, tables of structs, and the sources; section GPU_WEIGHTS has the content of the buffers of weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.ring import LayerKinds
from edge.backends.tvm.gpu import KV_DTYPES
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.design import KEYS, MOST_MOVED, RING, RING_MOVE, VALUES, Design, input_stride
from edge.backends.tvm.gpu.export import any_gpu, places_of, write_weights
from edge.backends.tvm.gpu.kv import STAGED, arena_bytes
from edge.backends.tvm.gpu.program import Dispatch, Program, Slice
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.kv.rows import SPARE_ROWS
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.shape import padded_head
from edge.errors import UnsupportedError
from edge.exporting.c_struct import c_struct, filled
from edge.kv.policy import Policy
from edge.model.model import Model
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network
from edge.plan.plan import Plan
from edge.types import Progress

LANGUAGES = {"opencl": ("linux", "android")}  # with a host in the C runtime, and the systems that it is for
POLICIES = ("full", "streaming", "window")  # those that need no attention
HOST_BYTES = 4 << 20  # of the process beside buffers: a slice of the weights' file, and rows that travel

NONE = 0xFFFFFFFF  # instead of the number of a buffer
# Runs of dispatches, by their numbers. Rows are moved by keys, values or both, in the arena of all rows or of rings.
_MOVED = ("KEYS", "VALUES", "ROWS")
PASSES = ("STEP", "CHUNK", "LAST", *(f"{kind}MOVE_{which}" for kind in ("", "RING_") for which in _MOVED))

_BUFFERS = ("keys", "values", "row_scales", "pairs")  # of an arena
_MOVES = (KEYS, VALUES, KEYS + VALUES)

GPU = c_struct(
    # Numbers of structs, and where the tables of them begin; `numbers` are uint32.
    **{
        f"{name}{what}": "<u4" for name in ("kernels", "buffers", "parts", "dispatches", "passes", "numbers")
        for what in ("", "_at")
    },
    # Numbers of buffers; of an arena: all rows or those without a ring, then those of rings, if they lie apart.
    **dict.fromkeys(("tables", "tokens", "logits", "layer_inputs"), "<u4"),
    **dict.fromkeys(_BUFFERS, ("<u4", (2,))),
    # Words in the buffer `tables`, as backends/tvm/gpu/design.py has them. positions: their number.
    **dict.fromkeys(("starts", "lengths", "angles", "temperatures", "positions_at", "positions"), "<u4"),
    **dict.fromkeys(("angle_rows", "pairs_rotated"), "<u4"),
    input_stride="<u4",  # values from one layer's vector of a token to the next one's; 0: there are none
    halves="<u4",  # 1: value i of a head is rotated with i + pairs_rotated, not 2i with 2i + 1
    shared="<u4",  # the most bytes of workgroup memory
    threads="<u4",  # the most of a workgroup
    staged="<u4",  # rows behind those of an arena, for those that travel
    most_moved="<u4",  # rows that are moved at once
)  # fmt: skip
KERNEL = c_struct(name="S48", source="<u4", length="<u4", threads=("<u4", (2,)))
BUFFER = c_struct(size="<u8", weights="<u8", loaded="<u4", reserved="<u4")  # weights: where their content is, if loaded
PART = c_struct(buffer="<u4", reserved="<u4", offset="<u8", size="<u8")
# numbers: where those of the dispatch are: of its parts, then its scalars. per: tokens of a workgroup in y, of which
# there are as many as that needs; 0: groups[1].
DISPATCH = c_struct(kernel="<u4", groups=("<u4", (2,)), per="<u4", numbers="<u4", parts="<u4", scalars="<u4")
PASS = c_struct(first="<u4", count="<u4")
STRUCTS = {
    "gpu_config": GPU, "gpu_kernel": KERNEL, "gpu_buffer": BUFFER, "gpu_part": PART, "gpu_dispatch_config": DISPATCH,
    "gpu_pass": PASS,
}  # fmt: skip


@dataclass(frozen=True)
class AppPrograms:
    """What a bundle has for GPUs. buffers: bytes by name."""

    language: str
    design: Design
    section: bytes
    places: dict[str, tuple[int, int]]
    buffers: dict[str, int]

    @property
    def weight_bytes(self) -> int:
        """Of section GPU_WEIGHTS."""
        return max(at + size for at, size in self.places.values())

    def bytes(self) -> dict[str, int]:
        """Of the device, by their kind."""
        rows = {*_BUFFERS, *(RING + name for name in _BUFFERS)}
        weights = sum(size for name, size in self.buffers.items() if name in self.places)
        kv = sum(size for name, size in self.buffers.items() if name in rows)
        return {"weights": weights, "kv": kv, "scratch": sum(self.buffers.values()) - weights - kv}

    def write_weights(self, out: BinaryIO, start: int, model: Model) -> None:
        write_weights(out, start, model.file, model.spec, self.design, self.places)


def check_gpu(language: str, system: str, spec: ModelSpec, policy: Policy, config: EngineConfig) -> None:
    """Raises UnsupportedError for what the runtime's GPU pass lacks."""
    if system not in LANGUAGES[language]:
        raise UnsupportedError(f"--gpu is for {' and '.join(LANGUAGES[language])} and the web, not for {system}")
    network = find_network(spec)
    lacks = {
        f"KV policy {policy.name}: choose --kv-policy {', '.join(POLICIES)}": policy.name not in POLICIES,
        f"{config.kv_dtype} KV rows: choose --kv-dtype {', '.join(KV_DTYPES)}": config.kv_dtype not in KV_DTYPES,
        "LoRA adapters: leave --lora-rank out": config.lora_rank > 0,
        "layers with a recurrent state: export without --gpu": sum(network.fixed_values) > 0,
    }  # fmt: skip
    for what, lacking in lacks.items():
        if lacking:
            raise UnsupportedError(f"--gpu has no {what}")


def describe_gpu(gpu: AppPrograms, plan: Plan) -> dict[str, Any]:
    """For the manifest. peak: of a process with one session, where GPU and CPU share memory, without what the driver
    takes for itself."""
    sizes, of_cpu = gpu.bytes(), plan.bytes
    rest = plan.predicted_peak - of_cpu.weights - of_cpu.kv - of_cpu.scratch
    return {"language": gpu.language, "bytes": sizes, "peak": rest + sum(sizes.values()) + HOST_BYTES}


def make_programs(model: Model, language: str, config: EngineConfig, progress: Progress | None = None) -> AppPrograms:
    """Raises UnsupportedError for models without kernels, MissingExtraError without TVM, EngineError if it fails."""
    config = replace(config, threads=1, logits_rows=1, observes=False, tuning={})
    design = Design.of(model.file, model.spec, config, any_gpu(language))
    program = program_of(design, progress)
    passes = _passes(program, design)
    arenas, positions = _arenas(model.spec, design, config)
    sizes = design.buffers(positions) | arenas
    used = {part.buffer for dispatches in passes.values() for each in dispatches for part in each.slices}
    buffers = {name: round_up(size, 16) for name, size in sizes.items() if name in used}
    places = {name: place for name, place in places_of(design.weights.buffers).items() if name in used}
    section = _section(program, design, passes, buffers, places, positions)
    return AppPrograms(language, design, section, places, buffers)


def _passes(program: Program, design: Design) -> dict[str, tuple[Dispatch, ...]]:
    scaled = design.kv_dtype == "int8"
    names = [name for name in _BUFFERS if scaled or name != "row_scales"]
    passes = {name: program.dispatches(name.lower()) for name in ("STEP", "CHUNK", "LAST")}
    kinds = {"": "edge_move"} | ({"RING_": RING_MOVE} if design.shape.apart else {})
    for kind, kernel in kinds.items():
        slices = tuple(Slice(kind.lower() + name) for name in names)
        for which, name in zip(_MOVES, _MOVED, strict=True):
            moved = Dispatch(kernel, slices, (which,), (1, MOST_MOVED), "other", per=1)
            passes[f"{kind}MOVE_{name}"] = (moved,)
    return passes


def _arenas(spec: ModelSpec, design: Design, config: EngineConfig) -> tuple[dict[str, int], int]:
    """Bytes of the buffers of rows, and the number of rows that have a position; rows as kv.c lays them out."""
    network, shape = find_network(spec), design.shape
    kinds = LayerKinds.of(network.windows, network.rowless)
    rows = len(kinds.whole) * shape.attention.kv_heads * round_up(config.capacity, TILE)
    rings = len(kinds.ringed) * shape.ringed.kv_heads * round_up(kinds.ring_rows(config.capacity, config.chunk), TILE)
    here = rows + (0 if shape.apart else rings)
    found = arena_bytes(here, padded_head(shape.attention.head_dim), config.kv_dtype)
    if shape.apart:
        sizes = arena_bytes(rings, padded_head(shape.ringed.head_dim), config.kv_dtype)
        found |= {RING + name: size for name, size in sizes.items()}
    with_positions = (rings if shape.apart else here) if shape.windowed else 0
    return found, with_positions + SPARE_ROWS


def _section(
    program: Program, design: Design, passes: dict[str, tuple[Dispatch, ...]], buffers: dict[str, int],
    places: dict[str, tuple[int, int]], positions: int,
) -> bytes:  # fmt: skip
    kernels = {each.kernel: None for dispatches in passes.values() for each in dispatches}
    kernel_numbers = {name: number for number, name in enumerate(kernels)}
    buffer_numbers = {name: number for number, name in enumerate(buffers)}
    parts: dict[Slice, int] = {}
    numbers: list[int] = []
    dispatches, runs = list[bytes](), list[bytes]()
    for name in PASSES:
        runs.append(filled(PASS, {"first": len(dispatches), "count": len(passes.get(name, ()))}))
        for each in passes.get(name, ()):
            run: dict[str, object] = {
                "kernel": kernel_numbers[each.kernel], "groups": each.groups, "per": each.per,
                "numbers": len(numbers), "parts": len(each.slices), "scalars": len(each.scalars),
            }  # fmt: skip
            dispatches.append(filled(DISPATCH, run))
            numbers += [parts.setdefault(part, len(parts)) for part in each.slices]
            numbers += [scalar & NONE for scalar in each.scalars]
    sources, at = b"", list[tuple[int, int]]()
    for name in kernels:
        text = program.kernels[name].source.encode() + b"\0"
        at.append((len(sources), len(text) - 1))
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
        "dispatches": dispatches, "passes": runs, "numbers": [np.array(numbers, "<u4").tobytes()],
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
    made = b"".join(
        filled(KERNEL, {
            "name": name.encode(), "source": first + start, "length": length, "threads": program.kernels[name].threads,
        }) for name, (start, length) in zip(kernels, at, strict=True)
    )  # fmt: skip
    layout = design.tables
    values |= {name: buffer_numbers.get(name, NONE) for name in ("tables", "tokens", "logits", "layer_inputs")}
    values |= {
        name: [buffer_numbers.get(prefix + name, NONE) for prefix in ("", RING)] for name in _BUFFERS
    }  # fmt: skip
    values |= {
        "starts": layout.starts, "lengths": layout.lengths, "angles": layout.angles,
        "temperatures": layout.temperatures, "positions_at": layout.positions, "positions": positions,
        "angle_rows": layout.angle_rows, "pairs_rotated": layout.pairs, "halves": design.halves,
        "input_stride": input_stride(design.shape.layer_inputs),
        "shared": max(program.kernels[name].shared for name in kernels),
        "threads": max(program.kernels[name].threads[0] * program.kernels[name].threads[1] for name in kernels),
        "staged": STAGED, "most_moved": MOST_MOVED,
    }  # fmt: skip
    head = filled(GPU, values)
    return head + bytes(kernels_at - len(head)) + made + body + sources
