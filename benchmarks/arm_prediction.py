"""Predictions for ARM processors, compared with speeds that others published: nothing is measured here.

Every line is a run of another program on such a device; `edge plan --device` predicts edge's own cpu engine with the
same model. The shares of the ceilings (`backends/efficiency.py`) were measured on x86-64, so no line was fitted. How
many cores a publisher used is not always said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from npu_prediction import MODELS, show

from edge.backends import engine_named
from edge.devices.memory import MemoryLimit
from edge.devices.output import work_folder
from edge.devices.profiles import find_profile
from edge.model.known import outline_model
from edge.model.reader import read_spec
from edge.options import Options
from edge.plan.plan import make_plan
from edge.prediction.predict import Wanted, predict

CACTUS = "https://github.com/cactus-compute/cactus"
OLLAMA = "https://github.com/geerlingguy/ai-benchmarks/issues/7"


@dataclass(frozen=True)
class Published:
    """decode, prefill: tok/s. type: of the weights, the nearest that an outline has."""

    device: str
    model: str
    type: str
    decode: float
    prefill: float | None
    source: str


PUBLISHED = (
    Published("raspberry-pi-5", "lfm2.5:350m", "Q8_0", 30, 200, CACTUS),
    Published("galaxy-s25", "lfm2.5:350m", "Q8_0", 100, 660, CACTUS),
    Published("raspberry-pi-5", "llama3.2:3b", "Q4_0", 4.88, None, OLLAMA),
    Published("raspberry-pi-5", "llama3.1:8b", "Q4_0", 2.17, None, OLLAMA),
)


def comparisons() -> Iterator[tuple[Published, str, float, float]]:
    """Each run with a name of a figure, its prediction and the published value, tok/s."""
    for run in PUBLISHED:
        with work_folder() as folder:
            spec = read_spec(outline_model(MODELS[run.model], run.type, folder / "outline.gguf"))
        profile = find_profile(run.device)
        options, limit = Options.parse(max_kv_size=1024), MemoryLimit(1 << 36, run.device)
        plan = make_plan(spec, engine_named("cpu"), options, elsewhere=limit, threads=profile.cores)
        found = predict(spec, plan, profile, Wanted(512, (128,)))
        yield run, "decode", found.decode[0].tok_s.value, run.decode
        if run.prefill is not None and found.prefill_tok_s is not None:
            yield run, "prompt", found.prefill_tok_s.value, run.prefill


def main() -> None:
    ratios = dict[str, list[float]]()
    for _, what, ratio in show(comparisons(), __doc__):
        ratios.setdefault(what, []).append(ratio)
    for what, all_of in ratios.items():
        print(f"{what}: {min(all_of):.2f} to {max(all_of):.2f}")


if __name__ == "__main__":
    main()
