"""Text that can be encoded in UTF-8."""

from __future__ import annotations

from pathlib import Path

from edge.errors import InputError


def well_formed(text: str) -> str:
    """The text without lone surrogates, which neither tokenizers nor files accept.

    Surrogates from undecodable bytes of arguments (PEP 383) are decoded as UTF-8; the rest becomes U+FFFD.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # surrogates that stand for no byte
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def utf8_path(path: Path) -> str:
    """The absolute path as text for ONNX Runtime. Raises InputError if it is not UTF-8."""
    text = str(path.absolute())
    if well_formed(text) != text:
        raise InputError(f"{text!a}: ONNX Runtime opens only paths that are Unicode: rename the folder")
    return text
