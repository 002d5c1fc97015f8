"""Predictions of a model from another's kit on the same device, beside what its own kit measured: out of sample.

Takes results of kits of several models on one device (`edge profile MODEL --on kit:DIR`, or --on ssh:HOST). Each model
is predicted from the ceilings that the other's kit measured, then from the other's speeds, too.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from edge.cli.terminal.show import table
from edge.lab.prediction.predict import Wanted, predict
from edge.lab.profiling.kit.device import device_of
from edge.lab.profiling.kit.result import Result, read_result
from edge.model.names.catalog import find_local
from edge.run.starting.opening import open_model


def compared(known: Result, wanted: Result, model: str) -> list[list[str]]:
    """Rows of a table: `wanted`, a kit of `model`, as the other kit predicts it."""
    device, measured = device_of(known, "x"), device_of(wanted, "y").speeds[0]
    spec, made = open_model(find_local(model) or model).spec, wanted.kit.plan
    plan = replace(made, config=replace(made.config, threads=measured.threads))
    at, rows = Wanted(int(measured.prompt), (int(measured.token_context),)), []
    before, after = (predict(spec, plan, each, at) for each in (replace(device, speeds=()), device))
    token_s = measured.token_s[measured.contexts.index(measured.token_context)]
    for what, real, one, other in (
        ("decode", 1 / token_s, before.decode[0].tok_s, after.decode[0].tok_s),
        ("prompt", 1 / measured.prompt_s, before.prefill_tok_s, after.prefill_tok_s),
    ):
        if one and other:
            values = (real, one.value, real / one.value, other.value, real / other.value)
            rows.append([measured.label, device.speeds[0].label, what, *(f"{each:.3g}" for each in values)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", metavar="MODEL=FILE")
    pairs = [each.partition("=") for each in parser.parse_args().results]
    results = [(model, read_result(Path(file))) for model, _, file in pairs]
    rows = [
        row
        for model, wanted in results for other, known in results if other != model
        for row in compared(known, wanted, model)
    ]  # fmt: skip
    heads = ["predicted", "from a kit of", "tok/s", "measured", "by ceilings", "ratio", "by its speeds, too", "ratio"]
    print(table(heads, rows, left=3))


if __name__ == "__main__":
    main()
