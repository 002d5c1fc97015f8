"""NPU efficiency: shares of the ceilings, fitted to published speeds.

edge itself was never measured on an NPU. `benchmarks/published.py` predicts published speeds of other programs on
Hexagon and shows the error of each: these shares center the predictions of decode, and errors are stated out of sample.
Prefill of programs with integer inputs is faster than predicted, since edge's inputs are in float16.
"""

from __future__ import annotations

from edge.backends import engine_named
from edge.backends.efficiency import Efficiency, RowEfficiency, WeightEfficiency
from edge.devices.profiles.profile import DeviceProfile
from edge.plan.plan import Plan

_WEIGHTS = WeightEfficiency(reading=0.77, float32=0.9)
EFFICIENCY = Efficiency(
    {"integers": _WEIGHTS, "others": _WEIGHTS, "floats": _WEIGHTS},
    {"f16": RowEfficiency(reading=0.77, float32=0.4)},
    step_s=300e-6,  # a call of the driver, the embedding before it and the new rows after it: an assumption
)
HEDGE = "no run on an NPU was measured: the shares of its ceilings fit speeds that others published"


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


def is_on_cpu(plan: Plan) -> bool:
    """Whether the plan runs on the CPU. The shares of the ceilings were not measured for GPUs and execution providers,
    so only earlier runs predict their speed; NPUs have estimates of their own."""
    return plan.config.provider.lower() == "cpu" and not engine_named(plan.backend).CAPABILITIES.gpu
