"""What it costs to stream weights: time for every pass, as the pages of their file come and go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge.devices.paging import measure_paging
from edge.storage.cache import cache_folder, entries


@dataclass(frozen=True)
class Streaming:
    """bytes: read anew by every pass, that is for every token of an answer and every chunk of a prompt.

    cached_s: seconds that this adds to a pass as long as the system keeps the file in its page cache; disk_s: if it
    does not. Both measured here; None where they cannot be. from_disk: the system's memory leaves no room for them.
    """

    bytes: int
    cached_s: float | None
    disk_s: float | None
    from_disk: bool

    @property
    def added_s(self) -> float | None:
        """Seconds that are to be expected."""
        return self.disk_s if self.from_disk else self.cached_s


def streaming_cost(
    streamed: int, threads: int, model: str = "", *, room: int | None = None, here: bool = True
) -> Streaming | None:
    """Of a plan's `bytes.streamed`; None if that is nothing. Measured in the cache folder, where such weights lie.

    model: the name of its file; if it has been packed already, the packed file is measured. room: bytes that the system
    has besides what the plan needs; None: enough. here: the plan is for this device; of others nothing is known.
    """
    if not streamed:
        return None
    from_disk = room is not None and room < streamed
    paging = measure_paging(cache_folder(), threads, _packed(model)) if here else None
    if paging is None:
        return Streaming(streamed, None, None, from_disk)
    return Streaming(streamed, streamed * paging.cached, streamed * paging.disk, from_disk)


def _packed(model: str) -> Path | None:
    """The newest packed weights of a model."""
    found = [entry for entry in entries("weights") if entry.about == model]
    return max(found, key=lambda entry: entry.last_used).path if found else None
