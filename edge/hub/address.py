"""Parser of addresses from outside, such as HF_ENDPOINT, redirects and a listing's next page."""

from __future__ import annotations

import re
import string
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from edge.errors import DownloadError

_HOST = re.compile(r"[\w.:-]+")


def parse_address(text: str, base: str = "") -> SplitResult:
    """Parse an http or https address. base: the absolute address that a relative one refers to.

    Raises DownloadError for an invalid one: a retry would not help.
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
