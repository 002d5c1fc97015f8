"""Speeds of some models on a device, which a kit measured, predict those of others there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import GOLDEN
from kits import result

from edge.backends import engine_named
from edge.devices.memory import MemoryLimit
from edge.devices.profiles import find_profile
from edge.devices.profiles.profile import Speed
from edge.lab.prediction.efficiency import efficiency_of
from edge.lab.prediction.learning import _ratios
from edge.lab.prediction.predict import Prediction, Wanted, predict
from edge.lab.profiling.kit.device import device_of, with_earlier
from edge.options import Options
from edge.plan.plan import make_plan
from edge.run.starting.opening import open_model


def test_speeds_of_models_predict_those_of_others() -> None:
    """On a device that reaches known shares of the roofline: those of models that were left out, exactly; where models
    differ, within the error that is told."""
    kept = device_of(result(), "my-board")
    (speed,) = kept.speeds
    spec = open_model(str(GOLDEN / "gpt2.gguf")).spec
    plan = make_plan(
        spec, engine_named("cpu"), Options(max_kv_size=128), elsewhere=MemoryLimit(1 << 34, "x"), threads=speed.threads
    )
    wanted = Wanted(32, (16,))
    bare = predict(spec, plan, kept, wanted, corrected=False)

    def slower(speed: Speed, label: str, by: float) -> Speed:
        """The speed if both took `by` times as long as the roofline has it."""
        (decode,), (prompt,) = (
            _ratios(speed, kept, efficiency_of("cpu", kept.isa), what) for what in ("decode", "prompt")
        )
        token_s = tuple(each * decode * by for each in speed.token_s)
        return replace(speed, label=label, model=label, token_s=token_s, prompt_s=speed.prompt_s * prompt * by)

    def learned(*times: float) -> Prediction:
        speeds = tuple(slower(speed, f"model {count}", by) for count, by in enumerate(times))
        return predict(spec, plan, replace(kept, speeds=speeds), wanted)

    for times, factor, error in (((2.0,), 2.0, None), ((2.0, 2.0), 2.0, 1.0), ((1.0, 4.0), 2.0, 4.0)):
        found = learned(*times)
        for guess, before in ((found.prefill_tok_s, bare.prefill_tok_s), (found.decode[0].tok_s, bare.decode[0].tok_s)):
            assert guess.value == pytest.approx(before.value / factor)
            assert guess.error == (error and pytest.approx(error))


def test_results_of_one_device_go_together() -> None:
    made = device_of(result(), "my-board")
    (speed,) = made.speeds
    other = replace(speed, model="other", label="other")
    before = replace(made, speeds=(replace(speed, prompt_s=9.0), other))
    assert with_earlier(made, before).speeds == (speed, other)
    assert with_earlier(made, replace(before, description="another")) == made
    assert with_earlier(made, find_profile("raspberry-pi-5")) == made
