"""What a sound costs, by its length alone: rows, memory, time and joules of its encoder, before a sample is read.

As for pictures (`looks.py`), the encoder runs at the shares of the device's ceilings that its engine reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.budget import format_bytes, format_joules, parse_seconds
from edge.devices.profiles import find_profile
from edge.errors import InputError
from edge.lab.prediction.forecast import Forecast
from edge.lab.prediction.looks import pace_of, seconds_text, work_of_tower
from edge.media.mel import RATE
from edge.media.recording import MOST_S, Sound
from edge.options import Options
from edge.plan.plan import Plan
from edge.run.starting.senses import encoder_of, engine_of, find_ears


@dataclass(frozen=True)
class SoundCost:
    """Bytes; seconds and joules are None where the pace is unknown."""

    sound_s: float
    tokens: int
    windows: int
    weights: int  # of the encoder, while it encodes
    encoder: int  # its peak: weights, scratch, states, spectrogram
    peak: int  # of the process: the larger of two phases
    flops: float
    seconds: float | None
    first_token_s: float | None  # with the prompt's text
    joules: float | None
    by: str  # what its time is estimated by; empty: unknown
    elsewhere: str  # why the CPU encodes, and not the text model's engine; empty: this does

    def lacks(self, plan: Plan) -> list[str]:
        """Lines that say what the plan has too little of for it."""
        found, config = list[str](), plan.config
        if self.peak > plan.limit:
            found.append(
                f"the limit, {format_bytes(plan.limit)}, is too low for the sound: it takes {format_bytes(self.peak)}"
            )
        if self.tokens >= config.capacity:
            found.append(
                f"the sound does not fit in {config.capacity:,} KV rows: use --max-kv-size {self.tokens + 1} or more"
            )
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows."""
        heads = [f"a sound of {self.sound_s:g} s", "a second", "windows", "encoder", "peak", "encoded in",
                 "first token", "joules"]  # fmt: skip
        return heads, [[
            f"{self.tokens:,} tokens", f"{self.tokens / self.sound_s:.3g} tokens", f"{self.windows:,}",
            format_bytes(self.encoder), format_bytes(self.peak), seconds_text(self.seconds),
            seconds_text(self.first_token_s), "?" if self.joules is None else format_joules(self.joules),
        ]]  # fmt: skip


def predict_sound(found: Forecast, options: Options, device: str, sound: str) -> SoundCost:
    """What a sound costs beside a plan. sound: a length such as 30s, or a file. Raises InputError, and the errors of
    `find_ears`."""
    samples, tower = samples_of(sound), find_ears(found.model, options)
    layout, plan, prediction = tower.layout(samples), found.plan, found.prediction
    encoder = encoder_of(tower, options, plan.config.threads)
    pace, by = pace_of(tower, found, options, find_profile(device))
    need = encoder.need(layout) + tower.hearing(samples)
    rows = 4 * layout.tokens * found.model.spec.hidden
    seconds, first = None if pace is None else pace(layout), None
    if seconds is not None and prediction.prefill_tok_s is not None:
        first = seconds + (layout.tokens + prediction.prompt) / prediction.prefill_tok_s.value
    return SoundCost(
        samples / RATE, layout.tokens, len(layout.tiles),
        sum(info.nbytes for info in tower.mmproj.file.tensors.values()) if tower.stages else tower.ends, need,
        max(plan.bytes.interpreter + need, plan.predicted_peak) + rows, sum(work_of_tower(tower, layout)), seconds,
        first, None if first is None or prediction.watts is None else prediction.watts.value * first, by,
        engine_of(options, tower)[1],
    )  # fmt: skip


def samples_of(sound: str) -> int:
    """Samples at 16 kHz: of a length, or of a file. Raises InputError."""
    if Path(sound).exists():
        return Sound(sound).samples
    if not sound[:1].isdigit():
        raise InputError(f"--audio {sound}: a length, such as 30s or 5m, or a file")
    length = parse_seconds(sound, "--audio")
    if length > MOST_S:
        raise InputError(f"--audio {sound}: {MOST_S // 3600} hours at most")
    return max(1, int(length * RATE))
