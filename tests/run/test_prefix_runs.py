"""Runs with a soft prompt, and prompts of parts: every part of a run counts, keeps and compares their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN
from hf_folders import Tensors, complaint, write_tensors
from serving import PLAIN, served
from test_cli import edge_here as edge

from edge.backends.reference.kv import ReferenceKV
from edge.errors import InputError
from edge.formats.blocks import dequantize
from edge.prompt_cache.cache import PromptCache
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import FloatArray

MODEL = GOLDEN / "llama-gqa-tied.gguf"  # hidden 64, 2 layers, 2 KV heads of 16
ROWS = 7
KINDS = {"PROMPT_TUNING": 64, "PREFIX_TUNING": 2 * 2 * 2 * 16}
TEXT = np.random.default_rng(2).integers(3, 250, 12).astype(np.int32)


def values(width: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((ROWS, width)).astype(np.float32)


def write_prefix(folder: Path, kind: str = "PROMPT_TUNING", seed: int = 0, **changed: Any) -> Path:
    tensors: Tensors = {"prompt_embeddings": ("F32", values(KINDS.get(kind, 64), seed))}
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", changed.pop("tensors", tensors))
    said = {"peft_type": kind, "num_virtual_tokens": ROWS, "num_transformer_submodules": 1, **changed}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def opened(prefix: Path | None, **options: Any) -> Session:
    options = {"backend": "reference", "max_kv_size": 64, "threads": 1, **options}
    return load(MODEL, prefix=prefix, **options)


def answer(session: Session, text: Any = TEXT, **options: Any) -> str:
    return session.generate(text, max_tokens=16, ignore_eos=True, **options)


@pytest.fixture(params=KINDS)
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_prefix(tmp_path / "prefix", request.param)


def test_prefix_takes_pinned_rows_and_counted_bytes(prefix: Path) -> None:
    with opened(prefix) as session, opened(None) as plain:
        assert answer(session) != answer(plain)
        assert session.plan.sinks == ROWS + plain.plan.sinks
        report, keys = session.report, cast(ReferenceKV, session.engine.kv).keys[0]
        kept = ROWS if session.model.prefix and session.model.prefix.saved else 0
        assert (report.tokens.reused, report.tokens.ran) == (kept, ROWS + TEXT.size - kept)
        assert report.tokens.prompt == ROWS + TEXT.size
        first = keys[:, :ROWS].copy()
        session.generate(TEXT, max_tokens=80, ignore_eos=True)
        report = session.report
        assert report.kv.evicted > 0
        np.testing.assert_allclose(keys[:, :ROWS], first, atol=1e-6)  # positions begin at the prefix
        scratch = session.plan.bytes.scratch - plain.plan.bytes.scratch
        assert scratch == 4 * ROWS * (KINDS["PREFIX_TUNING"] if session.model.prefix.saved else KINDS["PROMPT_TUNING"])


def test_prompt_cache_knows_the_prefix(prefix: Path, tmp_path: Path) -> None:
    cache, long = PromptCache(memory="8MiB"), np.tile(TEXT, 3)
    other = write_prefix(tmp_path / "other", seed=1)
    for folder, reused in ((prefix, 0), (prefix, ROWS + long.size - 1), (other, 0), (None, 0)):
        with opened(folder, prompt_cache=cache) as session, opened(folder) as plain:
            assert answer(session, long) == answer(plain, long)
            saved = session.model.prefix.saved if session.model.prefix else 0
            assert session.report.tokens.reused == max(reused, saved)


def test_turns_behind_a_prefix_are_taken_back_exactly(prefix: Path) -> None:
    with opened(prefix, max_kv_size=400) as session:
        talk, plain = Conversation(session, system="Be brief."), opened(prefix, max_kv_size=400)
        first = "".join(talk.say("One?", max_tokens=5))
        assert first == plain.generate("One?", system="Be brief.", max_tokens=5)
        plain.close()
        for system in ("Be brief.", "Be long."):  # once changed, the whole conversation runs again
            talk.system = system
            found = "".join(talk.say("Two?", max_tokens=5))
            rows = session.engine.kv.length
            assert "".join(talk.retry(max_tokens=5)) == found
            assert session.engine.kv.length == rows
            assert talk.undo() == "Two?"
        talk.reset()
        talk.system = "Be brief."
        assert "".join(talk.say("One?", max_tokens=5)) == first


def test_prefix_keeps_answers_of_sequences_and_drafts(prefix: Path) -> None:
    long = np.concatenate([np.tile(TEXT, 3), [9]]).astype(np.int32)
    settings = {"backend": "cpu", "kv_dtype": "f32", "max_kv_size": 96}
    with opened(prefix, speculate="off", **settings) as session:
        expected = [answer(session, text) for text in (long, TEXT)]
    with opened(prefix, **settings) as session:
        assert [answer(session, text) for text in (long, TEXT)] == expected
    with opened(prefix, sequences=2, **settings) as session, session.batch() as batch:
        streams = [batch.stream(text, max_tokens=16, ignore_eos=True) for text in (long, TEXT)]
        assert ["".join(stream) for stream in streams] == expected
        again = batch.stream(long, max_tokens=16, ignore_eos=True)
        assert "".join(again) == expected[0]
        assert again.report.tokens.reused > ROWS


def test_server_scores_texts_behind_the_prefix(prefix: Path) -> None:
    with opened(prefix) as session:
        expected = [each.logprob for each in session.score(TEXT)]
    with served(options={"prefix": prefix, "prefill_step_size": 4}) as client:
        body = {"prompt": TEXT.tolist(), "echo": True, "logprobs": 1, "max_tokens": 0}
        found = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(found[1:], expected, atol=1e-4)
        for cached in (0, TEXT.size - 1):
            usage = client.post("/v1/completions", json={"prompt": TEXT.tolist(), "max_tokens": 1}).json()["usage"]
            assert usage["prompt_tokens"] == TEXT.size
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        body["prompt"] = [3] * (PLAIN["max_kv_size"] - ROWS + 1)
        assert client.post("/v1/completions", json=body).status_code == 400


def test_prompt_of_parts_equals_its_tokens() -> None:
    with opened(None) as session:
        model, expected = session.model, answer(session)
        info = model.file.tensors["token_embd.weight"]
        table = dequantize(model.file.tensor_bytes(info).reshape(info.shape[1], -1), info.type)
        assert answer(session, model.prompt_of(TEXT[:3], table[TEXT[3:9]], TEXT[9:])) == expected
        text = model.tokenizer.text(int(TEXT[0]))
        assert model.prompt_of(text, TEXT).first(None)[-TEXT.size :].tolist() == TEXT.tolist()
        for part in (table[:2, :5], np.full((1, 64), np.nan, np.float32), 3):
            with pytest.raises(InputError):
                model.prompt_of(part)  # type: ignore[arg-type]


NAN = values(64)
NAN[1, 2] = np.nan
KEYS = {"kind": "PREFIX_TUNING", "tensors": {"prompt_embeddings": ("F32", values(128))}}


@pytest.mark.parametrize(("changed", "options", "expected"), [
    ({"tensors": {"prompt_embeddings": ("F32", values(48))}}, {}, "rows of 48 values, and this model takes 64"),
    ({"kind": "PREFIX_TUNING", "tensors": {"prompt_embeddings": ("F32", values(64))}}, {}, "this model takes 128"),
    ({"tensors": {"prompt_embeddings": ("F32", NAN)}}, {}, "not finite"),
    ({"tensors": {"prompt_embeddings": ("I32", np.zeros((ROWS, 64), np.int32))}}, {}, "not a table of floats"),
    ({"tensors": {"lora_A": ("F32", NAN)}}, {}, "should be its only tensor"),
    ({"num_virtual_tokens": 9}, {}, "7 rows, and adapter_config.json says 9"),
    ({"kind": "LORA"}, {}, "is a LoRA adapter: edge convert"),
    ({"kind": "LN_TUNING"}, {}, "peft_type is 'LN_TUNING': edge runs PROMPT_TUNING, P_TUNING, PREFIX_TUNING"),
    ({}, {"max_kv_size": 16}, "--prefix of 7 rows needs at least 30 KV rows: raise --max-kv-size 16"),
    (KEYS, {"backend": "llamacpp"}, "the llamacpp engine takes no --prefix of keys and values: use"),
    (KEYS, {"backend": "onnx"}, "the onnx engine takes no --prefix of keys and values: use"),
])  # fmt: skip
def test_wrong_prefixes_raise_one_line(
    tmp_path: Path, changed: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    folder = write_prefix(tmp_path / "prefix", **changed)
    found = complaint(lambda: opened(folder, **options))
    assert expected in found
    assert "\n" not in found


def test_damaged_or_missing_files_are_refused(tmp_path: Path) -> None:
    folder = write_prefix(tmp_path / "prefix")
    weights = folder / "adapter_model.safetensors"
    assert not complaint(lambda: opened(weights).close())
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    assert "truncated" in complaint(lambda: opened(folder))
    weights.unlink()
    assert "there is no adapter_model.safetensors" in complaint(lambda: opened(folder))
    assert "there is no adapter_config.json" in complaint(lambda: opened(tmp_path))
    assert "no such file or folder" in complaint(lambda: opened(tmp_path / "nowhere"))
    assert "is no soft prompt: name a folder that PEFT saved" in complaint(lambda: opened(MODEL))
    for wrong, shown in ((3, "3"), ("", "''")):
        assert complaint(lambda wrong=wrong: opened(cast(Path, wrong))) == f"--prefix must be a path, not {shown}"


def test_base_model_of_another_name_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_prefix(tmp_path / "pirate", base_model_name_or_path="someone/Mistral-7B")
    assert "\nprefix pirate: 7 of the KV rows" in edge("plan", str(MODEL), "--prefix", str(folder)).stdout
    opened(folder).close()
    assert caplog.text.count("--prefix was trained for Mistral-7B") == 1
