"""A device for the real adb: its side of the protocol over TCP, with this machine's shell behind it.

The protocol is described in Android's sources, packages/modules/adb: protocol.txt, and shell_protocol.h for what
travels in a stream of `shell,v2`.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

_VERSION, _MOST = 0x01000001, 1 << 20
_HEADER, _PACKET = struct.Struct("<4s5I"), struct.Struct("<BI")
_STDIN, _STDOUT, _STDERR, _EXIT, _CLOSE_STDIN = range(5)


class Phone:
    """Answers adb at `address`. Its shell's home is `home`. before: a command of the shell in front of each."""

    def __init__(self, home: Path) -> None:
        self.home, self.before = home, ""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def unplug(self) -> None:
        """End all connections, and take no others."""
        self._server.close()
        for each in self._connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                threading.Thread(target=_Transport(self, connection).serve, daemon=True).start()


class _Transport:
    """A connection: messages of a header and data, for streams that both sides number."""

    def __init__(self, phone: Phone, connection: socket.socket) -> None:
        self._phone, self._connection, self._file = phone, connection, connection.makefile("rb")
        self._lock, self._streams = threading.Lock(), dict[int, _Shell]()

    def serve(self) -> None:
        with suppress(OSError, struct.error):
            while True:
                command, first, second, size, _, _ = _HEADER.unpack(self._file.read(_HEADER.size))
                self._answer(command, first, second, self._file.read(size))
        self._file.close()
        for each in list(self._streams.values()):
            each.hang_up()

    def send(self, command: bytes, first: int, second: int, data: bytes = b"") -> None:
        number = int.from_bytes(command, "little")
        with self._lock:
            self._connection.sendall(
                _HEADER.pack(command, first, second, len(data), sum(data) & 0xFFFFFFFF, number ^ 0xFFFFFFFF) + data
            )

    def _answer(self, command: bytes, first: int, second: int, data: bytes) -> None:
        if command == b"CNXN":
            self.send(b"CNXN", _VERSION, _MOST, b"device::ro.product.name=test;features=shell_v2,cmd")
        elif command == b"OPEN":
            service = data.rstrip(b"\0").decode()
            kind, _, words = service.partition(":")
            if kind.split(",")[:2] != ["shell", "v2"]:
                self.send(b"CLSE", 0, first)
                return
            self.send(b"OKAY", first, first)
            self._streams[first] = _Shell(self, self._phone, first, words)
        elif command == b"WRTE" and second in self._streams:
            self._streams[second].taken.put(data)
        elif command == b"OKAY" and second in self._streams:
            self._streams[second].ready.release()
        elif command == b"CLSE" and second in self._streams:
            self._streams.pop(second).hang_up()


class _Shell:
    """A command, whose pipes travel as packets of a kind, a size and bytes."""

    def __init__(self, transport: _Transport, phone: Phone, number: int, command: str) -> None:
        self.ready = threading.Semaphore(1)  # one write is on its way at a time
        self.taken = queue.Queue[bytes | None]()
        self._transport, self._number = transport, number
        self._process = subprocess.Popen(
            ["sh", "-c", f"{phone.before}\n{command}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, bufsize=0, cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": str(phone.home)},
        )  # fmt: skip
        for each in (self._run, self._take):
            threading.Thread(target=each, daemon=True).start()

    def _take(self) -> None:
        """Pass on what comes, and ask for more once the command has read it."""
        left, stdin = b"", self._process.stdin
        while (data := self.taken.get()) is not None:
            left += data
            while len(left) >= _PACKET.size:
                kind, size = _PACKET.unpack_from(left)
                if len(left) < _PACKET.size + size:
                    break
                part, left = left[_PACKET.size : _PACKET.size + size], left[_PACKET.size + size :]
                with suppress(OSError, ValueError):  # a command may end before its input does
                    if kind == _STDIN:
                        while part:
                            part = part[stdin.write(part) :]
                    elif kind == _CLOSE_STDIN:
                        stdin.close()
            with suppress(OSError):
                self._transport.send(b"OKAY", self._number, self._number)

    def hang_up(self) -> None:
        """As adbd does where the other side is gone: a signal, and the ends of the pipes."""
        self.taken.put(None)
        self.ready.release()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGHUP)
        self._close()

    def _close(self) -> None:
        for each in (self._process.stdin, self._process.stdout, self._process.stderr):
            with suppress(OSError):
                each.close()

    def _run(self) -> None:
        pumps = [
            threading.Thread(target=self._pump, args=(kind, file), daemon=True)
            for kind, file in ((_STDOUT, self._process.stdout), (_STDERR, self._process.stderr))
        ]
        for each in pumps:
            each.start()
        for each in pumps:
            each.join()
        status = self._process.wait()
        with suppress(OSError):
            self._say(_EXIT, bytes([status & 0xFF if status >= 0 else 128 - status]))
            self._transport.send(b"CLSE", self._number, self._number)
        self._close()

    def _pump(self, kind: int, file: IO[bytes]) -> None:
        with suppress(OSError, ValueError):
            while part := os.read(file.fileno(), 1 << 14):
                self._say(kind, part)

    def _say(self, kind: int, data: bytes) -> None:
        self.ready.acquire()
        self._transport.send(b"WRTE", self._number, self._number, _PACKET.pack(kind, len(data)) + data)
