"""KV policies by name, each in one file that reads like its paper."""

from __future__ import annotations

from dataclasses import fields, replace
from importlib import import_module
from typing import Any, cast

from edge.errors import InputError
from edge.kv.policy import KVView, Needs, Policy

__all__ = ["DEFAULT_SINKS", "POLICY_NAMES", "KVView", "Needs", "Policy", "make_policy", "pinned_rows"]

_POLICIES = {
    "streaming": "StreamingLLM",
    "window": "Window",
    "full": "Full",
    "h2o": "H2O",
    "tova": "TOVA",
    "scissorhands": "Scissorhands",
    "snapkv": "SnapKV",
    "pyramidkv": "PyramidKV",
    "adakv": "AdaKV",
    "fastgen": "FastGen",
    "keydiff": "KeyDiff",
    "knorm": "KNorm",
    "kvzap": "KVzap",
    "quest": "Quest",
}
"""Class of each policy, in the module of the same name. A run imports only its own policy: importing all takes 6 ms."""
POLICY_NAMES = tuple(_POLICIES)
DEFAULT_SINKS = 4  # StreamingLLM's own figure


def make_policy(text: str, sinks: int = DEFAULT_SINKS, keep: int = 0) -> Policy:
    """Create the policy that `NAME[:key=value,…]` describes. Raises InputError for unknown names, keys and values.

    sinks: first rows that are never evicted, unless the text states them; `window` has none. keep: rows to pin, such as
    a system prompt's; raises the sinks of every policy that evicts to at least this number, whatever the text says.
    """
    if keep < 0:
        raise InputError(f"--keep must be 0 or more, not {keep}")
    name, colon, rest = text.partition(":")
    if name not in _POLICIES:
        raise InputError(f"unknown KV policy {name!r}: choose auto, {', '.join(_POLICIES)}")
    make: type[Any] = getattr(import_module(f"edge.kv.{name}"), _POLICIES[name])
    options = {each.name: int if each.type == "int" else float for each in fields(make)}
    chosen: dict[str, int | float] = {"sinks": sinks} if "sinks" in options and name != "window" else {}
    for pair in rest.split(",") if colon else ():
        key, _, value = pair.partition("=")
        if key not in options:
            known = f"choose {', '.join(options)}" if options else "it has none"
            raise InputError(f"KV policy {name} has no option {key!r}: {known}")
        try:
            chosen[key] = options[key](value)
        except ValueError:
            raise InputError(f"KV policy {name}: {key} must be a number, not {value!r}") from None
    policy = make(**chosen)
    return cast(Policy, replace(policy, sinks=keep) if keep > pinned_rows(policy) and policy.evicts else policy)


def pinned_rows(policy: Policy) -> int:
    """The number of first rows that the policy never evicts; 0 if it evicts none."""
    return int(getattr(policy, "sinks", 0))
