"""What a caller asks of a transcript: the keywords of `Session.transcribe`, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, cast, get_args

from edge.errors import InputError
from edge.records import dataclass
from edge.run.arguments import check_function, check_number, check_text
from edge.run.speech.beams import Beams
from edge.run.speech.decoding import TEMPERATURES
from edge.run.speech.transcript import Place, Settings, Voice

VOICES = get_args(Voice)

OnProgress = Callable[[float, "float | None"], None]
"""Is called with the seconds that were heard, and those of the whole sound, None if they are not known."""


class HearKeywords(TypedDict, total=False):
    """See `Session.transcribe`."""

    rate: int | None
    language: str | None
    translate: bool
    timestamps: str
    prompt: str | None
    temperature: float | None
    beam_size: int
    best_of: int
    patience: float
    length_penalty: float | None
    vad: bool | str
    condition_on_previous_text: bool
    time_limit: float | None
    energy_limit: float | None
    time_spent: float
    energy_spent: float
    keep_text: bool
    place: Place | None
    on_progress: OnProgress | None


@dataclass(frozen=True)
class Asked:
    """Checked when it is made. Raises InputError."""

    rate: int | None = None
    language: str | None = None
    translate: bool = False
    timestamps: str = "segments"
    prompt: str | None = None
    temperature: float | None = None
    beam_size: int = 1
    best_of: int = 1
    patience: float = 1.0
    length_penalty: float | None = None
    vad: bool | str = True
    condition_on_previous_text: bool = True
    time_limit: float | None = None
    energy_limit: float | None = None
    time_spent: float = 0.0
    energy_spent: float = 0.0
    keep_text: bool = True
    place: Place | None = None
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        for name in ("language", "prompt"):
            check_text(name, getattr(self, name))
        for name in (
            "temperature",
            "patience",
            "length_penalty",
            "time_limit",
            "energy_limit",
            "time_spent",
            "energy_spent",
        ):
            check_number(name, getattr(self, name))
        check_function("on_progress", self.on_progress)
        if self.vad not in (True, False, *VOICES):
            raise InputError(f"--vad must be {', '.join(VOICES[:-1])} or {VOICES[-1]}, not {self.vad!r:.40}")
        if self.timestamps not in ("words", "segments"):
            raise InputError(f"--timestamps must be words or segments, not {self.timestamps!r:.40}")

    @property
    def voice(self) -> Voice:
        """How voices are found."""
        return cast(Voice, self.vad if isinstance(self.vad, str) else "energy" if self.vad else "none")

    def settings(self) -> Settings:
        temperatures = TEMPERATURES if self.temperature is None else (float(self.temperature),)
        return Settings(
            self.language.lower() if self.language else None, self.translate,
            "words" if self.timestamps == "words" else "segments", self.prompt or "", self.voice,
            self.condition_on_previous_text, temperatures,
            Beams(self.beam_size, self.best_of, self.patience, self.length_penalty),
        )  # fmt: skip
