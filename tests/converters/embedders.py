"""A decoder that embeds, as sentence-transformers stores it, and its vectors of a text.

`python tests/converters/embedders.py`, with sentence-transformers, writes golden/folders/qwen3-embedding.npz:
tokens, and the vector of each pooling, float32 [hidden].
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edge.types import FloatArray

FOLDERS = Path(__file__).parents[1] / "golden" / "folders"
MODES = ("lasttoken", "mean_tokens")
SKY = "The sky is blue."
END = "<|endoftext|>"  # not the tokenizer's EOS


def write_embedder(folder: Path, mode: str = "lasttoken") -> Path:
    """Qwen3 as its embedding models are published: a pooling, and an end of texts that is not the end of turns."""
    shutil.copytree(FOLDERS / "qwen3", folder)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
              for i, (name, path) in enumerate(modules)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed))

    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    said["post_processor"]["single"].append({"SpecialToken": {"id": END, "type_id": 0}})
    said["post_processor"]["special_tokens"][END] = {"id": END, "ids": [0], "tokens": [END]}
    (folder / "tokenizer.json").write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")
    return folder


def vectors_of_llama_cpp(path: Path, *texts: str) -> list[FloatArray]:
    """Scaled to length 1."""
    llama = pytest.importorskip("llama_cpp")
    with closing(llama.Llama(str(path), embedding=True, n_ctx=96, n_batch=96, n_ubatch=96, verbose=False)) as model:
        return [np.array(model.embed(text, normalize=True)) for text in texts]


def main() -> None:
    from sentence_transformers import SentenceTransformer

    found = {}
    for mode in MODES:
        with tempfile.TemporaryDirectory() as work:
            model = SentenceTransformer(str(write_embedder(Path(work) / "model", mode)), device="cpu")
            model.float()
            found[mode] = model.encode(SKY)
            found["tokens"] = np.array(model.tokenizer(SKY)["input_ids"], np.int32)
    np.savez_compressed(FOLDERS / "qwen3-embedding.npz", **found)


if __name__ == "__main__":
    main()
