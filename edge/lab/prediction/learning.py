"""Prediction of models from measured speeds of other models on a device: the roofline, scaled by measured / roofline.

The scale also corrects for the difference between ceilings in registers, which kits measure, and NumPy's and ONNX
Runtime's rates, to which the engine's shares were fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from edge.backends.efficiency import Efficiency, Kind
from edge.devices.profiles.profile import DeviceProfile, Speed
from edge.lab.prediction.errors import Correction, What, fitted, left_out, quantile
from edge.lab.prediction.roofline import counting_s, reading_s
from edge.lab.prediction.work import Work


def learn(device: DeviceProfile, reach: Efficiency, backend: str, threads: int, what: What) -> Correction | None:
    """The correction of estimates by other models' speeds, with the same number of threads if possible; None without.

    Its error is out of sample, with each model left out in turn; None for a single model.
    """
    speeds = [each for each in device.speeds if each.threads == threads] or device.speeds
    ratios = dict[str, list[float]]()
    for speed in speeds:
        for ratio in _ratios(speed, device, reach, what):
            ratios.setdefault(speed.label, []).append(ratio)
    if not ratios:
        return None
    error = quantile(left_out(ratios)) if len(ratios) > 1 else None
    figures = sum(map(len, ratios.values()))
    return Correction(backend, device.arch, False, what, fitted(ratios), error, figures, [device.name], sorted(ratios))


def _ratios(speed: Speed, device: DeviceProfile, reach: Efficiency, what: What) -> Iterator[float]:
    """Measured / estimated tokens per second; nothing if the profile lacks a figure."""
    bandwidth, flops = device.bandwidth(speed.threads), device.flops(speed.threads)
    if bandwidth is None or flops is None or speed.integers is None or not speed.prompt_work or not speed.token_work:
        return
    prompt, token = Work(*speed.prompt_work), Work(*speed.token_work)
    both: dict[Kind, float] = {"integers": speed.integers, "floats": 1 - speed.integers}
    shares, int8_ops = {kind: share for kind, share in both.items() if share}, device.int8_ops(speed.threads)
    work = token if what == "decode" else prompt
    reading = reading_s(work, reach, shares, speed.kv_dtype, bandwidth.bytes_per_s)
    counting = counting_s(work, reach, shares, speed.kv_dtype, flops, int8_ops)
    if what == "decode":
        yield (max(reading, counting) + reach.step_s) / speed.token_s[speed.contexts.index(speed.token_context)]
    else:  # a chunk takes the sum of reading and counting: the overlap with its first token is negligible
        passes = ceil(prompt.weight_bytes / token.weight_bytes - 0.5)
        yield (reading + counting + passes * reach.step_s) / (speed.prompt * speed.prompt_s)
