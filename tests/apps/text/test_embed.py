"""`edge_embed` of exported models: vectors of Python's engine, which are transformers', and refusals in one line."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from bundles import bundle_of, refused
from conftest import GOLDEN, exhaustive
from ctypes_bundle import open_bundle
from kotlin_programs import run_with_bundle
from test_gguf_file import GGUF, U32

import edge
from edge.apps.enums import Pooling, Role
from edge.converters.huggingface.reader import convert_folder
from edge.errors import InputError, UnsupportedError
from edge.model.tensors import find_network

EXACT = {"kv_dtype": "f32"}
SKY = "The sky is blue."


@lru_cache
def converted(name: str) -> str:
    """The path of a golden embedder."""
    if name.startswith("encoders/"):
        return str(GOLDEN / f"{name}.gguf")
    path = Path(mkdtemp()) / f"{name}.gguf"
    if name == "decoder":  # whose last state is the vector, as Qwen3-Embedding's
        file = GGUF.read(GOLDEN / "llama-gqa-tied.gguf")
        file.metadata["llama.pooling_type"] = U32, 3
        return str(file.write(path))
    convert_folder(GOLDEN / "embedders" / name, path)
    return str(path)


def texts_of() -> list[str]:
    italian = "Il cielo \u00e8 blu, and na\u00efve caf\u00e9s are open!"
    return [SKY, italian, "x", "two  words", SKY * 4, *["a", "b c"] * 40]


@pytest.mark.parametrize("name", [
    "encoders/bert", "gemma", "decoder", exhaustive("encoders/nomic-bert"), exhaustive("xlm-roberta"),
    exhaustive("modern-bert"),
])  # fmt: skip
def test_vectors_are_those_of_python(name: str) -> None:
    """Vectors are equal to the last bit unless a last norm is computed, for which C takes double precision."""
    path, texts = converted(name), texts_of()
    with (
        edge.load(path, backend="cpu", **EXACT) as python, open_bundle(bundle_of(path, **EXACT)) as bundle,
        bundle.session() as session,
    ):  # fmt: skip
        encoder, normed = python.model.spec.encoder, find_network(python.model.spec).normed

        def check(given: list[str], of_c: dict[str, Any], **options: Any) -> None:
            found, expected = session.embed(given, **of_c), python.embed(given, **options)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * normed)

        check(texts, {})
        assert bundle.dimensions == bundle.info()["dimensions"] == python.model.tail.size
        for pooling in (Pooling.MEAN, Pooling.CLS, Pooling.LAST):
            check(texts[:3], {"pooling": int(pooling), "unscaled": 1}, pooling=pooling.name.lower(), normalize=False)
        check(texts[:2], {"dimensions": 5}, dimensions=5)
        check(["sky " * 5000, SKY], {"truncate": 1}, truncate=True)
        for prompt in python.model.prompts:
            check(texts[:2], {"prompt": prompt}, prompt_name=prompt)
        assert session.use()["rows"] == 0
        for given, options, message in (
            ([SKY, "sky " * 5000], {}, r"text 2 has \d+ tokens, and at most \d+ fit: split it, or set truncate"),
            ([SKY, ""], {}, "text 2 is empty"),
            ([SKY], {"prompt": "none"}, "the model has no prompt none: leave it out"),
            ([SKY], {"pooling": 4}, "pooling an edge_pooling"),
            ([SKY], {"dimensions": bundle.dimensions + 1}, f"dimensions must be at most {bundle.dimensions}"),
        ):
            refused(InputError, message, session.embed, given, **options)
        if encoder:
            with pytest.raises(UnsupportedError, match="is an encoder, which answers no prompts: call edge_embed"):
                session.append(Role.RAW, SKY)
            refused(UnsupportedError, "call edge_embed", session.next)


def test_vectors_are_those_of_transformers() -> None:
    with np.load(GOLDEN / "encoders" / "bert.npz") as golden:
        expected = golden["mean"]
    with open_bundle(bundle_of(converted("encoders/bert"), **EXACT)) as bundle, bundle.session(threads=1) as session:
        np.testing.assert_allclose(session.embed([SKY], unscaled=1)[0], expected[0], atol=1e-4)
        assert session.tokenize("The [SEP]", special=True)[-1] == 3


def test_models_that_generate_make_no_vectors() -> None:
    with open_bundle(bundle_of("llama-gqa-tied")) as bundle, bundle.session() as session:
        assert bundle.dimensions == 0
        refused(UnsupportedError, "the bundle makes no embeddings: export a model", session.embed, [SKY])


@pytest.mark.exhaustive
def test_kotlin_vectors_are_those_of_c() -> None:
    bundle = bundle_of(converted("encoders/bert"), **EXACT)
    said = run_with_bundle("edge.runtime.VectorsKt", bundle, SKY)
    with open_bundle(bundle) as opened, opened.session() as session:
        expected = session.embed([SKY])[0]
    for line in said["vector"]:
        np.testing.assert_allclose(np.array(line.strip("[]").split(","), np.float32), expected, atol=1e-6)
    assert said["answer"] == ["the model is an encoder, which answers no prompts: call embed"]
