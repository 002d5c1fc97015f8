"""The figures that predictions rest on, and those that a device's profile lacks, in words."""

from __future__ import annotations

from edge.devices.profiles import HOST
from edge.devices.profiles.profile import DeviceProfile
from edge.lab.prediction import npu
from edge.lab.prediction.crowd import Crowd
from edge.lab.prediction.errors import Correction, corrected_by, learned_from
from edge.plan.plan import Plan


def basis(
    device: DeviceProfile, plan: Plan, decoding: Correction | None, prompts: Correction | None, crowd: Crowd | None
) -> list[str]:
    """The figures that estimates rest on."""
    busy = crowd and f"other programs want the {crowd.cores} cores with {crowd.neighbours:.1f} threads now (measured)"
    return [*_ceilings(device, plan, decoding, prompts), *([busy] if busy else [])]


def _ceilings(device: DeviceProfile, plan: Plan, decoding: Correction | None, prompts: Correction | None) -> list[str]:
    threads = plan.config.threads
    bandwidth, flops, figure = device.bandwidth(threads), device.flops(threads), device.figures.get("f32_flops")
    if npu.is_on_npu(plan, device):
        said = npu.npu_basis(device)
        return [*said, corrected_by(decoding, prompts)] if decoding and prompts else said
    if bandwidth is None:
        return []
    said = [f"ceilings were measured by {device.measured_by}"] if device.measured_by else []
    said += [f"memory gives {bandwidth.bytes_per_s / 1e9:.3g} GB/s ({bandwidth.kind}: {bandwidth.about})"]
    said += [f"cores do {flops / 1e9:.3g} GFLOP/s with {threads} threads ({figure.kind})"] if flops and figure else []
    int8_ops = device.int8_ops(threads)
    said += [f"and {int8_ops / 1e9:.3g} Gop/s on bytes (measured)"] if int8_ops else []
    if decoding and prompts:
        told = learned_from if device.speeds else corrected_by
        said += [told(decoding, prompts)]
    return said


def unknown(
    device: DeviceProfile, plan: Plan, *, decode: bool, prompts: bool, joules: bool, streams: bool
) -> list[str]:
    """What no figure tells. decode, prompts, joules: whether these are predicted. streams: whether weights are read
    again at an unknown speed."""
    here = device.name == HOST
    name = "this device" if here else device.name
    todo = ": edge devices probe measures it" if here else ""
    missing = []
    if streams:
        missing.append(
            f"weights are read anew for every token, and how fast {name} does that is unknown, so nothing is "
            "said of its speed"
        )
    elif npu.is_on_npu(plan, device):
        missing += _unknown_of_npu(name, decode=decode, prompts=prompts)
    elif not npu.is_on_cpu(plan) and not (decode and prompts):
        what = "a GPU" if plan.config.provider.lower() == "cpu" else f"--provider {plan.config.provider}"
        missing.append(f"how fast {what} is shows in its first runs, so nothing is said of what none of them measured")
    elif not decode:
        missing.append(f"how fast {name} reads memory is unknown, so nothing is said of its speed{todo}")
    elif not prompts:
        missing.append(
            f"how fast {name} multiplies is unknown, so nothing is said of prompts, nor "
            f"of the tokens that a budget buys behind them{todo}"
        )
    if decode and not joules:
        why = (
            "no earlier run was metered by this device's sensor"
            if here
            else f"{'npu_watts' if npu.is_on_npu(plan, device) else 'core_watts'} of {device.name} is unknown"
        )
        missing.append(f"{why}, so nothing is said of joules")
    return missing


def _unknown_of_npu(name: str, *, decode: bool, prompts: bool) -> list[str]:
    if not decode:
        return [f"how fast the NPU of {name} reads memory is unknown, so nothing is said of its speed"]
    return [] if prompts else [f"how fast the NPU of {name} multiplies is unknown, so nothing is said of prompts"]
