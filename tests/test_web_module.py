"""Modules for web pages in Node: the same answers as edge itself, within their memory."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest
from web_module import modules_of, web_pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("tvm") or not find_spec("ziglang"), reason="no TVM, or no linker for WebAssembly"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no Node"),
]

ISAS = ("relaxed16", "simd")  # of which Node 20 computes the products rightly


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_answers_are_those_of_edge(isa: str, threads: int) -> None:
    options = {"kv_policy": "streaming", "max_kv_size": 48, "prefill_step_size": 16, "kv_dtype": "f16", "threads": 2}
    folder = modules_of("llama-gqa-tied", *ISAS, **options)
    with web_pair(folder, "llama-gqa-tied", isa, threads, **options) as pair:
        pair.ask("The sky is blue, because", temperature=0, max_tokens=40)
        pair.ask("And the sea?", temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
