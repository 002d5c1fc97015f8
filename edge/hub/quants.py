"""Selection of a repository's GGUF files by the quantization in their names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

from edge.formats.gguf_parts import PART, names_of_parts, whole_name
from edge.hub.repository import RemoteFile

_LABEL = re.compile(
    r"(?<![A-Za-z0-9])((?:UD[-_])?(?:I?Q[1-8](?:_(?:K|0|1|XXS|XS|S|M|NL))(?:_(?:XXS|XS|S|M|L|XL))?|TQ[12]_0|MXFP4(?:_MOE)?"
    r"|BF16|FP?16|FP?32))(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_OTHER = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix|lora|adapter|vocab)(?:[-_.]|$)", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_FOUR_BITS, _EIGHT_BITS = 4, 8


def label_of(path: str) -> str | None:
    """The quantization in a file's name, in capitals, such as Q4_K_M; None if there is none."""
    found = _LABEL.findall(path.rpartition("/")[2]) or _LABEL.findall(path)
    return _plain(found[-1]) if found else None


def matches(label: str | None, quant: str) -> bool:
    return label is not None and _plain(quant) == label


def _plain(label: str) -> str:
    return label.upper().replace("FP16", "F16").replace("FP32", "F32").replace("UD_", "UD-")


def runnable(path: str) -> bool:
    """Whether a file name denotes a model: a GGUF file, unsplit, and neither a projector nor an adapter."""
    return path.lower().endswith(".gguf") and not _OTHER.search(path.rpartition("/")[2]) and not PART.search(path)


def with_joined(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files that are whole models, and one joined file for each model in several parts."""
    found, by_path = [file for file in files if runnable(file.path)], {file.path: file for file in files}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        names = names_of_parts(name)
        parts = tuple(by_path[path] for each in names if (path := f"{folder}/{each}" if folder else each) in by_path)
        if names and name == names[0] and len(parts) == len(names) and not _OTHER.search(name):
            size, digest = sum(part.size for part in parts), "".join(part.hash for part in parts)
            key = hashlib.sha256(digest.encode()).hexdigest()
            found.append(RemoteFile(whole_name(file.path), size, key, parts))
    return found


def best_first(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Sort by preference: 8 to 4 bits a weight, largest first; then fewer bits; then 16 and more, which cost twice the
    bytes of 8 and are hardly better."""
    return sorted(files, key=lambda file: (_rank(file), -file.size, file.path))


def usual(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """The default candidates, best first: files with 8 to 4 bits a weight, or all if there are none."""
    ranked = best_first(files)
    return [file for file in ranked if _rank(file) == 0] or ranked


def _rank(file: RemoteFile) -> int:
    label = label_of(file.path)
    digit = _DIGIT.search(label or "")
    if label is None or digit is None or label in ("BF16", "F16", "F32"):
        return 2
    return 0 if "MXFP4" in label or _FOUR_BITS <= int(digit[0]) <= _EIGHT_BITS else 1
