"""Kotlin programs of tests, compiled with the npm package kotlin-compiler and run on a JVM that checks JNI calls."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import CACHE
from runtime_library import build

import edge
from edge.apps.bindings import EXPORTED, generated
from edge.storage.lock import file_lock

KOTLIN = Path(edge.__file__).parent / "apps" / "kotlin"
PROGRAMS = Path(__file__).parent / "kotlin"
COMPILER = Path(__file__).parents[2] / "build" / "kotlin" / "node_modules" / "kotlin-compiler"  # where `make` puts it
JAVA = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]  # a third less time for short runs
LIBRARIES = [COMPILER / "lib" / f"{name}.jar" for name in ("kotlin-stdlib", "kotlinx-coroutines-core-jvm")]


def java_home() -> Path:
    """Skips without a JDK."""
    javac = shutil.which("javac")
    if javac is None:
        pytest.skip("no JDK")
    return Path(javac).resolve().parents[1]


SERIALIZATION = tuple(f"org.jetbrains.kotlinx:kotlinx-serialization-{part}-jvm:1.8.1" for part in ("core", "json"))


def maven_jars(*names: str) -> list[Path]:
    """Jars of Maven's repository, by GROUP:NAME:VERSION[:TYPE[:CLASSIFIER]]; of AARs, their classes. Skips without
    Maven."""
    if shutil.which("mvn") is None:
        pytest.skip("no Maven")
    found, repository = [], Path.home() / ".m2" / "repository"
    for name in names:
        group, artifact, version, *more = name.split(":")
        kind, label = more[0] if more else "jar", "-".join([artifact, version, *more[1:]])
        path = repository / group.replace(".", "/") / artifact / version / f"{label}.{kind}"
        with file_lock(CACHE / "maven.lock"):
            if not path.exists():
                get = ["mvn", "-q", "-B", "dependency:get", "-Dtransitive=false", f"-Dartifact={name}"]
                subprocess.run(get, check=True, capture_output=True)
            if kind == "aar":
                path, archive = CACHE / "kotlin" / f"{label}.jar", path
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    path.write_bytes(zipfile.ZipFile(archive).read("classes.jar"))
        found.append(path)
    return found


@lru_cache
def compile_kotlin(
    *sources: Path, warnings: Sequence[str] = ("-Werror",), libraries: Sequence[Path] = (), target: str = "1.8"
) -> Path:
    """A jar of Kotlin and Java files and folders, in the tests' cache folder. Skips without a JDK and the compiler.
    libraries: beside Kotlin's own; with some, classes may be serializable and functions composable."""
    java_home()
    if not COMPILER.is_dir():
        pytest.skip("no npm package kotlin-compiler in build/kotlin")
    files = [file for each in sources for file in (sorted(each.rglob("*.[kj]*")) if each.is_dir() else [each])]
    if not libraries:
        files = [file for file in files if file.name != "Schemas.kt"]  # which wants kotlinx.serialization
    digest = hashlib.sha256(repr((warnings, libraries)).encode() + (COMPILER / "package.json").read_bytes())
    texts = [_text(file) for file in files]
    for file, text in zip(files, texts, strict=True):
        digest.update(file.name.encode() + b"\0" + text.encode())
    jar = CACHE / "kotlin" / f"{digest.hexdigest()[:24]}.jar"
    jar.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(jar.with_suffix(".lock")):  # other workers of pytest want it, too
        if jar.exists():
            return jar
        made = jar.with_name(f"{os.getpid()}.{jar.name}")
        trusting = ["-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"]  # a sixth of its time
        command = [*JAVA, *trusting, "-cp", str(COMPILER / "lib" / "kotlin-compiler.jar")]
        command += ["org.jetbrains.kotlin.cli.jvm.K2JVMCompiler", "-kotlin-home", str(COMPILER), "-no-reflect"]
        command += ["-jvm-target", target, "-cp", classpath(*LIBRARIES, *libraries), *warnings, "-d", str(made)]
        for name in ("kotlinx-serialization", "compose") if libraries else ():
            if name != "compose" or any("androidx" in f"{each}" or "compose" in f"{each}" for each in libraries):
                command.append(f"-Xplugin={COMPILER / 'lib' / f'{name}-compiler-plugin.jar'}")
        with TemporaryDirectory() as folder:
            for number, (file, text) in enumerate(zip(files, texts, strict=True)):
                place = Path(folder, f"{number}", file.name)
                place.parent.mkdir()
                place.write_text(text, encoding="utf-8")
                command.append(str(place))
            done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.rename(jar)
    return jar


def _text(file: Path) -> str:
    """A file as bundles have it."""
    name = file.relative_to(KOTLIN.parent).as_posix() if file.is_relative_to(KOTLIN.parent) else ""
    return generated(name) if name in EXPORTED else file.read_text(encoding="utf-8")


def classpath(*jars: Path) -> str:
    return os.pathsep.join(map(str, jars))


def run_kotlin(
    jar: Path, main: str, library: Path, *arguments: str, libraries: Sequence[Path] = ()
) -> dict[str, list[str]]:
    """What a program printed, as lines of NAME=VALUE. `library` becomes libedge.so."""
    folder = library.parent / f"{library.stem}.jni"
    folder.mkdir(exist_ok=True)
    name = folder / "libedge.so"
    if not name.exists():
        shutil.copy(library, folder / f"{os.getpid()}.so")
        (folder / f"{os.getpid()}.so").rename(name)
    command = [*JAVA, "-Xcheck:jni", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8"]
    command += ["--add-opens", "java.base/java.io=ALL-UNNAMED"]  # for the numbers of open files
    with TemporaryDirectory() as temporary:
        command += [f"-Djava.library.path={folder}", f"-Djava.io.tmpdir={temporary}"]
        command += ["-cp", classpath(jar, *LIBRARIES, *libraries), main, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    assert done.stderr == ""
    assert "WARNING" not in done.stdout, done.stdout[-2000:]  # of -Xcheck:jni
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name_, _, value = line.partition("=")
        said.setdefault(name_, []).append(value)
    return said


def run_with_bundle(main: str, bundle: Path, *arguments: object) -> dict[str, list[str]]:
    """What a program of PROGRAMS printed that gets model.edge of a bundle, and these arguments."""
    words = map(str, (bundle / "model.edge", *arguments))
    return run_kotlin(compile_kotlin(KOTLIN / "src", PROGRAMS), main, build_jni(bundle / "libedge.a"), *words)


def build_jni(*sources: str | Path) -> Path:
    """The binding and these files of the runtime as one library."""
    return build((*sorted((KOTLIN / "jni").glob("*.c")), *sources), ("-shared", "-fPIC"), ".so")
