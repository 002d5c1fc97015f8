"""Compiling for another device: the folder that comes out, and a device without a compiler that takes it over."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Child, exhaustive, open_golden, run_child
from small_models import Small, write_small
from test_cli import edge, edge_json

pytest.importorskip("tvm_ffi")

from edge.apps.bundle import prepare
from edge.backends.counts import Tuned
from edge.backends.tvm import sources, targets
from edge.backends.tvm.cpu.elf import parse
from edge.backends.tvm.cpu.generator import build
from edge.backends.tvm.cpu.linker import link
from edge.backends.tvm.cpu.lowering import compile_object
from edge.backends.tvm.cpu.phases import kinds
from edge.backends.tvm.design import Design
from edge.backends.tvm.export import FILES
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.packing.weights import open_weights
from edge.backends.tvm.targets import TARGETS, choose_target
from edge.backends.tvm.tuning import lookup
from edge.backends.tvm.tuning.lookup import find_tuned_for, make_subject
from edge.devices.profiles import HOST, find_profile, profile_names
from edge.devices.records import Record, record_name, write_record
from edge.errors import UnsupportedError
from edge.model.model import open_model
from edge.options import Options

MODEL = Path(__file__).parents[1] / "golden" / "llama-one-layer.gguf"

# A device without TVM: what it would import is not there.
WITHOUT_TVM = """
import json, os, sys
sys.modules |= dict.fromkeys(("tvm", "tvm_ffi"))
from edge.cli import run_command

output, sys.stdout = sys.stdout, open(os.devnull, "w")
sys.argv[0] = "edge"
status = run_command()
print(json.dumps(status), file=output)
"""


def compile_model(folder: Path, *more: str, device: str = HOST) -> Any:
    return edge_json("compile", str(MODEL), "--device", device, "-o", str(folder), "--json", *more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this machine, by a path relative to where we are."""
    folder = tmp_path_factory.mktemp("made") / "folder"
    compile_model(Path(os.path.relpath(folder)), "--weights")
    return folder


def test_key_of_pass_hashes_all_its_sources() -> None:
    root = Path(sources.__file__).parent
    files = [
        file
        for name in sources.PASS
        for file in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))
    ]
    imported = {
        root / f"{module.replace('.', '/')}.py"
        for file in files
        for module in re.findall(r"^ *from edge\.backends\.tvm\.([\w.]+) import", file.read_text(), re.MULTILINE)
    }
    assert {file for file in imported if file.exists()} - set(files) == set()


# Devices


@pytest.mark.parametrize("name", profile_names())
def test_every_device_has_a_target(name: str) -> None:
    from tvm.target import Target
    from tvm.target.codegen import llvm_get_cpu_archlist

    profile = find_profile(name)
    assert (profile.name, bool(profile.description)) == (name, True)
    if profile.system in ("ios", "macos", "web", "windows"):
        assert (profile.isa, profile.cpu) == (None, None)
    elif name != HOST:
        target = next(target for target in TARGETS if target.name == profile.isa)
        assert target.machine == profile.machine
        cpus = llvm_get_cpu_archlist(Target({"kind": "llvm", "mtriple": target.llvm["mtriple"]}))
        assert profile.cpu in map(str, cpus)
        assert all(source.startswith("https://") for source in profile.sources)


@pytest.mark.parametrize(
    ("machine", "flags", "isa"),
    [
        ("aarch64", "fp asimd crc32", "neon"),
        ("aarch64", "fp asimd asimddp", "dotprod"),
        ("aarch64", "fp asimd asimddp i8mm bf16", "i8mm"),
        ("x86_64", "sse2", "generic"),
        ("x86_64", "avx2 fma f16c", "avx2"),
        ("x86_64", "avx2 fma f16c avx_vnni", "avxvnni"),
    ],
)
def test_best_that_a_cpu_has_is_chosen(monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, isa: str) -> None:
    monkeypatch.delenv("EDGE_ISA", raising=False)
    monkeypatch.setattr(targets.platform, "machine", lambda: machine)
    monkeypatch.setattr(targets, "_cpu_flags", lambda: frozenset(flags.split()))
    assert targets.choose_target().name == isa
    better = {"aarch64": "i8mm", "x86_64": "avx512vnni"}[machine]
    if isa != better:
        with pytest.raises(UnsupportedError, match=f"no {better}: choose {isa}"):
            targets.choose_target(better)
    if machine == "aarch64":  # of which macOS keeps a register to itself
        monkeypatch.setattr(targets.platform, "system", lambda: "Darwin")
        monkeypatch.setattr(targets.platform, "machine", lambda: "arm64")
        assert "+reserve-x18" in targets.choose_target().llvm["mattr"]


@pytest.mark.parametrize(("system", "machine"), [("Linux", "riscv64"), ("Darwin", "x86_64"), ("Windows", "ARM64")])
def test_other_systems_are_sent_to_llama_cpp(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(targets.platform, "system", lambda: system)
    monkeypatch.setattr(targets.platform, "machine", lambda: machine)
    with pytest.raises(UnsupportedError, match=f"{system}.*{machine}.*llamacpp"):
        targets.choose_target()


@pytest.mark.parametrize(
    ("system", "machine", "isa"), [exhaustive("Darwin", "arm64", "dotprod"), ("Windows", "AMD64", "avx2")]
)
def test_code_for_other_computers_calls_their_functions(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, isa: str
) -> None:
    """No function is called that the system lacks."""
    monkeypatch.setattr(targets.platform, "system", lambda: system)
    monkeypatch.setattr(targets.platform, "machine", lambda: machine)
    monkeypatch.setattr(targets, "_cpu_flags", lambda: frozenset(["avx2", "fma", "f16c", "asimddp"]))
    target = targets.choose_target()
    monkeypatch.undo()
    assert target.name == isa
    model = open_golden("llama-one-layer").model
    design = replace(Design.of(make_layout(model.file, model.spec), "f16", target), timed=True)
    program = build(design)
    data = compile_object(program.entries, program.functions, target)
    _, imports, _ = parse(link([data]))
    called = {
        "Darwin": {"__ulock_wait", "__ulock_wake", "clock_gettime"},
        "Windows": {"WaitOnAddress", "WakeByAddressAll", "QueryPerformanceCounter", "QueryPerformanceFrequency"},
    }[system]
    assert set(imports) == called | {"TVMFFIErrorSetRaisedFromCStrParts"}


# The folder


@pytest.mark.slow
def test_folder_says_what_it_holds(made: Path) -> None:
    about = json.loads((made / "design.json").read_text())
    assert {path.name for path in made.iterdir()} == set(FILES)
    for name in ("run.o", "run.img", "weights.bin"):
        data = (made / name).read_bytes()
        assert about["files"][name] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert (made / "run.img").read_bytes() == link([(made / "run.o").read_bytes()])
    model = open_golden("llama-one-layer").model
    packed = open_weights(model.file, make_layout(model.file, model.spec)).bytes
    np.testing.assert_array_equal(np.fromfile(made / "weights.bin", np.uint8), packed)
    assert about["device"]["name"] == HOST
    assert about["design"]["kv_dtype"] == "f16"
    assert {"edge", "apache-tvm"} <= set(about["versions"])
    assert [path.name for path in made.parent.iterdir()] == ["folder"]  # nothing temporary is left


@pytest.mark.slow
def test_folder_is_renewed_unless_it_holds_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "weights.bin").write_text("of another time")
    compile_model(folder, device="generic-x86")
    assert {path.name for path in folder.iterdir()} == {"run.o", "run.img", "design.json"}
    if targets.choose_target().name != "generic":
        assert "EDGE_ISA=generic" in edge("cache", "add", str(folder)).stdout
    (folder / "diary").write_text("dear")
    before = (folder / "run.img").read_bytes()
    refused = edge("compile", str(MODEL), "--device", "steam-deck", "-o", str(folder))
    assert (refused.returncode, "diary" in refused.stderr, "--force" in refused.stderr) == (2, True, True)
    assert (folder / "run.img").read_bytes() == before
    assert (folder / "diary").read_text() == "dear"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "toaster", "-o", "OUT"], "unknown device 'toaster': choose host, "),
        (["--device", "iphone-16", "-o", "OUT"], "use edge export --device iphone-16"),
        (["--device", "host", "-o", "OUT", "--kv-dtype", "q4"], "choose f16, int8"),
        (["--device", "host", "-o", str(MODEL)], "is a file"),
        (["--device", "host", "-o", str(MODEL / "out")], "cannot be written"), (["--device", "host"], "--output"),
        (["-o", "OUT"], "--device NAME.*--gpu LANGUAGE"),
        (["--device", "host", "--gpu", "wgsl", "-o", "OUT"], "give one of them"),
        (["--gpu", "glsl", "-o", "OUT"], "wgsl, opencl, cuda, metal, not 'glsl'"),
        (["--gpu", "wgsl", "--kv-dtype", "q8_0", "-o", "OUT"], "q8_0.*f16, int8, int4, f32"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(tmp_path: Path, args: list[str], says: str) -> None:
    done = edge("compile", str(MODEL), *[arg.replace("OUT", str(tmp_path / "out")) for arg in args])
    assert done.returncode == 2
    assert re.search(says, done.stderr)
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# A device without a compiler


@pytest.mark.slow
def test_device_without_compiler_runs_added_passes(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Path) -> Child:
        return run_child(WITHOUT_TVM, "run", model, "-p", "Hi", "-n", "5", "--raw", "--backend", "cpu")

    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    before = run(MODEL)
    assert (before.output, "apache-tvm is not installed" in before.errors) == (2, True)
    tuned, about = shutil.copytree(made, tmp_path / "tuned"), json.loads((made / "design.json").read_text())
    values = {"step_block": about["design"]["target"]["step_block"]}  # as its image has it
    about["tuned"] = {"about": "theirs", "values": values, "chunk": 32}
    (tuned / "design.json").write_text(json.dumps(about))
    assert run_child(WITHOUT_TVM, "cache", "add", tuned).output == 0
    with monkeypatch.context() as patch:
        patch.setattr(lookup, "is_installed", lambda: False)
        found = lookup.find_tuned(open_model(MODEL).spec, "f16")
    assert found == Tuned("theirs (compiled elsewhere)", values, None, 32)
    assert run(MODEL).output == 0
    other = run(MODEL.with_name("llama-gqa-tied.gguf"))
    assert (other.output, "apache-tvm is not installed" in other.errors) == (2, True)
    cleared = run_child(WITHOUT_TVM, "cache", "clear")
    assert " kept: kernels, which cannot be made here again without a compiler" in cleared.errors
    assert run(MODEL).output == 0
    assert run_child(WITHOUT_TVM, "cache", "clear", "--kind", "kernels").output == 0
    assert run(MODEL).output == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["nothing", "image", "header", "version", "machine", "description", "design", "tuned"]
)
def test_damaged_and_foreign_designs_are_refused(made: Path, tmp_path: Path, damage: str) -> None:
    about = json.loads((made / "design.json").read_text())
    image = (made / "run.img").read_bytes()
    if damage == "image":
        image = image[:-1] + b"?"
    if damage == "header":  # whose checksum is right: anyone can make one
        image = image.replace(b'"entries"', b'"Entries"')
        about["files"]["run.img"] = {"bytes": len(image), "sha256": hashlib.sha256(image).hexdigest()}
    if damage == "design":
        about["design"]["target"] |= {"name": ["generic"], "flags": [1, "a"]}
    if damage == "tuned":
        about["tuned"] = {"about": "mine", "values": {"spins": 100_000}, "chunk": None}
    if damage == "version":
        about["source"] = "another"
    if damage == "machine":
        about["design"]["target"]["name"] = "neon"
    if damage != "nothing":
        (tmp_path / "run.img").write_bytes(image)
        (tmp_path / "design.json").write_text("[]" if damage == "description" else json.dumps(about))
    done = edge("cache", "add", str(tmp_path))
    says = {
        "header": "run.img is no compiled pass: its header is damaged",
        "image": "copy the folder again",
        "version": "another version",
        "machine": "no neon",
        "tuned": "does not say how its image was tuned",
    }
    assert done.returncode == 2
    assert says.get(damage, "holds nothing that edge compile has made") in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_records_of_another_device_are_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_TUNING", str(tmp_path))
    model, board = open_model(MODEL), "raspberry-pi-5"
    subject = replace(
        make_subject(model.spec, choose_target(), "f16"), cpu=board, family=board, isa=find_profile(board).isa or ""
    )
    name, values = record_name(subject, "golden"), {"step_block": 16, "threads": 4}
    write_record(
        Record(name, "host", subject, "golden", "a prompt", values, "tuned", 1.2, None, 5, 9.0, "2026-11-22", {})
    )
    found = find_tuned_for(model.spec, "f16", board, "dotprod")
    assert found is not None
    assert (name in found.about, found.values, found.threads) == (True, {"step_block": 16}, None)
    bundle = prepare(model, find_profile(board), Options())  # of edge export
    assert {each.target.name: each.target.step_block for each in bundle.designs} == {
        "i8mm": 8,
        "dotprod": 16,
        "neon": 8,
    }
    for other in (("f16", "raspberry-pi-5", "neon"), ("int8", "raspberry-pi-5", "dotprod"), ("f16", "pixel-9", "i8mm")):
        assert find_tuned_for(model.spec, *other) is None


# GPUs


@pytest.mark.slow
def test_gpu_folder_holds_program_and_weights(tmp_path: Path) -> None:
    from edge.backends.tvm.gpu.hosts import PORTABLE
    from edge.backends.tvm.gpu.program import Program
    from edge.backends.tvm.gpu.weights import make_weights, pack_weights

    golden, folder = open_golden("llama-one-layer"), tmp_path / "gpu"
    about = edge_json("compile", str(MODEL), "--gpu", "wgsl", "-o", str(folder), "--weights", "--json")
    assert {path.name for path in folder.iterdir()} == {"program.json", "weights.bin", "design.json"}
    assert json.loads((folder / "design.json").read_text()).items() <= about.items()
    raw = {name: (folder / name).read_bytes() for name in about["files"]}
    described = {name: {"bytes": len(each), "sha256": hashlib.sha256(each).hexdigest()} for name, each in raw.items()}
    assert described == about["files"]

    program = Program.from_json(raw["program.json"].decode())
    assert {"step", "chunk", "last"} <= program.passes.keys()
    assert {each.kernel for passed in program.passes.values() for each in passed} <= program.kernels.keys()
    assert all(f"fn {name}(" in kernel.source for name, kernel in program.kernels.items())

    weights = make_weights(golden.model.file, golden.model.spec, PORTABLE.binding)
    packed = list(pack_weights(golden.model.file, golden.model.spec, weights))
    assert len(packed) > 10
    for name, offset, words in packed:
        place = about["weights"][name]
        assert place["bytes"] == program.buffers[name] >= offset + words.nbytes
        start = place["offset"] + offset
        assert raw["weights.bin"][start : start + words.nbytes] == words.tobytes()


def test_compiling_leaves_pytorch_out(tmp_path: Path) -> None:
    """TVM imports it where it is installed, and no plan counts its 400 MiB."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('PyTorch was imported')")
    code = "from edge.backends.tvm.cpu.lowering import import_compiler; import_compiler()"
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr


# Code must not grow out of bounds: TVM's simplifier must not expand what is in variables.


def test_encoding_int8_grows_with_the_head() -> None:
    """Maxima of maxima of 32 vectors, in a head of 512, took the compiler minutes and 17 GB."""
    eight, sixteen = length_of(8), length_of(16)
    assert eight < sixteen < 3 * eight


def length_of(vectors: int) -> int:
    """Characters of the simplified code that encodes a row of so many vectors in int8."""
    from tvm import IRModule
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx import transform
    from tvm.tirx.script.builder import ir as T  # noqa: N812

    from edge.backends.tvm.cpu.kernels.isas import ISAS
    from edge.backends.tvm.cpu.kernels.row_formats import encode
    from edge.backends.tvm.cpu.kernels.vectors import LANES, let, load, store

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("encode")
        row = T.match_buffer(T.arg("row", T.handle()), (T.int64(vectors * LANES),), "float32")
        codes = T.match_buffer(T.arg("codes", T.handle()), (T.int64(vectors * LANES),), "int8")
        values = [let(load(row, T.int64(part * LANES)) * T.float32(3)) for part in range(vectors)]
        elements, _ = encode(ISAS["avx2"], "int8", values)
        for part, each in enumerate(elements):
            store(codes, T.int64(part * LANES), each)
    return len(transform.StmtSimplify()(IRModule({"encode": builder.get()})).script())


def test_few_tokens_prefetch_weights_and_chunks_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that reads weights for a few tokens waits for memory; narrow models' drafts share a chunk's products."""
    small = Small(hidden=64, heads=4, head=16, ffn=64, tied=False, types="Q4_0")
    model = open_model(write_small(tmp_path / "model.gguf", small))
    design = Design.of(make_layout(model.file, model.spec), "f16", targets.target_named("avx512bf16", ""))

    def built(*batches: int) -> dict[str, bool]:
        functions = build(replace(design, batches=list(batches))).functions
        products = ("qkv", "output", "gate_up", "down", "head")
        named = ((name, name.removeprefix("edge_").partition("_")) for name in functions)
        return {name: "prefetch" in str(functions[name]) for name, (_, _, unit) in named if unit in products}

    found = built(2, 8)
    assert {name for name in found if "chunk" in name and found[name]} <= {"edge_chunk_head"}  # also of one token
    assert all(found[name] for name in found if "chunk" not in name)
    assert {"edge_step_qkv", "edge_batch2_down", "edge_batch8_head"} <= found.keys()
    assert "edge_batch8_down" not in built(design.most_tokens)
    monkeypatch.setattr(kinds, "_WIDE", design.shape.hidden)
    assert built(design.most_tokens)["edge_batch8_down"]
