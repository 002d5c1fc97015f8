"""Stop strings in streamed text: no part of one is shown, however it is split over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from edge.model.parts.text import well_formed
from edge.tools.marks import overlap


class StopStrings:
    """Passes on streamed text up to the first stop string. found: that string, None until then."""

    def __init__(self, stops: str | Sequence[str] | None) -> None:
        """stops: one string, several, or none."""
        self._stops = [well_formed(stop) for stop in ([stops] if isinstance(stops, str) else stops or ()) if stop]
        self._held = ""
        self.found: str | None = None

    @property
    def met(self) -> bool:
        """Whether there was a stop string."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """The text that is safe to show: all but a tail that may yet become a stop string."""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # the stop string that ends first counts, whatever the sizes of the pieces
            _, at, self.found = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(overlap(self._held, stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def rest(self) -> str:
        """The text held back, at the end of a run that met no stop string."""
        held, self._held = self._held, ""
        return held
