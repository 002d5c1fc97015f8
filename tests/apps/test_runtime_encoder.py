"""Encoders of rows that the C runtime runs give the states of the Python engine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from runtime_library import build
from test_runtime_pass import SOURCES, host_isa
from test_sight import open_golden_tower

from edge.apps.sections.encoder_file import EncoderFile, make_encoder
from edge.backends import engine_named
from edge.backends.base import HiddenEngine
from edge.devices.profiles import HOST, find_profile
from edge.model.given import GivenRows
from edge.model.places import Places
from edge.types import FloatArray

pytest.importorskip("tvm_ffi")

from edge.backends.tvm.compiler.exported import exported_objects, passes_source

pytestmark = pytest.mark.slow
HARNESS = Path(__file__).parent / "runtime" / "encoder_harness.c"
ROWS, ENDS = 48, (16, 23, 39)


def states_of_python(made: EncoderFile, rows: FloatArray) -> FloatArray:
    engine = cast(HiddenEngine, engine_named("cpu").load(made.source.file, made.source.spec, made.config))
    given = GivenRows(0, rows.shape[1])
    places = Places.of_texts(np.diff((0, *ENDS)).tolist())
    found = engine.hidden(given.add(rows), places, given)
    engine.close()
    return found


def test_states_of_rows_are_those_of_python(tmp_path: Path) -> None:
    """A file without its end, or of another library, is refused by its own name."""
    tower, _ = open_golden_tower("smolvlm")
    isa = host_isa()
    made = make_encoder("eyes", tower.stages[0], find_profile(HOST), ROWS, 2, "f32", [isa], {})
    made.write(tmp_path, "00" * 32)
    trusted = '#include "bundle.h"\n' + made.trusted_source() + "const encoder_kind *const ENCODER = &eyes;\n"
    (tmp_path / "trusted.c").write_text(
        f"{trusted}table_reader *const EDGE_TABLE = NULL;\nconst accelerator_kind *const EDGE_PAGE = NULL;\n"
        "const compiled_pass EDGE_PASSES[] = {{NULL, NULL}};\n"
    )
    (tmp_path / "passes.c").write_text(passes_source(made.designs))
    sources = [*SOURCES, "encoder.c", "norm.c", "trust.c", "hash.c", HARNESS]
    tables = [tmp_path / "trusted.c", tmp_path / "passes.c"]
    program = build([*sources, *tables, *exported_objects(made.designs)], ["-O1"])
    rows = np.random.default_rng(3).normal(size=(ENDS[-1], tower.spec.hidden)).astype(np.float32)
    (tmp_path / "input").write_bytes(np.array([len(ENDS), *ENDS], "<u4").tobytes() + rows.tobytes())

    def run(file: Path) -> subprocess.CompletedProcess[str]:
        command = [program, file, isa, "2", tmp_path / "input", tmp_path / "output"]
        return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=300)

    assert (run(tmp_path / "eyes.edge").returncode, run(tmp_path / "eyes.edge").stderr) == (0, "")
    found = np.fromfile(tmp_path / "output", np.float32).reshape(2, *rows.shape)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], states_of_python(made, rows), atol=2e-6)
    data = (tmp_path / "eyes.edge").read_bytes()
    (tmp_path / "short").write_bytes(data[:-1])
    assert "eyes.edge has" in run(tmp_path / "short").stderr
    (tmp_path / "other").write_bytes(data.replace(isa.encode(), b"other"))
    assert "eyes.edge" in run(tmp_path / "other").stderr
