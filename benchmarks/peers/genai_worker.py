"""onnxruntime-genai for `onnx_genai.py`, behind the line protocol: genai_worker.py FOLDER THREADS CELLS."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import onnxruntime_genai as og
from protocol import FILL_SEED, Tokens, random_tokens, serve


class Genai:
    """genai's own greedy loop: one generator per measurement, whose first token comes from the prompt's logits, so that
    n + 1 tokens take n steps."""

    def __init__(self, folder: str, threads: int, cells: int) -> None:
        config = og.Config(folder)
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model, self._cells = og.Model(config), cells
        said = json.loads((Path(folder) / "genai_config.json").read_text())
        self.vocab = int(said["model"]["vocab_size"])
        self.version = f"onnxruntime-genai {og.__version__}"

    def _generator(self) -> og.Generator:
        options = og.GeneratorParams(self._model)
        options.set_search_options(max_length=self._cells, min_length=self._cells, do_sample=False)
        return og.Generator(self._model, options)

    def prefill(self, tokens: Tokens, depth: int) -> float:
        generator = self._generator()
        if depth:
            generator.append_tokens(random_tokens(depth, FILL_SEED, self.vocab))
        started = time.perf_counter()
        generator.append_tokens(tokens)
        generator.get_logits()
        return time.perf_counter() - started

    def decode(self, depth: int, tokens: Tokens) -> float:
        generator = self._generator()
        generator.append_tokens(random_tokens(max(depth, 1), FILL_SEED, self.vocab))
        generator.generate_next_token()
        started = time.perf_counter()
        for _ in range(tokens.size):
            generator.generate_next_token()
        return time.perf_counter() - started


if __name__ == "__main__":
    serve(lambda: Genai(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
