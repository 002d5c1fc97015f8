"""The environment variables of the Hub's own tools, with their meaning there.

Read when they are used: huggingface_hub reads them once, when it is imported, and takes 0.3 s to be.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from edge.errors import DownloadError, InputError
from edge.hub.address import parse_address

_ENDPOINT = "https://huggingface.co"
_YES = {"1", "ON", "YES", "TRUE"}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_LONGEST_TOKEN = 4096  # bytes of a token's file


def endpoint() -> str:
    """HF_ENDPOINT, or the Hub, without a slash at the end. Raises InputError for what is no address."""
    chosen = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
    try:
        parts = parse_address(chosen)
    except DownloadError:
        parts = None
    if parts is None or parts.query or parts.fragment:
        raise InputError(f"HF_ENDPOINT {chosen[:200]!r} is no address: write https://HOST")
    return parts.geturl()


def token_for(url: str) -> str | None:
    """The token that may be sent to `url`: HF_TOKEN, or that of `hf auth login`.

    It goes to the endpoint alone, and never unencrypted over a network.
    """
    parts = parse_address(url)
    secret = parts.scheme == "https" or parts.hostname in _LOOPBACK
    return _token() if secret and (parts.scheme, parts.netloc) == parse_address(endpoint())[:2] else None


def hub_cache() -> Path:
    """The folder of repositories: HF_HUB_CACHE, or `hub` in HF_HOME. It need not exist."""
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(chosen) if chosen else _home() / "hub"


def is_offline() -> bool:
    """HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids connections."""
    chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return chosen.upper() in _YES


def _home() -> Path:
    chosen = os.environ.get("HF_HOME")
    return _expanded(chosen) if chosen else _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def _expanded(path: str) -> Path:
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))


def _token() -> str | None:
    """Raises InputError for one that no header can hold."""
    found = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not found:
        place = os.environ.get("HF_TOKEN_PATH")
        with suppress(OSError, ValueError), open(_expanded(place) if place else _home() / "token", "rb") as file:
            found = file.read(_LONGEST_TOKEN).decode()
    found = found.strip()
    if not (found.isascii() and found.isprintable()):
        raise InputError("HF_TOKEN holds characters that no token has: copy it again")
    return found or None
