"""A session with a model that hears: from sounds to segments, within budgets."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NoReturn

from edge.backends.base import Backend, LoadProgress
from edge.budget import format_bytes
from edge.devices.child import children_peak, room_for_children
from edge.devices.memory import memory_use
from edge.devices.power import find_meter
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.media.sound import SoundStream, Source
from edge.model.model import Model
from edge.model.structure.spec import check_embeds
from edge.options import Options
from edge.plan.plan import Plan
from edge.run.arguments import check_meter
from edge.run.batching.scheduler import Scheduler
from edge.run.budgets.meters import EnergyMeter, find_zone
from edge.run.hooks import NO_HOOKS, Hooks
from edge.run.loaded import Loaded
from edge.run.request import Request
from edge.run.senses.hearing import Listener
from edge.run.session import Session, open_sessions
from edge.run.speech.asked import Asked, HearKeywords
from edge.run.speech.transcription import Ears, Transcription
from edge.run.speech.turns import HearingTurns
from edge.storage.making import Made

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HearingSession(Session):
    """A loaded model that hears. It transcribes, and answers no prompts."""

    def __init__(
        self, model: Model, backend: Backend, plan: Plan, options: Options, on_load: LoadProgress | None = None,
        meter: EnergyMeter | None = None,
    ) -> None:  # fmt: skip
        """Raises BudgetError if loading took more memory than the budget."""
        self._meter, self.prepared, self.observers = check_meter(meter or find_meter()), Made(), []
        self._zone = find_zone(options.max_temp)
        self.model, self.spec, self.tokenizer, self.options = model, model.spec, model.tokenizer, options
        self.report, self._process, self._closed = None, os.getpid(), False
        self.steps = Scheduler(lambda level: None)
        self.terminated = self._interrupted = False
        self._backend, self._plan, started = backend, plan, time.perf_counter()
        with room_for_children(options.memory) as room:
            self.listener = Listener(
                model.file, backend, threads=plan.config.threads, kv_dtype=options.kv_dtype or "",
                sequences=plan.config.sequences, progress=(lambda part: on_load(part)) if on_load else None,
            )  # fmt: skip
        self._with_children = max(children_peak(), room.most)
        self._load_s = time.perf_counter() - started
        open_sessions.add(self)
        if options.memory is not None and (peak := max(memory_use().peak, self._with_children)) > options.memory:
            self.close()
            raise BudgetError(
                f"loading took {format_bytes(peak)}, more than predicted and than the budget of "
                f"{format_bytes(options.memory)}: use a larger --memory or a smaller model"
            )

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def languages(self) -> tuple[str, ...]:
        """The codes of the languages that the model knows."""
        return tuple(self.listener.whisper.languages) or ("en",)

    def close(self) -> None:
        if hasattr(self, "listener") and self._process == os.getpid():
            self.steps.end()
            self._closed = True
            open_sessions.discard(self)
            self.listener.close()

    def transcribe(self, sound: Source | SoundStream, **options: Unpack[HearKeywords]) -> Transcription:
        asked = Asked(**options)
        if self._closed:
            raise InputError("this session is closed: load the model again")
        asked.settings().check(self.listener)
        if asked.voice == "silero":
            self._check_room_for_silero()
        self.steps.check_idle()
        self._interrupted = False
        ears = Ears(
            self.listener, self.options, self._plan, self._meter, self._zone, self.steps, self._ended_by,
            self._backend.versions, self._load_s, self._with_children,
        )  # fmt: skip
        return Transcription(ears, sound, asked)

    def _check_room_for_silero(self) -> None:
        from edge.run.speech import silero

        planned, budget = self._plan.bytes, self.options.memory
        if budget is not None and planned.total + silero.NEED > budget:
            wanted = -(-(planned.total + planned.reserve + silero.NEED) >> 20)
            raise BudgetError(f"--vad=silero takes {format_bytes(silero.NEED)} more: state --memory {wanted}MiB")
        silero.check()

    @property
    def team(self) -> tuple[int, ...]:
        """Empty: passes of sounds are not counted by their threads."""
        return ()

    def reset(self) -> None:
        """There is no conversation to forget."""
        self.steps.check_idle()

    def batch(self) -> HearingTurns:  # type: ignore[override]
        """A queue for transcripts."""
        return HearingTurns(self.model.name)

    def start(self, request: Request, hooks: Hooks = NO_HOOKS) -> NoReturn:
        raise self._refused()

    @property
    def _loaded(self) -> Loaded:  # type: ignore[override]
        raise self._refused()

    def _check_embeds(self) -> None:
        check_embeds(self.spec)

    def _refused(self) -> UnsupportedError:
        return UnsupportedError(f"{self.model.name} hears, and answers no prompts: transcribe writes what was said")
