"""A hint, printed once, that this model could be tuned for this device."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from edge.backends import engine_named
from edge.cli.terminal.show import note
from edge.devices.host import processor
from edge.devices.private import make_private_folder
from edge.model.spec import ModelSpec
from edge.plan.plan import Plan
from edge.storage.cache import cache_folder


def suggest_tuning(model: str, spec: ModelSpec, plan: Plan) -> None:
    """Print the hint if no tuning record fits. An empty file in the cache folder records that it was printed."""
    if not engine_named(plan.backend).CAPABILITIES.tunable or plan.tuned != "default":
        return
    subject = f"{processor().name}, {spec.label}, {spec.layers} × {spec.hidden}"
    stamp = cache_folder() / "hints" / hashlib.sha256(subject.encode()).hexdigest()[:16]
    with suppress(OSError):  # without that file, no hint
        make_private_folder(stamp.parent)
        stamp.touch(0o600, exist_ok=False)
        note(f"edge tune {model} looks for settings that run this model faster on this device (once, about 5 minutes)")
