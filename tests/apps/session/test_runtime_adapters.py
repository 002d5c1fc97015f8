"""LoRA adapters in the C runtime: the answers of the Python session, and a refusal of every file that is not right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from bundles import build_with, bundle_of, model_of, pair_of, refused
from conftest import exhaustive
from ctypes_bundle import BundleSession, open_bundle
from lora_files import write_adapter
from runtime_library import CHECKED, said_by
from small_models import Small, write_small

from edge.apps.enums import Role
from edge.apps.manifest import MANIFEST
from edge.apps.sections.adapter_file import ADAPTER, export_adapter
from edge.backends.base import EngineConfig
from edge.backends.tvm import CPU
from edge.errors import EdgeError, InputError, ModelFormatError, UnsupportedError

NAME, RANK, ROOM = "llama-gqa-tied", 20, 32  # of two adapters together
PROMPT = [5, 9, 40, *range(60, 90)]
ROWS = {"max_kv_size": 128, "prefill_step_size": 16, "threads": 2, "kv_policy": "streaming"}
# By which any change of logits is seen:
DRAWN = {"temperature": 20.0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 3, "ignore_eos": 1}


@lru_cache
def folder_of(kind: str) -> Path:
    return Path(mkdtemp(dir=bundle_of(NAME, **ROWS).parent, prefix=f"{kind}-"))


@lru_cache
def quantized() -> str:
    """A model whose adapters are of bytes, unlike those of the golden models, which are floats."""
    return str(write_small(folder_of("model") / "model.gguf", Small(layers=2, vocab=275, types="Q4_0")))


@lru_cache
def adapter_of(name: str, seed: int, rank: int = RANK) -> Path:
    return write_adapter(folder_of("lora") / f"{Path(name).stem}-{seed}.gguf", model_of(name), rank, seed=seed)


def packed(name: str, lora: str | Path, folder: Path) -> bytes:
    path = folder / "a.edge"
    export_adapter(model_of(name), lora, folder, path, force=True)
    return path.read_bytes()


@contextmanager
def session_of(folder: Path) -> Iterator[BundleSession]:
    with open_bundle(folder) as bundle, bundle.session(**DRAWN, max_tokens=8) as session:
        yield session


@pytest.mark.parametrize(("name", "options"), [
    ("quantized", {}), exhaustive("qwen35", {}), exhaustive("gemma3", {"kv_dtype": "int4"}),
    exhaustive("lfm2", {"kv_policy": "h2o"}), exhaustive("phi3", {}), exhaustive("gemma4", {"kv_policy": "h2o"}),
])  # fmt: skip
def test_answers_with_adapters_are_those_of_the_python_session(name: str, options: dict[str, str]) -> None:
    """One after the other, in one session: a part of an adapter, another, two together, none, and the first again.
    Products of adapters in passes that verify drafts are added up as in steps."""
    name = quantized() if name == "quantized" else name
    first, other = f"{adapter_of(name, 1)}:0.5", f"{adapter_of(name, 2, 7)}"
    wanted: list[str | None] = [first, other, f"{other},{first}", None, first]
    folder, answers, drafts = bundle_of(name, lora_rank=ROOM, **ROWS | options), list[list[int]](), "eager_drafts.c"
    both = {"python": {"lora": f"{first},{other}"}, "bundle": {"lora_rank": ROOM}}
    with pair_of(name, **both, eager=drafts, **ROWS | options) as pair:
        for lora in wanted:
            pair.python.set_lora(lora)
            pair.exported.set_adapter(packed(name, lora, folder) if lora else None)
            pair.begun = False
            tokens, _, _ = pair.ask(PROMPT, max_tokens=12, **DRAWN)
            pair.ask([7, 8], max_tokens=40, **DRAWN)  # past the cache's rows
            answers.append(tokens)
        assert pair.exported.use()["drafted"] > 0
    assert answers[0] == answers[4]
    assert len({tuple(each) for each in answers}) == 4


def test_session_s_own_memory_holds_the_adapter(tmp_path: Path) -> None:
    """Counted by the plan; read from a file that may go."""
    name = quantized()
    folder = bundle_of(name, lora_rank=ROOM, **ROWS)
    planned = CPU().footprint(model_of(name).spec, EngineConfig(128, 16, "f16", 2, lora_rank=ROOM)).lora
    plan = json.loads((folder / MANIFEST).read_text())["plan"]
    assert (plan["lora_rank"], plan["bytes"]["lora"]) == (ROOM, planned)
    data = packed(name, adapter_of(name, 1), folder)
    with session_of(folder) as session:
        assert len(data) - 4096 < session.use()["lora"] < planned
        session.set_adapter(data)
        expected = session.answer(PROMPT, Role.IDS)
        (tmp_path / "in.an.app").write_bytes(b"before" + data + b"behind")
        with (tmp_path / "in.an.app").open("rb", buffering=0) as file:
            file.seek(6)
            session.set_adapter_from(file.fileno())
        (tmp_path / "in.an.app").unlink()
        assert session.answer(PROMPT, Role.IDS) == expected


def test_states_are_those_of_one_adapter() -> None:
    name = quantized()
    folder = bundle_of(name, lora_rank=ROOM, **ROWS)
    first, other = (packed(name, adapter_of(name, seed), folder) for seed in (1, 2))
    with session_of(folder) as session:
        session.set_adapter(first)
        session.answer(PROMPT, Role.IDS)
        state = session.save()
        expected = session.answer([7, 8], Role.IDS)
        for adapter, scale in ((None, 1), (other, 1), (first, 0.5)):
            session.set_adapter(adapter, scale)
            assert session.use()["rows"] == 0
            refused(ModelFormatError, "saved with another adapter: set that one first", session.load, state)
        session.set_adapter(first)
        session.load(state)
        assert session.answer([7, 8], Role.IDS) == expected


def test_foreign_adapters_are_refused(tmp_path: Path) -> None:
    name = quantized()
    folder, plain = bundle_of(name, lora_rank=ROOM, **ROWS), bundle_of(NAME, **ROWS)
    data, large = packed(name, adapter_of(name, 1), folder), adapter_of(name, 3, 40)
    wide = packed(name, large, bundle_of(name, lora_rank=48, **ROWS))
    theirs = bundle_of(NAME, lora_rank=ROOM, **ROWS)
    with session_of(folder) as session:
        for adapter, error, says in (
            (b"GGUF" * 100, ModelFormatError, "this is not an adapter: edge export-adapter makes one"),
            (b"", ModelFormatError, "this is not an adapter"),
            (wide, UnsupportedError, "the adapter has rank 48, and the bundle room for 32"),
            (packed(NAME, adapter_of(NAME, 1), theirs), ModelFormatError, "belongs to another model or version"),
        ):  # fmt: skip
            refused(error, says, session.set_adapter, adapter)
        session.append(Role.IDS, [5, 9])
        session.next()
        refused(InputError, "an answer is being generated", session.set_adapter, data)
    with session_of(plain) as session:
        session.set_adapter(None)
        refused(UnsupportedError, "no room for adapters: export it with --lora-rank", session.set_adapter, data)
    for model, lora, bundle, error, says in (
        (name, adapter_of(name, 1), plain, UnsupportedError, "no room for adapters: export it with --lora-rank"),
        (name, large, folder, InputError, "has rank 40, and .* room for 32: export it with --lora-rank"),
        (NAME, adapter_of(NAME, 1), folder, InputError, "was exported from another file than llama-gqa-tied"),
        (name, adapter_of("qwen35", 1), folder, InputError, "an adapter of a model of type"),
        (name, adapter_of(name, 1), tmp_path, ModelFormatError, "is no bundle of this version of edge export"),
        (name, adapter_of(name, 1), adapter_of(name, 1), ModelFormatError, "is no bundle of this version"),
    ):
        with pytest.raises(error, match=says):
            export_adapter(model_of(model), lora, bundle, tmp_path / "a.edge")
    assert list(tmp_path.iterdir()) == []
    refused(InputError, "--lora-rank must be from 0 to 1024, not 2000", bundle_of, name, lora_rank=2000, **ROWS)


def test_damaged_adapters_leave_a_session_without_one() -> None:
    name = quantized()
    folder, random = bundle_of(name, lora_rank=ROOM, **ROWS), np.random.default_rng(1)
    data = packed(name, adapter_of(name, 1), folder)
    with session_of(folder) as session:
        expected = session.answer(PROMPT, Role.IDS)
        cuts = [*range(0, ADAPTER.itemsize + 48, 8), *random.integers(0, len(data), 40).tolist()]
        damaged = [data[:cut] for cut in cuts]
        for _ in range(100):
            changed, place = bytearray(data), random.integers(0, len(data) if random.random() < 0.5 else 600)
            changed[int(place)] ^= 1 << int(random.integers(8))
            damaged.append(bytes(changed))
        for each in damaged:
            with pytest.raises(EdgeError):
                session.set_adapter(each)
        assert session.answer(PROMPT, Role.IDS) == expected


@pytest.mark.exhaustive
def test_no_damage_leads_outside_of_the_memory() -> None:
    """Thousands of damaged adapters run with ASan and UBSan; half of them have a valid hash."""
    name = quantized()
    model, program = build_with(("adapter_fuzz.c",), name, *CHECKED, lora_rank=ROOM, **ROWS)
    path = model.with_name("a.edge")
    export_adapter(model_of(name), adapter_of(name, 1), model.parent, path, force=True)
    accepted, count = map(int, said_by(program, model, path, 3000, 1).split(" of "))
    assert 0.05 * count < accepted < 0.9 * count
