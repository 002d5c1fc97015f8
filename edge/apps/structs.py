"""The structs of edge.h that every language repeats: options, readings, figures. Each field is defined once, here.

The sampling options come from the fields of `edge.sampling.SamplingParams`, with their ranges and help.
`bindings.py` writes the fields into edge.h and the bindings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import IntEnum
from typing import Literal, get_type_hints

from edge.apps.enums import Engine, Speculate
from edge.flags import Flag, flags_of
from edge.records import dataclass
from edge.sampling import RECOMMENDED, SamplingParams

Kind = Literal["uint32", "int32", "uint64", "int64", "double", "flag", "seed", "text", "texts", "ids"]
MOST_STOPS, LONGEST_STOP = 16, 128  # stop strings of an answer; bytes of one
MOST_DRY = 4096  # tokens of an answer in which DRY may look for repetitions
LARGEST = 1e18  # bound of quantities; comparing with it rejects infinity and NaN


@dataclass(frozen=True)
class Field:
    """A field of a struct."""

    name: str
    """In C and Python; other languages write it in camel case."""
    kind: Kind
    """flag: a uint32 that is 0 or 1. seed: a uint32 that says whether it is given, then a uint64 of any value.
    text: a zero-terminated string. texts: an array of these, then its length. ids: an array of int32, likewise."""
    about: str = ""
    otherwise: str = ""
    """The value of a field that is not given, in words."""
    unset: int = 0
    """The number that means "not given" in C."""
    low: float = -math.inf
    high: float = math.inf
    without: tuple[str, ...] = ()
    """Languages that lack the field: kotlin, swift, web; types: TypeScript's declarations lack it."""
    usual: float = 0
    """The value of a field of sampling that is not given and that models do not recommend."""
    enum: type[IntEnum] | None = None
    """What the numbers of a uint32 mean."""

    @property
    def checked(self) -> bool:
        return self.kind in ("double", "int32") and math.isfinite(self.high)

    @property
    def range(self) -> str:
        """The range that C accepts, in words."""
        if self.high == LARGEST:
            return "more than 0, or 0 for no limit"
        usual = f"{self.usual:g}" if self.usual else "the model's own"
        return f"from {self.low:g} to {self.high:g}" + f", or less than 0 for {usual}" * (self.unset < 0)


def _sampling() -> Iterator[Field]:
    types = get_type_hints(SamplingParams)
    for name, flag in flags_of(SamplingParams).items():
        if not flag.apps:
            continue
        if name == "seed":
            yield Field(name, "seed", _about(flag), "a new one for every answer")
        else:
            kind: Kind = "int32" if types[name] is int else "double"
            own, usual = name in RECOMMENDED, 0 if name in RECOMMENDED else getattr(SamplingParams(), name)
            otherwise = "as the model recommends" if own else f"{usual:g}" if usual else ""
            high = MOST_DRY if name == "dry_last_n" else flag.high
            yield Field(
                name, kind, _about(flag), otherwise, -bool(own or usual), flag.low, high, usual=usual
            )  # fmt: skip


def _about(flag: Flag) -> str:
    return re.sub(r" \(default.*\)", "", flag.help)


def _budget(name: str, about: str, without: tuple[str, ...] = ()) -> Field:
    return Field(name, "double", about, "no limit", 0, 0, LARGEST, without)


OPTIONS = [
    Field(
        "threads", "uint32", "CPU threads.", "the cores of the fastest cluster, as far as the bundle has room for them",
        without=("types",),
    ),
    Field("cpu_mask", "uint64", "Bit i: threads may run on CPU i.", "all of them", without=("swift", "web")),
    Field(
        "isa", "text", "Instruction set, such as dotprod; read when a session begins only.", "the best of this CPU",
        without=("web",),
    ),
    *_sampling(),
    Field("max_tokens", "uint32", "Tokens to generate.", "no limit"),
    Field(
        "speculate", "uint32", "Whether drafts of repeated text are verified; the answer is the same.", enum=Speculate,
    ),
    Field("ignore_eos", "flag", "Never end the turn; go on."),
    Field("stop", "texts", f"Texts before which an answer ends: {MOST_STOPS} of {LONGEST_STOP} bytes at most."),
    _budget("time", "Seconds that an answer and the prompt before it may take."),
    _budget("energy", "Joules that an answer and the prompt before it may cost, estimated without readings."),
    _budget("power", "Watts on average, estimated without readings; held by pauses."),
    _budget("max_temp", "Degrees Celsius that the processor may have, by readings; held by pauses.", without=("web",)),
    _budget(
        "headroom", "Limit of thermal headroom, by readings, on Android's scale, where the system throttles at 1; "
        "held by pauses.", without=("web",),
    ),
    Field(
        "engine", "uint32", "What computes: by default the faster of CPU and GPU, which are never timed under time or "
        "energy; read when a session begins only.",
        without=("web",), enum=Engine,
    ),
    Field(
        "cache", "text", "A folder for kernels that the GPU's driver has compiled, and for the faster engine; read "
        "when a session begins only.", "every session compiles, and by default the CPU computes", without=("web",),
    ),
    Field(
        "npu", "text", "The bundle's folder npu, for the engine npu; read when a session begins only.", "none",
        without=("web",),
    ),
]  # fmt: skip
EMBEDDING = [
    Field("prompt", "text", "Name of the model's prompt before texts, such as query or document.", "its own, if any"),
    Field("dimensions", "uint32", "The first values only, for models that were trained for that.", "all"),
    Field("pooling", "uint32", "An edge_pooling."),
    Field("unscaled", "flag", "Vectors are not scaled to length 1."),
    Field("truncate", "flag", "Leave out the end of a text that is longer than the cache."),
]
HEARING = [
    Field("rate", "uint32", "Samples per second, from 1000 to 192000; there is no default.", without=("types",)),
    Field("language", "text", "A code such as en.", "the likeliest of the first window with a voice"),
    Field("translate", "flag", "Write in English what was said in another language."),
    Field("prompt", "text", "Text that might have come before, for names and style.", "none"),
    Field(
        "temperature", "double", "The only one that is tried, from 0 to 1.", "0, and higher ones while a text repeats "
        "itself or is improbable", -1,
    ),
    Field("everything", "flag", "Ask the model about silence and steady noise, too, which are passed over otherwise."),
    Field("alone", "flag", "The text of a window is no prompt for the next."),
    Field("live", "flag", "The sound is made meanwhile: a window ends at a pause, instead of after 30 s."),
    Field("words", "flag", "Each word gets its times."),
]  # fmt: skip
SEGMENT = [
    Field("id", "uint32", "Its number in the transcript."),
    Field("finish", "uint32", "An edge_finish: why the transcript has ended.", without=("kotlin", "swift", "types")),
    Field("text", "text", "What was said; empty: no segment is complete yet."),
    Field("length", "uint32", "Bytes of the text.", without=("kotlin", "swift", "web")),
    Field("start", "double", "Seconds in the sound at which it begins, and next, ends."),
    Field("end", "double"),
    Field("language", "text", "The code of the language; empty: not yet known."),
    Field("words", "text", "If asked for, in JSON: a list of objects with word, start, end, probability; else empty."),
    Field("tokens", "ids", "With timestamps.", without=("kotlin", "swift", "web")),
    Field("temperature", "double", "Of the window it was found in, as the next three."),
    Field("avg_logprob", "double", "Mean natural logarithm of the probabilities of tokens."),
    Field("compression_ratio", "double", "Of the text's bytes to those of zlib: repetition if it is high."),
    Field("no_speech_prob", "double", "Probability that nothing was said."),
    Field("heard", "double", "Seconds of sound that were taken so far."),
]
READINGS = [
    Field(
        "joules", "double", "Energy since a fixed moment. Read it before a prompt, too: later consumption is estimated "
        "until the next reading.", unset=-1,
    ),
    Field("celsius", "double", "Temperature of the processor.", unset=-1),
    Field("headroom", "double", "Android's thermal headroom: the system throttles at 1.", unset=-1),
    Field("available", "int64", "Bytes that this process may still take.", unset=-1),
]  # fmt: skip
MODEL_INFO = [
    Field("abi", "uint32", "EDGE_ABI of the library.", without=("kotlin", "swift", "web")),
    Field("name", "text"),
    Field("license", "text"),
    Field("policy", "text", "The policy that evicts KV rows."),
    Field("kv_dtype", "text", "Type of KV rows."),
    Field("isa", "text", "The best instruction set of this CPU."),
    Field("vocab", "uint32", "Tokens of the vocabulary."),
    Field("context", "uint32", "Positions that the model has learned."),
    Field("capacity", "uint32", "KV rows."),
    Field("threads", "uint32", "The most threads of a session.", without=("types",)),
    Field("chat", "flag", "Whether the model has a chat template."),
    Field("weights", "uint64", "Bytes of weights; like the next two, planned for one session.", without=("types",)),
    Field("kv", "uint64", "Bytes of KV rows.", without=("types",)),
    Field("scratch", "uint64", "Bytes of scratch memory.", without=("types",)),
    Field("lora_rank", "uint32", "Rank of the largest adapter for which sessions have room; 0: none."),
    Field("dimensions", "uint32", "Values of an embedding; 0: the bundle makes none."),
]
USAGE = [
    Field("rows", "uint32", "Rows of the KV cache in use."),
    Field("capacity", "uint32", "Rows of the KV cache."),
    Field("threads", "uint32"),
    Field("weights", "uint64", "Bytes of weights."),
    Field("kv", "uint64", "Bytes of KV rows."),
    Field("scratch", "uint64", "Bytes of scratch memory."),
    Field("lora", "uint64", "Bytes of room for adapters; 0 on a GPU, whose buffers have it."),
    Field("file", "uint64", "Bytes of model.edge that are mapped."),
    Field(
        "anonymous",
        "uint64",
        "Resident anonymous bytes of the whole process (RssAnon); 0 where the system does not report them.",
        without=("web",),
    ),
    Field(
        "swapped",
        "uint64",
        "Bytes of the process in swap space (VmSwap). Google Play counts both together.",
        without=("web",),
    ),
    Field("tokens", "uint64", "Tokens that ran since the session began."),
    Field("evicted", "uint64", "Rows that the policy evicted."),
    Field("drafted", "uint64", "Verified drafted tokens since the session began; next, the accepted ones."),
    Field("accepted", "uint64"),
    Field("joules", "double", "Joules and seconds of the last answer and its prompt."),
    Field("seconds", "double"),
    Field("measured", "flag", "Whether the app read the joules; otherwise they are estimated."),
    Field("engine", "uint32", "What computes.", without=("web",), enum=Engine),
    Field("engine_why", "text", "Why this engine was chosen; empty: the app chose it.", without=("web",)),
    Field("gpu", "text", "Name of the GPU or of the NPU's runtime; empty: the CPU computes.", without=("web",)),
    Field(
        "gpu_bytes",
        "uint64",
        "Bytes of the GPU's buffers, which are in the process where memory is shared. For an NPU: "
        "bytes of rows, inputs and outputs in the process.",
        without=("web",),
    ),
    Field("gain", "double", "Speed-up of the last answer by drafts, from the times of its passes; 0: not known."),
    Field(
        "encoder",
        "uint64",
        "Bytes of an encoder, its file included: eyes.edge's during edge_image, sounds.edge's during edge_sound, "
        "ears.edge's from edge_listen on.",
    ),
    Field("pictures", "uint64", "Bytes of rows of pictures that may still run."),
    Field(
        "picture_joules",
        "double",
        "Joules (estimated) and seconds of all calls of edge_image and edge_sound; joules and seconds have those of "
        "transcripts.",
    ),
    Field("picture_seconds", "double"),
]
STRUCTS = {
    "Options": OPTIONS, "Embedding": EMBEDDING, "Hearing": HEARING, "Segment": SEGMENT, "Readings": READINGS,
    "ModelInfo": MODEL_INFO, "Usage": USAGE,
}  # fmt: skip

_POINTER = "pointer"
_SIZES = {"uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "double": 8}


def members(struct: list[Field]) -> list[tuple[str, str]]:
    """Names and types in C, where a text is a pointer."""
    found = [("size", "uint32")]
    for each in struct:
        if each.kind == "seed":
            found += [("seeded", "uint32"), (each.name, "uint64")]
        elif each.kind in ("texts", "ids"):
            found += [(each.name, _POINTER), (f"{each.name}_count", "uint32")]
        else:
            found.append((each.name, {"flag": "uint32", "text": _POINTER}.get(each.kind, each.kind)))
    return found


def layout(struct: list[Field], pointer: int) -> tuple[dict[str, int], int]:
    """Where C compilers put the members, in bytes, and the size of the struct. pointer: bytes of one."""
    places, end, largest = dict[str, int](), 0, 1
    for name, kind in members(struct):
        size = _SIZES.get(kind, pointer)
        places[name] = -(-end // size) * size
        end, largest = places[name] + size, max(largest, size)
    return places, -(-end // largest) * largest


def range_tables() -> str:
    """C macros: the sampling options, as X(type, name), or where models recommend nothing as Y(type, name), with a
    usual value as Z(type, name, value); and the ranges of options, as X(name, low, high, own, words).

    own: whether a value below 0 means the model's recommendation, or the usual value.
    """
    types = {"int32": "uint32_t", "double": "double"}
    names = {each.name for each in fields(SamplingParams)}
    drawn = [
        f"Z({types[each.kind]}, {each.name}, {each.usual})" if each.usual
        else f"{'X' if each.unset else 'Y'}({types[each.kind]}, {each.name})"
        for each in OPTIONS if each.name in names - {"seed"}
    ]  # fmt: skip
    ranges = [
        f'X({each.name}, {each.low:g}, {each.high:g}, {int(each.unset < 0)}, "{each.range}")'
        for each in OPTIONS if each.checked
    ]  # fmt: skip
    return "\n".join(
        f"#define {name} \\\n    " + " \\\n    ".join(lines)
        for name, lines in (("SAMPLING_OPTIONS(X, Y, Z)", drawn), ("RANGED_OPTIONS(X)", ranges))
    )
