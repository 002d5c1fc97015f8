"""Everything that people install, in dist/: `make dist`. docs/publish.md says what a maintainer does with it.

The version is that of pyproject.toml. Two builds of one commit have equal bytes: archives are written in the order of
names, with the time of the epoch and the same modes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("edge", "backends", "converters", "devices", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
NPM = ROOT / "edge" / "apps" / "web" / "package"
OURS = ("edge_runtime-*", "edge_kernels-*.whl", "edge-web-*.tgz", "edge-runtime.rb", "SHA256SUMS")
EPOCH = (1980, 1, 1, 0, 0, 0)  # zip files know no earlier time
_MODE = 0o644


def build_all(
    out: Path, kernels: Path | None = None, models: str | None = None, targets: str | None = None
) -> list[Path]:
    """Build into `out`. kernels: where compiled passes are kept between calls; None: build no edge-kernels."""
    version = project_version()
    out.mkdir(parents=True, exist_ok=True)
    made = [sdist(out, version)]
    made.append(wheel(out, made[0]))
    if kernels is not None:
        made.append(kernels_wheel(out, kernels, models, targets))
    made.append(npm_tarball(out, version))
    made.append(formula(out, made[0]))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made)]
    (out / "SHA256SUMS").write_text("".join(lines))
    return [*made, out / "SHA256SUMS"]


def project_version() -> str:
    """The version in pyproject.toml, from which all packages have it."""
    (found,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def sdist(out: Path, version: str) -> Path:
    """The source distribution: what git knows of SOURCES, with the metadata that installers read first."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = {name: (ROOT / name).read_bytes() for name in listed.split("\0") if (ROOT / name).is_file()}
    files["PKG-INFO"] = f"Metadata-Version: 2.4\nName: edge-runtime\nVersion: {version}\n".encode()
    path = out / f"edge_runtime-{version}.tar.gz"
    write_tarball(path, f"edge_runtime-{version}", files)
    return path


def wheel(out: Path, source: Path) -> Path:
    """The wheel of a source distribution, which is thereby known to be complete. Its version is not ours to write."""
    with tempfile.TemporaryDirectory() as work:
        with tarfile.open(source) as archive:
            archive.extractall(work, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        (tree,) = Path(work).iterdir()
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        isolated = [] if os.environ.get("EDGE_DIST_ISOLATED", "1") == "1" else ["--no-build-isolation"]
        subprocess.run([*pip, *isolated, "-w", f"{work}/made", str(tree)], check=True)
        (made,) = Path(f"{work}/made").glob("*.whl")
        path = out / made.name
        with zipfile.ZipFile(made) as archive:
            write_zip(path, {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")})
    return path


def kernels_wheel(out: Path, kept: Path, models: str | None, targets: str | None) -> Path:
    """The wheel edge-kernels, by `edge compile --catalog`."""
    chosen = [*(["--models", models] if models else []), *(["--targets", targets] if targets else [])]
    command = [sys.executable, "-m", "edge", "compile", "--catalog", "-o", str(kept), *chosen, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # its progress and errors go to the terminal
    if done.returncode:
        sys.exit(done.returncode)
    return Path(shutil.copy(json.loads(done.stdout)["wheel"], out))


def npm_tarball(out: Path, version: str) -> Path:
    """The JavaScript package, without WebAssembly: a model's modules lie in what `edge export --device web` makes."""
    about = json.loads((NPM / "package.json").read_text(encoding="utf-8")) | {"version": version}
    files = {path.name: path.read_bytes() for path in NPM.iterdir() if path.suffix in (".js", ".ts")}
    files["package.json"] = (json.dumps(about, indent=2) + "\n").encode()
    files["LICENSE"] = (ROOT / "LICENSE").read_bytes()
    path = out / f"{about['name']}-{version}.tgz"
    write_tarball(path, "package", files)
    return path


def formula(out: Path, source: Path) -> Path:
    """A formula for Homebrew, as text, of the source distribution as PyPI will have it."""
    path = out / "edge-runtime.rb"
    path.write_text(f"""\
class EdgeRuntime < Formula
  desc "Run language models on small devices inside a stated memory budget"
  homepage "https://pypi.org/project/edge-runtime/"
  url "https://files.pythonhosted.org/packages/source/e/edge-runtime/{source.name}"
  sha256 "{hashlib.sha256(source.read_bytes()).hexdigest()}"
  license "Apache-2.0"

  depends_on "python@3.13"

  def install
    # Kernels are compiled for Linux; a Mac compiles its own.
    extra = OS.mac? ? "tvm" : "kernels"
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "#{{buildpath}}[#{{extra}}]"
    bin.install_symlink libexec/"bin/edge"
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/edge --version")
  end
end
""")
    return path


def write_tarball(path: Path, top: str, files: Mapping[str, bytes]) -> None:
    """A .tar.gz of these files below the folder `top`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size, entry.mode = len(data), _MODE
            archive.addfile(entry, io.BytesIO(data))
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


def write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    """A zip file of these files; the wheel's RECORD, whose lines come in any order, is sorted and last."""
    names = sorted(files, key=lambda name: (name.endswith(".dist-info/RECORD"), name))
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            data = files[name]
            if name.endswith(".dist-info/RECORD"):
                data = b"".join(sorted(data.splitlines(keepends=True)))
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr, entry.create_system = (0o100000 | _MODE) << 16, 3  # of Unix
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--kernels", type=Path, default=ROOT / "build" / "kernels")
    parser.add_argument("--no-kernels", action="store_true", help="without edge-kernels, which takes long")
    parser.add_argument("--models", help="of edge-kernels, as edge compile --catalog takes them")
    parser.add_argument("--targets", help="likewise")
    chosen = parser.parse_args()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", *SOURCES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if changed:
        print(f"not what a commit has, but with your changes of:\n{changed}", file=sys.stderr)
    for pattern in OURS:  # of other versions: all that lies there is published
        for path in chosen.output.glob(pattern):
            path.unlink()
    kernels = None if chosen.no_kernels else chosen.kernels
    for path in build_all(chosen.output, kernels, chosen.models, chosen.targets):
        print(f"{path.stat().st_size:>12,} {path}")


if __name__ == "__main__":
    main()
