"""Packages for Core ML: they mean what the GGUF file means, as far as that shows without a Mac."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from conftest import GOLDEN, load_engine, open_golden
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from small_models import Small, random_quants, write_small
from test_architectures import NAMES, PROMPT, open_family
from test_cli import json_here as edge_json
from typer.testing import CliRunner

from edge.backends.onnx.graph.layout import make_layout
from edge.cli.commands import app
from edge.converters.coreml.sizes import ProgramSizes
from edge.converters.coreml.weights import Constants
from edge.converters.coreml.writer import write_coreml
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import BLOCK
from edge.model.architectures.angles import temperatures
from edge.model.model import Model, open_model
from edge.types import AnyArray, FloatArray, IntArray

pytest.importorskip("coremltools")
from coreml_program import Package
from coremltools.converters.mil.mil import types

from edge.converters.coreml.check import check_package, read_functions

ROWS, CHUNK = 64, 16
TOLERANCE = 8e-2  # of float16, where the standard deviation of logits is 3; as for llama.cpp with float16 rows
IN_MAKE_TEST = ("gemma3", "gpt2", "mistral3")


class App:
    """Runs a model as an app does: it owns the rows, and feeds chunks and steps."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.package, self.spec = Package(folder / "model.mlpackage"), model.spec
        said = self.said = json.loads((folder / "coreml.json").read_text())
        self.network = self.spec.network
        self.embeddings = np.memmap(folder / "embeddings.bin", np.uint8, "r").reshape(said["vocabulary"], -1)
        self.learned = None
        if self.network.learned_positions:
            self.learned = np.fromfile(folder / "positions.bin", np.float16).reshape(-1, said["hidden"])
        shape = (said["layers"], 1, said["kv_heads"], said["rows"], said["head"])
        self.keys, self.values = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
        self.positions = np.full(said["rows"], -1)  # of cached rows

    def run(self, tokens: IntArray, first: int, slots: IntArray) -> FloatArray:
        """Logits of the last of these tokens, whose new rows take `slots`."""
        name, count = ("step", 1) if tokens.size == 1 else ("chunk", self.said["chunk"])
        padding = count - tokens.size
        positions = np.concatenate([np.full(padding, -1), first + np.arange(tokens.size)])
        x = np.zeros((1, count, self.said["hidden"]), np.float16)
        x[0, padding:] = self.embed(tokens)
        if self.learned is not None:
            x[0, padding:] += self.learned[positions[padding:]]
        inputs: dict[str, AnyArray] = {"x": x}
        for kind, rope in enumerate(self.said["ropes"]):
            if rope["frequencies"]:
                angles = np.maximum(positions, 0)[:, None] * np.array(rope["frequencies"])
                for part, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                    full = np.full((1, count, self.said["head"] // 2), float(part == "cos"))
                    full[0, :, : table.shape[1]] = rope["magnitude"] * table
                    inputs[part + (f"_{kind}" if kind else "")] = full
        for window in set(self.said["windows"]):
            distance = positions[:, None] - np.concatenate([self.positions, positions])
            seen = (np.concatenate([self.positions, positions]) >= 0) & (distance >= 0)
            seen &= distance < (window or np.inf)
            inputs[f"mask_{window}" if window else "mask"] = np.where(seen, 0, self.said["masked"])[None, None]
        if self.said["temperature"]:
            inputs["temperatures"] = temperatures(self.network.temperature, np.maximum(positions, 0))[None, :, None]
        for layer in range(self.said["layers"]):
            inputs[f"past_key_{layer}"], inputs[f"past_value_{layer}"] = self.keys[layer], self.values[layer]
        outputs = self.package.run(name, inputs)
        for layer in range(self.said["layers"]):
            self.keys[layer][:, :, slots] = outputs[f"key_{layer}"][:, :, padding:]
            self.values[layer][:, :, slots] = outputs[f"value_{layer}"][:, :, padding:]
        self.positions[slots] = positions[padding:]
        return outputs["logits"][0].astype(np.float32)

    def embed(self, tokens: IntArray) -> AnyArray:
        rows, hidden = np.array(self.embeddings[tokens]), self.said["hidden"]
        if self.said["embedding_bits"] == 16:
            return rows.view(np.float16)
        scales = np.repeat(rows[:, hidden:].copy().view(np.float16), BLOCK, axis=1)
        values = rows[:, :hidden].copy().view(np.int8)
        return np.asarray(values * scales)

    def goes_on(self, tokens: IntArray, first: int, expected: FloatArray) -> None:
        """Run two tokens at once, then one, whose rows overwrite evicted ones. expected: logits after each."""
        for at, size in ((0, 2), (2, 1)):
            free = np.flatnonzero(self.positions < 0)[:size]
            ours = self.run(tokens[at : at + size], first + at, free)
            np.testing.assert_allclose(ours, expected[at + size - 1], rtol=0, atol=TOLERANCE)

    def rotate(self, row: int, by: int) -> None:
        """Rotate the cached keys of a row by `by` positions."""
        half = self.said["head"] // 2
        for layer, kind in enumerate(self.said["layer_ropes"]):
            angles = by * np.array(self.said["ropes"][kind]["frequencies"])
            one, other = (self.keys[layer, 0, :, row, first : first + angles.size] for first in (0, half))
            rotated = one * np.cos(angles) - other * np.sin(angles), one * np.sin(angles) + other * np.cos(angles)
            one[:], other[:] = rotated


def app_of(model: Model, folder: Path) -> App:
    write_coreml(model.file, model.spec, folder, ProgramSizes(ROWS, CHUNK))
    return App(model, folder)


@pytest.mark.parametrize("name", [
    "gemma3",  # windows, two kinds of RoPE, norms of heads and behind layers
    "gpt2",  # learned positions, layer norms, biases
    "mistral3",  # temperatures
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES if name not in IN_MAKE_TEST),
])  # fmt: skip
def test_chunks_steps_and_eviction_give_transformers_logits(tmp_path: Path, name: str) -> None:
    family = open_family(name)
    tokens, kept = family.tokens, family.arrays["keep_rows"]
    phone = app_of(family.model, tmp_path / "app")
    slots = np.random.default_rng(0).permutation(ROWS)  # their order is free
    for at in range(0, PROMPT, CHUNK):  # the last one does not fill its chunk
        piece = slice(at, min(at + CHUNK, PROMPT))
        phone.run(tokens[piece], at, slots[piece])
    before = phone.positions.copy()
    for at, size in ((PROMPT, CHUNK), (PROMPT + CHUNK, 1)):
        ours = phone.run(tokens[at : at + size], at, slots[at : at + size])
        expected = family.expected[at + size - 1 - (tokens.size - len(family.expected))]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)
    phone.positions = np.where(np.isin(before, kept), before, -1)
    cache = phone.keys.copy(), phone.values.copy(), phone.positions.copy()
    phone.goes_on(tokens[PROMPT : PROMPT + 3], PROMPT, family.arrays["keep_logits"])
    if (closed := family.arrays.get("close_logits")) is not None:  # gaps are closed: the kept rows move to 0, 1, 2, …
        phone.keys, phone.values, phone.positions = cache
        for position, row in enumerate(np.argsort(phone.positions)[-kept.size :]):
            phone.rotate(row, position - phone.positions[row])
            phone.positions[row] = position
        phone.goes_on(tokens[PROMPT : PROMPT + 3], kept.size, closed)


def test_full_cache_streams_as_swift_example_does(tmp_path: Path) -> None:
    """StreamingLLM in 32 rows and chunks of 8, as transformers: the window keeps its positions, and the keys of
    the sinks, as they were at first, are rotated by all positions that are gone."""
    golden, sinks, gone = open_golden("llama-gqa-tied"), 4, 0
    write_coreml(golden.model.file, golden.model.spec, tmp_path / "app", ProgramSizes(32, 8))
    phone = App(golden.model, tmp_path / "app")
    anchors = phone.keys
    for at in range(0, golden.tokens.size, 8):
        if excess := max(0, 8 - np.count_nonzero(phone.positions < 0)):
            order = np.argsort(phone.positions)
            anchors = anchors if gone else phone.keys.copy()
            gone += excess
            phone.positions[order[sinks : sinks + excess]] = -1
            for row in order[:sinks]:
                phone.keys[:, :, :, row] = anchors[:, :, :, row]
                phone.rotate(row, gone)
        ours = phone.run(golden.tokens[at : at + 8], at, np.flatnonzero(phone.positions < 0)[:8])
        np.testing.assert_allclose(ours, golden.stream_logits[at + 7], rtol=0, atol=TOLERANCE)
    assert gone == golden.tokens.size - 32


def test_package_has_weights_that_gguf_dequantizes(tmp_path: Path) -> None:
    """All of them, as coremltools decompresses them; those of types without a grid of their own within half a step."""
    kinds = {
        "": "F32", "token_embd": "Q8_0", "blk.0.attn_output": "Q4_0", "blk.0.ffn_gate": "Q4_1", "blk.0.ffn_up": "Q4_K",
        "blk.0.ffn_down": "Q6_K", "blk.1.attn_output": "Q5_0", "blk.1.ffn_gate": "IQ4_NL", "blk.1.ffn_up": "F16",
    }  # fmt: skip
    small = Small(layers=2, hidden=256, heads=4, head=64, ffn=256, types=kinds)
    raw = {
        name: random_quants(kind, 272 if name == "token_embd" else 256, 256, 0.1, seed=3)
        for name, kind in kinds.items() if kind[0] in "QI"
    }  # fmt: skip
    model = open_model(write_small(tmp_path / "small.gguf", small, raw=raw))
    write_coreml(model.file, model.spec, tmp_path / "app", ProgramSizes(ROWS, CHUNK))
    read = read_functions(tmp_path / "app" / "model.mlpackage", "step")["step"]
    written = {op.name: op for op in read.operations}
    for name, kind in kinds.items():
        if name:
            op = written[name.replace(".", "_")]
            ours = op.outputs[0].val if op.op_type == "const" else op.materialized_val_inference()
            info = model.file.tensors[f"{name}.weight"]
            expected = dequantize(model.file.tensor_bytes(info).reshape(len(ours), -1), GGMLQuantizationType[kind])
            steps = np.abs(expected).reshape(-1, BLOCK).max(axis=1) / 127 * 0.51 if kind == "Q6_K" else np.zeros(1)
            error = np.abs(ours.astype(np.float32) - expected).reshape(-1, BLOCK)
            assert (error <= steps[:, None] + 2e-3 * np.abs(expected).max()).all(), name
            assert (op.op_type == "const") == (kind == "F16")
            if name == "token_embd":
                np.testing.assert_allclose(App(model, tmp_path / "app").embed(np.arange(len(expected))), expected, 2e-3)
            if kind in ("Q4_0", "Q4_1", "Q4_K"):
                assert types.builtin_to_string(op.data.dtype) == ("int4" if kind == "Q4_0" else "uint4")


def test_command_writes_folder_of_known_files(tmp_path: Path) -> None:
    source, folder = str(GOLDEN / "llama-gqa-untied.gguf"), tmp_path / "phone"
    sizes = ("--max-kv-size", "64", "--prefill-step-size", "16")
    given = ["convert", source, str(folder), "--to", "coreml", *sizes]
    planned = json.loads(CliRunner().invoke(app, [*given, "--dry-run", "--json"]).stdout)
    said = edge_json(*given, "--json")
    assert "--force replaces it" in str(CliRunner().invoke(app, given).exception)
    assert planned["files"].keys() - said["files"].keys() == {"model.mlpackage"}
    assert planned["files"]["embeddings.bin"] == said["files"]["embeddings.bin"]
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert said["files"] == {name: path.stat().st_size for name, path in files.items()}
    manifest = json.loads((folder / "coreml.json").read_text())
    assert {name: sha256(path.read_bytes()).hexdigest() for name, path in files.items() if name != "coreml.json"} == {
        name: each["sha256"] for name, each in manifest["files"].items()
    }
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == manifest["vocabulary"]
    source_bytes = open_golden("llama-gqa-untied").model.spec.weight_bytes
    assert files["model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"].stat().st_size < source_bytes
    assert not list(tmp_path.glob(".*"))


def test_residual_stream_beyond_float16_is_kept_within(tmp_path: Path) -> None:
    """As that of large Gemmas: layers that add more than 65504."""

    def enlarge(weights: dict[str, AnyArray]) -> None:
        for name in weights:
            if "post_" in name:
                weights[name] *= 3e4

    model = open_model(write_small(tmp_path / "small.gguf", Small(layers=2, architecture="gemma2", window=8), enlarge))
    tokens = np.arange(1, CHUNK + 1, dtype=np.int32)
    engine = load_engine(model, "reference", "f32")
    expected = engine.forward(tokens)
    engine.close()
    ours = app_of(model, tmp_path / "app").run(tokens, 0, np.arange(CHUNK))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE)


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    def enlarge(weights: dict[str, AnyArray]) -> None:
        weights["blk.0.ffn_up"][1, 2] = 1e5

    model = open_model(write_small(tmp_path / "small.gguf", Small(), enlarge))
    with pytest.raises(ModelFormatError, match=r"blk\.0\.ffn_up.*beyond 65504"):
        write_coreml(model.file, model.spec, tmp_path / "app", ProgramSizes(ROWS, CHUNK))
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_package_whose_weights_are_damaged_is_noticed(tmp_path: Path) -> None:
    model = open_golden("llama-gqa-untied").model
    write_coreml(model.file, model.spec, tmp_path / "app", ProgramSizes(ROWS, CHUNK))
    package, layout = tmp_path / "app" / "model.mlpackage", make_layout(model.file, model.spec)
    with open(model.file.path, "rb") as source:
        constants = Constants(model.file, source, layout)
        check_package(constants, layout, package)
        (weights,) = package.rglob("weight.bin")
        data = np.fromfile(weights, np.uint8)
        for first in range(4096, data.size - 4096, 4096):  # constants have headers, which stay
            data[first + 1024 : first + 1056] ^= 0x55
        data.tofile(weights)
        with pytest.raises(ModelFormatError, match=r"model\.mlpackage"):
            check_package(constants, layout, package)


def test_coreml_folder_is_no_model(tmp_path: Path) -> None:
    model = open_golden("llama-gqa-untied").model
    write_coreml(model.file, model.spec, tmp_path / "app", ProgramSizes(ROWS, CHUNK))
    for path in (tmp_path / "app", tmp_path / "app" / "metadata.gguf"):
        with pytest.raises(UnsupportedError, match="is a model for Core ML, which apps run"):
            open_model(path)


def test_refused_options(tmp_path: Path) -> None:
    for line, message in (
        ("phone.mlpackage --to coreml", "becomes a folder that holds model.mlpackage"),
        ("phone --to coreml --max-kv-size 8 --prefill-step-size 16", "--prefill-step-size must be from 2 to 4, not 16"),
        ("phone --to coreml --max-kv-size 9999", "positions is all it knows"),
        ("phone --to onnx --max-kv-size 64", "state --npu, or --to coreml"),
        ("phone --to coreml --method nf4", "use --to onnx"),
    ):
        target, *more = line.split()
        given = ["convert", str(GOLDEN / "llama-gqa-untied.gguf"), str(tmp_path / target), *more]
        assert message in str(CliRunner().invoke(app, given).exception)
        assert not list(tmp_path.iterdir())
