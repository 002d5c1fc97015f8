"""Memory on GPUs, of their own or the process's: counted in plans, and compared with what an engine allocates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.backends import engine_named, find_backend
from edge.backends.base import Backend, GPUMemory
from edge.devices.memory import MemoryLimit, MemoryUse
from edge.errors import BudgetError, UnsupportedError
from edge.model.model import open_model
from edge.options import Options
from edge.plan.plan import Plan, make_plan

MIB = 1 << 20
SMOLLM2 = open_model("smollm2-135m")


@pytest.fixture(autouse=True)
def planning_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.plan.plan.memory_use", lambda: MemoryUse(60 * MIB, 70 * MIB, None, None))
    monkeypatch.setattr("edge.plan.plan.memory_limit", lambda root: MemoryLimit(4096 * MIB, "free memory"))


def plan_on(gpu: GPUMemory, **options: Any) -> Plan:
    """With the engine's own count, on a GPU that this machine need not have."""
    backend = SimpleNamespace(**{**vars(engine_named("gpu")), "gpu_memory": lambda: gpu})
    return make_plan(SMOLLM2.spec, cast(Backend, backend), Options.parse(backend="gpu", **options))


def test_buffers_in_main_memory_count_with_the_process() -> None:
    made = plan_on(GPUMemory("integrated", unified=True), memory="300MiB")
    assert made.predicted_peak == made.bytes.total <= 300 * MIB
    assert made.bytes.weights + made.bytes.kv < made.bytes.gpu < made.bytes.total
    assert (made.bytes.on_card, made.gpu_limit, made.config.adapter) == (False, None, "integrated")


def test_a_card_has_a_budget_of_its_own() -> None:
    """The process keeps what is not on the card, and the cache is as large as the card allows."""
    card = GPUMemory("card", unified=False, free=2048 * MIB)
    made, alike = plan_on(card, memory="150MiB"), plan_on(GPUMemory("integrated", unified=True))
    assert made.bytes.on_card
    assert made.bytes.gpu == alike.bytes.gpu > made.bytes.total
    assert (made.gpu_limit, made.gpu_limit_source) == (1536 * MIB, "free GPU memory")
    assert made.predicted_peak <= 150 * MIB
    tight = plan_on(card, gpu_memory="150MiB")
    assert 130 * MIB < tight.bytes.gpu <= 150 * MIB == tight.gpu_limit
    assert tight.config.capacity < made.config.capacity == SMOLLM2.spec.context


@pytest.mark.parametrize(
    ("gpu", "options", "said"),
    [
        (GPUMemory("card", unified=False), {"gpu_memory": "50MiB"}, r"-memory is 50 MiB: .* --gpu-memory \d+MiB"),
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


def test_other_engines_have_nothing_on_a_gpu() -> None:
    reference = find_backend("reference", SMOLLM2.file, SMOLLM2.spec)
    with pytest.raises(UnsupportedError, match="--gpu-memory is for the gpu engine, not for reference"):
        make_plan(SMOLLM2.spec, reference, Options.parse(backend="reference", gpu_memory="1GiB"))
