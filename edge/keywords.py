"""The options of a run as keywords of functions, for type checkers.

Written by `python docs/cli.py` from `edge/options.py`: edit the fields there, not this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from edge.kv.policy import Policy
from edge.model.adapters.lora_file import LoraFile


class Keywords(TypedDict, total=False):
    """See `edge.options.Options`."""

    memory: str | int | None
    gpu_memory: str | int | None
    time: str | float | None
    energy: str | float | None
    power: str | float | None
    max_temp: str | float | None
    kv_policy: str | Policy
    max_kv_size: int | None
    kv_memory: str | int | None
    sinks: int
    keep: int | None
    kv_dtype: str | None
    prefill_step_size: int | None
    prompt_cache: Any
    prompt_cache_size: str | int
    chat_template: str | Path | None
    prefix: str | Path | None
    mmproj: str | Path | None
    image_tokens: str | int | None
    backend: str
    provider: str | None
    gpu_layers: int | None
    lora: str | Path | tuple[LoraFile, ...] | None
    threads: int | None
    speculate: str
    draft: Any
    sequences: int
    expected_tokens: int | None
    expected_prompt: int | None
    logits_rows: int
    loras: int | None
