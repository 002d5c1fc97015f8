"""Pictures by llama.cpp's mtmd, for encoders that edge does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN

import edge
from edge.backends.llamacpp.eyes import why_not
from edge.converters.huggingface.reader import convert_folder
from edge.errors import UnsupportedError
from edge.model import towers
from edge.run.senses.mtmd import MtmdEyes
from edge.run.starting.senses import open_eyes

pytest.importorskip("llama_cpp")
EYES = GOLDEN / "towers" / "qwen3vl.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    convert_folder(GOLDEN / "pictures" / "qwen3vl", tmp_path / "m.gguf", type="F32")
    return tmp_path / "m.gguf"


def forget_family(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: each for kind, each in towers._FAMILIES[towers.VISION].items() if kind != "qwen3vl_merger"}
    monkeypatch.setitem(towers._FAMILIES, towers.VISION, known)


@pytest.mark.parametrize(("options", "says"), [
    ({"backend": "cpu"}, "not with the encoder 'qwen3vl_merger': --backend[= ]llamacpp may, by its mtmd"),
    ({"backend": "llamacpp"}, "was built without libmtmd: reinstall it"),
    ({"backend": "llamacpp", "memory": "1GiB"}, "what llama.cpp's mtmd takes is not known before it looks"),
])  # fmt: skip
def test_unknown_encoder_is_refused_by_name(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    forget_family(monkeypatch)
    monkeypatch.setenv("MTMD_CPP_LIB", str(tmp_path))
    with pytest.raises(UnsupportedError, match=says):
        open_eyes(edge.open_model(model), edge.Options(mmproj=EYES).updated(**options))


@pytest.mark.skipif(why_not() is not None, reason="llama-cpp-python was built without libmtmd")
def test_answers_about_pictures_are_those_of_our_encoder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (64, 96, 3)).astype(np.uint8)
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": edge.Image(picture)}]}
    ]
    found = []
    for backend in ("reference", "llamacpp"):
        with edge.load(model, mmproj=EYES, backend=backend, kv_dtype="f32", max_kv_size=128) as session:
            assert isinstance(session.model.senses["picture"], MtmdEyes) == (backend == "llamacpp")
            found += ["".join(session.stream(messages=said, max_tokens=12, ignore_eos=True))]
            assert session.report is not None
        forget_family(monkeypatch)
    assert found[0] == found[1]
