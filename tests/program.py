"""Runs a file of tests as a program, where it has one: `python tests/program.py fuzz_engine 1000 5000`."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent

if __name__ == "__main__":
    sys.path[:1] = [str(folder) for folder in (HERE, *sorted(HERE.glob("**/")))]  # as pytest does, see pyproject.toml
    del sys.argv[0]
    name = sys.argv[0]
    runpy.run_path(str(next(HERE.rglob(f"test_{name}.py"), f"test_{name}.py")), run_name="__main__")
