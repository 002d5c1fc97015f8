"""KV policies by name: each is one file that reads like its paper."""

from __future__ import annotations

from edge.errors import InputError
from edge.kv.full import Full
from edge.kv.policy import KVView, Policy
from edge.kv.streaming import StreamingLLM
from edge.kv.window import Window

__all__ = ["DEFAULT_SINKS", "POLICY_NAMES", "KVView", "Policy", "make_policy"]

POLICY_NAMES = ("streaming", "window", "full")
DEFAULT_SINKS = 4  # StreamingLLM's own figure


def make_policy(name: str, sinks: int = DEFAULT_SINKS) -> Policy:
    """The policy called `name`. Raises InputError if there is none."""
    if name == "streaming":
        return StreamingLLM(sinks)
    if name == "window":
        return Window()
    if name == "full":
        return Full()
    raise InputError(f"unknown KV policy {name!r}: choose {', '.join(POLICY_NAMES)}")
