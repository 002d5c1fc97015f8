"""OpenVINO GenAI for `peers.py`, in the environment of its own where it is installed.

openvino_worker.py serve  FILE THREADS VOCAB
openvino_worker.py start  FILE THREADS VOCAB           one token after a 16-token text
openvino_worker.py memory FILE THREADS VOCAB N         N random tokens, the last 32 of them generated
openvino_worker.py save   FILE THREADS VOCAB           write its own model format next to FILE (a folder to load later)

FILE is a GGUF file, or for start and memory also a folder that `save` wrote. `serve` takes f16 KV rows, as the other
engines do: at 4,096 tokens they are also faster than its 8-bit default on x86. Everything else is OpenVINO's own choice
(prefix caching among it, so every unit needs tokens of its own). It generates its own tokens, greedily; the work does
not depend on which.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import ANSWER_TOKENS, FILL_SEED, START_TEXT, Tokens, peak_memory, random_tokens, serve, take_stdout


class OpenVINO:
    def __init__(self, path: str, threads: int, vocab: int, **options: Any) -> None:
        self._pipeline = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **options)
        self.vocab = vocab
        self.version = f"openvino-genai {metadata.version('openvino-genai')}"

    def generate(self, prompt: Any, count: int) -> Any:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = count
        settings.ignore_eos = True
        settings.do_sample = False
        settings.apply_chat_template = False
        if isinstance(prompt, np.ndarray):
            prompt = ov.Tensor(prompt.astype(np.int64).reshape(1, -1))
        return self._pipeline.generate(prompt, settings)

    def prefill(self, tokens: Tokens, depth: int) -> float:
        """Time to the first token, from its own metrics."""
        if depth:
            raise ValueError("OpenVINO's prompts begin with an empty cache")
        return float(self.generate(tokens, 1).perf_metrics.get_ttft().mean) / 1e3

    def decode(self, depth: int, tokens: Tokens) -> float:
        """The steps after the first token of the answer to a prompt of `depth` tokens (at least one)."""
        prompt = random_tokens(depth, FILL_SEED, self.vocab) if depth else tokens[:1]
        steps = self.generate(prompt, tokens.size + 1).perf_metrics.raw_metrics.m_durations
        if len(steps) != tokens.size:
            raise RuntimeError(f"OpenVINO made {len(steps)} steps instead of {tokens.size}")
        return sum(steps) / 1e6


def main(mode: str, path: str, threads: int, vocab: int, *rest: int) -> None:
    if mode == "serve":
        serve(lambda: OpenVINO(path, threads, vocab, KV_CACHE_PRECISION="f16"))
        return
    out = take_stdout()
    if mode == "save":
        OpenVINO(path, threads, vocab, enable_save_ov_model=True)
    elif mode == "start":
        answer = OpenVINO(path, threads, vocab).generate(START_TEXT, 1)
        print("TOKEN", repr(str(answer)), file=out, flush=True)
    else:
        OpenVINO(path, threads, vocab).generate(random_tokens(rest[0] - ANSWER_TOKENS, 1, vocab), ANSWER_TOKENS)
        print("PEAK", peak_memory(), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
