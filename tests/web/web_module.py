"""Modules of a site in Node, with the same conversations as edge itself."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from bundles import Pair, model_of, recorded_session
from ctypes_bundle import ERRORS, MODEL, BundleSession, Piece
from shared import made_once

from edge.apps.bindings import camel
from edge.apps.bundle import make_sections, prepare
from edge.apps.enums import Finish, Role, Status
from edge.apps.module import PAGE, initial_pages, make_modules
from edge.apps.sections.encoder_file import nest
from edge.apps.sections.model_file import write_model
from edge.devices.profiles import find_profile
from edge.errors import EngineError
from edge.options import Options
from edge.storage.fingerprint import fingerprint
from edge.types import FloatArray

BOUND = "bound"
NODE = Path(__file__).with_name("node_session.mjs")


@lru_cache
def modules_of(name: str, *isas: str, lora_rank: int = 0, **options: Any) -> Path:
    """A folder with model.edge and its modules, as in a site, and the bound of their memory in bytes."""

    def make(folder: Path) -> None:
        bundle = prepare(model_of(name), find_profile("web"), Options().updated(**options), isas, lora_rank)
        sections, used = make_sections(bundle), bundle.plan.bytes
        folder.mkdir()
        make_modules(bundle.all_designs, folder, tables={"trusted.c": bundle.trusted_source(sections)})
        digest = bytes.fromhex(fingerprint(bundle.model.file.path).sha256)
        draft = nest(bundle.draft, folder) if bundle.draft else b""
        write_model(folder / MODEL, sections, digest, bundle.model.file, bundle.layout, draft=draft)
        (folder / BOUND).write_text(str(used.total + used.reserve))

    return made_once(make, name, "modules", isas, lora_rank, sorted(options.items()))


@contextmanager
def web_pair(folder: Path, name: str, isa: str, threads: int, /, **options: Any) -> Iterator[Pair]:
    """One conversation with edge and with a module of `modules_of`. options: of the plan."""
    with (
        recorded_session(name, **options) as (python, recorded),
        opened(folder, isa, workers=threads - 1, threads=threads) as module,
    ):
        yield Pair(python, module, recorded)


class NodeModule:
    """A module in a process of Node, with the methods of `Bundle` and `BundleSession`. A context manager."""

    def __init__(self, module: Path, *, workers: int = 0, maximum: int | None = None) -> None:
        """workers: threads to start beside the first. maximum: bytes of memory; None: the bound of `modules_of`."""
        if shutil.which("node") is None:
            pytest.skip("no Node")
        if maximum is None:
            maximum = int(module.with_name(BOUND).read_text())
        pages = map(str, (initial_pages(module.read_bytes()), maximum // PAGE))
        # V8 11.3, in Node 20: its baseline compiler computes the relaxed dot product in 32 bits wrongly.
        flags = ["--experimental-wasm-relaxed-simd", *(["--no-liftoff"] if module.stem == "edge-relaxed" else [])]
        command = ["node", *flags, str(NODE), str(module), *pages]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if workers:
            self.call("threads", workers)

    def __enter__(self) -> NodeModule:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def call(self, name: str, *values: Any) -> Any:
        """A method of node_session.mjs. Raises the errors of edge.errors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *values]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"Node ended with {self._process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            code = answer["code"] and Status[answer["code"].upper().replace("-", "_")]
            raise ERRORS.get(code or answer["status"], EngineError)(answer["error"])
        return answer["result"]

    def open(self, model: Path) -> None:
        self.call("open", str(model))

    def begin(self, **options: Any) -> None:
        self._threads = options.get("threads", 0)
        self.call("begin", _options(options))

    def set(self, **options: Any) -> None:
        self.call("set", _options({"threads": self._threads} | options))

    def append(self, role: Role, text: str | bytes | Sequence[int]) -> None:
        self.call("append", int(role), _encoded(text) if isinstance(text, str | bytes) else list(text))

    def pieces(self, count: int = 1 << 30) -> list[Piece]:
        """Pieces of the answer, up to its end."""
        return [_piece(**each) for each in self.call("pieces", count)]

    answer = BundleSession.answer

    def rewind(self, turns: int | None = None) -> None:
        """None: all."""
        self.call("rewind", 0xFFFFFFFF if turns is None else turns)

    def save(self) -> bytes:
        return base64.b64decode(self.call("save"))

    def load(self, state: bytes) -> None:
        self.call("load", _encoded(state))

    def use(self) -> dict[str, Any]:
        return dict(self.call("use"))

    def embed(self, texts: list[str], **options: Any) -> FloatArray:
        """The vectors of texts, float32 [texts, dimensions]. options: of the package's `embed`."""
        return np.array(self.call("embed", texts, options), np.float32).reshape(len(texts), -1)


@contextmanager
def opened(folder: Path, isa: str, *, workers: int = 0, **options: Any) -> Iterator[NodeModule]:
    """A session with this module and model.edge of a folder."""
    with NodeModule(folder / f"edge-{isa}.wasm", workers=workers) as module:
        module.open(folder / MODEL)
        module.begin(**options)
        yield module


def _piece(token: int, text: str, finish: int) -> Piece:
    return Piece(None if token < 0 else token, base64.b64decode(text).decode(), Finish(finish))


def _options(chosen: dict[str, Any]) -> dict[str, Any]:
    """Options by the package's names; JSON has no whole numbers of 64 bits."""
    named = {camel(name): value for name, value in chosen.items()}
    return named | ({"seed": str(chosen["seed"])} if "seed" in chosen else {})


def _encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
