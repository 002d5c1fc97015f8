"""constants.h: the numbers and structs that the C runtime shares with Python. Each is defined once, in Python.

The header is written into the folder where the runtime is compiled, and into packages that compile it elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from edge.apps import gpu_programs, npu_graphs
from edge.apps.sections import (
    adapter_file,
    chat,
    draft_file,
    embedding,
    eyes_file,
    hearing,
    letters,
    model_file,
    sounds_file,
    tools_file,
    vocabulary,
    words,
)
from edge.apps.sections.model_file import Section
from edge.apps.structs import LONGEST_STOP, MOST_DRY, MOST_STOPS, range_tables
from edge.backends import importance, ring, row_lists
from edge.backends.onnx.graph.static import HIDDEN
from edge.backends.tvm.cpu import two_stages
from edge.backends.tvm.cpu.arguments import LINE, LINES, Job
from edge.backends.tvm.gpu.design import ANGLES_AHEAD, PICKS, State
from edge.backends.tvm.gpu.picking import TOP
from edge.backends.tvm.kv import row_formats
from edge.backends.tvm.kv.regions import LONGEST_SHARE, SPARE_ROWS, TILE
from edge.backends.tvm.packing import blocks
from edge.backends.tvm.packing.low_rank import padded_rank
from edge.backends.tvm.packing.shape import ROPE_AHEAD
from edge.backends.tvm.targets import TARGETS
from edge.formats.blocks import BLOCK_TYPES
from edge.media import mel, resample, sound
from edge.model.adapters.lora import MAX_RANK
from edge.model.adapters.lora_file import MAX_SCALE
from edge.model.tokens import tokenizer, word_piece
from edge.plan import engines, resolved
from edge.plan.candidates import EVICTED_SHARE
from edge.plan.checks import SMALLEST_ROWS, WRITABLE_ROWS
from edge.plan.plan import DRAFT_TEXT
from edge.prompt_cache.tree import SNAPSHOT_STEP
from edge.run import reclaim
from edge.run.budgets import governor, meters
from edge.run.drafting import ahead, draft_model, drafts
from edge.run.sampling import sampler
from edge.run.sequences.embedding import TOGETHER
from edge.run.speech import decoding, rules, transcript, voice, windows
from edge.run.starting import race
from edge.sampling import LARGEST_BIAS, MOST_BIASES

CONSTANTS = "constants.h"

# Where the names differ, Python's is short because its module says the rest.
_INTEGERS = {
    "MODEL_VERSION": model_file.VERSION,
    "ADAPTER_VERSION": adapter_file.VERSION,
    "RANK_STEP": padded_rank(1),
    "MOST_RANK": MAX_RANK,
    "SECTION_ALIGNMENT": model_file.ALIGNMENT,
    "WEIGHT_ALIGNMENT": model_file.WEIGHT_ALIGNMENT,
    "ROPE_AHEAD": ROPE_AHEAD,
    "LINE": LINE,
    "LINES": LINES,
    "TILE": TILE,
    "SPARE_ROWS": SPARE_ROWS,
    "LONGEST_SHARE": LONGEST_SHARE,
    "IMPORTANCE_EXTRA": importance.EXTRA,
    "INT4_STEPS": row_formats.STEPS,
    "SNAPSHOTS": gpu_programs.SNAPSHOTS,
    "SNAPSHOT_STEP": SNAPSHOT_STEP,
    "RING_SLACK": ring.SLACK,
    "RING_SHARE": ring.SPARE_SHARE,
    "ROTATED_AT_ONCE": row_lists.ROTATED_AT_ONCE,
    "EVICTED_SHARE": EVICTED_SHARE,
    "SMALLEST_ROWS": SMALLEST_ROWS,
    "WRITABLE_ROWS": WRITABLE_ROWS,
    "ROWS_STEP": reclaim.ROWS_STEP,
    "SMALLEST_CHUNK": reclaim.SMALLEST_CHUNK,
    "PENALTY_WINDOW": sampler.PENALTY_WINDOW,
    "MOST_STOPS": MOST_STOPS,
    "MOST_DRY": MOST_DRY,
    "MOST_BIASES": MOST_BIASES,
    "LONGEST_STOP": LONGEST_STOP,
    "TEXT_BLOCK": tokenizer.BLOCK,
    "LONGEST_BLOCK": tokenizer.LONGEST_BLOCK,
    "ADDS_SPACE": vocabulary.ADDS_SPACE,
    "SPACE_FIRST": vocabulary.SPACE_FIRST,
    "SPACE_ALWAYS": vocabulary.SPACE_ALWAYS,
    "WHOLE_WORDS": vocabulary.WHOLE_WORDS,
    "COMPOSES": vocabulary.COMPOSES,
    "IS_CONTROL": vocabulary.IS_CONTROL,
    "ONLY_SPECIAL": vocabulary.ONLY_SPECIAL,
    "SWALLOWS": vocabulary.SWALLOWS,
    "LONGEST_PIECE": vocabulary.LONGEST_PIECE,
    "MOST_PROBES": vocabulary.MOST_PROBES,
    "TOKEN_BITS": vocabulary.TOKEN_BITS,
    "RANK_BITS": vocabulary.RANK_BITS,
    "CODE_POINTS": words.CODE_POINTS,
    "WORDS_BLOCK": words.BLOCK,
    "WORDS_ENDS": words.ENDS,
    "MOST_SPLITS": words.MOST_SPLITS,
    "LETTER_DROPPED": letters.DROPPED,
    "LETTER_MAPPED": letters.MAPPED,
    "LETTER_SYLLABLE": letters.SYLLABLE,
    "LETTER_DECOMPOSED": letters.DECOMPOSED,
    "LETTER_ALONE": letters.ALONE,
    "LETTER_BLANK": letters.BLANK,
    "LONGEST_WORD": word_piece.LONGEST_WORD,
    "TEXTS_TOGETHER": TOGETHER,
    "CHAT_ABSENT": chat.ABSENT,
    "JOB_QUIT": Job.QUIT,
    "JOB_STEP": Job.STEP,
    "JOB_CHUNK": Job.CHUNK,
    "JOB_APPLY": Job.APPLY,
    "JOB_VERIFY": Job.BATCH,  # of an exported pass
    "DRAFTS_APPLIED": Job.APPLIED,
    "DRAFTS_VERIFIED": Job.VERIFIED,
    "JOB_RESCORE": Job.RESCORE,
    "JOB_CROSS": Job.CROSS,
    "JOB_EMBED": Job.EMBED,
    "WANTED_BOUNDS": Job.ESTIMATED,
    "HEAD_TILE": blocks.TILE,
    "TILES_EACH": two_stages.TILES_EACH,
    "LONGEST_WHOLE": two_stages.LONGEST,
    "MOST_PICKS": min(PICKS, ANGLES_AHEAD, ROPE_AHEAD),
    "MOST_BANS": State.MOST_BANS,
    "MOST_SCALARS": gpu_programs.MOST_SCALARS,
    "MOST_TOP": TOP,
    "PICKED_IN_VAIN": ahead.IN_VAIN,
    "MOST_DRAFTS": max(each.gemm_tokens for each in TARGETS) - 1,
    "DRAFT_TEXT": DRAFT_TEXT,
    "DRAFT_DEPTH": drafts.DEPTH,
    "DRAFT_SINKS": draft_model.SINKS,
    "MTP_STATES": resolved.MTP_STATES,
    "DRAFT_KINDS": len(ahead.FIRST_CHANCES),
    "DRAFT_CONTEXTS": len(ahead.CONTEXTS),
    "FEW_TIMES": ahead.FEW,
    "SHORT_READINGS": governor.SHORT_READINGS,
    "FIRST_PAID": governor.FIRST_PAID,
    "FIRST_TIMED": governor.FIRST_TIMED,
    "RACE_PROMPT": engines.PROMPT,
    "RACE_ANSWER": engines.ANSWER,
    "RACE_ROUNDS": race.ROUNDS,
    "RACE_STEPS": race.STEPS,
    "RACE_FEW": race.FEW,
    "SOUND_RATE": mel.RATE,
    "SLOWEST_SOUND": sound.LOWEST,
    "FASTEST_SOUND": hearing.FASTEST,
    "SINC_ZEROS": resample.ZEROS,
    "SINC_PHASES": resample.PHASES,
    "MEL_HOP": mel.HOP,
    "MEL_WINDOW": mel.WINDOW,
    "VOICE_NOISE": voice.NOISE,
    "VOICE_SHORTEST": voice.SHORTEST,
    "VOICE_JOINED": voice.JOINED,
    "VOICE_CLICK": voice.CLICK,
    "STILL_FRAMES": transcript.STILL,
    "ALIGNED_TOKENS": hearing.ALIGNED,
    "FRAMES_BEFORE": transcript.BEFORE,
    "PAUSE_FRAMES": windows.PAUSE,
    "SOUND_PART": windows.PART,
    "ENCODING_SHARE": transcript.ENCODING,
    "STAMP_FRAMES": round(rules.STEP_S / windows.FRAME_S),
    "STEM_PANEL": hearing.PANEL,
    "MOST_BANDS": hearing.MOST_BANDS,
    "MOST_MEL_FRAMES": hearing.MOST_FRAMES,
    "MOST_TEXT_BYTES": hearing.MOST_TEXT_BYTES,
    **{f"TOOLS_{name}": getattr(tools_file, name) for name in tools_file.FLAGS},
    "LATEST_FIRST": round(rules.LATEST_FIRST_S / rules.STEP_S),
}
_DOUBLES = {
    "LARGEST_BIAS": LARGEST_BIAS,
    "LARGEST_EXPONENT": sampler.LARGEST_EXPONENT,
    "LARGEST_PENALTY": sampler.LARGEST_PENALTY,
    "MOST_SCALE": MAX_SCALE,
    "NPU_HIDDEN": HIDDEN,
    "CREDIT_S": governor.CREDIT_S,
    "SHORTEST_PAUSE_S": governor.SHORTEST_PAUSE_S,
    "LONGEST_PAUSE_S": governor.LONGEST_PAUSE_S,
    "HOPELESS_S": governor.HOPELESS_S,
    "NO_COOLER_S": governor.NO_COOLER_S,
    "CELSIUS_MARGIN": governor.CELSIUS_MARGIN,
    "GAIN": governor.GAIN,
    "INTEGRAL": governor.INTEGRAL,
    "THERMAL_S": governor.THERMAL_S,
    "LEAST_DUTY": governor.LEAST_DUTY,
    "MEMORY_SLACK": governor.MEMORY_SLACK,
    "STALLED": governor.STALLED,
    "SETTLE_S": governor.SETTLE_S,
    "FORGET": governor.FORGET,
    "PRESSURE_S": meters.PRESSURE_S,
    "FEW_TILES": two_stages.FEW,
    "COLDEST": sampler.COLDEST,
    "BURST_S": ahead.BURST_S,
    "LEAST_GAIN": ahead.LEAST_GAIN,
    "CAUTION": ahead.CAUTION,
    "FIRST_OF_MODEL": ahead.FIRST_OF_MODEL,
    "FIRST_COST": ahead.FIRST_COST[0],
    "FIRST_COST_EACH": ahead.FIRST_COST[1],
    "TRUSTED_DRAFTS": ahead.TRUSTED,
    "DRAFTS_REMEMBERED": ahead.MEMORY,
    "NEWEST_TIME": ahead.NEWEST,
    "OUTLIER_TIME": ahead.OUTLIER,
    "SINC_CUTOFF": resample.CUTOFF,
    "KAISER_BETA": resample.BETA,
    "VOICE_FLOOR": voice.FLOOR,
    "VOICE_ABOVE": voice.ABOVE,
    "VOICE_LOUD_NOISE": voice.LOUD_NOISE,
    "STAMP_S": rules.STEP_S,
    "NO_SPEECH": decoding.NO_SPEECH,
    "MOST_COMPRESSION": decoding.MOST_RATIO,
    "LEAST_LOGPROB": decoding.LEAST_LOGPROB,
    "FORGOTTEN": transcript.FORGOTTEN,
    "LARGEST_IMPORTANCE": importance.LARGEST,
    "NORM_FLOOR": importance.NORM_FLOOR,
}
_STRUCTS = model_file.STRUCTS | adapter_file.STRUCTS | vocabulary.STRUCTS | gpu_programs.STRUCTS
_STRUCTS |= npu_graphs.STRUCTS
_STRUCTS |= letters.STRUCTS | embedding.STRUCTS | hearing.STRUCTS | eyes_file.STRUCTS | sounds_file.STRUCTS
_STRUCTS |= tools_file.STRUCTS | draft_file.STRUCTS
_STRUCTS |= {"words_config": words.CONFIG, "chat_header": chat.HEADER}
_TYPES = {"i4": "int32_t", "u2": "uint16_t", "u4": "uint32_t", "u8": "uint64_t", "f8": "double"}


@lru_cache
def constants_header() -> str:
    """The text of constants.h."""
    lines = [
        "/* Numbers and structs that Python has, too. Written by edge/apps/constants.py. */",
        "#pragma once\n\n#include <stddef.h>\n#include <stdint.h>\n",
        _enum("", (f"{name} = {value}" for name, value in _INTEGERS.items())),
        *(f"static const double {name} = {float(value)!r};" for name, value in _DOUBLES.items()),
        f"static const double FIRST_CHANCES[] = {{{', '.join(map(repr, ahead.FIRST_CHANCES))}}};",
        f"static const uint32_t CONTEXT_ROWS[] = {{{', '.join(map(str, ahead.CONTEXTS))}}};",
        f"static const double TEMPERATURES[] = {{{', '.join(map(repr, decoding.TEMPERATURES))}}};",
        f"#define DRY_BREAKERS {json.dumps(b''.join(sampler.DRY_BREAKERS).decode())}",
        f"static const float LARGEST_HALF = {row_formats.LARGEST};",
        _enum("section_kind", [*(f"SECTION_{each.name} = {each.value}" for each in Section), "SECTIONS"]),
        _enum("chat_part", [*(f"CHAT_{_upper(name)}" for name in chat.PARTS), "CHAT_PARTS"]),
        _enum("tool_part", [*(f"TOOL_{_upper(name)}" for name in tools_file.PARTS), "TOOL_PARTS"]),
        _enum("", [*(f"TOOL_TEXT_{_upper(name)}" for name in tools_file.TEXTS), "TOOL_TEXTS"]),
        _enum("", (f"TOOL_ITEM_{_upper(name)}" for name in tools_file.ITEMS)),
        _enum("written_as", (f"WRITTEN_{_upper(name)}" for name in tools_file.WRITTEN)),
        _enum("", (f"POLICY_{name.upper()}" for name in model_file.POLICIES)),
        _enum("", (f"KV_{name.upper()}" for name in model_file.KV_DTYPES)),
        f"static const uint32_t GPU_NONE = {gpu_programs.NONE}u;",
        f"enum {{ GPU_ALIGNMENT = {gpu_programs.BUFFER_ALIGNMENT} }}; /* bytes, of buffers' sizes */",
        _enum("", (f"GPU_{name.upper()}" for name in gpu_programs.LANGUAGES)),
        _enum("gpu_passes", (f"GPU_{name}" for name in gpu_programs.PASSES)),
        _enum("", (f"GPU_STATE_{name} = {getattr(State, name)}" for name in gpu_programs.STATE)),
        f'#define ADAPTER_MAGIC "{adapter_file.MAGIC.decode()}"',
        _enum("", (f"LORA_{name}" for name in adapter_file.KINDS)),
        _enum("", (f"KIND_{name.upper()}" for name in vocabulary.KINDS)),
        _enum("", (f"LETTER_{name}" for name in letters.GRAPHEMES)),
        _enum("", (f"POOL_{name.upper()}" for name in embedding.POOLINGS)),
        _enum("", (f"NORM_{name.upper() or 'NONE'}" for name in embedding.NORMS)),
        _enum("", (f"EYES_{name.upper()}" for name in eyes_file.FAMILIES)),
        _enum("pixel_filter", [*(f"FILTER_{name.upper()}" for name in eyes_file.FILTERS), "FILTERS"]),
        _enum("eyes_text", [*(f"EYES_TEXT_{_upper(name)}" for name in eyes_file.TEXTS), "EYES_TEXTS"]),
        _enum("", (f"POSITIONS_{_upper(name)}" for name in eyes_file.POSITIONS)),
        _enum("", [*(f"EYES_PART_{_upper(name)}" for name in eyes_file.PART_MATRICES), "EYES_PART_MATRICES"]),
        _enum("", [*(f"SOUND_{name}" for name in sounds_file.KINDS), "SOUND_KINDS"]),
        _enum("sound_matrix", [*(f"SOUND_MATRIX_{_upper(name)}" for name in sounds_file.MATRICES), "SOUND_MATRICES"]),
        _enum("eyes_matrix", [*(f"EYES_MATRIX_{name.upper()}" for name in eyes_file.MATRICES), "EYES_MATRICES"]),
        _enum("", [*(f"ISA_{each.name.upper()}" for each in TARGETS), "ISAS"]),
        "#define ISA_NAMES " + ", ".join(f'"{each.name}"' for each in TARGETS),
        f"typedef struct {{ int64_t {', '.join(Job.NAMES)}; }} pass_job;",
        *(_struct(name, fields) for name, fields in _STRUCTS.items()),
        range_tables(),
        _table_types(),
    ]
    return "\n".join(lines) + "\n"


def _table_types() -> str:
    """A macro: types of blocks as X(name, values, bytes)."""
    sizes = {each.name: (each.values, each.nbytes) for each in BLOCK_TYPES.values()}
    lines = ["X({}, {}, {})".format(name.lower(), *sizes[name]) for name in model_file.TABLE_TYPES]
    return "#define TABLE_TYPES(X) \\\n    " + " \\\n    ".join(lines)


def _upper(name: str) -> str:
    return name.upper().replace(" ", "_")


def _enum(name: str, members: Iterable[str]) -> str:
    return f"enum {name}{' ' * bool(name)}{{\n" + "".join(f"    {each},\n" for each in members) + "};"


def _struct(name: str, struct: np.dtype[np.void]) -> str:
    """A struct, and static assertions that the compiler gives it NumPy's size and offsets, which the file has."""
    fields: Mapping[str, Any] = struct.fields or {}
    declared = "".join(f"    {_declaration(each, kind)};\n" for each, (kind, *_) in fields.items())
    checks = [f"sizeof({name}) == {struct.itemsize}"]
    checks += [f"offsetof({name}, {each}) == {at}" for each, (_, at, *_) in fields.items()]
    asserted = "".join(f'_Static_assert({check}, "layout of {name}");\n' for check in checks)
    return f"typedef struct {{\n{declared}}} {name};\n{asserted}"


def _declaration(name: str, kind: np.dtype[np.generic]) -> str:
    if kind.subdtype:
        each, (count,) = kind.subdtype
        return f"{_declaration(name, each)}[{count}]"
    if kind.fields:
        return f"{next(each for each, struct in _STRUCTS.items() if struct == kind)} {name}"
    if kind.kind in "SV":
        return f"{'char' if kind.kind == 'S' else 'uint8_t'} {name}[{kind.itemsize}]"
    return f"{_TYPES[kind.str[1:]]} {name}"
