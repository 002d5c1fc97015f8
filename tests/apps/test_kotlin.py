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
from runtime_library import build

from edge import export
from edge.apps.archives import AAR, JAR, write_aar
from edge.apps.enums import Role
from edge.backends.tvm.targets import choose_target

MODEL, ROWS = "llama-gqa-tied", {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
BUSY = "the session is busy with an answer: cancel it or wait for its end"


@pytest.fixture(scope="module")
def echo() -> dict[str, list[str]]:
    """What Echo.kt of tests/apps/kotlin saw of echo.c, which answers with the question and counts wrong calls."""
    return run_kotlin(programs(), "edge.runtime.EchoKt", build_jni(PROGRAMS / "echo.c"))


@pytest.fixture(scope="module")
def phone() -> dict[str, list[str]]:
    """What Phone.kt of tests/apps/kotlin saw of Android.kt, on classes like Android's (android beside it)."""
    return run_kotlin(programs(), "edge.runtime.PhoneKt", build_jni(PROGRAMS / "echo.c"))


def programs() -> Path:
    """All Kotlin there is but the sample."""
    return compile_kotlin(KOTLIN / "src", PROGRAMS)


@pytest.mark.exhaustive
def test_kotlin_passes_every_field_on(echo: dict[str, list[str]]) -> None:
    assert echo["info"] == [
        "ModelInfo(name=echo 😀, license=MIT, policy=streaming, kvDtype=int8, isa=avx2, vocab=300, context=2048, "
        "capacity=256, threads=4, chat=true, weights=5000000000, kv=6, scratch=7, loraRank=8, dimensions=3)"
    ]
    # echo.c shows options in place of figures: threads, top_k, max_tokens, cpu_mask, seed, temperature to
    # repeat_penalty, bytes of the last stop text; speculate; time to headroom in one sum; engine, cache and npu.
    unseen = "encoder=31, pictures=32, pictureJoules=3.5, pictureSeconds=4.5)"
    memory, drafts = f"anonymous={5 << 32}, swapped=7", "drafted=1, accepted=0"
    measured = "joules=3002001.0, seconds=9321.0, measured=true"
    gpu = f"engine=GPU, engineWhy=timed 😀, gpu=files/ä, gpuBytes=208, gain=1.25, {unseen}"
    options = "Usage(rows=3, capacity=7, threads=9, weights=1099511627776, kv=-1, scratch=527750, lora=0, file=6"
    assert echo["unread"] == [
        f"{options}, {memory}, tokens=0, evicted=0, {drafts}, joules=0.0, seconds=9321.0, measured=false, {gpu}"
    ]
    assert echo["read"] == [f"{options}, {memory}, tokens=1, evicted=0, {drafts}, {measured}, {gpu}"]
    none = f"engine=AUTO, engineWhy=timed 😀, gpu=, gpuBytes=0, gain=1.25, {unseen}"
    defaults = "Usage(rows=0, capacity=-1, threads=0, weights=0, kv=0, scratch=-1110999, lora=0, file=0"
    assert echo["defaults"] == [
        f"{defaults}, {memory}, tokens=1, evicted=0, drafted=0, accepted=0, joules=3002001.0, seconds=0.0, "
        f"measured=true, {none}"
    ]
    assert echo["vector"] == [f"[4.0, {float('é'.encode()[-1])}, {3 + len('query') / 16}]"]
    assert echo["vectors"] == [f"{float(sum(range(100)) + 99 * ord('x') - 1)}"]
    assert (echo["form"], echo["free"]) == (["UNSUPPORTED: not enforced"], ["UNSUPPORTED: free"])
    assert echo["bias"] == ["BAD_ARGUMENT: biases"]
    assert (echo["tools"], echo["choice"]) == (["UNSUPPORTED: not these tools"], ["BAD_ARGUMENT: é"])
    assert echo["calls"] == ['[first f {"é": 1}, second f {"é": 1}]']
    assert echo["result"] == ["done"]
    assert echo["too few"] == ["dimensions is -1, but must not be negative"]
    assert echo["ids"] == [str([*"é".encode(), ord("a") + 1000])]
    assert echo["appended ids"] == [
        "[Piece(text=H, token=72, finish=GOING, done=2, asked=3), "
        "Piece(text=i, token=105, finish=GOING, done=2, asked=3), Piece(text=, token=-1, finish=EOS, done=2, asked=3)]"
    ]
    assert echo["loaded"] == ["later 😀"]
    # The last byte of its array, a hundred times its scale, and its descriptor plus one.
    assert echo["adapters"] == ["[98005000, 10008, 97010000, 0]"]
    assert echo["adapter"] == ["BAD_ARGUMENT: the scale is too large"]


def test_kotlin_passes_every_character_on(echo: dict[str, list[str]]) -> None:
    """Emoji and U+0000, with which JNI's own strings have trouble; half a surrogate pair is no character."""
    assert echo["echo"] == ["😀 𝄞 e\u0301 日本", "", "\0nul\0", "a?b", "100000"]


def test_kotlin_throws_errors_of_the_library(echo: dict[str, list[str]]) -> None:
    assert echo["missing"] == ["BAD_FILE: no file 😀 there"]
    assert echo["nul"] == ["the path contains the character U+0000"]
    assert echo["named"] == ["BAD_ARGUMENT: call answer, append Role.USER, set EdgeOptions.npu, not edge_other"]
    assert echo["stop"] == ["BAD_ARGUMENT: a stop has more than 128 bytes"]
    assert echo["stops"] == ["BAD_ARGUMENT: more than 16 stops"]
    assert echo["threads"] == ["threads is 0, but must be at least 1"]
    assert echo["nothing asked"] == ["BAD_ARGUMENT: nothing was asked"]
    assert echo["failed"] == ["FAILED: the model computed no number"]
    assert echo["failed finish"] == ["null"]
    assert echo["after"] == ["after"]
    assert echo["too long"] == ["FULL: the text is too long"]
    assert echo["rewind"] == ["UNSUPPORTED: rows were evicted"]


def test_closed_session_raises_an_error(echo: dict[str, list[str]]) -> None:
    assert echo["closed"] == ["the session is closed"]
    assert echo["closed answer"] == ["INTERRUPTED"]
    assert echo["model closed"] == ["the model is closed"]


def test_answers_are_cancelled_and_sessions_go_on(echo: dict[str, list[str]]) -> None:
    """An app takes fewer pieces, cancels the coroutine, calls `cancel`, or closes the session or the model."""
    assert echo["three"] == ["slo"]
    assert echo["three finish"] == ["INTERRUPTED"]
    assert echo["next"] == ["next"]
    assert echo["busy"] == echo["busy answer"] == [BUSY]
    assert echo["busy finish"] == ["null"]  # what was refused has not ended it
    assert echo["job"] == ["true INTERRUPTED"]
    assert echo["cancel"] == echo["close"] == ["true INTERRUPTED"]
    assert echo["left"] == ["INTERRUPTED"]


def test_kotlin_session_refuses_two_threads_and_use_after_end(echo: dict[str, list[str]]) -> None:
    assert echo["faults"] == ["0"]


def test_energy_is_current_times_voltage_or_unknown(phone: dict[str, list[str]]) -> None:
    assert phone["steady"] == ["[0.0, 4.0, 8.0]"]  # 1 A at 4 V
    assert phone["rising"] == ["[0.0, 8.0]"]  # from 4 W to 12 W
    assert phone["sign"] == ["[0.0, 2.0]"]
    assert phone["charging"] == ["[0.0, null, 0.0, 4.0]"]
    assert phone["milliamperes"] == phone["zero"] == ["[null]"]
    assert phone["unknown"] == phone["voltage"] == ["[null, null]"]
    assert phone["gap"] == ["[0.0, 0.0, 0.0]"]


def test_readings_come_from_the_sensors_of_android(phone: dict[str, list[str]]) -> None:
    assert phone["nothing"] == ["Readings(joules=null, celsius=null, headroom=null, available=700)"]
    assert phone["read"] == ["Readings(joules=4.0, celsius=31.5, headroom=0.5, available=0)"]  # 2 W for 2 s
    assert phone["asked"] == ["3"]  # thermal headroom, of five readings in two seconds
    assert phone["old"] == ["null"]  # Android 10 has no thermal headroom


def test_steps_are_reported_to_android_s_hint_session(phone: dict[str, list[str]]) -> None:
    """The target is the shortest step. Drafts (0 ms) and pauses (99 ms) are none; other threads get a new session."""
    first = "create [1, 2] true, ran 9000000, target 8000000, ran 8000000, ran 12000000"
    assert phone["steps"] == [f"[{first}]"]
    assert phone["others"] == ["[close, create [3] true, ran 9000000]"]
    assert phone["none"] == ["[close] []"]
    assert phone["refused"] == phone["before"] == ["[]"]
    assert phone["power"] == ["([], 0)"]


def test_session_closes_its_hints(phone: dict[str, list[str]]) -> None:
    """There are four tokens and an end; the first step has the prompt."""
    assert re.fullmatch(r"\(\[create, close\], [34]\) create \[100, 101\] true", phone["session"][0])
    assert re.fullmatch(r"\(\[create, close\], [34]\)", phone["set"][0])


def test_each_level_trims_also_while_an_answer_runs(phone: dict[str, list[str]]) -> None:
    assert phone["trims"] == ["[1000, 1000, 1000, 2000, 2000, 3000, 3000]"]
    assert phone["while answering"] == ["26013"]  # the trims before, 13 soft ones, and 13 tokens
    assert phone["closed"] == ["0 0"]


def test_assets_are_copied_once_and_whole(phone: dict[str, list[str]]) -> None:
    assert phone["no asset"] == ["model.edge []"]
    assert phone["broken"] == ["no space left []"]
    assert phone["copied"] == ["opened opened [1-model.edge] 1"]
    assert phone["updated"] == ["opened [2-model.edge] 2"]
    assert phone["eyes"] == ["rows [2-eyes.edge, 2-model.edge]"]


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
    seen = []
    for flags in ([f"-I{KOTLIN / 'jni'}"], [*include, *(f"-D{name}={theirs}" for name, theirs in tables.items())]):
        done = subprocess.run([build([program], flags)], check=True, capture_output=True, text=True)
        seen.append(done.stdout)
    assert seen[0] == seen[1]


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
