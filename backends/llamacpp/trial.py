"""Trials of headers that edge does not check in full: llama.cpp loads them in a child process before anything is
loaded.

An abort there becomes an error message. The model is opened without its weights (`no_alloc`), so a trial takes a
fraction of a second for any size; contexts of several sizes show what llama.cpp would allocate. Before the first real
load, another child runs a few tokens, because some assertions are checked only then. Results are remembered in the
cache folder under the header's hash, llama.cpp's version and the source of the trial.
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
from edge.model.structure.spec import ModelSpec
from edge.storage import cache

ROWS, CHUNKS = (256, 4096, 65536), (1, 16, 512)  # of the contexts that are tried
TRIED = EngineConfig(ROWS[0], CHUNKS[1], "f16", 1)  # by `try_passes`
CHILD_BYTES = 64 << 20  # of Python and llama.cpp in a process that tries something, measured: up to 60 MiB
_NODES_BYTES = 32 << 20  # of graphs with nodes for each token, as of gated delta nets, measured: up to 30 MiB
_TOKEN_BYTES = 200  # of llama.cpp's vocabulary there, measured: up to 180
_TIMEOUT = 120.0  # seconds
# glibc maps no block anew (see `_leave_gap` in trial_child.py).
_CHILD = {"GGML_NO_BACKTRACE": "1", "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
_HEADERS: dict[str, Trial] = {}  # by `_key`
_TRIALS: dict[ModelSpec, Trial] = {}  # for the plan, which sees no files


@dataclass(frozen=True)
class Counted:
    """Memory of contexts with flash attention, or without."""

    row_values: int  # values of K and V per row, all layers together
    compute: tuple[tuple[int, ...], ...]  # bytes of compute buffers, by ROWS and CHUNKS

    def compute_bytes(self, rows: int, chunk: int) -> int:
        """Interpolate between the sizes tried. A buffer is the maximum of several products of rows and tokens, so a
        straight line between two sizes is an upper bound."""
        by_rows = [_between(CHUNKS, line, chunk) for line in self.compute]
        return int(_between(ROWS, by_rows, rows))


@dataclass(frozen=True)
class Trial:
    """llama.cpp's facts about a model."""

    recurrent: bool
    can_shift: bool
    window: int  # sliding window that it applies; 0: none
    state_bytes: int  # of one sequence
    graph: tuple[int, ...]  # measured bytes besides the buffers, by CHUNKS; some architectures need nodes per token
    flash: Counted
    plain: Counted

    def graph_bytes(self, chunk: int) -> int:
        return int(_between(CHUNKS, self.graph, chunk))


def try_header(file: GGUFFile, spec: ModelSpec) -> Trial:
    """Try a header. Raises UnsupportedError for a model that llama.cpp cannot load, or that makes it abort."""
    key = _key(file, "header")
    found = _HEADERS.get(key)
    if found is None:
        takes = CHILD_BYTES + _TOKEN_BYTES * spec.vocab + _NODES_BYTES * spec.recurrent
        found = _trial_of(_remembered(file, key, "header", takes))
        found = replace(found, can_shift=found.can_shift and not shifts_wrongly(file))
        if found.recurrent and not spec.recurrent:
            raise UnsupportedError(f"{file.path}: llama.cpp keeps a recurrent state that edge does not know")
    _HEADERS[key] = _TRIALS[spec] = found
    return found


def try_passes(file: GGUFFile, takes: int) -> None:
    """Run tokens in a child process of `takes` bytes. Raises UnsupportedError for a model that makes llama.cpp
    abort."""
    _remembered(file, _key(file, "passes"), "passes", takes)


def have_run(file: GGUFFile) -> bool:
    """Whether `try_passes` succeeded before."""
    return cache.find("trials", _key(file, "passes"), ".json") is not None


def shifts_wrongly(file: GGUFFile) -> bool:
    """Whether llama.cpp would shift keys wrongly: where RoPE also scales keys, it would scale them again, and where
    some layers have no RoPE, it would rotate theirs."""
    architecture = file.metadata["general.architecture"]
    scaled = file.metadata.get(f"{architecture}.rope.scaling.type") in ("yarn", "longrope")
    return scaled or "rope_factors_long.weight" in file.tensors or architecture == "smollm3"


def known_trial(spec: ModelSpec) -> Trial | None:
    """The trial of a model in this process, or None."""
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
    """The answer of a child process that tries the `header` or `passes`, with `takes` bytes of memory."""
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
    """Interpolate linearly at `size`; extrapolate from the last two."""
    if size <= sizes[0]:
        return float(values[0])
    at = min(bisect_right(sizes, size), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return float(values[at - 1] + (values[at] - values[at - 1]) * (size - low) / (high - low))
