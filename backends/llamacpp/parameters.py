"""llama.cpp's parameters of models and contexts, for the engine and for trials of headers (`trial.py`)."""

from __future__ import annotations

from typing import Any

from edge.backends.base import EngineConfig
from edge.backends.llamacpp import SEQUENCES, allocated_rows, uses_flash

_GGML_TYPE = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_LOAD_PRIVATE, _LOAD_MAPPED = 0, 1  # llama_load_mode: read into memory, or map the file


def model_parameters(lib: Any, config: EngineConfig) -> Any:
    parameters = lib.llama_model_default_params()
    parameters.n_gpu_layers = config.gpu_layers
    parameters.use_extra_bufts = config.repack
    # Weights repacked from a mapping would be resident twice; weights read into private memory are there once.
    parameters.load_mode = _LOAD_PRIVATE if config.repack else _LOAD_MAPPED
    return parameters


def trial_parameters(lib: Any, config: EngineConfig) -> Any:
    """Like `model_parameters`, for a model without weights, whose header llama.cpp checks and whose buffers it
    counts."""
    parameters = model_parameters(lib, config)
    parameters.load_mode, parameters.no_alloc = _LOAD_PRIVATE, True
    return parameters


def context_parameters(lib: Any, config: EngineConfig, capacity: int) -> Any:
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = allocated_rows(capacity)
    parameters.n_batch = parameters.n_ubatch = config.chunk
    parameters.n_seq_max, parameters.kv_unified = SEQUENCES, True
    parameters.n_outputs_max = max(
        SEQUENCES, config.logits_rows
    )  # one per sequence; more outputs than this would abort
    parameters.n_threads = parameters.n_threads_batch = config.threads
    parameters.type_k = parameters.type_v = _GGML_TYPE[config.kv_dtype]
    parameters.flash_attn_type = int(uses_flash(config))
    parameters.swa_full = True  # otherwise rows that left a window are overwritten, and no truncation reaches them
    parameters.no_perf = True
    parameters.offload_kqv = parameters.op_offload = False
    return parameters
