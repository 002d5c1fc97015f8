"""Plans for NPUs: which models can be compiled, and predictions compared with speeds that others published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from typer.testing import CliRunner

from edge.backends.onnx.npu.form import CHUNK, ROWS
from edge.cli.commands import app
from edge.devices.profiles import HOST, find_profile
from edge.devices.profiles.profile import Figure, Npu
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.compiled import Compiled, StaticForm
from edge.lab.prediction.fits import fits
from edge.lab.prediction.forecast import Outlook, look_ahead
from edge.lab.prediction.npu import EFFICIENCY
from edge.lab.prediction.predict import Wanted, predict
from edge.model.model import open_model
from edge.model.names.known import known_models, outline_model
from edge.model.reader import read_spec
from edge.options import Options
from edge.plan.npu import NpuUse, check_npu, npu_use

MODEL = str(GOLDEN / "llama-gqa-tied.gguf")
S24 = find_profile("galaxy-s24")
run = CliRunner()


def outlined(tmp_path: Path, name: str, mixture: str) -> Any:
    file = outline_model(known_models()[name], mixture, tmp_path / "outline.gguf")
    return file, read_spec(file)


def use_of(tmp_path: Path, name: str, mixture: str = "Q4_0", device: str = "galaxy-s24") -> NpuUse:
    return npu_use(*outlined(tmp_path, name, mixture), find_profile(device))


def outlook(tmp_path: Path, name: str = "smollm2:135m", device: str = "galaxy-s24", **options: Any) -> Outlook:
    file, spec = outlined(tmp_path, name, "Q4_0")
    chosen = Options.parse(**({"provider": "qnn", "memory": "4GiB"} | options))
    return look_ahead(file, spec, find_profile(device), chosen, outline=True)


# Which models


def test_context_size_is_that_of_the_vendors_compiler(tmp_path: Path) -> None:
    """Both graphs over the same weights, compiled by QNN for this chip (docs/npu.md): SmolLM2 in Q4_1, and in Q4_0,
    with a head of 8 bits."""
    real = open_model("smollm2-135m")
    assert npu_use(real.file, real.spec, S24).context == pytest.approx(110.01e6, rel=0.02)
    file, spec = outlined(tmp_path, "smollm2:135m", "Q4_0")
    use = npu_use(file, spec, S24)
    assert (use.reasons, use.shards) == ((), 1)
    assert use.context == pytest.approx(99e6, rel=0.02)


def test_oversized_graphs_are_split_into_contexts(tmp_path: Path) -> None:
    use = use_of(tmp_path, "qwen3:8b")
    assert use.reasons == ()
    assert use.shards == 2
    assert use.context > (S24.value("npu_context") or 0) > use.context / 2
    narrow = replace(S24, figures=S24.figures | {"npu_context": Figure(1e8, "assumed", "test")})
    assert "larger than a context of" in npu_use(*outlined(tmp_path, "qwen3:8b", "Q4_0"), narrow).reasons[0]


@pytest.mark.parametrize(
    ("name", "mixture", "device", "said"),
    [
        ("lfm2.5:350m", "Q4_0", "galaxy-s24", "no graph for an ONNX engine"),
        ("smollm2:135m", "Q4_0", "pixel-9", "edge knows no compiler for NPUs of Google"),
        ("smollm2:135m", "Q4_0", "iphone-16", "edge convert --to coreml"),
        ("smollm2:135m", "Q4_0", "raspberry-pi-5", "its profile names no NPU"),
    ],
)
def test_uncompilable_forms_have_a_reason(tmp_path: Path, name: str, mixture: str, device: str, said: str) -> None:
    reasons = use_of(tmp_path, name, mixture, device).reasons
    assert said in reasons[0]
    assert "\n" not in reasons[0]


def test_contexts_serve_the_chip_that_they_were_made_for(tmp_path: Path) -> None:
    file, spec = outlined(tmp_path, "smollm2:135m", "Q4_0")
    made = Compiled(
        StaticForm(512, 0, 32, shards=2), "qnn", "galaxy-s25", 69, "79", "2.37", ("npu.0.bin", "npu.1.bin"),
        (("a", "b"), ("c", "d")), "0" * 64,
    )  # fmt: skip
    file, spec = replace(file, folder=tmp_path), replace(spec, compiled=made)
    with pytest.raises(ModelFormatError, match="a context cannot be read"):
        npu_use(file, spec, S24)
    for name in made.contexts:
        (tmp_path / name).write_bytes(bytes(1 << 20))
    use = npu_use(file, spec, find_profile("galaxy-s25"))
    assert (use.reasons, use.context, use.contexts) == ((), 2 << 20, "2 contexts, 2.0 MiB (compiled)")
    said = "it was compiled for galaxy-s25 (qnn v79): convert it again with --npu --device galaxy-s24"
    assert npu_use(file, spec, S24).reasons == (said,)
    with pytest.raises(UnsupportedError, match="not for the NPU of galaxy-s24: it was compiled for galaxy-s25"):
        check_npu(file, spec, S24, "qnn")
    assert "edge convert --to coreml" in npu_use(file, spec, find_profile("iphone-16")).reasons[0]
    unnumbered = replace(S24, npu=Npu("Qualcomm", "Hexagon", "the operating system", provider="qnn"))
    assert npu_use(file, spec, unnumbered).reasons == ()  # nothing is known that contradicts


# Predictions


def test_npu_reads_all_rows_for_every_token(tmp_path: Path) -> None:
    few, many = (outlook(tmp_path, max_kv_size=rows) for rows in (256, 2048))
    rate = 60e9 * EFFICIENCY.weights["integers"].reading
    row_bytes = 30 * 2 * 3 * 64 * 2  # layers, keys and values, KV heads, values, float16
    for found, rows in ((few, 256), (many, 2048)):
        (point,) = found.prediction.decode
        assert point.context == rows
        seconds = (found.plan.bytes.weights + (rows + 1) * row_bytes) / rate + EFFICIENCY.step_s
        assert 1 / point.tok_s.value == pytest.approx(seconds, rel=0.01)
        assert point.joules.value == pytest.approx(4.3 / point.tok_s.value)
        assert "estimated" in point.tok_s.source


def test_prompt_takes_whole_chunks(tmp_path: Path) -> None:
    file, spec = outlined(tmp_path, "smollm2:135m", "Q4_0")
    chosen = Options.parse(provider="qnn", memory="4GiB")
    times = []
    for prompt in (1, CHUNK, CHUNK + 1, 10 * CHUNK):
        found = look_ahead(file, spec, S24, chosen, prompt=prompt, outline=True).prediction.ttft_s
        times.append(found.value)
    assert times == pytest.approx([times[0] * n for n in (1, 1, 2, 10)])


def test_sizes_are_fixed_unless_they_are_stated(tmp_path: Path) -> None:
    plan = outlook(tmp_path).plan
    assert (plan.backend, plan.config.capacity, plan.config.chunk, plan.config.kv_dtype) == ("onnx", ROWS, CHUNK, "f16")
    stated = outlook(tmp_path, max_kv_size=64, prefill_step_size=16, kv_dtype="f32").plan.config
    assert (stated.capacity, stated.chunk, stated.kv_dtype) == (64, 16, "f32")
    assert outlook(tmp_path, expected_tokens=900).plan.config.capacity >= 900


def test_unknown_figures_leave_speeds_unknown(tmp_path: Path) -> None:
    file, spec = outlined(tmp_path, "smollm2:135m", "Q4_0")
    chosen = Options.parse(provider="qnn", memory="4GiB")
    none = replace(S24, figures={})
    found = look_ahead(file, spec, none, chosen, outline=True).prediction
    assert (found.decode, found.ttft_s) == ((), None)
    assert found.unknown == ("how fast the NPU of galaxy-s24 reads memory is unknown, so nothing is said of its speed",)
    only_reads = replace(S24, figures={"npu_read_bandwidth": S24.figures["npu_read_bandwidth"]})
    found = look_ahead(file, spec, only_reads, chosen, outline=True).prediction
    assert found.decode
    assert "multiplies is unknown" in found.unknown[0]
    assert "npu_watts of galaxy-s24 is unknown" in found.unknown[1]
    here = predict(spec, outlook(tmp_path).plan, replace(only_reads, name=HOST), Wanted())
    assert (here.decode[0].tok_s.source, here.decode[0].joules) == ("estimated from figures of its NPU", None)


@pytest.mark.parametrize(
    ("device", "options", "error", "said"),
    [
        ("pixel-9", {}, InputError, "--provider qnn does not run on pixel-9, its NPU is Google Tensor Processing Unit"),
        ("raspberry-pi-5", {}, InputError, "its profile names no NPU"),
        ("galaxy-s24", {"provider": "cuda"}, InputError, "Qualcomm Hexagon v75: use --provider qnn"),
        ("galaxy-s24", {"kv_dtype": "int8"}, UnsupportedError, "on an NPU this model is run with f16 or f32"),
        ("galaxy-s24", {"backend": "cpu"}, UnsupportedError, "--provider is for the onnx engine"),
        ("web", {"memory": "1GiB"}, UnsupportedError, "--provider"),
    ],
)
def test_bad_requests_are_refused(
    tmp_path: Path, device: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        outlook(tmp_path, device=device, **options)


def test_command_shows_the_npu_and_that_it_estimates() -> None:
    flags = ["plan", "smollm2-135m", "--device", "galaxy-s24", "--provider", "QNN", "--memory", "2GiB"]
    flags += ["--energy", "9J"]
    shown = " ".join(run.invoke(app, flags).output.split())
    assert "on onnx, Qualcomm Hexagon v75" in shown
    assert "for this NPU: 1 context, 105 MiB (estimated)" in shown
    assert "no run on an NPU was measured" in shown
    assert "Exynos 2400" in shown
    answer = json.loads(run.invoke(app, [*flags, "--json"]).output)
    assert answer["npu"]["npu"]["soc"] == 57
    assert answer["prediction"]["energy_tokens"]["source"] == "estimated from the profile of galaxy-s24"
    plain = json.loads(run.invoke(app, ["plan", MODEL, "--device", "galaxy-s24", "--memory", "2GiB", "--json"]).output)
    assert plain["npu"] is None


def test_models_are_judged_for_an_npu() -> None:
    large, other = fits(device="galaxy-s25", provider="qnn", names=["llama3.2:1b", "lfm2.5:350m"])
    assert (large.name, large.best.type) == ("llama3.2:1b", "Q8_0")
    assert large.best.tok_s is not None
    assert other.best is None
    assert "does not run short convolutions" in other.reason
