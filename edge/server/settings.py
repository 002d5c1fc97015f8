"""Settings of a server. Each is defined once, as a field here, which makes its flag and environment variable."""

from __future__ import annotations

import ipaddress
import re
from functools import partial

from edge.budget import parse_bytes, parse_seconds
from edge.errors import InputError
from edge.flags import SERVER, flags_of, option
from edge.records import dataclass

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+")


@dataclass(frozen=True)
class Settings:
    """The address, access rules and limits of a server."""

    host: str = option(
        "127.0.0.1", "--host", group=SERVER,
        help="The address to listen at; any but this machine's own (127.0.0.1, ::1) needs --api-key.",
    )  # fmt: skip
    port: int = option(8080, "--port", group=SERVER, help="0: any that is free.")
    api_key: list[str] | None = option(
        None, "--api-key", group=SERVER, metavar="KEY",
        help="Answer only requests with this key; may be repeated. Each key has rows of earlier prompts of its own.",
    )  # fmt: skip
    cors: list[str] | None = option(
        None, "--cors", group=SERVER, metavar="ORIGIN",
        help="Let web pages of this origin ask, such as app://obsidian.md; may be repeated.",
    )  # fmt: skip
    adapters: list[str] | None = option(
        None, "--adapter", group=SERVER, metavar="NAME=FILE[:SCALE]",
        help="Serve a LoRA adapter as the model BASE:NAME; may be repeated; BASE/NAME=FILE for one of several models.",
    )  # fmt: skip
    documents: list[str] | None = option(
        None, "--documents", group=SERVER, twin=False, metavar="NAME",
        help="Offer an index of edge index to requests, which name it in edge.documents and see its passages and the "
        "paths of its files; may be repeated.",
    )  # fmt: skip
    queue: int = option(32, "--queue", group=SERVER, help="Most requests that wait; others get status 429.")
    connections: int = option(64, "--connections", group=SERVER, help="Most connections at a time.")
    most_body: int = option(
        "16MiB", "--max-body", group=SERVER, typed=str, parse=partial(parse_bytes, what="--max-body"),
        help="Most bytes of a request, with its pictures.",
    )  # fmt: skip
    fetch_images: bool = option(
        False, "--fetch-images", group=SERVER,
        help="Fetch pictures that requests name by http and https addresses of the public internet.",
    )  # fmt: skip
    most_wait: float = option(
        "5m", "--max-wait", group=SERVER, typed=str, parse=partial(parse_seconds, what="--max-wait"),
        help="Longest that a request waits for its turn.",
    )  # fmt: skip
    drain: float = option(
        "30s", "--drain", group=SERVER, typed=str, parse=partial(parse_seconds, what="--drain"),
        help="Longest that answers may go on after SIGTERM.",
    )  # fmt: skip
    prompt_memory: int | None = option(
        None, "--prompt-memory", group=SERVER, typed=str, parse=partial(parse_bytes, what="--prompt-memory"),
        help="Memory for the rows of earlier prompts, for each model (default: a sixteenth of --memory; without "
        "it, an eighth of what is free, less under memory pressure).",
    )  # fmt: skip
    evict: bool = option(
        False, "--evict", group=SERVER,
        help="Answer prompts that are longer than the KV rows, of which --kv-policy evicts some; refused by default.",
    )  # fmt: skip
    share_prompts: bool = option(
        False, "--share-prompts", group=SERVER,
        help="Let several keys share rows of earlier prompts, by which one can tell what another has asked.",
    )  # fmt: skip
    log: bool = option(False, "--log-requests", group=SERVER, help="Log requests' paths and statuses.")
    max_tokens: int | None = None  # of answers whose requests state no limit; None or -1: as many as fit

    @classmethod
    def parse(cls, **values: object) -> Settings:
        """Settings from values as users write them. Raises InputError."""
        for name, flag in flags_of(cls).items():
            value = values.get(name)
            if flag.parse and value is not None:
                values[name] = flag.parse(value)
        return cls(**{name: value for name, value in values.items() if value is not None})  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InputError(f"--port {self.port}: choose a number from 0 to 65535")
        if self.queue < 1 or self.connections < 1:
            raise InputError("--queue and --connections must be at least 1")
        from edge.run.arguments import check_limit  # here: it needs NumPy, and the help of commands does not

        check_limit(self.max_tokens)
        if not self.loopback and not self.api_key:
            raise InputError(
                f"--host={self.host} can be reached by other devices: state --api-key (or EDGE_API_KEY), or leave "
                "--host out"
            )
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() for key in self.api_key or ()):
            raise InputError("--api-key must have 8 characters or more, of ASCII")
        for origin in self.cors or ():
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise InputError(f"--cors {origin[:80]!r}: write it like http://localhost:3000, as browsers do, or *")

    @property
    def shares(self) -> bool:
        """Whether rows of earlier prompts may be reused by every request."""
        return self.share_prompts or len(self.api_key or ()) < 2

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
