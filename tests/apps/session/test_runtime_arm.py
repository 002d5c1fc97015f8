"""Bundles for ARM under QEMU: whole answers, token by token those of the Python session here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bundles import model_of
from runtime_library import RUNTIME

import edge
from edge.model.model import Model
from edge.sampling import SamplingParams

QEMU, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-gcc"
CPUS = ("cortex-a53", "cortex-a76")  # without and with dot products
ROWS = {"max_kv_size": 256, "prefill_step_size": 32, "threads": 2}
QUESTIONS = ("Why is the sky blue?", "Write a short story about a fox.")
pytestmark = pytest.mark.exhaustive


def export_for_arm(model: Model, folder: Path, **options: Any) -> Path:
    """The program that answers, beside model.edge."""
    edge.export(model, folder, device="raspberry-pi-5", isas=["dotprod", "neon"], **ROWS, **options)
    program, source = folder / "answers", Path(__file__).parents[1] / "runtime" / "answers.c"
    command = [COMPILER, "-std=c11", "-O2", "-static", f"-I{RUNTIME}", source, folder / "libedge.a", "-lm", "-lpthread"]
    subprocess.run([*command, "-o", program], check=True)
    return program


def answers_on(cpu: str, program: Path, count: int, questions: tuple[str, ...]) -> list[list[int]]:
    done = subprocess.run(
        [QEMU, "-cpu", cpu, program, program.with_name("model.edge"), str(count)],
        input="\n".join(questions) + "\n", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [[int(token) for token in line.split()] for line in done.stdout.splitlines()]


def answers_here(model: Model, count: int, questions: tuple[str, ...], **options: Any) -> list[list[int]]:
    """Answers of the Python session. A token that is chosen is also the next one that runs."""
    found: list[list[int]] = []
    with edge.load(model, backend="cpu", **ROWS, **options) as session:
        ran, forward = list[int](), session._sequence.forward

        def record(tokens: Any, **how: Any) -> Any:
            ran.extend(tokens.tolist())
            return forward(tokens, **how)

        session._sequence.forward = record  # type: ignore[method-assign]
        for question in questions:
            ran.clear()
            prompt = session.model.encode_prompt(question)
            session.generate(prompt, max_tokens=count + 1, sampling=SamplingParams(temperature=0), ignore_eos=True)
            found.append(ran[prompt.size :])
    return found


@pytest.mark.parametrize("options", [{"kv_policy": "streaming"}, {"kv_policy": "h2o", "kv_dtype": "int8"}])
def test_whole_answers_on_arm(options: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("tvm_ffi")
    for program in (QEMU, COMPILER):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    model = model_of("llama-gqa-tied")
    program = export_for_arm(model, tmp_path / "bundle", **options)
    expected = answers_here(model, 300, QUESTIONS, **options)
    for cpu in CPUS:
        assert answers_on(cpu, program, 300, QUESTIONS) == expected
