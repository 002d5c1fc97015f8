"""Texts that openai-whisper's beam search finds in the logits of sounds.py, which
`tests/run/speech/test_speech.py` compares. It needs torch, NumPy and openai-whisper, and writes
beams_of_whisper.npz beside itself: of each search its seed, size, patience (100 times) and length penalty (100
times; -1: none), the tokens (joined, with their sizes), and the sum of their log-probabilities.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from sounds import logits
from whisper.decoding import BeamSearchDecoder, MaximumLikelihoodRanker

MOST = 20  # tokens


class Nothing:
    """In place of the model: there is no cache to rearrange."""

    def rearrange_kv_cache(self, source: list[int]) -> None:
        pass


def find(seed: int, size: int, patience: float, penalty: float | None) -> tuple[list[int], float]:
    decoder, start = BeamSearchDecoder(size, 0, Nothing(), patience), 1
    tokens, sums = torch.full((size, 1), start), torch.zeros(size)
    for _ in range(MOST):
        scores = np.stack([logits(seed, tuple(text[1:])) for text in tokens.tolist()])
        tokens, completed = decoder.update(tokens, torch.from_numpy(scores), sums)
        if completed:
            break
    found, totals = decoder.finalize(tokens[None], sums[None])
    texts = [[each[1 : (each == 0).nonzero()[0, 0]] for each in group] for group in found]
    (best,) = MaximumLikelihoodRanker(penalty).rank(texts, totals)
    return texts[0][best].tolist(), totals[0][best]


if __name__ == "__main__":
    asked = list(itertools.product(range(20), (2, 5), (1.0, 2.0), (None, 0.6)))
    found = [find(*each) for each in asked]
    np.savez_compressed(
        Path(__file__).with_suffix(".npz"),
        asked=[[seed, size, 100 * patience, -1 if penalty is None else 100 * penalty]
               for seed, size, patience, penalty in asked],
        tokens=np.concatenate([np.array(tokens, np.int32) for tokens, _ in found]),
        sizes=[len(tokens) for tokens, _ in found], totals=[total for _, total in found],
    )  # fmt: skip
