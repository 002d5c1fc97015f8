"""Measured ceilings of this device: its processor's, and its GPU's if it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date

from edge.devices.probe import probe_profile
from edge.devices.profiles.profile import DeviceProfile, Figure
from edge.errors import EdgeError
from edge.lab.profiling.profile import GPUCeiling

_GPU_SHARE = 0.2  # of the measuring time


def measure_gpu(seconds: float = 1.0, on_progress: Callable[[float], None] | None = None) -> GPUCeiling:
    """Measure the memory bandwidth of the GPU that a run would use (`EDGE_GPU`).

    Raises UnsupportedError without one, MissingExtraError without TVM, EngineError if its driver fails.
    """
    from edge.backends.tvm.gpu.bandwidth import measure_bandwidth
    from edge.backends.tvm.gpu.hosts import choose_adapter

    adapter = choose_adapter()
    return GPUCeiling(adapter.name, adapter.host, measure_bandwidth(adapter, seconds, on_progress))


def probe_device(
    seconds: float = 8.0, on_progress: Callable[[float], None] | None = None
) -> tuple[DeviceProfile, str | None]:
    """This device's profile, and why it has no figures of a GPU, or None. Raises the errors of measure_ceilings."""
    said = on_progress or (lambda part: None)
    profile = probe_profile(seconds * (1 - _GPU_SHARE), lambda part: said(part * (1 - _GPU_SHARE)))
    try:
        gpu = measure_gpu(seconds * _GPU_SHARE, lambda part: said(1 - _GPU_SHARE * (1 - part)))
    except EdgeError as error:
        return profile, str(error)
    source = f"edge devices probe, {date.today().isoformat()}"
    figure = Figure(round(gpu.read_bytes_per_s), "measured", source, f"{gpu.name}, through {gpu.host}")
    return replace(profile, gpu=gpu.name, figures=profile.figures | {"gpu_read_bandwidth": figure}), None
