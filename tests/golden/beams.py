"""Write beams.npz: what transformers' beam search answers for `llama-gqa-tied`. Run by `make golden`.

For each case: prompt [n], beams, length_penalty, max_tokens, and the best sequences with their scores: tokens [beams,
max_tokens], padded with −1 behind their end, and scores [beams].
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from make import SHAPES, random_model, random_tokens

ENDS, USUAL_ENDS = [19, 29, 54, 67, 122, 137], [0, 2]  # tokens that end an answer: the first are common
CASES = [  # beams, length penalty, most tokens, ends
    (2, 1.0, 8, USUAL_ENDS), (4, 1.0, 12, USUAL_ENDS), (5, 2.0, 10, USUAL_ENDS), (4, 1.0, 12, ENDS), (4, 0.0, 12, ENDS),
    (3, -1.0, 12, ENDS), (5, 2.0, 12, ENDS),
]  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = random_model(SHAPES["llama-gqa-tied"], 1)
    found = {}
    for index, (beams, penalty, most, ends) in enumerate(CASES):
        prompt = random_tokens(1)[: 10 + index]
        made = model.generate(
            torch.tensor(prompt)[None].long(), attention_mask=torch.ones(1, len(prompt)).long(), num_beams=beams,
            num_return_sequences=beams, length_penalty=penalty, max_new_tokens=most, do_sample=False,
            early_stopping=False, eos_token_id=ends, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = np.full((beams, most), -1, np.int32)
        for row, sequence in zip(tokens, made.sequences.tolist(), strict=True):
            said = sequence[len(prompt) :]
            end = next((at + 1 for at, token in enumerate(said) if token in ends), len(said))
            row[:end] = said[:end]
        found[f"{index}.prompt"], found[f"{index}.tokens"] = np.array(prompt, np.int32), tokens
        found[f"{index}.scores"] = made.sequences_scores.numpy().astype(np.float32)
    np.savez_compressed(Path(__file__).parent / "beams.npz", cases=json.dumps(CASES), **found)


if __name__ == "__main__":
    main()
