"""Bodies of multipart/form-data (RFC 7578): fields, and the content of a file."""

from __future__ import annotations

import re
from typing import Any

from edge.server.refusal import RefusedError

_MOST_PARTS = 100
_NAME = re.compile(rb'[;\s]name="([^"]*)"', re.IGNORECASE)
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)


def boundary_of(content_type: str) -> bytes:
    """The boundary that a request's Content-Type states. Raises RefusedError for other types."""
    kind, found = content_type.partition(";")[0].strip().lower(), _BOUNDARY.search(content_type)
    if kind != "multipart/form-data" or found is None:
        message = f"the content is {kind[:60]!r}: send multipart/form-data"
        raise RefusedError(415, message, code="media_type")
    return (found[1] or found[2]).encode("latin-1", "replace")


def parse_form(body: bytes, boundary: bytes) -> dict[str, Any]:
    """Fields by name: text, or bytes of the field `file`; a list where the name ends in []. Raises RefusedError."""
    mark, fields = b"--" + boundary, dict[str, Any]()
    start = body.find(mark)
    for _ in range(_MOST_PARTS):
        start += len(mark)
        if start < len(mark) or body[start : start + 2] == b"--":
            return fields
        head_end, end = body.find(b"\r\n\r\n", start), body.find(b"\r\n" + mark, start)
        if head_end < 0 or end < 0 or (named := _NAME.search(body, start, head_end)) is None:
            raise RefusedError(400, "the form is cut or damaged", code="form")
        name, content = named[1].decode("utf-8", "replace"), body[min(head_end + 4, end) : end]
        if name in fields:
            raise RefusedError(400, f"the form has {name[:40]} twice", code="form", param=name[:80])
        if name == "file":
            fields[name] = content
        elif name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(content.decode("utf-8", "replace"))
        else:
            fields[name] = content.decode("utf-8", "replace")
        start = end + 2
    raise RefusedError(413, f"the form has more than {_MOST_PARTS} parts", code="too_large")
