"""Downloads of models that a command needs, and their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.budget import format_bytes
from edge.cli.terminal.show import ProgressLine, note
from edge.errors import DownloadError
from edge.options import Options


def fetch_missing(model: str, options: Options, shown: ProgressLine, *, quiet: bool) -> None:
    """Download MODEL if it is on the Hub and not here. Raises as `edge.pulling.ensure`."""
    from edge.model.names.catalog import find_local

    if find_local(model) is None:
        from edge.pulling import ensure

        with names_of_models_here():
            ensure(model, options, progress=transfer(shown, model), notice=(lambda line: None) if quiet else note)
        shown.clear()


@contextmanager
def names_of_models_here() -> Iterator[None]:
    """Without a connection, the error names the models that need none."""
    try:
        yield
    except DownloadError as error:
        if error.reached:
            raise
        from edge.lab.inventory import models

        here = ", ".join(each.name for each in models() if each.summary.engines) or "none"
        raise DownloadError(f"{error}; models here: {here}", reached=False) from None


def transfer(shown: ProgressLine, name: str) -> Callable[[int, int], None]:
    """Draws bytes and their rate."""
    started, first = time.monotonic(), -1

    def tell(done: int, total: int) -> None:
        nonlocal first
        first = done if first < 0 else first
        rate = (done - first) / max(time.monotonic() - started, 1e-3)
        label = f"{name}: {format_bytes(done)} of {format_bytes(total)}, {format_bytes(round(rate))}/s"
        shown.step(label)(float(done), float(total))

    return tell
