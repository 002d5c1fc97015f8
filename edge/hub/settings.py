"""The environment variables of Hugging Face's tools, with the same meaning.

They are read on use; huggingface_hub reads them on import, which takes 0.3 s.
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
    """HF_ENDPOINT, or the Hub, without a trailing slash. Raises InputError if it is no address."""
    chosen = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
    try:
        parts = parse_address(chosen)
    except DownloadError:
        parts = None
    if parts is None or parts.query or parts.fragment:
        raise InputError(f"HF_ENDPOINT {chosen[:200]!r} is no address: write https://HOST")
    return parts.geturl()


def token_for(url: str) -> str | None:
    """The token to send to `url`: HF_TOKEN, or that of `hf auth login`; None unless `url` is the endpoint's.

    It is never sent unencrypted over a network.
    """
    parts = parse_address(url)
    secret = parts.scheme == "https" or parts.hostname in _LOOPBACK
    return _token() if secret and (parts.scheme, parts.netloc) == parse_address(endpoint())[:2] else None


def hub_cache() -> Path:
    """The Hub's cache folder: HF_HUB_CACHE, or `hub` in HF_HOME. It may not exist."""
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(chosen) if chosen else _home() / "hub"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids connections."""
    chosen = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return chosen.upper() in _YES


def _home() -> Path:
    chosen = os.environ.get("HF_HOME")
    return _expanded(chosen) if chosen else _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def _expanded(path: str) -> Path:
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))


def _token() -> str | None:
    """The token. Raises InputError for one that is no valid header value."""
    found = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not found:
        place = os.environ.get("HF_TOKEN_PATH")
        with suppress(OSError, ValueError), open(_expanded(place) if place else _home() / "token", "rb") as file:
            found = file.read(_LONGEST_TOKEN).decode()
    found = found.strip()
    if not (found.isascii() and found.isprintable()):
        raise InputError("HF_TOKEN holds characters that no token has: copy it again")
    return found or None
