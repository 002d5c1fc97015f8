"""`edge export`: the folder that comes out, the program that a user builds with it, and what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, exhaustive
from fallbacks import write_undescribed
from runtime_library import build
from test_cli import edge, edge_json

from edge import export, load
from edge.apps.bundle import MODEL, prepare
from edge.apps.manifest import MANIFEST
from edge.backends.tvm.targets import choose_target
from edge.devices.profiles import find_profile
from edge.errors import BudgetError, EdgeError, InputError, UnsupportedError
from edge.model.model import open_model
from edge.options import Options

pytest.importorskip("tvm_ffi")

GGUF = GOLDEN / "llama-gqa-tied.gguf"
ISA = choose_target().name  # as tests of bundles have it: they share compiled code


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("made") / "chat"
    said = edge_json("export", str(GGUF), "--max-kv-size", "64", "--isa", ISA, "-o", str(folder), "--json")
    return folder, said


def test_folder_says_what_it_holds(made: tuple[Path, dict[str, Any]]) -> None:
    folder, said = made
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest.items() <= said.items()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    described = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    assert manifest["files"] == described
    assert files.keys() == {"README.md", "edge-mini", "edge.h", "example.c", "libedge.a", "libedge.so", MODEL}
    assert manifest["model"]["sha256"] == hashlib.sha256(GGUF.read_bytes()).hexdigest()
    assert (manifest["plan"]["kv_size"], manifest["isas"]) == (64, [ISA])
    assert manifest["plan"]["peak"] > manifest["plan"]["bytes"]["weights"] + manifest["plan"]["bytes"]["kv"]
    assert [path.name for path in folder.parent.iterdir()] == ["chat"]  # nothing temporary is left


def test_memory_limits_a_gpus_buffers_too() -> None:
    """A GPU's buffers are larger than what the CPU takes of a model as small as this one."""
    model, phone, limit = open_model(GOLDEN / "llama-gqa-tied.gguf"), find_profile("pixel-9"), Options(memory=20 << 20)
    prepare(model, phone, limit)
    with pytest.raises(BudgetError, match="needs 21 MiB, the memory budget is 20 MiB"):
        prepare(model, phone, limit, gpu=True)


def test_same_inputs_give_the_same_bytes(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = made
    again = export(GGUF, tmp_path / "again", max_kv_size=64, isas=[ISA])
    assert again == json.loads((folder / MANIFEST).read_text())


@pytest.mark.parametrize("static", [True, False], ids=["static", "shared"])
def test_example_answers_as_the_session_does(static: bool, made: tuple[Path, dict[str, Any]]) -> None:
    """Built as its README says."""
    folder, _ = made
    commands = re.findall(r"\bcc example\.c[^\n`]*", (folder / "README.md").read_text())
    subprocess.run(commands[not static], shell=True, cwd=folder, check=True)
    said = subprocess.run([folder / "chat", "-p", "Hi", "-n", "12"], capture_output=True, check=True).stdout
    with load(GGUF, max_kv_size=64, backend="cpu") as session:
        assert said.decode() == session.generate("Hi", max_tokens=12) + "\n"
    numbers = ("x", "0", "5x", "", "-5", "+5", " 5", "4294967297", "18446744073709551617")
    for wrong in (*(["-n", each] for each in numbers), ["-n"], ["-p"], ["--energy", "5"]):
        done = subprocess.run([folder / "chat", *wrong], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert (done.returncode, done.stdout, done.stderr[:11]) == (2, "", "usage: chat")
    with open("/dev/full", "w") as full:
        done = subprocess.run([folder / "chat", "-p", "Hi", "-n", "2"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "chat: stdout cannot be written\n")
    (folder / "chat").unlink()


TEXTS = {"words": "The quick brown fox. " * 100, "a word": "a" * 65000, "emoji": "\N{GRINNING FACE}" * 65000}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_program_stays_below_the_manifests_peak(text: str, made: tuple[Path, dict[str, Any]]) -> None:
    """Also while a long word is cut into tokens, after which a second for running them is enough."""
    folder, manifest = made
    whole = ["-Wl,--whole-archive", str(folder / "libedge.a"), "-Wl,--no-whole-archive"]
    command = [build(["answers.c"], whole), folder / MODEL, "40", "1"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert manifest["plan"]["bytes"]["weights"] < int(done.stderr) << 10 < manifest["plan"]["peak"]


MAIN = """
#include <cstdio>
int main(int, char **words)
{
    edge_source source = {sizeof source, words[1], -1, 0, 0};
    edge_model *model = nullptr;
    if (edge_open(&source, &model, nullptr))
        return 1;
    edge_usage use = {};
    use.size = sizeof use;
    edge_use(begin(model, 1).get(), &use, nullptr);
    std::printf("%u", use.capacity);
    return edge_close(model, nullptr);
}
"""


@pytest.mark.parametrize("way", ["pkg-config", exhaustive("cmake")])
def test_readme_builds_a_cpp_program(way: str, made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    if shutil.which(way) is None or shutil.which("c++") is None:
        pytest.skip(f"no {way}, or no C++ compiler")
    folder = tmp_path / "chat"
    folder.symlink_to(made[0])
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL))
    (tmp_path / "app.cpp").write_text(blocks["cpp"] + MAIN)
    if way == "cmake":
        project = "cmake_minimum_required(VERSION 3.10)\nproject(app CXX)\nadd_executable(app app.cpp)\n"
        (tmp_path / "CMakeLists.txt").write_text(project + blocks["cmake"])
        command = "cmake -B build . && cmake --build build && mv build/app ."
    else:
        (tmp_path / "edge.pc").write_text(blocks[""].replace("/opt/chat", str(folder)))
        command = (
            "PKG_CONFIG_PATH=. sh -c 'c++ -Wall -Wextra -Werror app.cpp $(pkg-config --cflags --libs edge) -o app'"
        )
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    environment = {"LD_LIBRARY_PATH": str(folder)}
    said = subprocess.run([tmp_path / "app", folder / MODEL], env=environment, capture_output=True, check=True).stdout
    assert said == b"64"


def test_older_bundle_is_replaced_by_force_alone(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """If it holds no files of others, neither before nor while the new one is made."""
    folder = tmp_path / "chat"
    shutil.copytree(made[0], folder)
    before = (folder / MODEL).read_bytes()

    def export_anew(says: str, **more: Any) -> None:
        with pytest.raises(InputError, match=says):
            export(GGUF, folder, max_kv_size=48, isas=[ISA], **more)
        assert (folder / MODEL).read_bytes() == before

    def add(step: str, part: float) -> None:
        (folder / "main.c").write_text("mine")

    export_anew("--force")
    (folder / "src").mkdir()
    for name in ("main.c", "src/a.c", "src/b.c", "src/c.c"):
        (folder / name).write_text("mine")
    export_anew(r"chat holds files of others \(main\.c, src/a\.c, src/b\.c, …\): move them", force=True)
    assert (folder / "src" / "c.c").read_text() == "mine"
    shutil.rmtree(folder / "src")
    (folder / "main.c").unlink()
    export_anew(r"\(main\.c\)", force=True, progress=add)
    (folder / "main.c").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["chat"]
    export(GGUF, folder, max_kv_size=48, isas=[ISA], force=True)
    assert (folder / MODEL).read_bytes() != before
    for damaged in ("", "[]", '{"files": 3}', None):
        (folder / MANIFEST).unlink() if damaged is None else (folder / MANIFEST).write_text(damaged)
        with pytest.raises(InputError, match="holds other files"):
            export(GGUF, folder, isas=[ISA], force=True)


REFUSED: list[tuple[dict[str, Any], type[EdgeError], str]] = [  # `model` among the options: another than GGUF
    ({"kv_policy": "tova"}, UnsupportedError, "no KV policy tova: choose auto, full, streaming, window, h2o, kvzap"),
    ({"kv_policy": "best"}, InputError, "unknown KV policy 'best'"),
    ({"backend": "llamacpp"}, InputError, "compiles with the cpu engine"),
    ({"prompt_cache": Path("x")}, UnsupportedError, "--prompt-cache"),
    ({"memory": "2MiB"}, BudgetError, "the smallest that fits is --memory 17MiB"),
    ({"isas": ["avx2", "neon"], "device": "raspberry-pi-5", "memory": "1GiB", "threads": 9}, InputError, "4 cores"),
    ({"isas": f"{ISA},sse9"}, UnsupportedError, "x86_64 has no instruction set 'sse9': choose avx"),
    ({"isas": []}, UnsupportedError, "x86_64 has no instruction set '': choose avx"),
    ({"energy": "5J"}, InputError, "a bundle has no --energy: an app states it for each answer, in edge_options"),
    ({"options": 3}, InputError, "options must be edge.Options, not 3: give single options by name"),
    ({"device": "toaster"}, InputError, "unknown device 'toaster'"),
    ({"device": "windows-x86", "memory": "2MiB", "max_kv_size": 64}, BudgetError, "needs"),
    ({"device": "windows-x86", "memory": "1GiB", "draft": GGUF, "max_kv_size": 16}, InputError,
     f"--draft {GGUF.name} has 16 KV rows, and apps draft with 23 or more: choose --max-kv-size 23 or more, or leave"),
    ({"device": "snapdragon-x-elite", "max_kv_size": 64}, UnsupportedError, "windows on aarch64: choose a device with"),
    ({"device": "pixel-9", "package": "swift"}, UnsupportedError, "no --package swift for android"),
    ({"package": "rust"}, InputError, "--package rust is unknown: choose swift, kotlin, web, c"),
    ({"aar": True}, InputError, "--aar is for the package kotlin, and this is c"),
    ({"abi": "x86_64"}, InputError, "beside an Android phone"),
    ({"sample": True}, UnsupportedError, "--sample makes projects for Android Studio and Xcode"),
    ({"npu": True, "kv_dtype": "int8"}, UnsupportedError, "--npu has no int8 KV rows: choose --kv-dtype f16, f32"),
    ({"npu": True, "kv_policy": "h2o"}, UnsupportedError, "--npu has no KV policies that look at rows"),
    ({"npu": True, "lora_rank": 8}, UnsupportedError, "--npu has no LoRA adapters"),
    ({"npu": True, "device": "web"}, UnsupportedError, "--npu is for linux, android, not for web"),
    ({"gpu": True, "kv_policy": "kvzap"}, EdgeError, "KV policies that look at rows (h2o, kvzap): choose"),
    ({"gpu": True, "model": "stablelm", "kv_dtype": "int4"}, EdgeError,
     "no int4 KV rows of heads of 16 values, 8 of them rotated"),
    ({"gpu": True, "model": "kimi-linear"}, EdgeError, "no latent attention: export without --gpu"),
    ({"gpu": True, "device": "web", "kv_policy": "h2o"}, EdgeError, "KV policies that look at rows (h2o, kvzap)"),
    ({"model": "encoders/bert", "lora_rank": 8}, UnsupportedError, "encoders have no room for adapters"),
    ({"model": "encoders/bert", "gpu": True}, UnsupportedError, "encoders"),
    ({"model": "encoders/bert", "npu": True}, UnsupportedError, "encoders"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "says"), REFUSED)
def test_impossible_exports_are_refused_before_compiling(
    options: dict[str, Any], error: type[EdgeError], says: str, tmp_path: Path
) -> None:
    model = GOLDEN / f"{options.get('model', GGUF.stem)}.gguf"
    with pytest.raises(error) as raised:
        export(model, tmp_path / "out", **{name: value for name, value in options.items() if name != "model"})
    assert says in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_models_that_apps_cannot_run_are_refused(tmp_path: Path) -> None:
    path = write_undescribed(tmp_path / "xverse.gguf")
    refused = edge("export", str(path), "-o", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert refused.stderr == "edge: xverse.gguf cannot be exported: xverse models run on llama.cpp only\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("device", "place", "needed"), [
    (
        "pixel-9", "edge/src/main/assets",
        {"README.md", "app/src/main/kotlin/com/example/chat/Chat.kt", "settings.gradle.kts",
         "c/edge.h", "c/libedge.a", "edge/build.gradle.kts",
         "edge/src/main/jniLibs/arm64-v8a/libedge.so", "edge/src/main/kotlin/edge/runtime/EdgeSession.kt"},
    ),
    (
        "iphone-16", "Sources/EdgeKit",
        {"Package.swift", "Sample/Chat.xcodeproj/project.pbxproj",
         "Sources/CEdge/include/edge.h", "Sources/CEdge/session.c", "Sources/CEdge/bundle.h",
         "Sources/CEdge/constants.h", "Sources/CEdge/passes.c", "Sources/CEdge/trusted.c",
         "Sources/CEdge/pass_dotprod.S", "Sources/CEdge/pass_eyes_dotprod.S"},
    ),
])  # fmt: skip
def test_phones_have_layouts_of_their_own(device: str, place: str, needed: set[str], tmp_path: Path) -> None:
    folder = tmp_path / "app"
    model, eyes = GOLDEN / "eyes" / "smolvlm.gguf", GOLDEN / "eyes" / "mmproj.gguf"
    manifest = export(model, folder, device=device, memory="200MiB", isas=["dotprod"], mmproj=str(eyes), sample=True)
    assert needed | {f"{place}/{MODEL}", f"{place}/eyes.edge"} <= manifest["files"].keys()
    if device == "iphone-16":
        assert '[.copy("model.edge"), .copy("eyes.edge")]' in (folder / "Package.swift").read_text()
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == manifest["files"].keys() | {MANIFEST}
    for source in (path for path in folder.rglob("*Options.*") if path.suffix in (".kt", ".swift")):
        assert "maxTokens" in source.read_text()
        assert "generated:" not in source.read_text()
