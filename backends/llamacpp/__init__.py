"""llama.cpp as an engine: GGUF files mapped or repacked, rows evicted token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edge.backends.base import Capabilities, EngineConfig, Footprint, MostRows, Operator, Tuned, all_positions
from edge.backends.efficiency import FLOATS, Efficiency, Kind, Rows, Weights
from edge.backends.llamacpp.library import is_installed, version
from edge.errors import MissingExtraError, UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec

if TYPE_CHECKING:
    from edge.backends.llamacpp.engine import LlamaCppEngine

NAME = "llamacpp"
KV_DTYPES = ("f16", "q8_0", "q4_0", "f32")  # f32 turns flash attention off: the exact mode, for tests
CAPABILITIES = Capabilities(
    "token", uneven="token", kv_dtypes=KV_DTYPES, attention=True, keys=False, lora=True, any_tokenizer=True
)
EFFICIENCY = Efficiency(
    {"integers": Weights(0.43, 1.8, 0.24), "others": Weights(0.30, 0.42), "floats": Weights(0.70, 1.1)},
    {"f16": Rows(0.12, 0.37), "q8_0": Rows(0.05, 0.09), "q4_0": Rows(0.012, 0.045)},
    step_s=50e-6,
)

KV_VALUE_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_WINDOWED = ("exaone4", "gemma2", "gemma3", "olmo2")  # the known architectures whose windows llama.cpp applies
_ROW_STEP = 256  # llama.cpp allocates the cache in steps of this many rows

# Weight types that llama.cpp repacks for the CPU's wide instructions: about 1.5 × the speed of the mapped file.
REPACKED_TYPES = {"Q4_0", "Q4_K", "Q2_K", "IQ4_NL", "MXFP4"}

# Measured with llama-cpp-python 0.3.36: code pages of its libraries once all kernels have run, the graph's
# bookkeeping, and the bytes of a token of its vocabulary (49k tokens with merges: 17 MB).
_LIBRARY_BYTES = 12 << 20
_GRAPH_BYTES = 3 << 20
_VOCABULARY_BYTES_PER_TOKEN = 350


def check_installed() -> None:
    if not is_installed():
        raise MissingExtraError("llama-cpp-python", "llamacpp")


def check_supported(file: GGUFFile, spec: ModelSpec) -> None:
    """llama.cpp decides at load, where an unknown model raises UnsupportedError. This raises one for a tensor that
    llama.cpp is known to ignore."""
    if spec.architecture == "qwen3" and "blk.0.attn_output.bias" in file.tensors:
        raise UnsupportedError(f"{file.path}: llama.cpp knows no bias of attn_output in Qwen3: use --backend tvm")


def check_elsewhere(file: GGUFFile, spec: ModelSpec, system: str) -> None:
    check_supported(file, spec)


def weight_kind(weight_type: str, config: EngineConfig) -> Kind:
    if weight_type in FLOATS:
        return "floats"
    return "integers" if config.repack and weight_type in REPACKED_TYPES else "others"


def most_rows(spec: ModelSpec, expected: int | None) -> MostRows:
    """At most the sliding window of models whose window llama.cpp ignores, and at most the original context of models
    with LongRoPE unless the run is known to be longer, because llama.cpp chooses the factors by the capacity."""
    if spec.window and spec.architecture not in _WINDOWED and spec.window < spec.context:
        return MostRows(spec.window, ignored_window(spec))
    ropes = spec.recipe.ropes if spec.recipe else ()
    original = next((rope.original_context for rope in ropes if rope.has_long), spec.context)
    if original < spec.context and (expected or 0) <= original:
        why = f"in a larger cache, llama.cpp rotates texts of up to {original} tokens wrongly: --backend tvm does not"
        return MostRows(original, why)
    return all_positions(spec)


def ignored_window(spec: ModelSpec) -> str:
    return f"llama.cpp ignores this model's sliding window of {spec.window} positions: --backend tvm does not"


def can_repack(spec: ModelSpec) -> bool:
    return spec.weight_type in REPACKED_TYPES


def allocated_rows(capacity: int) -> int:
    """Rows that llama.cpp allocates for a capacity."""
    return -(-capacity // _ROW_STEP) * _ROW_STEP


def uses_flash(config: EngineConfig) -> bool:
    """Flash attention is faster and smaller, but rounds to f16 and does not show its scores."""
    return config.kv_dtype != "f32" and not config.observes


def check_observed(config: EngineConfig) -> None:
    """Raise UnsupportedError for rows whose attention llama.cpp cannot show."""
    if config.observes and config.kv_dtype.startswith("q"):
        raise UnsupportedError(
            f"llama.cpp shows no attention to {config.kv_dtype} rows: use --kv-dtype f16 or --kv-policy streaming"
        )


def footprint(spec: ModelSpec, config: EngineConfig) -> Footprint:
    """Bytes by llama.cpp's own rules, checked against its log (`benchmarks/prediction.py`)."""
    check_observed(config)
    rows = allocated_rows(config.capacity)
    # The widest point of the graph is the feed-forward, with gate, up and their product, or else the attention.
    width = max(spec.hidden, spec.heads * spec.head_dim)
    values, mask, rounded = 3 * spec.ffn + 4 * width, 2 * rows, spec.ffn * 9 // 8
    if not uses_flash(config):  # the score matrix exists; each product's second factor is rounded to the first's type
        scores = spec.heads * rows
        values, mask = max(values, scores + 6 * width), 4 * rows
        rounded = max(rounded, 2 * scores if config.kv_dtype == "f16" else 0)
    chunk = config.chunk * (4 * values + mask + rounded)
    logits = 2 * 4 * max(2, config.logits_rows) * spec.vocab  # never fewer than sequences
    weights = spec.weight_bytes
    if config.repack and spec.tied_head:  # lookups use the file's form, products the repacked one
        weights += spec.largest_tensor
    return Footprint(
        weights=weights,
        kv=int(rows * spec.kv_values_per_row * KV_VALUE_BYTES[config.kv_dtype]),
        scratch=chunk + logits + _GRAPH_BYTES,
        runtime=_LIBRARY_BYTES + _VOCABULARY_BYTES_PER_TOKEN * spec.vocab,
        lora=config.lora_bytes,
    )


def tuned(spec: ModelSpec, kv_dtype: str) -> Tuned | None:
    return None


def load(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
) -> LlamaCppEngine:
    from edge.backends.llamacpp.engine import LlamaCppEngine

    return LlamaCppEngine(file, spec, config, progress)


def operators(
    file: GGUFFile, spec: ModelSpec, config: EngineConfig, *, tokens: int, context: int, passes: int,
    progress: Callable[[float], None] | None = None,
) -> list[Operator]:  # fmt: skip
    """The nodes of ggml's graph, each computed separately; see `timing.py`.

    Raises UnsupportedError for a llama.cpp that lays out its tensors in another way.
    """
    from edge.backends.llamacpp.timing import time_operators

    return time_operators(file, spec, config, tokens=tokens, context=context, passes=passes, progress=progress)


def versions() -> dict[str, str]:
    return {"llama-cpp-python": version()}
