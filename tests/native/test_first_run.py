"""`--memory` in a first run: the compiler's process counts beside the one that waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import GOLDEN, run_child

from edge.backends import engine_named
from edge.backends.tvm.compiler import compiled
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.targets import choose_target
from edge.errors import BudgetError
from edge.model.model import open_model
from edge.model.names.catalog import find_model
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.options import Options
from edge.plan.plan import make_plan

MODEL = GOLDEN / "llama-gqa-tied.gguf"
REAL = ("smollm2-135m", "gemma3-270m")
MIB = 1 << 20

_FIRST = """
import json, sys
import edge

def load(memory):
    return edge.load(sys.argv[1], backend="cpu", max_kv_size=64, threads=1, memory=memory)

memory, session = "110MiB", None
while session is None:
    try:
        session = load(memory)
    except edge.BudgetError as error:  # twice, if the process has grown across a grain of the plan meanwhile
        assert memory == "110MiB" or error.smallest <= memory + (2 << 20)
        refused, memory = str(error), error.smallest
smallest = memory
with session:
    session.generate("a", raw=True, max_tokens=1)
    report, frugal = session.report.memory, session.plan.config.frugal
with load("110MiB") as session:
    session.generate("a", raw=True, max_tokens=1)
    later = session.report.memory.peak_rss
print(json.dumps([refused, smallest, frugal, report.peak_rss, later]))
"""


@pytest.mark.slow
def test_compiler_counts_and_the_smallest_budget_suffices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    child = run_child(_FIRST, MODEL)
    assert child.status == 0, child.errors
    refused, smallest, frugal, first, later = child.output
    assert (
        f'memory="{smallest // MIB}MiB" in a first run, which compiles or tries the model; later runs fit in memory="'
        in refused
    )
    assert frugal
    assert child.peak < first <= smallest  # the kernel counts the largest process alone
    assert later <= 110 * MIB


@pytest.mark.exhaustive
@pytest.mark.parametrize("frugal", [True, False], ids=["frugal", "quick"])
@pytest.mark.parametrize("model", ["gemma4", "gemma4moe", "gpt-oss", "lfm2moe", "qwen35moe", *REAL])
def test_compilation_memory_is_as_planned(
    model: str, frugal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the largest KV dtype's code, for runs, several sequences and drafts, and apps."""
    opened = open_model(find_model(model) if model in REAL else GOLDEN / f"{model}.gguf")
    design = Design.of(make_layout(opened.file, opened.spec, halve=True), "int4", choose_target())
    for each in (design, replace(design, batches=[2, 4, 8]), replace(design, exported=True)):
        compiled.compile_design(each, tmp_path / "out", frugal=frugal)
    assert not caplog.records


@pytest.mark.parametrize(("name", "dtype", "quick", "frugal"), [
    ("gemma4:e2b", "f16", 367, 0), ("gemma4:e2b", "int4", 468, 303), ("gemma4:26b-a4b", "f16", 337, 237),
])  # fmt: skip
def test_compilers_of_wide_heads_take_more(name: str, dtype: str, quick: int, frugal: int, tmp_path: Path) -> None:
    """quick, frugal: measured, in MiB; the models are too large for the test above."""
    file = outline_model(known_models()[name], "Q4_0", tmp_path / "model.gguf")
    design = Design.of(make_layout(file, read_spec(file), halve=True), dtype, choose_target())
    for took, how in ((quick, False), (frugal, True)):
        assert took * MIB <= compiled.compiler_bytes(design, frugal=how) < max(1.2 * took, 400) * MIB


def test_first_run_is_planned() -> None:
    """Quick where that fits, else frugal, else refused with what would fit now and later."""
    spec, engine = open_model(MODEL).spec, engine_named("reference")

    def plan(memory: int) -> tuple[bool, int]:
        made = make_plan(
            spec, engine, Options(max_kv_size=64, memory=memory), process=50 * MIB,
            first_run=lambda config: (100 if config.frugal else 400) * MIB,
        )  # fmt: skip
        return made.config.frugal, made.first_run

    assert plan(500 * MIB) == (False, 450 * MIB)
    assert plan(300 * MIB) == (True, 150 * MIB)
    with pytest.raises(
        BudgetError, match=r"^needs 156 MiB, .*--memory 156MiB in a first run, .* later .*--memory \d+MiB"
    ):
        plan(120 * MIB)
    assert plan(156 * MIB) == (True, 150 * MIB)
