"""The Kotlin API and its JNI, on a desktop JVM with -Xcheck:jni, and finished archives of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import kotlin_programs
import pytest
from bundles import Answer, bundle_of, model_of, pair_of
from kotlin_programs import KOTLIN, LIBRARIES, PROGRAMS, build_jni, classpath, compile_kotlin, java_home, run_kotlin
from runtime_library import build, said_by

from edge import export
from edge.apps.archives import AAR, JAR, write_aar
from edge.apps.enums import Role
from edge.backends.tvm.targets import choose_target

MODEL, ROWS = "llama-gqa-tied", {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
BUSY = "the session is busy with an answer: cancel it or wait for its end"

# echo.c shows options in place of figures: threads, top_k, max_tokens, cpu_mask, seed, temperature to
# repeat_penalty, bytes of the last stop text; speculate; time to headroom in one sum; engine, cache and npu.
UNSEEN = "encoder=31, pictures=32, pictureJoules=3.5, pictureSeconds=4.5)"
MEMORY, DRAFTS = f"anonymous={5 << 32}, swapped=7", "drafted=1, accepted=0"
GPU = f"engine=GPU, engineWhy=timed 😀, gpu=files/ä, gpuBytes=208, gain=1.25, {UNSEEN}"
OPTIONS = "Usage(rows=3, capacity=7, threads=9, weights=1099511627776, kv=-1, scratch=527750, lora=0, file=6"
DEFAULTS = "Usage(rows=0, capacity=-1, threads=0, weights=0, kv=0, scratch=-1110999, lora=0, file=0"
ECHO = {
    "info": [
        "ModelInfo(name=echo 😀, license=MIT, policy=streaming, kvDtype=int8, isa=avx2, vocab=300, context=2048, "
        "capacity=256, threads=4, chat=true, weights=5000000000, kv=6, scratch=7, loraRank=8, dimensions=3)"
    ],
    "unread": [
        f"{OPTIONS}, {MEMORY}, tokens=0, evicted=0, {DRAFTS}, joules=0.0, seconds=9321.0, measured=false, {GPU}"
    ],
    "read": [
        f"{OPTIONS}, {MEMORY}, tokens=1, evicted=0, {DRAFTS}, joules=3002001.0, seconds=9321.0, measured=true, {GPU}"
    ],
    "defaults": [
        f"{DEFAULTS}, {MEMORY}, tokens=1, evicted=0, drafted=0, accepted=0, joules=3002001.0, seconds=0.0, "
        f"measured=true, engine=AUTO, engineWhy=timed 😀, gpu=, gpuBytes=0, gain=1.25, {UNSEEN}"
    ],
    "vector": [f"[4.0, {float('é'.encode()[-1])}, {3 + len('query') / 16}]"],
    "vectors": [f"{float(sum(range(100)) + 99 * ord('x') - 1)}"],
    "form": ["UNSUPPORTED: not enforced"],
    "free": ["UNSUPPORTED: free"],
    "bias": ["BAD_ARGUMENT: biases"],
    "tools": ["UNSUPPORTED: not these tools"],
    "choice": ["BAD_ARGUMENT: é"],
    "calls": ['[first f {"é": 1}, second f {"é": 1}]'],
    "result": ["done"],
    "too few": ["dimensions is -1, but must not be negative"],
    "ids": [str([*"é".encode(), ord("a") + 1000])],
    "appended ids": [
        "[Piece(text=H, token=72, finish=GOING, done=2, asked=3), "
        "Piece(text=i, token=105, finish=GOING, done=2, asked=3), Piece(text=, token=-1, finish=EOS, done=2, asked=3)]"
    ],
    "loaded": ["later 😀"],
    # The last byte of its array, a hundred times its scale, and its descriptor plus one.
    "adapters": ["[98005000, 10008, 97010000, 0]"],
    "adapter": ["BAD_ARGUMENT: the scale is too large"],
    # Emoji and U+0000, with which JNI's own strings have trouble; half a surrogate pair is no character.
    "echo": ["😀 𝄞 e\u0301 日本", "", "\0nul\0", "a?b", "100000"],
    # Errors of the library
    "missing": ["BAD_FILE: no file 😀 there"],
    "nul": ["the path contains the character U+0000"],
    "named": ["BAD_ARGUMENT: call answer, append Role.USER, set EdgeOptions.npu, not edge_other"],
    "stop": ["BAD_ARGUMENT: a stop has more than 128 bytes"],
    "stops": ["BAD_ARGUMENT: more than 16 stops"],
    "threads": ["threads is 0, but must be at least 1"],
    "nothing asked": ["BAD_ARGUMENT: nothing was asked"],
    "failed": ["FAILED: the model computed no number"],
    "failed finish": ["null"],
    "after": ["after"],
    "too long": ["FULL: the text is too long"],
    "rewind": ["UNSUPPORTED: rows were evicted"],
    "closed": ["the session is closed"],
    "closed answer": ["INTERRUPTED"],
    "model closed": ["the model is closed"],
    # An app takes fewer pieces, cancels the coroutine, calls `cancel`, or closes the session or the model.
    "three": ["slo"],
    "three finish": ["INTERRUPTED"],
    "next": ["next"],
    "busy": [BUSY],
    "busy answer": [BUSY],
    "busy finish": ["null"],  # what was refused has not ended it
    "job": ["true INTERRUPTED"],
    "cancel": ["true INTERRUPTED"],
    "close": ["true INTERRUPTED"],
    "left": ["INTERRUPTED"],
    "faults": ["0"],  # no call from two threads, and none after the end
}
PHONE = {
    # Energy is current times voltage, or unknown.
    "steady": ["[0.0, 4.0, 8.0]"],  # 1 A at 4 V
    "rising": ["[0.0, 8.0]"],  # from 4 W to 12 W
    "sign": ["[0.0, 2.0]"],
    "charging": ["[0.0, null, 0.0, 4.0]"],
    "milliamperes": ["[null]"],
    "zero": ["[null]"],
    "unknown": ["[null, null]"],
    "voltage": ["[null, null]"],
    "gap": ["[0.0, 0.0, 0.0]"],
    # Android's sensors
    "nothing": ["Readings(joules=null, celsius=null, headroom=null, available=700)"],
    "read": ["Readings(joules=4.0, celsius=31.5, headroom=0.5, available=0)"],  # 2 W for 2 s
    "asked": ["3"],  # thermal headroom, of five readings in two seconds
    "old": ["null"],  # Android 10 has no thermal headroom
    # Steps are told to a hint session, whose target is the shortest; drafts (0 ms) and pauses (99 ms) are none. Other
    # threads get a new one.
    "steps": ["[create [1, 2] true, ran 9000000, target 8000000, ran 8000000, ran 12000000]"],
    "others": ["[close, create [3] true, ran 9000000]"],
    "none": ["[close] []"],
    "refused": ["[]"],
    "before": ["[]"],
    "power": ["([], 0)"],
    # Each level trims, also while an answer runs.
    "trims": ["[1000, 1000, 1000, 2000, 2000, 3000, 3000]"],
    "while answering": ["26013"],  # the trims before, 13 soft ones, and 13 tokens
    "closed": ["0 0"],
    # Assets are copied once, and whole.
    "no asset": ["model.edge []"],
    "broken": ["no space left []"],
    "copied": ["opened opened [1-model.edge] 1"],
    "updated": ["opened [2-model.edge] 2"],
    "eyes": ["rows [2-eyes.edge, 2-model.edge]"],
}


def run_with_echo(program: str) -> dict[str, list[str]]:
    """What a program of tests/apps/kotlin saw of echo.c, which answers with the question and counts wrong calls."""
    return run_kotlin(compile_kotlin(KOTLIN / "src", PROGRAMS), program, build_jni(PROGRAMS / "echo.c"))


def test_kotlin_passes_all_on_in_both_directions() -> None:
    seen = run_with_echo("edge.runtime.EchoKt")
    assert {name: seen.get(name) for name in ECHO} == ECHO


def test_android_s_classes_are_read_and_told() -> None:
    """By doubles of them, which lie in tests/apps/kotlin/android."""
    seen = run_with_echo("edge.runtime.PhoneKt")
    assert {name: seen.get(name) for name in PHONE} == PHONE
    # A session closes its hints. There are four tokens and an end; the first step has the prompt.
    assert re.fullmatch(r"\(\[create, close\], [34]\) create \[100, 101\] true", seen["session"][0])
    assert re.fullmatch(r"\(\[create, close\], [34]\)", seen["set"][0])


def test_kotlin_answers_are_those_of_python(tmp_path: Path) -> None:
    """Token by token: greedy and drawn, follow-ups, saved states, rewound and cancelled answers."""
    pytest.importorskip("tvm_ffi")
    said = kotlin_programs.run_with_bundle("edge.runtime.BundleKt", bundle_of(MODEL, **ROWS), tmp_path)
    warm = {"temperature": 3.0, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "repeat_penalty": 1.3}
    greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": 1}
    with pair_of(MODEL, **ROWS) as pair:
        first = pair.ask("Hi", **greedy)
        second = pair.ask("And?", seed=4, max_tokens=6, ignore_eos=1, **warm)
        third = pair.ask("Go on", **greedy)
        pair.forget()
        system = pair.ask("Hi", system="Be brief.", **greedy)
        ids = pair.python.model.tokenizer.encode("The 😀 fox").tolist()
        pair.forget()
        pair.ask("Hi", **greedy)
        pair.exported.append(Role.USER, "unanswered")
        pair.exported.set(**greedy)
        again = pair.exported.answer("And?")
    assert said["first"] == [line(first)] * 4
    assert said["prompt"] == ["[16] true INTERRUPTED true"]
    assert said["never"] == ["INTERRUPTED true"]
    assert said["again"] == [line(again)]
    assert said["second"] == [line(second)] * 2
    assert said["third"] == [line(third)] * 2
    assert said["system"] == [line(system)]
    assert said["ids"] == [str(ids)]
    assert said["rows"][0].endswith(" 128")
    assert said["taken"] == ["INTERRUPTED"]
    assert said["closed"] == ["true INTERRUPTED"]
    assert said["busy"] == ["0 true"]
    assert said["no model"] == ["BAD_FILE"]
    assert "policy=streaming" in said["info"][0]


def line(answer: Answer) -> str:
    tokens, text, finish = answer
    return f"{tokens} {finish.name} {text.encode().hex()}"


def test_our_part_of_jni_is_that_of_the_jdk(tmp_path: Path) -> None:
    """Each function lies where the JDK's header has it."""
    include = [f"-isystem{java_home() / 'include' / each}" for each in ("", "linux")]
    text, program = (KOTLIN / "jni" / "jni.h").read_text(encoding="utf-8"), tmp_path / "layouts.c"
    tables = {"jni_functions": "JNINativeInterface_", "vm_functions": "JNIInvokeInterface_"}
    ours = {name: re.findall(r"\(\*(\w+)\)\(", text.split(f"struct {name} {{")[1].split("};")[0]) for name in tables}
    assert len(ours["jni_functions"]) > 15
    shown = [
        f'printf("{function} %zu\\n", offsetof(struct {name}, {function}));'
        for name, functions in ours.items() for function in functions
    ]  # fmt: skip
    includes = "".join(f"#include <{each}.h>\n" for each in ("jni", "stddef", "stdio"))
    program.write_text(includes + "int main(void)\n{\n" + "\n".join(shown) + "\nreturn 0;\n}\n")
    theirs = [*include, *(f"-D{name}={structure}" for name, structure in tables.items())]
    assert said_by(build([program], [f"-I{KOTLIN / 'jni'}"])) == said_by(build([program], theirs))


# Finished archives, whose classes are compiled by Maven

MAVEN = pytest.mark.skipif(shutil.which("mvn") is None, reason="no Maven")

JAVA = """
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
@pytest.mark.exhaustive
def test_java_runs_the_jar_with_its_own_library(tmp_path: Path) -> None:
    java_home()
    if not LIBRARIES[0].exists():
        pytest.skip("no npm package kotlin-compiler in build/kotlin")
    kit, program = tmp_path / "kit", tmp_path / "Show.java"
    export(model_of(MODEL), kit, isas=[choose_target().name], package="kotlin", aar=True, **ROWS)
    program.write_text(JAVA)
    command = ["java", "-cp", classpath(kit / JAR, *LIBRARIES), str(program), str(kit / "model.edge"), "The fox"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{model_of(MODEL).tokenizer.encode('The fox').tolist()}CPU\n", done.stderr


@MAVEN
@pytest.mark.exhaustive
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
