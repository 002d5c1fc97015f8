"""Models compiled for NPUs: QNN's compiler and emulator, which we did not write, against ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive, find_adapters, load_engine
from typer.testing import CliRunner

import edge
from edge.backends.base import Engine, EngineConfig
from edge.backends.onnx.engine import OnnxEngine
from edge.backends.onnx.graph.static import HIDDEN, make_context_graph, make_static_graph, parts_of
from edge.backends.onnx.model_files import ModelFiles, find_model_files
from edge.backends.onnx.npu.contexts import open_parts
from edge.backends.onnx.npu.form import make_form
from edge.backends.onnx.npu.passes import fill_mask
from edge.backends.onnx.providers import STATIC_CPU, Provider, find_provider
from edge.backends.onnx.session import open_session
from edge.cli.commands import app
from edge.converters.onnx.npu import NpuTarget, check_target, compile_npu
from edge.devices.profiles import find_profile
from edge.errors import EdgeError, EngineError, InputError, MissingExtraError, ModelFormatError
from edge.formats.compiled import StaticForm
from edge.formats.onnx_folder import WEIGHTS
from edge.kv import KVView, make_policy
from edge.model.model import Model, open_model
from edge.model.tensors import find_network
from edge.types import FloatArray, IntArray

pytest.importorskip("onnxruntime_qnn")
onnx = pytest.importorskip("onnx")

MODEL = GOLDEN / "llama-gqa-tied.gguf"
ROWS, CHUNK = 32, 8


@pytest.fixture(scope="module", autouse=True)
def _gpus_of_other_tests() -> None:
    find_adapters()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, compiled for the Snapdragon 8 Gen 3."""
    made = tmp_path_factory.mktemp("npu") / "phone"
    line = ["convert", str(MODEL), str(made), "--to", "onnx", "--npu", "--device", "galaxy-s24"]
    answer = CliRunner().invoke(app, [*line, "--max-kv-size", str(ROWS), "--prefill-step-size", str(CHUNK)])
    assert answer.exit_code == 0, answer.output
    return made


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "phone"))


def greedy(engine: Engine, prompt: IntArray, steps: int, chunk: int) -> tuple[list[int], FloatArray]:
    """The likeliest tokens after a prompt, and their logits; behind the sinks, half of the rows is evicted."""
    policy, tokens, logits = make_policy("streaming", 4), list[int](), []

    def make_room(count: int) -> None:
        if engine.kv.free < count:
            engine.kv.keep(policy.rows_to_keep(KVView(engine.kv.length), engine.kv.capacity // 2), close_gaps=True)

    for start in range(0, prompt.size, chunk):
        part = prompt[start : start + chunk]
        make_room(part.size)
        last = engine.forward(part)
    for _ in range(steps):
        tokens.append(int(last.argmax()))
        logits.append(last.copy())
        make_room(1)
        last = engine.forward(np.array(tokens[-1:], np.int32))
    return tokens, np.array(logits)


def both(model: Model, rows: int, chunk: int, steps: int, prompt: int) -> list[tuple[list[int], FloatArray]]:
    """On the emulated NPU and on the CPU, by the same static form and by the ordinary graph."""
    ids, found = np.random.default_rng(5).integers(3, model.spec.vocab, prompt).astype(np.int32), []
    for provider in ("qnn", "cpu-static", "cpu"):
        engine = OnnxEngine(model.file, model.spec, EngineConfig(rows, chunk, "f16", 2, provider=provider))
        found.append(greedy(engine, ids, steps, chunk))
        engine.close()
    return found


# The same answers


@pytest.mark.wing("QNN's emulator")
@pytest.mark.parametrize("name", [
    "gemma3", *map(exhaustive, ("llama-gqa-tied", "gpt2", "phi3-longrope", "qwen3", "gemma4", "granite", "mistral3")),
])  # fmt: skip
def test_greedy_tokens_are_those_of_the_cpu(name: str) -> None:
    """Over 24 steps, in a cache that evicts, with sliding windows and without."""
    emulated, static, plain = both(open_model(GOLDEN / f"{name}.gguf"), ROWS, CHUNK, steps=24, prompt=44)
    assert emulated[0] == static[0] == plain[0]
    if name in ("gemma3", "llama-gqa-tied"):
        np.testing.assert_allclose(emulated[1], static[1], rtol=0, atol=0.25)  # which computes in float16
        np.testing.assert_allclose(static[1], plain[1], rtol=0, atol=5e-2)  # whose attention does


@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma4"])
def test_shards_change_nothing(name: str) -> None:
    """Also where the second one reads rows and embeddings of the first."""
    model = open_model(GOLDEN / f"{name}.gguf")
    tokens = np.random.default_rng(2).integers(3, model.spec.vocab, 12).astype(np.int32)
    expected = load_engine(model, "onnx@cpu-static", "f32", capacity=ROWS, chunk=CHUNK)
    engine: Any = load_engine(model, "onnx@cpu-static", "f32", capacity=ROWS, chunk=CHUNK)
    files = find_model_files(model.file, model.spec)
    form = make_form(model.spec, ROWS, CHUNK, "f32", shards=2)
    engine._passes._form = form
    engine._passes.open(open_parts(model.spec, files, form, STATIC_CPU, 1))
    for part in (tokens[:8], tokens[8:11], tokens[11:12]):
        np.testing.assert_allclose(engine.forward(part), expected.forward(part), rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", [
    "h2o", *(exhaustive(each) for each in ("keydiff", "snapkv", "tova", "knorm"))
])  # fmt: skip
def test_attention_policies_evict_alike_on_npu_and_cpu(folder: Path, policy: str) -> None:
    """By queries and keys that the NPU hands out, each head evicts its own rows: those of the ordinary graph, whose
    queries and keys come another way."""
    answers = dict[str, str]()
    for provider in ("qnn", "cpu-static", "cpu"):
        options = {"max_kv_size": ROWS, "prefill_step_size": CHUNK, "kv_dtype": "f16"} if provider == "cpu" else {}
        with edge.load(folder, provider=provider, kv_policy=policy, **options) as session:
            answers[provider] = session.generate("Once upon a time there was", max_tokens=40, ignore_eos=True)
            assert session.report.kv.evicted > ROWS
    assert answers["qnn"] == answers["cpu-static"] == answers["cpu"]


def test_masks_hide_free_rows_fillers_and_rows_outside_windows() -> None:
    mask = np.empty((4, 10), np.float32)  # six rows, three of them in use, and four tokens, the last two real
    fill_mask(mask, 3, 2, 0, None)
    assert (mask == 0).astype(int).tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 1, 1],
    ]
    assert set(mask.ravel()) == {0, np.float32(HIDDEN)}
    fill_mask(mask, 3, 2, 3, np.array([2, 0, 1, 3, 4]))  # rows lie in any order
    assert (mask[2:] == 0).astype(int).tolist() == [[1, 0, 1, 0, 0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 1, 1]]


# Context binaries


def test_folder_names_its_compile_target(folder: Path) -> None:
    said = json.loads((folder / "edge.json").read_text())["npu"]
    assert (said["device"], said["soc"], said["arch"], said["provider"]) == ("galaxy-s24", 57, "75", "qnn")
    assert (said["form"]["rows"], said["form"]["chunk"], said["form"]["kv_dtype"]) == (ROWS, CHUNK, "f16")
    assert said["contexts"] == ["npu.0.bin"]
    assert not list(folder.glob("npu.*.onnx"))  # which the compiler read and wrote


@dataclass(frozen=True)
class Small:
    """A model, its weights in a folder, and its form."""

    model: Model
    files: ModelFiles

    @property
    def form(self) -> StaticForm:
        return make_form(self.model.spec, ROWS, CHUNK, "f16")

    def step(self, context: tuple[str, str, str] | None = None) -> bytes:
        """The graph of a step, or around this context: its file, the graph in it, and the compiler."""
        (part,) = parts_of(self.model.spec, self.form, 1)
        known = (self.files.layout, self.model.spec, find_network(self.model.spec), self.form, part)
        if context is None:
            return make_static_graph(*known, self.files.data)
        file, name, compiler = context
        return make_context_graph(*known, context=file, name=name, compiler=compiler)

    def compile_step(self) -> tuple[str, str, str]:
        """The step alone, for the Snapdragon 8 Gen 3."""
        folder = self.files.folder
        (folder / "step.onnx").write_bytes(self.step())
        entries = {"enable": "1", "embed_mode": "0", "file_path": str(folder / "one.onnx")}
        said = {f"ep.context_{name}": value for name, value in entries.items()}
        open_session(folder / "step.onnx", None, snapdragon(), 1, entries=said)
        (node,) = onnx.load(folder / "one.onnx").graph.node
        found = {each.name: each.s.decode() for each in node.attribute}
        return found["ep_cache_context"], found["partition_name"], found["ep_sdk_version"]

    def compile(self, device: str) -> list[bytes]:
        """The contexts for a device."""
        target = NpuTarget(device, ROWS, CHUNK)
        made = compile_npu(self.model.file, self.model.spec, self.files.layout, self.files.folder, target)
        return [(self.files.folder / name).read_bytes() for name in made.contexts]


@pytest.fixture
def small(tmp_path: Path) -> Small:
    model = open_model(GOLDEN / "llama-gqa-untied.gguf")
    found = find_model_files(model.file, model.spec)
    shutil.copy(found.folder / found.data, tmp_path / WEIGHTS)
    return Small(model, replace(found, folder=tmp_path, data=WEIGHTS))


def snapdragon() -> Provider:
    return find_provider("qnn").compiling_for(find_profile("galaxy-s24").npu)


def test_every_chip_gets_contexts_of_its_own(small: Small) -> None:
    """Of Hexagon v73, v75 and v79."""
    made = [small.compile(device) for device in ("snapdragon-x-elite", "galaxy-s24", "galaxy-s25")]
    assert all(len(contexts) == 1 for contexts in made)
    assert len({contexts[0] for contexts in made}) == 3


def test_chunk_and_step_share_their_weights(small: Small) -> None:
    alone = (small.files.folder / small.compile_step()[0]).stat().st_size
    (shared,) = small.compile("galaxy-s24")
    weights = small.files.layout.nbytes / 2  # float32 here, float16 there
    assert alone > weights
    assert len(shared) < 2 * alone - 0.8 * weights


def test_graph_around_a_context_runs_it(small: Small) -> None:
    """The emulator loads contexts of one graph; those of graphs that share weights, only an NPU does."""
    around = small.step(small.compile_step())
    beside = {"ep.context_file_path": str(small.files.folder / "any.onnx")}
    sessions = [
        open_session(around, None, snapdragon(), 1, entries=beside),
        open_session(small.step(), small.files.folder, snapdragon(), 1),
    ]
    random, feeds = np.random.default_rng(1), {}
    for each in sessions[0].get_inputs():
        kind = np.float16 if "float16" in each.type else np.float32
        feeds[each.name] = random.standard_normal(each.shape).astype(kind)
    for ours, theirs in zip(*(session.run(["logits", "key.0"], feeds) for session in sessions), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# Bad requests


def refused(*line: str) -> str:
    answer = CliRunner().invoke(app, list(line))
    assert isinstance(answer.exception, EdgeError), answer.output
    assert "\n" not in str(answer.exception)
    return str(answer.exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--npu compiles for one device: state it with --device"),
        (("--device", "nokia-3310"), "unknown device 'nokia-3310'"),
        (("--device", "raspberry-pi-5"), "which has no NPU that edge knows of: choose galaxy-s24, galaxy-s25"),
        (("--device", "pixel-9"), "edge knows no compiler for"),
        (("--device", "galaxy-s24", "--max-kv-size", "4096"), "--max-kv-size must be from 8 to 512, not 4096"),
        (("--device", "galaxy-s24", "--prefill-step-size", "400"), "half of the KV rows"),
        (("--device", "galaxy-s24", "--to", "gguf"), "--npu compiles a folder in ONNX, not gguf"),
        (("--device", "galaxy-s24", "--method", "nf4"), "NPUs multiply blocks of 4 or 8 bits"),
    ],
)
def test_uncompilable_models_are_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    target = tmp_path / "phone"
    assert said in refused("convert", str(MODEL), str(target), "--npu", *options)
    assert not target.exists()


def test_chip_unknown_to_the_compiler_is_refused(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = find_profile("galaxy-s24")
    for npu, error, said in (
        (replace(profile.npu, soc=None), InputError, "does not say which chip it has"),
        (replace(profile.npu, soc=4000, arch="999"), EngineError, "cannot load it"),
    ):
        monkeypatch.setattr("edge.converters.onnx.npu.find_profile", lambda name, npu=npu: replace(profile, npu=npu))
        with pytest.raises(error, match=said):
            small.compile("galaxy-s24")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-kv-size", "64"), "--max-kv-size 64 is more than the 32 that the model was compiled for: convert it"),
        (("--prefill-step-size", "16"), "--prefill-step-size 16 is more than the 8"),
        (("--kv-dtype", "int8"), "on an NPU this model is compiled for f16"),
        (("--kv-memory", "1MiB"), "the model was compiled for 32 KV rows"),
        (("--provider", "tpu"), "--provider 'tpu' is not available: choose"),
    ],
)
def test_options_beyond_the_static_form_are_refused(folder: Path, options: tuple[str, ...], said: str) -> None:
    assert said in refused("run", str(folder), "--provider", "qnn", "-p", "hi", *options)


def test_contexts_of_another_model_or_version_are_refused(copied: Path) -> None:
    def opened(changes: Callable[[dict[str, Any]], None]) -> None:
        said = json.loads((copied / "edge.json").read_text())
        changes(said["npu"])
        (copied / "edge.json").write_text(json.dumps(said))
        with edge.load(copied, provider="qnn"):
            pass

    with pytest.raises(ModelFormatError, match="of another model or another version of edge: convert it again"):
        opened(lambda npu: npu.update(source="0" * 64))
    with pytest.raises(ModelFormatError, match="the sizes of npu do not fit the model"):
        opened(lambda npu: npu["form"].update(ring_rows=7))
    with pytest.raises(ModelFormatError, match="not what edge writes"):
        opened(lambda npu: npu["form"].update(rows=-1))


def test_damaged_context_is_refused(copied: Path) -> None:
    context = copied / "npu.0.bin"
    context.write_bytes(context.read_bytes()[:-1] + b"?")
    with pytest.raises(ModelFormatError, match="its hash differs"), edge.load(copied, provider="qnn"):
        pass
    context.unlink()
    with pytest.raises(ModelFormatError, match="missing"):
        edge.load(copied)


def test_missing_compiler_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.backends.onnx.providers.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"edge-runtime\[qnn\]"):
        check_target(NpuTarget("galaxy-s24"))


def test_operators_outside_the_npu_are_refused(small: Small) -> None:
    """An operator that the NPU does not have is an error, and so is a provider that ONNX Runtime leaves out."""
    node = onnx.helper.make_node("Erf", ["x"], ["y"], domain="ai.edge.none")
    value = onnx.helper.make_tensor_value_info("x", 1, [1]), onnx.helper.make_tensor_value_info("y", 1, [1])
    graph = onnx.helper.make_graph([node], "g", value[:1], value[1:])
    with pytest.raises(EngineError, match="cannot load it"):
        open_session(onnx.helper.make_model(graph).SerializeToString(), None, snapdragon(), 1)
    missing = Provider("tensorrt", "TensorrtExecutionProvider")
    with pytest.warns(UserWarning, match="not in available"), pytest.raises(EngineError, match="--provider tensorrt"):
        open_session(small.step(), small.files.folder, missing, 1)
