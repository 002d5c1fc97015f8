"""The chat page: its own files, and those that it shares with exported pages. Its content security policy forbids
loading anything from elsewhere, and making markup of text."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from edge.apps.serve import TYPES, find_file
from edge.apps.site import CHAT
from edge.server.refusal import RefusedError

FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def serve(request: Request) -> Response:
    """GET / and files beside index.html."""
    path = find(request.url.path)
    if path is None:
        raise RefusedError(404, f"there is no {request.url.path[:80]}", code="not_found")
    kind = TYPES.get(path.suffix, "application/octet-stream")
    return Response(path.read_bytes(), media_type=kind, headers=HEADERS)


def find(target: str) -> Path | None:
    """The file that a request's target names; None if there is none."""
    return find_file(CHAT.parent if target.startswith(f"/{CHAT.name}/") else FOLDER, target)


def names() -> list[str]:
    """The URL paths of the page's files."""
    shared = [f"/{CHAT.name}/{path.name}" for path in sorted(CHAT.iterdir())]
    return ["/", *(f"/{path.name}" for path in sorted(FOLDER.iterdir())), *shared]
