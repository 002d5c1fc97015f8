"""An exported model's C library for `busy.py`, behind the line protocol, through ctypes.

app_worker.py MODEL THREADS CELLS      exports it first
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from protocol import FILL_SEED, Tokens, random_tokens, serve

import edge

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "apps"))
from ctypes_bundle import BundleSession, open_bundle

from edge.apps.enums import Role


class App:
    """The measurements; several sequences are several sessions, which do not share passes."""

    version = ""

    def __init__(self, session: BundleSession, vocab: int) -> None:
        self._session, self.vocab = session, vocab

    def prefill(self, tokens: Tokens) -> float:
        return self._steps(tokens, 1)[1]

    def decode(self, depth: int, tokens: Tokens) -> float:
        return self._steps(random_tokens(depth, FILL_SEED, self.vocab), tokens.size)[0]

    def batch(self, count: int, depth: int, tokens: Tokens) -> float:
        raise NotImplementedError("a session has one sequence")

    def _steps(self, prompt: Tokens, count: int) -> tuple[float, float]:
        """Seconds of `count` steps, and of the prompt before them."""
        self._session.rewind()
        began = time.perf_counter()
        self._session.append(Role.IDS, prompt.tolist())
        while self._session.next().token is None:  # rows of the prompt that are done
            pass
        asked = time.perf_counter()
        left = count
        while left:
            left -= self._session.next().token is not None
        return time.perf_counter() - asked, asked - began


def main(model: str, threads: str, cells: str) -> None:
    found = edge.open_model(model)
    with TemporaryDirectory() as folder:
        edge.export(found, Path(folder, "bundle"), max_kv_size=int(cells), threads=int(threads))
        with (
            open_bundle(Path(folder, "bundle")) as bundle,
            bundle.session(threads=int(threads), temperature=0, ignore_eos=1, speculate=1) as session,
        ):
            serve(lambda: App(session, found.spec.vocab))


if __name__ == "__main__":
    main(*sys.argv[1:])
