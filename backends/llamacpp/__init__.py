"""llama.cpp as an engine: GGUF files mapped or repacked, rows evicted token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edge.backends.base import Backend, Capabilities, EngineConfig
from edge.backends.checks import ENCODERS
from edge.backends.counts import Footprint, MostRows
from edge.backends.efficiency import Efficiency, Kind, RowEfficiency, WeightEfficiency
from edge.backends.llamacpp.library import is_installed, version
from edge.errors import MissingExtraError, UnsupportedError
from edge.formats.blocks import FLOATS
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec

if TYPE_CHECKING:
    from edge.backends.llamacpp.engine import LlamaCppEngine
    from edge.backends.llamacpp.trial import Trial

KV_VALUE_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
_WINDOWED = ("exaone4", "gemma2", "gemma3", "olmo2")  # the known architectures whose windows llama.cpp applies
SEQUENCES = 2  # the second is used only while rows are saved or restored
_ROW_STEP = 256  # llama.cpp allocates the cache in steps of this many rows

# Weight types that llama.cpp repacks for the CPU's wide instructions: about 1.5 × the speed of the mapped file.
REPACKED_TYPES = {"Q4_0", "Q4_K", "Q2_K", "IQ4_NL", "MXFP4"}

# Measured with llama-cpp-python 0.3.36: code pages of its libraries once all kernels have run, the graph's
# bookkeeping, and the bytes of a token of its vocabulary (49k tokens with merges: 17 MB).
_LIBRARY_BYTES = 12 << 20
_GRAPH_BYTES = 3 << 20
_VOCABULARY_BYTES_PER_TOKEN = 350
_ROUTE_BYTES = 8  # of ggml's table of the tokens of each expert


class LlamaCpp(Backend):
    """llama.cpp, by llama-cpp-python."""

    NAME = "llamacpp"
    CAPABILITIES = Capabilities(
        "token",
        uneven="token",
        kv_dtypes=("f16", "q8_0", "q4_0", "f32"),  # f32 turns flash attention off: the exact mode, for tests
        attention=True,
        keys=False,
        lora=True,
        any_tokenizer=True,
        gpu_layers=True,
    )
    EFFICIENCY = Efficiency(
        {
            "integers": WeightEfficiency(0.43, 1.8, 0.24),
            "others": WeightEfficiency(0.30, 0.42),
            "floats": WeightEfficiency(0.70, 1.1),
        },
        {"f16": RowEfficiency(0.12, 0.37), "q8_0": RowEfficiency(0.05, 0.09), "q4_0": RowEfficiency(0.012, 0.045)},
        step_s=50e-6,
    )
    PACKAGES = ("llama-cpp-python",)

    def sees(self, spec: ModelSpec, *, whole: bool, provider: str | None = None) -> str | None:
        """llama.cpp hides later tokens in all layers or in none."""
        some = whole and spec.network and not all(core.spans for core in spec.network.attention if core)
        return "runs no pictures that see all of themselves in some layers only" if some else None

    def check_installed(self) -> None:
        if not is_installed():
            raise MissingExtraError("llama-cpp-python", "llamacpp")

    def check_supported(self, file: GGUFFile, spec: ModelSpec) -> None:
        """llama.cpp decides at load, and raises UnsupportedError for unknown models. It first tries headers that edge
        does not check in full in a child process. Also raises UnsupportedError for encoders and for ignored tensors."""
        if spec.encoder:
            raise UnsupportedError(f"the llamacpp engine does not run {ENCODERS} yet: use --backend=cpu")
        if not spec.proven and is_installed():
            from edge.backends.llamacpp.trial import try_header

            try_header(file, spec)
        if "tokenizer.ggml.tokens" in file.metadata:
            from edge.model.tokens.vocabulary import repeats_a_token

            if repeats_a_token(file):
                raise UnsupportedError(f"{file.path}: llama.cpp aborts on tokens of the same text: use --backend=cpu")
        if spec.architecture == "qwen3" and "blk.0.attn_output.bias" in file.tensors:
            raise UnsupportedError(f"{file.path}: llama.cpp knows no bias of attn_output in Qwen3: use --backend=cpu")

    def weight_kind(self, weight_type: str, config: EngineConfig) -> Kind:
        if weight_type in FLOATS:
            return "floats"
        return "integers" if config.repack and weight_type in REPACKED_TYPES else "others"

    def most_rows(self, spec: ModelSpec, expected: int | None) -> MostRows:
        """At most the sliding window of models whose window llama.cpp ignores, and at most the original context of
        models with LongRoPE unless the run is known to be longer, because it chooses the factors by the capacity."""
        if spec.window and not _applies_window(spec) and spec.window < spec.context:
            return MostRows(spec.window, ignored_window(spec))
        ropes = spec.network.ropes if spec.network else ()
        original = next((rope.original_context for rope in ropes if rope.has_long), spec.context)
        if original < spec.context and (expected or 0) <= original:
            why = (
                f"in a larger cache, llama.cpp rotates texts of up to {original} tokens wrongly: --backend cpu does not"
            )
            return MostRows(original, why)
        return super().most_rows(spec, expected)

    def keeps_all(self, spec: ModelSpec) -> str | None:
        """A reason for recurrent models, and for those whose positions llama.cpp cannot shift, if a trial showed it."""
        if spec.recurrent:
            return "its recurrent state sums up all tokens, of which none can be evicted"
        trial = _trial(spec)
        return "llama.cpp cannot shift the positions of its rows" if trial and not trial.can_shift else None

    def can_repack(self, spec: ModelSpec) -> bool:
        return spec.weight_type in REPACKED_TYPES

    def footprint(self, spec: ModelSpec, config: EngineConfig) -> Footprint:
        """Bytes by llama.cpp's own rules, checked against its log (`benchmarks/prediction.py`)."""
        check_observed(config)
        _check_gpu(config)
        rows = allocated_rows(config.capacity)
        trial = _trial(spec)
        graph = _GRAPH_BYTES
        if trial:
            graph += trial.graph_bytes(config.chunk)
            counted = trial.flash if uses_flash(config) else trial.plain
            chunk = counted.compute_bytes(rows, config.chunk) + config.chunk * _conversion_bytes(spec, config, rows)
        else:
            chunk = config.chunk * (_pass_bytes(spec, config, rows) + _conversion_bytes(spec, config, rows))
        logits = 2 * 4 * max(2, config.logits_rows) * spec.vocab  # never fewer than sequences
        weights = spec.weight_bytes
        if config.repack and spec.tied_head:  # lookups use the file's form, products the repacked one
            weights += spec.embedding_bytes
        return Footprint(
            weights=weights,
            kv=int(rows * row_values(spec, config) * KV_VALUE_BYTES[config.kv_dtype]) + state_bytes(spec),
            scratch=chunk + logits + graph,
            runtime=_LIBRARY_BYTES + _VOCABULARY_BYTES_PER_TOKEN * spec.vocab,
            fixed_kv=state_bytes(spec),
            lora=config.lora_bytes,
        )

    def first_run(self, file: GGUFFile, spec: ModelSpec, config: EngineConfig) -> int:
        """Bytes of the child process that runs a few tokens."""
        if spec.proven or not is_installed():
            return 0
        from edge.backends.llamacpp.trial import have_run

        return 0 if have_run(file) else _passes_bytes(spec)

    def load(
        self, file: GGUFFile, spec: ModelSpec, config: EngineConfig, progress: Callable[[float], None] | None = None
    ) -> LlamaCppEngine:
        """Raises UnsupportedError for a model that llama.cpp cannot run; a child process tries unproven ones first."""
        from edge.backends.llamacpp.engine import LlamaCppEngine
        from edge.backends.llamacpp.trial import try_passes

        if not spec.proven:
            try_passes(file, _passes_bytes(spec))
        return LlamaCppEngine(file, spec, config, progress)


def row_values(spec: ModelSpec, config: EngineConfig) -> int:
    """Values of a row that llama.cpp allocates, all layers together: it may pad those of some layers."""
    trial = _trial(spec)
    if trial is None:
        return spec.kv_values_per_row
    return (trial.flash if uses_flash(config) else trial.plain).row_values


def state_bytes(spec: ModelSpec) -> int:
    """Bytes of recurrent states, for any number of tokens."""
    trial = _trial(spec)
    return SEQUENCES * (trial.state_bytes if trial else spec.state_bytes)


def _trial(spec: ModelSpec) -> Trial | None:
    if spec.proven:
        return None
    from edge.backends.llamacpp.trial import known_trial

    return known_trial(spec)


def _applies_window(spec: ModelSpec) -> bool:
    trial = _trial(spec)
    return trial.window > 0 if trial else spec.architecture in _WINDOWED


def ignored_window(spec: ModelSpec) -> str:
    return f"llama.cpp ignores this model's sliding window of {spec.window} positions: --backend cpu does not"


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
            f"llama.cpp shows no attention to {config.kv_dtype} rows: use --kv-dtype=f16 or --kv-policy=streaming"
        )


def _check_gpu(config: EngineConfig) -> None:
    """Layers on a GPU count like all others: their weights are read through this process, and rows stay in it."""
    if config.gpu_layers and is_installed():
        from edge.backends.llamacpp.library import library

        if not library().llama_supports_gpu_offload():
            raise UnsupportedError(
                f"--gpu-layers {config.gpu_layers} needs a llama.cpp with GPU support, and llama-cpp-python "
                f"{version()} was built without"
            )


def _pass_bytes(spec: ModelSpec, config: EngineConfig, rows: int) -> int:
    """Bytes of a token at the widest point of the graph: the feed-forward, with gate, up and their product, or the
    attention."""
    width = max(spec.hidden, spec.heads * spec.head_dim)
    values, mask = 3 * spec.ffn + 4 * width, 2 * rows
    if not uses_flash(config):  # the score matrix exists
        values, mask = max(values, spec.heads * rows + 6 * width), 4 * rows
    return 4 * values + mask


def _conversion_bytes(spec: ModelSpec, config: EngineConfig, rows: int) -> int:
    """Bytes of a token's conversions: each product's second factor is rounded to the first's type."""
    rounded = spec.ffn * 9 // 8 + _ROUTE_BYTES * spec.experts * spec.experts_used
    if config.kv_dtype == "f16" and not uses_flash(config):
        rounded = max(rounded, 2 * spec.heads * rows)
    return rounded


def _passes_bytes(spec: ModelSpec) -> int:
    from edge.backends.llamacpp.trial import CHILD_BYTES, TRIED

    need = ENGINE.footprint(spec, TRIED)
    return CHILD_BYTES + need.weights + need.kv + need.scratch + need.runtime


ENGINE = LlamaCpp()
