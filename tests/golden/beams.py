"""Write beams.npz: what transformers' beam search answers for `llama-gqa-tied`, for `gemma3`, whose windows are shorter
than the texts, and for `qwen35`, which has recurrent states. Run by `make golden`.

For each case: prompt [n], beams, length_penalty, max_tokens, and the best sequences with their scores: tokens [beams,
max_tokens], padded with −1 behind their end, and scores [beams].
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from fallback import configurations as hybrids
from fallback import settle
from families import configurations as families
from make import random_model, random_tokens, shapes
from transformers import PreTrainedModel

ENDS, USUAL_ENDS = [19, 29, 54, 67, 122, 137], [0, 2]  # tokens that end an answer: the first are common
LLAMA = "llama-gqa-tied"
CASES = [  # model, beams, length penalty, most tokens, ends
    (LLAMA, 2, 1.0, 8, USUAL_ENDS), (LLAMA, 4, 1.0, 12, USUAL_ENDS), (LLAMA, 5, 2.0, 10, USUAL_ENDS),
    (LLAMA, 4, 1.0, 12, ENDS), (LLAMA, 4, 0.0, 12, ENDS), (LLAMA, 3, -1.0, 12, ENDS), (LLAMA, 5, 2.0, 12, ENDS),
    ("gemma3", 4, 1.0, 16, USUAL_ENDS), ("qwen35", 4, 1.0, 16, USUAL_ENDS),
]  # fmt: skip


def golden_model(name: str) -> PreTrainedModel:
    """With the weights of its golden file."""
    found, first = next(each for each in ((shapes(), 1), (families(), 21), (hybrids(), 61)) if name in each[0])
    seed = first + list(found).index(name)
    model = random_model(found[name], seed)
    return settle(model, seed) if first == 61 else model


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found = {}
    for index, (name, beams, penalty, most, ends) in enumerate(CASES):
        prompt = random_tokens(1)[: 10 + index]
        made = golden_model(name).generate(
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
