"""Folders that the workers of a run share: the first that needs one makes it, and others wait for it.

Bundles, sites and kits of the same model and options cost a second of CPU time each, and most are needed by tests of
several workers. Nobody changes what is in them.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from edge.backends.tvm.targets import choose_target
from edge.storage.lock import file_lock

_RUN = "EDGE_TEST_RUN"  # environment variable: the folder of this run, which workers and other children inherit
_MAIN = os.getpid()
if _RUN not in os.environ:
    os.environ[_RUN] = tempfile.mkdtemp(prefix="edge-tests-")
    atexit.register(lambda: os.getpid() == _MAIN and shutil.rmtree(os.environ[_RUN], ignore_errors=True))
FOLDER = Path(os.environ[_RUN])


def made_once(make: Callable[[Path], object], name: str, *key: object) -> Path:
    """A folder that make(path) makes for these values of a key, of which `name` may be the path of a model's file. The
    instruction set that EDGE_ISA chooses belongs to the key."""
    file = Path(name)
    content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    digest = hashlib.sha256(repr((file.name, content, choose_target().name, *key)).encode()).hexdigest()[:16]
    folder = FOLDER / f"{re.sub('[^A-Za-z0-9-]', '_', file.stem)}-{digest}"
    done = folder.with_suffix(".done")
    with file_lock(folder.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            make(folder)
            done.touch()
    return folder
