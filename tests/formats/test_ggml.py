"""llama.cpp's own rounding of files, and `edge quantize`: against llama.cpp itself."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from small_models import Small, write_small
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.backends import engine_named
from edge.converters.calibrate import column_importance
from edge.converters.gguf.ggml import FTYPES, quantize_with_llamacpp
from edge.converters.gguf.plain import write_plain
from edge.converters.quantizers.ggml_rows import quantize_rows
from edge.errors import EngineError, InputError, MissingExtraError
from edge.formats.blocks import PLAIN
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import Planned
from edge.model.model import open_model
from edge.types import FloatArray

SHAPE = Small(layers=2, hidden=256, heads=4, kv_heads=2, head=64, ffn=256, tied=False)  # wide enough for K-quants


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("models") / "floats.gguf", SHAPE)


@pytest.mark.parametrize("ftype", [
    "q4_k_m", "IQ4_XS",
    *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("Q4_K_S", "Q5_K_M", "Q3_K_M", "Q2_K", "Q4_0")),
])  # fmt: skip
def test_whole_files_are_mixed_and_run(ftype: str, floats: Path, tmp_path: Path) -> None:
    shown: list[float] = []
    target = tmp_path / "mixed.gguf"
    planned = quantize_with_llamacpp(floats, tmp_path / "none.gguf", ftype, dry_run=True)
    assert not list(tmp_path.iterdir())
    assert quantize_with_llamacpp(floats, target, ftype, progress=shown.append) == planned
    assert [path.name for path in tmp_path.iterdir()] == ["mixed.gguf"]
    assert shown == sorted(shown)
    assert shown[-1] == 1
    tokens = np.arange(3, 40, dtype=np.int32)
    logits = []
    for backend in ("llamacpp", "reference"):
        engine = load_engine(open_model(target), backend, "f32")
        logits.append(engine.forward(tokens).copy())
        engine.close()
    assert len({each.type for each in planned}) > 2  # a mixture, and vectors
    assert np.corrcoef(*logits)[0, 1] > 0.99  # it rounds what it multiplies by to 8 bits


def test_importance_and_pure_change_written_types(floats: Path, tmp_path: Path) -> None:
    file = read_gguf(floats)
    matrices = [info for info in file.tensors.values() if len(info.shape) == 2]
    importance = {info.name: np.linspace(0, 1, info.shape[0], dtype=np.float32) for info in matrices}
    target = tmp_path / "pure.gguf"
    for weights in ({}, importance):
        quantize_with_llamacpp(floats, target, "Q4_K_M", pure=True, importance=weights)
        written = read_gguf(target)
        for info in matrices:
            values = file.tensor_bytes(info).view(np.float32).reshape(info.shape[::-1])
            expected = quantize_rows(values, "Q4_K", weights.get(info.name))
            np.testing.assert_array_equal(written.tensor_bytes(written.tensors[info.name]), expected.ravel())
    with pytest.raises(InputError, match="does not fit"):
        quantize_with_llamacpp(floats, target, "Q4_0", importance={"output.weight": np.ones(3, np.float32)})
    kept = quantize_with_llamacpp(floats, target, "Q4_K_S", embedding="F32", head="F16", dry_run=True)
    assert Planned("token_embd.weight", (256, SHAPE.vocab), "F32") in kept
    assert Planned("output.weight", (256, SHAPE.vocab), "F16") in kept


def test_crash_of_c_code_raises_one_line(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is not what it should be: killed by a signal, as by a failed assertion."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho 'ggml.c:1: GGML_ASSERT(false) failed' >&2\nkill -{signal.SIGABRT.value} $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(EngineError, match=r"status -6: ggml.c:1: GGML_ASSERT\(false\) failed"):
        quantize_with_llamacpp(floats, tmp_path / "out.gguf", "Q4_K_M")
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.exhaustive] * (k not in ("Q4_0", "Q8_0"))) for k in PLAIN]
)
def test_plain_types_match_llama_cpp(kind: str, floats: Path, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    said = edge_json("quantize", str(floats), str(ours), kind.lower(), "--pure", "--json")
    quantize_with_llamacpp(floats, theirs, kind, pure=True)
    a, b = read_gguf(ours), read_gguf(theirs)
    assert {each["name"]: each["type"] for each in said["tensors"]} == {
        each.name: each.type for each in b.tensors.values()
    }
    assert said["bytes"] == sum(info.nbytes for info in a.tensors.values())
    assert a.metadata["general.file_type"] == b.metadata["general.file_type"] == FTYPES[kind]
    for name, info in a.tensors.items():
        np.testing.assert_array_equal(a.tensor_bytes(info), b.tensor_bytes(b.tensors[name]))


def test_heads_keep_eight_bits_and_odd_rows_sixteen(tmp_path: Path) -> None:
    tied = edge_json("quantize", str(GOLDEN / "qwen2.gguf"), str(tmp_path / "a"), "q4_0", "--dry-run", "--json")
    types = {each["name"]: each["type"] for each in tied["tensors"]}
    assert types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["blk.0.attn_q.bias"] == types["output_norm.weight"] == "F32"
    odd = write_small(tmp_path / "odd.gguf", Small(ffn=100))
    done = edge("quantize", str(odd), str(tmp_path / "b"), "q4_0", "--dry-run")
    assert re.search(r"blk.0.ffn_down.weight +\| 100×64 +\| F32 +\| F16", done.stdout)
    assert "1 × F16" in done.stdout
    assert "(not written)" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["odd.gguf"]


def test_refused_options_raise_one_line(floats: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.gguf"
    (tmp_path / "link").symlink_to(floats)
    target.write_bytes(b"GGUF old")
    mine = tmp_path / "mine.txt"
    mine.write_bytes(b"mine")
    for arguments, says in (
        (("q9", "--force"), "there is no type 'q9': choose F32"), (("q4_0",), "--force"),
        (("q8_0", "--calibration", str(mine), "--force"), "--calibration is of no use for Q8_0"),
        (("q8_0", "--importance", "--force"), "--importance is of no use for Q8_0"),
        (("iq2_xs", "--calibration", "nope.txt", "--force"), "nope.txt: no such file"),
        (("q4_k_m", "--threads", "100000", "--force"), "--threads must be from 1"),
    ):  # fmt: skip
        done = edge("quantize", str(floats), str(target), *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert says in done.stderr
        assert target.read_bytes() == b"GGUF old"
    for arguments in ((), ("--force",)):
        done = edge("quantize", str(floats), str(mine), "q4_0", *arguments)
        assert (done.returncode, mine.read_bytes()) == (2, b"mine")
        assert "mine.txt is no GGUF file: choose another name" in done.stderr
    assert "is IN" in edge("quantize", str(floats), str(tmp_path / "link"), "q4_0", "--force").stderr
    done = edge("quantize", str(floats), str(tmp_path / "t.gguf"), "tq2_0", "--dry-run")
    assert "TQ2_0 is for models that were trained with such weights" in done.stderr


@pytest.fixture(scope="module")
def importance(floats: Path) -> dict[str, FloatArray]:
    model = open_model(floats)
    return column_importance(model.file, model.spec, np.arange(3, 259, dtype=np.int32))


@pytest.mark.parametrize(  # one of each kind that needs one
    "kind", ["IQ2_XXS", "Q2_K_S", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("IQ1_S", "IQ3_XXS"))]
)
def test_calibration_text_serves_types_that_need_it(
    kind: str, floats: Path, importance: dict[str, FloatArray], tmp_path: Path
) -> None:
    matrices = {name for name, info in read_gguf(floats).tensors.items() if len(info.shape) == 2}
    assert set(importance) == matrices - {"token_embd.weight"}
    planned = quantize_with_llamacpp(floats, tmp_path / "small.gguf", kind, importance=importance)
    assert any(each.type in (kind, kind.removesuffix("_S")) for each in planned)


def test_unblocked_rows_and_growth_are_reported(tmp_path: Path) -> None:
    """As SmolLM2's 576 values have it, which K-quants cannot divide."""
    source, target = write_small(tmp_path / "model.gguf", Small(ffn=192)), tmp_path / "t.gguf"
    said = edge_json("quantize", str(source), str(target), "q3_k_m", "--json")
    became = {each["type"] for each in said["tensors"] if len(each["shape"]) > 1}
    assert "Q3_K" not in became
    (odd, called) = said["notes"]
    assert re.match(
        r"blocks of Q3_K have 256 values, and \d of 8 matrices have rows of [\d, ]+, no multiple of that", odd
    )
    assert odd.endswith("no tensor is Q3_K")
    assert called == f"edge calls the model {open_model(target).spec.weight_type}, as most weights of its layers are"
    done = edge("quantize", str(target), str(tmp_path / "larger.gguf"), "q8_0")
    assert done.returncode == 0
    assert "already: rounding again loses more" in done.stderr
    assert re.search(r"the weights grow, from [\d.]+ KiB to [\d.]+ KiB: choose a smaller type", done.stderr)
    done = edge("convert", str(target), str(tmp_path / "other.gguf"), "--type", "q8_0", "--dry-run")
    assert "the weights grow" in done.stderr
    assert "already: rounding again" in done.stderr


@pytest.mark.parametrize(
    ("name", "kind", "types"),
    [
        ("gpt-oss", "Q8_0", {"ffn_down_exps": "Q8_0", "ffn_gate_exps": "Q8_0", "ffn_gate_inp": "F32"}),
        ("gpt-oss", "Q4_0", {"ffn_down_exps": "Q4_0", "attn_q": "Q4_0"}),
        ("qwen35moe", "F16", {"ffn_down_exps": "F16", "ffn_gate_inp": "F32", "ffn_gate_inp_shexp": "F32"}),
        ("qwen35", "Q4_0", {"ssm_alpha": "F32", "ssm_beta": "F32", "ssm_conv1d": "F32", "ssm_out": "Q8_0",
                            "attn_output": "Q8_0", "ffn_down": "Q4_0"}),
        ("gemma4", "Q4_0", {"attn_output": "Q4_0", "inp_gate": "F16", "layer_output_scale": "F32"}),
    ],
)  # fmt: skip
def test_mixtures_and_hybrids_keep_precision_of_key_tensors(
    name: str, kind: str, types: dict[str, str], tmp_path: Path
) -> None:
    """Experts are matrices as others are; what decides about tokens or states stays exact; states get more bits."""
    write_plain(read_gguf(GOLDEN / f"{name}.gguf"), tmp_path / "out.gguf", kind)
    model = open_model(tmp_path / "out.gguf")
    found = {
        info.name.removesuffix(".weight").split(".")[-1]: info.type
        for info in model.file.tensors.values()
        if ".weight" in info.name
    }
    assert {stem: found[stem] for stem in types} == types
    engine_named("cpu").check_supported(model.file, model.spec)


def test_without_llama_cpp_extra_is_named(floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.converters.gguf.ggml.is_installed", lambda: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'edge-runtime\[llamacpp\]'"):
        quantize_with_llamacpp(floats, tmp_path / "out.gguf", "Q4_K_M")
