"""A wheel of a package that is data alone, with the same bytes whenever the data is the same.

Source of the format: "Binary distribution format", packaging.python.org.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip files know no earlier time
_MODE = 0o100644 << 16
_UNIX = 3


def write_wheel(folder: Path, package: str, summary: str, version: str) -> Path:
    """Write the wheel of `folder`/`package` into `folder`, and return its path. It requires this version of edge."""
    name = f"{package}-{version}"
    files = {f"{package}/{path.name}": path.read_bytes() for path in sorted((folder / package).iterdir())}
    files[f"{name}.dist-info/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {package.replace('_', '-')}\nVersion: {version}\nSummary: {summary}\n"
        f"License-Expression: Apache-2.0\nRequires-Python: >=3.10\nRequires-Dist: edge-runtime=={version}\n"
    ).encode()
    files[f"{name}.dist-info/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: edge\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = f"{name}.dist-info/RECORD"
    lines = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    out = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(out, "w") as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.external_attr, entry.create_system = _MODE, _UNIX
            entry.compress_type = zipfile.ZIP_STORED if path.endswith(".xz") else zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return out


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
