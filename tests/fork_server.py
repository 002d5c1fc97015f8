"""Processes that have imported what others begin with, and fork in the place of a new Python.

Starting Python and importing TVM takes 0.65 s of CPU time, a third of what a golden model's code takes, and `make test`
with an empty cache compiles 250 designs; `edge` takes 0.5 s before it reads its arguments. Tests of memory and of first
runs start both as users do.
"""

from __future__ import annotations

import ast
import atexit
import gc
import json
import os
import resource
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from edge.devices import child
from edge.devices.host import logical_cores
from edge.devices.memory.pressure import Pressure, read_pressure

# Where forks leave the CPU seconds that they took: nobody waits for them. One file for each worker of pytest.
FORKS = Path(os.environ.get("EDGE_TEST_FORKS") or f"{tempfile.gettempdir()}/edge-forks-{os.getpid()}")
if "EDGE_TEST_FORKS" not in os.environ:  # no fork's server
    FORKS.unlink(missing_ok=True)
    atexit.register(FORKS.unlink, missing_ok=True)
COMPILERS = (  # which `run_child` starts
    "edge.backends.tvm.compiler.child", "edge.backends.tvm.compiler.volume_child", "edge.backends.tvm.gpu.compiled",
)  # fmt: skip
TRIALS = tuple(
    f"edge.{each}_child" for each in ("backends.llamacpp.trial", "backends.llamacpp.tokenizer", "converters.ggml")
)
COMPILER = """
from edge.backends.tvm.cpu.lowering import import_compiler
import_compiler()
import edge.backends.tvm.cpu.linker, edge.backends.tvm.cpu.generator, edge.backends.tvm.gpu.generator
__import__("quick_code").shorten()
"""
TRIAL = """
import edge.backends.llamacpp.trial_child, edge.backends.llamacpp.tokenizer_child, edge.converters.gguf.ggml_child
"""
COMMAND = """
import edge.cli.application, edge.cli.commands, edge.cli.run, edge.plan.plan
import edge.run.session, edge.run.starting.loading
import rich.console, rich.table
import fork_server, objects
edge.cli.terminal.show.SILENT_S = 600.0  # on a slow machine, lines of progress would be in the way
edge.run.budgets.meters.read_pressure = fork_server.read_calmly
edge.plan.checks.logical_cores = fork_server.two_cores
fork_server.fork_children()
objects.share_objects()
"""

# What commands import that do more than run a model. It takes memory, which plans count.
LABORATORY = f"""
{COMMAND}
import gguf
import edge.apps.bundle, edge.apps.site, edge.converters.convert, edge.converters.evaluate, edge.converters.onnx.npu
import edge.converters.huggingface.reader, edge.converters.pruning.repair, edge.hub.repository, edge.lab.inspection
import edge.lab.inventory, edge.lab.prediction.predict, edge.lab.profiling.bench, edge.lab.profiling.collect
import edge.lab.profiling.kit.make, edge.lab.profiling.kit.remote, edge.lab.quality.matrix, edge.lab.report.profile
import edge.lab.report.search, edge.lab.searching.command, edge.model.names.known
for each in ("llama_cpp", "tvm_ffi"):
    try:
        __import__(each)
    except ImportError:
        pass
"""

# Starts in the place of the other process: hands over its files and environment, and ends as the fork ends. It imports
# only what takes no time.
_CLIENT = """
import _socket, os, sys
server = _socket.socket(_socket.AF_UNIX)
server.connect("\\0" + sys.argv[1])
files = b"".join(each.to_bytes(4, sys.byteorder) for each in range(3))
server.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
server.sendall(ascii([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
code = int(server.recv(8) or 1)
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
_SERVER = "EDGE_TEST_SERVERS"  # environment variable: names of servers by what they have run
_SERVERS: dict[str, tuple[subprocess.Popen[bytes], str]] = {}  # and their sockets, by what they have run
_STARTING = threading.Lock()  # modules are compiled in threads: of two servers, the one that nobody keeps would end


def forking(prepared: str, module: str, *arguments: str) -> list[str]:
    """The command `python -m module arguments`, in a fork of a process that has run `prepared`."""
    if sys.platform != "linux":
        return [sys.executable, "-m", module, *arguments]
    with _STARTING:
        others = [COMPILER] * bool(find_spec("tvm")) + [TRIAL] * bool(find_spec("llama_cpp"))
        for each in (*(others if prepared in (COMMAND, LABORATORY) else ()), prepared):
            if each not in _SERVERS:
                _SERVERS[each] = _start(each)
    return _client(_SERVERS[prepared][1], module, *arguments)


def _server_of(module: str) -> str | None:
    return COMPILER if module in COMPILERS else TRIAL if module in TRIALS else None


def _client(server: str, module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _CLIENT, server, module, *arguments]


def fork_children() -> None:
    """Children that a fork starts are forks, too, of the other servers."""
    servers, plain = json.loads(os.environ[_SERVER]), child._command

    def command(module: str) -> list[str]:
        name = servers.get(_server_of(module))
        return _client(name, module) if name else plain(module)

    child._command = command


def two_cores() -> int:
    """The logical cores, as plans count them: tests have teams of two threads, also on one core."""
    return max(2, logical_cores())


def read_calmly(root: Path) -> Pressure:
    """This machine's memory pressure, which tests raise together, must not shorten caches of theirs. Fake systems
    keep their own."""
    found = read_pressure(root)
    return replace(found, stalled=None) if root == Path("/") else found


def _start(prepared: str) -> tuple[subprocess.Popen[bytes], str]:
    name = f"edge-tests-{os.getpid()}-{secrets.token_hex(8)}"  # not that of one which may still end
    places = [os.path.abspath(place) for place in sys.path]
    start = f"import sys; sys.path[:] = {places!r}; import fork_server; fork_server.serve({name!r}, {prepared!r})"
    names = json.dumps({each: name for each, (_, name) in _SERVERS.items()})
    server = subprocess.Popen(
        [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "EDGE_TEST_FORKS": str(FORKS), _SERVER: names},
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.read(1), "it did not start"
    return server, name


@contextmanager
def fork_servers(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilations and trials that this process starts are forks. All servers end with this context."""
    plain = child._command
    if sys.platform == "linux":

        def command(module: str) -> list[str]:
            prepared = _server_of(module)
            return forking(prepared, module) if prepared else plain(module)

        patch.setattr(child, "_command", command)
    yield
    for server, _ in _SERVERS.values():
        with server:
            server.kill()
    _SERVERS.clear()


def serve(name: str, prepared: str) -> None:
    exec(prepared, {})
    gc.collect()
    gc.freeze()  # forks neither look for garbage among it, nor copy its pages for that
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none of them is waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        os.write(1, b".")
        while True:
            if 0 in select.select([listener, 0], [], [])[0]:
                return  # the process that started it is gone
            client = listener.accept()[0]
            if os.fork() == 0:
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with client:
        files = socket.recv_fds(client, 1, 3)[1]
        with client.makefile("rb") as lines:
            (module, *arguments), folder, environment = ast.literal_eval(lines.readline().decode())
        if worker := os.fork():
            for number in files:
                os.close(number)
            if client in select.select([client, os.pidfd_open(worker)], [], [])[0]:
                os.kill(worker, signal.SIGTERM)  # the client was killed
            ended = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            used = resource.getrusage(resource.RUSAGE_CHILDREN)  # os.times() counts in steps of 10 ms
            with suppress(OSError), FORKS.open("a") as forks:
                forks.write(f"{module} {used.ru_utime + used.ru_stime}\n")
            with suppress(OSError):
                client.sendall(str(ended).encode())
            os._exit(0)
    os.setsid()
    for number, passed in enumerate(files):
        os.dup2(passed, number)
        os.close(passed)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
