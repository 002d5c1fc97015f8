"""A process that has imported TVM's compiler, and forks for each compilation in the place of a new Python.

Starting Python and importing TVM takes 0.9 s of CPU time, half of what a golden model takes; `make test` with an empty
cache compiles 250 designs. Children of tests (`edge run`) start the compiler as users do.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from edge.devices import child

MODULES = ("edge.backends.tvm.compiler.child", "edge.backends.tvm.gpu.compiled")  # which `run_child` starts

# In the place of the compiling process: hands over its files and environment, and ends with the status that comes back.
_CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect("\\0" + sys.argv[1])
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[2], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(8) or 1))
"""


@contextmanager
def compiler_server(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilations that this process starts are forks of one server, which the first of them starts."""
    name, servers = f"edge-compiler-{os.getpid()}", list[subprocess.Popen[bytes]]()
    plain = child._command

    def command(module: str) -> list[str]:
        if module not in MODULES:
            return plain(module)
        if not servers:
            start = f"import sys; sys.path[:] = {sys.path!r}; import compiler_server; compiler_server.serve({name!r})"
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
            servers.append(subprocess.Popen([sys.executable, "-c", start], **pipes))  # type: ignore[call-overload]
            servers[0].stdout.read(1)  # it listens
        return [sys.executable, "-I", "-S", "-c", _CLIENT, name, module]

    patch.setattr(child, "_command", command)
    yield
    for server in servers:
        with server:
            server.kill()


def serve(name: str) -> None:
    from edge.backends.tvm.cpu.lowering import import_compiler

    import_compiler()
    import edge.backends.tvm.cpu.elf
    import edge.backends.tvm.cpu.generator
    import edge.backends.tvm.gpu.generator  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their clients wait for the children
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        os.write(1, b".")
        while True:
            client = listener.accept()[0]
            if os.fork() == 0:
                _work(client)
            client.close()


def _work(client: socket.socket) -> None:
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, passed in enumerate(socket.recv_fds(client, 1, 3)[1]):
            os.dup2(passed, number)
            os.close(passed)
        module, folder, environment = json.loads(b"".join(iter(lambda: client.recv(1 << 16), b"")))
        os.chdir(Path(folder))
        os.environ.clear()
        os.environ.update(environment)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):  # the client was killed
            sys.stderr.flush()
            client.sendall(str(status).encode())
        os._exit(status)
