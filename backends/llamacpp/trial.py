"""llama.cpp tries a header that edge does not check in full, in a process of its own, before anything is loaded.

There an abort is an error message. The model is opened without its weights (`no_alloc`), so that a trial takes a
fraction of a second whatever its size; contexts of several sizes tell what llama.cpp would allocate. Before it is
loaded for the first time, another process runs a few tokens, because some assertions are checked only then. Results are
remembered in the cache folder under the header's hash, llama.cpp's version and the source of the trial.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge.backends.base import EngineConfig
from edge.backends.llamacpp.library import version
from edge.devices.child import run_child
from edge.errors import CacheError, EngineError, UnsupportedError
from edge.formats.gguf import GGUFFile, at_full_size
from edge.model.spec import ModelSpec
from edge.storage import cache

ROWS, CHUNKS = (256, 4096, 65536), (1, 16, 512)  # of the contexts that are tried
TRIED = EngineConfig(ROWS[0], CHUNKS[1], "f16", 1)  # by `try_passes`
CHILD_BYTES = 64 << 20  # of Python and llama.cpp in a process that tries something, measured: up to 60 MiB
_TOKEN_BYTES = 200  # of llama.cpp's vocabulary there, measured: up to 180
_TIMEOUT = 120.0  # seconds
# glibc maps no block anew (see `_leave_gap` in trial_child.py).
_CHILD = {"GGML_NO_BACKTRACE": "1", "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
_HEADERS: dict[str, Trial] = {}  # by `_key`
_TRIALS: dict[ModelSpec, Trial] = {}  # for the plan, which sees no files


@dataclass(frozen=True)
class Counted:
    """Of contexts with flash attention, or without.

    row_values: values of K and V in one row, all layers together. compute: bytes of compute buffers, by ROWS and
    CHUNKS.
    """

    row_values: int
    compute: tuple[tuple[int, ...], ...]

    def compute_bytes(self, rows: int, chunk: int) -> int:
        """Between the sizes that were tried. Buffers are the largest of several products of rows and tokens, so that
        a straight line between two of them lies above."""
        by_rows = [_between(CHUNKS, line, chunk) for line in self.compute]
        return int(_between(ROWS, by_rows, rows))


@dataclass(frozen=True)
class Trial:
    """What llama.cpp says of a model. window: of sliding attention that it applies, 0: none. state_bytes: of one
    sequence. graph: bytes beside the buffers, measured, by CHUNKS: llama.cpp keeps room for the nodes of some
    architectures by the token."""

    recurrent: bool
    can_shift: bool
    window: int
    state_bytes: int
    graph: tuple[int, ...]
    flash: Counted
    plain: Counted

    def graph_bytes(self, chunk: int) -> int:
        return int(_between(CHUNKS, self.graph, chunk))


def try_header(file: GGUFFile, spec: ModelSpec) -> Trial:
    """Raises UnsupportedError for a model that llama.cpp cannot load, or with which it ends the process."""
    key = _key(file, "header")
    found = _HEADERS.get(key)
    if found is None:
        found = _trial_of(_remembered(file, key, "header", CHILD_BYTES + _TOKEN_BYTES * spec.vocab))
        found = replace(found, can_shift=found.can_shift and not shifts_wrongly(file))
        if found.recurrent and not spec.recurrent:
            raise UnsupportedError(f"{file.path}: llama.cpp keeps a recurrent state that edge does not know")
    _HEADERS[key] = _TRIALS[spec] = found
    return found


def try_passes(file: GGUFFile, takes: int) -> None:
    """Raises UnsupportedError for a model with which llama.cpp ends the process when it runs tokens. takes: bytes."""
    _remembered(file, _key(file, "passes"), "passes", takes)


def have_run(file: GGUFFile) -> bool:
    """Whether `try_passes` went well before."""
    return cache.find("trials", _key(file, "passes"), ".json") is not None


def shifts_wrongly(file: GGUFFile) -> bool:
    """Whether RoPE also scales keys, which llama.cpp would scale again whenever it shifts them, or leaves those of some
    layers as they are, which it would rotate."""
    architecture = file.metadata["general.architecture"]
    scaled = file.metadata.get(f"{architecture}.rope.scaling.type") in ("yarn", "longrope")
    return scaled or "rope_factors_long.weight" in file.tensors or architecture == "smollm3"


def known_trial(spec: ModelSpec) -> Trial | None:
    """Of a model that was tried in this process."""
    return _TRIALS.get(spec)


def _trial_of(record: dict[str, Any]) -> Trial:
    counted = {
        name: Counted(record[name]["row_values"], tuple(tuple(line) for line in record[name]["compute"]))
        for name in ("flash", "plain")
    }
    return Trial(**{**record, **counted, "graph": tuple(record["graph"])})


def _remembered(file: GGUFFile, key: str, what: str, takes: int) -> dict[str, Any]:
    def write(path: Path) -> None:
        path.write_text(json.dumps(_ask(file, what, takes)), encoding="ascii")

    try:
        path = cache.find_or_make("trials", key, ".json", write, about=file.path.name)
        found: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    except (CacheError, OSError, ValueError):  # a cache folder that cannot be used
        found = _ask(file, what, takes)
    return found


def _ask(file: GGUFFile, what: str, takes: int) -> dict[str, Any]:
    """What a child process answers that tries the `header` or `passes`, in so much memory."""
    try:
        with at_full_size(file) as path:
            found: dict[str, Any] = run_child(
                "edge.backends.llamacpp.trial_child",
                [what, str(path)],
                lambda message: None,
                failure="llama.cpp gave up",
                takes=takes,
                purpose="tries the model",
                environment=_CHILD,
                timeout=_TIMEOUT,
            )
    except UnsupportedError:
        raise
    except EngineError as error:
        raise UnsupportedError(f"{file.path}: llama.cpp cannot load it ({error})") from None
    return found


def _key(file: GGUFFile, what: str) -> str:
    digest = hashlib.sha256(f"{version()} {file.size} {what}".encode())
    for name in ("parameters.py", "trial.py", "trial_child.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    with open(file.path, "rb") as data:
        digest.update(data.read(file.data_offset))
    return digest.hexdigest()[:32]


def _between(sizes: tuple[int, ...], values: Any, size: int) -> float:
    """The value at `size`, on the straight line through its neighbours; beyond the last, through the last two."""
    if size <= sizes[0]:
        return float(values[0])
    at = min(bisect_right(sizes, size), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return float(values[at - 1] + (values[at] - values[at - 1]) * (size - low) / (high - low))
