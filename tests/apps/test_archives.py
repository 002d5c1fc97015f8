"""Finished archives of the Kotlin API: what a build or a JVM finds in them. Their classes are compiled by Maven."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from bundles import model_of
from kotlin_programs import LIBRARIES, classpath, java_home

from edge import export
from edge.apps.archives import AAR, JAR, write_aar
from edge.backends.tvm.targets import choose_target

pytestmark = pytest.mark.exhaustive
MAVEN = pytest.mark.skipif(shutil.which("mvn") is None, reason="no Maven")

MODEL, ROWS = "llama-gqa-tied", {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
PROGRAM = """
import edge.runtime.*;

class Show {
    public static void main(String[] arguments) {
        EdgeModel model = EdgeModel.open(arguments[0]);
        EdgeOptions options = new EdgeOptions.Builder().maxTokens(5).temperature(0.0).engine(Engine.CPU).build();
        EdgeSession session = model.session(options);
        System.out.println(java.util.Arrays.toString(session.tokenize(arguments[1])) + session.usage().getEngine());
        model.close();
    }
}
"""


@MAVEN
def test_java_runs_the_jar_with_its_own_library(tmp_path: Path) -> None:
    java_home()
    if not LIBRARIES[0].exists():
        pytest.skip("no npm package kotlin-compiler in build/kotlin")
    kit, program = tmp_path / "kit", tmp_path / "Show.java"
    export(model_of(MODEL), kit, isas=[choose_target().name], package="kotlin", aar=True, **ROWS)
    program.write_text(PROGRAM)
    command = ["java", "-cp", classpath(kit / JAR, *LIBRARIES), str(program), str(kit / "model.edge"), "The fox"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{model_of(MODEL).tokenizer.encode('The fox').tolist()}CPU\n", done.stderr


@MAVEN
def test_aar_has_both_machines_and_the_same_bytes_again(tmp_path: Path) -> None:
    kit = tmp_path / "kit"
    export(model_of(MODEL), kit, device="pixel-9", isas=["neon"], abi="x86_64", aar=True, **ROWS)
    write_aar(kit / "edge", tmp_path / "again.aar")
    assert (tmp_path / "again.aar").read_bytes() == (kit / AAR).read_bytes()
    with zipfile.ZipFile(kit / AAR) as aar:
        assert aar.namelist() == [
            "AndroidManifest.xml", "R.txt", "assets/model.edge", "classes.jar", "jni/arm64-v8a/libedge.so",
            "jni/x86_64/libedge.so", "proguard.txt",
        ]  # fmt: skip
        machines = [aar.read(f"jni/{abi}/libedge.so")[18:20] for abi in ("arm64-v8a", "x86_64")]
        assert machines == [b"\xb7\0", b"\x3e\0"]  # of ELF: AArch64, x86-64
        aar.extract("classes.jar", tmp_path)
    with zipfile.ZipFile(tmp_path / "classes.jar") as classes:
        assert {"edge/runtime/EdgeSession.class", "edge/runtime/AndroidSensors.class"} <= {*classes.namelist()}
    assert os.path.getsize(tmp_path / "classes.jar") < 200_000
