"""Predictions for NPUs, compared with speeds that others published: nothing is measured here.

Every line is a run of another program on a phone or laptop with a Hexagon NPU. `edge plan --provider qnn` predicts it
from the figures of the device's profile, with the same sizes of graphs: rows of the cache, tokens of a chunk. What the
programs do differs: w4a16 has blocks of 4 bits or columns of 4 bits and inputs of 16 bits, 16a8w weights of 8 bits.
The shares in `edge/prediction/npu.py` were fitted to these lines. So the last lines judge them out of sample: each
device's speeds as the shares predict them that fit the other devices alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from edge.backends import engine_named
from edge.cli.terminal.show import table
from edge.devices.memory import MemoryLimit
from edge.devices.output import work_folder
from edge.devices.profiles import find_profile
from edge.model.known import KnownModel, known_models, outline_model
from edge.model.reader import read_spec
from edge.options import Options
from edge.plan.plan import make_plan
from edge.prediction.predict import Prediction, Wanted, predict

EXECUTORCH = "https://github.com/pytorch/executorch/pull/20587"
MLLM = "https://github.com/UbiquitousLearning/mllm/pull/624"
AI_HUB = "https://huggingface.co/qualcomm/Llama-SEA-LION-v3.5-8B-R"
MISTRAL = "https://huggingface.co/qualcomm/Mistral-7B-Instruct-v0_3"


def _model(name: str, architecture: str, *shape: int, untied: bool = False) -> KnownModel:
    """As its config.json on the Hub has it. shape: layers, width, FFN, heads, KV heads, vocabulary."""
    keys = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count",
            "attention.head_count_kv", "vocab_size")  # fmt: skip
    figures = {**dict(zip(keys, shape, strict=True)), "context_length": 32768}
    return KnownModel(name, "", "", 0, "", architecture, figures, untied=untied)


MODELS = known_models() | {
    model.name: model
    for model in (
        _model("qwen2.5:0.5b", "qwen2", 24, 896, 4864, 14, 2, 151936),
        _model("qwen2.5:3b", "qwen2", 36, 2048, 11008, 16, 2, 151936),
        _model("llama3.1:8b", "llama", 32, 4096, 14336, 32, 8, 128256, untied=True),
        _model("mistral:7b", "llama", 32, 4096, 14336, 32, 8, 32768, untied=True),
    )
}


@dataclass(frozen=True)
class Published:
    """decode, prefill: tok/s. type: of the weights, the nearest that GGUF has."""

    device: str
    model: str
    type: str
    rows: int
    chunk: int
    prompt: int
    decode: float
    prefill: float | None
    source: str


PUBLISHED = (
    Published("galaxy-s24", "qwen3:1.7b", "Q4_0", 1024, 32, 640, 25.84, 758.28, MLLM),
    Published("galaxy-s24", "qwen2.5:3b", "Q4_0", 1024, 32, 512, 18.11, 545.62, MLLM),
    Published("galaxy-s25", "smollm2:135m", "Q8_0", 128, 32, 32, 254, None, EXECUTORCH),
    Published("galaxy-s25", "qwen2.5:0.5b", "Q8_0", 128, 32, 32, 130, None, EXECUTORCH),
    Published("galaxy-s25", "qwen3:0.6b", "Q8_0", 128, 32, 32, 70, None, EXECUTORCH),
    Published("galaxy-s25", "llama3.2:1b", "Q8_0", 128, 32, 32, 29, None, EXECUTORCH),
    Published("galaxy-s25", "mistral:7b", "Q4_0", 4096, 128, 128, 10.73, 128 / 0.18, MISTRAL),
    Published("galaxy-s25", "llama3.1:8b", "Q4_0", 4096, 128, 128, 12.9262, 128 / 0.159383, AI_HUB),
    Published("snapdragon-x-elite", "llama3.1:8b", "Q4_0", 4096, 128, 128, 10.0367, 128 / 0.211644, AI_HUB),
)


def predicted(run: Published) -> Prediction:
    with work_folder() as folder:
        spec = read_spec(outline_model(MODELS[run.model], run.type, folder / "outline.gguf"))
    options = Options.parse(provider="qnn", max_kv_size=run.rows, prefill_step_size=run.chunk, kv_dtype="f16")
    plan = make_plan(spec, engine_named("onnx"), options, elsewhere=MemoryLimit(1 << 36, run.device))
    return predict(spec, plan, find_profile(run.device), Wanted(run.prompt, (run.rows,)))


def comparisons() -> Iterator[tuple[Published, str, float, float]]:
    """Each run with a name of a figure, its prediction and the published value, tok/s."""
    for run in PUBLISHED:
        found = predicted(run)
        yield run, "decode", found.decode[0].tok_s.value, run.decode
        if run.prefill is not None and found.prefill_tok_s is not None:
            yield run, f"prompt of {run.prompt}", found.prefill_tok_s.value, run.prefill


def left_out(ratios: Mapping[str, Sequence[float]]) -> list[float]:
    """Published / predicted speeds if the share were fitted without the device that is predicted, so that the geometric
    mean of the other devices' ratios is 1. ratios: published / predicted with today's share, by device."""
    found = []
    for device, own in ratios.items():
        others = geometric_mean([each for name, all_of in ratios.items() if name != device for each in all_of])
        found += [each / others for each in own]
    return found


def show(comparisons: Iterable[tuple[Any, str, float, float]], about: str | None) -> list[tuple[str, str, float]]:
    """Print predictions beside published figures, as a table or with --json.

    about: the script's own help. Returns of each, unless as JSON: the device, the name of the figure, and published /
    predicted.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = [
        [run.device, run.model, run.type, what, guess, value, value / guess, run.source]
        for run, what, guess, value in comparisons
    ]
    if as_json:
        print(json.dumps(rows))
        return []
    shown = [[*each[:4], f"{each[4]:.4g}", f"{each[5]:.4g}", f"{each[6]:.2f}", each[7]] for each in rows]
    headings = ["device", "model", "weights", "tok/s", "predicted", "published", "published / predicted", "source"]
    print(table(headings, shown, left=4))
    return [(each[0], each[3], each[6]) for each in rows]


def main() -> None:
    ratios = dict[str, dict[str, list[float]]]()
    for device, what, ratio in show(comparisons(), __doc__):
        ratios.setdefault(what.split()[0], {}).setdefault(device, []).append(ratio)
    for what, by_device in ratios.items():
        fitted = [each for own in by_device.values() for each in own]
        for how, all_of in (("fitted", fitted), ("each device left out", left_out(by_device))):
            error = median(max(each, 1 / each) for each in all_of) - 1
            said = f"{min(all_of):.2f} to {max(all_of):.2f}, mean {geometric_mean(all_of):.2f}"
            print(f"{what}, {how}: {said}, half of them off by {error:.0%} or less")


if __name__ == "__main__":
    main()
