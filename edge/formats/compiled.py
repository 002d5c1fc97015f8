"""The static graphs that a model was compiled for, and the context binaries of a folder."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from edge.records import dataclass
from edge.values import Rule

_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,200}")
_HASH = re.compile(r"[0-9a-f]{64}")

Word = Annotated[str, Rule("letters, digits and _ . + - only", _WORD.fullmatch)]
Size = Annotated[int, Rule("a whole number from 1 to 1048576", lambda size: 1 <= size <= 1 << 20)]
RowCount = Annotated[int, Rule("a whole number from 0 to 1048576", lambda size: 0 <= size <= 1 << 20)]


@dataclass(frozen=True)
class StaticForm:
    """The sizes of static graphs."""

    rows: Size  # of the KV cache
    ring_rows: RowCount  # rows of layers with a ring; 0: no such layer
    chunk: Size  # tokens of a prefill pass
    kv_dtype: Literal["f16", "f32"] = "f16"
    shards: Size = 1  # number of parts that the layers are split into


@dataclass(frozen=True)
class Compiled:
    """Context binaries of a folder."""

    form: StaticForm
    provider: Word  # ONNX Runtime's, as for `--provider`
    device: Word  # name of the profile
    soc: Size | None  # see edge.devices.profiles.profile.Npu
    arch: Word | None  # see edge.devices.profiles.profile.Npu
    compiler: Word  # version of the vendor's compiler
    contexts: tuple[Word, ...]  # a file per shard
    graphs: tuple[tuple[Word, Word], ...]  # names of each shard's graphs: the chunk's and the step's
    source: Annotated[str, Rule("a hash", _HASH.fullmatch)]
