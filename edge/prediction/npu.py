"""NPU efficiency: shares of the ceilings that follow from published speeds.

Nothing of ours has run on an NPU. `benchmarks/npu_prediction.py` predicts published speeds of other programs on Hexagon
and shows the error of each: these shares put the predictions of decode in their middle. Prefill of programs with
integer inputs is faster than predicted, since ours are in float16.
"""

from __future__ import annotations

from edge.backends.efficiency import Efficiency, RowEfficiency, WeightEfficiency
from edge.devices.profiles.profile import DeviceProfile
from edge.plan.plan import Plan

_WEIGHTS = WeightEfficiency(reading=0.77, float32=0.9)
EFFICIENCY = Efficiency(
    {"integers": _WEIGHTS, "others": _WEIGHTS, "floats": _WEIGHTS},
    {"f16": RowEfficiency(reading=0.77, float32=0.4)},
    step_s=300e-6,  # a call of the driver, the embedding before it and the new rows behind it: an assumption
)
SPREAD = (0.7, 2.1)  # published speeds, as multiples of their predictions
# Factors by which decode speeds of a device differ from estimates fitted to the other devices alone: half of them at
# most by the first, all by less than the second.
LEFT_OUT = (1.2, 1.6)
HEDGE = (
    f"no run on an NPU was measured: speeds that others published are {SPREAD[0]:g} to {SPREAD[1]:g} times what such "
    f"estimates say of them\nof devices that it was not fitted to, half of such estimates of answers are off by "
    f"{LEFT_OUT[0] - 1:.0%} or less, the worst by {LEFT_OUT[1] - 1:.0%}"
)


def is_on_npu(plan: Plan, device: DeviceProfile) -> bool:
    """Whether the plan's execution provider runs on the device's NPU."""
    return device.npu_named(plan.config.provider) is not None


def npu_basis(device: DeviceProfile) -> list[str]:
    """The NPU's figures that estimates rest on, in words."""
    bandwidth, rate, watts = (device.figures.get(f"npu_{name}") for name in ("read_bandwidth", "f16_flops", "watts"))
    said = [f"the NPU reads {bandwidth.value / 1e9:.3g} GB/s of memory ({bandwidth.kind})"] if bandwidth else []
    if device.npu_flops:
        kind = rate.kind if rate else "assumed: a quarter of its rate for bytes"
        said.append(f"it does {device.npu_flops / 1e12:.3g} TFLOP/s in float16 ({kind})")
    if watts:
        said.append(f"the device draws {watts.value:g} W while it decodes ({watts.kind})")
    return [*said, HEDGE, *([device.npu.note] if device.npu and device.npu.note else [])]
