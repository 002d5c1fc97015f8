"""Memory on GPUs, of their own or the process's: counted in plans, and compared with what an engine allocates."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import GOLDEN, exhaustive, first_adapter, run_child
from lora_files import write_adapter
from small_models import Small, write_small

from edge.backends.counts import GPUMemory
from edge.backends.tvm.gpu import GPU
from edge.backends.tvm.gpu.hosts import PORTABLE, Adapter, opencl
from edge.backends.tvm.gpu.hosts.binaries import keep_binary
from edge.backends.tvm.gpu.program import Kernel
from edge.devices.memory import MemoryLimit, MemoryUse
from edge.errors import BudgetError
from edge.model.model import open_model
from edge.options import Options
from edge.plan.plan import Plan, make_plan
from edge.run.starting.loading import load

MIB = 1 << 20
ON_WGPU = """
import sys, json, numpy as np
from edge import load
from edge.devices.memory import memory_use
prompt, answer, rows = map(int, sys.argv[2:])
with load(sys.argv[1], backend="gpu", max_kv_size=rows, prefill_step_size=16) as session:
    allocated, loaded = session.engine.passes.device.allocated, memory_use().peak
    session.generate(np.arange(prompt, dtype=np.int32) + 5, max_tokens=answer, ignore_eos=True)
    used, plan, report = memory_use(), session.plan, session.report
print(json.dumps([plan.bytes.gpu, allocated, plan.predicted_peak, loaded, used.peak, report.kv.evicted]))
"""
SMOLLM2 = open_model("smollm2-135m")


@pytest.fixture
def wgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tvm")
    first_adapter("wgpu")
    monkeypatch.setenv("EDGE_GPU", "wgpu:0")


@pytest.fixture(autouse=True)
def planning_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.plan.plan.memory_use", lambda: MemoryUse(60 * MIB, 70 * MIB, None, None))
    monkeypatch.setattr("edge.plan.plan.memory_limit", lambda root: MemoryLimit(4096 * MIB, "free memory"))


def plan_on(gpu: GPUMemory, **options: Any) -> Plan:
    """With the engine's own count, on a GPU that this machine need not have."""

    class Elsewhere(GPU):
        def gpu_memory(self) -> GPUMemory:
            return gpu

    return make_plan(SMOLLM2.spec, Elsewhere(), Options.parse(backend="gpu", **options))


def test_buffers_in_main_memory_count_with_the_process() -> None:
    made = plan_on(GPUMemory("integrated", unified=True), memory="350MiB")
    assert made.predicted_peak == made.bytes.total <= 350 * MIB
    assert made.bytes.weights + made.bytes.kv < made.bytes.gpu < made.bytes.total
    assert (made.bytes.on_card, made.gpu_limit, made.config.adapter) == (False, None, "integrated")


def test_card_has_a_budget_of_its_own() -> None:
    """The process keeps what is not on the card, and the cache is as large as the card allows."""
    card = GPUMemory("card", unified=False, free=2048 * MIB)
    made, alike = plan_on(card, memory="200MiB"), plan_on(GPUMemory("integrated", unified=True))
    assert made.bytes.on_card
    assert made.bytes.gpu == alike.bytes.gpu > made.bytes.total
    assert (made.gpu_limit, made.gpu_limit_source) == (1536 * MIB, "free GPU memory")
    assert made.predicted_peak <= 200 * MIB
    tight = plan_on(card, gpu_memory="150MiB")
    assert 130 * MIB < tight.bytes.gpu <= 150 * MIB == tight.gpu_limit
    assert tight.config.capacity < made.config.capacity == SMOLLM2.spec.context


@pytest.mark.parametrize(
    ("gpu", "options", "said"),
    [
        exhaustive(
            GPUMemory("card", unified=False), {"gpu_memory": "50MiB"}, r"-memory is 50 MiB: .* --gpu-memory \d+MiB"
        ),
        (GPUMemory("card", unified=False, free=550 * MIB), {}, "less a margin, is 38 MiB: .* are the least"),
        (GPUMemory("integrated", unified=True), {"memory": "150MiB"}, r"needs \d+ MiB, the memory budget is 150 MiB"),
    ],
)  # fmt: skip
def test_models_that_are_too_large_are_refused(gpu: GPUMemory, options: dict[str, str], said: str) -> None:
    with pytest.raises(BudgetError, match=said) as refused:
        plan_on(gpu, **options)
    if smallest := refused.value.args[0].partition("smallest that fits is --gpu-memory ")[2].partition(" ")[0]:
        assert plan_on(gpu, gpu_memory=smallest).bytes.gpu <= int(smallest.removesuffix("MiB")) * MIB
        less = f"{int(smallest.removesuffix('MiB')) - 1}MiB"
        with pytest.raises(BudgetError):
            plan_on(gpu, gpu_memory=less)


@pytest.mark.usefixtures("wgpu")
@pytest.mark.parametrize(("name", "adapts"), [
    ("llama-gqa-tied", False),
    exhaustive("qwen35moe", True), exhaustive("gemma4", False),
])  # fmt: skip
def test_two_sessions_allocate_as_planned(name: str, adapts: bool, tmp_path: Path) -> None:
    """The count is the buffers' bytes, or little more: padding of weights is counted at its most."""
    path = GOLDEN / f"{name}.gguf"
    adapter = write_adapter(tmp_path / "a.gguf", open_model(path), 3) if adapts else None
    options: dict[str, Any] = {"backend": "gpu", "max_kv_size": 64, "lora": adapter}
    with load(path, **options) as one, load(path, **options) as other:
        for session in (one, other):
            allocated = cast(Any, session.engine).passes.device.allocated
            assert allocated <= session.plan.bytes.gpu <= 1.05 * allocated
        answers = [session.generate("ab", raw=True, max_tokens=8, ignore_eos=True) for session in (one, other)]
        assert answers[0] == answers[1]
        assert one.report is not None
        assert (one.report.memory.gpu, one.report.memory.on_card) == (one.plan.bytes.gpu, False)
        one.close()
        assert other.generate("ab", raw=True, max_tokens=8, ignore_eos=True) == answers[0]


@pytest.mark.usefixtures("wgpu")
def test_first_run_counts_the_drivers_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside all that the engine allocates."""
    model, compiling = open_model(GOLDEN / "llama-gqa-tied.gguf"), 500 * MIB
    rows: dict[str, Any] = {"backend": "gpu", "max_kv_size": 64}

    def planned(**more: Any) -> Plan:
        first_run = partial(GPU().first_run, model.file, model.spec)
        return make_plan(model.spec, GPU(), Options.parse(**rows, **more), first_run=first_run)

    load(model, **rows).close()  # makes the kernels
    usual = planned()
    assert usual.first_run == 0
    monkeypatch.setattr("edge.backends.tvm.gpu.hosts.wgpu.compiling_bytes", lambda *_: compiling)
    made = planned()
    assert abs(made.first_run - usual.bytes.total - compiling) < 2 * MIB  # it counts in coarser steps
    with pytest.raises(BudgetError, match=r"in a first run, which compiles .* later runs fit in") as refused:
        planned(memory=usual.bytes.total + compiling)
    assert planned(memory=refused.value.smallest).first_run <= refused.value.smallest


@pytest.mark.parametrize(("driver", "most"), [("Portable Computing Language 3.1", 200 * MIB), ("Adreno 42", None)])
def test_pocl_compiles_until_there_are_binaries(
    driver: str, most: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    adapter = Adapter(
        "opencl", "opencl", 0, "name", "vendor", driver, "cpu", unified=True, memory=None, limits=PORTABLE,
        features=frozenset(),
    )  # fmt: skip
    kernels = [Kernel(name, f"source of {name}", (1, 1), (), (), (), 0) for name in ("a", "b")]
    assert opencl.compiling_bytes(adapter, None) == opencl.compiling_bytes(adapter, kernels) == most
    for kernel in kernels:
        assert opencl.compiling_bytes(adapter, kernels) == most
        keep_binary(opencl._compiler(adapter), kernel.source, b"binary")
    assert opencl.compiling_bytes(adapter, kernels) == (None if most is None else 0)


@pytest.mark.usefixtures("wgpu")
@pytest.mark.parametrize(("prompt", "answer", "rows"), [(2, 2, 256), exhaustive(200, 300, 256)])
def test_predicted_peak_holds(prompt: int, answer: int, rows: int, tmp_path: Path) -> None:
    """On a driver whose buffers lie in the resident set, through prefill and beyond the end of the cache of SmolLM2;
    make test has layers of its size."""
    small = Small(layers=4, hidden=576, heads=9, kv_heads=3, head=64, ffn=1536, vocab=20_000, types="Q4_0")
    model = write_small(tmp_path / "model.gguf", small) if prompt == 2 else "smollm2-135m"
    if first_adapter("wgpu").kind != "cpu":
        pytest.skip("this driver's buffers are not in the resident set")
    counted, allocated, predicted, loaded, peak, evicted = run_child(ON_WGPU, model, prompt, answer, rows).output
    assert allocated <= counted <= 1.05 * allocated
    # A driver that has compiled these kernels before takes less than is counted for a first run.
    assert loaded <= peak <= predicted <= 1.35 * peak
    assert (evicted > 0) == (prompt + answer > rows)


UNSEEN = """
import json, sys
from edge.cli import run_command
from edge.devices.memory import memory_use

sys.argv[:] = ["edge", *sys.argv[1:]]
code = run_command()
loaded = [each for each in ("wgpu", "pyopencl", "cuda.bindings") if each in sys.modules]
print(json.dumps([code, loaded, memory_use().peak]))
"""


@pytest.mark.parametrize("command", [["run", "-p", "hi"], ["plan"]], ids=["run", "plan"])
def test_small_budget_is_refused_before_loading_a_driver(command: list[str]) -> None:
    """Drivers take 100 MiB, even to show their GPUs: the refusal would exceed the budget."""
    pytest.importorskip("wgpu")
    child = run_child(UNSEEN, *command, "smollm2-135m", "--backend", "gpu", "--memory", "100MiB")
    status, loaded, peak = child.output
    assert re.search(
        r"the memory budget is 100 MiB: the smallest that fits is --memory \d+MiB in a first run, which compiles or "
        r"tries the model; later runs fit in --memory \d+MiB", child.errors
    )  # fmt: skip
    assert (status, loaded) == (3, [])
    assert peak < 100 * MIB
