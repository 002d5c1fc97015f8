"""model.edge: one file with all that the C runtime needs of a model and a plan, mapped and used without a parser.

Little-endian: a header, a table of sections, and the sections, each at a multiple of 64 bytes, the weights at one of
16384. A table of per-layer embeddings comes last: it is read row by row, and never as a whole. C has the same structs
from `constants.py`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.gpu_programs import GPUPrograms
from edge.apps.sections.tools_file import calls_kind
from edge.apps.sections.vocabulary import COMPOSES, KINDS
from edge.backends.base import EngineConfig
from edge.backends.checks import check_whole
from edge.backends.importance import RowImportance
from edge.backends.ring import LayerKinds
from edge.backends.rope import find_rotation
from edge.backends.tvm.cpu.arguments import Table
from edge.backends.tvm.cpu.memory import PassMemory
from edge.backends.tvm.cpu.scratch import Kept
from edge.backends.tvm.cpu.table import fill_table
from edge.backends.tvm.design import Design
from edge.backends.tvm.kv.balance import find_balances
from edge.backends.tvm.kv.regions import TILE
from edge.backends.tvm.packing.cores import LANES, round_up
from edge.backends.tvm.packing.layout import TABLE, PackedLayout
from edge.backends.tvm.packing.weights import write_weights
from edge.backends.tvm.targets import Target
from edge.devices.profiles.profile import Power
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.kv.policy import Policy
from edge.model.structure.spec import ModelSpec
from edge.sampling import SamplingParams
from edge.types import FloatArray, Progress

MODEL, MAGIC, VERSION = "model.edge", b"EDGEMDL1", 12
ALIGNMENT, WEIGHT_ALIGNMENT = 64, 16384

_PIECE = 4 << 20  # bytes copied at once


class Section(IntEnum):
    """The content of a section; in C, SECTION_CONFIG and so on."""

    CONFIG, LAYERS, DESIGNS, ANGLES, NORMALS, STRINGS, TOKENIZER, WORDS, CHAT, WEIGHTS, TABLE, ADAPTERS = range(1, 13)
    GPU, GPU_WEIGHTS, NPU, EMBED, NORMALIZER, EYES, SOUNDS = range(13, 20)
    # STEM: matrices around an encoder's layers. PREFIX: KV rows of a soft prompt
    HEARING, STEM, TOOLS, PREFIX = range(20, 24)
    DRAFT, ASSISTANT, IMPORTANCE = range(24, 27)  # DRAFT: a file like this one


TRUSTED = (
    Section.CONFIG, Section.LAYERS, Section.DESIGNS, Section.ANGLES, Section.NORMALS, Section.ADAPTERS, Section.GPU,
    Section.NPU, Section.PREFIX,
)  # fmt: skip

POLICIES = ("full", "streaming", "window", "h2o", "kvzap")  # in the order of POLICY_FULL …
RANKS = ("h2o", "kvzap")  # those that rank rows
KV_DTYPES = ("f32", "f16", "int8", "int4")  # in the order of KV_F32 …
# Block types whose rows the C runtime reads from the file; table.c has a function for each.
TABLE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


# resident: bytes before section TABLE. hash: SHA-256 of the model's file.
HEADER = c_struct(magic="S8", version="<u4", sections="<u4", size="<u8", resident="<u8", hash="V32")
# crc: CRC-32; 0 for WEIGHTS, GPU_WEIGHTS, TABLE, TOKENIZER, STEM, DRAFT and ASSISTANT.
ENTRY = c_struct(kind="<u4", crc="<u4", offset="<u8", size="<u8")
# A `RowShape`, padded to whole vectors. value: values of a value with memory of their own; 0: it begins its key.
ROW_SHAPE = c_struct(heads="<u4", key="<u4", value="<u4")
CONFIG = c_struct(
    # The most of any layer. head: the largest key, padded to 16 values.
    **dict.fromkeys(("layers", "kv_heads", "heads", "hidden", "head", "vocab", "padded_vocab", "context"), "<u4"),
    shapes=(ROW_SHAPE, (2,)),  # rows of the layers without and with a ring
    encoder="<u4",  # 1: texts run as a whole, and there are no logits
    layer_inputs="<u4",  # values per layer of a token's vector in section TABLE; 0: none
    table_type="<u4",  # index in TABLE_TYPES, plus 1; 0: none
    # From the plan. threads: the most. sinks: first rows that are never evicted; pinned: the most with a system prompt.
    # drafts: the most tokens verified after the next one; 0: the bundle has no room for drafts.
    **dict.fromkeys(("capacity", "chunk", "threads", "evict_step", "sinks", "pinned", "drafts"), "<u4"),
    policy="<u4",  # POLICY_FULL …
    kv_dtype="<u4",  # KV_F32 …
    # Of the layers that keep rows, those without and with a ring; rows of each head of a ring. windowed: the pass
    # reads positions.
    **dict.fromkeys(("whole", "ringed", "ring_rows", "ring_window", "windowed"), "<u4"),
    rope_kinds="<u4",  # tables of angles
    long_from="<u4",  # positions beyond which LongRoPE's long factors apply; 0: never
    tempered="<u4",  # 1: queries have a temperature
    temper_period="<u4",
    temper_slope="<f8",
    # Of h2o and kvzap. ranked: values of a key that section IMPORTANCE weighs.
    **dict.fromkeys(("recent", "aging", "floor"), "<f8"),
    **dict.fromkeys(("kernel", "ranked"), "<u4"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repeat_penalty"), "<f8"),  # the model's, else edge's defaults
    top_k="<u4",
    chat="<u4",  # 1 with a template
    **dict.fromkeys(("core_watts", "idle_watts", "joules_per_byte"), "<f8"),  # of the profile, for estimates
    weight_bytes="<u8",  # read per token
    states="<u8",  # float32 values of the fixed states of all layers
    copied="<u8",  # float32 values of a thread's copy of a head's state, in a pass over drafts
    # Layers with cross attention; rows of memory of a head that they read; which number of the table counts them.
    **dict.fromkeys(("crossings", "cross_stride", "cross_slot"), "<u4"),
    # Parts of a given row behind its embedding, for the first layers; components of positions, 0: one.
    **dict.fromkeys(("deepstack", "components"), "<u4"),
    **dict.fromkeys(("weights", "gpu_weights"), "<u8"),  # sizes of these sections
    **dict.fromkeys(("kv_bytes", "scratch_bytes"), "<u8"),  # of the plan
    # In section DRAFT: where its weights begin behind the model's, if its tables state offsets from those; else 0.
    beside="<u8",
    # taps: layers whose inputs a pass keeps, for a head that drafts. Of such a head: values of these inputs, and which
    # number of the table says that a pass reads them.
    **dict.fromkeys(("taps", "features", "fuse_slot"), "<u4"),
    peak="<u8",  # bytes that a process with one session is planned to hold
)
# Section LAYERS: one for each layer. latent: values with which a key begins, 0: they have memory of their own.
# unbalance: what the key behind them, as it is stored, is multiplied by (kv/balance.py).
LAYER = c_struct(**dict.fromkeys(("window", "rope", "ringed", "rowless", "latent"), "<u4"), unbalance="<f8")
# Offsets in scratch memory. head_*: bounds and list of tiles of an output head in two stages. x: hidden states.
# given, features: what layers that draft join with embeddings.
_OFFSETS = (
    "normals",
    "temperatures",
    "layer_inputs",
    "head_upper",
    "head_lower",
    "head_tiles",
    "x",
    "deepstack",
    "given",
    "taps",
    "features",
)
DESIGN = c_struct(
    isa="S16",
    # tokens: rows of a chunk. rope_size: values of a table of angles. observed: rows with attention sums, or 0.
    **dict.fromkeys(("gemm_tokens", "tokens", "rope_size", "observed"), "<u4"),
    **dict.fromkeys(("floats", "integers"), "<u8"),  # elements of the scratch arrays
    **dict.fromkeys(_OFFSETS, "<u8"),  # where these begin in `floats`, head_tiles in `integers`
    tiles="<u8",  # of an output head in two stages; 0: the head is read as a whole
    **dict.fromkeys(("table", "numbers"), "<u8"),  # the table's offset in the section, and its int64 numbers
)
# pairs: rotated pairs of neighbouring values of a key, from `first` on. Then float64 radians[head / 2], and the
# component of the position that each goes by, uint8 [head / 2].
ANGLES = c_struct(pairs="<u4", first="<u4", magnitude="<f8")
STRUCTS = {  # by their names in C
    "file_header": HEADER, "file_section": ENTRY, "row_shape": ROW_SHAPE, "edge_config": CONFIG, "layer_config": LAYER,
    "design_config": DESIGN, "angles_config": ANGLES,
}  # fmt: skip


class Source(Protocol):
    """A model, or an encoder: where its weights are, and what they compute."""

    @property
    def file(self) -> GGUFFile: ...
    @property
    def spec(self) -> ModelSpec: ...


def config_section(
    model: Source, layout: PackedLayout, config: EngineConfig, policy: Policy, evict_step: int, *,
    chat: bool, sampling: SamplingParams, power: Power, kv_bytes: int, scratch_bytes: int, peak: int, pinned: int = 0,
    gpu_weights: int = 0, beside: int = 0,
) -> bytes:  # fmt: skip
    """Section CONFIG: shape, plan and recommended sampling. chat: there is a section CHAT. pinned: the most rows of a
    system prompt that are never evicted. gpu_weights: bytes of section GPU_WEIGHTS. beside: see CONFIG.

    Raises UnsupportedError for policies that the C runtime lacks.
    """
    if policy.name not in POLICIES:
        raise UnsupportedError(f"an exported model has no KV policy {policy.name}: choose {', '.join(POLICIES)}")
    spec, shape, network = model.spec, layout.shape, layout.network
    kinds = LayerKinds.of(network.windows, network.rowless)
    temper, sinks, table = network.temperature, getattr(policy, "sinks", 0), find_table(model.file, layout)
    values = {
        "layers": shape.layers, "kv_heads": shape.kv_heads, "heads": shape.heads, "hidden": shape.hidden,
        "head": shape.padded_head, "vocab": shape.vocab, "padded_vocab": shape.padded_vocab, "context": spec.context,
        "shapes": [core.row.padded(LANES).sizes for core in (shape.attention, shape.ringed)],
        "encoder": shape.encoder, "layer_inputs": shape.layer_inputs,
        "table_type": TABLE_TYPES.index(table.type) + 1 if table else 0,
        "capacity": config.capacity, "chunk": config.chunk, "threads": config.threads, "evict_step": evict_step,
        "sinks": sinks, "pinned": max(sinks, pinned), "drafts": config.drafts, "policy": POLICIES.index(policy.name),
        "kv_dtype": KV_DTYPES.index(config.kv_dtype),
        "whole": len(kinds.whole), "ringed": len(kinds.ringed),
        "ring_rows": kinds.ring_rows(config.capacity, config.chunk), "ring_window": kinds.window,
        "windowed": shape.windowed, "rope_kinds": max(1, len(network.ropes)), "long_from": _long_from(model, config),
        "tempered": temper is not None, "temper_period": temper.period if temper else 0,
        "temper_slope": temper.slope if temper else 0.0,
        **{name: getattr(policy, name, 0) for name in ("recent", "aging", "floor", "kernel")},
        "ranked": shape.attention.row.key if policy.needs.ranks else 0,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty, "top_k": min(sampling.top_k, shape.vocab),
        "chat": chat, "core_watts": power.core_watts, "idle_watts": power.idle_watts,
        "joules_per_byte": power.dram_pj_per_byte * 1e-12, "weight_bytes": spec.weight_bytes,
        "crossings": len(network.crossings), "cross_stride": round_up(config.crossed, TILE) if network.crossings else 0,
        "cross_slot": Table.of(shape).slot("cross_rows") if network.crossings else 0,
        "deepstack": network.deepstack, "components": network.components,
        "states": sum(network.fixed_values), "copied": Kept.of(network, 1, config.drafts).copied,
        "weights": layout.nbytes, "gpu_weights": gpu_weights, "kv_bytes": kv_bytes, "scratch_bytes": scratch_bytes,
        "peak": peak, "beside": beside, "taps": len(config.taps),
        "features": network.features.size if network.features else 0,
        "fuse_slot": Table.of(shape).slot("fuses") if network.features else 0,
    }  # fmt: skip
    return filled(CONFIG, values)


def layers_section(model: Source, layout: PackedLayout, kv_dtype: str) -> bytes:
    """Section LAYERS: a LAYER for each layer."""
    network, balances = layout.network, find_balances(model.file, layout, kv_dtype)
    kinds = LayerKinds.of(network.windows, network.rowless)
    rows = [
        {
            "window": window, "rope": network.rope_of(layer), "ringed": layer in kinds.ringed,
            "rowless": layer not in (*kinds.whole, *kinds.ringed),
            "latent": core.row.value if core and core.row.shared else 0, "unbalance": 2.0 ** -balances[layer],
        }
        for layer, (window, core) in enumerate(zip(network.windows, network.attention, strict=True))
    ]  # fmt: skip
    return b"".join(filled(LAYER, each) for each in rows)


def designs_section(model: Source, layout: PackedLayout, config: EngineConfig, targets: Sequence[Target]) -> bytes:
    """Scratch sizes and tables of the passes for these instruction sets, the best first."""
    head = np.array([len(targets), 0], "<u4").tobytes()
    at, rows, tables = round_up(len(head) + len(targets) * DESIGN.itemsize, ALIGNMENT), [], b""
    balances = find_balances(model.file, layout, config.kv_dtype)
    for target in targets:
        estimates = Design.of(layout, config.kv_dtype, target).estimates
        memory = PassMemory.of(model.spec, config, target, int(estimates))
        table = np.array(fill_table(layout, memory, balances=balances), "<i8").tobytes()
        scratch = memory.scratch
        values = {
            "isa": target.name.encode(), "gemm_tokens": target.gemm_tokens, "tokens": memory.tokens,
            "rope_size": memory.table_of_angles, "observed": scratch.offsets["raw_stride"],
            "floats": scratch.floats, "integers": scratch.integers,
            **{name: scratch.offsets.get(name, 0) for name in _OFFSETS}, "tiles": scratch.counts["head_tiles"],
            "table": at + len(tables), "numbers": len(table) // 8,
        }  # fmt: skip
        rows.append(filled(DESIGN, values))
        tables += _padded(table, ALIGNMENT)
    return _padded(head + b"".join(rows), ALIGNMENT) + tables


def angles_section(model: Source, layout: PackedLayout, config: EngineConfig) -> bytes:
    """Each kind of layer's radians per position: by LongRoPE's short factors, then, if they may apply, by the long."""
    head, parts = layout.shape.padded_head, []
    for long in (False, True) if _long_from(model, config) else (False,):
        rotation = find_rotation(model.file, layout.network, halves=False, head=head, long=long)
        for angles in rotation.angles:
            radians, components = np.zeros(head // 2, "<f8"), np.zeros(head // 2, np.uint8)
            radians[: angles.radians.size] = angles.radians
            components[: len(angles.components)] = angles.components
            values = {"pairs": angles.radians.size, "first": angles.first // 2, "magnitude": angles.magnitude}
            parts.append(filled(ANGLES, values))
            parts.append(radians.tobytes() + components.tobytes())
    return b"".join(parts)


def importance_section(model: Source, layout: PackedLayout, learned: RowImportance) -> bytes:
    """Section IMPORTANCE: the linear models of all heads whose rows a policy ranks, for keys as `angles_section` has
    them."""
    rotation = find_rotation(model.file, layout.network, halves=False, head=layout.shape.padded_head)
    return b"".join(learned.ordered(rotation, layer).astype("<f4").tobytes() for layer in learned.layers)


def normals_section(normals: FloatArray) -> bytes:
    """normals: of the Householder reflections of keys, float32 [heads of all layers, head]."""
    return normals.astype("<f4").tobytes()


def strings_section(name: str, license: str, policy: str, kv_dtype: str) -> bytes:
    """Section STRINGS: these texts in UTF-8, each with a zero byte at its end."""
    return b"".join(text.replace("\0", " ").encode() + b"\0" for text in (name, license, policy, kv_dtype))


def find_table(file: GGUFFile, layout: PackedLayout) -> TensorInfo | None:
    """The table of per-layer embeddings, if there is one. Raises UnsupportedError for types that C cannot read."""
    found = file.tensors[f"{TABLE}.weight"] if layout.shape.layer_inputs else None
    if found is not None and found.type not in TABLE_TYPES:
        raise UnsupportedError(f"{found.name} is {found.type}, and apps read {', '.join(TABLE_TYPES)}")
    return found


def trusted_source(
    sections: Mapping[Section, bytes], *, gpu_of_page: bool = False, encoders: str = "", drafter: str = ""
) -> str:
    """The text of trusted.c: the SHA-256 of the sections that compiled code uses unchecked, so that the library accepts
    no others; and the functions that read the model's table and adapters, split the words of encoders, embed texts,
    draft, see, hear, call tools, and run passes on a GPU or NPU. drafter: the name of what drafts. encoders:
    declarations of passes beside the model's."""
    (config,) = np.frombuffer(sections[Section.CONFIG], CONFIG)
    reader = f"table_{TABLE_TYPES[config['table_type'] - 1].lower()}" if config["table_type"] else "NULL"
    adapters = "read_adapter" if Section.ADAPTERS in sections else "NULL"
    scores = "&edge_scores" if POLICIES[config["policy"]] in RANKS else "NULL"
    kind, flags = np.frombuffer(sections.get(Section.TOKENIZER) or bytes(8), "<u4", 2).tolist()
    splitters = {KINDS.index("bert"): "split_word_pieces", KINDS.index("t5"): "split_unigrams"}
    pieces, composes = splitters.get(kind, "NULL"), "compose_text" if flags & COMPOSES else "NULL"
    embeds = "embed_texts" if Section.EMBED in sections else "NULL"
    ears, hears = ("&edge_ears", "&ears") if Section.HEARING in sections else ("NULL", "NULL")
    sounds, encoder = ("&edge_sounds", "&sounds") if Section.SOUNDS in sections else ("NULL", "&eyes")
    eyes, sees = ("&edge_eyes", encoder) if Section.EYES in sections else ("NULL", "NULL")
    drafter, own = (f"&{drafter}", "&draft") if drafter else ("NULL", "NULL")
    gpu = "&edge_gpu" if Section.GPU in sections else "NULL"
    page = "&edge_page" if gpu_of_page else "NULL"
    npu = "&edge_onnxruntime" if Section.NPU in sections else "NULL"
    digest = hashlib.sha256(b"".join(sections.get(each, b"") for each in TRUSTED)).digest()
    numbers = ", ".join(map(str, digest))
    return (
        "/* The model.edge that this library is for. Written by edge export. */\n"
        f'#include "bundle.h"\n#include "calling.h"\n\nconst uint8_t EDGE_TRUSTED[32] = {{{numbers}}};\n'
        f"const scores_kind *const EDGE_SCORES = {scores};\n"
        f"table_reader *const EDGE_TABLE = {reader};\nadapter_reader *const EDGE_ADAPTERS = {adapters};\n"
        f"piece_splitter *const EDGE_PIECES = {pieces};\ntext_composer *const EDGE_COMPOSER = {composes};\n"
        f"embedder *const EDGE_EMBED = {embeds};\n{encoders}"
        f"const ears_kind *const EDGE_EARS = {ears};\nconst encoder_kind *const EDGE_HEARS = {hears};\n"
        f"const tools_kind *const EDGE_TOOLS = {calls_kind(sections.get(Section.TOOLS))};\n"
        f"const eyes_kind *const EDGE_EYES = {eyes};\nconst encoder_kind *const EDGE_SEES = {sees};\n"
        f"const sounds_kind *const EDGE_SOUNDS = {sounds};\n"
        f"const drafter_kind *const EDGE_DRAFTER = {drafter};\nconst encoder_kind *const EDGE_DRAFTS = {own};\n"
        f"const accelerator_kind *const EDGE_GPU = {gpu}, *const EDGE_NPU = {npu}, *const EDGE_PAGE = {page};\n"
        f"session_racer *const EDGE_RACE = {'begin_faster' if Section.GPU in sections else 'NULL'};\n"
    )


def section_places(sections: Mapping[Section, bytes]) -> tuple[dict[Section, int], int]:
    """Where sections, in the order of their numbers, and the packed weights behind them begin in a file."""
    kinds = sorted(each for each in sections if sections[each])
    at, places = round_up(HEADER.itemsize + (len(kinds) + 4) * ENTRY.itemsize, ALIGNMENT), {}
    for kind in kinds:
        places[kind] = at
        at = round_up(at + len(sections[kind]), ALIGNMENT)
    return places, round_up(at, WEIGHT_ALIGNMENT)


def write_model(
    path: Path, sections: Mapping[Section, bytes], model_hash: bytes, file: GGUFFile, layout: PackedLayout,
    progress: Progress | None = None, gpu: GPUPrograms | None = None, draft: bytes = b"",
) -> None:  # fmt: skip
    """Write the file: these sections in the order of their numbers, then the packed weights, those of a GPU, what
    drafts, and the model's table.

    model_hash: SHA-256 of the model's file. draft: the content of section DRAFT.
    """
    entries, (places, weights) = [], section_places(sections)
    for kind, at in places.items():
        crc = 0 if kind in (Section.TOKENIZER, Section.STEM, Section.ASSISTANT) else zlib.crc32(sections[kind])
        entries.append(filled(ENTRY, {"kind": kind, "crc": crc, "offset": at, "size": len(sections[kind])}))
    resident, table = weights + layout.nbytes, find_table(file, layout)
    entries.append(filled(ENTRY, {"kind": Section.WEIGHTS, "offset": weights, "size": layout.nbytes}))
    if gpu:
        of_gpu = round_up(resident, WEIGHT_ALIGNMENT)
        entries.append(filled(ENTRY, {"kind": Section.GPU_WEIGHTS, "offset": of_gpu, "size": gpu.weight_bytes}))
        resident = of_gpu + gpu.weight_bytes
    if draft:
        of_draft = round_up(resident, WEIGHT_ALIGNMENT)
        entries.append(filled(ENTRY, {"kind": Section.DRAFT, "offset": of_draft, "size": len(draft)}))
        resident = of_draft + len(draft)
    size = resident
    if table:
        resident = round_up(resident, ALIGNMENT)
        size = resident + table.nbytes
        entries.append(filled(ENTRY, {"kind": Section.TABLE, "offset": resident, "size": table.nbytes}))
    header = {
        "magic": MAGIC, "version": VERSION, "sections": len(entries), "size": size, "resident": resident,
        "hash": np.void(model_hash),
    }  # fmt: skip
    with open(path, "wb") as out:
        out.write(filled(HEADER, header) + b"".join(entries))
        for kind, place in places.items():
            _write_at(out, place, sections[kind])
        write_weights(file, layout, out, weights, progress)
        if gpu:
            gpu.write_weights(out, of_gpu)
        if draft:
            _write_at(out, of_draft, draft)
        if table:
            _copy(file.path, table.offset, out, resident, table.nbytes)


def _long_from(model: Source, config: EngineConfig) -> int:
    """Positions beyond which LongRoPE's long factors apply; 0 if the cache never reaches them. As in `CacheRope`."""
    network = model.spec.network
    original = next((rope.original_context for rope in network.ropes if rope.has_long), 0) if network else 0
    positions = model.spec.context if config.per_head else config.capacity
    return original if original and positions > original else 0


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)


def _copy(source: Path, start: int, out: BinaryIO, place: int, count: int) -> None:
    """Copy bytes of a file in pieces. Raises EngineError if the file has become shorter."""
    out.seek(place)
    with source.open("rb") as file:
        file.seek(start)
        while count:
            data = file.read(min(count, _PIECE))
            check_whole(source, len(data), min(count, _PIECE))
            count -= out.write(data)


def _write_at(out: BinaryIO, place: int, data: bytes) -> None:
    out.seek(place)
    out.write(data)
