"""A transcript in the making, within budgets, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

from edge.devices.memory import memory_use
from edge.devices.power import memory_root
from edge.devices.thermal import Zone
from edge.errors import InputError
from edge.media.sound import SoundStream, Source, open_sound
from edge.options import Options
from edge.plan.plan import Plan
from edge.records import dataclass
from edge.run.batching.scheduler import Scheduler
from edge.run.budgets.governor import RunLimits
from edge.run.budgets.meters import EnergyMeter, Watch
from edge.run.report import Energy, Heat, Memory, StopReason
from edge.run.senses.hearing import Listener
from edge.run.speech.asked import Asked
from edge.run.speech.report import SpeechReport, SpeechTimings, Spoken
from edge.run.speech.segments import Segment
from edge.run.speech.transcript import Heard, Place, transcribe
from edge.run.speech.windows import FRAME_S
from edge.storage.versions import own_versions


@dataclass(frozen=True)
class Ears:
    """A session's share in its transcripts. ended_by: the stop reason, if a caller asked for the end."""

    listener: Listener
    options: Options
    plan: Plan
    meter: EnergyMeter
    zone: Zone | None
    steps: Scheduler
    ended_by: Callable[[], StopReason | None]
    versions: Callable[[], dict[str, str]]
    load_s: float
    with_children: int  # peak bytes of this process and a child together, while it was loaded


class Transcription(Iterator[Segment]):
    """The segments of a sound, as they are found. After the last, or when it is closed, `report` holds what they cost;
    `place`, how far it has come, from which another call goes on."""

    report: SpeechReport | None = None
    stop_reason: StopReason = "eos"
    segments, cut = 0, False  # cut: whether the file ended before the length that its header states
    first_s: float | None = None  # until the first text
    whole_s: float | None = None  # of sound, None before its end if the file does not say it

    def __init__(self, ears: Ears, source: Source | SoundStream, asked: Asked) -> None:
        self.asked, self.settings, self.place = asked, asked.settings(), asked.place or Place()
        self._began_s = self.place.seek * FRAME_S
        self.heard = Heard(self._began_s)
        self.text: list[str] | None = [] if asked.keep_text else None
        options = ears.options
        self.time = options.time if asked.time_limit is None else asked.time_limit
        self.energy = options.energy if asked.energy_limit is None else asked.energy_limit
        self._ears, self._source, self._waiting = ears, source, list[Segment]()
        self._steps: Generator[Any, None, None] = ears.steps.through(cast(Any, self._run()))

    def __next__(self) -> Segment:
        while not self._waiting:
            self._waiting += next(self._steps)
        return self._waiting.pop(0)

    def windows(self) -> Iterator[list[Segment]]:
        """The segments window by window; `place` is behind each, when it comes."""
        yield from self._steps

    @property
    def language(self) -> str | None:
        """The language that was stated or detected, None before the first window with a voice."""
        return self.place.language

    def close(self) -> None:
        """End it here. The report is made."""
        self._steps.close()

    def _run(self) -> Iterator[list[Segment]]:
        ears, options = self._ears, self._ears.options
        self.started = time.perf_counter()
        asked = self.asked
        limits = RunLimits(
            deadline=None if self.time is None else self.started + self.time - asked.time_spent,
            energy=None if self.energy is None else max(0.0, self.energy - asked.energy_spent),
            memory=options.memory, power=options.power, max_temp=options.max_temp,
        )  # fmt: skip
        self.watch = Watch(
            limits, ears.meter, ears.zone.path if ears.zone else None, root=memory_root(),
            ended=ears.ended_by, obey=ears.steps.obey,
        )  # fmt: skip
        read = ears.listener.whisper.spec.weight_bytes

        def pay(tokens: int) -> None:
            ears.meter.add_bytes(read)
            if reason := self.watch.before_pass(tokens):
                raise _StoppedError(reason)

        def check() -> None:
            if reason := self.watch.ends_now():
                raise _StoppedError(reason)

        try:
            with open_sound(self._source, rate=asked.rate, check=check) as sound:
                self.whole_s = sound.seconds
                heard = transcribe(ears.listener, sound, self.settings, pay, self.heard, asked.place)
                for self.place, found in heard:
                    self._keep(found)
                    if asked.on_progress:
                        asked.on_progress(self.heard.seconds, sound.seconds)
                    yield found
                self.whole_s, self.cut = self.heard.seconds, sound.cut
                if not self.heard.seconds and not sound.seconds:
                    name = sound.name if isinstance(self._source, str | Path | SoundStream) else "the sound"
                    raise InputError(f"{name} has no samples: it is empty")
        except _StoppedError as stopped:
            self.stop_reason = stopped.reason
            self.watch.pay()
        except GeneratorExit:
            self.stop_reason = ears.ended_by() or "interrupted"
            raise
        except Exception:
            self.stop_reason = "failed"
            raise
        finally:
            self.report = self._make_report()

    def _keep(self, found: list[Segment]) -> None:
        if found and self.first_s is None:
            self.first_s = time.perf_counter() - self.started
        self.segments += len(found)
        if self.text is not None:
            self.text += [each.text for each in found]

    def _make_report(self) -> SpeechReport:
        ears, watch = self._ears, self.watch
        options, plan = ears.options, ears.plan
        joules, reading, total = watch.joules(), watch.reading, time.perf_counter() - self.started
        versions = {**own_versions(), **ears.versions()}
        heard, use = self.heard, memory_use()
        worked = max(0.0, total - watch.paused - heard.waited)
        new = heard.seconds - self._began_s
        return SpeechReport(
            text=None if self.text is None else "".join(self.text).strip(),
            language=self.place.language,
            certainty=self.place.certainty,
            sound=Spoken(heard.seconds, round(heard.silent, 2), self.whole_s, self.cut),
            segments=self.segments,
            windows=heard.windows,
            tokens=heard.tokens,
            again=heard.again,
            timings=SpeechTimings(
                load_s=ears.load_s,
                total_s=total,
                first_s=self.first_s,
                real_time=worked / new if new > 0 else None,
                paused_s=watch.paused,
                waited_s=heard.waited,
                before_s=self.asked.time_spent,
                budget_s=self.time,
            ),
            stop_reason=self.stop_reason,
            memory=Memory(
                peak_rss=max(use.peak, ears.with_children),
                budget=options.memory,
                weights=plan.bytes.weights,
                kv=plan.bytes.kv,
                scratch=plan.bytes.scratch,
                interpreter=plan.bytes.interpreter,
                anonymous=use.anonymous,
                file=use.file,
            ),
            energy=Energy(
                joules=joules,
                budget=self.energy,
                before=self.asked.energy_spent,
                prefill=None,
                decode=None,
                per_token=None,
                source=reading.source,
                kind=reading.kind,
                scope=reading.scope,
                samples=reading.samples - watch.first.samples,
                watts=joules / total,
                watts_limit=options.power,
            ),
            joules_per_minute=60 * joules / new if new > 0 else None,
            plan=plan.to_dict(),
            versions=versions,
            heat=None if ears.zone is None else Heat(ears.zone.name, watch.hottest, options.max_temp),
        )


class _StoppedError(Exception):
    """A budget or a caller ended the transcript."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason
