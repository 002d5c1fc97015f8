"""`edge tune --provider`: the forms that a model may have on an NPU."""

from __future__ import annotations

import math
import time as clock
from dataclasses import asdict
from typing import TYPE_CHECKING

from edge.budget import format_bytes
from edge.cli.show import note, print_json, progress, table
from edge.errors import BudgetError, InputError

if TYPE_CHECKING:
    from edge.backends.tuning import Values
    from edge.tuning.forms import Forms, Tried


def computes_here(provider: str, device: str = "host") -> bool:
    """Whether forms can be timed: on an NPU of this device, or its processor. Raises InputError for providers that have
    none, and for what runs here only."""
    from edge.backends.onnx import ENGINE
    from edge.backends.onnx.npu.lookup import find_npu
    from edge.backends.onnx.providers import find_provider, is_static
    from edge.devices.profiles import HOST

    ENGINE.check_installed()
    if not is_static(provider):
        raise InputError(f"--provider {provider} runs graphs of any size, so there is no form to choose: leave it out")
    if device == HOST:
        return not find_provider(provider).emulated
    if find_npu(provider.lower()) is None:
        raise InputError(f"--provider {provider} is this device's processor: leave --device {device} out")
    return False


def show_forms(
    name: str, provider: str, device: str, rows: int | None, kv_dtype: str, trials: int, seconds: float,
    *, json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Of an NPU that is not here: compile the forms for it, and print what each takes. Raises what `try_forms` raises,
    and InputError for a device that the provider does not run on."""
    from edge.backends.onnx.providers import find_provider
    from edge.converters.npu import NpuTarget
    from edge.devices.profiles import HOST, find_profile
    from edge.plan.npu import check_npu
    from edge.run.opening import open_model
    from edge.tuning.forms import emulated_device, try_forms

    began, opened = clock.monotonic(), open_model(name)
    device = emulated_device(find_provider(provider)) if device == HOST else device
    check_npu(opened.file, opened.spec, find_profile(device), provider)
    with progress(enabled=not (quiet or json)) as shown:

        def on_trial(done: int, of: int, values: Values) -> None:
            said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
            shown.step(f"form {done + 1} of {of}: {said}")(done, of)

        forms = try_forms(
            opened.file, opened.spec, NpuTarget(device, rows), kv_dtype=kv_dtype, trials=trials,
            seconds=began + seconds - clock.monotonic(), on_trial=on_trial,
        )  # fmt: skip
    if forms.late and not forms.tried:
        raise BudgetError(
            f"{opened.spec.label}: no form was compiled within --time {seconds:g}s: give --time "
            f"{max(5, 2 * math.ceil(seconds / 60))}m"
        )
    _show(opened.spec.label, forms, seconds, json=json, quiet=quiet)
    if forms.interrupted:
        raise KeyboardInterrupt


def _show(label: str, forms: Forms, seconds: float, *, json: bool, quiet: bool) -> None:
    from edge.tuning.forms import WHY_NO_RECORD

    if json:
        tried = [{**asdict(each), "bytes": each.nbytes, "beyond_weights": each.beyond} for each in forms.tried]
        print_json({"model": label, **asdict(forms), "tried": tried, "record": None, "why": WHY_NO_RECORD})
        return
    limit = "within the limit" if forms.limit is None else f"within {format_bytes(int(forms.limit))}"
    headings = ["head", "chunk", "shards", "compiled in", "contexts", "beyond the weights", limit]
    if forms.tried:
        print(table(headings, [_row(each) for each in forms.tried]))
    if quiet:
        return
    some = f"{len(forms.tried)} of " if len(forms.tried) < forms.candidates else ""
    needed = math.ceil(seconds * forms.candidates / max(1, len(forms.tried)) / 60)
    more = f"; for all give --time {needed}m" if forms.late else ""
    note(
        f"{label}: {some}{forms.candidates} forms compiled for {forms.npu} of {forms.device} (compiler "
        f"{forms.compiler or 'unknown'}): times and contexts are measured, weights counted{more}"
    )
    for each in forms.tried:
        if each.error:
            note(f"chunk {each.form.chunk}, shards {each.form.shards}, head {each.form.head}: {each.error}")
    note(f"no record is written: {WHY_NO_RECORD}")


def _row(each: Tried) -> list[str]:
    form = each.form
    sizes = [form.head, str(form.chunk), str(form.shards), f"{each.seconds:.1f} s"]
    if each.error is not None:
        return [*sizes, "refused", "", ""]
    parts = " + ".join(format_bytes(size) for size in each.contexts)
    beyond = f"{'−' if each.beyond < 0 else ''}{format_bytes(abs(each.beyond))}"
    return [*sizes, parts, beyond, "unknown" if each.fits is None else "yes" if each.fits else "no"]
