"""Models by name: the file that is chosen, what is judged before a download, and the commands that download."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import GOLDEN
from hub_server import NAME, Hub, hub_with, sha256
from small_models import Small, write_small
from test_cli import edge_here as run

import edge
from edge.converters.gguf.plain import write_plain
from edge.converters.huggingface.reader import convert_folder
from edge.devices.memory import MemoryUse
from edge.errors import BudgetError, EdgeError, InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.hub.quants import label_of, runnable, usual
from edge.hub.repository import RemoteFile
from edge.model.names.catalog import find_model
from edge.model.reader import read_spec
from edge.options import Options
from edge.pulling import offer


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.gguf").read_bytes()


hub = hub_with({
    "README.md": b"a model", "tiny-Q8_0.gguf": golden("llama-gqa-tied"), "tiny-F16.gguf": golden("qwen3"),
})  # fmt: skip


@pytest.mark.parametrize(("path", "label"), [
    ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"), ("gemma-3-270m-it-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
    ("smollm2-135m-instruct-q4_k_m.gguf", "Q4_K_M"), ("model.IQ4_XS.gguf", "IQ4_XS"),
    ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("model-fp16.gguf", "F16"), ("Q6_K/model.gguf", "Q6_K"),
    ("BF16/m-BF16.gguf", "BF16"), ("model.gguf", None), ("Q2learning.gguf", None),
])  # fmt: skip
def test_labels_of_files(path: str, label: str | None) -> None:
    assert label_of(path) == label


def test_default_quants_are_tried_best_first() -> None:
    sizes = {
        "m-F16.gguf": 16, "m-Q8_0.gguf": 8, "m-Q4_K_M.gguf": 5, "m-Q4_0.gguf": 4, "m-Q2_K.gguf": 2, "m-IQ4_XS.gguf": 3,
    }  # fmt: skip
    files = [RemoteFile(path, size, "") for path, size in sizes.items()]
    assert [file.size for file in usual(files)] == [8, 5, 4, 3]
    assert [file.size for file in usual([files[0], files[4]])] == [2, 16]
    others = ["mmproj-model-f16.gguf", "m-00001-of-00003.gguf", "x-imatrix.gguf", "m-lora.gguf", "README.md"]
    assert [path for path in [*sizes, *others] if runnable(path)] == list(sizes)


def test_pull_downloads_best_that_fits(hub: Hub) -> None:
    said: list[str] = []
    path = edge.pull(NAME, notice=said.append)
    assert path.name == "tiny-Q8_0.gguf"
    assert path.read_bytes() == golden("llama-gqa-tied")
    assert find_model(NAME) == find_model(f"hf.co/{NAME}:q8_0") == path
    assert edge.pull(NAME, quant="f16").name == "tiny-F16.gguf"
    assert find_model(f"{NAME}:F16").name == "tiny-F16.gguf"
    with edge.load(NAME, backend="reference") as session:
        assert session.spec.layers == 2


def test_pull_brings_matching_encoder(hub: Hub) -> None:
    eyes, other = (GOLDEN / "eyes" / "mmproj.gguf").read_bytes(), write_other(GOLDEN / "eyes" / "mmproj.gguf")
    hub.repositories[NAME] = {
        "see-Q8_0.gguf": golden("eyes/smolvlm"), "mmproj-see-F16.gguf": eyes, "mmproj-other-Q8_0.gguf": other,
        "mmproj-damaged-Q8_0.gguf": b"nothing",
    }  # fmt: skip
    done = run("pull", NAME, "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["mmproj"]).name == "mmproj-see-F16.gguf"
    with edge.load(NAME, backend="reference", max_kv_size=64) as session:
        assert session.model.senses.keys() == {"picture"}
    hub.repositories["tiny/other"] = hub.repositories[NAME]
    edge.pull("tiny/other", mmproj="off")
    with edge.load("tiny/other", backend="reference", max_kv_size=64) as session:
        assert not session.model.senses


def write_other(path: Path) -> bytes:
    """An encoder whose rows have another width."""
    data, key = path.read_bytes(), b"clip.vision.projection_dim"
    at = data.index(key) + len(key) + 4
    return data[:at] + (48).to_bytes(4, "little") + data[at + 4 :]


def test_budgets_choose_file(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest whose weights stay in memory, judged by headers alone."""
    files = hub.repositories[NAME] = {}
    small = Small(layers=2, hidden=512, ffn=2048, heads=8, kv_heads=8, head=64)
    for kind in ("Q4_0", "Q8_0"):
        files[f"m-{kind}.gguf"] = write_small(tmp_path / "m.gguf", replace(small, types=kind)).read_bytes()
    use = MemoryUse(64 << 20, 64 << 20, None, None)  # this process grows meanwhile
    monkeypatch.setattr("edge.plan.plan.memory_use", lambda: use)
    device = "raspberry-pi-5"
    with pytest.raises(BudgetError) as error:
        offer(NAME, Options(memory=1 << 20), device=device)
    least = error.value.smallest or 0
    chosen = [offer(NAME, Options(memory=least + (step << 20)), device=device) for step in range(0, 36, 4)]
    names = [each.file.path for each in chosen]
    assert names == sorted(names)  # with more memory never the smaller file
    assert {"m-Q4_0.gguf", "m-Q8_0.gguf"} == set(names)
    assert not any(each.plan.bytes.streamed for each in chosen if each.file.path == "m-Q8_0.gguf")
    assert None not in hub.ranges()  # nothing but headers was read


def test_nothing_is_downloaded_that_does_not_fit(hub: Hub) -> None:
    with pytest.raises(BudgetError, match=r"the memory budget is 1\.0 MiB"):
        edge.pull(NAME, memory="1MiB")
    with pytest.raises(BudgetError):
        edge.load(NAME, memory="1MiB")
    assert None not in hub.ranges()
    assert len(hub.ranges()) == 1  # a header, once


@pytest.mark.parametrize("name", ["granitehybrid", "gemma4"])
def test_llama_cpp_models_are_judged_by_header(hub: Hub, name: str) -> None:
    """It tries them without weights, which are holes in a file of full size."""
    pytest.importorskip("llama_cpp")
    hub.repositories[NAME] = {"m.gguf": golden(name)}
    before = edge.forecast(NAME, backend="llamacpp").plan
    assert None not in hub.ranges()
    edge.pull(NAME)
    after = edge.forecast(NAME, backend="llamacpp").plan
    assert before.config == after.config
    assert replace(before.bytes, interpreter=0, reserve=0) == replace(after.bytes, interpreter=0, reserve=0)


@pytest.mark.parametrize(("data", "error"), [
    (b"", ModelFormatError), (b"GGUF", ModelFormatError), (b"<html>not a model</html>" * 100, ModelFormatError),
    (golden("qwen3")[:2000], ModelFormatError), (golden("qwen3")[:-5], ModelFormatError),
])  # fmt: skip
def test_non_models_are_not_downloaded(hub: Hub, data: bytes, error: type[EdgeError]) -> None:
    hub.repositories[NAME] = {"m.gguf": data}
    with pytest.raises(error, match=r"^tiny/model-GGUF/m.gguf: "):
        edge.pull(NAME)
    assert None not in hub.ranges()


@pytest.mark.parametrize(("files", "name", "says"), [
    (["m-Q4_0.gguf"], f"{NAME}:q3_k_m", "tiny/model-GGUF has no Q3_K_M: Q4_0"),
    (["m-00001-of-00002.gguf"], NAME, "has no GGUF file"),
    (["m-Q8_0-00001-of-00002.gguf", "m-Q4_0.gguf"], f"{NAME}:Q8_0", "tiny/model-GGUF has no Q8_0: Q4_0"),
    (["model.safetensors"], NAME, "no GGUF file: edge pull tiny/model-GGUF --convert=q4_0 makes one"),
    (["README.md"], NAME, "has no GGUF file: edge pulls models in GGUF"),
    (["m-Q4_0.gguf"], f"hf.co/{NAME}/m-Q4_1.gguf", r"has no file m-Q4_1.gguf \(did you mean m-Q4_0.gguf\?\)"),
    (["mmproj-x.gguf"], f"hf.co/{NAME}/mmproj-x.gguf", "is no GGUF file of a whole model"),
    ([], "Qwen/Qwen3-0.6B-GUFF", r"has no repository Qwen/Qwen3-0.6B-GUFF \(did you mean Qwen/Qwen3-0.6B-GGUF"),
    ([], "smollm2-135m", "'smollm2-135m' is no model of the Hub: write"),
    ([], "qwen3:9b", "did you mean qwen3.5:9b or qwen3:8b"),
])  # fmt: skip
def test_names_without_file_are_explained(hub: Hub, files: list[str], name: str, says: str) -> None:
    hub.repositories[NAME] = {path: golden("qwen3") for path in files} or {"README.md": b""}
    with pytest.raises((InputError, UnsupportedError), match=says):
        edge.pull(name)
    assert hub.ranges() == []


def parts_of(name: str, folder: Path) -> dict[str, bytes]:
    """A model in several files, as the gguf package splits it: the first holds the header alone."""
    reader = gguf.GGUFReader(GOLDEN / f"{name}.gguf")
    per_file = -(-len(reader.tensors) // 2)
    writer = gguf.GGUFWriter(None, "", split_max_tensors=per_file, small_first_shard=True)
    writer.kv_data[0].clear()
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            kinds = dict(zip(("vtype", "sub_type"), (field.types[0], field.types[-1]), strict=True))
            writer.add_key_value(field.name, field.contents(), **kinds)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    folder.mkdir(exist_ok=True)
    writer.write_header_to_file(folder / "m-F32.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same_weights(one: Path, name: str) -> bool:
    file, golden_file = read_gguf(one), read_gguf(GOLDEN / f"{name}.gguf")
    assert file.metadata.keys() == golden_file.metadata.keys()
    assert list(file.tensors) == list(golden_file.tensors)
    return all(
        np.array_equal(file.tensor_bytes(info), golden_file.tensor_bytes(golden_file.tensors[key]))
        for key, info in file.tensors.items()
    )


def test_models_in_several_files_are_joined(hub: Hub, tmp_path: Path) -> None:
    """Planned by the headers of all parts, and joined once."""
    hub.repositories[NAME] = parts_of("llama-rope-scaled", tmp_path / "parts")
    chosen = offer(NAME, Options())
    assert (chosen.file.path, chosen.is_here, len(chosen.file.parts)) == ("m-F32.gguf", False, 3)
    assert chosen.plan.bytes.weights == read_spec(read_gguf(GOLDEN / "llama-rope-scaled.gguf")).weight_bytes
    assert None not in hub.ranges()
    path = edge.pull(f"{NAME}:f32")
    assert same_weights(path, "llama-rope-scaled")
    asked = hub.ranges().count(None)
    assert edge.pull(f"hf.co/{NAME}/m-F32-00001-of-00003.gguf") == path
    assert hub.ranges().count(None) == asked == 3
    assert find_model(NAME) == path  # without a connection


def test_parts_on_this_device_are_joined_by_convert(tmp_path: Path) -> None:
    parts_of("gpt-oss", tmp_path)
    first, whole = tmp_path / "m-F32-00001-of-00003.gguf", tmp_path / "whole.gguf"
    done = run("convert", str(first), str(whole))
    assert done.returncode == 0, done.stderr
    assert same_weights(whole, "gpt-oss")
    assert "NAME-00001-of-" in run("run", str(first), "hi").stderr
    last = tmp_path / "m-F32-00003-of-00003.gguf"
    last.write_bytes(parts_of("qwen3", tmp_path / "qwen3")[last.name])
    assert "tensors, and should have 41" in run("convert", str(first), str(tmp_path / "other.gguf")).stderr
    last.unlink()
    done = run("convert", str(first), str(tmp_path / "other.gguf"))
    assert done.returncode == 2
    assert "one of 3 parts of a model: m-F32-00003-of-00003.gguf is missing beside it" in done.stderr


@pytest.mark.parametrize("name", ["folders/llama", "folders/lfm2", "encoders/bert-cased"])
def test_checkpoints_are_converted_on_download(hub: Hub, name: str, tmp_path: Path) -> None:
    """A repository in safetensors, in one file or several, with an index; that of an encoder says its pooling."""
    folder = GOLDEN / name
    hub.repositories["tiny/checkpoint"] = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } | {"original/model.safetensors": b"no part of it", "README.md": b"a model"}
    done = run("pull", "tiny/checkpoint", "--convert", "q8_0")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    convert_folder(folder, tmp_path / "floats.gguf", name="checkpoint")
    write_plain(read_gguf(tmp_path / "floats.gguf"), tmp_path / "model.gguf", "Q8_0")
    assert path.read_bytes() == (tmp_path / "model.gguf").read_bytes()
    assert read_gguf(path).metadata["general.name"] == "checkpoint"
    asked = hub.ranges().count(None)
    assert run("pull", "tiny/checkpoint", "--convert", "q8_0").stdout.strip() == str(path)
    assert hub.ranges().count(None) == asked


@pytest.mark.parametrize(("repository", "checkpoint", "model", "folder"), [
    ("ggml-org/gemma-4-E2B-it-GGUF", "google/gemma-4-E2B-it-assistant", "gemma4", "folders/gemma4_assistant"),
    ("Qwen/Qwen3-1.7B-GGUF", "AngelSlim/Qwen3-1.7B_eagle3", "mtp", "folders/eagle3"),
])  # fmt: skip
def test_pull_brings_drafter(hub: Hub, repository: str, checkpoint: str, model: str, folder: str) -> None:
    """An assistant with its centroids, a head with the tokens of its model; one that is not there is left out."""
    hub.repositories[repository] = {"tiny-F16.gguf": golden(model)}
    done = run("pull", f"hf.co/{repository}")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "without its drafter" in done.stderr
    hub.repositories[checkpoint] = {path.name: path.read_bytes() for path in (GOLDEN / folder).iterdir()}
    done = run("pull", f"hf.co/{repository}", "--json")
    drafter = read_gguf(Path(json.loads(done.stdout.splitlines()[-1])["drafter"]))
    if model == "gemma4":
        assert {"masked_embd_centroids.weight", "masked_embd_ordering"} < drafter.tensors.keys()
    else:
        tokens = "tokenizer.ggml.tokens"
        assert drafter.strings(tokens) == read_gguf(GOLDEN / "mtp.gguf").strings(tokens)
        assert drafter.metadata["general.name"] == "Qwen3-1.7B_eagle3"


def test_checkpoints_that_cannot_be_converted_are_not_downloaded(hub: Hub) -> None:
    hub.repositories["tiny/checkpoint"] = {"config.json": b'{"model_type": "magic"}', "model.safetensors": b"x"}
    for arguments, says in (
        (("tiny/checkpoint", "--convert", "q4_0"), "model_type 'magic' is not supported"),
        (("tiny/checkpoint", "--convert", "q4_k_m"), "--convert=q4_k_m: choose F32"),
        ((NAME, "--convert", "q4_0"), "tiny/model-GGUF has no checkpoint in safetensors"),
        ((NAME, "--convert", "q4_0", "--quant", "q8_0"), "state one of them"),
        (("qwen3:0.6b:q4_0", "--convert", "q4_0"), "USER/REPO"),
    ):
        done = run("pull", *arguments)
        assert done.returncode == 2
        assert says in done.stderr
    assert not any("model.safetensors" in path for _, path, _ in hub.asked if "/cdn/" in path)


def test_plan_and_run_by_name(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan reads the header alone; run downloads; the next run needs no Hub."""
    plan = run("plan", NAME, "--json")
    assert plan.returncode == 0, plan.stderr
    said = json.loads(plan.stdout)
    assert said["download"]["file"] == "tiny-Q8_0.gguf"
    assert said["download"]["hash"] == sha256(golden("llama-gqa-tied"))
    assert None not in hub.ranges()
    first = run("run", NAME, "hi", "--raw", "-n", "2", "--backend", "reference")
    assert first.returncode == 0, first.stderr
    assert "downloading tiny/model-GGUF/tiny-Q8_0.gguf: 315 KiB, Q8_0, licence apache-2.0" in first.stderr
    asked = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with edge.load(NAME, backend="reference") as session:
        assert session.generate("hi", raw=True, max_tokens=2) == first.stdout.removesuffix("\n")
    assert len(hub.asked) == asked


def test_without_connection_models_here_are_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in (("pull", NAME), ("run", NAME, "hi")):
        done = run(*command)
        assert done.returncode == 2
        assert re.match(r"edge: HF_HUB_OFFLINE forbids downloads: .*; models here: .*smollm2-135m", done.stderr)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_download_goes_on(number: signal.Signals, code: int, hub: Hub) -> None:
    hub.repositories[NAME] = {"m.gguf": golden("llama-gqa-untied")}
    hub.faults.go.clear()  # it has the first piece when it is interrupted, whoever of us is late
    whole = len(golden("llama-gqa-untied"))
    command = [sys.executable, "-m", "edge", "pull", NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        deadline = time.monotonic() + 240
        part = Path(os.environ["HF_HOME"]) / "hub" / f"models--{NAME.replace('/', '--')}" / "blobs"
        size = 0
        while not size and time.monotonic() < deadline and child.poll() is None:
            with suppress(FileNotFoundError):
                size = (part / f"{sha256(golden('llama-gqa-untied'))}.incomplete").stat().st_size
            time.sleep(0.01)
        child.send_signal(number)
        _, said = child.communicate(timeout=240)
    assert child.returncode == code, said
    assert not list(part.parent.glob("snapshots/*/*"))  # only whole files have names
    assert "Traceback" not in said
    assert 0 < size < whole
    hub.faults.go.set()
    assert edge.pull(NAME).read_bytes() == golden("llama-gqa-untied")
    assert str(hub.ranges()[-1]).endswith("-")
