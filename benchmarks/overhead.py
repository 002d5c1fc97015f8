"""The overhead of edge over llama.cpp: its decode loop against a bare `llama_decode` loop.

Both run in one process on the same file with the same settings (threads, flash attention, f16 KV, 512 cells, greedy),
interleaved (A B A B), so that noise affects both alike. The bare loop does what any user of the C API must do: set a
batch of one, decode, take the argmax, look up the token's text.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np

import edge
from edge.backends.llamacpp.library import library
from edge.cli.terminal.show import table

MODEL = "smollm2-135m"
ROUNDS, TOKENS, CELLS = 15, 128, 512


def bare_loop(path: str, prompt: np.ndarray, threads: int) -> Callable[[], float]:
    """A function that generates TOKENS tokens with the C API alone and returns tokens per second."""
    lib = library()
    model_parameters = lib.llama_model_default_params()
    model_parameters.use_extra_bufts = False
    model_parameters.load_mode = 1
    model = lib.llama_model_load_from_file(path.encode(), model_parameters)
    parameters = lib.llama_context_default_params()
    parameters.n_ctx = CELLS
    parameters.n_batch = parameters.n_ubatch = 64
    parameters.n_outputs_max = 1
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.flash_attn_type = 1
    parameters.no_perf = True
    context = lib.llama_init_from_model(model, parameters)
    vocabulary = lib.llama_model_get_vocab(model)
    size = lib.llama_vocab_n_tokens(vocabulary)
    text = ctypes.create_string_buffer(256)

    def decode(tokens: list[int]) -> np.ndarray:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))) == 0
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (size,))

    def run() -> float:
        lib.llama_memory_clear(lib.llama_get_memory(context), False)
        logits = decode(prompt.tolist())
        started = time.perf_counter()
        for _ in range(TOKENS):
            token = int(logits.argmax())
            lib.llama_token_to_piece(vocabulary, token, text, 256, 0, True)
            logits = decode([token])
        return TOKENS / (time.perf_counter() - started)

    return run


def edge_loop(session: edge.Session, prompt: np.ndarray) -> Callable[[], float]:
    """The same through `Session.stream`, including text."""

    def run() -> float:
        for _ in session.stream(prompt, max_tokens=TOKENS + 1, ignore_eos=True):
            pass
        assert session.report is not None
        speed = session.report.timings.decode_tok_s
        assert speed is not None
        return speed

    return run


def main() -> None:
    with edge.load(MODEL, backend="llamacpp", max_kv_size=CELLS) as session:
        prompt = session.model.encode_prompt("Why is the sky blue?")
        ours = edge_loop(session, prompt)
        bare = bare_loop(str(session.model.path), prompt, session.plan.config.threads)
        ours(), bare()  # warm up
        pairs = [(ours(), bare()) for _ in range(ROUNDS)]
    ratios = sorted(a / b for a, b in pairs)
    rows = [
        ["edge, tok/s", *_spread([a for a, _ in pairs])],
        ["bare llama_decode, tok/s", *_spread([b for _, b in pairs])],
        ["ratio, pair by pair", *(f"{x:.3f}" for x in (ratios[0], statistics.median(ratios), ratios[-1]))],
    ]
    print(f"\n## Decode through edge against a bare loop ({ROUNDS} pairs of {TOKENS} tokens)\n")
    print(table(["", "min", "median", "max"], rows))


def _spread(values: list[float]) -> list[str]:
    return [f"{x:.1f}" for x in (min(values), statistics.median(values), max(values))]


if __name__ == "__main__":
    main()
