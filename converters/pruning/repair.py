"""Repair a pruned model by distillation (arXiv:1503.02531): train it to predict the whole model's distribution.

Both models go through Hugging Face folders; torch and transformers (the extra `train`) minimise KL(whole ‖ pruned) over
calibration text, all weights, by AdamW with a short warm-up and cosine decay.
"""

from __future__ import annotations

import math
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from edge.converters.calibrate import sequences
from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.writer import write_folder
from edge.errors import MissingExtraError
from edge.formats.gguf import GGUFFile
from edge.model.reader import read_spec
from edge.types import IntArray, Progress

_LENGTH, _BATCH = 256, 4  # tokens that see each other, and sequences per step
_RATE, _WARM_UP = 2e-4, 0.1


def check_installed() -> None:
    """Raise MissingExtraError without torch and transformers."""
    if not all(name in sys.modules or find_spec(name) for name in ("torch", "transformers")):
        raise MissingExtraError("torch and transformers", "train")


def repair(
    whole: GGUFFile, pruned: GGUFFile, target: Path, tokens: IntArray, steps: int, progress: Progress | None = None
) -> None:
    """Write the repaired model as a GGUF file in float32. tokens: calibration text, int32 [n].

    Raises MissingExtraError without torch and transformers, and the errors of write_folder and convert_folder.
    """
    check_installed()
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix=".repair-", dir=target.parent) as folder:
        teacher, student = (
            _model(transformers, torch, file, Path(folder) / name)
            for file, name in ((whole, "whole"), (pruned, "pruned"))
        )
        _learn(torch, teacher, student, sequences(tokens, _LENGTH), steps, progress)
        student.save_pretrained(Path(folder) / "weights")
        (Path(folder) / "weights" / "model.safetensors").replace(Path(folder) / "pruned" / "model.safetensors")
        convert_folder(Path(folder) / "pruned", target)


def _model(transformers: Any, torch: Any, file: GGUFFile, folder: Path) -> Any:
    write_folder(file, read_spec(file), folder, type="F32")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def _learn(torch: Any, teacher: Any, student: Any, texts: IntArray, steps: int, progress: Progress | None) -> None:
    optimizer = torch.optim.AdamW(student.parameters(), lr=_RATE, weight_decay=0.0)
    chance = np.random.default_rng(0)
    student.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * _schedule(step / steps)
        batch = torch.from_numpy(texts[chance.integers(0, len(texts), _BATCH)].astype(np.int64))
        with torch.no_grad():
            wanted = torch.log_softmax(teacher(batch).logits, dim=-1)
        said = torch.log_softmax(student(batch).logits, dim=-1)
        loss = torch.nn.functional.kl_div(said, wanted, reduction="none", log_target=True).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if progress:
            progress((step + 1) / steps)


def _schedule(done: float) -> float:
    """Learning rate as a fraction of its maximum: linear warm-up, then cosine decay."""
    return done / _WARM_UP if done < _WARM_UP else 0.5 + 0.5 * math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))
