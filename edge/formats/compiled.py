"""What a model was compiled for: the sizes of its static graphs, and the context binaries that a folder holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from edge.values import Rule

_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,200}")
_HASH = re.compile(r"[0-9a-f]{64}")

Word = Annotated[str, Rule("letters, digits and _ . + - only", _WORD.fullmatch)]
Size = Annotated[int, Rule("a whole number from 1 to 1048576", lambda size: 1 <= size <= 1 << 20)]
Place = Literal["npu", "host"]
Rows = Annotated[int, Rule("a whole number from 0 to 1048576", lambda size: 0 <= size <= 1 << 20)]


@dataclass(frozen=True)
class StaticForm:
    """The sizes of static graphs. rows: of the KV cache; ring_rows: of layers with a ring (0: none has one). chunk:
    tokens that run at once in prefill. shards: into which the layers are cut. head: what multiplies by the last matrix,
    the NPU or the host."""

    rows: Size
    ring_rows: Rows
    chunk: Size
    kv_dtype: Literal["f16", "f32"] = "f16"
    shards: Size = 1
    head: Place = "npu"


@dataclass(frozen=True)
class Compiled:
    """Context binaries of a folder. provider: of ONNX Runtime, as `--provider` says it. device: the profile's name, of
    which soc and arch are (`edge.devices.profile.Npu`). compiler: the version of the vendor's. contexts: the file of
    each shard. graphs: what the compiler called the shards' graphs, the chunk's and the step's. source: SHA-256 of the
    static graphs that were compiled."""

    form: StaticForm
    provider: Word
    device: Word
    soc: Size | None
    arch: Word | None
    compiler: Word
    contexts: tuple[Word, ...]
    graphs: tuple[tuple[Word, Word], ...]
    source: Annotated[str, Rule("a hash", _HASH.fullmatch)]
