"""The sustained speed of a device that throttles, from long runs that kits measured on it.

Heat bounds the power of the cores. At a clock f they draw about f³ (voltage follows the clock), so n threads that keep
the share r of their speed draw the power of k threads that keep r · (n / k)^⅓.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from edge.devices.profiles.profile import DeviceProfile, Speed

_CUBE = 1 / 3


@dataclass(frozen=True)
class Kept:
    """The end of a long run, compared with its beginning."""

    seconds: float  # of the run
    speed: float  # share of it that is kept
    joules: float | None  # per token, as a multiple; None: no sensor counted them
    run: Speed  # the source
    measured: bool  # of this model, KV dtype and number of threads; else estimated

    @property
    def when(self) -> str:
        return f"after {self.seconds / 60:.0f} min without a pause"

    @property
    def source(self) -> str:
        """The source of the estimate, in words."""
        run = self.run
        threads = f"{run.threads} thread{'s' if run.threads > 1 else ''}"
        return f"estimated from the {run.sustained_speed:.0%} that {run.label} kept with {threads} (measured)"


def kept_by(device: DeviceProfile, model: str, kv_dtype: str, threads: int) -> Kept | None:
    """The sustained speed of a setting on the CPU of a device that throttles; None if no long run shows that it does.

    model: the key of its shape and block types. Long runs of other models count, too, the closest in threads first.
    """
    runs = [each for each in device.speeds if each.sustained_speed is not None]
    if not any(each.throttles for each in runs):
        return None
    asked = (model, kv_dtype, threads)

    def distance(run: Speed) -> tuple[float, bool, bool]:
        return abs(log(run.threads / threads)), run.model != model, run.kv_dtype != kv_dtype

    # A run without throttling says nothing about more threads.
    run = min((each for each in runs if each.throttles or each.threads >= threads), key=distance, default=None)
    if run is None or run.sustained_speed is None or run.sustained_s is None:
        return None
    measured = (run.model, run.kv_dtype, run.threads) == asked
    speed = run.sustained_speed if measured else min(1.0, run.sustained_speed * (run.threads / threads) ** _CUBE)
    joules = run.sustained_joules
    if joules is not None and run.threads != threads:  # a power of the speed, as in the run
        joules **= log(speed) / log(run.sustained_speed) if run.throttles else 0.0
    return Kept(run.sustained_s, speed, joules, run, measured)
