"""Cores × engines: an engine that runs a core gives transformers' logits, however tokens come; others name it.

Architectures whose cores are usual are tested in full in test_architectures.py; here they stand for these cores.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SOME_GPU, Engines, load_engine
from fallbacks import logits_of, open_fallback

from edge.backends import backend_names, engine_named
from edge.converters.coreml.writer import planned_files
from edge.errors import UnsupportedError
from edge.model.cores import (
    Attention,
    Core,
    DeltaNet,
    Dense,
    Experts,
    KimiDelta,
    Mamba,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)

MODELS: dict[str, tuple[type[Core], ...]] = {  # golden models, and what is first of its kind in each
    "qwen3": (Attention, Dense),
    "qwen35": (DeltaNet,),
    "lfm2": (ShortConvolution,),
    "qwen3moe": (Experts,),
    "qwen35moe": (Experts,),
    "lfm2moe": (Experts,),
    "gpt-oss": (Experts,),
    "gemma4": (PerLayerInput,),
    "gemma4moe": (Experts,),
    "granitehybrid": (Mamba,),
    "nemotron_h": (Mamba,),
    "falcon-h1": (Mamba,),
    "kimi-linear": (KimiDelta,),
    "ling": (KimiDelta, Attention, Experts),  # bounded decays, gated latent heads, experts in groups
    "jamba": (SelectiveScan,),
    "falcon-mamba": (SelectiveScan,),  # without attention
    "mamba": (SelectiveScan,),  # without norms
    "deepseek2": (Attention,),  # latent
    "deepseek2-lite": (Attention,),  # in one matrix, and experts whose shares are not normalised
    "minicpm3": (Attention,),
    "plm": (Attention,),
}
EXACT = 2e-4  # transformers' logits are rounded to 1.2e-4
GPU = f"gpu@{SOME_GPU}"
# In make test, those that have the cores of the others.
ON_GPU = ("qwen35moe", "lfm2", "gemma4", "falcon-h1", "falcon-mamba", "ling")
RARELY = ("granitehybrid", "plm", "nemotron_h", "minicpm3", "mamba", "jamba")  # by other engines than the reference
CASES = [
    pytest.param(GPU if engine == "gpu" else engine, name, marks=[pytest.mark.exhaustive] * rarely)
    for engine in backend_names() for name in MODELS
    if (engine, name) != ("llamacpp", "plm")  # llama.cpp 0.3.36 aborts
    for rarely in [name not in ON_GPU if engine == "gpu" else name in RARELY and engine != "reference"]
]  # fmt: skip
TOLERANCES = {  # of llama.cpp: GELU from a table of half floats; MXFP4 times activations of 8 bits
    ("gemma4", "llamacpp"): 1e-2, ("gemma4moe", "llamacpp"): 1e-2, ("gpt-oss", "llamacpp"): 0.4,
    ("qwen3", "llamacpp"): 1e-3, ("nemotron_h", "llamacpp"): 1e-3, ("gpt-oss", "onnx"): 0.4,
}  # fmt: skip


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_engine_runs_core_or_names_it(backend: str, name: str, engines: Engines) -> None:
    model, tokens, expected = open_fallback(name)
    engine = engine_named(backend.partition("@")[0])
    assert {*MODELS[name]} <= {type(core) for core in model.spec.network.cores}
    if reasons := set(filter(None, map(engine.supports, model.spec.network.cores))):
        with pytest.raises(UnsupportedError, match=f"{engine.NAME} engine does not run ({'|'.join(reasons)}) yet"):
            engine.check_elsewhere(model.file, model.spec, "linux")
        return
    loaded = engines(load_engine(model, backend, "f32", chunk=24))
    for pieces in ([len(tokens)], [40, 1, 1, len(tokens) - 42], [1] * len(tokens)):
        found = logits_of(loaded, tokens, pieces)[-len(expected) :]
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES.get((name, backend), EXACT))


@pytest.mark.parametrize(("name", "reason"), [("qwen35", "gated delta nets"), ("gpt-oss", "attention with sinks")])
def test_core_ml_names_unsupported_cores(name: str, reason: str) -> None:
    model = open_fallback(name)[0]
    with pytest.raises(UnsupportedError, match=f"Core ML programs do not run {reason} yet"):
        planned_files(model.file, model.spec)
