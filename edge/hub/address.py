"""Addresses from outside, such as HF_ENDPOINT, a redirect or a listing's next page: all are parsed here."""

from __future__ import annotations

import re
import string
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from edge.errors import DownloadError

_HOST = re.compile(r"[\w.:-]+")


def parse_address(text: str, base: str = "") -> SplitResult:
    """The parts of an address of http or https that can be asked for. base: the absolute address that named it.

    Raises DownloadError for what is no such address: asking again would not help.
    """
    try:
        # urllib reads headers as Latin-1, and takes bytes beyond ASCII for those of a path
        parts = urlsplit(urljoin(base, quote(text, safe=string.punctuation, encoding="iso-8859-1")))
        usable = parts.scheme in ("https", "http") and parts.username is None and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not _HOST.fullmatch(parts.hostname or ""):
        said = f"{urlsplit(base).netloc} refers to {text[:200]!r}, which" if base else repr(text[:200])
        raise DownloadError(f"{said} is no address of http or https")
    return parts
