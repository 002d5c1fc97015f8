"""The chat page: files of a folder, with a policy that lets it load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from edge.exporting.serve import TYPES, find_file
from edge.server.refusal import RefusedError

FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def serve(request: Request) -> Response:
    """GET / and files beside index.html."""
    path = find_file(FOLDER, request.url.path)
    if path is None:
        raise RefusedError(404, f"there is no {request.url.path[:80]}", code="not_found")
    kind = TYPES.get(path.suffix, "application/octet-stream")
    return Response(path.read_bytes(), media_type=kind, headers=_HEADERS)


def names() -> list[str]:
    """Paths of the files."""
    if not FOLDER.is_dir():
        return []
    return ["/", *(f"/{path.relative_to(FOLDER).as_posix()}" for path in sorted(FOLDER.rglob("*")) if path.is_file())]
