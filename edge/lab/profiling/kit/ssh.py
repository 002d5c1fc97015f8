"""A machine, reached by the system's `ssh`."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

from edge.errors import EngineError, InputError, UnsupportedError
from edge.lab.profiling.kit.remote import last_line

_CONNECT_S = 20
_OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=10",
    "-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR", "-o", "ForwardX11=no", "-o", "ForwardAgent=no",
)  # fmt: skip
# ssh's own exit status, and patterns of its messages with advice: the first pattern that matches counts.
_CONNECTION = 255
_ADVICE = (
    (r"host key verification failed", "its key is not known here: connect once with {ssh}, and confirm the key"),
    (r"permission denied", "it takes none of your keys: see that {ssh} works without a password (ssh-copy-id)"),
    (r"could not resolve|name or service not known", "there is no such host"),
    (r"connection refused", "nothing listens there: start its ssh server, or correct the port"),
    (r"timed out|no route to host|unreachable", "it does not answer"),
)
_PLACE = re.compile(r"(?P<user>[\w.+-]+@)?(?P<host>[\w.-]+|\[[0-9A-Fa-f:.]+(%\w+)?\])(:(?P<port>\d{1,5}))?")


@dataclass(frozen=True)
class Address:
    """The address `user@host:port`; user and port are optional."""

    host: str  # with the user's name, if one was given
    port: int | None = None

    @classmethod
    def of(cls, text: str) -> Address:
        """Parse an address. Raises InputError."""
        found = _PLACE.fullmatch(text)
        port = int(found["port"]) if found and found["port"] else None
        if found is None or text.startswith("-") or found["host"].startswith("-") or (port and port > 65535):
            raise InputError(f"--on ssh:{text} names no host: write ssh:user@host or ssh:user@host:port")
        return cls((found["user"] or "") + found["host"].strip("[]"), port)

    def __str__(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"

    @property
    def name(self) -> str:
        return self.host.rpartition("@")[2]

    @property
    def command(self) -> list[str]:
        return ["ssh", *(["-p", str(self.port)] if self.port else []), self.host]

    def shell(self, command: str) -> list[str]:
        """As `Remote.shell`. Raises UnsupportedError without ssh."""
        program = shutil.which("ssh")
        if program is None:
            raise UnsupportedError("there is no ssh here: install openssh-client")
        return [program, *_OPTIONS, *self.command[1:-1], "--", self.host, command]

    def cut(self, status: int, text: str, *, began: bool) -> EngineError | None:
        """As `Remote.cut`."""
        if status != _CONNECTION:
            return None
        if began:
            return EngineError(f"the connection to {self} was lost while the kit ran")
        for pattern, advice in _ADVICE:
            if re.search(pattern, text, re.IGNORECASE):
                return EngineError(f"{self}: {advice.format(ssh=' '.join(self.command))}")
        return EngineError(f"{self} cannot be reached: {last_line(text) or 'ssh does not say why'}")
