"""Long real texts: documents of Debian's `anarchism` and `debian-handbook` packages (public), as plain text.

Fetched once into the cache folder with apt-get, without installing anything. Needs Debian or a derivative. Python code
is that of the interpreter's own library.
"""

from __future__ import annotations

import html.parser
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from machine import files_folder

_BREAKS = {"p", "li", "h1", "h2", "h3", "h4", "h5", "blockquote", "div", "dd", "dt", "br", "tr"}
_SKIPPED = {"script", "style", "nav", "head", "table", "pre"}


class _Text(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipping = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.skipping += tag in _SKIPPED
        if tag in _BREAKS:
            self.parts.append("\n" if tag == "br" else "\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.skipping = max(0, self.skipping - (tag in _SKIPPED))
        if tag in _BREAKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.parts.append(re.sub(r"\s+", " ", data))


# English documents, the longest of their kind. Calibration documents are never measured on.
CALIBRATION = ("secH3.html", "secC2.html", "secA2.html", "secD5.html", "secG1.html", "secE3.html", "secF8.html",
               "secB2.html")  # fmt: skip
_MANUAL = ("network-services.html", "advanced-administration.html", "sect.virtualization.html",
           "sect.debian-internals.html", "sect.installation-steps.html", "sect.apt-get.html")  # fmt: skip
_CODE = ("heapq.py", "statistics.py", "textwrap.py", "shlex.py", "tempfile.py", "fractions.py")
_LANGUAGES = {"french": "fr-FR", "japanese": "ja-JP", "norwegian": "nb-NO"}  # folders of the manual
HELD_OUT = {
    "anarchism": ("secI8.html", "secJ3.html", "secI5.html", "secJ5.html", "secI4.html", "secJ7.html"),
    "debian-handbook": _MANUAL, "python": _CODE, "french": _MANUAL, "japanese": _MANUAL,
    "norwegian": _MANUAL,
}  # fmt: skip


def held_out_texts(domain: str) -> list[str]:
    """The texts of a domain of HELD_OUT, which no method is calibrated on."""
    if domain == "python":
        folder = Path(sysconfig.get_path("stdlib"))
        return [(folder / name).read_text(encoding="utf-8") for name in _CODE]
    package = "anarchism" if domain == "anarchism" else "debian-handbook"
    language = _LANGUAGES.get(domain, "en-US")
    return [long_text(each, package, language).read_text(encoding="utf-8") for each in HELD_OUT[domain]]


def long_text(document: str = "append31.html", package: str = "anarchism", language: str = "en-US") -> Path:
    """The text file of a document (append31: 96k SmolLM2 tokens), fetched if it does not exist yet."""
    name = document if language == "en-US" else f"{language}.{document}"
    path = files_folder() / f"{name}.txt"
    if path.exists():
        return path
    print(f"fetching Debian's {package} for a long text ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
            subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True, capture_output=True)
            (package,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, folder], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"the long text comes from a Debian package, which could not be fetched here: {error}")
        found = next(path for path in sorted(Path(folder).rglob(document)) if path.parent.name in ("html", language))
        parser = _Text()
        parser.feed(found.read_text(encoding="utf-8", errors="replace"))
    text = re.sub(r"[ \t]*\n[ \t]*", "\n", "".join(parser.parts))
    partial = path.with_suffix(".partial")
    partial.write_text(re.sub(r"\n{3,}", "\n\n", text).strip(), encoding="utf-8")
    partial.rename(path)
    return path


if __name__ == "__main__":
    for name in sys.argv[1:] or ["append31.html"]:
        print(long_text(name))
