"""The pass of exported models on an NPU, through ONNX Runtime: the same answers as the static graphs give in Python.

ONNX Runtime's own provider, which is the CPU, stands in for an NPU. The library is that of the Python package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import build_with, bundle_of, model_of
from conftest import exhaustive, run_child
from ctypes_bundle import BundleSession, open_bundle
from gpu_sessions import MODEL, PROMPT, ROWS, answers_in_c, ask_both, peak_in_c
from runtime_library import CHECKED, build

import edge
from edge.apps import bundle, npu_graphs
from edge.apps.bundle import export
from edge.apps.enums import Engine, Role
from edge.backends.onnx.providers import find_provider
from edge.backends.tvm.targets import choose_target
from edge.errors import EdgeError, EngineError, InputError, ModelFormatError, UnsupportedError
from edge.run.session import Session

onnxruntime = pytest.importorskip("onnxruntime")

LIBRARY = "libonnxruntime.so"


def installed_library() -> Path:
    (found,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    return found


def graphs_of(bundle: Path) -> Path:
    """The folder of a bundle's graphs, with ONNX Runtime beside them."""
    folder = bundle / "npu"
    with suppress(FileExistsError):  # other workers share the bundle
        (folder / LIBRARY).symlink_to(installed_library())
    return folder


@contextmanager
def sessions(name: str, **options: Any) -> Iterator[tuple[Session, BundleSession]]:
    folder = bundle_of(name, npu=True, **options)
    with (
        edge.load(model_of(name), backend="onnx", provider="cpu-static", speculate="off", **options) as python,
        open_bundle(folder) as bundle,
        bundle.session(engine=Engine.NPU, npu=str(graphs_of(folder))) as exported,
    ):
        yield python, exported


@pytest.mark.parametrize(("name", "options"), [
    (MODEL, {}),
    *(exhaustive(*each) for each in (
        (MODEL, {"kv_policy": "full", "max_kv_size": 512}),
        (MODEL, {"kv_dtype": "f32", "kv_policy": "window", "max_kv_size": 90}),  # which tiles do not divide
        ("gemma3", {}),  # rings
        ("llama-window", {}),  # windows in all layers
        ("gpt2", {}),  # learned positions, of which there are few
        ("phi3-longrope", {}),
        ("smollm3", {}),  # layers without RoPE
        ("mistral3", {}),  # temperatures
    )),
])  # fmt: skip
def test_answers_are_those_of_the_static_graphs_evictions_included(name: str, options: dict[str, Any]) -> None:
    few = name == "gpt2"
    with sessions(name, **ROWS | options) as (python, exported):
        for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
            ask_both(python, exported, 60 if few else 150, rewind=few, **sampling)
            if not few:
                ask_both(python, exported, 50, 2 * PROMPT, follow_up=True, **sampling)
        use = exported.use()
        assert (use["engine"], use["engine_why"]) == (Engine.NPU, "")
        assert use["gpu"] == f"ONNX Runtime {onnxruntime.__version__}, CPUExecutionProvider"
        assert use["evicted"] > 100 or (name, options) != (MODEL, {})


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(graphs_of(bundle_of(MODEL, npu=True, **ROWS)), tmp_path / "npu", symlinks=True))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _of_a_chunk(path: Path) -> None:
    shutil.copyfile(path.with_name("npu.0.0.onnx"), path)


@pytest.mark.parametrize(("name", "change", "error", "says"), [
    ("npu.0.0.onnx", Path.unlink, ModelFormatError, "cannot load npu.0.0.onnx (.*): copy the bundle's folder npu"),
    ("npu.0.1.onnx", _cut, ModelFormatError, "cannot load npu.0.1.onnx (.*): copy the bundle's folder npu"),
    ("npu.data", Path.unlink, ModelFormatError, "cannot load embed.onnx (.*): copy the bundle's folder npu"),
    ("npu.0.1.onnx", _of_a_chunk, EngineError, r"ONNX Runtime has failed \(.*invalid dimensions.*\): end"),
])  # fmt: skip
def test_damaged_graphs_are_an_error(
    copied: Path, name: str, change: Callable[[Path], object], error: type[EdgeError], says: str
) -> None:
    change(copied / name)
    with open_bundle(bundle_of(MODEL, npu=True, **ROWS)) as bundle:
        with pytest.raises(error, match=says) as found, bundle.session(engine=Engine.NPU, npu=str(copied)) as session:
            session.answer(PROMPT, Role.RAW)
        assert "\n" not in str(found.value)
        bundle.session(engine=Engine.NPU, npu=str(graphs_of(bundle_of(MODEL, npu=True, **ROWS)))).end()


def test_wrong_onnx_runtime_libraries_are_refused(tmp_path: Path) -> None:
    older = (
        "#include <stddef.h>\n"
        "static const void *api(unsigned version) { (void)version; return NULL; }\n"
        'static const char *version(void) { return "1.10.0"; }\n'
        "static const struct { const void *(*api)(unsigned); const char *(*version)(void); } base = {api, version};\n"
        "const void *OrtGetApiBase(void);\n"
        "const void *OrtGetApiBase(void) { return &base; }\n"
    )
    with open_bundle(bundle_of(MODEL, npu=True, **ROWS)) as bundle:
        for number, (text, says) in enumerate((
            (older, r"is version 1\.10\.0: bring ONNX Runtime 1\.\d+ or later with the app, or set engine to cpu"),
            ("int something;\n", "has no OrtGetApiBase: bring ONNX Runtime"),
        )):  # fmt: skip
            folder, source = tmp_path / str(number), tmp_path / "other.c"
            folder.mkdir()
            source.write_text(text)
            shutil.copyfile(build([source], ("-shared", "-fPIC"), ".so"), folder / LIBRARY)
            with pytest.raises(UnsupportedError, match=says):
                bundle.session(engine=Engine.NPU, npu=str(folder))
        with pytest.raises(InputError, match=r"engine npu needs edge_options\.npu: the path of the bundle's"):
            bundle.session(engine=Engine.NPU)


ALONE = """
import json, sys
from ctypes_bundle import open_bundle
with open_bundle(sys.argv[1]) as bundle:
    try:
        bundle.session(engine=3, npu=sys.argv[2])
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def test_missing_onnx_runtime_is_named(copied: Path) -> None:
    """The process must not have loaded the library before."""
    (copied / LIBRARY).unlink()
    child = run_child(ALONE, bundle_of(MODEL, npu=True, **ROWS), copied)
    assert child.output == [
        "UnsupportedError",
        "there is no libonnxruntime.so: bring ONNX Runtime 1.23 or later with the app, or set engine to cpu",
    ]


def test_bundles_without_graphs_refuse_the_npu_and_stay_small() -> None:
    plain, with_graphs = bundle_of(MODEL, **ROWS), bundle_of(MODEL, npu=True, **ROWS)
    with open_bundle(plain) as bundle, pytest.raises(UnsupportedError, match="no graphs for an NPU: export it with"):
        bundle.session(engine=Engine.NPU, npu="npu")
    library = (plain / "libedge.so").read_bytes()
    assert b"OrtGetApiBase" not in library
    more = (with_graphs / "libedge.so").stat().st_size - len(library)
    assert 0 < more < 40 << 10  # of code without optimizations, in whole pages


def test_process_without_python_stays_below_the_manifests_peak() -> None:
    folder = bundle_of(MODEL, npu=True, **ROWS)
    planned = json.loads((folder / "manifest.json").read_text())["npu"]["peak"]
    assert 8 << 20 < peak_in_c(folder, Engine.NPU, graphs_of(folder), 60) < planned


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, "gemma3"])
def test_sanitizers_find_nothing(name: str) -> None:
    model, program = build_with(("gpu_answers.c",), name, *CHECKED, npu=True, **ROWS)
    answers_in_c(program, model, Engine.NPU, graphs_of(model.parent), 60)


@pytest.mark.exhaustive
def test_qnn_as_a_plugin_gives_the_cpus_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Emulated: Qualcomm's library computes as the chip would, by graphs that it compiles here. In a process that has
    not registered the plugin."""
    qnn = pytest.importorskip("onnxruntime_qnn")
    provider, planned = find_provider("qnn").compiling_for(None), bundle.plan_graphs
    library, options = npu_graphs._PLUGINS["qnn"]
    chip = {name: provider.options[name] for name in ("soc_model", "htp_arch")}
    monkeypatch.setitem(npu_graphs._PLUGINS, "qnn", (library, options | chip))
    monkeypatch.setattr(bundle, "plan_graphs", lambda *a: replace(planned(*a), provider=provider, compiled=False))
    folder = tmp_path / "bundle"
    export(model_of(MODEL), folder, isas=[choose_target().name], npu=True, **ROWS)
    installed = Path(qnn.__file__).parent
    (graphs_of(folder) / library).symlink_to(installed / library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(installed))  # where the plugin looks for the chip's library
    program = build(["gpu_answers.c", folder / "libedge.so"], (f"-Wl,-rpath,{folder}",))
    answers_in_c(program, folder / "model.edge", Engine.NPU, graphs_of(folder), 60)


@pytest.mark.exhaustive
def test_phone_bundle_has_contexts_without_weights(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    if not shutil.which("aarch64-linux-gnu-gcc"):
        pytest.skip("no C compiler for aarch64")
    manifest = export(model_of(MODEL), tmp_path / "bundle", device="galaxy-s24", npu=True, **ROWS)
    assert manifest["npu"]["provider"] == "QNNExecutionProvider"
    (folder,) = (path.parent for path in (tmp_path / "bundle").rglob("embed.onnx"))
    assert (folder.parent / "model.edge").exists()
    assert {path.name for path in folder.iterdir()} == {
        "npu.0.bin", "npu.0.0.onnx", "npu.0.1.onnx", "embed.onnx", "npu.data",
    }  # fmt: skip
    whole = graphs_of(bundle_of(MODEL, npu=True, **ROWS))
    assert (folder / "npu.data").stat().st_size < (whole / "npu.data").stat().st_size
    found = [
        onnxruntime.InferenceSession(each / "embed.onnx").run(None, {"tokens": np.array([[1, 2, 250]])})
        for each in (folder, whole)
    ]
    np.testing.assert_array_equal(found[0], found[1])
