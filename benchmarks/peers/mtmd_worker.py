"""llama.cpp's mtmd by its C API, without edge: encodes a picture, a line of JSON for each line on stdin.

mtmd_worker.py MODEL MMPROJ PICTURE.npy THREADS ROWS.npy    MTMD_CPP_LIB names the folder of libmtmd

It resizes, normalises and encodes the picture, and leaves its rows in ROWS.npy, in the order of the prompt.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from protocol import peak_memory

PROMPT = "<__media__>\nWhat is in the picture?"


class Mtmd:
    def __init__(self, model: str, mmproj: str, threads: int) -> None:
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.lib, self.mtmd = llama_cpp, mtmd_cpp
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self._quiet = quiet
        llama_cpp.llama_log_set(quiet, None)
        mtmd_cpp.mtmd_helper_log_set(quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        parameters = mtmd_cpp.mtmd_context_params_default()
        parameters.use_gpu, parameters.n_threads, parameters.print_timings = False, threads, False
        self.context = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), self.model, parameters)
        if not self.model or not self.context:
            raise SystemExit("llama.cpp cannot load the model or its encoder")
        self.width = llama_cpp.llama_model_n_embd_inp(self.model)

    def chunks(self, pixels: Any) -> Any:
        height, width, _ = pixels.shape
        data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = self.mtmd.mtmd_bitmap_init(width, height, data)
        text = self.mtmd.mtmd_input_text(PROMPT.encode(), len(PROMPT), True, True)
        chunks = self.mtmd.mtmd_input_chunks_init()
        bitmaps = (ctypes.c_void_p * 1)(bitmap)
        if self.mtmd.mtmd_tokenize(self.context, chunks, ctypes.byref(text), bitmaps, 1):
            raise SystemExit("mtmd cannot read the picture")
        self.mtmd.mtmd_bitmap_free(bitmap)
        return chunks

    def encode(self, pixels: Any) -> Any:
        chunks, found = self.chunks(pixels), []
        for index in range(self.mtmd.mtmd_input_chunks_size(chunks)):
            chunk = self.mtmd.mtmd_input_chunks_get(chunks, index)
            if self.mtmd.mtmd_input_chunk_get_type(chunk) != 1:
                continue
            if self.mtmd.mtmd_encode_chunk(self.context, chunk):
                raise SystemExit("mtmd cannot encode the picture")
            count = self.mtmd.mtmd_input_chunk_get_n_tokens(chunk)
            rows = np.ctypeslib.as_array(self.mtmd.mtmd_get_output_embd(self.context), (count, self.width))
            found.append(rows.copy())
        self.mtmd.mtmd_input_chunks_free(chunks)
        return np.concatenate(found)


def main(model: str, mmproj: str, picture: str, threads: str, rows: str) -> None:
    pixels, mtmd = np.load(picture), Mtmd(model, mmproj, int(threads))
    print("ready", flush=True)
    for _ in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        found = mtmd.encode(pixels)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        np.save(Path(rows), found)
        print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak_memory()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
