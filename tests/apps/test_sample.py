"""Projects of `edge export --sample`: compiled against AndroidX, run and drawn on a desktop; Swift without views."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jsonschema
import pytest
from bundles import bundle_of
from kotlin_programs import KOTLIN, SERIALIZATION, build_jni, compile_kotlin, maven_jars, run_kotlin
from PIL import Image
from small_models import Small, write_small
from test_swift import NEEDS_SWIFT, swift
from test_tool_grammar import MODELS

from edge import export
from edge.apps.archives import ANDROID_ONLY
from edge.backends.tvm.targets import choose_target
from edge.errors import UnsupportedError
from edge.model.model import open_model

MODEL, ROWS = "llama-gqa-tied", {"max_kv_size": 512, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
HERE = Path(__file__).parent / "sample"
PROJECT = KOTLIN / "project"
CHAT = PROJECT / "app" / "src" / "main" / "kotlin" / "com" / "example" / "chat"
SAMPLE = KOTLIN.parent / "swift" / "Sample"
ANDROID = (
    *(f"androidx.compose.{name}-android:1.9.4:aar" for name in (
        "ui:ui", "ui:ui-text", "ui:ui-unit", "ui:ui-graphics", "ui:ui-geometry", "ui:ui-util", "animation:animation",
        "animation:animation-core", "foundation:foundation", "foundation:foundation-layout",
    )),
    "androidx.compose.runtime:runtime-android:1.9.0:aar", "androidx.compose.runtime:runtime-saveable-android:1.7.0:aar",
    "androidx.compose.material3:material3-android:1.4.0:aar",
    "androidx.activity:activity:1.10.1:aar", "androidx.activity:activity-compose:1.10.1:aar",
    *(f"androidx.lifecycle:lifecycle-{name}-android:2.9.4:aar" for name in (
        "viewmodel", "viewmodel-savedstate", "runtime", "runtime-compose",
    )),
    "androidx.lifecycle:lifecycle-common-jvm:2.9.4", "androidx.savedstate:savedstate-android:1.3.0:aar",
    "androidx.core:core:1.16.0:aar", "androidx.core:core-ktx:1.16.0:aar",
    "androidx.annotation:annotation-jvm:1.9.1", "androidx.collection:collection-jvm:1.5.0",
    "org.robolectric:android-all:15-robolectric-13954326", *SERIALIZATION,
)  # fmt: skip
DESKTOP = (
    *(f"org.jetbrains.compose.{name}-desktop:1.8.2" for name in (
        "runtime:runtime", "runtime:runtime-saveable", "ui:ui", "ui:ui-text", "ui:ui-graphics", "ui:ui-unit",
        "ui:ui-geometry", "ui:ui-util", "ui:ui-backhandler", "foundation:foundation", "foundation:foundation-layout",
        "animation:animation", "animation:animation-core", "material3:material3", "material:material-ripple",
    )),
    "org.jetbrains.skiko:skiko-awt:0.9.4.2", "org.jetbrains.skiko:skiko-awt-runtime-linux-x64:0.9.4.2",
    "org.jetbrains.androidx.lifecycle:lifecycle-runtime-compose-desktop:2.8.4",
    "androidx.lifecycle:lifecycle-common-jvm:2.8.5", "androidx.lifecycle:lifecycle-runtime-desktop:2.8.5",
    "androidx.annotation:annotation-jvm:1.9.1", "androidx.collection:collection-jvm:1.5.0", *SERIALIZATION,
)  # fmt: skip


def test_sample_is_refused_where_there_is_none(tmp_path: Path) -> None:
    base = open_model(write_small(tmp_path / "base.gguf", Small()))
    with pytest.raises(UnsupportedError, match=r"--sample makes a chat, and .* has no chat template"):
        export(base, tmp_path / "kit", device="pixel-9", sample=True)


def test_projects_name_only_what_is_there() -> None:
    """Modules and classes of Gradle's and Android's files; objects and folders of Xcode's."""
    modules = re.findall(r'":(\w+)"', (PROJECT / "settings.gradle.kts").read_text())
    assert modules == ["app", "edge"]
    assert (PROJECT / "app" / "build.gradle.kts").exists()
    manifest = (PROJECT / "app" / "src" / "main" / "AndroidManifest.xml").read_text()
    (activity,) = re.findall(r'<activity\s+android:name="\.(\w+)"', manifest)
    assert f"class {activity} : ComponentActivity" in (CHAT / f"{activity}.kt").read_text()
    plugins = re.findall(r'id\("([\w.]+)"\) version', (PROJECT / "build.gradle.kts").read_text())
    used = [path.read_text() for path in (PROJECT / "app" / "build.gradle.kts", KOTLIN / "build.gradle.kts")]
    assert {name for text in used for name in re.findall(r'^ +id\("([\w.]+)"\)', text, re.M)} == {*plugins}
    text = (SAMPLE / "Chat.xcodeproj" / "project.pbxproj").read_text()
    assert text.count("{") == text.count("}")
    ids = re.findall(r"\b[0-9A-F]{24}\b", text)
    assert len(set(ids)) == len(re.findall(r"^\t\t[0-9A-F]{24} .*= \{$", text, re.M))
    assert all(ids.count(each) > 1 for each in ids)  # each is defined, and used
    (folder,) = re.findall(r"RootGroup;\s+path = (\w+);", text)
    assert "@main" in (SAMPLE / folder / "ChatApp.swift").read_text()


@pytest.mark.exhaustive
def test_app_compiles_against_androidx() -> None:
    libraries = tuple(maven_jars(*ANDROID))
    jar = compile_kotlin(KOTLIN / "src", CHAT, libraries=libraries, target="17")
    assert jar.stat().st_size > 100_000


@pytest.mark.exhaustive
def test_module_of_react_native_compiles(tmp_path: Path) -> None:
    """The code that is compiled is that of docs/first-app.md."""
    page = (Path(__file__).parents[2] / "docs" / "first-app.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```kotlin\n(package .*?)```", page, re.S)
    (tmp_path / "EdgeModule.kt").write_text(code, encoding="utf-8")
    libraries = tuple(maven_jars(*ANDROID, "com.facebook.react:react-android:0.81.4:aar:release"))
    compile_kotlin(KOTLIN / "src", tmp_path / "EdgeModule.kt", libraries=libraries, target="17")


@pytest.mark.exhaustive
def test_chat_asks_calls_fills_and_goes_on_and_is_drawn(tmp_path: Path) -> None:
    """Chat.kt with a model: a timer by a call, a form by a schema, the next process; ChatScreen.kt as a picture."""
    libraries = tuple(maven_jars(*DESKTOP))
    api = [path for path in sorted((KOTLIN / "src").rglob("*.kt")) if path.name not in ANDROID_ONLY]
    chat = [CHAT / f"{name}.kt" for name in ("Chat", "ChatScreen", "Turn")]
    jar = compile_kotlin(*api, *chat, HERE / "Draw.kt", libraries=libraries, target="17")
    path = write_small(tmp_path / "tools.gguf", Small(layers=2, vocab=280, context=4096), special=MODELS["hermes"])
    bundle = bundle_of(str(path), max_kv_size=3000, threads=2)
    library = build_jni(bundle / "libedge.a")
    said = run_kotlin(
        jar, "com.example.chat.DrawKt", library, str(bundle / "model.edge"), str(tmp_path), "draw", libraries=libraries
    )
    assert said["modes"] == ["[CHAT, TIMER, FORM]"]
    assert said["timer"] == ["true"]
    assert [line.endswith("true") for line in said["said"]] == [True, True, True]
    assert "[Name, People, Day, Outside]" in said["said"][2]
    assert said["stopped"] == ["INTERRUPTED"]
    assert said["booked"] == ["[Name, People, Day, Outside]"]
    assert said["restored"] == ["true true"]
    assert said["damaged"] == ["READY []"] * 4
    with Image.open(tmp_path / "chat.png") as picture:
        assert picture.size == (1080, 1920)
        assert len(picture.convert("RGB").getcolors(1 << 16) or []) > 20  # text, smoothed


@pytest.mark.exhaustive
def test_values_of_classes_match_their_schemas(tmp_path: Path) -> None:
    """What kotlinx.serialization writes of a class, by jsonschema; its schema in the C library."""
    libraries = tuple(maven_jars(*SERIALIZATION))
    api = [path for path in sorted((KOTLIN / "src").rglob("*.kt")) if path.name not in ANDROID_ONLY]
    jar = compile_kotlin(*api, HERE / "Values.kt", libraries=libraries, target="17")
    bundle = bundle_of(MODEL, **ROWS)
    library = build_jni(bundle / "libedge.a")
    said = run_kotlin(jar, "edge.runtime.ValuesKt", library, str(bundle / "model.edge"), libraries=libraries)
    (schema,) = map(json.loads, said["schema"])
    for value in map(json.loads, said["value"]):
        jsonschema.validate(value, schema)
    for wrong in ({}, {"minutes": "1"}, {**json.loads(said["value"][0]), "minutes": 601}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert said["filled"] == ["true", "true", "true"]
    assert said["refused"] == [
        "edge.runtime.Node contains itself, which schemas of classes lack",
        "kotlinx.serialization.Polymorphic<Open> is OPEN, which schemas of classes lack",
    ]
    assert json.loads(said["tool"][0])["function"]["parameters"] == schema


PACKAGE = """// swift-tools-version:5.9
import PackageDescription

let package = Package(
    name: "Sample",
    dependencies: [.package(path: "../kit")],
    targets: [
        .target(name: "Sample", dependencies: [.product(name: "EdgeKit", package: "kit")]),
        .testTarget(name: "SampleTests", dependencies: ["Sample", .product(name: "EdgeKit", package: "kit")]),
    ]
)
"""


@NEEDS_SWIFT
@pytest.mark.exhaustive
def test_swift_sample_runs_without_its_views(tmp_path: Path) -> None:
    """Conversation.swift on Linux, in language mode 6 without a warning; schemas of Codable types, by jsonschema."""
    path = write_small(tmp_path / "tools.gguf", Small(layers=2, vocab=280, context=4096), special=MODELS["hermes"])
    kit, app = tmp_path / "kit", tmp_path / "app"
    export(str(path), kit, package="swift", sample=True, isas=[choose_target().name], max_kv_size=3000, threads=2)
    (app / "Sources" / "Sample").mkdir(parents=True)
    (app / "Tests" / "SampleTests").mkdir(parents=True)
    shutil.copy(kit / "Sample" / "App" / "Conversation.swift", app / "Sources" / "Sample")
    shutil.copy(HERE / "ConversationTests.swift", app / "Tests" / "SampleTests")
    (app / "Package.swift").write_text(PACKAGE)
    words = ("test", "--package-path", "app", "-Xlinker", "--allow-shlib-undefined")
    said = swift(tmp_path, *words, flags=("-swift-version", "6", "-warnings-as-errors"))
    (schema,) = map(json.loads, re.findall(r"SCHEMA=(.*)", said))
    for value in map(json.loads, re.findall(r"VALUE=(.*)", said)):
        jsonschema.validate(value, schema)
    assert schema["properties"]["minutes"] == {"type": "integer", "minimum": 1, "description": '"how" long'}
