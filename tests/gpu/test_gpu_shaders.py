"""What the generator writes for GPUs, judged by compilers of those languages. None of them needs a GPU.

Dawn compiles WGSL for Chromium and is stricter about uniform control flow than the compiler of wgpu. NVRTC and oclgrind
take one small model; others come with the exhaustive tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import GOLDEN, exhaustive
from gguf import GGMLQuantizationType
from lora_files import write_adapter
from shaders import dawn_says, has_dawn
from small_models import Small, write_small

from edge.backends.base import EngineConfig
from edge.backends.tvm.gpu.compiled import program_of
from edge.backends.tvm.gpu.design import Design
from edge.backends.tvm.gpu.hosts import Adapter, Limits
from edge.backends.tvm.gpu.program import Program
from edge.backends.tvm.packing.blocks import BLOCKS
from edge.errors import EngineError
from edge.model.model import open_model

pytest.importorskip("tvm")

dawn = pytest.mark.skipif(not has_dawn(), reason="no node with the npm package webgpu in build/dawn")

WEBGPU = Limits(binding=128 << 20, buffer=256 << 20, buffers=8, threads=256, shared=16 << 10, groups=65_535)
ADAPTER = Adapter("wgpu", "wgsl", 0, "any", "", "", "unknown", False, None, WEBGPU, frozenset())
USUAL = {"split_from": 48}  # few enough that there are kernels that split rows
CONFIG = EngineConfig(64, chunk=8, kv_dtype="f16", threads=1, logits_rows=4, observes=True, tuning=USUAL)
# One for each combination of norms, biases, activations, rotations and windows; the KV dtype takes turns.
FAMILIES = {
    "llama-gqa-tied": "f16", "gemma": "int8", "gemma2": "f16", "gemma3": "f32", "gpt2": "int8", "qwen2-untied": "f32",
    "qwen3": "f16", "phi3": "int8", "stablelm": "f16", "granite": "f32", "mistral3": "int4", "smollm3": "f16",
    "qwen35": "int8", "lfm2": "f16", "qwen35moe": "f32", "gpt-oss": "int8",
    "gemma4": "int4", "falcon-h1": "int8", "deepseek2": "int4", "minicpm3": "f16",
}  # fmt: skip
# Products with adapters bind most buffers where they have experts, vectors for each layer, or a norm behind them.
ADAPTED = ("gemma3", "qwen35moe", "gemma4")
VERIFYING = ("llama-gqa-tied", "gemma3", "gemma4", "minicpm3")


@cache
def program(path: Path, language: str, kv_dtype: str = "f16", rank: int = 0, drafts: int = 0) -> Program:
    from edge.backends.tvm.cpu.lowering import import_compiler

    import_compiler()
    from edge.backends.tvm.gpu.generator import generate

    model = open_model(path)
    config = replace(CONFIG, kv_dtype=kv_dtype, lora_rank=rank, drafts=drafts, observes=not drafts)
    return generate(Design.of(model.file, model.spec, config, replace(ADAPTER, language=language)))


@pytest.fixture(scope="module")
def block_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has each block type in a matrix."""
    kinds = [kind for kind in BLOCKS if kind in GGMLQuantizationType.__members__]
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    places = [f"blk.{layer}.{name}" for layer in range(4) for name in names]
    types = {place: kinds[number % len(kinds)] for number, place in enumerate(places)}
    small = Small(layers=4, hidden=256, heads=4, head=64, ffn=256, types={**types, "": "Q6_K"})
    return write_small(tmp_path_factory.mktemp("blocks") / "each.gguf", small)


def sources(programs: Mapping[str, Program]) -> dict[str, str]:
    return {
        f"{name}: {kernel.name}": kernel.source for name, each in programs.items() for kernel in each.kernels.values()
    }


def families(language: str) -> Iterator[tuple[str, Program]]:
    for name, kv_dtype in FAMILIES.items():
        yield name, program(GOLDEN / f"{name}.gguf", language, kv_dtype)
    for name in ADAPTED:
        yield f"{name} with adapters", program(GOLDEN / f"{name}.gguf", language, FAMILIES[name], rank=8)
    for name in VERIFYING:
        yield f"{name} with drafts", program(GOLDEN / f"{name}.gguf", language, FAMILIES[name], rank=8, drafts=2)


@pytest.mark.exhaustive
@dawn
def test_dawn_compiles_the_kernels_of_all_architectures() -> None:
    """With the limits of WebGPU: 8 storage buffers, 256 threads, 16 KiB of workgroup memory."""
    assert dawn_says(sources(dict(families("wgsl")))) == {}


@pytest.mark.wing("WGSL by Dawn")
@dawn
def test_dawn_compiles_the_kernels_of_all_block_types(block_types: Path) -> None:
    assert dawn_says(sources({"blocks": program(block_types, "wgsl")})) == {}


@dawn
def test_dawn_refuses_invalid_shaders() -> None:
    """So that its silence means something."""
    head = "@group(0) @binding(0) var<storage, read_write> a: array<u32>;\nvar<workgroup> m: array<u32, 64>;\n"
    body = "fn f(@builtin(local_invocation_id) t: vec3<u32>) {{ {} a[t.x] = m[t.x]; }}"
    whole = head + "@compute @workgroup_size({})" + body
    said = dawn_says({
        "good": whole.format(64, "workgroupBarrier();"),
        "barrier": whole.format(64, "if (a[0] == 1u) { workgroupBarrier(); }"),
        "threads": whole.format(512, ""),
        "memory": whole.format(64, "").replace("array<u32, 64>", "array<u32, 5000>"),
        "type": whole.format(64, "a[0] = 1.5;"),
    })  # fmt: skip
    expected = {"barrier": "uniform control flow", "threads": "workgroup_size", "memory": "storage", "type": "u32"}
    assert said.keys() == expected.keys()
    assert all(words in said[name][0] for name, words in expected.items())


@pytest.mark.parametrize("often", [True, exhaustive(False)])
def test_kernels_keep_to_portable_limits(often: bool) -> None:
    """What is stated of a kernel, by which engines choose devices, and offsets of slices."""
    some = [("qwen35moe", program(GOLDEN / "qwen35moe.gguf", "wgsl", "f32"))]
    for name, each in some if often else families("wgsl"):
        for kernel in each.kernels.values():
            sizes = kernel.shared, kernel.threads[0] * kernel.threads[1], len(kernel.buffers)
            assert all(size <= most for size, most in zip(sizes, (16 << 10, 256, 8), strict=True)), (name, kernel.name)
            stated = f"@workgroup_size({kernel.threads[0]}, {kernel.threads[1]}, 1)"
            assert stated in kernel.source, (name, kernel.name)
        for dispatch in (each for passed in each.passes.values() for each in passed):
            assert max(dispatch.groups) <= WEBGPU.groups
            written = set(each.kernels[dispatch.kernel].written)
            bound = list(zip(each.kernels[dispatch.kernel].buffers, dispatch.slices, strict=True))
            others = [part.buffer for parameter, part in bound if parameter not in written]
            assert not {part.buffer for parameter, part in bound if parameter in written} & {*others}, dispatch
            assert all(part.offset % 256 == 0 for part in dispatch.slices)


@pytest.mark.parametrize(("language", "entry"), [("metal", "kernel void {}("), ("cuda", 'extern "C" __global__ void')])
def test_other_languages_have_the_same_kernels(language: str, entry: str) -> None:
    made, wgsl = (program(GOLDEN / "llama-one-layer.gguf", each) for each in (language, "wgsl"))
    assert made.kernels.keys() == wgsl.kernels.keys()
    assert made.passes == wgsl.passes
    for name, kernel in made.kernels.items():
        assert entry.format(name) in kernel.source
        assert f"{name}(" in kernel.source


@pytest.mark.parametrize("language", ["cuda", "metal"])  # the others' children work for the tests of those drivers
def test_child_makes_kernels(language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports less of TVM than these tests do."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    model = open_model(GOLDEN / "llama-one-layer.gguf")
    design = Design.of(model.file, model.spec, CONFIG, replace(ADAPTER, language=language))
    assert program_of(design) == program(GOLDEN / "llama-one-layer.gguf", language)


@pytest.mark.wing("CUDA by NVRTC")
@pytest.mark.skipif(not find_spec("cuda"), reason="no cuda-bindings")
@pytest.mark.parametrize("often", [True, exhaustive(False)])
def test_nvrtc_compiles_kernels(often: bool) -> None:
    from edge.backends.tvm.gpu.hosts.cuda import compile_source

    path = GOLDEN / "llama-one-layer.gguf"
    programs = {"one layer": program(path, "cuda", "f32")} if often else dict(families("cuda"))
    for source, name in {source: name for name, source in sources(programs).items()}.items():
        assert compile_source(name.partition(": ")[2], source, "sm_70")
    source = next(iter(sources(programs).values()))
    with pytest.raises(EngineError, match=r"could not compile broken: .*\"undeclared\" is undefined") as caught:
        compile_source("broken", source.rstrip().removesuffix("}") + "undeclared = 1; }", "compute_75")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.wing("kernels under oclgrind")
@pytest.mark.skipif(not shutil.which("oclgrind") or not find_spec("pyopencl"), reason="no oclgrind with pyopencl")
@pytest.mark.parametrize(("name", "kv_dtype", "rank", "drafts"), [
    ("llama-one-layer", "f16", 0, 0),
    exhaustive("llama-one-layer", "int8", 3, 0), exhaustive("gemma3", "f16", 0, 2),
    exhaustive("gemma3", "f32", 8, 0),
    *(exhaustive(name, "int4", 0, 0) for name in ("gpt2", "qwen35", "lfm2")),
])  # fmt: skip
def test_kernels_neither_race_nor_leave_their_buffers(
    name: str, kv_dtype: str, rank: int, drafts: int, tmp_path: Path
) -> None:
    """oclgrind interprets a chunk and a step, with eviction between them, perhaps drafts. rank: of an adapter, or 0."""
    script = Path(__file__).parent / "shaders" / "under_oclgrind.py"
    adapter = write_adapter(tmp_path / "a.gguf", open_model(GOLDEN / f"{name}.gguf"), rank) if rank else ""
    command = ["oclgrind", "--data-races", sys.executable, str(script), name, kv_dtype, f"{drafts}"]
    command += [str(adapter)] * bool(rank)
    done = subprocess.run(
        command, env={**os.environ, "EDGE_GPU": "Oclgrind"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran on Oclgrind Simulator\n"
    assert done.stderr == ""
