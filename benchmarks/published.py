"""Predictions for ARM processors and NPUs, compared with speeds that others published: nothing is measured here.

Every line is a run of another program on such a device (edge/lab/prediction/published.toml), beside the prediction of
edge's own engine for the same model, before it is corrected. The last lines judge corrections out of sample: each
device's figures by the correction that fits the other devices alone. `--write` writes them where predictions find them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edge.cli.terminal.show import table
from edge.devices.profiles import find_profile
from edge.lab.prediction import errors
from edge.lab.prediction.errors import Correction, fitted, left_out, quantile
from edge.lab.prediction.published import Comparison, Published, comparisons

FILE = Path(errors.__file__).with_name("errors.toml")


def corrections(found: list[Comparison]) -> list[Correction]:
    """A correction of each engine, kind of machine and figure of which there are speeds of at least two devices."""
    groups = dict[tuple[str, str, bool, errors.What], list[Comparison]]()
    for each in found:
        machine = find_profile(each.run.device).arch
        groups.setdefault((each.backend, machine, each.run.npu, each.what), []).append(each)
    made = []
    for (backend, machine, npu, what), group in groups.items():
        ratios = dict[str, list[float]]()
        for each in group:
            ratios.setdefault(each.run.device, []).append(each.ratio)
        if len(ratios) < 2:
            continue
        # Programs with integer inputs read prompts faster on an NPU than ours, in float16, will: that is no correction.
        corrected = not (npu and what == "prompt")
        factor = fitted(ratios) if corrected else 1.0
        rest = left_out(ratios) if corrected else [ratio for own in ratios.values() for ratio in own]
        engines = sorted({each.run.engine for each in group})
        made.append(
            Correction(backend, machine, npu, what, round(factor, 3), round(quantile(rest), 3), len(group),
                       sorted(ratios), engines)
        )  # fmt: skip
    return made


def threads_of(run: Published) -> str:
    """Where a source does not say, the device's plan has as many as edge would take."""
    return "" if run.npu else f"{run.threads}" if run.threads else f"{find_profile(run.device).threads}, assumed"


def to_toml(made: list[Correction]) -> str:
    lines = ["# Made by benchmarks/published.py --write: edge/lab/prediction/errors.py says what the fields mean."]
    for each in made:
        lines += ["", "[[corrections]]"]
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in vars(each).items()]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write edge/lab/prediction/errors.toml")
    arguments = parser.parse_args()
    found = [*comparisons(npu=False), *comparisons(npu=True)]
    made = corrections(found)
    if arguments.write:
        FILE.write_text(to_toml(made), encoding="utf-8")
    rows = [
        [each.run.device, each.run.model, each.run.type, each.run.engine, threads_of(each.run), each.backend, each.what,
         each.predicted, each.published, each.ratio, each.run.source]
        for each in found
    ]  # fmt: skip
    if arguments.json:
        print(json.dumps({"figures": rows, "corrections": [vars(each) for each in made]}))
        return
    heads = [
        "device",
        "model",
        "weights",
        "program",
        "threads",
        "as",
        "tok/s",
        "predicted",
        "published",
        "ratio",
        "source",
    ]
    print(table(heads, [[*row[:7], *(f"{each:.3g}" for each in row[7:10]), row[10]] for row in rows], left=7))
    for each in made:
        kind = "NPU" if each.npu else each.machine
        print(
            f"{each.backend} on {kind}, {each.what}: {each.factor:.2f} times the prediction; "
            f"each device left out: {errors.worded(each.error)} ({each.figures} figures of {len(each.devices)} devices)"
        )


if __name__ == "__main__":
    main()
