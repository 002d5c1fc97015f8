"""Runs a command of edge in this process, and writes the time of its parts to a file: for benchmarks/start.py.

python benchmarks/start_parts.py report.json run smollm2-135m -p Hi -n 1
"""

from __future__ import annotations

import sys
import time

BEGAN = time.monotonic(), time.process_time()

import os  # noqa: E402

# Little is imported here, and nothing of edge: it would be missing in the time of the imports.
from collections.abc import Callable  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The function of each part, less the parts that it calls; imports are counted apart wherever they happen.
_FUNCTIONS = {
    "command": "edge.cli.answering:answer_prompt",
    "open + header": "edge.model.model:open_model",
    "tokenizer": "edge.run.starting.opening:find_tokenizer",
    "plan": "edge.run.starting.loading:plan_run",
    "load": "edge.run.session:Session.__init__",
    "prompt": "edge.model.model:Model.prompt",
    "first pass": "edge.run.sequences.sequence:TokenSequence.run_prompt",
}
INTERPRETER, IMPORTS, ARGUMENTS, EXIT = "interpreter", "imports", "arguments", "exit"
PARTS = (INTERPRETER, IMPORTS, ARGUMENTS, *_FUNCTIONS, EXIT)


class Clock:
    """Charges time to the innermost part. Finds modules as Python does, in order to time and to wrap them."""

    def __init__(self) -> None:
        self.parts: list[str] = [ARGUMENTS]
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {INTERPRETER: BEGAN[1]}
        self.rss = 0.0  # MiB before the model is loaded
        self.last = BEGAN

    def charge(self) -> None:
        now = time.monotonic(), time.process_time()
        part = self.parts[-1]
        self.wall[part] = self.wall.get(part, 0.0) + now[0] - self.last[0]
        self.cpu[part] = self.cpu.get(part, 0.0) + now[1] - self.last[1]
        self.last = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.charge()
            if part == "load":
                self.rss = resident()
            self.parts.append(part)
            try:
                return function(*arguments, **keywords)
            finally:
                self.charge()
                self.parts.pop()

        call.__dict__.update(getattr(function, "__dict__", {}))  # a command's signature
        call.__annotations__ = getattr(function, "__annotations__", {})
        call.__name__, call.__doc__ = getattr(function, "__name__", part), function.__doc__
        return call

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                break
        else:
            return None
        if spec.loader is not None and hasattr(spec.loader, "exec_module"):
            run = self.timed(IMPORTS, spec.loader.exec_module)

            def exec_module(module: Any) -> None:
                run(module)
                self.wrap(name, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def wrap(self, name: str, module: Any) -> None:
        for part, place in _FUNCTIONS.items():
            home, _, function = place.partition(":")
            *owners, last = function.split(".")
            if home == name:
                owner = module
                for each in owners:
                    owner = getattr(owner, each)
                setattr(owner, last, self.timed(part, getattr(owner, last)))


def resident() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    import atexit

    report = sys.argv.pop(1)
    clock = Clock()
    sys.meta_path.insert(0, clock)

    def write() -> None:
        import json

        clock.charge()
        found = {"began": BEGAN[0], "ended": clock.last[0], "wall": clock.wall, "cpu": clock.cpu, "rss": clock.rss}
        with open(report, "w") as file:
            json.dump(found, file)

    atexit.register(write)
    from edge.cli import main as run

    run()


if __name__ == "__main__":
    main()
