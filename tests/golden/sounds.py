"""Sounds of tests, made by formulas: the script that makes golden files and the tests that read them share them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHORT, LONG, LONGER = 13123, 40321, 139001  # samples, none of which are whole frames


def chirp(count: int, pitch: float = 90.0) -> NDArray[np.float32]:
    """A tone that rises, with overtones and pauses, at 16 kHz."""
    time = np.arange(count) / 16000
    phase = 2 * np.pi * pitch * (time + 0.8 * time**2)
    voiced = np.maximum(0.0, np.sin(2 * np.pi * 3.1 * time)) ** 2
    return np.asarray(voiced * sum(np.sin(n * phase) / (2 * n) for n in (1, 2, 3, 5, 9)), np.float32).clip(-1, 1)


def tone() -> NDArray[np.float32]:
    """3.1 s: a loud tone of constant power in each frame, so that all windows have the same maximum, and noise that
    changes below it."""
    time = np.arange(49600) / 16000
    noise = np.random.default_rng(5).normal(0, 1, time.size) * np.sin(2 * np.pi * 0.7 * time)
    return (0.5 * np.sin(2 * np.pi * 1000 * time) + 0.08 * noise).astype(np.float32)


def logits(seed: int, text: tuple[int, ...], size: int = 24) -> NDArray[np.float32]:
    """Of the tokens behind a text, of a model that does not exist; token 0 ends texts, and is likelier the longer they
    are; none is empty."""
    drawn = np.random.default_rng([seed, *text]).normal(0, 2, size)
    drawn[0] += 0.5 * len(text) - 2 if text else -np.inf
    return drawn.astype(np.float32)
