"""HTTP requests to the Hub: redirects, retries, and readable errors.

This uses the standard library, which knows proxies and the system's certificates and imports in a tenth of
huggingface_hub's time. Redirects are checked here, since urllib would send the token along with them.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse, InvalidURL
from typing import IO, Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from edge.errors import DownloadError
from edge.hub.address import parse_address
from edge.hub.settings import is_offline, token_for
from edge.storage.versions import edge_version

Result = TypeVar("Result")

_TIMEOUT_S = 30.0  # without a byte
_BLOCK = 1 << 18  # bytes of a piece
_MOST_JSON = 16 << 20  # bytes of a listing
_ATTEMPTS, _ATTEMPTS_UNREACHED = 6, 2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 120.0
_NOTICED_S = 2.0
_MAY_RECOVER = {408, 425, 429, 500, 502, 503, 504}
_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next"?')


class CutError(Exception):
    """A transient failure. wait: seconds that the server asks for. reached: whether the server has answered."""

    def __init__(self, why: str, wait: float = 0.0, *, reached: bool = True) -> None:
        super().__init__(why)
        self.wait, self.reached = wait, reached


class RefusedError(Exception):
    """A permanent error from the server. code: the Hub's own word for it, such as GatedRepo."""

    def __init__(self, status: int, code: str, url: str) -> None:
        super().__init__(f"{parse_address(url).netloc} answers {status} for {url[:300]}")
        self.status, self.code = status, code


@contextmanager
def opened(url: str, start: int = 0, stop: int | None = None) -> Iterator[HTTPResponse]:
    """Open a response, to be read with `blocks`. start, stop: byte range of the file.

    Raises CutError, RefusedError, DownloadError.
    """
    if is_offline():
        raise DownloadError("HF_HUB_OFFLINE forbids downloads: unset it, or use a model that is here", reached=False)
    request = Request(url, headers={"User-Agent": f"edge-runtime/{edge_version()}", "Accept-Encoding": "identity"})
    if start or stop is not None:
        request.add_header("Range", f"bytes={start}-{'' if stop is None else stop - 1}")
    if token := token_for(url):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    with _explained(url):
        response = build_opener(_Redirects).open(request, timeout=_TIMEOUT_S)
    with response:
        yield response


def blocks(response: HTTPResponse) -> Iterator[bytes]:
    """Read the body in pieces as they arrive. Raises CutError."""
    while True:
        with _explained(response.url):
            block = response.read1(_BLOCK)
        if not block:
            return
        yield block


def get_json(url: str) -> tuple[Any, str | None]:
    """Fetch JSON, and the address of its next page. Raises as `opened`, and DownloadError if the answer is not JSON."""

    def once() -> tuple[bytes, str | None]:
        with opened(url) as response:
            body = bytearray()
            for block in blocks(response):
                body += block
                if len(body) > _MOST_JSON:
                    raise DownloadError(f"{url[:300]} answers more than {_MOST_JSON >> 20} MiB")
            following = _NEXT.search(response.headers.get("Link") or "")
            return bytes(body), parse_address(following[1], url).geturl() if following else None

    body, following = patiently(once)
    try:
        return json.loads(body), following
    except (ValueError, RecursionError):
        raise DownloadError(f"{url[:300]} is no Hub: its answer is not JSON") from None


def patiently(
    work: Callable[[], Result], done: Callable[[], int] = lambda: 0, notice: Callable[[str], None] = lambda line: None
) -> Result:
    """Retry `work` after each CutError, with growing pauses. done: bytes so far; progress resets the retries. notice:
    called with a line about long pauses.

    Raises DownloadError when retries are exhausted, and other errors of `work`.
    """
    failures, before = 0, done()
    while True:
        try:
            return work()
        except CutError as cut:
            failures = 1 if done() > before else failures + 1
            before = max(before, done())
            most = _ATTEMPTS if cut.reached or done() else _ATTEMPTS_UNREACHED
            if failures >= most or cut.wait > _LONGEST_PAUSE_S:
                asked = f", and asks to wait {cut.wait:.0f} s" if cut.wait > _LONGEST_PAUSE_S else ""
                kept = "; what came is kept, and the next edge pull goes on from there" if done() else ""
                raise DownloadError(f"{cut}{asked} ({failures} attempts){kept}", reached=cut.reached) from None
            pause = max(cut.wait, _FIRST_PAUSE_S * 2 ** (failures - 1))
            if pause >= _NOTICED_S:
                notice(f"{cut}: trying again in {pause:.0f} s")
            time.sleep(pause)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to https, and to http only from http; the token stays with the endpoint's host. Python 3.10
    lacks 308."""

    max_redirections = 6

    def http_error_302(self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any) -> HTTPResponse | None:
        for stated in (headers.get("Location"), headers.get("URI")):
            if stated is not None:
                parse_address(stated, req.full_url)
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        old, new = parse_address(req.full_url), parse_address(newurl)
        if new.scheme != "https" and (new.scheme, old.scheme) != ("http", "http"):
            raise DownloadError(
                f"{old.netloc} redirects to {new.scheme}://{new.netloc}, which is not encrypted: refused"
            )
        made = super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)
        if made is not None and (token := token_for(newurl)):
            made.add_unredirected_header("Authorization", f"Bearer {token}")
        return made


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Convert a request's errors into CutError, RefusedError or DownloadError."""
    host = parse_address(url).netloc
    try:
        yield
    except HTTPError as error:
        with error:
            if error.code in _MAY_RECOVER:
                raise CutError(f"{host} answers {error.code}", _seconds(error.headers.get("Retry-After"))) from None
            raise RefusedError(error.code, error.headers.get("X-Error-Code") or "", url) from None
    except URLError as error:
        reason = error.reason
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise DownloadError(f"{host} has a certificate that is not trusted: {reason.verify_message}") from None
        if not isinstance(reason, OSError):  # such as the scheme of a proxy
            raise DownloadError(f"{host} cannot be asked ({reason})") from None
        why = getattr(reason, "strerror", None) or reason
        raise CutError(f"{host} cannot be reached ({why})", reached=False) from None
    except TimeoutError:
        raise CutError(f"{host} sent nothing for {_TIMEOUT_S:.0f} s") from None
    except (InvalidURL, ValueError) as error:  # of a proxy, or a name that no host can have
        raise DownloadError(f"{host} cannot be asked ({error!s:.200})") from None
    except (HTTPException, OSError) as error:
        raise CutError(f"{host} ended the connection ({getattr(error, 'strerror', None) or error!r:.80})") from None


def _seconds(stated: str | None) -> float:
    """Retry-After in seconds; a date counts as a short wait."""
    return float(stated) if stated and stated.isascii() and stated.isdigit() and len(stated) < 8 else 0.0
