"""Finished archives of the Kotlin API: an AAR for Android, a JAR for desktop JVMs.

Both are zips, with the same bytes for the same inputs; the classes are compiled once by Maven, whose downloads (250 MB)
need the network the first time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path

from edge.apps.bindings import copy_source
from edge.devices.output import work_folder
from edge.devices.profiles.profile import DeviceProfile
from edge.errors import EngineError, InputError, UnsupportedError
from edge.storage import cache

KOTLIN = Path(__file__).parent / "kotlin"
AAR, JAR = "edge.aar", "edge.jar"
ANDROID_ONLY = ("Android.kt",)  # of the API's files
EMULATOR = "x86_64"  # an ABI of Android
Entry = tuple[str, bytes | Path]


def check_archive(profile: DeviceProfile, package: str, abi: str | None, *, aar: bool) -> None:
    """Raise InputError or UnsupportedError for a second ABI or a finished archive that there is not."""
    if abi is not None and (profile.system != "android" or abi != EMULATOR):
        raise InputError(f"--abi {abi}: it is {EMULATOR} beside an Android phone's own, for emulators: leave it out")
    if aar and package != "kotlin":
        raise InputError(
            f"--aar is for the package kotlin, and this is {package}: leave it out"
            + (", or add --package kotlin" if profile.system != "web" else "")
        )
    if aar:
        check_maven()


def check_maven() -> None:
    """Raise UnsupportedError without Maven or a JDK."""
    for program in ("mvn", "javac"):
        if shutil.which(program) is None:
            raise UnsupportedError(
                f"--aar compiles Kotlin by Maven, and there is no {program}: install Maven and a JDK 17"
            )


def write_aar(module: Path, out: Path) -> None:
    """An AAR of a module of Gradle: `implementation(files("libs/edge.aar"))`. Raises EngineError if Maven fails."""
    main = module / "src" / "main"
    others: list[Entry] = [
        ("AndroidManifest.xml", b'<manifest package="edge.runtime"><uses-sdk android:minSdkVersion="26" '
         b'xmlns:android="http://schemas.android.com/apk/res/android" /></manifest>\n'),
        ("R.txt", b""), ("proguard.txt", module / "consumer-rules.pro"), ("classes.jar", _classes(android=True)),
    ]  # fmt: skip
    files = [
        (f"jni/{path.relative_to(main / 'jniLibs').as_posix()}", path) for path in (main / "jniLibs").rglob("*.so")
    ]
    files += [
        (f"assets/{path.relative_to(main / 'assets').as_posix()}", path) for path in (main / "assets").rglob("*.*")
    ]
    _write_zip(out, [*others, *files])


def write_jar(module: Path, out: Path) -> None:
    """A JAR with the classes and the library in it. Raises EngineError if Maven fails."""
    resources = module / "src" / "main" / "resources"
    files = [(path.relative_to(resources).as_posix(), path) for path in resources.rglob("*.so")]
    with zipfile.ZipFile(_classes(android=False)) as classes:
        _write_zip(out, [*((name, classes.read(name)) for name in classes.namelist()), *files])


def _classes(*, android: bool) -> Path:
    """A jar of the compiled API, from the cache."""
    sources = [each for each in sorted((KOTLIN / "src").rglob("*.kt")) if android or each.name not in ANDROID_ONLY]
    with work_folder() as work:
        (work / "src").mkdir()
        for source in sources:
            copy_source(source, work / "src" / source.name)
        copy_source(KOTLIN / "pom.xml", work / "pom.xml")
        digest = hashlib.sha256()
        for path in [work / "pom.xml", *sorted((work / "src").iterdir())]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())

        def compile_classes(out: Path) -> None:
            done = subprocess.run(
                ["mvn", "-q", "-B", "-Dstyle.color=never", "compile"], cwd=work, capture_output=True, text=True,
                env=os.environ | {"MAVEN_OPTS": "-Xmx1g"},
            )  # fmt: skip
            classes = work / "target" / "classes"
            if done.returncode or not classes.is_dir():
                said = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line] or ["no reason"]
                raise EngineError(f"Maven could not compile the Kotlin API: {said[0]}")
            _write_zip(
                out, [(path.relative_to(classes).as_posix(), path) for path in classes.rglob("*") if path.is_file()]
            )

        return cache.find_or_make("kernels", digest.hexdigest()[:32], ".jar", compile_classes, about="Kotlin API")


def _write_zip(out: Path, entries: Iterable[Entry]) -> None:
    """In the order of names, without times."""
    with zipfile.ZipFile(out, "w", allowZip64=True) as made:
        for name, content in sorted(entries, key=lambda each: each[0]):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            packed = name.endswith((".class", ".xml", ".txt", ".so"))  # a model is as small as it gets
            info.compress_type = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
            if isinstance(content, bytes):
                made.writestr(info, content)
            else:
                info.file_size = content.stat().st_size
                with content.open("rb") as source, made.open(info, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
