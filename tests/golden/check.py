"""Load folders that edge wrote (see `back.py`) in transformers: the logits and token ids must be the golden ones.

Run it with torch and transformers installed, as `make golden` does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torture import TEXTS
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDEN = Path(__file__).parent / "folders"
TOLERANCE = 1e-4  # golden logits are rounded to 1.2e-4


def main(written: Path) -> None:
    torch.set_grad_enabled(False)
    for folder in sorted(path for path in written.iterdir() if path.is_dir()):
        with np.load(GOLDEN / f"{folder.name}.npz") as arrays:
            tokens, expected = arrays["tokens"], arrays["logits"]
        model, said = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        logits = model(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False).logits[0].numpy()
        error = np.abs(logits[-len(expected) :] - expected).max()
        ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (folder, GOLDEN / folder.name))
        differ = [text for text in TEXTS if ours(text).input_ids != theirs(text).input_ids]
        print(f"{folder.name}: largest error of a logit {error:.1e}, {len(differ)} texts differ")
        if error > TOLERANCE or differ or any(said.values()):
            raise SystemExit(f"{folder.name} is not what it was: {said}, {differ[:3]!a}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
