"""`edge tune`: find the settings of the native engine that suit this device and model, and say what they gain."""

from __future__ import annotations

import math
import time as clock
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from edge.budget import parse_seconds
from edge.cli import options as o
from edge.cli.terminal.show import print_json, progress, table
from edge.errors import BudgetError, InputError

if TYPE_CHECKING:
    from edge.devices.records import Record
    from edge.lab.tuning.tune import Result, Status


class Engine(str, Enum):
    """Those that can be tuned (`Capabilities.tunable`)."""

    CPU = "cpu"
    GPU = "gpu"


def tune(
    model: o.OptionalModelArgument = None,
    device: Annotated[str, o.flag("--device", help="What to tune for; others than host need --tracker.")] = "host",
    trials: Annotated[int, o.flag("--trials", min=1, max=10_000, help="Most trials, earlier ones included.")] = 80,
    time: Annotated[str, o.flag("--time", help="Take this long in all, such as 5m.")] = "5m",
    tracker: Annotated[str | None, o.flag("--tracker", help="HOST:PORT of a TVM RPC tracker: measure there.")] = None,
    key: Annotated[str | None, o.flag("--key", help="The device's key at the tracker.")] = None,
    target: Annotated[
        str | None, o.flag("--target", help="The device's instruction set, with --tracker (default: ours).")
    ] = None,
    show: Annotated[bool, o.flag("--show", help="Explain the result, or list all records.")] = False,
    force: Annotated[bool, o.flag("--force", help="Repeat the trials of earlier tunings.")] = False,
    backend: Annotated[Engine, o.flag("--backend", help="The engine whose kernels are tuned.")] = Engine.CPU,
    kv_dtype: o.NativeKVDtype = "f16",
    seed: Annotated[int, o.flag("--seed", help="Order of the trials.")] = 0,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Find the fastest settings of the native engine for this device and model; later runs use them.

    Searched, then compared with the defaults end to end: if the gain is not beyond the noise, the defaults stay.
    """
    if model is None and not show:
        raise InputError("no MODEL: give one, or --show to list all records")
    if device != "host" and tracker is None:
        raise InputError(f"tuning for {device} needs the device to measure on: give --tracker HOST:PORT and --key")
    if (tracker is None) != (key is None):
        raise InputError("--tracker and --key go together")
    if backend is Engine.GPU and tracker is not None:
        raise InputError("--tracker measures CPUs; --backend gpu tunes for a GPU of this device")
    if target is not None and tracker is None:
        raise InputError("--target goes with --tracker; for this device, set EDGE_ISA")
    if show:
        _list(json) if model is None else _explain(model, backend, kv_dtype, json)
        return
    assert model is not None
    seconds = parse_seconds(time, "--time")
    result = _tune(
        model, device, trials, seconds, tracker, key, target, force, backend.value, kv_dtype, seed, quiet or json
    )
    if result.late and not result.record.trials:
        raise BudgetError(
            f"{result.record.model}: no trial within --time {seconds:g}s, which must do for compiling, for measuring "
            f"the defaults and for comparing with them: {_more(seconds)}"
        )
    if json:
        ended = {"interrupted": result.interrupted, "late": result.late, "measured": result.measured}
        print_json({**asdict(result.record), **ended})
    elif not quiet:
        print("\n".join(_summary(result, trials, seconds)))
    if result.interrupted:
        raise KeyboardInterrupt


def _tune(
    name: str, device: str, trials: int, seconds: float, tracker: str | None, key: str | None, target: str | None,
    force: bool, engine: str, kv_dtype: str, seed: int, quiet: bool,
) -> Result:  # fmt: skip
    from edge.backends import find_backend
    from edge.plan.checks import check_engine
    from edge.run.starting.opening import open_model

    began = clock.monotonic()
    opened = open_model(name)
    backend = find_backend(engine, opened.file, opened.spec)
    check_engine(backend, kv_dtype, None)
    from edge.lab.tuning.tune import tune as search

    if tracker is not None and key is not None:
        from edge.lab.tuning.remote import remote_setting

        setting = remote_setting(opened.file, opened.spec, device, kv_dtype, tracker, key, target)
    elif engine == Engine.GPU.value:
        from edge.lab.tuning.host import gpu_setting

        setting = gpu_setting(opened.file, opened.spec, kv_dtype)
    else:
        from edge.lab.tuning.host import host_setting

        setting = host_setting(opened.file, opened.spec, kv_dtype)
    with progress(enabled=not quiet) as shown:

        def on_status(status: Status) -> None:
            left = f"{status.seconds_left:.0f} s left"
            label = f"trial {status.trials} of {trials}, best {1 / status.best:.3f} ×, {left}: {status.doing}"
            shown.step(label)(status.trials, trials + 1)

        return search(
            opened.spec.label, setting, device=device, trials=trials, seconds=began + seconds - clock.monotonic(),
            seed=seed, force=force, on_status=on_status,
        )  # fmt: skip


def _summary(result: Result, trials: int, seconds: float) -> list[str]:
    from edge.devices.records import user_folder

    record, compared = result.record, result.record.comparison
    spread = (
        f"median of {compared.pairs} pairs, surely above {compared.floor:.3f}; "
        f"10–90 % of them: {compared.low:.3f} to {compared.high:.3f}"
        if compared
        else ""
    )
    tried = f"{record.trials} of at most {trials} trials" if result.late else f"{record.trials} trials"
    done = f"{tried}, {result.measured} of them new, {record.seconds:.0f} s"
    if result.late and not compared and record.kept == "default":
        return [f"{record.model}: {done}: not enough to say whether anything is faster; {_more(seconds)}"]
    if record.kept == "default":
        found = f"the best candidate came to {compared.median:.3f} × ({spread})" if compared else "nothing was faster"
        lines = [f"{record.model}: the defaults stay, {found}; {done}"]
    else:
        why = f"no time was left, {_more(seconds)}" if result.late else "interrupted"
        sure = spread or f"not compared with the defaults yet: {why}"
        lines = [f"{record.model}: {record.gain:.3f} × as fast as the defaults ({sure}); {done}"]
        lines.append("chosen: " + ", ".join(f"{name} {value}" for name, value in record.values.items()))
    return [*lines, f"record: {user_folder() / record.name}.json"] if record.trials else lines


def _more(seconds: float) -> str:
    return f"give --time {max(5, 2 * math.ceil(seconds / 60))}m"


def _list(json: bool) -> None:
    from edge.devices.records import read_records, user_folder

    records = read_records()
    if json:
        print_json({"folder": str(user_folder()), "records": [asdict(record) for record in records]})
        return
    if records:
        print(_table(records))
    else:
        print(f"no tuning records in {user_folder()}")


def _table(records: Sequence[Record]) -> str:
    headings = ["model", "KV", "processor", "date", "trials", "kept", "gain", "10–90 %"]
    return table(headings, [_row(record) for record in records], left=4)


def _row(record: Record) -> list[str]:
    compared, subject = record.comparison, record.subject
    spread = f"{compared.low:.3f}–{compared.high:.3f}" if compared else "not compared"
    return [
        record.model, subject.kv_dtype, subject.cpu, record.date, str(record.trials), record.kept,
        f"{record.gain:.3f}", spread,
    ]  # fmt: skip


def _explain(name: str, engine: Engine, kv_dtype: str, json: bool) -> None:
    """Print the record, and the effect of each value."""
    from edge.backends.tvm.gpu.tuning import find_record as find_record_of_gpu
    from edge.backends.tvm.tuning.lookup import find_record
    from edge.devices.records import trials_path
    from edge.lab.tuning.effects import effects, fates
    from edge.lab.tuning.table import read_trials
    from edge.run.starting.opening import open_model

    opened = open_model(name)
    record = (find_record_of_gpu if engine is Engine.GPU else find_record)(opened.spec, kv_dtype)
    if record is None:
        what = f"{opened.spec.label} with {kv_dtype} KV here"
        raise InputError(f"no tuning record fits {what}: run edge tune {name}")
    tried = read_trials(trials_path(record.name))
    usual = tried[0].against if tried else record.values  # the first race is against the defaults
    found = effects(tried, usual)
    if json:
        print_json({
            "record": asdict(record), "fates": fates(tried), "effects": [asdict(effect) for effect in found],
            "trials": [asdict(trial) for trial in tried],
        })  # fmt: skip
        return
    print(_table([record]))
    print(f"\ntimed: {record.score}\n")
    if found:
        cells = [
            [e.field, str(e.value), "" if e.value == usual[e.field] else f"{e.ratio:.3f}", str(e.races),
             " and ".join(e.parts), "chosen" if record.values.get(e.field) == e.value else ""] for e in found
        ]  # fmt: skip
        print(table(["field", "value", "time / default's", "races", "of", ""], cells))
        print(
            "\ntrials: "
            + ", ".join(
                f"{count} {'given up early' if fate == 'died' else fate}" for fate, count in fates(tried).items()
            )
        )
