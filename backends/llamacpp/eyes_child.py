"""The child process in which llama.cpp's mtmd encodes a picture: its memory goes back when it ends."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from edge.backends.llamacpp.library import LOG, library
from edge.devices.child import Say, serve
from edge.errors import EngineError, UnsupportedError

_MARKER = b"<__media__>"
_IMAGE = 1  # of MTMD_INPUT_CHUNK_TYPE


def encode(request: Any, _say: Say) -> dict[str, Any]:
    """Encode the picture in `picture`, uint8 [height, width, 3]; rows go into `rows`, float32 [n, width]. Returns its
    parts: texts, and numbers of rows; the grid of each picture among them; whether rows see all of themselves."""
    lib = library()
    from llama_cpp import mtmd_cpp as mtmd

    mtmd.mtmd_helper_log_set(lib.edge_log_callback, None)
    plain = lib.llama_model_default_params()
    plain.use_extra_bufts = False  # which would copy the text model's weights
    model = lib.llama_model_load_from_file(request["model"].encode(), plain)
    if not model:
        raise UnsupportedError(f"{request['model']}: llama.cpp cannot load it ({LOG.reason()})")
    parameters = mtmd.mtmd_context_params_default()
    parameters.use_gpu, parameters.n_threads, parameters.print_timings = False, request["threads"], False
    parameters.warmup, parameters.image_max_tokens = False, request["tokens"] or -1
    context = mtmd.mtmd_init_from_file(request["mmproj"].encode(), model, parameters)
    if not context or not mtmd.mtmd_support_vision(context):
        raise UnsupportedError(f"{request['mmproj']}: llama.cpp sees nothing with it ({LOG.reason()})")
    pixels = np.ascontiguousarray(np.load(request["picture"]))
    chunks, vocabulary = _chunks(mtmd, context, pixels), lib.llama_model_get_vocab(model)
    parts, grids, rows, whole = list[str | int](), [], [], False
    for index in range(mtmd.mtmd_input_chunks_size(chunks)):
        chunk = mtmd.mtmd_input_chunks_get(chunks, index)
        if mtmd.mtmd_input_chunk_get_type(chunk) != _IMAGE:
            parts.append(_text(lib, mtmd, vocabulary, chunk))
            continue
        if mtmd.mtmd_encode_chunk(context, chunk):
            raise EngineError(f"llama.cpp could not encode the picture: {LOG.reason()}")
        count, image = mtmd.mtmd_input_chunk_get_n_tokens(chunk), mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        width = lib.llama_model_n_embd_inp(model)
        rows.append(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), (count, width)).copy())
        parts.append(count)
        grids.append([mtmd.mtmd_image_tokens_get_ny(image), mtmd.mtmd_image_tokens_get_nx(image)])
        whole = whole or mtmd.mtmd_decode_use_non_causal(context, chunk)
    np.save(request["rows"], np.concatenate(rows))
    cells = mtmd.mtmd_decode_use_mrope(context)
    return {"parts": parts, "grids": grids if cells else [], "whole": bool(whole)}


def _chunks(mtmd: Any, context: Any, pixels: Any) -> Any:
    height, width, _ = pixels.shape
    bitmap = mtmd.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
    text, chunks = mtmd.mtmd_input_text(_MARKER, len(_MARKER), False, True), mtmd.mtmd_input_chunks_init()
    if mtmd.mtmd_tokenize(context, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1):
        raise EngineError(f"llama.cpp cannot read the picture: {LOG.reason()}")
    return chunks


def _text(lib: Any, mtmd: Any, vocabulary: Any, chunk: Any) -> str:
    """The text of tokens, special ones included."""
    count, found = ctypes.c_size_t(), b""
    tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
    if min(tokens[: count.value], default=0) < 0:
        raise UnsupportedError("the text model's vocabulary lacks tokens of its encoder's pictures: choose its own")
    for token in tokens[: count.value]:
        piece = ctypes.create_string_buffer(256)
        size = lib.llama_token_to_piece(vocabulary, token, piece, len(piece), 0, True)
        found += piece.raw[: max(0, size)]
    return found.decode("utf-8", "replace")


if __name__ == "__main__":
    serve(encode)
